//! Writing frames: what a sequence has collected becomes one atomic append.

use super::devices::{Devices, exhausted};
use super::frame_builder::{CoveredEnds, FrameBuilder, RecordBytes, Recorded, SequenceIdentity, TailRows};
use super::segment_allocator::{SegmentAllocator, Writer, allocate};
use super::{random_u64, unix_ms};
use crate::catalog::{
    Flight, FrameBody, FrameCopy, FrameMeta, FrameSlot, GroupBuffer, ReplicaMeta, SegmentHandle, SummaryPlace,
    min_max_records,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Exhausted, Lease};
use crate::io::driver::interface::Op;
use crate::io::scheduler::{Batch, Priority, Request, Sink, Waiter};
use crate::io::seams::covered_bytes;
use crate::metrics::lock;
use std::sync::{Arc, Mutex};
use stratakv_format::frame::{self, Descriptor, FramePlace, HeaderBuilder};
use stratakv_format::layout::LayerGeometry;
use stratakv_format::page::round_up_to_page;
use stratakv_format::{DeviceIndex, FrameId, Location, PAGE_BYTES, PlaneIdentity};
use zerocopy::little_endian::{U16, U32, U64};

/// Bytes of one write: large enough for the device, small enough to come from one slab.
const WRITE_BYTES: usize = 1 << 20;

/// The most bytes of everything of a draft on segments of this size.
pub(crate) fn front_limit(devices: &Devices, identity: &SequenceIdentity) -> Result<usize> {
    let usable = (devices.identity.segment_pages as usize - 2).min(frame::TOTAL_PAGES_MAX as usize) * PAGE_BYTES;
    let fixed = frame::header_bytes(identity.layout.raw(), identity.key.len(), 0, 0) + 2 * PAGE_BYTES;
    usable.checked_sub(fixed).filter(|left| *left >= PAGE_BYTES).ok_or_else(|| {
        Error::new(ErrorKind::Configuration, "segments are too small for the header of this layout".to_owned())
    })
}

/// A run with its place in the frame: page from the frame's start and first checksum.
pub(crate) struct PlacedRun {
    pub(crate) run: Arc<GroupBuffer>,
    pub(crate) page: u32,
    pub(crate) checksum: usize,
}

/// A frame whose writes are under way.
pub(crate) struct WrittenFrame {
    pub(crate) id: FrameId,
    pub(crate) meta: FrameMeta,
    pub(crate) body: Arc<FrameSlot>,
    /// Its copies as they are written; after [`Self::wait`] those that were.
    copies: Vec<CopyFlight>,
    /// [`Self::wait`] has seen that it is written.
    written: bool,
    space: Arc<Mutex<SegmentAllocator>>,
    pub(crate) runs: Vec<PlacedRun>,
    pub(crate) holds_state: bool,
    /// The lowest token it holds anything of; none when it holds only the caller's state.
    pub(crate) first_token: Option<u64>,
    /// Tokens from here on were cut off after it was written.
    pub(crate) token_end: u64,
    /// Ends of what it holds, when that is no groups.
    pub(crate) small: Option<CoveredEnds>,
}

/// One copy of a frame on its way.
struct CopyFlight {
    location: Location,
    header_crc: u32,
    segment: Arc<SegmentHandle>,
    /// Until the frame has a slot, which keeps it.
    flight: Option<Flight>,
    waiter: Arc<Waiter>,
    front: Vec<Lease>,
}

impl WrittenFrame {
    /// Waits until every byte is written (not synced). A copy that could not be written is left out as long as another was; its
    /// segment takes no more.
    ///
    /// # Errors
    /// The first failed write, when no copy was written.
    pub(crate) fn wait(&mut self) -> Result<()> {
        if self.written {
            return Ok(());
        }
        let before = self.copies.len();
        let outcomes: Vec<_> = self.copies.iter().map(|copy| copy.waiter.wait()).collect();
        for (copy, outcome) in self.copies.iter_mut().zip(&outcomes) {
            copy.front.clear();
            if outcome.is_err() {
                lock(&self.space).abandon(&copy.segment);
            }
        }
        if !outcomes.iter().any(Result::is_ok) {
            return outcomes.into_iter().next().unwrap_or(Ok(()));
        }
        let mut outcomes = outcomes.iter();
        self.copies.retain(|_| outcomes.next().is_some_and(Result::is_ok));
        if self.copies.len() < before {
            self.name_copies();
        }
        self.written = true;
        Ok(())
    }

    /// Makes what is recorded and read of the frame what was written.
    fn name_copies(&mut self) {
        let Some((first, others)) = self.copies.split_first() else { return };
        (self.meta.location, self.meta.header_crc) = (first.location, first.header_crc);
        self.meta.replicas = others.iter().map(CopyFlight::replica).collect();
        self.body.set_location(first.place(), others.iter().map(CopyFlight::place).collect());
        self.body.keep_flights(|segment| self.copies.iter().any(|copy| Arc::ptr_eq(&copy.segment, segment)));
    }

    /// Whether every byte is written, without waiting.
    pub(crate) fn is_written(&self) -> bool {
        self.written || self.copies.iter().all(|copy| copy.waiter.is_done())
    }

    /// Bytes that its copies take.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.copies.iter().map(|copy| copy.location.bytes()).sum()
    }
}

impl CopyFlight {
    fn place(&self) -> FrameCopy {
        FrameCopy { segment: Arc::clone(&self.segment), page: self.location.page, header_crc: self.header_crc }
    }

    fn replica(&self) -> ReplicaMeta {
        ReplicaMeta { generation: 1, location: self.location, header_crc: self.header_crc }
    }
}

/// Descriptors and checksums in the making, with the front's bytes behind the header.
struct FrameTables<'a> {
    devices: &'a Devices,
    identity: &'a SequenceIdentity,
    nonce: u64,
    descriptors: Vec<Descriptor>,
    checksums: Vec<u64>,
    front: Front<'a>,
}

/// What lies in front of the runs: bytes at their offsets, zeros between. Copied once, into the buffers that are written.
#[derive(Default)]
struct Front<'a> {
    pieces: Vec<(usize, &'a [u8])>,
    len: usize,
}

impl<'a> Front<'a> {
    fn push(&mut self, bytes: &'a [u8]) {
        self.pieces.push((self.len, bytes));
        self.len += bytes.len();
    }
}

/// Fills `out`, which stands for the bytes from `base` on, with what `pieces` (rising, apart) have there, and zeros.
fn fill_front(pieces: &[(usize, &[u8])], base: usize, out: &mut [u8]) {
    let mut at = 0;
    for (offset, bytes) in pieces {
        let (start, end) = (offset.saturating_sub(base), (offset + bytes.len()).saturating_sub(base).min(out.len()));
        if end <= start {
            continue;
        }
        let skip = base.saturating_sub(*offset);
        out[at..start].fill(0);
        out[start..end].copy_from_slice(&bytes[skip..skip + end - start]);
        at = end;
    }
    out[at..].fill(0);
}

struct FramePiece {
    kind: u16,
    layer: usize,
    first_token: u64,
    tokens: u32,
    pieces: u32,
    summary: Option<Recorded>,
}

impl<'a> FrameTables<'a> {
    fn checksum(&self, piece: &FramePiece, first_token: u64, tokens: u32, plane: u16, parts: &[&[u8]]) -> u64 {
        let layer = piece.layer as u16;
        let sequence = self.identity.sequence;
        let identity = PlaneIdentity::new(self.nonce, sequence, piece.kind, layer, first_token, tokens, plane);
        let mut left = covered_bytes(parts.iter().map(|part| part.len()).sum());
        let covered = parts.iter().map(|part| {
            let bytes = part.len().min(left);
            left -= bytes;
            &part[..bytes]
        });
        self.devices.identity.checksum.compute_parts(&identity, covered)
    }

    fn describe(&mut self, piece: &FramePiece, offset: u64, bytes: u64, checksum_first: usize) {
        let (summary, element, record_bytes) = match piece.summary {
            None => (0, 0, 0),
            Some(Recorded::MinMax(element)) => (frame::SUMMARY_MIN_MAX, element.code(), 0),
            Some(Recorded::Stored(stored)) => (stored.kind, 0, stored.record_bytes),
        };
        self.descriptors.push(Descriptor {
            kind: U16::new(piece.kind),
            layer: U16::new(piece.layer as u16),
            codec: U16::new(self.codec(piece)),
            summary: U16::new(summary),
            first_token: U64::new(piece.first_token),
            tokens: U32::new(piece.tokens),
            pieces: U32::new(piece.pieces),
            offset: U64::new(offset),
            bytes: U64::new(bytes),
            checksum_first: U32::new(checksum_first as u32),
            checksum_count: U32::new((self.checksums.len() - checksum_first) as u32),
            element,
            cipher: 0,
            key: U16::new(0),
            record_bytes: U32::new(record_bytes),
        });
    }

    fn codec(&self, piece: &FramePiece) -> u16 {
        let layer = self.identity.layout.raw().layers.get(piece.layer).filter(|_| piece.kind == frame::KIND_GROUPS);
        layer.map_or(frame::CODEC_RAW, LayerGeometry::codec_code)
    }

    /// Puts planes, each in parts, into the front, one checksum each.
    fn front_piece(&mut self, piece: &FramePiece, planes: &[&[&'a [u8]]]) {
        let (offset, first) = (self.front.len, self.checksums.len());
        for (index, parts) in planes.iter().enumerate() {
            let checksum = self.checksum(piece, piece.first_token, piece.tokens, index as u16, parts);
            self.checksums.push(checksum);
            parts.iter().for_each(|part| self.front.push(part));
        }
        let bytes = self.front.len - offset;
        self.describe(piece, offset as u64, bytes as u64, first);
        self.front.len = self.front.len.next_multiple_of(8);
    }
}

/// Writes a draft as a frame, a copy on each of the first of `order` that have room: takes the space, and hands everything to the
/// shards, or writes it on this thread when the caller would only wait (`here`). Wait on the result.
///
/// # Errors
/// No space or memory for it on any device, or a write that had to be waited for failed. The frame does not exist.
pub(crate) fn write(
    devices: &Devices,
    space: &Arc<Mutex<SegmentAllocator>>,
    ids: (FrameId, u64),
    identity: &SequenceIdentity,
    order: &[DeviceIndex],
    (draft, tails): (&FrameBuilder, &dyn TailRows),
    here: bool,
) -> Result<WrittenFrame> {
    let (id, lsn) = ids;
    let nonce = random_u64()?;
    let mut tables = FrameTables {
        devices,
        identity,
        nonce,
        descriptors: Vec::new(),
        checksums: Vec::new(),
        front: Front::default(),
    };
    let group = u64::from(identity.layout.raw().group_tokens);
    for part in &draft.summaries {
        let piece = FramePiece {
            kind: frame::KIND_SUMMARY,
            layer: part.layer,
            first_token: part.first_group * group,
            tokens: (part.groups as u64 * group) as u32,
            pieces: part.groups as u32,
            summary: Some(part.what),
        };
        let parts: Vec<&[u8]> = part.pieces.iter().map(RecordBytes::bytes).collect();
        tables.front_piece(&piece, &[&parts]);
    }
    let small =
        |kind, first_token, tokens| FramePiece { kind, layer: 0, first_token, tokens, pieces: 1, summary: None };
    if let Some((first, bytes, count)) = &draft.token_ids {
        tables.front_piece(&small(frame::KIND_TOKEN_IDS, *first, *count), &[&[bytes]]);
    }
    if let Some((tokens, state)) = &draft.state {
        tables.front_piece(&small(frame::KIND_CALLER_STATE, *tokens, state.len() as u32), &[&[state]]);
    }
    for part in &draft.adapters {
        let piece = FramePiece { layer: part.layer, ..small(frame::KIND_ADAPTER, part.first, part.bytes.len() as u32) };
        tables.front_piece(&piece, &[&[&part.bytes]]);
    }
    let mut parts = [Vec::new(), Vec::new()];
    for tail in &draft.tails {
        let piece = FramePiece { layer: tail.layer, ..small(frame::KIND_TAIL, tail.first_token, tail.tokens) };
        parts.iter_mut().for_each(Vec::clear);
        for (plane, out) in parts.iter_mut().enumerate() {
            tails.rows(tail, plane, out)?;
        }
        let planes: [&[&[u8]]; 2] = [&parts[0], &parts[1]];
        tables.front_piece(&piece, if parts[1].is_empty() { &planes[..1] } else { &planes });
    }
    let front_pieces = tables.descriptors.len();
    let group_checksums = tables.checksums.len();

    // Runs of one layer that continue each other become one extent. Pages count from the first run for now.
    let mut page = 0_u32;
    let mut landed = Vec::with_capacity(draft.runs.len());
    let mut open: Option<(FramePiece, u32, usize)> = None;
    for (index, run) in draft.runs.iter().enumerate() {
        let block = run.geometry;
        let planes = identity.layout.kv_layer(run.layer)?.planes();
        let (layer, first_token) = (run.layer, run.first_group * group);
        let continues = open.as_ref().is_some_and(|(piece, ..)| {
            piece.layer == layer
                && piece.first_token + u64::from(piece.tokens) == first_token
                && draft.runs[index - 1].ends_on_page()
        });
        if !continues {
            close_extent(&mut tables, open.take(), page);
            let piece = FramePiece { pieces: 0, layer, ..small(frame::KIND_GROUPS, first_token, 0) };
            open = Some((piece, page, tables.checksums.len()));
        }
        landed.push(PlacedRun { run: Arc::clone(run), page, checksum: tables.checksums.len() - group_checksums });
        if let Some((piece, ..)) = &mut open {
            for at in 0..run.groups {
                let bytes = run.block(at)?;
                for plane in 0..planes {
                    let (start, len) = block.plane(plane);
                    let token = first_token + at as u64 * group;
                    let data = &bytes[start..start + len];
                    let checksum = tables.checksum(piece, token, group as u32, plane as u16, &[data]);
                    tables.checksums.push(checksum);
                }
            }
            piece.pieces += run.groups as u32;
            piece.tokens += (run.groups as u64 * group) as u32;
        }
        page += (run.disk_bytes() / PAGE_BYTES) as u32;
    }
    close_extent(&mut tables, open.take(), page);

    // Now the header's length is known, and with it every offset.
    let header_bytes = frame::header_bytes(
        identity.layout.raw(),
        identity.key.len(),
        tables.descriptors.len(),
        tables.checksums.len(),
    );
    let front_bytes = round_up_to_page(header_bytes + tables.front.len);
    for (index, descriptor) in tables.descriptors.iter_mut().enumerate() {
        let base = if index < front_pieces { header_bytes } else { front_bytes };
        descriptor.offset = U64::new(descriptor.offset.get() + base as u64);
    }
    let front_page = (front_bytes / PAGE_BYTES) as u32;
    for run in &mut landed {
        run.page += front_page;
    }

    let stored = tables.descriptors.iter().zip(&tables.checksums).zip(&draft.summaries);
    let summaries = stored.map(|((descriptor, checksum), part)| SummaryPlace {
        layer: part.layer as u16,
        stored: match part.what {
            Recorded::MinMax(_) => min_max_records((part.bytes() / part.groups.max(1)) as u32),
            Recorded::Stored(stored) => stored,
        },
        first_group: part.first_group,
        groups: part.groups as u32,
        offset: descriptor.offset.get(),
        bytes: descriptor.bytes.get(),
        checksum: *checksum,
    });
    let summaries = summaries.collect();
    let header = HeaderBuilder {
        frame: id,
        lsn,
        nonce,
        sequence: identity.sequence,
        parent: identity.parent,
        created_unix_ms: unix_ms(),
        layout_id: identity.layout_id,
        layout: identity.layout.raw(),
        key: identity.key.as_bytes(),
        summaries: identity.summaries,
        descriptors: &tables.descriptors,
        checksums: &tables.checksums,
        front_pages: front_page,
    };
    let (draft_holds_state, draft_first_token) = (draft.state.is_some(), draft.first_token);
    let draft_small = draft.small();
    let writer =
        if draft_small.is_some() { Writer::Brief(identity.sequence) } else { Writer::Sequence(identity.sequence) };
    let draft = PlacedFrame { header, header_bytes, front_bytes, small: &tables.front, runs: &landed };
    let mut copies = Vec::with_capacity(identity.copies);
    let mut refused = None;
    for &device in order {
        if copies.len() == identity.copies {
            break;
        }
        match draft.write_copy(devices, space, device, writer, front_page + page, here && identity.copies == 1) {
            Ok(copy) => copies.push(copy),
            // Another device may take it.
            Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::Poisoned) => {
                refused.get_or_insert(e);
            }
            Err(e) => {
                // What is on its way uses buffers of this frame.
                for copy in copies.iter().filter(|copy: &&CopyFlight| copy.waiter.wait().is_err()) {
                    lock(space).abandon(&copy.segment);
                }
                return Err(e);
            }
        }
    }
    let Some((first, others)) = copies.split_first() else {
        let none = || Error::new(ErrorKind::NoSpace, "no device takes new frames");
        return Err(refused.unwrap_or_else(none));
    };
    let meta = FrameMeta {
        origin: identity.sequence,
        lsn,
        nonce,
        location: first.location,
        header_crc: first.header_crc,
        header_pages: (header_bytes / PAGE_BYTES) as u32,
        front_pages: front_page,
        refs: 0,
        replicas: others.iter().map(CopyFlight::replica).collect(),
    };
    let body = FrameBody {
        id,
        origin: identity.sequence,
        nonce,
        segment: Arc::clone(&first.segment),
        page: first.location.page,
        header_crc: first.header_crc,
        replicas: others.iter().map(CopyFlight::place).collect(),
        checksums: tables.checksums[group_checksums..].into(),
        summaries,
    };
    let body = lock(space).place_frame(id, body);
    body.set_flights(copies.iter_mut().filter_map(|copy| copy.flight.take()).collect());
    Ok(WrittenFrame {
        id,
        meta,
        body,
        copies,
        written: false,
        space: Arc::clone(space),
        runs: landed,
        holds_state: draft_holds_state,
        first_token: draft_first_token,
        token_end: u64::MAX,
        small: draft_small,
    })
}

/// A frame ready to be written, but for the place that stands in its header.
struct PlacedFrame<'a> {
    header: HeaderBuilder<'a>,
    header_bytes: usize,
    front_bytes: usize,
    small: &'a Front<'a>,
    runs: &'a [PlacedRun],
}

impl PlacedFrame<'_> {
    fn write_copy(
        &self,
        devices: &Devices,
        space: &Mutex<SegmentAllocator>,
        device: DeviceIndex,
        writer: Writer,
        pages: u32,
        here: bool,
    ) -> Result<CopyFlight> {
        let shard = &devices.get(device)?.shard;
        let mut front_buffers = Vec::new();
        let mut left = self.front_bytes;
        while left > 0 {
            match devices.arena.lease(left.min(WRITE_BYTES)) {
                Ok(buffer) => front_buffers.push(buffer),
                // Groups that wait to be written hold the memory: writing them must not wait for it.
                Err(Exhausted::Now) => {
                    front_buffers.clear();
                    break;
                }
                Err(other) => return Err(exhausted(other, WRITE_BYTES)),
            }
            left -= left.min(WRITE_BYTES);
        }
        let (location, flight) = allocate(devices, space, device, writer, pages)?;
        let segment = Arc::clone(flight.segment());
        let place = FramePlace {
            store_id: devices.identity.store_id,
            location,
            segment_generation: segment.generation,
            segment_nonce: segment.nonce,
        };
        let mut header_page = vec![0; self.header_bytes];
        let header_crc = self
            .header
            .write(&place, &mut header_page)
            .map_err(|e| Error::new(ErrorKind::Configuration, format!("a frame of this layout: {e}")))?;
        let mut pieces = vec![(0, &header_page[..])];
        pieces.extend(self.small.pieces.iter().map(|(offset, bytes)| (self.header_bytes + offset, *bytes)));
        let file = segment.file()?;
        let now = |offset: u64, bytes: &[u8]| {
            let target = [(device, Arc::clone(&file))];
            let mut chunks = bytes.chunks(WRITE_BYTES).enumerate();
            let written = chunks.try_for_each(|(index, chunk)| {
                devices.write_all(&target, offset + (index * WRITE_BYTES) as u64, chunk)
            });
            written.map_err(|e| {
                lock(space).abandon(&segment);
                e.during("write of a frame")
            })
        };
        let mut requests = Vec::with_capacity(front_buffers.len() + self.runs.len());
        let mut offset = location.offset();
        let mut push = |buffer: &Lease, offset: u64, bytes: usize| -> Result<()> {
            let from = buffer.write_source(0..bytes)?;
            requests.push(Request { op: Op::Write { file: Arc::clone(&file), offset, from }, tag: 0 });
            Ok(())
        };
        if front_buffers.is_empty() {
            let mut front = vec![0; self.front_bytes];
            fill_front(&pieces, 0, &mut front);
            now(offset, &front)?;
        }
        for (index, buffer) in front_buffers.iter_mut().enumerate() {
            let bytes = buffer.len();
            let out = buffer.bytes_mut().ok_or_else(|| Error::new(ErrorKind::Busy, "a fresh buffer is in use"))?;
            fill_front(&pieces, index * WRITE_BYTES, out);
            push(buffer, offset, bytes)?;
            offset += bytes as u64;
        }
        offset = location.offset() + self.front_bytes as u64;
        for landed in self.runs {
            let run = &landed.run;
            if run.cut && !run.ends_on_page() {
                // Its last page has old groups where padding is to be.
                let mut bytes = vec![0; run.disk_bytes()];
                for at in 0..run.groups {
                    let block = run.block(at)?;
                    bytes[run.geometry.block_offset(at)..][..block.len()].copy_from_slice(block);
                }
                now(offset, &bytes)?;
            } else {
                push(&run.buffer, offset, run.disk_bytes())?;
            }
            offset += run.disk_bytes() as u64;
        }
        let waiter = Waiter::new(if here { 1 } else { requests.len() });
        if here {
            waiter.complete(0, shard.write_blocking(requests));
        } else {
            let sink = Arc::clone(&waiter) as Arc<dyn Sink>;
            shard.submit_wait(Batch { requests, priority: Priority::Write, sink, cancel: None });
        }
        Ok(CopyFlight { location, header_crc, segment, flight: Some(flight), waiter, front: front_buffers })
    }
}

/// Describes an extent of groups that began at `page` with its first checksum, and ends before page `end`. Offsets count
/// from the first run.
fn close_extent(tables: &mut FrameTables<'_>, extent: Option<(FramePiece, u32, usize)>, end: u32) {
    if let Some((piece, page, checksum)) = extent {
        let bytes = u64::from(end - page) * PAGE_BYTES as u64;
        let first = checksum;
        tables.describe(&piece, u64::from(page) * PAGE_BYTES as u64, bytes, first);
    }
}
