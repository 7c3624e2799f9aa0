//! Keys and values in memory: the reference against which a store is measured.
//!
//! A [`MemoryKv`] attends in one of two ways:
//!
//! - With the kernels of this crate (`simd.rs`). They check the engine's kernels, because they share no code with
//!   them. Their sums are in another order and differ in the last bits. A difference of 1e-7 can round a later key to
//!   the next f16, and logits then differ by 1e-3.
//! - With the engine's kernels in the groups of a store ([`MemoryKv::with_groups`]). Such a cache equals the store to
//!   the bit.
//!
//! The steps of [`MemoryKv::attend_ranges`]:
//!
//! 1. Keys are converted to f32 in tiles of tokens, and every query head gets its scores.
//! 2. Each head's scores become softmax weights.
//! 3. Values are converted in the same tiles and added up by weight.
//! 4. The sums are divided by the sum of the weights.

use std::ops::Range;

use anyhow::{Result, ensure};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use super::cache::{Committed, KvCache, KvStats};
use super::geometry::{KvDType, KvGeometry};
use super::grouped::GroupedLayer;
use crate::budget::Budget;
use crate::simd::{Dots, ExpScores, WeightedSum};

/// Tokens that are converted to f32 at a time.
const TILE: usize = 256;

/// The rule that chooses which tokens a query attends to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryPolicy {
    /// All tokens.
    Full,
    /// The first `sinks` tokens and the newest ones, within the budget (StreamingLLM, Xiao et al. 2023).
    Window {
        /// Tokens kept from the beginning.
        sinks: usize,
        /// Attended tokens per step, sinks included.
        budget: Budget,
    },
}

/// The keys or the values of one layer, `[tokens, kv_heads, head_dim]`.
#[derive(Clone, Debug)]
enum Plane {
    F32(Vec<f32>),
    F16(Vec<u16>),
    Bf16(Vec<u16>),
}

impl Plane {
    fn new(dtype: KvDType) -> Self {
        match dtype {
            KvDType::F32 => Self::F32(Vec::new()),
            KvDType::F16 => Self::F16(Vec::new()),
            KvDType::Bf16 => Self::Bf16(Vec::new()),
        }
    }

    fn push(&mut self, values: &[f32]) {
        match self {
            Self::F32(v) => v.extend_from_slice(values),
            Self::F16(v) => v.extend(values.iter().map(|&x| f16::from_f32(x).to_bits())),
            Self::Bf16(v) => v.extend(values.iter().map(|&x| bf16::from_f32(x).to_bits())),
        }
    }

    fn read(&self, range: Range<usize>, out: &mut [f32]) {
        match self {
            Self::F32(v) => out.copy_from_slice(&v[range]),
            Self::F16(v) => v[range].reinterpret_cast::<f16>().convert_to_f32_slice(out),
            Self::Bf16(v) => v[range].reinterpret_cast::<bf16>().convert_to_f32_slice(out),
        }
    }
}

#[derive(Clone, Debug)]
struct MemoryLayer {
    keys: Plane,
    values: Plane,
    tokens: usize,
}

/// A KV cache that keeps every token in memory, in the geometry's dtype, and attends in f32.
#[derive(Clone, Debug)]
pub struct MemoryKv {
    geometry: KvGeometry,
    policy: MemoryPolicy,
    layers: Vec<MemoryLayer>,
    /// The same keys and values in a store's groups, one entry per layer. If it is empty, this crate's kernels attend.
    grouped: Vec<GroupedLayer>,
    committed: Option<Committed>,
    attends: u64,
    bytes_read: u64,
}

impl MemoryKv {
    /// Makes an empty cache.
    #[must_use]
    pub fn new(geometry: KvGeometry, policy: MemoryPolicy) -> Self {
        let dtype = geometry.dtype;
        let layer = MemoryLayer { keys: Plane::new(dtype), values: Plane::new(dtype), tokens: 0 };
        let layers = vec![layer; geometry.layers.len()];
        Self { geometry, policy, layers, grouped: Vec::new(), committed: None, attends: 0, bytes_read: 0 }
    }

    /// Makes this empty cache attend with the engine's kernels, in groups of `group_tokens` and in the engine's parts.
    ///
    /// Its outputs then equal the outputs of a store with the same groups to the bit, if the store returns the bytes
    /// that were appended.
    ///
    /// # Errors
    /// Fails if the policy is not full attention, if the cache holds tokens, or if the engine does not support a size.
    pub fn with_groups(mut self, group_tokens: usize) -> Result<Self> {
        ensure!(self.policy == MemoryPolicy::Full, "with_groups: the policy must be full attention");
        ensure!(self.layers.iter().all(|l| l.tokens == 0), "with_groups: the cache must be empty");
        self.grouped = GroupedLayer::layers(&self.geometry, group_tokens)?;
        Ok(self)
    }

    /// Returns the tokens of one layer, which must exist.
    pub(super) fn layer_len(&self, layer: usize) -> usize {
        self.layers[layer].tokens
    }

    /// Returns the keys of some tokens of one layer, `[tokens, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Fails if the layer or the tokens do not exist.
    pub fn keys(&self, layer: usize, tokens: Range<usize>) -> Result<Vec<f32>> {
        self.plane(layer, tokens, |l| &l.keys)
    }

    /// Returns the values of some tokens of one layer, `[tokens, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Fails if the layer or the tokens do not exist.
    pub fn values(&self, layer: usize, tokens: Range<usize>) -> Result<Vec<f32>> {
        self.plane(layer, tokens, |l| &l.values)
    }

    fn plane(&self, layer: usize, tokens: Range<usize>, pick: impl Fn(&MemoryLayer) -> &Plane) -> Result<Vec<f32>> {
        let held = self.layers.get(layer).map_or(0, |l| l.tokens);
        ensure!(tokens.start <= tokens.end && tokens.end <= held, "layer {layer} holds {held} tokens, not {tokens:?}");
        let width = self.geometry.layers[layer].width();
        let mut out = vec![0.0; tokens.len() * width];
        pick(&self.layers[layer]).read(tokens.start * width..tokens.end * width, &mut out);
        Ok(out)
    }

    /// Attends to disjoint token ranges of one layer, independent of the policy. It counts as part of a decode step.
    ///
    /// # Errors
    /// Fails if a length does not fit the geometry, if a range exceeds the layer's tokens, or if there is no token.
    pub fn attend_ranges(
        &mut self,
        layer: usize,
        ranges: &[Range<usize>],
        queries: &[f32],
        out: &mut [f32],
    ) -> Result<()> {
        self.geometry.check_attend(layer, queries, out)?;
        let shape = self.geometry.layers[layer];
        let held = &self.layers[layer];
        let count: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        ensure!(count > 0, "layer {layer}: there is no token to attend to");
        ensure!(
            ranges.iter().all(|r| r.end <= held.tokens),
            "layer {layer} holds {} tokens, not {ranges:?}",
            held.tokens
        );
        let (dim, width) = (shape.head_dim, shape.width());
        let group = self.geometry.query_heads / shape.kv_heads;
        let arch = pulp::Arch::new();
        let factor = self.geometry.scale * std::f32::consts::LOG2_E;
        let queries: Vec<f32> = queries.iter().map(|q| q * factor).collect();
        let tiles: Vec<Range<usize>> =
            ranges.iter().flat_map(|r| r.clone().step_by(TILE).map(move |s| s..r.end.min(s + TILE))).collect();

        let mut tile = vec![0.0f32; TILE * width];
        let mut scores = vec![0.0f32; self.geometry.query_heads * count];
        let mut at = 0;
        for r in &tiles {
            let tile = &mut tile[..r.len() * width];
            held.keys.read(r.start * width..r.end * width, tile);
            for (head, query) in queries.chunks_exact(dim).enumerate() {
                let scores = &mut scores[head * count + at..][..r.len()];
                arch.dispatch(Dots { query, keys: &tile[head / group * dim..], stride: width, scores });
            }
            at += r.len();
        }
        let sums: Vec<f32> = scores.chunks_exact_mut(count).map(|scores| arch.dispatch(ExpScores { scores })).collect();
        out.fill(0.0);
        let mut at = 0;
        for r in &tiles {
            let tile = &mut tile[..r.len() * width];
            held.values.read(r.start * width..r.end * width, tile);
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                let weights = &scores[head * count + at..][..r.len()];
                arch.dispatch(WeightedSum { weights, values: &tile[head / group * dim..], stride: width, out });
            }
            at += r.len();
        }
        for (out, sum) in out.chunks_exact_mut(dim).zip(sums) {
            out.iter_mut().for_each(|x| *x /= sum);
        }
        self.count(layer, count);
        Ok(())
    }

    /// Counts an attention over `tokens` tokens.
    fn count(&mut self, layer: usize, tokens: usize) {
        self.attends += 1;
        self.bytes_read += (tokens * 2 * self.geometry.layers[layer].width() * self.geometry.dtype.bytes()) as u64;
    }

    /// Returns what the newest token of this layer attends to: tokens from the beginning, which may be none, and the
    /// newest.
    fn visible(&self, layer: usize) -> [Range<usize>; 2] {
        let tokens = self.layers[layer].tokens;
        let oldest = self.geometry.layers[layer].window.map_or(0, |w| tokens.saturating_sub(w));
        match self.policy {
            MemoryPolicy::Full => [0..0, oldest..tokens],
            MemoryPolicy::Window { sinks, budget } => {
                let budget = budget.tokens(tokens);
                if budget >= tokens - oldest {
                    return [0..0, oldest..tokens];
                }
                // The newest token is always attended to.
                let sinks = if oldest == 0 { sinks.min(budget - 1) } else { 0 };
                let newest = tokens - (budget - sinks);
                [0..sinks, newest..tokens]
            }
        }
    }
}

impl KvCache for MemoryKv {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn len(&self) -> usize {
        self.layers.iter().map(|l| l.tokens).min().unwrap_or(0)
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        self.geometry.check_append(layer, keys, values, tokens)?;
        let held = &mut self.layers[layer];
        held.keys.push(keys);
        held.values.push(values);
        held.tokens += tokens;
        if let Some(grouped) = self.grouped.get_mut(layer) {
            grouped.push(keys, values);
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        self.geometry.check_attend(layer, queries, out)?;
        let visible = self.visible(layer);
        let Some(grouped) = self.grouped.get(layer) else {
            return self.attend_ranges(layer, &visible, queries, out);
        };
        // Only full attention has groups, and it attends to one range that ends with the newest token.
        let [_, range] = visible;
        grouped.attend(range.start, queries, out)?;
        self.count(layer, range.len());
        Ok(())
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        let mut ids = self.committed.take().map(|c| c.ids).unwrap_or_default();
        ids.extend_from_slice(new_ids);
        ensure!(ids.len() == self.len(), "the commit names {} tokens, the cache holds {}", ids.len(), self.len());
        self.committed = Some(Committed { ids, state: state.to_vec() });
        Ok(())
    }

    fn committed(&self) -> Result<Option<Committed>> {
        Ok(self.committed.clone())
    }

    fn stats(&self) -> KvStats {
        let bytes: usize =
            self.layers.iter().zip(&self.geometry.layers).map(|(l, g)| l.tokens * 2 * g.width()).sum::<usize>()
                * self.geometry.dtype.bytes();
        KvStats {
            kv_bytes_total: bytes as u64,
            bytes_read: self.bytes_read,
            steps: self.attends.checked_div(self.layers.len() as u64).unwrap_or(0),
            resident_bytes_peak: bytes as u64,
            pipeline: None,
        }
    }

    fn finish(self: Box<Self>, _keep: bool) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::geometry::LayerGeometry;

    fn geometry(window: Option<usize>, dtype: KvDType) -> KvGeometry {
        let layer = LayerGeometry { kv_heads: 1, head_dim: 2, window };
        KvGeometry { layers: vec![layer], query_heads: 2, scale: 1.0, dtype, rope: None }
    }

    fn filled(tokens: usize, window: Option<usize>, policy: MemoryPolicy) -> MemoryKv {
        let mut kv = MemoryKv::new(geometry(window, KvDType::F32), policy);
        for t in 0..tokens {
            // Equal keys: the output is the mean of the values seen.
            kv.append(0, &[1.0, 1.0], &[t as f32, 1.0], 1).unwrap();
        }
        kv
    }

    fn mean(kv: &mut MemoryKv) -> f32 {
        let mut out = [0.0; 4];
        kv.attend(0, &[0.5; 4], &mut out).unwrap();
        assert!((out[1] - 1.0).abs() < 1e-6, "weights sum to {}", out[1]);
        assert_eq!(out[..2], out[2..]);
        out[0]
    }

    #[test]
    fn full_attention_sees_all_tokens_and_a_sliding_window_the_newest() {
        assert!((mean(&mut filled(1000, None, MemoryPolicy::Full)) - 499.5).abs() < 1e-3);
        assert!((mean(&mut filled(1000, Some(3), MemoryPolicy::Full)) - 998.0).abs() < 1e-3);
    }

    #[test]
    fn the_window_policy_counts_every_attended_token() {
        let window = |budget: &str| MemoryPolicy::Window { sinks: 4, budget: budget.parse().unwrap() };
        for (tokens, budget, seen) in [
            (100, "1/10", [0..4, 94..100]),
            (100, "200t", [0..0, 0..100]),
            (100, "1t", [0..0, 99..100]),
            (100, "3t", [0..2, 99..100]),
            (5, "1/13", [0..0, 4..5]),
        ] {
            let kv = filled(tokens, None, window(budget));
            assert_eq!(kv.visible(0), seen, "{tokens} tokens, budget {budget}");
        }
        assert_eq!(filled(100, Some(20), window("10t")).visible(0), [0..0, 90..100]);
    }

    #[test]
    fn stored_keys_and_values_are_rounded_and_counted() {
        let mut kv = MemoryKv::new(geometry(None, KvDType::Bf16), MemoryPolicy::Full);
        let x = 1.0 + 1.0 / 1024.0;
        kv.append(0, &[x, 2.0], &[x, 3.0], 1).unwrap();
        assert_eq!(kv.keys(0, 0..1).unwrap(), [1.0, 2.0]);
        assert_eq!(kv.stats().kv_bytes_total, 8);
        mean_bytes(&mut kv);
    }

    fn mean_bytes(kv: &mut MemoryKv) {
        let mut out = [0.0; 4];
        kv.attend(0, &[0.0; 4], &mut out).unwrap();
        assert_eq!(out, [1.0, 3.0, 1.0, 3.0]);
        assert_eq!((kv.stats().bytes_read_per_step(), kv.stats().steps), (8, 1));
    }

    #[test]
    fn bad_input_is_refused() {
        let mut kv = MemoryKv::new(geometry(None, KvDType::F32), MemoryPolicy::Full);
        assert!(kv.append(1, &[0.0; 2], &[0.0; 2], 1).is_err());
        assert!(kv.append(0, &[0.0; 3], &[0.0; 2], 1).is_err());
        let error = kv.append(0, &[0.0; 4], &[0.0, 0.0, f32::NAN, 0.0], 2).unwrap_err().to_string();
        assert!(error.contains("appended token 1") && error.contains("not finite"), "{error}");
        assert!(kv.attend(0, &[0.0; 4], &mut [0.0; 4]).is_err(), "an empty layer");
        assert!(kv.attend(0, &[0.0; 3], &mut [0.0; 4]).is_err());
        assert_eq!(kv.len(), 0);
    }
}
