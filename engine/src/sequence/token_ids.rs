//! The token ids of a sequence, and how many of them frames hold.
//!
//! Invariants:
//! - `durable <= written <= ids.len()` outside of an open.
//! - Ids below `grouped` are in frames that hold groups, so merging small frames never has to write them again.

use crate::error::{Error, ErrorKind, Result};
use crate::log::Devices;
use crate::metrics::Reservation;

/// The ids of all tokens, in order.
#[derive(Default)]
pub(super) struct TokenIds {
    ids: Vec<u32>,
    /// The number of ids that a written frame holds.
    written: usize,
    /// The number of ids that a committed frame holds.
    durable: usize,
    /// The number of ids in frames that stay when small frames are merged.
    grouped: usize,
}

impl TokenIds {
    pub(super) fn as_slice(&self) -> &[u32] {
        &self.ids
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns the bytes of memory that the ids take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.ids.capacity() * size_of::<u32>()
    }

    /// Takes the memory of `more` further ids from the budget.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub(super) fn reserve(devices: &Devices, index: &mut Reservation, more: usize) -> Result<()> {
        let held = more.checked_mul(size_of::<u32>()).and_then(|more| index.bytes().checked_add(more));
        if held.is_none_or(|held| !devices.resize(index, held)) {
            let text = format!("{more} token ids do not fit into memory_limit; close handles or raise memory_limit");
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        Ok(())
    }

    /// Appends ids for which memory was [reserved](Self::reserve).
    pub(super) fn extend(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Returns the first id that a commit writes. A commit of groups also writes the ids of the small frames it
    /// replaces.
    pub(super) fn unwritten_from(&self, grouped: bool) -> usize {
        if grouped { self.grouped } else { self.written }
    }

    /// Returns the number of ids that stay in frames when small frames are merged.
    pub(super) fn grouped(&self) -> usize {
        self.grouped
    }

    /// Records that frames hold the first `count` ids, in frames with groups if `grouped`.
    pub(super) fn mark_written(&mut self, count: usize, grouped: bool) {
        self.written = count;
        if grouped {
            self.grouped = count;
        }
    }

    /// Records that a commit names every written frame.
    pub(super) fn mark_durable(&mut self) {
        self.durable = self.written;
    }

    /// Records that frames since the last commit were not written.
    pub(super) fn forget_written(&mut self) {
        self.written = self.written.min(self.durable);
    }

    /// Keeps the ids of the first `tokens` tokens and returns how many are left. Frames keep the ids of
    /// whole groups only, because a frame with ids of the tail may be released.
    pub(super) fn cut(&mut self, tokens: u64, group_tokens: usize) -> usize {
        let ids = usize::try_from(tokens).unwrap_or(usize::MAX).min(self.ids.len());
        self.ids.truncate(ids);
        let sealed = ids / group_tokens * group_tokens;
        self.written = self.written.min(sealed);
        self.durable = self.durable.min(sealed);
        self.grouped = self.grouped.min(sealed);
        ids
    }

    /// Returns the ids of a fork. Written ids count as durable there, because the fork's first
    /// commit names the frames.
    pub(super) fn fork(&self) -> Self {
        Self { ids: self.ids.clone(), written: self.written, durable: self.written, grouped: self.grouped }
    }

    /// Returns the ids for a handle that never writes.
    pub(super) fn snapshot(&self) -> Self {
        Self { ids: self.ids.clone(), ..Self::default() }
    }

    /// Starts an open: all ids count as grouped until a small frame that holds some is read.
    pub(super) fn begin_open(&mut self) {
        self.grouped = usize::MAX;
    }

    /// Copies ids of a frame (little endian) to position `first`. Ids in a gap before it are zero until another frame
    /// gives them. Memory must have been [reserved](Self::reserve).
    pub(super) fn lay(&mut self, first: usize, bytes: &[u8], in_small_frame: bool) {
        let count = bytes.len() / size_of::<u32>();
        self.ids.resize((first + count).max(self.ids.len()), 0);
        for (id, bytes) in self.ids[first..first + count].iter_mut().zip(bytes.as_chunks().0) {
            *id = u32::from_le_bytes(*bytes);
        }
        if in_small_frame {
            self.grouped = self.grouped.min(first);
        }
    }

    /// Ends an open: the last commit covers the first `count` ids.
    pub(super) fn finish_open(&mut self, count: usize) {
        self.ids.truncate(count);
        (self.written, self.durable) = (count, count);
        self.grouped = self.grouped.min(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(count: usize) -> TokenIds {
        let mut ids = TokenIds::default();
        ids.extend(&(0..count as u32).collect::<Vec<_>>());
        ids
    }

    #[test]
    fn token_ids_after_a_cut_are_written_from_the_last_whole_group() {
        let mut ids = ids(10);
        ids.mark_written(10, true);
        ids.mark_durable();
        assert_eq!(ids.cut(7, 4), 7);
        assert_eq!((ids.len(), ids.unwritten_from(false), ids.unwritten_from(true)), (7, 4, 4));
    }

    #[test]
    fn token_ids_of_failed_frames_are_written_again() {
        let mut ids = ids(10);
        ids.mark_written(4, false);
        ids.mark_durable();
        ids.mark_written(10, false);
        ids.forget_written();
        assert_eq!(ids.unwritten_from(false), 4);
        assert_eq!(ids.unwritten_from(true), 0);
    }

    #[test]
    fn token_ids_of_a_small_frame_are_merged_with_the_next_groups() {
        let mut ids = TokenIds::default();
        ids.begin_open();
        ids.lay(0, &[1, 0, 0, 0, 2, 0, 0, 0], false);
        ids.lay(2, &[3, 0, 0, 0], true);
        ids.finish_open(3);
        assert_eq!(ids.as_slice(), [1, 2, 3]);
        assert_eq!((ids.unwritten_from(false), ids.grouped()), (3, 2));
    }

    #[test]
    fn token_ids_of_a_fork_count_as_durable_as_far_as_they_are_written() {
        let mut ids = ids(10);
        ids.mark_written(6, false);
        let mut fork = ids.fork();
        fork.forget_written();
        assert_eq!(fork.unwritten_from(false), 6);
        assert_eq!(ids.snapshot().unwritten_from(false), 0);
    }
}
