//! A sample of a prompt's keys and queries, which an adapter is fitted to.
//!
//! Prefill shows every key and query of every layer. The sample keeps every `stride`-th token. When it is full, it
//! drops every second token and doubles the stride, so that its memory has a bound for prompts of any length. The same
//! prompt gives the same sample.

use anyhow::{Context, Result};
use rayon::prelude::*;
use stratakv::retrieval::{Adapter, Calibrator, MethodSpec};

use super::error::engine_error;
use super::fitting::fit_adapter;
use super::geometry::{KvGeometry, LayerGeometry};

/// Bytes of all sampled keys, and of all sampled queries.
const SAMPLE_BYTES: usize = 48 << 20;
/// The most tokens of a sample.
const SAMPLE_TOKENS: usize = 2048;
/// Tokens that a fit needs per joint key dimension. Fewer tokens fit the prompt and not the model.
const TOKENS_PER_DIMENSION: usize = 4;

/// Rows of equally spaced tokens.
struct SpacedRows {
    row: usize,
    most: usize,
    stride: usize,
    seen: usize,
    rows: Vec<f32>,
}

impl SpacedRows {
    fn new(row: usize, layers: usize) -> Self {
        let most = SAMPLE_BYTES / (4 * row.max(1) * layers.max(1));
        Self { row: row.max(1), most: most.clamp(2, SAMPLE_TOKENS), stride: 1, seen: 0, rows: Vec::new() }
    }

    fn add(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.row) {
            if self.seen.is_multiple_of(self.stride) {
                if self.rows.len() == self.most * self.row {
                    self.halve();
                }
                if self.seen.is_multiple_of(self.stride) {
                    self.rows.extend_from_slice(row);
                }
            }
            self.seen += 1;
        }
    }

    /// Drops every second row.
    fn halve(&mut self) {
        let kept: Vec<f32> = self.rows.chunks_exact(self.row).step_by(2).flatten().copied().collect();
        self.rows = kept;
        self.stride *= 2;
    }
}

/// A sample of one layer.
struct LayerSample {
    shape: LayerGeometry,
    keys: SpacedRows,
    queries: SpacedRows,
}

/// A sample of a prompt, and the method that an adapter is fitted for.
pub struct PromptSample {
    spec: MethodSpec,
    query_heads: usize,
    layers: Vec<LayerSample>,
}

impl PromptSample {
    /// Makes an empty sample.
    #[must_use]
    pub fn new(geometry: &KvGeometry, spec: MethodSpec) -> Self {
        let (heads, count) = (geometry.query_heads, geometry.layers.len());
        let layer = |&shape: &LayerGeometry| LayerSample {
            shape,
            keys: SpacedRows::new(shape.width(), count),
            queries: SpacedRows::new(heads * shape.head_dim, count),
        };
        Self { spec, query_heads: heads, layers: geometry.layers.iter().map(layer).collect() }
    }

    /// Returns the method.
    #[must_use]
    pub fn spec(&self) -> MethodSpec {
        self.spec
    }

    /// Takes keys of a layer, `[tokens, kv_heads, head_dim]`.
    pub fn add_keys(&mut self, layer: usize, keys: &[f32]) {
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.keys.add(keys);
        }
    }

    /// Takes queries of a layer, `[tokens, query_heads, head_dim]`.
    pub fn add_queries(&mut self, layer: usize, queries: &[f32]) {
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.queries.add(queries);
        }
    }

    /// Returns the tokens that the sample was taken of, and the tokens that a fit needs.
    #[must_use]
    pub fn tokens(&self) -> (usize, usize) {
        let seen = self.layers.iter().map(|layer| layer.keys.seen.min(layer.queries.seen)).min();
        let width = self.layers.iter().map(|layer| layer.shape.width()).max();
        (seen.unwrap_or(0), TOKENS_PER_DIMENSION * width.unwrap_or(0))
    }

    /// Fits the adapter, one layer per thread.
    ///
    /// # Errors
    /// Fails if the method needs no adapter, or as [`fit_adapter`] does.
    pub fn fit(&self) -> Result<Adapter> {
        let name = self.spec.adapter_name().context("the method needs no adapter")?;
        let (fit, number) = self.spec.adapter_fit();
        let number = number.context("the method has no number to fit an adapter with")?;
        let fit_layer = |layer: &LayerSample| {
            let mut calibrator = Calibrator::new(&[(layer.shape.kv_heads, layer.shape.head_dim)]);
            calibrator.keys(0, &layer.keys.rows);
            calibrator.queries(0, &layer.queries.rows, self.query_heads, false);
            let adapter = fit_adapter(&calibrator, &name, (fit, number), layer.shape)?;
            adapter.layers().first().cloned().context("an adapter without layers")
        };
        let layers = self.layers.par_iter().map(fit_layer).collect::<Result<Vec<_>>>()?;
        Adapter::new(name.clone(), 1, layers).map_err(engine_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvDType;

    #[test]
    fn a_sample_is_spaced_evenly_and_bounded() {
        let mut rows = SpacedRows::new(2, 1);
        rows.most = 4;
        for token in 0..37 {
            rows.add(&[token as f32, 0.5]);
        }
        assert_eq!(rows.rows.iter().step_by(2).copied().collect::<Vec<_>>(), [0.0, 16.0, 32.0]);
        let mut whole = SpacedRows::new(2, 1);
        whole.most = 4;
        whole.add(&(0..37).flat_map(|token| [token as f32, 0.5]).collect::<Vec<_>>());
        assert_eq!((rows.rows, rows.seen), (whole.rows, whole.seen));
    }

    #[test]
    fn a_fit_needs_keys_and_queries_of_every_layer() {
        let shape = LayerGeometry { kv_heads: 2, head_dim: 8, window: None };
        let geometry =
            KvGeometry { layers: vec![shape; 2], query_heads: 4, scale: 1.0, dtype: KvDType::F32, rope: None };
        let mut sample = PromptSample::new(&geometry, "tck:16".parse().unwrap());
        let mut random = fastrand::Rng::with_seed(3);
        let mut noise = |count: usize| (0..count).map(|_| random.f32() - 0.5).collect::<Vec<f32>>();
        sample.add_keys(0, &noise(100 * 16));
        assert_eq!(sample.tokens(), (0, 64));
        sample.add_queries(0, &noise(100 * 32));
        sample.add_keys(1, &noise(90 * 16));
        sample.add_queries(1, &noise(90 * 32));
        assert_eq!(sample.tokens(), (90, 64));
        let adapter = sample.fit().unwrap();
        assert_eq!((adapter.name(), adapter.layers().len()), ("tck-16", 2));
        assert_eq!(sample.fit().unwrap(), adapter, "the same sample gives the same adapter");
        assert!(PromptSample::new(&geometry, "minmax".parse().unwrap()).fit().is_err());
    }
}
