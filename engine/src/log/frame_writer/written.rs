//! A frame after its writes were submitted: waiting for them, and dropping copies that failed.

use crate::catalog::{CopyMeta, Flight, FrameCopy, FrameMeta, FrameSlot, GroupBuffer, SegmentHandle};
use crate::error::Result;
use crate::io::buffer::lease::Lease;
use crate::io::scheduler::Waiter;
use crate::log::frame_builder::CoveredEnds;
use crate::log::segment_allocator::SegmentAllocator;
use crate::metrics::lock;
use std::sync::{Arc, Mutex};
use stratakv_format::{FrameId, Location};

/// Groups of a layer with their place in the frame: the page from the frame's start, and the first checksum.
pub(crate) struct PlacedRun {
    pub(crate) run: Arc<GroupBuffer>,
    pub(crate) page: u32,
    pub(crate) checksum: usize,
}

/// A frame whose writes are in flight or done. It is not durable before a commit syncs its segments.
pub(crate) struct WrittenFrame {
    pub(crate) id: FrameId,
    pub(crate) meta: FrameMeta,
    pub(crate) body: Arc<FrameSlot>,
    /// Its copies. After [`Self::wait`]: those that were written.
    pub(super) copies: Vec<CopyFlight>,
    /// True if [`Self::wait`] saw every write complete.
    pub(super) written: bool,
    pub(super) space: Arc<Mutex<SegmentAllocator>>,
    pub(crate) runs: Vec<PlacedRun>,
    pub(crate) holds_state: bool,
    /// The lowest token that it holds anything of, or none if it holds only the caller's state.
    pub(crate) first_token: Option<u64>,
    /// The end of its tokens. Later ones were cut off after it was written.
    pub(crate) token_end: u64,
    /// The ends of what it holds, if it holds no groups.
    pub(crate) small: Option<CoveredEnds>,
}

/// One copy of a frame in flight.
pub(super) struct CopyFlight {
    pub(super) location: Location,
    pub(super) header_crc: u32,
    pub(super) segment: Arc<SegmentHandle>,
    /// The pages in flight. The frame's slot takes them over once it exists.
    pub(super) flight: Option<Flight>,
    pub(super) waiter: Arc<Waiter>,
    pub(super) front: Vec<Lease>,
}

impl WrittenFrame {
    /// Waits until every write completes. Nothing is synced.
    ///
    /// A copy that fails is dropped if another copy was written. Its segment takes no more frames.
    ///
    /// # Errors
    /// The first failed write, if no copy was written.
    pub(crate) fn wait(&mut self) -> Result<()> {
        if self.written {
            return Ok(());
        }
        let before = self.copies.len();
        let outcomes: Vec<_> = self.copies.iter().map(|copy| copy.waiter.wait()).collect();
        for (copy, outcome) in self.copies.iter_mut().zip(&outcomes) {
            copy.front.clear();
            if outcome.is_err() {
                lock(&self.space).abandon(&copy.segment);
            }
        }
        if !outcomes.iter().any(Result::is_ok) {
            return outcomes.into_iter().next().unwrap_or(Ok(()));
        }
        let mut outcomes = outcomes.iter();
        self.copies.retain(|_| outcomes.next().is_some_and(Result::is_ok));
        if self.copies.len() < before {
            self.name_copies();
        }
        self.body.complete_flights();
        self.written = true;
        Ok(())
    }

    /// Returns the segments of its copies.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Arc<SegmentHandle>> {
        self.copies.iter().map(|copy| &copy.segment)
    }

    /// Updates the record and the readers' slot to the copies that were written.
    fn name_copies(&mut self) {
        let Some((first, others)) = self.copies.split_first() else { return };
        (self.meta.location, self.meta.header_crc) = (first.location, first.header_crc);
        self.meta.other_copies = others.iter().map(CopyFlight::meta).collect();
        self.body.set_location(first.place(), others.iter().map(CopyFlight::place).collect());
        self.body.keep_flights(|segment| self.copies.iter().any(|copy| Arc::ptr_eq(&copy.segment, segment)));
    }

    /// Returns whether every write is done, without waiting.
    pub(crate) fn is_written(&self) -> bool {
        self.written || self.copies.iter().all(|copy| copy.waiter.is_done())
    }

    /// Returns the bytes that its copies take on devices.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.copies.iter().map(|copy| copy.location.bytes()).sum()
    }
}

impl CopyFlight {
    pub(super) fn place(&self) -> FrameCopy {
        FrameCopy { segment: Arc::clone(&self.segment), page: self.location.page, header_crc: self.header_crc }
    }

    pub(super) fn meta(&self) -> CopyMeta {
        CopyMeta { generation: 1, location: self.location, header_crc: self.header_crc }
    }
}
