//! Summaries on devices: what their records were made of, so that no others are taken for them.

use stratakv_format::frame::{SUMMARY_MIN_MAX, SUMMARY_VERSION, SummaryHeader};
use zerocopy::little_endian::{U32, U64};

/// What the records of a summary are, as they stand on a device: kind, parameter, and the adapter they were made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredAs {
    pub(crate) kind: u16,
    pub(crate) parameter: u32,
    pub(crate) adapter_checksum: u64,
    pub(crate) record_bytes: u32,
}

impl StoredAs {
    /// Whether they are those that the sequence writes by itself ([`crate::Summary::MinMax`]).
    pub(crate) fn is_min_max(&self) -> bool {
        self.kind == SUMMARY_MIN_MAX
    }

    /// What stands in front of them. `adapter`: the adapter's id in the store.
    pub(crate) fn header(&self, adapter: u64) -> SummaryHeader {
        SummaryHeader {
            version: U32::new(SUMMARY_VERSION),
            parameter: U32::new(self.parameter),
            adapter: U64::new(adapter),
            adapter_checksum: U64::new(self.adapter_checksum),
            reserved: U64::new(0),
        }
    }
}
