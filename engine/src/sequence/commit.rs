//! Committing: everything since the last commit becomes durable at once, with the caller's state and the token ids.
//!
//! A commit has five steps:
//!
//! 1. It decides whether to write the pending groups, or only the new tokens by themselves
//!    ([`Sequence::writes_groups`]).
//! 2. It drafts the frames and asks the committer for space in the manifest.
//! 3. It writes the frames and waits until every write has completed.
//! 4. It collects the manifest records. Their order is: creation and cuts, frames released by a merge, frames taken
//!    over by a fork, new frames, released states, the commit.
//! 5. It hands the request to the store, which syncs the segments and then the manifest, or queues the request.
//!
//! A commit that fails before step 4 leaves its frames unnamed. The next commit names them.

use super::commit_state::OwedCommit;
use super::handle::Sequence;
use super::layer::LayerState;
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted;
use crate::log::{CommitRequest, DerivedRelease, FrameBuilder};
use crate::metrics::lock;
use crate::options::Durability;
use std::time::Instant;
use stratakv_format::frame::CALLER_STATE_BYTES_MAX;
use stratakv_format::manifest::{Frame, FrameRef, Kind, SequenceCommit, SequenceCreate};
use zerocopy::little_endian::U64;

/// The approximate bytes of the records of a frame and of a reference to it.
const FRAME_RECORD_BYTES: usize = size_of::<Frame>() + size_of::<FrameRef>() + 16;
/// The approximate bytes of the records of a sequence, without its key.
const SEQUENCE_RECORD_BYTES: usize = size_of::<SequenceCreate>() + size_of::<SequenceCommit>() + 16;
/// The most tokens in a piece outside of groups.
const PIECE_TOKENS: usize = 128;

impl Sequence {
    /// Commits all tokens up to [`Sequence::len`], the token ids, and the caller's state as last set, atomically.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: nothing was committed; free space and commit again. If [`Error::is_queued`], the commit
    /// is kept as after [`Durability::Lazy`], and becomes durable with the next one that finds space.
    /// [`ErrorKind::Indeterminate`]: a write or sync failed midway; only the next open knows what is durable.
    /// [`ErrorKind::Poisoned`]: an earlier write or sync failed.
    pub fn commit(&mut self, durability: Durability) -> Result<()> {
        let (tokens, token_ids) = (self.len(), self.token_ids.len());
        if durability == Durability::None {
            self.store.committer.check()?;
            self.commits.owe(OwedCommit { tokens, token_ids });
            return Ok(());
        }
        let committed = self.commit_to(tokens, token_ids, durability);
        if committed.is_ok() && durability == Durability::Sync {
            self.refresh_states();
        }
        committed.map_err(|e| e.during(format!("commit of sequence {}", self.identity.sequence)))
    }

    /// Sets the caller's state, up to 64 KiB, and commits. A session that opens the sequence resumes from this state.
    ///
    /// # Errors
    /// As [`Sequence::commit`]. [`ErrorKind::InvalidArgument`]: the state is larger. After an error,
    /// [`Sequence::caller_state`] is unchanged, unless the commit stays queued ([`Error::is_queued`]).
    pub fn commit_with(&mut self, state: &[u8], durability: Durability) -> Result<()> {
        if state.len() > CALLER_STATE_BYTES_MAX {
            let bytes = state.len();
            let text = format!("commit: the caller's state has {bytes} bytes; at most {CALLER_STATE_BYTES_MAX}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let before = self.caller_state.replace(state);
        let committed = self.commit(durability);
        if committed.as_ref().is_err_and(|e| !e.is_queued()) {
            self.caller_state.restore(before);
            self.frames.refuse_state();
        }
        committed
    }

    /// Commits the first `length` tokens and the first `ids` token ids.
    ///
    /// # Errors
    /// As [`Sequence::commit`].
    pub(super) fn commit_to(&mut self, length: u64, ids: usize, durability: Durability) -> Result<()> {
        self.store.committer.check()?;
        let grouped = self.writes_groups(length);
        let drafts = self.commit_drafts(length, ids, grouped)?;
        self.admit(&drafts)?;
        // The commit does nothing but wait for the last frame, so this thread writes it.
        self.write_drafts(drafts, !planted!(SyncBeforeCompletion))?;
        self.land_all()?;
        self.drop_stored_summaries(None)?;
        self.layers.iter_mut().for_each(|layer| layer.mark_written(length));
        self.token_ids.mark_written(ids, grouped);
        if grouped {
            self.frames.gather(0);
            self.frames.keep_split_ids();
        }

        let mut request = self.new_request();
        if grouped {
            self.release_merged(&mut request)?;
        }
        self.frames.announce_forked(&self.identity, &mut request);
        self.frames.announce_derived(&self.store, &self.identity, &mut request);
        self.frames.announce_written(&self.identity, &mut request, &mut self.caller_state);
        let now = self.store.devices.environment.unix_ms();
        let committed = lock(&self.store.catalog).use_at(now);
        let commit = SequenceCommit {
            sequence: U64::new(self.identity.sequence.0),
            tokens: U64::new(length),
            state_frame: U64::new(self.caller_state.frame()),
            token_ids: U64::new(ids as u64),
            committed_unix_ms: U64::new(committed),
        };
        request.records.push(Kind::SequenceCommit, &commit, &[]);
        self.commits.request(length);
        self.caller_state.mark_committed();
        self.token_ids.mark_durable();
        let outcome = match durability {
            Durability::Sync => self.store.commit(request),
            _ => {
                self.store.committer.enqueue(request, Some(Instant::now() + self.store.limits.lazy_delay));
                Ok(())
            }
        };
        if outcome.as_ref().err().is_none_or(Error::is_queued) {
            self.commits.confirm(length);
        }
        outcome
    }

    /// Asks for space in the manifest for the records of a commit that writes `drafts`. A cut reuses the space of the
    /// frames it releases, and the tokens that it leaves of a group always find space.
    fn admit(&self, drafts: &[FrameBuilder]) -> Result<()> {
        let small = if self.commits.is_cut() { drafts.iter().filter(|draft| draft.is_small()).count() } else { 0 };
        let frames = (self.frames.to_announce() + drafts.len()).saturating_sub(self.commits.released() + small);
        let own = if self.commits.is_stored() { 0 } else { SEQUENCE_RECORD_BYTES + self.identity.key.len() };
        if frames + own > 0 {
            let bytes = frames * FRAME_RECORD_BYTES * self.identity.copies + own;
            self.store.committer.admit(bytes as u64)?;
        }
        Ok(())
    }

    /// Returns a request with the earlier records of the sequence, and with its layout if it is new.
    fn new_request(&mut self) -> CommitRequest {
        let new = !self.commits.is_stored();
        let layouts = new.then(|| (self.identity.layout_id, self.identity.layout.clone())).into_iter().collect();
        let cut = self.commits.cut_to().filter(|_| !new);
        let derived = cut.map(|tokens| DerivedRelease::Cut(self.identity.sequence, tokens)).into_iter().collect();
        CommitRequest { layouts, records: self.commits.take_records(), derived, ..CommitRequest::default() }
    }

    /// Returns whether a commit of `length` tokens writes the groups in memory.
    ///
    /// If few tokens are new, it writes them by themselves into a small frame. A later commit writes the gathered
    /// groups for good and releases the small frames. So a sequence that is committed token by token writes everything
    /// twice, and ends with few large frames. Encoded groups do not gather.
    fn writes_groups(&mut self, length: u64) -> bool {
        // A commit with groups in flight announces small frames together with them.
        if self.frames.has_unnamed_groups() || self.layers.iter().any(LayerState::has_encoded_pending) {
            return true;
        }
        let bytes = self.layers.pending_bytes();
        let gather_tokens = self.store.devices.environment.sizes().gather_tokens;
        let few = |since: u64| length.saturating_sub(since) < gather_tokens;
        let gathers = few(self.commits.settled())
            && few(self.layers.grouped_tokens())
            && bytes < self.frames.gather_limit()
            // All sequences together may have gathered so much that no memory is left for more.
            && self.frames.gather(bytes);
        bytes > 0 && !gathers
    }

    /// Releases small frames whose content is in groups by now.
    fn release_merged(&mut self, request: &mut CommitRequest) -> Result<()> {
        let ends = (self.layers.grouped_tokens(), self.token_ids.grouped() as u64);
        let records = self.frames.release_merged(&self.identity, ends, self.caller_state.frame());
        if planted!(ReleasedFirst) && self.commits.is_stored() && !records.is_empty() {
            return self.store.commit(CommitRequest { records, ..CommitRequest::default() });
        }
        request.records.append(&records);
        Ok(())
    }

    /// Returns drafts of all that a commit of `length` tokens and `ids` token ids writes: groups or new tokens, token
    /// ids, the caller's state.
    pub(super) fn commit_drafts(&mut self, length: u64, ids: usize, grouped: bool) -> Result<Vec<FrameBuilder>> {
        let mut drafts = if grouped { self.group_drafts()? } else { Vec::new() };
        let limit = self.frames.limit();
        let place = |drafts: &mut Vec<FrameBuilder>, bytes: usize, put: &mut dyn FnMut(&mut FrameBuilder)| {
            if drafts.last().is_none_or(|last| !last.is_empty() && last.bytes() + bytes > limit) {
                drafts.push(FrameBuilder::default());
            }
            if let Some(last) = drafts.last_mut() {
                put(last);
            }
        };
        for layer in self.layers.iter() {
            let most = (limit / 2 / layer.token_bytes()).min(PIECE_TOKENS);
            // The groups in the drafts count as written.
            let from = if grouped { layer.groups() * self.identity.layout.group_tokens() as u64 } else { 0 };
            for tail in layer.unwritten(from, length, most) {
                place(&mut drafts, tail.bytes + 128, &mut |draft| draft.tail(tail));
            }
        }
        // A frame holds one piece of token ids, so long ones need several frames.
        let per_frame = (limit / 8).max(1);
        let start = self.token_ids.unwritten_from(grouped);
        for (at, ids) in self.token_ids.as_slice()[start..ids].chunks(per_frame).enumerate() {
            let first = (start + at * per_frame) as u64;
            if at > 0 {
                drafts.push(FrameBuilder::default());
            }
            place(&mut drafts, ids.len() * 4 + 128, &mut |draft| draft.token_ids(first, ids));
        }
        if let Some(state) = self.caller_state.unwritten() {
            place(&mut drafts, state.len() + 128, &mut |draft| draft.state(length, state.to_vec()));
        }
        Ok(drafts)
    }

    /// Waits until every frame is written.
    ///
    /// # Errors
    /// As [`Self::land`].
    pub(super) fn land_all(&mut self) -> Result<()> {
        if planted!(SyncBeforeCompletion) {
            return Ok(());
        }
        while self.frames.in_flight() > 0 {
            self.land(true)?;
        }
        match self.frames.wait_all() {
            None => Ok(()),
            Some((at, e)) => {
                self.requeue(at);
                Err(e.during("write of a frame"))
            }
        }
    }
}
