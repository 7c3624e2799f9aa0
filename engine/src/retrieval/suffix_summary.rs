//! A summary that keeps only the newest groups in memory. The records of earlier groups are on devices, and a selection
//! reads them.

use crate::error::Result;
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::SummaryRecords;

/// The fewest groups in memory at which to check which of them are on devices by now.
const CHECK_GROUPS: usize = 64;

/// The suffix of a layer's summary that is in memory.
pub(crate) struct SuffixSummary {
    kind: Arc<dyn SummarySpec>,
    layer: usize,
    shape: KeyShape,
    stored: SummaryRecordId,
    /// The first group in memory. The records of the groups before it are on devices only.
    first_group: usize,
    /// The summary of the groups in memory.
    resident: Box<dyn LayerSummary>,
    /// The number of groups in memory at which to check which of them are on devices by now.
    next_check: usize,
}

impl SuffixSummary {
    /// Returns the suffix of a layer that begins with group `first_group`, because the records of earlier groups are on
    /// devices. Returns none for summaries without records on devices.
    ///
    /// # Errors
    /// The errors of [`SummarySpec::layer`].
    pub(crate) fn new(
        kind: Arc<dyn SummarySpec>,
        layer: usize,
        shape: KeyShape,
        first_group: impl FnOnce(&SummaryRecords) -> usize,
    ) -> Result<Option<Self>> {
        let resident = kind.layer(layer, shape)?;
        let stored = resident.stored_as().filter(|stored| !stored.is_min_max());
        Ok(stored.map(|stored| {
            let first_group = first_group(&stored.0);
            Self { kind, layer, shape, stored, first_group, resident, next_check: CHECK_GROUPS }
        }))
    }

    /// Returns the identity of the records.
    pub(crate) fn stored(&self) -> &SummaryRecordId {
        &self.stored
    }

    /// Returns the first group in memory, which is also the number of groups that are not in memory.
    pub(crate) fn first_group(&self) -> usize {
        self.first_group
    }

    /// Returns the groups in memory as a summary that begins with the first of them.
    pub(crate) fn resident(&self) -> &dyn LayerSummary {
        self.resident.as_ref()
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
        self.resident.groups() >= self.next_check
    }

    /// Drops the groups before `group`, whose records are on devices.
    ///
    /// # Errors
    /// The errors of [`SummarySpec::layer`]. Nothing changes then.
    pub(crate) fn drop_before(&mut self, group: usize) -> Result<()> {
        let dropped = group.saturating_sub(self.first_group).min(self.resident.groups());
        if dropped > 0 {
            let (mut resident, mut records) = (self.empty()?, Vec::new());
            self.resident.encode(dropped..self.resident.groups(), &mut records);
            if resident.restore(&records) && resident.groups() + dropped == self.resident.groups() {
                self.resident = resident;
                self.first_group += dropped;
            }
        }
        self.next_check = (2 * self.resident.groups()).max(CHECK_GROUPS);
        Ok(())
    }
}

impl LayerSummary for SuffixSummary {
    fn groups(&self) -> usize {
        self.first_group + self.resident.groups()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.resident.push(group);
    }

    fn truncate(&mut self, groups: usize) {
        self.resident.truncate(groups.saturating_sub(self.first_group));
        self.first_group = self.first_group.min(groups);
        self.next_check = self.next_check.min((2 * self.resident.groups()).max(CHECK_GROUPS));
    }

    fn bytes(&self) -> usize {
        self.resident.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.resident.bytes_for(groups)
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        Some(self.stored)
    }

    /// Groups in memory.
    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        let resident = |group: usize| group.max(self.first_group) - self.first_group;
        self.resident.encode(resident(groups.start)..resident(groups.end), out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        self.resident.restore(records)
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
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut random = || 2.0 * rng.f32() - 1.0;
        let plane: Vec<u8> = (0..2 * 8 * 4).flat_map(|_| random().to_le_bytes()).collect();
        let index = summary.groups() as u64;
        summary.push(&KeyGroup::new(SHAPE, &plane, index).unwrap());
    }

    /// A low-rank row is restored bit by bit, even if its keys are so large that sums are infinite.
    #[test]
    fn a_resident_summary_can_be_restored() {
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
        assert!(SuffixSummary::new(Arc::new(BoundsSpec { levels: 1 }), 0, SHAPE, |_| 0).unwrap().is_none());
    }

    proptest! {
        /// The groups in memory equal the end of a whole summary, whatever is added, cut and dropped.
        #[test]
        fn the_resident_groups_are_the_end_of_the_whole(
            signs in any::<bool>(), ops in prop::collection::vec((0_u8..8, any::<u16>()), 1..60),
        ) {
            let kind: Arc<dyn SummarySpec> = if signs { Arc::new(SignSpec) } else { Arc::new(LandmarkSpec) };
            let mut whole = kind.layer(0, SHAPE).unwrap();
            let mut suffix = SuffixSummary::new(Arc::clone(&kind), 0, SHAPE, |_| 0).unwrap().unwrap();
            for (op, number) in ops {
                match op {
                    0 => {
                        let groups = usize::from(number) % (whole.groups() + 1);
                        whole.truncate(groups);
                        suffix.truncate(groups);
                    }
                    1 | 2 => suffix.drop_before(usize::from(number) % (whole.groups() + 1)).unwrap(),
                    _ => {
                        push(whole.as_mut(), u64::from(number));
                        push(&mut suffix, u64::from(number));
                    }
                }
                prop_assert_eq!(suffix.groups(), whole.groups());
                let (mut expected, mut found) = (Vec::new(), Vec::new());
                whole.encode(suffix.first_group()..whole.groups(), &mut expected);
                suffix.encode(0..suffix.groups(), &mut found);
                prop_assert_eq!(&found, &expected);
                found.clear();
                suffix.resident().encode(0..suffix.resident().groups(), &mut found);
                prop_assert_eq!(found, expected);
            }
        }
    }
}
