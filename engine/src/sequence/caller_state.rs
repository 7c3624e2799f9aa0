//! The caller's state: opaque bytes that a commit stores with the tokens.
//!
//! Invariant: `frame` names the frame with the state of the last commit request, and that frame is never released while
//! it does.

use stratakv_format::FrameId;

/// The caller's state and where it is stored.
#[derive(Default)]
pub(super) struct CallerState {
    bytes: Option<Vec<u8>>,
    /// The state was set since the last commit.
    dirty: bool,
    /// The frame that holds the committed state; 0 if none does.
    frame: u64,
}

/// The state before [`CallerState::replace`].
pub(super) struct PreviousState {
    bytes: Option<Vec<u8>>,
    dirty: bool,
}

impl CallerState {
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        self.bytes.as_deref()
    }

    /// Returns the frame that holds the committed state; 0 if none does.
    pub(super) fn frame(&self) -> u64 {
        self.frame
    }

    /// Returns the state if the next commit has to write it.
    pub(super) fn unwritten(&self) -> Option<&[u8]> {
        self.bytes().filter(|_| self.dirty)
    }

    /// Sets a new state, which the next commit writes. Returns the one before.
    pub(super) fn replace(&mut self, bytes: &[u8]) -> PreviousState {
        let bytes = self.bytes.replace(bytes.to_vec());
        PreviousState { bytes, dirty: std::mem::replace(&mut self.dirty, true) }
    }

    /// Goes back to the state before a commit that failed.
    pub(super) fn restore(&mut self, before: PreviousState) {
        (self.bytes, self.dirty) = (before.bytes, before.dirty);
    }

    /// Records that the frame with the state was not written.
    pub(super) fn mark_unwritten(&mut self) {
        self.dirty = true;
    }

    /// Records that a commit request names `frame`. Returns the frame before it.
    pub(super) fn name_frame(&mut self, frame: FrameId) -> FrameId {
        FrameId(std::mem::replace(&mut self.frame, frame.0))
    }

    /// Records that a commit request covers the state.
    pub(super) fn mark_committed(&mut self) {
        self.dirty = false;
    }

    /// Returns the state of a fork, which writes it with its first commit.
    pub(super) fn fork(&self) -> Self {
        Self { bytes: self.bytes.clone(), dirty: self.bytes.is_some(), frame: 0 }
    }

    /// Returns the state for a handle that never writes.
    pub(super) fn snapshot(&self) -> Self {
        Self { bytes: self.bytes.clone(), ..Self::default() }
    }

    /// Sets the state that an open has read from `frame`.
    pub(super) fn load(&mut self, bytes: &[u8], frame: FrameId) {
        (self.bytes, self.frame) = (Some(bytes.to_vec()), frame.0);
    }

    /// Ends an open: `committed` is the frame that the last commit names.
    ///
    /// # Errors
    /// The frame, if the open has not read a state from it.
    pub(super) fn finish_open(&mut self, committed: Option<FrameId>) -> Result<(), FrameId> {
        match committed {
            None => (self.bytes, self.frame) = (None, 0),
            Some(frame) if frame.0 == self.frame => {}
            Some(frame) => return Err(frame),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_state_is_written_once_per_change() {
        let mut state = CallerState::default();
        assert_eq!(state.unwritten(), None);
        state.replace(b"one");
        assert_eq!(state.unwritten(), Some(&b"one"[..]));
        assert_eq!(state.name_frame(FrameId(3)), FrameId(0));
        state.mark_committed();
        assert_eq!((state.bytes(), state.unwritten(), state.frame()), (Some(&b"one"[..]), None, 3));
        assert_eq!(state.fork().unwritten(), Some(&b"one"[..]));
        assert_eq!(state.snapshot().unwritten(), None);
    }

    #[test]
    fn caller_state_of_a_failed_commit_is_taken_back() {
        let mut state = CallerState::default();
        state.replace(b"one");
        state.mark_committed();
        let before = state.replace(b"two");
        state.restore(before);
        assert_eq!((state.bytes(), state.unwritten()), (Some(&b"one"[..]), None));
        state.mark_unwritten();
        assert_eq!(state.unwritten(), Some(&b"one"[..]));
    }

    #[test]
    fn caller_state_counts_after_an_open_only_from_the_committed_frame() {
        let mut state = CallerState::default();
        state.load(b"one", FrameId(2));
        assert_eq!(state.finish_open(Some(FrameId(5))), Err(FrameId(5)));
        assert_eq!(state.finish_open(Some(FrameId(2))), Ok(()));
        assert_eq!(state.bytes(), Some(&b"one"[..]));
        assert_eq!(state.finish_open(None), Ok(()));
        assert_eq!(state.bytes(), None);
    }
}
