//! The request of one commit: the changes that it makes durable together.

use crate::catalog::{Flight, RecordBuffer, SegmentHandle, SegmentKey};
use crate::error::Error;
use crate::layout::KvLayout;
use crate::log::copies::CopyChange;
use crate::log::derived_release::DerivedRelease;
use std::sync::Arc;
use stratakv_format::LayoutId;
use stratakv_format::manifest as m;

/// The changes that one commit makes durable. The default request has none, but its commit includes queued requests.
#[derive(Default)]
pub(crate) struct CommitRequest {
    /// Layouts of the sequences that it creates. A layout that the store does not know yet is recorded first.
    pub(crate) layouts: Vec<(LayoutId, KvLayout)>,
    /// Its records, which take effect together.
    pub(crate) records: RecordBuffer,
    /// The segments that its frames were written to.
    pub(crate) segments: Vec<Arc<SegmentHandle>>,
    /// New places of copies of frames. A change of a frame that has changed since is skipped.
    pub(crate) copies: Vec<CopyChange>,
    /// References to derived frames that end. A reference that does not exist is skipped.
    pub(crate) derived: Vec<DerivedRelease>,
    /// Free segments whose files are removed, with the generation that ended. A segment that the catalog has in another
    /// state or generation is skipped.
    pub(crate) removed: Vec<(SegmentKey, u64)>,
    /// Members as they are from now on, except for their epoch.
    pub(crate) members: Vec<m::Member>,
    /// Pages of its frames, which are live once it has taken effect.
    pub(crate) flights: Vec<Flight>,
    /// Segments with frames of other writers that its records name. They are not reused before it takes effect.
    pub(crate) pins: Vec<Arc<SegmentHandle>>,
    /// True if its frames have fewer copies than they should have.
    pub(crate) owes_copies: bool,
    /// The reason why its members are not changed, if the rest of it succeeds.
    pub(crate) refused: Option<Error>,
}

impl CommitRequest {
    /// Appends another request behind this one.
    pub(super) fn absorb(&mut self, other: Self) {
        self.layouts.extend(other.layouts);
        self.records.append(&other.records);
        self.segments.extend(other.segments);
        self.copies.extend(other.copies);
        self.derived.extend(other.derived);
        self.removed.extend(other.removed);
        self.members.extend(other.members);
        self.flights.extend(other.flights);
        self.pins.extend(other.pins);
        self.owes_copies |= other.owes_copies;
    }
}
