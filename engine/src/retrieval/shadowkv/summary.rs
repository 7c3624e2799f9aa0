//! Landmarks (ShadowKV): the mean key of each group in f16, and how far its tokens are from it.

use crate::error::Result;
use crate::kernels::{f32_to_finite_f16, is_finite_f16};
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, Records, SummarySpec, ToBytes};
use std::ops::Range;
use stratakv_format::frame::{SUMMARY_LANDMARKS, SummaryRecords};

/// The specification of landmarks.
#[derive(Clone, Copy, Debug)]
pub struct LandmarkSpec;

impl SummarySpec for LandmarkSpec {
    fn id(&self) -> String {
        "landmarks".into()
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(Landmarks { shape, means: Records::new(shape.width()), cosines: Records::new(1) }))
    }
}

/// The landmarks of a layer, `[groups, kv_heads, key_dim]`, and for each group the lowest cosine between a token's key
/// and the mean, over tokens and heads.
pub(crate) struct Landmarks {
    shape: KeyShape,
    means: Records<u16>,
    cosines: Records<f32>,
}

impl Landmarks {
    /// Returns the means of `groups`, `[groups, kv_heads, key_dim]` in f16.
    pub(crate) fn means(&self, groups: Range<usize>) -> &[u16] {
        self.means.slice(groups)
    }

    /// Returns the `count` groups of `range` with the lowest cosines, in rising order of cosine.
    pub(crate) fn outliers(&self, range: Range<usize>, count: usize) -> Vec<usize> {
        let cosines = self.cosines.slice(range.clone());
        let mut order: Vec<usize> = (0..range.len()).collect();
        let by_cosine = |a: &usize, b: &usize| cosines[*a].total_cmp(&cosines[*b]).then(a.cmp(b));
        if 0 < count && count < order.len() {
            order.select_nth_unstable_by(count - 1, by_cosine);
        }
        order.truncate(count);
        order.sort_unstable_by(by_cosine);
        order.iter().map(|i| i + range.start).collect()
    }
}

/// Returns the mean of the keys of a group `[G, kv_heads, key_dim]`, and the lowest cosine between a head of a key and
/// the same head of the mean.
pub(crate) fn mean_and_cosine(keys: &[f32], shape: &KeyShape) -> (Vec<f32>, f32) {
    let (width, dim) = (shape.width(), shape.key_dim);
    let mut mean = vec![0.0_f32; width];
    for key in keys.chunks_exact(width) {
        mean.iter_mut().zip(key).for_each(|(mean, k)| *mean += k / shape.group_tokens as f32);
    }
    let mut lowest = 1.0_f32;
    for key in keys.chunks_exact(width) {
        for (key, mean) in key.chunks_exact(dim).zip(mean.chunks_exact(dim)) {
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let cosine = dot(key, mean) / (dot(key, key) * dot(mean, mean)).sqrt().max(f32::MIN_POSITIVE);
            lowest = lowest.min(cosine);
        }
    }
    (mean, lowest)
}

impl LayerSummary for Landmarks {
    fn groups(&self) -> usize {
        self.cosines.count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let (mean, lowest) = mean_and_cosine(&group.tokens(), &self.shape);
        let to = self.means.add();
        to.iter_mut().zip(&mean).for_each(|(out, x)| *out = f32_to_finite_f16(*x));
        self.cosines.add()[0] = lowest;
    }

    fn truncate(&mut self, groups: usize) {
        self.means.truncate(groups);
        self.cosines.truncate(groups);
    }

    fn bytes(&self) -> usize {
        self.means.bytes() + self.cosines.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.means.bytes_for(groups) + self.cosines.bytes_for(groups)
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        let record_bytes = u32::try_from(self.means.record_bytes() + self.cosines.record_bytes()).unwrap_or(u32::MAX);
        Some(SummaryRecordId(SummaryRecords {
            kind: SUMMARY_LANDMARKS,
            parameter: 0,
            adapter_checksum: 0,
            record_bytes,
        }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        for group in groups {
            self.means.encode(group..group + 1, out);
            self.cosines.encode(group..group + 1, out);
        }
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let means = self.means.record_bytes();
        let whole = records.chunks_exact(means + self.cosines.record_bytes());
        let wrong = |record: &[u8]| {
            let (mean, cosine) = record.split_at(means);
            let elements = mean.as_chunks::<2>().0.iter();
            elements.into_iter().any(|b| !is_finite_f16(*b)) || f32::get(cosine).is_nan()
        };
        if !whole.remainder().is_empty() || whole.clone().any(wrong) {
            return false;
        }
        for record in whole {
            let (mean, cosine) = record.split_at(means);
            self.means.restore(mean);
            self.cosines.restore(cosine);
        }
        true
    }
}
