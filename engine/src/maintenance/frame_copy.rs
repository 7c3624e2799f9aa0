//! Copying a frame to another place. Cleaning and repair use it, and repair also uses [`verify`].
//!
//! 1. Read and verify the front (header and small sections) of the first source that has a good one.
//! 2. Allocate the pages of the copy.
//! 3. Read each chunk of groups, verify it block by block, and take bad blocks from the other sources.
//! 4. Write each chunk to the copy, and zeros to the gaps between extents.
//! 5. Write the front with its new location, generation and CRC, last.
//!
//! Invariants:
//! - Every byte is verified against its checksum before it is written.
//! - Only the header's location, segment generation and CRC differ between two copies.
//! - A copy counts only when a commit names it. Until then its [`Flight`] keeps the pages.
//! - Memory: the front of one frame and up to two chunk buffers, all taken from the memory budget.

use crate::catalog::{Flight, FrameMeta, SegmentHandle, SegmentKey};
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::scheduler::{Priority, Request};
use crate::layout::KvLayout;
use crate::log::{Devices, SegmentAllocator, Writer, allocate};
use crate::metrics::{Category, Reservation};
use crate::read::{BlockReader, CopyFault, first_good};
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use stratakv_format::checksum::crc_with_hole;
use stratakv_format::frame::{
    Descriptor, FrameHeader, FramePlace, FrameView, KIND_GROUPS, KIND_TAIL, tail_plane_bytes,
};
use stratakv_format::{DeviceIndex, FrameId, Location, PAGE_BYTES, PlaneIdentity, segment};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U32, U64};

/// The size of the buffer through which a frame is copied, in bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// A copy that was written and that no commit names yet.
pub(super) struct UnnamedCopy {
    pub(super) location: Location,
    pub(super) header_crc: u32,
    pub(super) flight: Flight,
}

/// A place to read a frame from.
pub(super) struct CopySource {
    /// The frame as if this were its first copy.
    meta: FrameMeta,
    segment: Arc<SegmentHandle>,
    /// True once this copy was found damaged or could not be read.
    is_bad: Cell<bool>,
}

impl CopySource {
    /// Returns the copy of a frame at `location`.
    pub(super) fn new(meta: &FrameMeta, location: Location, header_crc: u32, segment: Arc<SegmentHandle>) -> Self {
        Self { meta: FrameMeta { location, header_crc, ..meta.clone() }, segment, is_bad: Cell::new(false) }
    }

    /// Returns the segment that holds the copy.
    pub(super) fn segment(&self) -> SegmentKey {
        self.segment.key
    }

    /// Returns whether this copy was found damaged or could not be read.
    pub(super) fn is_bad(&self) -> bool {
        self.is_bad.get()
    }

    /// Notes how a read of this copy failed. `again` tells that it was the second read.
    fn note(&self, fault: &CopyFault, again: bool) {
        self.is_bad.set(self.is_bad.get() || fault.ends_copy(again));
    }
}

/// The state of one frame's copy or verification.
struct CopyJob<'a> {
    devices: &'a Devices,
    id: FrameId,
    /// The source with a good front.
    from: &'a CopySource,
    /// All sources, `from` included.
    sources: &'a [CopySource],
    buffer: Lease,
}

/// Consecutive groups of an extent.
#[derive(Clone)]
struct CopyChunk {
    blocks: Range<usize>,
    /// The offset from the start of the frame, in bytes.
    offset: u64,
    bytes: usize,
}

/// Reads a whole frame and verifies its checksums.
///
/// # Errors
/// [`ErrorKind::Corruption`]: the frame is damaged. [`ErrorKind::Io`]: the frame cannot be read.
/// [`ErrorKind::MemoryLimit`]: there is no memory for the check, which says nothing about the frame.
pub(super) fn verify(devices: &Devices, id: FrameId, source: &CopySource) -> Result<()> {
    let (mut copy, front, _account) = begin(devices, id, std::slice::from_ref(source))?;
    let view = copy.view(&front)?;
    let layout = KvLayout::new(view.layout().clone())?;
    for descriptor in view.descriptors().iter().filter(|d| d.kind.get() == KIND_GROUPS) {
        copy.groups(&view, &layout, descriptor, None)?;
    }
    Ok(())
}

/// Copies a frame to the segment for relocated frames of `device`.
///
/// The frame is read from the first source with a good front. Blocks that are damaged there are read from the others.
///
/// # Errors
/// [`ErrorKind::Corruption`], [`ErrorKind::Io`]: a part of the frame is good in no source.
/// [`ErrorKind::NoSpace`], [`ErrorKind::Busy`], [`ErrorKind::MemoryLimit`]: there is no space or memory for the copy.
pub(super) fn copy(
    devices: &Devices,
    space: &Mutex<SegmentAllocator>,
    id: FrameId,
    sources: &[CopySource],
    device: DeviceIndex,
) -> Result<UnnamedCopy> {
    let (mut copy, front, _account) = begin(devices, id, sources)?;
    let (location, flight) = allocate(devices, space, device, Writer::Cleaning, copy.from.meta.location.pages)?;
    let to = Arc::clone(flight.segment());
    let written = copy.write(&front, location, &to);
    let header_crc = written.inspect_err(|e| {
        if e.kind() == ErrorKind::Io {
            crate::metrics::lock(space).abandon(&to);
        }
    })?;
    Ok(UnnamedCopy { location, header_crc, flight })
}

/// Reads and verifies the front of a frame from the first source that has a good one.
fn begin<'a>(
    devices: &'a Devices,
    id: FrameId,
    sources: &'a [CopySource],
) -> Result<(CopyJob<'a>, Vec<u8>, Reservation)> {
    let Some((first, others)) = sources.split_first() else {
        return Err(Error::new(ErrorKind::Corruption, format!("copy frame {id}: no copy can be read")));
    };
    first_good(first, others, |from, again| {
        let front_bytes = from.meta.front_pages as usize * PAGE_BYTES;
        let account = devices.reserve(front_bytes, Category::Other).ok_or_else(|| {
            let text = format!(
                "copy frame {id}: its header and sections need {front_bytes} bytes, more than is free; \
                 raise memory_limit"
            );
            CopyFault::Stop(Error::new(ErrorKind::MemoryLimit, text))
        })?;
        let buffer = devices.buffer(CHUNK_BYTES.min(from.meta.location.pages as usize * PAGE_BYTES));
        let mut copy = CopyJob { devices, id, from, sources, buffer: buffer.map_err(CopyFault::Stop)? };
        match copy.read_front(front_bytes) {
            Ok(front) => Ok((copy, front, account)),
            Err(e) if e.kind() == ErrorKind::Closed => Err(CopyFault::Stop(e)),
            Err(e) => {
                let fault = CopyFault::counted(devices, from.segment.key.0, e);
                from.note(&fault, again);
                Err(fault)
            }
        }
    })
}

fn buffer_in_use() -> Error {
    Error::new(ErrorKind::Busy, "copy frame: the buffer is in use by a read")
}

impl CopyJob<'_> {
    fn buffer_bytes(&self) -> usize {
        self.buffer.bytes().map_or(PAGE_BYTES, <[u8]>::len).max(PAGE_BYTES)
    }

    fn bytes(&self, len: usize) -> Result<&[u8]> {
        let bytes = self.buffer.bytes().and_then(|bytes| bytes.get(..len));
        bytes.ok_or_else(buffer_in_use)
    }

    /// Reads `len` bytes from an offset of the frame to the start of the buffer.
    fn read(&mut self, from: &CopySource, offset: u64, len: usize) -> Result<()> {
        let offset = from.meta.location.offset() + offset;
        BlockReader::cleaning(self.devices).read_into(&from.segment, offset, (&mut self.buffer, 0..len))
    }

    /// Reads the header and the small sections behind it, and verifies their checksums.
    fn read_front(&mut self, bytes: usize) -> Result<Vec<u8>> {
        let mut front = Vec::with_capacity(bytes);
        while front.len() < bytes {
            let len = self.buffer_bytes().min(bytes - front.len());
            self.read(self.from, front.len() as u64, len)?;
            front.extend_from_slice(self.bytes(len)?);
        }
        self.check_front(&front)?;
        Ok(front)
    }

    /// Writes the first `len` bytes of the buffer to `offset` of the segment file.
    fn put(&self, to: &SegmentHandle, offset: u64, len: usize) -> Result<()> {
        let from = self.buffer.write_source(0..len)?;
        let op = Op::Write { file: to.file()?, offset, from };
        self.devices.get(to.key.0)?.shard.run(vec![Request { op, tag: 0 }], Priority::Clean)
    }

    fn damaged(&self, code: &'static str, offset: u64, len: u64, found: String) -> Error {
        Error::corrupt(Corruption {
            code,
            device: self.from.meta.location.device.0,
            file: segment::file_name(self.from.meta.location.segment),
            offset: self.from.meta.location.offset() + offset,
            len,
            expected: format!("the original bytes of frame {}", self.id),
            found,
        })
    }

    fn view<'f>(&self, front: &'f [u8]) -> Result<FrameView<'f>> {
        let place = FramePlace {
            store_id: self.devices.identity.store_id,
            location: self.from.meta.location,
            segment_generation: self.from.segment.generation,
            segment_nonce: self.from.segment.nonce,
        };
        let bytes = u64::from(self.from.meta.header_pages) * PAGE_BYTES as u64;
        let view =
            FrameView::verify(front, &place).map_err(|e| self.damaged("frame-header", 0, bytes, e.to_string()))?;
        let header = view.header();
        let same = header.frame.get() == self.id.0
            && header.crc.get() == self.from.meta.header_crc
            && header.lsn.get() == self.from.meta.lsn
            && header.nonce.get() == self.from.meta.nonce
            && header.sequence.get() == self.from.meta.origin.0;
        if same {
            return Ok(view);
        }
        Err(self.damaged("frame-header", 0, bytes, "the header of another frame".into()))
    }

    /// Returns whether `data` has the checksum `stored` of a plane of `tokens` tokens from `first` on.
    fn check(
        &self,
        descriptor: &Descriptor,
        (first, tokens): (u64, u32),
        plane: u16,
        data: &[u8],
        stored: u64,
    ) -> bool {
        let (kind, layer) = (descriptor.kind.get(), descriptor.layer.get());
        let identity = PlaneIdentity::new(self.from.meta.nonce, self.from.meta.origin, kind, layer, first, tokens)
            .with_plane(plane);
        self.devices.identity.checksum.compute(&identity, data) == stored
    }

    /// Verifies the header and the small sections behind it against their checksums.
    fn check_front(&self, front: &[u8]) -> Result<()> {
        let view = self.view(front)?;
        for descriptor in view.descriptors().iter().filter(|d| d.kind.get() != KIND_GROUPS) {
            let (start, len) = (descriptor.offset.get() as usize, descriptor.bytes.get() as usize);
            let bad = || self.damaged("payload-checksum", start as u64, len as u64, "other bytes".into());
            let piece = start.checked_add(len).and_then(|end| front.get(start..end)).ok_or_else(bad)?;
            let layer = view.layout().layers.get(usize::from(descriptor.layer.get()));
            let planes = match layer {
                Some(layer) if descriptor.kind.get() == KIND_TAIL => {
                    let (key, _) = tail_plane_bytes(layer, view.layout().dtype, descriptor.tokens.get() as usize);
                    let (key, value) = piece.split_at_checked(key).ok_or_else(bad)?;
                    [Some(key), (layer.planes() > 1).then_some(value)]
                }
                _ => [Some(piece), None],
            };
            let stored = view.checksums(descriptor);
            for (plane, data) in planes.into_iter().flatten().enumerate() {
                let (first, tokens) = (descriptor.first_token.get(), descriptor.tokens.get());
                let stored = stored.get(plane).ok_or_else(bad)?.get();
                if !self.check(descriptor, (first, tokens), plane as u16, data, stored) {
                    return Err(bad());
                }
            }
        }
        Ok(())
    }

    /// Writes the copy: first the groups, then the front with its new location. Returns the CRC of the new header.
    fn write(&mut self, front: &[u8], location: Location, to: &SegmentHandle) -> Result<u32> {
        let view = self.view(front)?;
        let layout = KvLayout::new(view.layout().clone())?;
        let mut done = front.len() as u64;
        for descriptor in view.descriptors().iter().filter(|d| d.kind.get() == KIND_GROUPS) {
            self.zero(done, descriptor.offset.get(), location, to)?;
            self.groups(&view, &layout, descriptor, Some((location, to)))?;
            done = descriptor.offset.get() + descriptor.bytes.get();
        }
        self.zero(done, location.bytes(), location, to)?;
        let mut front = front.to_vec();
        let header_bytes = self.from.meta.header_pages as usize * PAGE_BYTES;
        let (header, _) = FrameHeader::mut_from_prefix(&mut front)
            .map_err(|_| self.damaged("frame-header", 0, header_bytes as u64, "a header that is too short".into()))?;
        header.location = location.to_raw();
        header.segment_generation = U64::new(to.generation);
        header.crc = U32::new(0);
        let crc = crc_with_hole(&to.nonce.to_le_bytes(), &front[..header_bytes], 4..8);
        front[4..8].copy_from_slice(&crc.to_le_bytes());
        let mut at = 0;
        for chunk in front.chunks(self.buffer_bytes()) {
            if let Some(out) = self.buffer.bytes_mut() {
                out[..chunk.len()].copy_from_slice(chunk);
            }
            self.put(to, location.offset() + at, chunk.len())?;
            at += chunk.len() as u64;
        }
        Ok(crc)
    }

    /// Writes zeros from `from` to `end`, because the pages may hold bytes of an earlier use of the segment.
    fn zero(&mut self, from: u64, end: u64, location: Location, to: &SegmentHandle) -> Result<()> {
        let mut at = from;
        while at < end {
            let len = self.buffer_bytes().min((end - at) as usize);
            if let Some(out) = self.buffer.bytes_mut() {
                out[..len].fill(0);
            }
            self.put(to, location.offset() + at, len)?;
            at += len as u64;
        }
        Ok(())
    }

    /// Reads and verifies all groups of an extent. With `to`, writes them to the copy.
    fn groups(
        &mut self,
        view: &FrameView<'_>,
        layout: &KvLayout,
        descriptor: &Descriptor,
        to: Option<(Location, &SegmentHandle)>,
    ) -> Result<()> {
        let index = usize::from(descriptor.layer.get());
        let geometry = *layout.block(index);
        let blocks = descriptor.pieces.get() as usize;
        // A step is a multiple of whole pages for small blocks, and of one block for large ones.
        let unit = geometry.blocks_per_page.max(1);
        let mut step = unit;
        while geometry.extent_bytes(step + unit) <= self.buffer_bytes() && step < blocks {
            step += unit;
        }
        if geometry.extent_bytes(step.min(blocks)) > self.buffer_bytes() {
            self.buffer = self.devices.buffer(geometry.extent_bytes(step.min(blocks)))?;
        }
        for first in (0..blocks).step_by(step) {
            let count = step.min(blocks - first);
            let offset = descriptor.offset.get() + geometry.block_offset(first) as u64;
            let chunk = CopyChunk { blocks: first..first + count, offset, bytes: geometry.extent_bytes(count) };
            self.good_chunk(view, layout, descriptor, &chunk)?;
            if let Some((location, to)) = to {
                self.put(to, location.offset() + offset, chunk.bytes)?;
            }
        }
        Ok(())
    }

    /// Reads the groups of a chunk to the start of the buffer, each from a source where its checksums match.
    fn good_chunk(
        &mut self,
        view: &FrameView<'_>,
        layout: &KvLayout,
        descriptor: &Descriptor,
        chunk: &CopyChunk,
    ) -> Result<()> {
        let CopyChunk { blocks, offset, bytes } = chunk.clone();
        let geometry = layout.block(usize::from(descriptor.layer.get()));
        let mut bad: Vec<usize> = blocks.clone().collect();
        let (devices, mut is_first, mut failed) = (self.devices, true, None);
        let (from, others) = (self.from, self.sources.iter().filter(|source| !std::ptr::eq(*source, self.from)));
        let good = first_good(from, others, |source, again| {
            // The good blocks so far stay in `kept` while the buffer takes the next read.
            let spare = (!is_first).then(|| devices.buffer(bytes)).transpose().map_err(CopyFault::Stop)?;
            let kept = spare.map(|spare| std::mem::replace(&mut self.buffer, spare));
            is_first = false;
            let found = self
                .read(source, offset, bytes)
                .and_then(|()| self.bad_blocks(view, layout, descriptor, &bad, blocks.start));
            let still = match found {
                Ok(still) => {
                    devices.count_checksum_failures(source.segment.key.0, still.len() as u64);
                    still
                }
                Err(e) => {
                    devices.count_damage(source.segment.key.0, &e);
                    failed.get_or_insert(e);
                    bad.clone()
                }
            };
            if let Some(kept) = kept {
                let read = std::mem::replace(&mut self.buffer, kept);
                for block in bad.iter().filter(|block| !still.contains(block)) {
                    let start = geometry.block_offset(*block) - geometry.block_offset(blocks.start);
                    let place = start..start + geometry.block_bytes;
                    if let (Some(from), Some(to)) = (read.bytes(), self.buffer.bytes_mut()) {
                        to[place.clone()].copy_from_slice(&from[place]);
                    }
                }
            }
            bad = still;
            if bad.is_empty() {
                return Ok(());
            }
            // An error counts like damage here, because the second read may bring what the first did not.
            let damage = self.damaged("payload-checksum", offset, bytes as u64, "other bytes".into());
            let fault = CopyFault::Reread(damage);
            source.note(&fault, again);
            Err(fault)
        });
        // A failed read is reported rather than damage, because it may pass.
        good.map_err(|e| if e.kind() == ErrorKind::Corruption { failed.unwrap_or(e) } else { e })
    }

    /// Returns the blocks among `blocks` whose checksums do not match. The buffer starts with block `first`.
    fn bad_blocks(
        &self,
        view: &FrameView<'_>,
        layout: &KvLayout,
        descriptor: &Descriptor,
        blocks: &[usize],
        first: usize,
    ) -> Result<Vec<usize>> {
        let index = usize::from(descriptor.layer.get());
        let (geometry, planes) = (layout.block(index), layout.kv_layer(index)?.planes());
        let group = layout.group_tokens() as u64;
        let base = geometry.block_offset(first);
        let bytes = self.buffer.bytes().ok_or_else(buffer_in_use)?;
        let stored = view.checksums(descriptor);
        let is_good = |block: usize| {
            let token = descriptor.first_token.get() + block as u64 * group;
            (0..planes).all(|plane| {
                let (start, len) = geometry.plane(plane);
                let start = geometry.block_offset(block) - base + start;
                let data = bytes.get(start..start + len).unwrap_or_default();
                let stored = stored.get(block * planes + plane);
                stored.is_some_and(|stored| {
                    self.check(descriptor, (token, group as u32), plane as u16, data, stored.get())
                })
            })
        };
        Ok(blocks.iter().copied().filter(|block| !is_good(*block)).collect())
    }
}
