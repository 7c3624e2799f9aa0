//! Opening a sequence: its frames are read from the front and laid over each other, in the order in which they were
//! written.
//!
//! 1. The manifest names the frames ([`references`]).
//! 2. The fronts of frames (header, summaries, small pieces) are read in batches that fit into memory.
//! 3. Each front is laid over those before it ([`Sequence::lay_frame`]): later frames replace what earlier ones hold of
//!    the same tokens. Group data stays on the device, except for a group of which the sequence has only the first
//!    tokens.
//! 4. Tokens outside of groups are put together. Groups that only small frames hold are collected again, the rest
//!    becomes the tail. Every committed token and token id must be there.

use super::errors::no_memory;
use super::frame_metadata::{FrameReference, front_bytes, references};
use super::handle::Sequence;
use super::open_frame::{LooseTokens, UncommittedTail};
use crate::catalog::{RecordBuffer, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::planted;
use crate::log::{AdapterPart, SequenceIdentity, SequenceLock, StoreInner};
use crate::metrics::{Category, Reservation, lock};
use crate::options::SummaryResidency;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::{PAGE_BYTES, SequenceId};

/// The most bytes of frame fronts that are read at once.
const BATCH_BYTES: usize = 8 << 20;

/// Opens a sequence as its last commit left it.
///
/// # Errors
/// [`ErrorKind::Corruption`]: frames are damaged, or committed tokens are in none. [`ErrorKind::Unsupported`]: a frame
/// of another version. [`ErrorKind::MemoryLimit`]; [`ErrorKind::Io`].
pub(crate) fn load(
    lock: SequenceLock,
    id: SequenceId,
    meta: &SequenceMeta,
    summaries: SummaryResidency,
) -> Result<Sequence> {
    let (mut sequence, rest) = read_frames(lock, id, meta, summaries)?;
    if let Some(part) = rest.adapter.first() {
        let text = format!("open: sequence {id} has a frame with an adapter of layer {}", part.layer);
        return Err(Error::new(ErrorKind::Corruption, text));
    }
    sequence.finish_open(meta, rest)?;
    Ok(sequence)
}

/// Returns the pieces of an adapter that the frames of its sequence hold.
///
/// # Errors
/// As [`load`].
pub(super) fn load_adapter_parts(lock: SequenceLock, id: SequenceId, meta: &SequenceMeta) -> Result<Vec<AdapterPart>> {
    read_frames(lock, id, meta, SummaryResidency::default()).map(|(_, rest)| rest.adapter)
}

/// Reads the fronts of all frames and lays them over each other.
fn read_frames(
    lock: SequenceLock,
    id: SequenceId,
    meta: &SequenceMeta,
    summaries: SummaryResidency,
) -> Result<(Sequence, UncommittedTail)> {
    let store = Arc::clone(&lock.store);
    let mut references = references(&store, meta)?;
    let identity = identity_of(&store, id, meta)?;
    let mut sequence = Sequence::new(lock, identity, RecordBuffer::default(), summaries)?;
    sequence.token_ids.begin_open();
    let mut rest = UncommittedTail::new(sequence.layers.slots(), meta);
    // The buffers of a batch are held at the same time, beside the buffers of other sequences.
    let batch_bytes = BATCH_BYTES.min(sequence.store.devices.budget.limit() / 8);
    let mut start = 0;
    while start < references.len() {
        let (count, _account) = batch(&store, &references[start..], batch_bytes)?;
        let batch = &mut references[start..start + count];
        let fronts = sequence.read_fronts(batch)?;
        for (reference, front) in batch.iter_mut().zip(fronts) {
            let front = sequence.good_front(reference, front)?;
            let laid = sequence.lay_frame(reference, &front, &mut rest);
            laid.inspect_err(|e| store.devices.count_damage(reference.meta.location.device, e))?;
        }
        start += count;
    }
    Ok((sequence, rest))
}

fn identity_of(store: &StoreInner, id: SequenceId, meta: &SequenceMeta) -> Result<SequenceIdentity> {
    let layout = lock(&store.catalog).layouts.get(&meta.layout).cloned();
    let lost = || Error::new(ErrorKind::Corruption, format!("open: the manifest has no layout of sequence {id}"));
    Ok(SequenceIdentity {
        sequence: id,
        parent: meta.parent,
        key: meta.key.clone(),
        summaries: meta.summaries,
        layout_id: meta.layout,
        layout: layout.ok_or_else(lost)?,
        ttl_ms: meta.ttl_ms,
        evictable: meta.evictable,
        copies: usize::from(meta.copies).max(1),
    })
}

/// Returns how many of these frames are read at once, with the memory of what comes out of their buffers.
///
/// # Errors
/// [`ErrorKind::MemoryLimit`]: there is no memory for one.
fn batch(store: &StoreInner, references: &[FrameReference], batch_bytes: usize) -> Result<(usize, Reservation)> {
    // The files of a batch are open at the same time.
    let (mut bytes, mut segments, most) = (0, BTreeSet::new(), store.devices.files.limit());
    let fits = |r: &&FrameReference| {
        bytes += r.meta.front_pages as usize * PAGE_BYTES;
        segments.insert((r.meta.location.device, r.meta.location.segment));
        bytes <= batch_bytes && segments.len() <= most
    };
    let count = references.iter().take_while(fits).count().max(1);
    (0..=count.ilog2())
        .map(|halves| count >> halves)
        .find_map(|count| {
            let bytes = references[..count].iter().map(front_bytes).sum();
            store.devices.reserve(bytes, Category::Other).map(|account| (count, account))
        })
        .ok_or_else(|| no_memory("open: the front of a frame"))
}

impl Sequence {
    /// Puts together the tokens outside of groups and checks that every committed token is there.
    fn finish_open(&mut self, meta: &SequenceMeta, mut rest: UncommittedTail) -> Result<()> {
        let (tokens, id) = (meta.tokens, self.identity.sequence);
        let lost = |what: String| {
            let text = format!("open: sequence {id} has {tokens} committed tokens, but {what}");
            Error::new(ErrorKind::Corruption, text)
        };
        for (index, loose) in rest.loose.iter_mut().enumerate() {
            if planted!(StaleTail) {
                loose.reverse();
            }
            self.regroup(index, tokens, loose)?.map_err(lost)?;
        }
        let ids = usize::try_from(meta.token_ids).unwrap_or(usize::MAX);
        rest.ids.sort_unstable_by_key(|span| span.start);
        let reach = |end: usize, span: &Range<usize>| if span.start <= end { end.max(span.end) } else { end };
        let there = rest.ids.iter().fold(0, reach);
        if there < ids {
            return Err(lost(format!("its frames hold only {there} of {ids} token ids")));
        }
        self.token_ids.finish_open(ids);
        let state = self.caller_state.finish_open(meta.state_frame);
        state.map_err(|frame| lost(format!("frame {frame} does not hold the caller's state")))?;
        self.commits.finish_open(tokens);
        self.account()?;
        // If other sequences have gathered too much, the next commit writes these groups.
        self.frames.gather(self.layers.pending_bytes());
        Ok(())
    }

    /// Brings a layer to its length: groups that only small frames hold are collected again, the rest is the tail. The
    /// inner error says what is missing.
    fn regroup(&mut self, at: usize, tokens: u64, loose: &[LooseTokens]) -> Result<std::result::Result<(), String>> {
        let group = self.identity.layout.group_tokens() as u64;
        let Some(layer) = self.layers.get_mut(at) else { return Ok(Ok(())) };
        let sealed = match layer.open_sealed(tokens) {
            Ok(sealed) => sealed,
            Err(known) => return Ok(Err(format!("layer {at} has the summaries of {known} groups only"))),
        };
        self.reserve_for(at, (tokens - sealed * group) as usize)?;
        while self.layer(at)?.tokens() < tokens {
            let start = self.layer(at)?.tokens();
            let end = tokens.min(start + group);
            let layer = self.layer_mut(at)?;
            let mut there = vec![false; (end - start) as usize];
            for piece in loose {
                let (first, last) = (piece.first_token.max(start), piece.end().min(end));
                if first < last {
                    let rows = (first - piece.first_token) as usize..(last - piece.first_token) as usize;
                    let to = (first - start) as usize;
                    there[to..to + rows.len()].fill(true);
                    layer.restore_rows([&piece.keys, &piece.values], piece.stride, rows, to);
                }
            }
            if let Some(missing) = there.iter().position(|there| !there) {
                return Ok(Err(format!("token {} of layer {at} is in no frame", start + missing as u64)));
            }
            if end - start == group {
                self.give_buffer(at, ((tokens - start) / group) as usize)?;
                self.layer_mut(at)?.seal_tail()?;
                coverage!(Regrouped);
            }
            self.layer_mut(at)?.open_tokens(end);
        }
        self.layer_mut(at)?.mark_written(tokens);
        Ok(Ok(()))
    }
}
