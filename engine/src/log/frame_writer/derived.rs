//! Writing a derived frame: a pool with all its pages, or pieces of directories of clusters.
//!
//! 1. Pieces of directories are small pieces of the front. The pages of a pool follow the front.
//! 2. The one copy is written to a segment for pools, by the calling thread.
//! 3. The caller syncs the segment ([`sync_derived`](DerivedFrame::sync_all)) before a commit names the frame.
//!
//! Invariant: no commit syncs a derived frame, so a commit never waits for one.

use super::copy::PlacedFrame;
use super::tables::FrameTables;
use super::target::FrameTarget;
use crate::catalog::{Flight, FrameMeta, SegmentHandle};
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted;
use crate::log::devices::Devices;
use crate::log::segment_allocator::Writer;
use crate::log::sequence_identity::SequenceIdentity;
use std::collections::BTreeMap;
use std::sync::Arc;
use stratakv_format::frame;
use stratakv_format::page::round_up_to_page;
use stratakv_format::{FrameId, PAGE_BYTES};

/// A piece of a directory of clusters, and its layer.
pub(crate) struct DirectoryBytes {
    pub(crate) layer: usize,
    pub(crate) bytes: Vec<u8>,
}

/// The contents of a derived frame.
pub(crate) enum DerivedDraft<'a> {
    /// A pool of a layer: the bytes of one page, and the bytes of all pages.
    Pool { layer: usize, page_bytes: usize, pages: &'a [u8] },
    /// Pieces of directories. The pieces of one directory are neighbours.
    Directories(&'a [DirectoryBytes]),
}

/// A derived frame that was written. It is not durable before its segment is synced.
pub(crate) struct DerivedFrame {
    pub(crate) id: FrameId,
    pub(crate) meta: FrameMeta,
    /// The page of its pool, counted from the start of the frame.
    pub(crate) first_page: u32,
    pub(crate) flight: Flight,
}

/// Writes a derived frame to the first device of the target that has space for it.
///
/// # Errors
/// No device has space or memory for it, or a write failed. The frame does not exist then.
pub(crate) fn write_derived(
    target: &FrameTarget<'_>,
    (id, lsn): (FrameId, u64),
    identity: &SequenceIdentity,
    draft: &DerivedDraft<'_>,
) -> Result<DerivedFrame> {
    let nonce = target.devices.environment.random_u64()?;
    let mut tables = FrameTables::new(target.devices, identity, nonce);
    let mut pools: &[u8] = &[];
    match draft {
        DerivedDraft::Pool { layer, page_bytes, pages } => {
            tables.put_pool(*layer, *page_bytes, pages.len());
            pools = pages;
        }
        DerivedDraft::Directories(pieces) => {
            let numbered = (0..).zip(*pieces);
            numbered.for_each(|(number, piece)| tables.put_directory(number, piece.layer, &piece.bytes));
        }
    }
    let counts = (tables.descriptors.len(), tables.checksums.len());
    let header_bytes = frame::header_bytes(identity.layout.raw(), identity.key.len(), counts.0, counts.1);
    let front_bytes = round_up_to_page(header_bytes + tables.front.len);
    let front_pages = (front_bytes / PAGE_BYTES) as u32;
    tables.place(if pools.is_empty() { counts.0 } else { 0 }, header_bytes, front_bytes);
    let header = tables.header((id, lsn), front_pages);
    let pages = front_pages + (pools.len() / PAGE_BYTES) as u32;
    let placed = PlacedFrame { header, header_bytes, front_bytes, front: &tables.front, runs: &[], pools, pages };
    let (location, header_crc, flight) = write_one(&placed, target)?;
    let meta = FrameMeta {
        origin: identity.sequence,
        lsn,
        nonce,
        location,
        header_crc,
        header_pages: (header_bytes / PAGE_BYTES) as u32,
        front_pages,
        derived: true,
        refs: 0,
        other_copies: Vec::new(),
    };
    Ok(DerivedFrame { id, meta, first_page: front_pages, flight })
}

/// Writes the only copy of a derived frame and waits for it.
fn write_one(placed: &PlacedFrame<'_>, target: &FrameTarget<'_>) -> Result<(stratakv_format::Location, u32, Flight)> {
    let none = || Error::new(ErrorKind::NoSpace, "write pool: no device takes new frames");
    let mut refused = None;
    for &device in target.order {
        match placed.write_copy(&FrameTarget { blocking: true, ..*target }, device, Writer::Pools) {
            Ok(mut copy) => {
                if let Err(e) = copy.waiter.wait() {
                    crate::metrics::lock(target.space).abandon(&copy.segment);
                    return Err(e.during("write pool"));
                }
                let flight = copy.flight.take().ok_or_else(none)?;
                return Ok((copy.location, copy.header_crc, flight));
            }
            // Another device may take it.
            Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::Poisoned) => {
                refused.get_or_insert(e);
            }
            Err(e) => return Err(e),
        }
    }
    Err(refused.unwrap_or_else(none))
}

impl DerivedFrame {
    /// Returns the segment that stores it.
    pub(crate) fn segment(&self) -> &Arc<SegmentHandle> {
        self.flight.segment()
    }

    /// Syncs the segments of derived frames, each once.
    ///
    /// # Errors
    /// A sync failed. The caller must then name no frame of them.
    pub(crate) fn sync_all<'a>(devices: &Devices, frames: impl Iterator<Item = &'a Self>) -> Result<()> {
        let segments: BTreeMap<_, _> = frames.map(|frame| (frame.segment().key, frame.segment())).collect();
        let files = segments.iter().map(|(key, segment)| Ok((key.0, segment.file()?))).collect::<Result<Vec<_>>>()?;
        if planted!(PoolsNotSynced) {
            return Ok(());
        }
        devices.sync_all(files.iter().map(|(device, file)| (*device, file)))
    }
}
