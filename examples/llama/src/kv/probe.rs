//! Measures what a selection misses: full attention in memory on the same query, compared with the selection's output.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::cache::KvCache;
use super::memory::MemoryKv;

/// Sums over the attends that a probe saw.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProbeSums {
    /// The share of full attention's weight on the selected tokens, as a mean over query heads.
    pub mass: f64,
    /// The relative error of the attention output.
    pub error: f64,
    /// The attends.
    pub attends: u64,
    /// The time that probing took.
    pub time: Duration,
}

/// A copy of a cache in memory, and the sums of what was measured with it.
pub struct Probe {
    mirror: MemoryKv,
    sums: ProbeSums,
}

impl Probe {
    /// Makes a probe with a cache that holds the same tokens.
    #[must_use]
    pub fn new(mirror: MemoryKv) -> Self {
        Self { mirror, sums: ProbeSums::default() }
    }

    pub(super) fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        let begin = Instant::now();
        self.mirror.append(layer, keys, values, tokens)?;
        self.sums.time += begin.elapsed();
        Ok(())
    }

    /// Takes in one attend: `got` is the attention output over `entries(kv_head)`, the positions of each KV head.
    pub(super) fn attended(
        &mut self,
        layer: usize,
        queries: &[f32],
        entries: impl Fn(usize) -> Vec<u64>,
        got: &[f32],
    ) -> Result<()> {
        let begin = Instant::now();
        let mut full = vec![0.0; got.len()];
        self.mirror.attend(layer, queries, &mut full)?;
        let square = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>();
        let difference: Vec<f32> = full.iter().zip(got).map(|(a, b)| a - b).collect();
        self.sums.error += (square(&difference) / square(&full).max(f64::MIN_POSITIVE)).sqrt();
        self.sums.mass += kept_weight(&self.mirror, layer, queries, entries)?;
        self.sums.attends += 1;
        self.sums.time += begin.elapsed();
        Ok(())
    }

    /// Returns the sums over all attends.
    #[must_use]
    pub fn sums(&self) -> ProbeSums {
        self.sums
    }
}

/// Returns the share of full attention's weight on `entries(kv_head)`, as a mean over query heads. `mirror` holds
/// every token.
///
/// # Errors
/// Fails if `mirror` lacks the layer.
pub(crate) fn kept_weight(
    mirror: &MemoryKv,
    layer: usize,
    queries: &[f32],
    entries: impl Fn(usize) -> Vec<u64>,
) -> Result<f64> {
    let geometry = mirror.geometry();
    let (shape, tokens) = (geometry.layer(layer)?, mirror.layer_len(layer));
    let first = shape.window.map_or(0, |window| tokens.saturating_sub(window));
    let keys = mirror.keys(layer, first..tokens)?;
    let chosen: Vec<Vec<bool>> = (0..shape.kv_heads)
        .map(|head| {
            let mut chosen = vec![false; tokens - first];
            let slots = entries(head).into_iter().filter_map(|at| usize::try_from(at).ok()?.checked_sub(first));
            slots.for_each(|slot| chosen[slot] = true);
            chosen
        })
        .collect();
    let (dim, ratio) = (shape.head_dim, geometry.query_heads / shape.kv_heads);
    let mut mass = 0.0;
    for (head, query) in queries.chunks_exact(dim).enumerate() {
        let start = head / ratio * dim;
        let dot = |key: &[f32]| key[start..start + dim].iter().zip(query).map(|(k, q)| k * q).sum::<f32>();
        let scores: Vec<f32> = keys.chunks_exact(shape.width()).map(|key| dot(key) * geometry.scale).collect();
        let max = scores.iter().copied().fold(f32::MIN, f32::max);
        let (mut inside, mut all) = (0.0_f64, 0.0_f64);
        for (score, chosen) in scores.iter().zip(&chosen[head / ratio]) {
            let weight = f64::from((score - max).exp());
            all += weight;
            inside += if *chosen { weight } else { 0.0 };
        }
        mass += inside / all;
    }
    Ok(mass / geometry.query_heads as f64)
}
