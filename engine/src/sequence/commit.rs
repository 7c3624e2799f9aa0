//! Committing: everything since the last commit becomes durable at once, with the caller's state and the token ids.

use super::{Held, Sequence, Shared};
use crate::device::environment::{Mutant, mutated};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{ref_record, release_record};
use crate::log::{CommitRequest, Draft, unix_ms};
use crate::options::Durability;
use std::time::Instant;
use stratakv_format::FrameId;
use stratakv_format::frame::CALLER_STATE_BYTES_MAX;
use stratakv_format::manifest::{Kind, SequenceCommit};
use zerocopy::little_endian::U64;

impl Sequence {
    /// Commits all tokens up to [`Sequence::len`], the token ids and the caller's state as last set, atomically.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: nothing was committed; make room and commit again. Where [`Error::is_queued`] says so, the
    /// commit is kept as after [`Durability::Lazy`], and durable with the next one that finds room.
    /// [`ErrorKind::Indeterminate`]: a write or sync failed midway; what is durable is known after reopening.
    /// [`ErrorKind::Poisoned`]: an earlier one did.
    pub fn commit(&mut self, durability: Durability) -> Result<()> {
        match durability {
            Durability::None => {
                self.store.committer.check()?;
                self.owed = Some((self.len(), self.token_ids.len()));
                Ok(())
            }
            _ => self
                .commit_to(self.len(), self.token_ids.len(), durability)
                .map_err(|e| e.during(format!("commit of sequence {}", self.who.sequence))),
        }
    }

    /// Sets the caller's state, up to 64 KiB, and commits. Reopening gives the state back: a session resumes from it.
    ///
    /// # Errors
    /// As [`Sequence::commit`]; [`ErrorKind::InvalidArgument`] for a larger state. Unless the commit is kept
    /// ([`Error::is_queued`]), [`Sequence::state`] is what it was before.
    pub fn commit_with(&mut self, state: &[u8], durability: Durability) -> Result<()> {
        if state.len() > CALLER_STATE_BYTES_MAX {
            let text = format!("caller state of {} bytes; at most {CALLER_STATE_BYTES_MAX}", state.len());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let before = (self.state.replace(state.to_vec()), std::mem::replace(&mut self.state_dirty, true));
        let committed = self.commit(durability);
        if committed.as_ref().is_err_and(|e| !e.is_queued()) {
            (self.state, self.state_dirty) = before;
            // A frame that holds the state that was refused commits it no more.
            self.frames.iter_mut().for_each(|frame| frame.holds_state = false);
        }
        committed
    }

    /// Commits the first `length` tokens and the first `ids` token ids.
    pub(super) fn commit_to(&mut self, length: u64, ids: usize, durability: Durability) -> Result<()> {
        self.store.committer.check()?;
        let drafts = self.commit_drafts(length, ids)?;
        // Nothing is left to do but wait for the last frame: it is written here.
        self.write_drafts(drafts, !mutated(Mutant::SyncBeforeCompletion))?;
        self.land_all()?;
        for layer in self.layers.iter_mut().flatten() {
            layer.tail_written = layer.tokens.min(length).max(layer.tail_written);
        }
        self.ids_written = ids;

        let layout = (!self.stored).then(|| (self.who.layout_id, self.who.layout.clone()));
        let mut request =
            CommitRequest { layout, records: std::mem::take(&mut self.records), ..CommitRequest::default() };
        let mut released = 0;
        for held in &mut self.held {
            let Some(shared) = held.shared.take() else { continue };
            let segments = held.announce(&mut request.records);
            request.records.push(Kind::FrameRef, &ref_record(self.who.sequence, held.frame, held.token_end), &[]);
            request.flights.append(&mut held.flights);
            match shared {
                Shared::Named => request.pins.extend(segments),
                Shared::Unnamed => request.segments.extend(segments),
            }
        }
        for frame in self.frames.drain(..) {
            frame.meta.announce(frame.id, &mut request.records);
            request.records.push(Kind::FrameRef, &ref_record(self.who.sequence, frame.id, frame.token_end), &[]);
            self.held.push(Held::written(&frame, None));
            if frame.holds_state {
                released = std::mem::replace(&mut self.state_frame, frame.id.0);
            }
            frame.join(&mut request);
        }
        // A frame that held nothing but the state before this one.
        let old = FrameId(released);
        if let Some(at) = self.held.iter().position(|held| held.frame == old && held.first_token.is_none()) {
            self.held.swap_remove(at);
            request.records.push(Kind::FrameRelease, &release_record(self.who.sequence, old), &[]);
        }
        let commit = SequenceCommit {
            sequence: U64::new(self.who.sequence.0),
            tokens: U64::new(length),
            state_frame: U64::new(self.state_frame),
            token_ids: U64::new(ids as u64),
            committed_unix_ms: U64::new(unix_ms()),
        };
        request.records.push(Kind::SequenceCommit, &commit, &[]);
        self.owed = None;
        self.state_dirty = false;
        self.ids_durable = self.ids_written;
        self.stored = true;
        let outcome = match durability {
            Durability::Sync => self.store.commit(request),
            _ => {
                self.store.committer.enqueue(request, Some(Instant::now() + self.store.lazy_delay));
                Ok(())
            }
        };
        if outcome.as_ref().err().is_none_or(Error::is_queued) {
            self.committed = length;
        }
        outcome
    }

    /// Drafts of everything a commit of `length` tokens and `ids` token ids writes: groups, tails, token ids, state.
    fn commit_drafts(&mut self, length: u64, ids: usize) -> Result<Vec<Draft>> {
        let mut drafts = self.group_drafts()?;
        let limit = self.frame_limit;
        let place = |drafts: &mut Vec<Draft>, bytes: usize, put: &mut dyn FnMut(&mut Draft)| {
            if drafts.last().is_none_or(|last| !last.is_empty() && last.bytes() + bytes > limit) {
                drafts.push(Draft::default());
            }
            if let Some(last) = drafts.last_mut() {
                put(last);
            }
        };
        for tail in self.layers.iter().flatten().filter_map(|layer| layer.unwritten_tail(length)) {
            let bytes = tail.keys.len() + tail.values.len() + 128;
            let mut tail = Some(tail);
            place(&mut drafts, bytes, &mut |draft| tail.take().into_iter().for_each(|tail| draft.tail(tail)));
        }
        // A frame holds one piece of token ids: long ones go over several frames.
        let per_frame = (limit / 8).max(1);
        for (at, ids) in self.token_ids[self.ids_written..ids].chunks(per_frame).enumerate() {
            let first = (self.ids_written + at * per_frame) as u64;
            if at > 0 {
                drafts.push(Draft::default());
            }
            place(&mut drafts, ids.len() * 4 + 128, &mut |draft| draft.token_ids(first, ids));
        }
        if self.state_dirty
            && let Some(state) = &self.state
        {
            place(&mut drafts, state.len() + 128, &mut |draft| draft.state(length, state.clone()));
        }
        Ok(drafts)
    }

    /// Waits until every frame is written.
    pub(super) fn land_all(&mut self) -> Result<()> {
        if mutated(Mutant::SyncBeforeCompletion) {
            return Ok(());
        }
        while self.frames.iter().any(|frame| !frame.runs.is_empty()) {
            self.land(true)?;
        }
        for at in 0..self.frames.len() {
            if let Err(e) = self.frames[at].wait() {
                self.requeue(at);
                return Err(e.during("write of a frame"));
            }
        }
        Ok(())
    }

    pub(super) fn set_committed(&mut self, tokens: u64, state_frame: Option<FrameId>) {
        self.committed = tokens;
        self.state_frame = state_frame.map_or(0, |frame| frame.0);
    }
}
