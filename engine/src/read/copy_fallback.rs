//! Falling back to other copies: for reads that failed and for blocks with a wrong checksum.
//!
//! Copies are tried one after the other: the planned one first, then those on sound devices with the shortest queues.

use super::block_reader::{BlockReader, CopyFault, first_good, read_request};
use crate::catalog::FrameBody;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::log::Devices;
use crate::plan::{PlannedRead, ReadPart};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Reads the failed reads of a part again, from one other copy after the other.
///
/// # Errors
/// The error of a read that no copy gives. [`ErrorKind::Deadline`]: the deadline passed.
pub(super) fn recover(
    devices: &Devices,
    part: &ReadPart,
    failed: Vec<(usize, Error)>,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<()> {
    let retry = |(at, error): (usize, Error)| {
        let read = part.reads.get(at)?;
        Some(CopyRetry { read, others: other_copies(devices, &read.frame, usize::from(read.copy)), error })
    };
    let mut failed: Vec<CopyRetry<'_>> = failed.into_iter().filter_map(retry).collect();
    for turn in 0..crate::catalog::COPIES_MAX {
        let (ready, lost): (Vec<_>, Vec<_>) = failed.into_iter().partition(|retry| turn < retry.others.len());
        if let Some(retry) = lost.into_iter().next() {
            return Err(retry.error);
        }
        let outcomes = read_copies(devices, &ready, turn, buffer, deadline)?;
        failed = Vec::new();
        for (retry, outcome) in ready.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => given_elsewhere(devices, &retry.read.frame, usize::from(retry.read.copy)),
                Err(_) => failed.push(retry),
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
    }
    failed.into_iter().next().map_or(Ok(()), |retry| Err(retry.error))
}

/// A failed read, and the other copies in the order to try.
struct CopyRetry<'a> {
    read: &'a PlannedRead,
    others: Vec<usize>,
    error: Error,
}

/// Counts a read that another copy answered, and marks this copy as suspect.
pub(super) fn given_elsewhere(devices: &Devices, frame: &FrameBody, copy: usize) {
    devices.suspects.add(frame, copy);
    devices.count_other_copy(frame.copy(copy).0.key.0);
}

/// Returns the other copies of a frame in the order to try: those on sound devices with the shortest queues first.
fn other_copies(devices: &Devices, frame: &FrameBody, own: usize) -> Vec<usize> {
    let load = |copy: usize| {
        let unknown = (true, f64::INFINITY);
        devices.get(frame.copy(copy).0.key.0).map_or(unknown, |device| {
            let (queued, .., avoided) = device.profile.load();
            (avoided || device.is_lost(), queued)
        })
    };
    let next = |turn: usize| (own + turn) % frame.copies();
    let mut others: Vec<_> = (1..frame.copies()).map(|turn| (load(next(turn)), next(turn))).collect();
    others.sort_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    others.into_iter().map(|(_, copy)| copy).collect()
}

/// Reads one copy of each read, in one batch per device. Returns the outcomes in the order of the reads.
fn read_copies(
    devices: &Devices,
    reads: &[CopyRetry<'_>],
    turn: usize,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<Vec<Result<()>>> {
    let requests = reads.iter().map(|CopyRetry { read, others, .. }| {
        let (segment, offset) = read.of_copy(others[turn]);
        read_request(devices, segment, offset, (&mut *buffer, read.to..read.to + read.bytes))
    });
    BlockReader::demand(devices).until(deadline).submit(requests)?.wait_each()
}

/// Bytes of a frame to read again, because what was read is damaged.
pub(super) struct Reread<'a> {
    pub(super) devices: &'a Devices,
    pub(super) frame: &'a Arc<FrameBody>,
    /// The copy that was read.
    pub(super) copy: u8,
    /// The offset in the frame, and the length.
    pub(super) place: (u64, usize),
    pub(super) deadline: Option<Instant>,
}

/// Reads a block again until it is good: once from its own copy, then from the others. Returns whether it is good.
///
/// `range` of the buffer is read, and `block` of it is kept. The rest is unchanged, because it may be verified
/// already.
///
/// # Errors
/// The last copy could not be read, or the deadline passed.
pub(super) fn until_good(
    reread: &Reread<'_>,
    (buffer, range, block): (&mut Lease, &Range<usize>, &Range<usize>),
    is_bad: &dyn Fn(&Lease) -> bool,
) -> Result<bool> {
    let Reread { devices, frame, place: (offset, bytes), deadline, .. } = *reread;
    let own = usize::from(reread.copy);
    let kept = buffer.bytes().and_then(|bytes| bytes.get(range.clone())).unwrap_or_default().to_vec();
    let reader = BlockReader::demand(devices).until(deadline);
    let mut last = Ok(false);
    let good = first_good(own, other_copies(devices, frame, own), |copy, _| {
        let (segment, first) = (frame.copy(copy).0, frame.offset_in(copy, frame.readable(offset, bytes).start));
        if let (true, Ok(device)) = (copy == own, devices.get(segment.key.0)) {
            device.counters.rereads.add(1);
        }
        match reader.read_into(segment, first, (&mut *buffer, range.clone())) {
            Ok(()) if !is_bad(buffer) => return Ok(copy),
            outcome => last = outcome.map(|()| false),
        }
        let is_late = last.as_ref().is_err_and(|e| e.kind() == ErrorKind::Deadline);
        Err(if is_late { CopyFault::Stop(()) } else { CopyFault::Next(()) })
    });
    let Ok(copy) = good else { return last };
    for beside in [range.start..block.start, block.end..range.end] {
        let from = kept.get(beside.start - range.start..beside.end - range.start);
        let into = buffer.bytes_mut().and_then(|bytes| bytes.get_mut(beside));
        let (Some(from), Some(into)) = (from, into) else { return Ok(false) };
        into.copy_from_slice(from);
    }
    if copy != own {
        given_elsewhere(devices, frame, own);
    }
    Ok(true)
}
