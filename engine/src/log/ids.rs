//! Ids and log sequence numbers of the store: each is given out once, also across restarts.

use std::sync::atomic::{AtomicU64, Ordering};
use stratakv_format::{FrameId, SequenceId};

/// The next ids to give out.
///
/// Invariant: no id is given out twice. The counters start at the manifest's, beyond every id that a lost process may
/// have used.
#[derive(Debug)]
pub(crate) struct IdAllocator {
    frame: AtomicU64,
    lsn: AtomicU64,
    sequence: AtomicU64,
}

/// The ids that were not given out yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextIds {
    pub(crate) frame: u64,
    pub(crate) lsn: u64,
    pub(crate) sequence: u64,
}

impl IdAllocator {
    pub(crate) fn new(next: NextIds) -> Self {
        let NextIds { frame, lsn, sequence } = next;
        Self { frame: AtomicU64::new(frame), lsn: AtomicU64::new(lsn), sequence: AtomicU64::new(sequence) }
    }

    /// Returns the id and the log sequence number of the next frame.
    pub(crate) fn next_frame(&self) -> (FrameId, u64) {
        let id = self.frame.fetch_add(1, Ordering::Relaxed);
        (FrameId(id), self.lsn.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the id of the next sequence.
    pub(crate) fn next_sequence(&self) -> SequenceId {
        SequenceId(self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the ids that were not given out yet, for the manifest.
    pub(crate) fn peek(&self) -> NextIds {
        NextIds {
            frame: self.frame.load(Ordering::Relaxed),
            lsn: self.lsn.load(Ordering::Relaxed),
            sequence: self.sequence.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_given_out_once_and_counted() {
        let ids = IdAllocator::new(NextIds { frame: 7, lsn: 40, sequence: 3 });
        assert_eq!(ids.next_frame(), (FrameId(7), 40));
        assert_eq!(ids.next_frame(), (FrameId(8), 41));
        assert_eq!((ids.next_sequence(), ids.next_sequence()), (SequenceId(3), SequenceId(4)));
        assert_eq!(ids.peek(), NextIds { frame: 9, lsn: 42, sequence: 5 });
    }
}
