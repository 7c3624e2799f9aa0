//! Calibration: fits adapters to the keys and queries of calibration prompts. No figure is reported on these prompts.
//!
//! 1. [`collect`] runs the prompts with full attention. A [`Tap`] around the cache shows keys and queries to the
//!    calibrator.
//! 2. [`fit`] computes adapters from the collected moments.

use anyhow::Result;
use stratakv::retrieval::{Adapter, AdapterFit, Calibrator, methods};

use super::prompts::Prompt;
use crate::kv::fitting::fit_adapter;
use crate::kv::memory::MemoryPolicy;
use crate::kv::{Committed, KvCache, KvDType, KvGeometry, KvStats, LayerGeometry, MemoryKv};
use crate::model::{LogitPositions, Model};

/// Of this many prompt queries one is used.
const QUERY_STRIDE: usize = 7;

/// A cache that shows keys and queries to a calibrator.
struct Tap<'a> {
    inner: MemoryKv,
    calibrator: &'a mut Calibrator,
}

impl KvCache for Tap<'_> {
    fn geometry(&self) -> &KvGeometry {
        self.inner.geometry()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        self.calibrator.keys(layer, keys);
        self.inner.append(layer, keys, values, tokens)
    }

    fn observe(&mut self, layer: usize, queries: &[f32]) {
        let heads = self.inner.geometry().query_heads;
        let row = heads * self.inner.geometry().layers[layer].head_dim;
        for query in queries.chunks_exact(row).step_by(QUERY_STRIDE) {
            self.calibrator.queries(layer, query, heads, false);
        }
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        let heads = self.inner.geometry().query_heads;
        self.calibrator.queries(layer, queries, heads, true);
        self.inner.attend(layer, queries, out)
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        self.inner.commit(new_ids, state)
    }

    fn committed(&self) -> Result<Option<Committed>> {
        self.inner.committed()
    }

    fn stats(&self) -> KvStats {
        self.inner.stats()
    }

    fn finish(self: Box<Self>, keep: bool) -> Result<()> {
        Box::new(self.inner).finish(keep)
    }
}

/// Runs the prompts with full attention and collects moments. It uses all keys, all queries of decode steps, and one
/// in seven queries of prefill.
///
/// # Errors
/// Fails as [`Model::prefill`] and [`Model::decode`] do.
pub fn collect(model: &Model, prompts: &[Prompt], dtype: KvDType, progress: &dyn Fn(usize)) -> Result<Calibrator> {
    let geometry = model.kv_geometry(dtype);
    let layers: Vec<(usize, usize)> = geometry.layers.iter().map(|l| (l.kv_heads, l.head_dim)).collect();
    let mut calibrator = Calibrator::new(&layers);
    for prompt in prompts {
        let inner = MemoryKv::new(geometry.clone(), MemoryPolicy::Full);
        let mut tap = Tap { inner, calibrator: &mut calibrator };
        model.prefill(&prompt.prompt[..prompt.query_start], &mut [&mut tap], LogitPositions::Queries, &|_| {})?;
        for id in prompt.fed() {
            model.decode(id, &mut tap)?;
        }
        progress(prompt.query_start);
    }
    Ok(calibrator)
}

/// Fits the adapters of every method in the registry: low-rank keys for each rank ratio, and codebooks for each
/// number of bits. A rank is the joint key dimensions divided by the rank ratio.
///
/// # Errors
/// Fails if a rank ratio or a number of bits does not suit the model.
pub fn fit(
    calibrator: &Calibrator,
    geometry: &KvGeometry,
    rank_ratios: &[usize],
    bits: &[usize],
) -> Result<Vec<Adapter>> {
    let none = LayerGeometry { kv_heads: 1, head_dim: 0, window: None };
    let layer = geometry.layers.first().copied().unwrap_or(none);
    let mut adapters = Vec::new();
    for method in methods().iter().filter(|method| method.adapter != AdapterFit::None) {
        let numbers = if method.adapter == AdapterFit::Codes { bits } else { rank_ratios };
        for &number in numbers {
            let name = format!("{}-{number}", method.name);
            adapters.push(fit_adapter(calibrator, &name, (method.adapter, number), layer)?);
        }
    }
    Ok(adapters)
}
