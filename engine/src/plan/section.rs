//! A section of summary records.

use crate::catalog::{FrameBody, SummaryPlace};
use std::sync::Arc;
use stratakv_format::PAGE_BYTES;

/// A section of summary records: consecutive groups of a layer, in the front of a frame.
#[derive(Clone)]
pub(crate) struct Section {
    pub(crate) frame: Arc<FrameBody>,
    pub(crate) place: SummaryPlace,
}

impl Section {
    /// Returns its offset in the segment of copy 0.
    pub(crate) fn offset(&self) -> u64 {
        u64::from(self.frame.page) * PAGE_BYTES as u64 + self.place.offset
    }

    pub(crate) fn bytes(&self) -> usize {
        self.place.bytes as usize
    }

    /// Returns the bytes of its read, in whole read units.
    pub(crate) fn read_bytes(&self) -> usize {
        let readable = self.frame.readable(self.offset(), self.bytes());
        (readable.end - readable.start) as usize
    }

    /// Returns whether both are the same records, wherever the frame is.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (self.frame.nonce, self.frame.origin, &self.place) == (other.frame.nonce, other.frame.origin, &other.place)
    }
}

/// A section and its place in the buffer of its part.
#[derive(Clone)]
pub(crate) struct SectionAt {
    pub(crate) section: Section,
    /// The offset in the buffer.
    pub(crate) at: usize,
}
