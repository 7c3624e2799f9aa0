//! Cutting a sequence back to its first tokens: speculative decoding that was rejected, a conversation taken back.

use super::Sequence;
use super::blocks::{ScanPart, read_block};
use crate::catalog::{Source, release_record};
use crate::error::{Error, ErrorKind, Result};
use std::sync::Arc;
use stratakv_format::manifest::{Kind, SequenceTruncate};
use zerocopy::little_endian::U64;

impl Sequence {
    /// Keeps the first `tokens` tokens of every layer, and as many token ids; below a commit as well, and inside a group. The
    /// caller's state stays as it is. It becomes durable with the next commit; a commit with
    /// [`Durability::None`](crate::Durability::None) that was not written yet is cut with it. Views taken before keep what they saw.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: more tokens than there are. [`ErrorKind::Corruption`], [`ErrorKind::Io`]: a group that
    /// the cut falls into could not be read; nothing changed.
    pub fn truncate(&mut self, tokens: u64) -> Result<()> {
        self.store.committer.check()?;
        if tokens > self.len() {
            let text = format!("truncate to {tokens} tokens of a sequence of {}", self.len());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // Frames that the cut leaves nothing of are let go: no write into them may be under way.
        self.land_all()?;
        let mut blocks = Vec::with_capacity(self.layers.len());
        for at in 0..self.layers.len() {
            let block = self.cut_block(at, tokens);
            blocks.push(block.map_err(|e| e.during(format!("truncate to {tokens} tokens, layer {at}")))?);
        }
        for (layer, block) in self.layers.iter_mut().zip(&blocks) {
            if let Some(layer) = layer {
                layer.cut(tokens, block.as_deref());
            }
        }
        let ids = usize::try_from(tokens).unwrap_or(usize::MAX).min(self.token_ids.len());
        self.token_ids.truncate(ids);
        // Token ids of the tail may stand in a frame that is let go.
        let sealed = ids / self.who.layout.group_tokens() * self.who.layout.group_tokens();
        self.ids_written = self.ids_written.min(sealed);
        self.ids_durable = self.ids_durable.min(sealed);
        self.ids_grouped = self.ids_grouped.min(sealed);
        self.settled = self.settled.min(tokens);
        if let Some((owed, owed_ids)) = &mut self.owed {
            (*owed, *owed_ids) = ((*owed).min(tokens), (*owed_ids).min(ids));
        }
        // Frames that go are not to be held by what was read ahead.
        self.streams.iter().for_each(|streams| streams.give_all_back());
        self.cut_frames(tokens);
        self.measure_frames();
        // They only shrink.
        self.account();
        self.account_methods();
        Ok(())
    }

    /// The block, decoded, of the group of layer `at` that a cut falls into, when it is sealed and keeps some of its tokens.
    pub(super) fn cut_block(&self, at: usize, tokens: u64) -> Result<Option<Vec<u8>>> {
        let Some(layer) = self.layers.get(at).and_then(Option::as_ref) else { return Ok(None) };
        let size = self.who.layout.group_tokens() as u64;
        let group = tokens / size;
        if tokens.is_multiple_of(size) || group >= layer.groups() {
            return Ok(None);
        }
        if let Some(block) = layer.building_block(group) {
            return layer.decoded(block).map(|block| Some(block.into_owned()));
        }
        let lost = || Error::new(ErrorKind::Corruption, format!("group {group} is nowhere"));
        let extent = layer.table.find(group).ok_or_else(lost)?;
        if let Source::Memory(run) = &extent.source {
            let block = run.block((group - extent.first_group) as usize + extent.skip)?;
            return layer.decoded(block).map(|block| Some(block.into_owned()));
        }
        let place = extent.place(group, &layer.block, layer.geometry.planes()).ok_or_else(lost)?;
        let block = read_block(&Arc::clone(&self.store.devices), layer, (group, ScanPart::Block), size, &place)?;
        layer.decoded(&block).map(|block| Some(block.into_owned()))
    }

    /// Frames hold less of the sequence from now on: whole groups only, as the next commit writes the tail anew. Those that hold
    /// none are let go, so that cutting and growing again piles up nothing.
    fn cut_frames(&mut self, tokens: u64) {
        let (sequence, state_frame) = (self.who.sequence, self.state_frame);
        let sealed = tokens / self.who.layout.group_tokens() as u64 * self.who.layout.group_tokens() as u64;
        let keeps = |first_token: Option<u64>| first_token.is_some_and(|first| first < sealed);
        self.frames.retain(|frame| frame.holds_state || keeps(frame.first_token));
        for frame in &mut self.frames {
            frame.token_end = frame.token_end.min(sealed);
            frame.first_token = frame.first_token.filter(|first| *first < sealed);
        }
        self.cut = true;
        if self.stored {
            let cut = SequenceTruncate { sequence: U64::new(sequence.0), tokens: U64::new(sealed) };
            self.records.push(Kind::SequenceTruncate, &cut, &[]);
        }
        let (records, released) = (&mut self.records, &mut self.released);
        self.held.retain_mut(|held| {
            held.token_end = held.token_end.min(sealed);
            if keeps(held.first_token) {
                return true;
            }
            held.first_token = None;
            let keep = held.frame.0 == state_frame;
            if !keep && held.shared.is_none() {
                *released += 1;
                records.push(Kind::FrameRelease, &release_record(sequence, held.frame), &[]);
            }
            keep
        });
    }
}
