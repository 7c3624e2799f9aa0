//! Reads that a sequence makes for itself: pieces of segments in batches, and single checked blocks.

use super::layer::LayerState;
use crate::catalog::{BlockPlace, SegmentHandle};
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::buffer::arena::Exhausted;
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::planted::covered;
use crate::io::scheduler::{Batch, Priority, Request, Sink, Waiter};
use crate::log::{Devices, exhausted};
use std::sync::Arc;
use stratakv_format::frame::KIND_GROUPS;
use stratakv_format::{DeviceIndex, PAGE_BYTES, PlaneIdentity, segment};

/// The most bytes of one read.
const READ_BYTES: usize = 1 << 20;

/// Reads pieces of segments: segment, offset, bytes.
///
/// # Errors
/// The first that a piece has.
pub(super) fn read(devices: &Devices, pieces: &[(&SegmentHandle, u64, usize)]) -> Result<Vec<Vec<u8>>> {
    read_each(devices, pieces)?.into_iter().collect()
}

/// A sink that hands the outcome of each request to the waiter of its tag.
struct ScanSink(Vec<Arc<Waiter>>);

impl Sink for ScanSink {
    fn complete(&self, tag: u64, outcome: Result<()>) {
        if let Some(waiter) = self.0.get(tag as usize) {
            waiter.complete(0, outcome);
        }
    }
}

/// Buffers with the indices of the pieces that they are read for, and their reads.
#[derive(Default)]
struct Collected {
    buffers: Vec<(usize, Lease)>,
    reads: Vec<Result<(DeviceIndex, Op)>>,
}

/// Reads pieces of segments and returns the outcome of each. It submits one batch per device, or several if memory is
/// short.
///
/// # Errors
/// [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no buffers.
pub(super) fn read_each(devices: &Devices, pieces: &[(&SegmentHandle, u64, usize)]) -> Result<Vec<Result<Vec<u8>>>> {
    let mut out: Vec<Result<Vec<u8>>> = pieces.iter().map(|_| Ok(Vec::new())).collect();
    let mut collected = Collected::default();
    for (piece, (segment, offset, bytes)) in pieces.iter().enumerate() {
        for start in (0..*bytes).step_by(READ_BYTES) {
            let len = READ_BYTES.min(bytes - start);
            let mut buffer = match devices.arena.lease_zeroed(len) {
                // This thread returns its buffers before it waits, because other readers may wait for them.
                Err(Exhausted::Now) if !collected.buffers.is_empty() => {
                    read_collected(devices, std::mem::take(&mut collected), &mut out)?;
                    devices.buffer(len)?
                }
                Err(Exhausted::Now) => devices.buffer(len)?,
                leased => leased.map_err(|e| exhausted(e, len))?,
            };
            let into = buffer.read_target(0..len)?;
            let file = devices.get(segment.key.0).and_then(|_| segment.file());
            let read = file.map(|file| (segment.key.0, Op::Read { file, offset: offset + start as u64, into }));
            collected.reads.push(read);
            collected.buffers.push((piece, buffer));
        }
    }
    read_collected(devices, collected, &mut out)?;
    Ok(out)
}

/// Reads what was collected and appends it to the pieces.
fn read_collected(devices: &Devices, collected: Collected, out: &mut [Result<Vec<u8>>]) -> Result<()> {
    let Collected { buffers, reads: owners } = collected;
    let waiters: Vec<_> = owners.iter().map(|_| Waiter::new(1)).collect();
    let mut by_device: std::collections::BTreeMap<_, Vec<Request>> = std::collections::BTreeMap::new();
    for (tag, owner) in owners.into_iter().enumerate() {
        match owner {
            Ok((device, op)) => by_device.entry(device).or_default().push(Request { op, tag: tag as u64 }),
            Err(e) => waiters[tag].complete(0, Err(e)),
        }
    }
    let sink: Arc<dyn Sink> = Arc::new(ScanSink(waiters.clone()));
    for (device, requests) in by_device {
        let batch = Batch { requests, priority: Priority::Demand, sink: Arc::clone(&sink), cancel: None };
        devices.get(device)?.shard.submit_wait(batch);
    }
    // Each buffer returns to the arena as soon as it is copied.
    for (waiter, (piece, buffer)) in waiters.iter().zip(buffers) {
        match (waiter.wait(), &mut out[piece]) {
            (Ok(()), Ok(bytes)) => bytes.extend_from_slice(buffer.bytes().unwrap_or_default()),
            (Err(e), whole @ Ok(_)) => *whole = Err(e),
            (_, Err(_)) => {}
        }
    }
    Ok(())
}

/// V planes of fewer bytes are read with the K planes around them, because neighbouring blocks then need one request.
const VALUES_LEFT_OUT_BYTES: usize = 16 << 10;

/// The part of a block that a scan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanPart {
    /// The K plane, which is at the start of the block.
    Keys,
    /// All planes.
    Block,
}

impl ScanPart {
    /// Returns the bytes to read from the start of a layer's block.
    pub(super) fn bytes(self, layer: &LayerState) -> usize {
        let block = layer.block();
        let alone = self == Self::Keys && block.value_bytes >= VALUES_LEFT_OUT_BYTES;
        if alone { block.key_bytes } else { block.block_bytes }
    }

    /// Returns the number of planes that are checked. Damage in the others does not matter.
    fn planes(self, layer: &LayerState) -> usize {
        if self == Self::Keys { 1 } else { layer.geometry().planes() }
    }
}

/// Reads and checks one block, or a part of it, from the first copy that has it undamaged. A damaged copy is read once
/// more, because the damage may have happened on the way.
///
/// # Errors
/// The error of the first copy, if every copy fails.
pub(super) fn read_block(
    devices: &Devices,
    layer: &LayerState,
    (group, part): (u64, ScanPart),
    tokens: u64,
    place: &BlockPlace,
) -> Result<Vec<u8>> {
    let mut failed = None;
    for copy in 0..place.frame.copies() {
        let device = place.frame.copy(copy).0.key.0;
        let read = || {
            let block = read_block_copy(devices, layer, (group, part), tokens, place, copy);
            block.inspect_err(|e| devices.count_damage(device, e))
        };
        let outcome = read().or_else(|e| if e.kind() == ErrorKind::Corruption { read() } else { Err(e) });
        match outcome {
            Ok(block) => return Ok(block),
            Err(e) => {
                if place.frame.copies() > 1 {
                    devices.suspects.add(&place.frame, copy);
                }
                failed.get_or_insert(e);
            }
        }
    }
    Err(failed.unwrap_or_else(|| Error::new(ErrorKind::Corruption, "read: the frame has no copy")))
}

fn read_block_copy(
    devices: &Devices,
    layer: &LayerState,
    (group, part): (u64, ScanPart),
    tokens: u64,
    place: &BlockPlace,
    copy: usize,
) -> Result<Vec<u8>> {
    let (own, offset) = (place.frame.copy(copy).0, place.frame.offset_in(copy, place.offset));
    let first = offset / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    let skip = (offset - first) as usize;
    let bytes = (skip + part.bytes(layer)).next_multiple_of(PAGE_BYTES);
    let pages = read(devices, &[(own, first, bytes)])?.pop().unwrap_or_default();
    let block = pages.get(skip..skip + part.bytes(layer)).unwrap_or_default();
    check_block(devices, layer, (group, part), tokens, (place, copy), block)?;
    Ok(block.to_vec())
}

/// Checks a block, or a part of it, that was read from copy `copy` against its checksums.
///
/// # Errors
/// [`ErrorKind::Corruption`] with the device, segment and offset.
pub(super) fn check_block(
    devices: &Devices,
    layer: &LayerState,
    (group, part): (u64, ScanPart),
    tokens: u64,
    (place, copy): (&BlockPlace, usize),
    block: &[u8],
) -> Result<()> {
    let (own, offset) = (place.frame.copy(copy).0, place.frame.offset_in(copy, place.offset));
    for plane in 0..part.planes(layer) {
        let (start, len) = layer.block().plane(plane);
        let identity = PlaneIdentity::new(
            place.frame.nonce,
            place.frame.origin,
            KIND_GROUPS,
            layer.index() as u16,
            group * tokens,
            tokens as u32,
        )
        .with_plane(plane as u16);
        let data = block.get(start..start + len).unwrap_or_default();
        let corrupt = |code, at: usize, len: usize, expected, found| {
            Error::corrupt(Corruption {
                code,
                device: own.key.0.0,
                file: segment::file_name(own.key.1),
                offset: offset + (start + at) as u64,
                len: len as u64,
                expected,
                found,
            })
        };
        let found = devices.identity.checksum.compute(&identity, covered(data));
        let expected = place.frame.checksums.get(place.checksum + plane).copied();
        if expected != Some(found) {
            let expected = format!("checksum {:#018x}", expected.unwrap_or(0));
            return Err(corrupt("payload-checksum", 0, len, expected, format!("{found:#018x}")));
        }
        if let Some(at) = layer.coder().and_then(|coder| coder.first_bad(plane, data)) {
            let (expected, found) = ("finite ranges".to_owned(), "a range that is not finite".to_owned());
            return Err(corrupt("payload-codec", at, 4.min(len), expected, found));
        }
    }
    Ok(())
}
