//! Truncating a sequence to its first tokens, such as after speculative decoding that was rejected.
//!
//! 1. Every write completes, because frames of which the cut leaves nothing are dropped.
//! 2. The block of each group that the cut falls into is read, so that a failed read changes nothing.
//! 3. Layers, token ids and frames are cut. Frames keep whole groups only; the next commit writes the tail again.

use super::blocks::{ScanPart, read_block};
use super::errors::lost_group;
use super::handle::Sequence;
use crate::catalog::Source;
use crate::error::{Error, ErrorKind, Result};
use std::sync::Arc;
use stratakv_format::FrameId;

impl Sequence {
    /// Keeps the first `tokens` tokens of every layer, and as many token ids. A cut may fall below a commit and inside
    /// a group. The caller's state stays as it is. The cut becomes durable with the next commit. It also applies to a
    /// commit at [`Durability::None`](crate::Durability::None) that was not written yet. Earlier selections keep what
    /// they saw.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the sequence has fewer tokens. [`ErrorKind::Corruption`], [`ErrorKind::Io`]: the
    /// group that the cut falls into could not be read; nothing changed.
    pub fn truncate(&mut self, tokens: u64) -> Result<()> {
        self.store.committer.check()?;
        if tokens > self.len() {
            let text = format!("truncate to {tokens} tokens: the sequence has {}", self.len());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.land_all()?;
        let mut blocks = Vec::with_capacity(self.layers.slots());
        for at in 0..self.layers.slots() {
            let block = self.cut_block(at, tokens);
            blocks.push(block.map_err(|e| e.during(format!("truncate to {tokens} tokens, layer {at}")))?);
        }
        for (at, block) in blocks.iter().enumerate() {
            if let Some(layer) = self.layers.get_mut(at) {
                layer.cut(tokens, block.as_deref());
            }
        }
        let group_tokens = self.identity.layout.group_tokens();
        let ids = self.token_ids.cut(tokens, group_tokens);
        self.commits.clip(tokens, ids);
        // Records that were read ahead must not hold the frames that are released.
        self.streams.iter().for_each(|streams| streams.give_all_back());
        let sealed = tokens / group_tokens as u64 * group_tokens as u64;
        let released = self.frames.cut(sealed, self.caller_state.frame());
        let next_frame = FrameId(self.store.ids.peek().frame);
        self.commits.record_cut(self.identity.sequence, sealed, &released, next_frame);
        self.frames.measure();
        self.selectors.cut_loaded(sealed);
        // Tables and summaries only shrink, so both calls succeed.
        let _ = self.account();
        self.account_summaries();
        Ok(())
    }

    /// Returns the decoded block of the group of layer `at` that a cut falls into; none unless that group is sealed and
    /// keeps some of its tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`], [`ErrorKind::Io`]: the group could not be read.
    pub(super) fn cut_block(&self, at: usize, tokens: u64) -> Result<Option<Vec<u8>>> {
        let Some(layer) = self.layers.get(at) else { return Ok(None) };
        let size = self.identity.layout.group_tokens() as u64;
        let group = tokens / size;
        if tokens.is_multiple_of(size) || group >= layer.groups() {
            return Ok(None);
        }
        if let Some(block) = layer.building_block(group) {
            return layer.decoded(block).map(|block| Some(block.into_owned()));
        }
        let lost = || lost_group(group, at);
        let extent = layer.table().find(group).ok_or_else(lost)?;
        if let Source::Memory(run) = &extent.source {
            let block = run.block((group - extent.first_group) as usize + extent.skip)?;
            return layer.decoded(block).map(|block| Some(block.into_owned()));
        }
        let place = extent.place(group, layer.block(), layer.geometry().planes()).ok_or_else(lost)?;
        let block = read_block(&Arc::clone(&self.store.devices), layer, (group, ScanPart::Block), size, &place)?;
        layer.decoded(&block).map(|block| Some(block.into_owned()))
    }
}
