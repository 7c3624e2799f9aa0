//! A frame that a sequence refers to.

use crate::catalog::{CopyMeta, FrameMeta, FrameSlot, RecordBuffer, SegmentHandle};
use crate::log::{CoveredEnds, WrittenFrame};
use std::sync::Arc;
use stratakv_format::{FrameId, Location};

/// A frame that the sequence refers to.
#[derive(Clone)]
pub(super) struct ReferencedFrame {
    pub(super) frame: FrameId,
    pub(super) meta: FrameMeta,
    /// Its copies and where they are stored now.
    pub(super) slot: Arc<FrameSlot>,
    /// The first token of which the frame holds anything; none if it holds only the caller's state.
    pub(super) first_token: Option<u64>,
    /// Tokens from here on were cut off.
    pub(super) token_end: u64,
    /// Where its tokens and token ids end, if it holds no groups.
    pub(super) small: Option<CoveredEnds>,
    /// The origin of the frame, for the next commit. None once a commit of this sequence has named the frame.
    pub(super) shared: Option<ForkOrigin>,
}

/// The origin of a frame that a fork took over from another sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForkOrigin {
    /// A commit of the other sequence has named the frame.
    Named,
    /// No commit has named the frame, so it may not be durable.
    Unnamed,
}

impl ReferencedFrame {
    /// Returns the reference to a frame that was written.
    pub(super) fn written(frame: &WrittenFrame, shared: Option<ForkOrigin>) -> Self {
        Self {
            frame: frame.id,
            meta: frame.meta.clone(),
            slot: Arc::clone(&frame.body),
            first_token: frame.first_token,
            token_end: frame.token_end,
            small: frame.small,
            shared,
        }
    }

    /// Returns the bytes of memory that a reference and the tables of its frame take.
    pub(super) fn table_bytes(slot: &FrameSlot) -> usize {
        size_of::<Self>() + slot.memory_bytes()
    }

    /// Records the frame with the places where its copies are stored now. Returns the segments of the copies.
    pub(super) fn announce(&self, records: &mut RecordBuffer) -> Vec<Arc<SegmentHandle>> {
        let now = self.slot.now();
        let pages = self.meta.location.pages;
        let copy = |copy| {
            let (segment, page, header_crc) = now.copy(copy);
            let (device, segment) = segment.key;
            CopyMeta { generation: 1, location: Location { device, segment, page, pages }, header_crc }
        };
        let first = copy(0);
        let meta = FrameMeta {
            location: first.location,
            header_crc: first.header_crc,
            other_copies: (1..now.copies()).map(copy).collect(),
            ..self.meta.clone()
        };
        meta.announce(self.frame, records);
        (0..now.copies()).map(|copy| Arc::clone(now.copy(copy).0)).collect()
    }

    /// Returns whether every token and token id of the frame is in frames with groups, which hold the first `tokens`
    /// tokens and `ids` token ids.
    fn is_merged(&self, tokens: u64, ids: u64) -> bool {
        let merged =
            |ends: CoveredEnds| ends.tokens.min(self.token_end) <= tokens && ends.ids.min(self.token_end) <= ids;
        self.first_token.is_some() && self.small.is_some_and(merged)
    }

    /// Cuts the reference to `sealed` tokens. Returns whether the frame still holds any of them.
    fn cut(&mut self, sealed: u64) -> bool {
        self.token_end = self.token_end.min(sealed);
        self.first_token = self.first_token.filter(|first| *first < sealed);
        self.first_token.is_some()
    }
}

/// Cuts references to `sealed` tokens and drops references of which nothing is left. Returns the frames that a commit
/// of this sequence has named and that the next one releases. The frame with the caller's state stays.
pub(super) fn cut_references(frames: &mut Vec<ReferencedFrame>, sealed: u64, state_frame: u64) -> Vec<FrameId> {
    let mut released = Vec::new();
    frames.retain_mut(|held| {
        let keep = held.cut(sealed) || held.frame.0 == state_frame;
        if !keep && held.shared.is_none() {
            released.push(held.frame);
        }
        keep
    });
    released
}

/// Drops small frames whose content is in frames with groups by now. Returns the frames that a commit of this sequence
/// has named and that the next one releases. The frame with the caller's state stays, but counts as empty of tokens.
pub(super) fn merge_references(
    frames: &mut Vec<ReferencedFrame>,
    (tokens, ids): (u64, u64),
    state_frame: u64,
) -> Vec<FrameId> {
    let mut released = Vec::new();
    frames.retain_mut(|held| {
        if !held.is_merged(tokens, ids) {
            return true;
        }
        if held.frame.0 == state_frame {
            held.first_token = None;
            return true;
        }
        if held.shared.is_none() {
            released.push(held.frame);
        }
        false
    });
    released
}
