//! Opening a sequence: the headers and small pieces of its frames are read, in batches, and laid over each other in the
//! order they were written. Group data stays where it is, but for a group that the sequence uses only in part.

use super::blocks::{ScanPart, read_block};
use super::frame_metadata::{FrameReference, front_bytes, references};
use super::{ReferencedFrame, Sequence};
use crate::catalog::{
    BlockPlace, Extent, FrameBody, RecordBuffer, SequenceMeta, Source, SummaryPlace, min_max_records,
};
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::planted::{covered, planted};
use crate::log::{AdapterPart, CoveredEnds, Devices, SequenceIdentity, SequenceLock};
use crate::metrics::{Category, lock};
use crate::options::SummaryResidency;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::frame::{
    Descriptor, FrameView, KIND_ADAPTER, KIND_CALLER_STATE, KIND_GROUPS, KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS,
    SUMMARY_MIN_MAX, SummaryHeader, SummaryRecords, tail_plane_bytes,
};
use stratakv_format::{DType, FrameId, PAGE_BYTES, PlaneIdentity, SequenceId, segment};

/// Frame fronts read at once, at most.
const BATCH_BYTES: usize = 8 << 20;

/// Tokens of one layer that some frame holds outside of whole groups: planes with `stride` rows per head, rows `0..tokens`.
struct LooseTokens {
    first_token: u64,
    tokens: usize,
    stride: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
}

impl LooseTokens {
    /// The first `tokens` of a group on a device, read.
    fn group(devices: &Devices, layer: &super::Layer, group: u64, place: &BlockPlace, tokens: usize) -> Result<Self> {
        let size = layer.shape().group_tokens as u64;
        let block = read_block(devices, layer, (group, ScanPart::Block), size, place)?;
        let block = layer.decoded(&block)?;
        let (start, len) = layer.plain.plane(1);
        Ok(Self {
            first_token: group * size,
            tokens,
            stride: size as usize,
            keys: block[..layer.plain.key_bytes].to_vec(),
            values: block[start..start + len].to_vec(),
        })
    }
}

/// What the frames laid so far hold outside of groups.
struct UncommittedTail {
    /// By layer, in the order of the frames.
    loose: Vec<Vec<LooseTokens>>,
    /// Token ids that some frame holds.
    ids: Vec<Range<usize>>,
    /// Pieces of an adapter, and bytes of it that no frame has given yet.
    adapter: Vec<AdapterPart>,
    adapter_left: u64,
    /// The frame with the caller's state.
    state_frame: Option<FrameId>,
}

/// The sequence as its last commit left it.
pub(crate) fn load(
    claim: SequenceLock,
    id: SequenceId,
    meta: &SequenceMeta,
    summaries: SummaryResidency,
) -> Result<Sequence> {
    let (mut sequence, rest) = read_frames(claim, id, meta, summaries)?;
    if let Some(part) = rest.adapter.first() {
        let text = format!("sequence {id} has a frame with an adapter of layer {}", part.layer);
        return Err(Error::new(ErrorKind::Corruption, text));
    }
    sequence.finish(meta, rest)?;
    Ok(sequence)
}

/// What the frames of a sequence that holds an adapter have of it.
pub(super) fn load_adapter_parts(claim: SequenceLock, id: SequenceId, meta: &SequenceMeta) -> Result<Vec<AdapterPart>> {
    read_frames(claim, id, meta, SummaryResidency::default()).map(|(_, rest)| rest.adapter)
}

/// Reads the fronts of all frames, and lays them over each other.
fn read_frames(
    claim: SequenceLock,
    id: SequenceId,
    meta: &SequenceMeta,
    summaries: SummaryResidency,
) -> Result<(Sequence, UncommittedTail)> {
    let store = Arc::clone(&claim.store);
    let mut references = references(&store, meta)?;
    let layout = lock(&store.catalog).layouts.get(&meta.layout).cloned();
    let layout = layout.ok_or_else(|| Error::new(ErrorKind::Corruption, format!("sequence {id} has no layout")))?;
    let who = SequenceIdentity {
        sequence: id,
        parent: meta.parent,
        key: meta.key.clone(),
        summaries: meta.summaries,
        layout_id: meta.layout,
        layout,
        ttl_ms: meta.ttl_ms,
        evictable: meta.evictable,
        copies: usize::from(meta.replicas).max(1),
    };
    let mut sequence = Sequence::new(claim, who, RecordBuffer::default(), summaries)?;
    // As far as no small frame turns up that holds some.
    sequence.ids_grouped = usize::MAX;
    let loose = sequence.layers.iter().map(|_| Vec::new()).collect();
    let adapter_left = meta.adapter.as_ref().map_or(0, |adapter| adapter.bytes);
    let mut rest =
        UncommittedTail { loose, ids: Vec::new(), adapter: Vec::new(), adapter_left, state_frame: meta.state_frame };
    // Their buffers are held all at once: they must fit, beside those of others.
    let batch_bytes = BATCH_BYTES.min(sequence.store.devices.budget.limit() / 8);
    let mut start = 0;
    while start < references.len() {
        let mut bytes = 0;
        let fits = |r: &FrameReference, bytes: &mut usize| {
            *bytes += r.meta.front_pages as usize * PAGE_BYTES;
            *bytes <= batch_bytes
        };
        let count = references[start..].iter().take_while(|r| fits(r, &mut bytes)).count().max(1);
        let devices = Arc::clone(&sequence.store.devices);
        // What comes out of the buffers, as many fronts at once as there is memory for.
        let (count, _account) = (0..=count.ilog2())
            .map(|halves| count >> halves)
            .find_map(|count| {
                let bytes = references[start..start + count].iter().map(front_bytes).sum();
                devices.reserve(bytes, Category::Other).map(|account| (count, account))
            })
            .ok_or_else(|| super::no_memory("what stands in front of the frames of a stored sequence"))?;
        let batch = &mut references[start..start + count];
        let fronts = sequence.read_fronts(batch)?;
        for (reference, front) in batch.iter_mut().zip(fronts) {
            let front = sequence.good_front(reference, front)?;
            let laid = sequence.lay_frame(reference, &front, &mut rest);
            laid.inspect_err(|e| devices.count_damage(reference.meta.location.device, e))?;
        }
        start += count;
    }
    Ok((sequence, rest))
}

impl Sequence {
    /// Lays one frame over what the frames before it left.
    fn lay_frame(&mut self, reference: &FrameReference, front: &[u8], rest: &mut UncommittedTail) -> Result<()> {
        let place = self.place_of(reference);
        let damaged = |found: String| {
            corrupt(reference, "frame-header", 0, reference.meta.header_pages as usize * PAGE_BYTES, found)
        };
        let view = FrameView::verify(front, &place).map_err(|e| match e.code {
            FormatErrorCode::Unsupported => {
                let text = format!("frame {}: written by another version: {e}", reference.id);
                Error::new(ErrorKind::Unsupported, text)
            }
            _ => damaged(e.to_string()),
        })?;
        let header = view.header();
        let same = header.crc.get() == reference.meta.header_crc
            && header.frame.get() == reference.id.0
            && header.nonce.get() == reference.meta.nonce
            && header.sequence.get() == reference.meta.origin.0;
        if !same {
            return Err(damaged("the header of another frame".into()));
        }
        if view.layout() != self.who.layout.raw() {
            return Err(damaged("the header of a sequence of another layout".into()));
        }
        let groups = view.descriptors().iter().filter(|d| d.kind.get() == KIND_GROUPS);
        let checksums = groups.clone().flat_map(|d| view.checksums(d)).map(|c| c.get()).collect();
        let body = FrameBody {
            id: reference.id,
            origin: reference.meta.origin,
            nonce: reference.meta.nonce,
            segment: Arc::clone(reference.segment()),
            page: reference.meta.location.page,
            header_crc: reference.meta.header_crc,
            replicas: reference.copies[1..].iter().map(|copy| copy.at.clone()).collect(),
            checksums,
            summaries: summary_places(&view, front),
        };
        let body = self.store.place_frame(reference.id, body)?;
        self.frames_memory += size_of::<ReferencedFrame>() + body.memory_bytes();
        if !self.account() {
            return Err(Error::new(ErrorKind::MemoryLimit, "the index of the sequence does not fit in memory_limit"));
        }
        let has_tokens = |kind: u16| !matches!(kind, KIND_CALLER_STATE | KIND_ADAPTER);
        let tokens = view.descriptors().iter().filter(|d| has_tokens(d.kind.get()));
        let first_token = tokens.map(|d| d.first_token.get()).min().filter(|first| *first < reference.token_end);
        let end = |of: u16| view.descriptors().iter().filter(|d| d.kind.get() == of).map(Descriptor::end_token).max();
        let small = groups
            .clone()
            .next()
            .is_none()
            .then(|| CoveredEnds { tokens: end(KIND_TAIL).unwrap_or(0), ids: end(KIND_TOKEN_IDS).unwrap_or(0) });
        self.held.push(ReferencedFrame {
            frame: reference.id,
            meta: reference.meta.clone(),
            slot: Arc::clone(&body),
            first_token,
            token_end: reference.token_end,
            small,
            shared: None,
        });
        let mut checksum = 0;
        // Where a tail and a group of one frame overlap, the tail is the newer.
        let is_tail = |d: &&Descriptor| d.kind.get() == KIND_TAIL;
        let descriptors = view.descriptors().iter();
        for descriptor in descriptors.clone().filter(|d| !is_tail(d)).chain(descriptors.filter(is_tail)) {
            let kind = descriptor.kind.get();
            let behind = if kind == KIND_TAIL { reference.tail_clip } else { reference.token_end };
            if has_tokens(kind) && descriptor.first_token.get() >= behind {
                checksum += if kind == KIND_GROUPS { descriptor.checksum_count.get() as usize } else { 0 };
                continue;
            }
            match kind {
                KIND_GROUPS => {
                    let source = Source::Disk {
                        frame: Arc::clone(&body),
                        page: (descriptor.offset.get() / PAGE_BYTES as u64) as u32,
                        checksum,
                    };
                    checksum += descriptor.checksum_count.get() as usize;
                    self.lay_groups(reference, descriptor, source, &mut rest.loose)?;
                }
                KIND_SUMMARY if descriptor.summary.get() != SUMMARY_MIN_MAX => {}
                KIND_SUMMARY => self.lay_summary(reference, &view, descriptor, front)?,
                KIND_TAIL => self.lay_tail(reference, &view, descriptor, front, &mut rest.loose)?,
                KIND_TOKEN_IDS => {
                    let bytes = self.piece(reference, &view, descriptor, front, 0, None)?;
                    let first = descriptor.first_token.get() as usize;
                    let kept = (reference.ids_clip.saturating_sub(first)).min(bytes.len() / 4);
                    if kept == 0 {
                        continue;
                    }
                    self.extend_token_ids((first + kept).max(self.token_ids.len()))?;
                    for (id, bytes) in self.token_ids[first..first + kept].iter_mut().zip(bytes.chunks_exact(4)) {
                        *id = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    }
                    rest.ids.push(first..first + kept);
                    if small.is_some() {
                        self.ids_grouped = self.ids_grouped.min(first);
                    }
                }
                KIND_CALLER_STATE => {
                    let bytes = self.piece(reference, &view, descriptor, front, 0, None)?;
                    // Only that of the frame which the last commit names counts.
                    if rest.state_frame == Some(reference.id) {
                        (self.state, self.state_frame) = (Some(bytes.to_vec()), reference.id.0);
                    }
                }
                KIND_ADAPTER => {
                    let left = rest.adapter_left.checked_sub(descriptor.bytes.get());
                    rest.adapter_left = left.ok_or_else(|| damaged("more of an adapter than there is".into()))?;
                    let bytes = self.piece(reference, &view, descriptor, front, 0, None)?.to_vec();
                    let (layer, first) = (usize::from(descriptor.layer.get()), descriptor.first_token.get());
                    rest.adapter.push(AdapterPart { layer, first, bytes });
                }
                _ => return Err(damaged(format!("a descriptor of kind {kind}"))),
            }
        }
        Ok(())
    }

    /// The bytes of one plane of a small piece, held against its checksum.
    pub(super) fn piece<'f>(
        &self,
        reference: &FrameReference,
        view: &FrameView<'_>,
        descriptor: &Descriptor,
        front: &'f [u8],
        plane: usize,
        planes: Option<[usize; 2]>,
    ) -> Result<&'f [u8]> {
        let start = descriptor.offset.get() as usize;
        let range = match planes {
            None => start..start + descriptor.bytes.get() as usize,
            Some([key, _]) if plane == 0 => start..start + key,
            Some([key, value]) => start + key..start + key + value,
        };
        let (offset, len) = (range.start as u64, range.len());
        let damaged = |found| corrupt(reference, "payload-checksum", offset, len, found);
        let bytes = front.get(range).ok_or_else(|| damaged("a piece outside of the front of its frame".into()))?;
        let identity = PlaneIdentity::new(
            reference.meta.nonce,
            reference.meta.origin,
            descriptor.kind.get(),
            descriptor.layer.get(),
            descriptor.first_token.get(),
            descriptor.tokens.get(),
        )
        .with_plane(plane as u16);
        let computed = self.store.devices.identity.checksum.compute(&identity, covered(bytes));
        match view.checksums(descriptor).get(plane).map(|c| c.get()) {
            Some(stored) if stored == computed => Ok(bytes),
            stored => Err(damaged(format!("checksum {computed:#018x}, stored {:#018x}", stored.unwrap_or(0)))),
        }
    }

    fn lay_groups(
        &mut self,
        reference: &FrameReference,
        descriptor: &Descriptor,
        source: Source,
        loose: &mut [Vec<LooseTokens>],
    ) -> Result<()> {
        let group = self.who.layout.group_tokens() as u64;
        let first = descriptor.first_token.get() / group;
        let whole = (reference.clip / group).saturating_sub(first).min(u64::from(descriptor.pieces.get()));
        let index = usize::from(descriptor.layer.get());
        let devices = Arc::clone(&self.store.devices);
        let layer = self.layer_mut(index)?;
        let extent = Extent { first_group: first, groups: whole as usize, skip: 0, source };
        let clipped = reference.clip % group;
        // The group that the clip cuts belongs to the sequence with its first tokens only.
        if clipped > 0 && first + whole == reference.clip / group && whole < u64::from(descriptor.pieces.get()) {
            let cut = first + whole;
            let planes = layer.geometry.planes();
            let probe = Extent { groups: extent.groups + 1, ..extent.clone() };
            if let Some(place) = probe.place(cut, &layer.block, planes) {
                loose[index].push(LooseTokens::group(&devices, layer, cut, &place, clipped as usize)?);
            }
        }
        if whole == 0 {
            return Ok(());
        }
        // What small frames before this one hold of these groups does not count any more.
        let tokens = first * group..(first + whole) * group;
        loose[index]
            .retain(|piece| piece.first_token < tokens.start || piece.first_token + piece.tokens as u64 > tokens.end);
        layer.table.lay(extent).map_err(|e| e.during(format!("layer {index}")))
    }

    fn lay_summary(
        &mut self,
        reference: &FrameReference,
        view: &FrameView<'_>,
        descriptor: &Descriptor,
        front: &[u8],
    ) -> Result<()> {
        let index = usize::from(descriptor.layer.get());
        let first = descriptor.first_group(self.who.layout.raw()) as usize;
        let expected = crate::retrieval::MinMax::element(self.who.layout.dtype());
        if DType::from_code(descriptor.element) != Some(expected) {
            let found = format!("a summary of element type {}", descriptor.element);
            return Err(corrupt(reference, "frame-header", 0, 0, found));
        }
        // Where they are streamed they were not even read.
        if self.layer(index)?.summary.is_none() {
            return Ok(());
        }
        let bytes = self.piece(reference, view, descriptor, front, 0, None)?;
        let devices = Arc::clone(&self.store.devices);
        let layer = self.layer_mut(index)?;
        let Some(summary) = &mut layer.summary else { return Ok(()) };
        if first <= summary.groups() {
            let mut reserve = |bytes| devices.reserve(bytes, Category::Summaries);
            return match summary.lay(first, bytes, &mut reserve) {
                true => Ok(()),
                false => Err(super::no_memory("the summaries of a stored sequence")),
            };
        }
        let found = format!("summaries of layer {index} from group {first} on, with none before");
        Err(corrupt(reference, "coverage", 0, 0, found))
    }

    fn lay_tail(
        &mut self,
        reference: &FrameReference,
        view: &FrameView<'_>,
        descriptor: &Descriptor,
        front: &[u8],
        loose: &mut [Vec<LooseTokens>],
    ) -> Result<()> {
        let index = usize::from(descriptor.layer.get());
        let first_token = descriptor.first_token.get();
        let stored = descriptor.tokens.get() as usize;
        let tokens = reference.tail_clip.saturating_sub(first_token).min(stored as u64) as usize;
        if tokens == 0 {
            return Ok(());
        }
        let layer = self.layer(index)?;
        let (key, value) = tail_plane_bytes(&layer.geometry, self.who.layout.dtype(), stored);
        let plane = |plane| self.piece(reference, view, descriptor, front, plane, Some([key, value]));
        let keys = plane(0)?.to_vec();
        let values = if value == 0 { Vec::new() } else { plane(1)?.to_vec() };
        // Groups of frames before this one that stand where it begins, and behind, were cut off when it was written.
        let size = self.who.layout.group_tokens() as u64;
        let group = first_token / size;
        let devices = Arc::clone(&self.store.devices);
        let layer = self.layer_mut(index)?;
        if layer.table.groups() > group {
            let kept = (first_token % size) as usize;
            let place = layer.table.find(group).and_then(|e| e.place(group, &layer.block, layer.geometry.planes()));
            if let Some(place) = place.filter(|_| kept > 0) {
                loose[index].push(LooseTokens::group(&devices, layer, group, &place, kept)?);
            }
            layer.table.truncate(group);
        }
        loose[index].push(LooseTokens { first_token, tokens, stride: stored, keys, values });
        Ok(())
    }

    /// Puts together what stands in no group on a device, and sees that every token is there.
    fn finish(&mut self, meta: &SequenceMeta, mut rest: UncommittedTail) -> Result<()> {
        let (tokens, id) = (meta.tokens, self.who.sequence);
        let lost = |what: String| {
            Error::new(ErrorKind::Corruption, format!("sequence {id} has {tokens} committed tokens, but {what}"))
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
            return Err(lost(format!("token ids up to {there} only")));
        }
        self.token_ids.truncate(ids);
        (self.ids_written, self.ids_durable, self.stored) = (ids, ids, true);
        self.ids_grouped = self.ids_grouped.min(ids);
        match meta.state_frame {
            None => self.state = None,
            Some(frame) if frame.0 == self.state_frame => {}
            Some(frame) => return Err(lost(format!("the caller's state of frame {frame} is not there"))),
        }
        self.set_committed(tokens, meta.state_frame);
        if !self.account() {
            return Err(Error::new(ErrorKind::MemoryLimit, "the index of the sequence does not fit in memory_limit"));
        }
        // Where others have gathered too much already, the next commit writes these.
        self.gathered.resize(self.pending_bytes());
        Ok(())
    }

    /// Brings a layer to its length: groups that only small frames hold are collected again, the rest is the tail. What is
    /// missing comes back as text.
    fn regroup(&mut self, at: usize, tokens: u64, loose: &[LooseTokens]) -> Result<std::result::Result<(), String>> {
        let group = self.who.layout.group_tokens() as u64;
        let Some(layer) = self.layers.get_mut(at).and_then(Option::as_mut) else { return Ok(Ok(())) };
        let sealed = layer.table.groups().min(tokens / group);
        layer.table.truncate(sealed);
        if let Some(summary) = &mut layer.summary {
            if (summary.groups() as u64) < sealed {
                return Ok(Err(format!("layer {at} has summaries up to group {} only", summary.groups())));
            }
            summary.truncate(sealed as usize);
        }
        layer.tokens = sealed * group;
        self.reserve_for(at, (tokens - sealed * group) as usize)?;
        while self.layer(at)?.tokens < tokens {
            let start = self.layer(at)?.tokens;
            let end = tokens.min(start + group);
            let layer = self.layer_mut(at)?;
            let mut there = vec![false; (end - start) as usize];
            for piece in loose {
                let (first, last) = (piece.first_token.max(start), (piece.first_token + piece.tokens as u64).min(end));
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
                if let Some(bytes) = layer.wants_buffer(((tokens - start) / group) as usize) {
                    let zeroed = layer.has_padding();
                    let buffer = self.buffer(bytes, zeroed)?;
                    self.layer_mut(at)?.give_buffer(buffer)?;
                }
                self.layer_mut(at)?.seal_tail()?;
                coverage!(Regrouped);
            }
            self.layer_mut(at)?.tokens = end;
        }
        self.layer_mut(at)?.written = tokens;
        Ok(Ok(()))
    }
}

/// Where the summaries of groups stand in a frame. Those of selectors whose header is none are as good as not there.
fn summary_places(view: &FrameView<'_>, front: &[u8]) -> Arc<[SummaryPlace]> {
    let layout = view.layout();
    let is_summary = |d: &&Descriptor| d.kind.get() == KIND_SUMMARY;
    let stored = |d: &Descriptor| {
        let (kind, record_bytes) = (d.summary.get(), d.record_bytes.get());
        if kind == SUMMARY_MIN_MAX {
            return Some(min_max_records((d.bytes.get() / u64::from(d.pieces.get().max(1))) as u32));
        }
        let bytes = front.get(usize::try_from(d.offset.get()).ok()?..)?;
        let layer = layout.layers.get(usize::from(d.layer.get()))?;
        let group = usize::from(layout.group_tokens);
        let header = SummaryHeader::verify(bytes, kind, layer, group, record_bytes).ok()?;
        let (parameter, adapter_checksum) = (header.parameter.get(), header.adapter_checksum.get());
        Some(SummaryRecords { kind, parameter, adapter_checksum, record_bytes })
    };
    let place = |d: &Descriptor| {
        Some(SummaryPlace {
            layer: d.layer.get(),
            stored: stored(d)?,
            first_group: d.first_group(layout),
            groups: d.pieces.get(),
            offset: d.offset.get(),
            bytes: d.bytes.get(),
            checksum: view.checksums(d).first()?.get(),
        })
    };
    view.descriptors().iter().filter(is_summary).filter_map(place).collect()
}

pub(super) fn corrupt(reference: &FrameReference, code: &'static str, offset: u64, len: usize, found: String) -> Error {
    Error::corrupt(Corruption {
        code,
        device: reference.meta.location.device.0,
        file: segment::file_name(reference.meta.location.segment),
        offset: reference.meta.location.offset() + offset,
        len: len as u64,
        expected: format!("frame {} as it was written", reference.id),
        found,
    })
}
