//! Element-wise bounds of the keys of each group and of runs of 2, 4, 8 ... groups (LeoAM, section 4; Quest): a tree of
//! them for selectors that look closer only where it matters.

use super::keys::{KeyGroup, KeyShape, KeySummary, Records, SummaryKind, widen};
use super::min_max::{MinMax, extremes, ordered};
use crate::error::Result;
use stratakv_format::DType;

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

impl KeySummary for Bounds {
    fn groups(&self) -> usize {
        self.levels[0].count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let width = self.shape.width();
        let (minima, maxima) = self.levels[0].add().split_at_mut(width);
        extremes(group.plane(), self.shape.kv_heads, self.shape.group_tokens, self.shape.dtype, minima, maxima);
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
}
