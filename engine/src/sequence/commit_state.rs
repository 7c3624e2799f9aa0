//! The commits of a sequence: the last one, the one it owes, and the records of the next.
//!
//! Invariants:
//! - `committed` names only commits that succeeded or are queued. `settled` counts every request.
//! - `records` and `released` describe changes since the last request, in the order in which they happened.
//! - The lock is dropped last, because another handle may open the sequence as soon as it is free.

use crate::catalog::{RecordBuffer, release_record};
use crate::log::SequenceLock;
use stratakv_format::manifest::{Kind, SequenceTruncate};
use stratakv_format::{FrameId, SequenceId};
use zerocopy::little_endian::U64;

/// The extent of a commit at `Durability::None` that no later commit has covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwedCommit {
    pub(super) tokens: u64,
    pub(super) token_ids: usize,
}

/// The cuts that a handle remembers one by one.
const CUTS_MAX: usize = 16;

/// The progress of a sequence's commits.
pub(super) struct CommitState {
    /// Records that the next commit puts first: creation, cuts.
    records: RecordBuffer,
    /// A commit request has named the sequence.
    stored: bool,
    /// Tokens of the last commit that succeeded or is queued.
    committed: u64,
    /// Tokens of the last commit request, including one of the sequence this was forked from.
    settled: u64,
    owed: Option<OwedCommit>,
    /// Tokens were cut off since the last commit.
    cut: bool,
    /// The lowest cut that no commit request has taken, in tokens. Derived frames beyond it are released.
    cut_to: Option<u64>,
    /// Cuts of this handle: tokens, and the first frame that did not exist then. Derived frames that are older than a
    /// cut and reach beyond it hold other tokens than the sequence. Both numbers rise from cut to cut.
    cuts: Vec<(u64, FrameId)>,
    /// The number of frames that the next commit releases because of cuts.
    released: usize,
    /// None for a reader, and after a deletion.
    lock: Option<SequenceLock>,
}

impl CommitState {
    /// Returns the state of a sequence that no commit has named. `records` create it.
    pub(super) fn new(lock: SequenceLock, records: RecordBuffer) -> Self {
        Self { records, lock: Some(lock), ..Self::reader(0, 0) }
    }

    /// Returns the state for a handle that never commits.
    pub(super) fn snapshot(&self) -> Self {
        Self::reader(self.committed, self.settled)
    }

    fn reader(committed: u64, settled: u64) -> Self {
        let records = RecordBuffer::default();
        let (owed, cut, cut_to, cuts, released, lock) = (None, false, None, Vec::new(), 0, None);
        Self { records, stored: false, committed, settled, owed, cut, cut_to, cuts, released, lock }
    }

    pub(super) fn is_stored(&self) -> bool {
        self.stored
    }

    pub(super) fn committed(&self) -> u64 {
        self.committed
    }

    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    /// Returns the number of frames that the next commit releases because of cuts.
    pub(super) fn released(&self) -> usize {
        self.released
    }

    /// Records what a commit at `Durability::None` covers.
    pub(super) fn owe(&mut self, owed: OwedCommit) {
        self.owed = Some(owed);
    }

    pub(super) fn take_owed(&mut self) -> Option<OwedCommit> {
        self.owed.take()
    }

    /// Records that a fork's first tokens count as committed for its decision to gather groups.
    pub(super) fn settle_fork(&mut self, settled: u64) {
        self.settled = settled;
    }

    /// Records what an open found: the last commit covers `tokens`.
    pub(super) fn finish_open(&mut self, tokens: u64) {
        (self.committed, self.settled, self.stored) = (tokens, tokens, true);
    }

    /// Clips what is settled and owed to the tokens and token ids that a cut leaves.
    pub(super) fn clip(&mut self, tokens: u64, token_ids: usize) {
        self.settled = self.settled.min(tokens);
        if let Some(owed) = &mut self.owed {
            *owed = OwedCommit { tokens: owed.tokens.min(tokens), token_ids: owed.token_ids.min(token_ids) };
        }
    }

    /// Records a cut to `sealed` tokens, a multiple of the group size, and the frames that it releases. Frames below
    /// `next_frame` exist.
    pub(super) fn record_cut(&mut self, sequence: SequenceId, sealed: u64, released: &[FrameId], next_frame: FrameId) {
        self.cut = true;
        self.cut_to = Some(self.cut_to.unwrap_or(u64::MAX).min(sealed));
        // A later cut below an earlier one replaces it.
        let kept = self.cuts.partition_point(|(tokens, _)| *tokens < sealed);
        self.cuts.truncate(kept);
        self.cuts.push((sealed, next_frame));
        if self.cuts.len() > CUTS_MAX {
            // The two oldest cuts become one, which may call more frames stale than both.
            self.cuts[1].0 = self.cuts[0].0;
            self.cuts.remove(0);
        }
        if self.stored {
            let cut = SequenceTruncate { sequence: U64::new(sequence.0), tokens: U64::new(sealed) };
            self.records.push(Kind::SequenceTruncate, &cut, &[]);
        }
        for frame in released {
            self.released += 1;
            self.records.push(Kind::FrameRelease, &release_record(sequence, *frame), &[]);
        }
    }

    /// Returns the lowest cut that no commit request has taken, in tokens.
    pub(super) fn cut_to(&self) -> Option<u64> {
        self.cut_to
    }

    /// Returns whether a derived frame whose tokens end at `token_end` holds tokens that were cut off, as far as this
    /// handle knows. A cut that is queued is not in the catalog yet.
    pub(super) fn is_stale(&self, frame: FrameId, token_end: u64) -> bool {
        self.cuts.iter().any(|(tokens, next)| token_end > *tokens && frame < *next)
    }

    /// Takes the records that a commit puts first.
    pub(super) fn take_records(&mut self) -> RecordBuffer {
        std::mem::take(&mut self.records)
    }

    /// Records that a commit request of `length` tokens is complete. It may still fail.
    pub(super) fn request(&mut self, length: u64) {
        self.owed = None;
        (self.cut, self.cut_to, self.released) = (false, None, 0);
        self.stored = true;
        self.settled = length;
    }

    /// Records that the request has succeeded or is queued.
    pub(super) fn confirm(&mut self, length: u64) {
        self.committed = length;
    }

    /// Takes the lock out, so that a deletion can outlive the handle.
    pub(super) fn take_lock(&mut self) -> Option<SequenceLock> {
        self.lock.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_state_owes_no_more_than_a_cut_leaves() {
        let mut state = CommitState::reader(0, 9);
        state.owe(OwedCommit { tokens: 9, token_ids: 8 });
        state.clip(5, 4);
        assert_eq!(state.settled(), 5);
        assert_eq!(state.take_owed(), Some(OwedCommit { tokens: 5, token_ids: 4 }));
        assert_eq!(state.take_owed(), None);
    }

    #[test]
    fn commit_state_counts_a_failed_request_as_settled_only() {
        let mut state = CommitState::reader(0, 0);
        state.request(7);
        assert_eq!((state.committed(), state.settled(), state.is_stored()), (0, 7, true));
        state.confirm(7);
        assert_eq!(state.committed(), 7);
    }

    #[test]
    fn commit_state_knows_which_derived_frames_a_cut_made_stale() {
        let mut state = CommitState::reader(0, 0);
        assert!(!state.is_stale(FrameId(1), 100));
        state.record_cut(SequenceId(1), 16, &[], FrameId(4));
        assert_eq!(state.cut_to(), Some(16));
        assert!(state.is_stale(FrameId(3), 17) && !state.is_stale(FrameId(3), 16) && !state.is_stale(FrameId(4), 99));
        // A request has taken the cut, which may still be queued.
        state.request(16);
        assert!(state.cut_to().is_none() && state.is_stale(FrameId(3), 17));
        state.record_cut(SequenceId(1), 24, &[], FrameId(9));
        assert!(state.cut_to() == Some(24) && state.is_stale(FrameId(8), 25) && state.is_stale(FrameId(3), 17));
        // The first cut is older than this frame, and the second cut takes none of its tokens.
        assert!(!state.is_stale(FrameId(8), 24));
        state.record_cut(SequenceId(1), 8, &[], FrameId(12));
        assert!(state.is_stale(FrameId(11), 9) && !state.is_stale(FrameId(12), 99));
    }

    #[test]
    fn commit_state_merges_the_oldest_of_many_rising_cuts() {
        let mut state = CommitState::reader(0, 0);
        let cuts = CUTS_MAX as u64 * 4;
        for at in 1..=cuts {
            state.record_cut(SequenceId(1), at * 16, &[], FrameId(at * 10));
            assert!(state.cuts.len() <= CUTS_MAX);
            assert!((1..=at).all(|cut| state.is_stale(FrameId(cut * 10 - 1), cut * 16 + 1)), "a cut is forgotten");
        }
        let newest = cuts * 10 - 1;
        assert!(!state.is_stale(FrameId(newest), cuts * 16) && state.is_stale(FrameId(newest), cuts * 16 + 1));
    }

    #[test]
    fn commit_state_records_cuts_of_stored_sequences_only() {
        let mut state = CommitState::reader(0, 0);
        state.record_cut(SequenceId(1), 16, &[], FrameId(4));
        assert!(state.is_cut() && state.take_records().is_empty());
        state.request(16);
        assert!(!state.is_cut());
        state.record_cut(SequenceId(1), 0, &[FrameId(2), FrameId(3)], FrameId(4));
        assert_eq!(state.released(), 2);
        assert_eq!(state.take_records().count(), 3);
    }
}
