//! The identity of summary records on devices. Records of another identity are never used in their place.

use stratakv_format::frame::{SUMMARY_MIN_MAX, SummaryRecords};

/// The identity of a summary's records on a device: kind, parameter, and adapter. Only summaries of this crate have
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummaryRecordId(pub(crate) SummaryRecords);

impl SummaryRecordId {
    /// Returns whether they are the records that the sequence writes itself ([`crate::StoredSummary::MinMax`]).
    pub(crate) fn is_min_max(&self) -> bool {
        self.0.kind == SUMMARY_MIN_MAX
    }
}
