//! Committing: everything since the last commit becomes durable at once, with the caller's state and the token ids.

use super::append::GATHERED_FRAMES;
use super::{ForkOrigin, ReferencedFrame, Sequence};
use crate::catalog::{RecordBuffer, ref_record, release_record};
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::planted;
use crate::io::seams::sizes;
use crate::log::{CommitRequest, CoveredEnds, FrameBuilder, unix_ms};
use crate::options::Durability;
use std::time::Instant;
use stratakv_format::FrameId;
use stratakv_format::frame::CALLER_STATE_BYTES_MAX;
use stratakv_format::manifest::{Frame, FrameRef, Kind, SequenceCommit, SequenceCreate};
use zerocopy::little_endian::U64;

/// Bytes of the records of a frame and of a reference to it, about.
const FRAME_RECORD_BYTES: usize = size_of::<Frame>() + size_of::<FrameRef>() + 16;
/// The same of a sequence.
const SEQUENCE_RECORD_BYTES: usize = size_of::<SequenceCreate>() + size_of::<SequenceCommit>() + 16;
/// The most tokens that a piece outside of groups holds.
const PIECE_TOKENS: usize = 128;

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
            self.refuse_state();
        }
        committed
    }

    /// Frames that hold the state that was refused commit it no more; one that holds nothing else goes.
    pub(super) fn refuse_state(&mut self) {
        self.frames.retain_mut(|frame| {
            let useless = frame.holds_state && frame.first_token.is_none();
            if useless {
                // Its space is not used again while a write into it is under way.
                let _ = frame.wait();
            }
            frame.holds_state = false;
            !useless
        });
        self.measure_frames();
    }

    /// Commits the first `length` tokens and the first `ids` token ids.
    pub(super) fn commit_to(&mut self, length: u64, ids: usize, durability: Durability) -> Result<()> {
        self.store.committer.check()?;
        let grouped = self.writes_groups(length);
        let drafts = self.commit_drafts(length, ids, grouped)?;
        let shared = self.held.iter().filter(|held| held.shared.is_some()).count();
        // A cut takes the place of what it lets go, and the tokens that it leaves of a group always find room.
        let small = if self.cut { drafts.iter().filter(|draft| draft.is_small()).count() } else { 0 };
        let frames = (self.frames.len() + shared + drafts.len()).saturating_sub(self.released + small);
        let own = if self.stored { 0 } else { SEQUENCE_RECORD_BYTES + self.who.key.len() };
        if frames + own > 0 {
            self.store.committer.admit((frames * FRAME_RECORD_BYTES * self.who.copies + own) as u64)?;
        }
        // Nothing is left to do but wait for the last frame: it is written here.
        self.write_drafts(drafts, !planted!(SyncBeforeCompletion))?;
        self.land_all()?;
        self.leave_stored(None)?;
        for layer in self.layers.iter_mut().flatten() {
            layer.written = layer.tokens.min(length).max(layer.written);
        }
        self.ids_written = ids;
        if grouped {
            self.ids_grouped = ids;
            self.gathered.resize(0);
            // Frames that were split off hold token ids which are not written again.
            for frame in &mut self.frames {
                frame.small = frame.small.filter(|ends| ends.ids == 0);
            }
        }

        let layouts = (!self.stored).then(|| (self.who.layout_id, self.who.layout.clone())).into_iter().collect();
        let mut request =
            CommitRequest { layouts, records: std::mem::take(&mut self.records), ..CommitRequest::default() };
        let mut states = Vec::new();
        if grouped {
            self.release_merged(&mut request)?;
        }
        for held in &mut self.held {
            let Some(shared) = held.shared.take() else { continue };
            let segments = held.announce(&mut request.records);
            request.records.push(Kind::FrameRef, &ref_record(self.who.sequence, held.frame, held.token_end), &[]);
            match shared {
                ForkOrigin::Named => request.pins.extend(segments),
                ForkOrigin::Unnamed => {
                    request.owes_copies |= segments.len() < self.who.copies;
                    request.segments.extend(segments);
                    request.flights.extend(held.slot.take_flights());
                }
            }
        }
        for frame in self.frames.drain(..) {
            // Where it lies now: a fork that was committed may have brought it into the catalog, and it may have been moved since.
            let held = ReferencedFrame::written(&frame, None);
            let segments = held.announce(&mut request.records);
            request.owes_copies |= segments.len() < self.who.copies;
            request.segments.extend(segments);
            request.flights.extend(held.slot.take_flights());
            request.records.push(Kind::FrameRef, &ref_record(self.who.sequence, frame.id, frame.token_end), &[]);
            self.held.push(held);
            if frame.holds_state {
                states.push(FrameId(std::mem::replace(&mut self.state_frame, frame.id.0)));
            }
        }
        // Frames that hold nothing but a state before this one: of the last commit, and of attempts since that failed.
        for old in states {
            if let Some(at) = self.held.iter().position(|held| held.frame == old && held.first_token.is_none()) {
                self.held.swap_remove(at);
                request.records.push(Kind::FrameRelease, &release_record(self.who.sequence, old), &[]);
            }
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
        (self.cut, self.released) = (false, 0);
        self.state_dirty = false;
        self.ids_durable = self.ids_written;
        self.stored = true;
        self.settled = length;
        let outcome = match durability {
            Durability::Sync => self.store.commit(request),
            _ => {
                self.store.committer.enqueue(request, Some(Instant::now() + self.store.limits.lazy_delay));
                Ok(())
            }
        };
        if outcome.as_ref().err().is_none_or(Error::is_queued) {
            self.committed = length;
        }
        outcome
    }

    /// Whether a commit of `length` tokens writes the groups in memory. While few tokens are new it does not: it writes them by
    /// themselves, into a small frame, and a later commit writes the groups that have gathered, for good, and lets the small
    /// frames go. So a sequence that is committed token by token writes everything twice, and ends up with few large frames.
    /// Groups under a codec do not gather.
    fn writes_groups(&mut self, length: u64) -> bool {
        // Groups on their way stand for small frames as well.
        if self.frames.iter().any(|frame| frame.small.is_none()) {
            return true;
        }
        if self.layers.iter().flatten().any(super::Layer::has_encoded_pending) {
            return true;
        }
        let bytes = self.pending_bytes();
        let few = |since: u64| length.saturating_sub(since) < sizes().gather_tokens;
        let gathers = few(self.settled)
            && few(self.grouped_tokens())
            && bytes < self.frame_target * GATHERED_FRAMES
            // Other sequences have gathered so much that there is no memory for more.
            && self.gathered.resize(bytes);
        bytes > 0 && !gathers
    }

    /// Tokens of the groups that frames hold, of all layers.
    fn grouped_tokens(&self) -> u64 {
        self.layers.iter().flatten().map(super::Layer::grouped_tokens).min().unwrap_or(0)
    }

    /// Lets go of small frames that hold nothing which is not in groups by now; those with the caller's state stay for that.
    fn release_merged(&mut self, request: &mut CommitRequest) -> Result<()> {
        let (tokens, ids) = (self.grouped_tokens(), self.ids_grouped as u64);
        let (sequence, state_frame) = (self.who.sequence, self.state_frame);
        let before = self.held.len();
        let mut records = RecordBuffer::default();
        self.held.retain_mut(|held| {
            let merged =
                |ends: CoveredEnds| ends.tokens.min(held.token_end) <= tokens && ends.ids.min(held.token_end) <= ids;
            if held.first_token.is_none() || !held.small.is_some_and(merged) {
                return true;
            }
            if held.frame.0 == state_frame {
                held.first_token = None;
                return true;
            }
            if held.shared.is_none() {
                records.push(Kind::FrameRelease, &release_record(sequence, held.frame), &[]);
            }
            false
        });
        if self.held.len() < before {
            coverage!(Merged);
            self.measure_frames();
        }
        if planted!(ReleasedFirst) && self.stored && !records.is_empty() {
            return self.store.commit(CommitRequest { records, ..CommitRequest::default() });
        }
        request.records.append(&records);
        Ok(())
    }

    /// Drafts of everything a commit of `length` tokens and `ids` token ids writes: groups or what is new, token ids, state.
    pub(super) fn commit_drafts(&mut self, length: u64, ids: usize, grouped: bool) -> Result<Vec<FrameBuilder>> {
        let mut drafts = if grouped { self.group_drafts()? } else { Vec::new() };
        let limit = self.frame_limit;
        let place = |drafts: &mut Vec<FrameBuilder>, bytes: usize, put: &mut dyn FnMut(&mut FrameBuilder)| {
            if drafts.last().is_none_or(|last| !last.is_empty() && last.bytes() + bytes > limit) {
                drafts.push(FrameBuilder::default());
            }
            if let Some(last) = drafts.last_mut() {
                put(last);
            }
        };
        for layer in self.layers.iter().flatten() {
            let most = (limit / 2 / layer.token_bytes()).min(PIECE_TOKENS);
            // What the drafts hold so far is as good as written.
            let from = if grouped { layer.groups() * self.who.layout.group_tokens() as u64 } else { 0 };
            for tail in layer.unwritten(from, length, most) {
                place(&mut drafts, tail.bytes + 128, &mut |draft| draft.tail(tail));
            }
        }
        // A frame holds one piece of token ids: long ones go over several frames.
        let per_frame = (limit / 8).max(1);
        // Frames that are let go held those since the last groups.
        let start = if grouped { self.ids_grouped } else { self.ids_written };
        for (at, ids) in self.token_ids[start..ids].chunks(per_frame).enumerate() {
            let first = (start + at * per_frame) as u64;
            if at > 0 {
                drafts.push(FrameBuilder::default());
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
        if planted!(SyncBeforeCompletion) {
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
        (self.committed, self.settled) = (tokens, tokens);
        self.state_frame = state_frame.map_or(0, |frame| frame.0);
    }
}
