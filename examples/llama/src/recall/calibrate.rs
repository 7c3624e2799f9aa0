//! Calibration: keys and queries of prompts that no figure is reported on, to adapters.

use anyhow::Result;
use stratakv::retrieval::{Adapter, Calibrator, CodeOptions};

use super::prompts::Prompt;
use crate::kv::memory::MemoryPolicy;
use crate::kv::store::engine_error;
use crate::kv::{Committed, KvCache, KvDType, KvGeometry, KvStats, MemoryKv};
use crate::model::{Model, Wanted};

/// One prompt query in so many is taken.
const QUERY_STRIDE: usize = 7;

/// A cache that shows its calibrator what passes.
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

/// Runs the prompts with full attention and collects moments of keys (all) and queries (one in seven of the prompt, all of
/// the decode steps).
///
/// # Errors
/// As [`Model::prefill`] and [`Model::decode`].
pub fn collect(model: &Model, prompts: &[Prompt], dtype: KvDType, progress: &dyn Fn(usize)) -> Result<Calibrator> {
    let geometry = model.kv_geometry(dtype);
    let layers: Vec<(usize, usize)> = geometry.layers.iter().map(|l| (l.kv_heads, l.head_dim)).collect();
    let mut calibrator = Calibrator::new(&layers);
    for prompt in prompts {
        let inner = MemoryKv::new(geometry.clone(), MemoryPolicy::Full);
        let mut tap = Tap { inner, calibrator: &mut calibrator };
        model.prefill(&prompt.prompt[..prompt.query_start], &mut [&mut tap], Wanted::Queries, &|_| {})?;
        for id in prompt.fed() {
            model.decode(id, &mut tap)?;
        }
        progress(prompt.query_start);
    }
    Ok(calibrator)
}

/// The adapters of KVSwap and of per-head partial keys for each sigma, and codebooks for each number of bits. Ranks are the
/// joint key dimensions over sigma.
///
/// # Errors
/// Values that do not suit the model.
pub fn fit(calibrator: &Calibrator, geometry: &KvGeometry, sigmas: &[usize], bits: &[usize]) -> Result<Vec<Adapter>> {
    let layer = geometry.layers.first().copied();
    let (width, heads) = layer.map_or((0, 1), |l| (l.width(), l.kv_heads));
    let mut adapters = Vec::new();
    for &sigma in sigmas {
        let rank = (width / sigma.max(1)).max(1);
        adapters.push(calibrator.low_rank(&format!("kvswap-{sigma}"), 1, rank).map_err(engine_error)?);
        let rank = rank.next_multiple_of(heads);
        adapters.push(calibrator.per_head(&format!("infinigen-{sigma}"), 1, rank).map_err(engine_error)?);
    }
    for &bits in bits {
        let options = CodeOptions { bits, dimension_bits_max: 4, decode_only: false };
        adapters.push(calibrator.codes(&format!("tck-{bits}"), 1, options).map_err(engine_error)?);
    }
    Ok(adapters)
}
