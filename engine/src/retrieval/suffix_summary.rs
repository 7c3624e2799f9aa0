//! A summary that keeps only the newest groups in memory. The records of earlier groups are on devices, and a selection
//! reads them.

use crate::error::Result;
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::SummaryRecords;

/// The fewest groups in memory at which to check which of them are on devices by now.
const LOOK_AT: usize = 64;

/// The suffix of a layer's summary that is in memory.
pub(crate) struct Newest {
    kind: Arc<dyn SummarySpec>,
    layer: usize,
    shape: KeyShape,
    stored: SummaryRecordId,
    /// The number of groups whose records are on devices only.
    before: usize,
    /// The summary of the groups behind them.
    kept: Box<dyn LayerSummary>,
    /// Groups in memory at which to check which of them are on devices by now.
    look_at: usize,
}

impl Newest {
    /// Returns the suffix of a layer whose first `before` groups have their records on devices. Returns none for
    /// summaries without records on devices.
    ///
    /// # Errors
    /// The errors of [`SummarySpec::layer`].
    pub(crate) fn new(
        kind: Arc<dyn SummarySpec>,
        layer: usize,
        shape: KeyShape,
        before: impl FnOnce(&SummaryRecords) -> usize,
    ) -> Result<Option<Self>> {
        let kept = kind.layer(layer, shape)?;
        let stored = kept.stored_as().filter(|stored| !stored.is_min_max());
        Ok(stored.map(|stored| {
            let before = before(&stored.0);
            Self { kind, layer, shape, stored, before, kept, look_at: LOOK_AT }
        }))
    }

    /// Returns the identity of the records.
    pub(crate) fn stored(&self) -> &SummaryRecordId {
        &self.stored
    }

    /// Returns how many groups are not in memory.
    pub(crate) fn before(&self) -> usize {
        self.before
    }

    /// Returns the groups in memory as a summary that begins with the first of them.
    pub(crate) fn kept(&self) -> &dyn LayerSummary {
        self.kept.as_ref()
    }

    /// Returns a summary of the same kind without groups.
    ///
    /// # Errors
    /// The errors of [`SummarySpec::layer`].
    pub(crate) fn empty(&self) -> Result<Box<dyn LayerSummary>> {
        self.kind.layer(self.layer, self.shape)
    }

    /// Returns whether enough groups are in memory to check which of them are on devices by now.
    pub(crate) fn is_due(&self) -> bool {
        self.kept.groups() >= self.look_at
    }

    /// Drops the groups before `groups`, whose records are on devices.
    ///
    /// # Errors
    /// The errors of [`SummarySpec::layer`]. Nothing changes then.
    pub(crate) fn leave(&mut self, groups: usize) -> Result<()> {
        let left = groups.saturating_sub(self.before).min(self.kept.groups());
        if left > 0 {
            let (mut kept, mut records) = (self.empty()?, Vec::new());
            self.kept.encode(left..self.kept.groups(), &mut records);
            if kept.restore(&records) && kept.groups() + left == self.kept.groups() {
                self.kept = kept;
                self.before += left;
            }
        }
        self.look_at = (2 * self.kept.groups()).max(LOOK_AT);
        Ok(())
    }
}

impl LayerSummary for Newest {
    fn groups(&self) -> usize {
        self.before + self.kept.groups()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.kept.push(group);
    }

    fn truncate(&mut self, groups: usize) {
        self.kept.truncate(groups.saturating_sub(self.before));
        self.before = self.before.min(groups);
        self.look_at = self.look_at.min((2 * self.kept.groups()).max(LOOK_AT));
    }

    fn bytes(&self) -> usize {
        self.kept.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.kept.bytes_for(groups)
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        Some(self.stored)
    }

    /// Groups in memory.
    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        let kept = groups.start.max(self.before)..groups.end.max(self.before);
        self.kept.encode(kept.start - self.before..kept.end - self.before, out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        self.kept.restore(records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::adapter::{Adapter, LowRankAdapter};
    use crate::retrieval::bounds::summary::BoundsSpec;
    use crate::retrieval::low_rank::summary::LowRankSpec;
    use crate::retrieval::shadowkv::summary::LandmarkSpec;
    use crate::retrieval::sign_bits::summary::SignSpec;
    use proptest::prelude::*;
    use stratakv_format::DType;

    const SHAPE: KeyShape = KeyShape { kv_heads: 2, key_dim: 8, group_tokens: 4, dtype: DType::F32 };

    fn push(summary: &mut dyn LayerSummary, seed: u64) {
        let mut state = seed | 1;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let plane: Vec<u8> = (0..2 * 8 * 4).flat_map(|_| random().to_le_bytes()).collect();
        let index = summary.groups() as u64;
        summary.push(&KeyGroup::new(SHAPE, &plane, index).unwrap());
    }

    /// A low-rank row is restored bit by bit, even if its keys are so large that sums are infinite.
    #[test]
    fn a_kept_summary_can_be_restored() {
        let matrix = (0..16 * 2).map(|i| if i % 4 < 2 { 2.0 } else { -2.0 }).collect();
        let adapter = Adapter::new("low", 1, vec![LowRankAdapter::new(16, 2, matrix).unwrap().into()]).unwrap();
        let kinds: [Arc<dyn SummarySpec>; 3] =
            [Arc::new(LowRankSpec::new(Arc::new(adapter))), Arc::new(LandmarkSpec), Arc::new(SignSpec)];
        for kind in kinds {
            let mut summary = kind.layer(0, SHAPE).unwrap();
            let plane: Vec<u8> = (0..2 * 8 * 4).flat_map(|_| 3e38_f32.to_le_bytes()).collect();
            summary.push(&KeyGroup::new(SHAPE, &plane, 0).unwrap());
            let mut records = Vec::new();
            summary.encode(0..1, &mut records);
            assert!(kind.layer(0, SHAPE).unwrap().restore(&records), "{}", kind.id());
        }
    }

    #[test]
    fn bounds_have_no_records_of_their_own() {
        assert!(Newest::new(Arc::new(BoundsSpec { levels: 1 }), 0, SHAPE, |_| 0).unwrap().is_none());
    }

    proptest! {
        /// The groups in memory equal the end of a whole summary, whatever is added, cut and dropped.
        #[test]
        fn what_is_kept_is_the_end_of_the_whole(
            signs in any::<bool>(), ops in prop::collection::vec((0_u8..8, any::<u16>()), 1..60),
        ) {
            let kind: Arc<dyn SummarySpec> = if signs { Arc::new(SignSpec) } else { Arc::new(LandmarkSpec) };
            let mut whole = kind.layer(0, SHAPE).unwrap();
            let mut newest = Newest::new(Arc::clone(&kind), 0, SHAPE, |_| 0).unwrap().unwrap();
            for (op, number) in ops {
                match op {
                    0 => {
                        let groups = usize::from(number) % (whole.groups() + 1);
                        whole.truncate(groups);
                        newest.truncate(groups);
                    }
                    1 | 2 => newest.leave(usize::from(number) % (whole.groups() + 1)).unwrap(),
                    _ => {
                        push(whole.as_mut(), u64::from(number));
                        push(&mut newest, u64::from(number));
                    }
                }
                prop_assert_eq!(newest.groups(), whole.groups());
                let (mut expected, mut kept) = (Vec::new(), Vec::new());
                whole.encode(newest.before()..whole.groups(), &mut expected);
                newest.encode(0..newest.groups(), &mut kept);
                prop_assert_eq!(&kept, &expected);
                kept.clear();
                newest.kept().encode(0..newest.kept().groups(), &mut kept);
                prop_assert_eq!(kept, expected);
            }
        }
    }
}
