//! Summaries on devices: what their records were made of, so that no others are taken for them.

use stratakv_format::frame::{SUMMARY_MIN_MAX, SummaryRecords};

/// What the records of a summary are, as they stand on a device: kind, parameter, and the adapter they were made with. Only
/// kinds of this crate have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummaryRecordId(pub(crate) SummaryRecords);

impl SummaryRecordId {
    /// Whether they are those that the sequence writes by itself ([`crate::StoredSummary::MinMax`]).
    pub(crate) fn is_min_max(&self) -> bool {
        self.0.kind == SUMMARY_MIN_MAX
    }
}
