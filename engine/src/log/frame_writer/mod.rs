//! Writing a frame: what a sequence has collected becomes one atomic append, with a copy on each of several devices.
//!
//! 1. Small pieces go in front: summary records, token ids, caller state, adapters, tails ([`FrameTables::put_front`]).
//! 2. Groups follow, one extent per layer and stretch of groups ([`FrameTables::put_groups`]).
//! 3. The header's length is now known, and with it every offset ([`FrameTables::place`]).
//! 4. Each copy gets pages on a device, a header that names them, and its writes ([`PlacedFrame::write_copy`]).
//! 5. Readers find the frame in its slot. They read from memory until its writes are done.
//!
//! Invariant: the bytes of all copies are equal except for the header's place and its CRC.

mod copy;
mod derived;
mod tables;
mod target;
mod written;

pub(crate) use derived::{DerivedDraft, DerivedFrame, DirectoryBytes, write_derived};
pub(crate) use target::FrameTarget;
pub(crate) use written::WrittenFrame;

use super::devices::Devices;
use super::frame_builder::{FrameBuilder, TailRows};
use super::segment_allocator::Writer;
use super::sequence_identity::SequenceIdentity;
use crate::catalog::{FrameBody, FrameMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::lock;
use copy::PlacedFrame;
use std::sync::Arc;
use stratakv_format::frame;
use stratakv_format::page::round_up_to_page;
use stratakv_format::{FrameId, PAGE_BYTES};
use tables::FrameTables;
use written::CopyFlight;

/// Returns the most bytes that a [`FrameBuilder`] may hold, given the size of segments.
///
/// # Errors
/// [`ErrorKind::Configuration`]: segments are too small for the header of this layout.
pub(crate) fn front_limit(devices: &Devices, identity: &SequenceIdentity) -> Result<usize> {
    let usable = (devices.identity.segment_pages as usize - 2).min(frame::TOTAL_PAGES_MAX as usize) * PAGE_BYTES;
    let fixed = frame::header_bytes(identity.layout.raw(), identity.key.len(), 0, 0) + 2 * PAGE_BYTES;
    usable.checked_sub(fixed).filter(|left| *left >= PAGE_BYTES).ok_or_else(|| {
        Error::new(ErrorKind::Configuration, "create sequence: segments are too small for the header of this layout")
    })
}

/// Writes a frame, with a copy on each of the first devices of the target that have space. Wait on the result.
///
/// # Errors
/// No device has space or memory for it, or a write that had to be waited for failed. The frame does not exist then.
pub(crate) fn write(
    target: &FrameTarget<'_>,
    (id, lsn): (FrameId, u64),
    identity: &SequenceIdentity,
    builder: &FrameBuilder,
    tails: &dyn TailRows,
) -> Result<WrittenFrame> {
    let nonce = target.devices.environment.random_u64()?;
    let mut tables = FrameTables::new(target.devices, identity, nonce);
    tables.put_front(builder, tails)?;
    let (front_descriptors, group_checksums) = (tables.descriptors.len(), tables.checksums.len());
    let (mut runs, run_pages) = tables.put_groups(&builder.runs)?;
    let counts = (tables.descriptors.len(), tables.checksums.len());
    let header_bytes = frame::header_bytes(identity.layout.raw(), identity.key.len(), counts.0, counts.1);
    let front_bytes = round_up_to_page(header_bytes + tables.front.len);
    let front_pages = (front_bytes / PAGE_BYTES) as u32;
    tables.place(front_descriptors, header_bytes, front_bytes);
    runs.iter_mut().for_each(|run| run.page += front_pages);
    let header = tables.header((id, lsn), front_pages);
    let (front, pages) = (&tables.front, front_pages + run_pages);
    let placed = PlacedFrame { header, header_bytes, front_bytes, front, runs: &runs, pools: &[], pages };
    let mut copies = write_copies(&placed, target, identity, builder.small().is_some())?;
    let Some((first, others)) = copies.split_first() else {
        return Err(Error::new(ErrorKind::NoSpace, "write frame: no device takes new frames"));
    };
    let meta = FrameMeta {
        origin: identity.sequence,
        lsn,
        nonce,
        location: first.location,
        header_crc: first.header_crc,
        header_pages: (header_bytes / PAGE_BYTES) as u32,
        front_pages,
        derived: false,
        refs: 0,
        other_copies: others.iter().map(CopyFlight::meta).collect(),
    };
    let body = FrameBody {
        id,
        origin: identity.sequence,
        nonce,
        segment: Arc::clone(&first.segment),
        page: first.location.page,
        header_crc: first.header_crc,
        other_copies: others.iter().map(CopyFlight::place).collect(),
        checksums: tables.checksums[group_checksums..].into(),
        summaries: tables.summary_places(builder).into(),
    };
    let body = lock(target.space).place_frame(id, body);
    body.set_flights(copies.iter_mut().filter_map(|copy| copy.flight.take()).collect());
    Ok(WrittenFrame {
        id,
        meta,
        body,
        copies,
        written: false,
        space: Arc::clone(target.space),
        runs,
        holds_state: builder.state.is_some(),
        first_token: builder.first_token,
        token_end: u64::MAX,
        small: builder.small(),
    })
}

/// Writes copies until there are as many as the sequence wants, or the devices are used up.
///
/// # Errors
/// The first refusal, if no device took the frame. Any other failure at once, after waiting for the copies in flight.
fn write_copies(
    placed: &PlacedFrame<'_>,
    target: &FrameTarget<'_>,
    identity: &SequenceIdentity,
    is_small: bool,
) -> Result<Vec<CopyFlight>> {
    let writer = if is_small { Writer::ShortLived(identity.sequence) } else { Writer::Sequence(identity.sequence) };
    let target = FrameTarget { blocking: target.blocking && identity.copies == 1, ..*target };
    let mut copies: Vec<CopyFlight> = Vec::with_capacity(identity.copies);
    let mut refused = None;
    for &device in target.order {
        if copies.len() == identity.copies {
            break;
        }
        match placed.write_copy(&target, device, writer) {
            Ok(copy) => copies.push(copy),
            // Another device may take it.
            Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::Poisoned) => {
                refused.get_or_insert(e);
            }
            Err(e) => {
                // Copies in flight use buffers of this frame.
                for copy in copies.iter().filter(|copy| copy.waiter.wait().is_err()) {
                    lock(target.space).abandon(&copy.segment);
                }
                return Err(e);
            }
        }
    }
    match refused {
        Some(e) if copies.is_empty() => Err(e),
        _ => Ok(copies),
    }
}
