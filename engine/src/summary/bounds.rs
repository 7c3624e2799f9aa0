//! Element-wise bounds of the keys of each group and of runs of 2, 4, 8 ... groups (LeoAM, section 4; Quest): a tree of
//! them for selectors that look closer only where it matters.

use super::keys::{KeyGroup, KeyShape, KeySummary, Records, SummaryKind, widen};
use super::min_max::{MinMax, extremes, ordered};
use super::stored::StoredAs;
use crate::error::Result;
use std::ops::Range;
use stratakv_format::DType;
use stratakv_format::frame::{SUMMARY_MIN_MAX, SummaryRecords};

/// The kind of summary that keeps minima and maxima. `levels` is 1 for groups alone; each further one covers runs twice as
/// long, at half the memory of the level below.
#[derive(Clone, Copy, Debug)]
pub struct KeyBounds {
    /// Levels, 1 to 16.
    pub levels: usize,
}

impl SummaryKind for KeyBounds {
    fn id(&self) -> String {
        format!("bounds/{}", self.levels)
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn KeySummary>> {
        let levels = vec![Records::new(2 * shape.width()); self.levels.clamp(1, 16)];
        Ok(Box::new(Bounds { shape, element: MinMax::element(shape.dtype), levels }))
    }
}

/// Records as those of min/max: minima `[kv_heads, key_dim]`, then maxima, 16 bits, rounded outward.
pub(crate) struct Bounds {
    shape: KeyShape,
    element: DType,
    /// By level; record `i` of level `l` is of groups `i << l` to `(i + 1) << l`.
    levels: Vec<Records<u16>>,
}

/// What is known about `q . k` of every token of a run of groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub(crate) lower: f32,
    pub(crate) upper: f32,
}

impl Bounds {
    pub(crate) fn levels(&self) -> usize {
        self.levels.len()
    }

    /// Whole runs of a level.
    pub(crate) fn runs(&self, level: usize) -> usize {
        self.levels.get(level).map_or(0, Records::count)
    }

    /// Bounds per query head, `[q_heads]`, of a run.
    pub(crate) fn intervals(&self, query: &[f32], level: usize, run: usize, out: &mut Vec<Interval>) {
        let (dim, width) = (self.shape.key_dim, self.shape.width());
        let record = self.levels[level].slice(run..run + 1);
        let mut wide = vec![0.0; 2 * width];
        widen(bytemuck::cast_slice(record), self.element, &mut wide);
        let (minima, maxima) = wide.split_at(width);
        let ratio = query.len() / width;
        out.clear();
        for (head, row) in query.chunks_exact(dim).enumerate() {
            let start = head / ratio * dim;
            let (minima, maxima) = (&minima[start..][..dim], &maxima[start..][..dim]);
            let mut interval = Interval { lower: 0.0, upper: 0.0 };
            for ((q, low), high) in row.iter().zip(minima).zip(maxima) {
                let (a, b) = (q * low, q * high);
                interval.lower += a.min(b);
                interval.upper += a.max(b);
            }
            out.push(interval);
        }
    }
}

impl Bounds {
    /// Fills the levels above after a group was added.
    fn merge(&mut self) {
        let width = self.shape.width();
        for level in 1..self.levels.len() {
            let below = self.levels[level - 1].count();
            if !below.is_multiple_of(2) {
                break;
            }
            let pair = self.levels[level - 1].slice(below - 2..below).to_vec();
            let (left, right) = pair.split_at(2 * width);
            for (at, out) in self.levels[level].add().iter_mut().enumerate() {
                let (a, b) = (left[at], right[at]);
                let left_is_less = ordered(a) <= ordered(b);
                *out = if left_is_less == (at < width) { a } else { b };
            }
        }
    }
}

impl KeySummary for Bounds {
    fn groups(&self) -> usize {
        self.levels[0].count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let width = self.shape.width();
        let (minima, maxima) = self.levels[0].add().split_at_mut(width);
        extremes(group.plane(), self.shape.kv_heads, self.shape.group_tokens, self.shape.dtype, minima, maxima);
        self.merge();
    }

    fn truncate(&mut self, groups: usize) {
        for (level, records) in self.levels.iter_mut().enumerate() {
            records.truncate((groups >> level).min(records.count()));
        }
    }

    fn bytes(&self) -> usize {
        self.levels.iter().map(Records::bytes).sum()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.levels.iter().enumerate().map(|(level, records)| records.bytes_for((groups >> level) + 1)).sum()
    }

    fn stored_as(&self) -> Option<StoredAs> {
        let record_bytes = (self.levels[0].record_bytes()) as u32;
        Some(StoredAs(SummaryRecords { kind: SUMMARY_MIN_MAX, parameter: 0, adapter_checksum: 0, record_bytes }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        self.levels[0].encode(groups, out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let whole = records.chunks_exact(self.levels[0].record_bytes());
        if !whole.remainder().is_empty() {
            return false;
        }
        for record in whole {
            self.levels[0].restore(record);
            self.merge();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    proptest! {
        /// Lower and upper bounds hold for every token of every run, at every level, for every element type.
        #[test]
        fn bounds_hold_for_every_token(
            dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
            kv_heads in 1_usize..3, ratio in 1_usize..3, key_dim in 1_usize..20, group_tokens in 1_usize..6,
            groups in 1_usize..10, cut in 0_usize..10, seed in any::<u64>(), magnitude in -4_i32..3,
        ) {
            let mut state = seed | 1;
            let mut random = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 10_f32.powi(magnitude)
            };
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype };
            let mut summary = KeyBounds { levels: 4 }.layer(0, shape).unwrap();
            let mut keys = Vec::new();
            let fill = |summary: &mut dyn KeySummary, keys: &mut Vec<Vec<f32>>, random: &mut dyn FnMut() -> f32| {
                while summary.groups() < groups {
                    let mut plane = Vec::new();
                    for _ in 0..shape.width() * group_tokens {
                        match dtype {
                            DType::F32 => plane.extend(random().to_le_bytes()),
                            DType::F16 => plane.extend(f16::from_f32(random()).to_le_bytes()),
                            DType::Bf16 => plane.extend(bf16::from_f32(random()).to_le_bytes()),
                        }
                    }
                    let group = KeyGroup::new(shape, &plane, summary.groups() as u64).unwrap();
                    keys.truncate(summary.groups());
                    keys.push(group.tokens());
                    let promised = summary.bytes_for(1);
                    summary.push(&group);
                    assert!(summary.bytes() <= promised, "{} bytes, {promised} promised", summary.bytes());
                }
            };
            fill(summary.as_mut(), &mut keys, &mut random);
            summary.truncate(cut.min(groups));
            fill(summary.as_mut(), &mut keys, &mut random);
            let query: Vec<f32> = (0..kv_heads * ratio * key_dim).map(|_| random()).collect();
            let bounds: &Bounds = (summary.as_ref() as &dyn std::any::Any).downcast_ref().unwrap();
            let mut intervals = Vec::new();
            for level in 0..4 {
                prop_assert_eq!(bounds.runs(level), groups >> level);
                for run in 0..groups >> level {
                    bounds.intervals(&query, level, run, &mut intervals);
                    for group in &keys[run << level..(run + 1) << level] {
                        for key in group.chunks_exact(shape.width()) {
                            for (head, q) in query.chunks_exact(key_dim).enumerate() {
                                let key = &key[head / ratio * key_dim..][..key_dim];
                                let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                                let scale: f64 = q.iter().zip(key).map(|(q, k)| f64::from(q * k).abs()).sum();
                                prop_assert!(f64::from(intervals[head].upper) >= dot - 1e-5 * scale);
                                prop_assert!(f64::from(intervals[head].lower) <= dot + 1e-5 * scale);
                            }
                        }
                    }
                }
            }
        }
    }
}
