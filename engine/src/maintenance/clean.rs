//! Cleaning: moves the live frames out of mostly dead segments, so that the segments become free.
//!
//! 1. Choose victims: sealed segments with the best ratio of gain to cost, until their dead pages are the wanted gain.
//!    Choose none while cleaning gains nothing (see `log::cleaning_progress`).
//! 2. Copy the live frames of each victim, in order of LSN, to the segment for relocated frames of the same device.
//! 3. Commit the new places, one commit per victim.
//! 4. Commit once more: a commit frees every segment without live pages and without readers.
//!
//! Invariants:
//! - A frame moves only if its places are those that were read. Otherwise the commit leaves it alone.
//! - A selection taken before a move reads the old place. That segment is not reused until the selection is dropped.
//! - Every byte is verified against its checksum before it is written (see [`super::frame_copy`]).
//! - A block that is damaged in the victim is read from another copy of its frame. If no copy has it, the segment is
//!   marked stuck, because moving its other frames would gain nothing.
//! - A copy that was found bad and stays where it is becomes a suspect, so that the next repair looks at it.
//!
//! Source of the victim score: Rosenblum and Ousterhout, "The design and implementation of a log-structured file
//! system" (SOSP 1991), sections 3.4 and 3.5, with a constant added to the age.

use super::frame_copy::{CopySource, UnnamedCopy, copy};
use crate::catalog::{Catalog, FrameMeta, SegmentKey, SegmentState};
use crate::error::{ErrorKind, Result};
use crate::events::span;
use crate::io::coverage;
use crate::log::{CommitRequest, CopyAt, CopyChange, Device, Devices, SegmentAllocator, StoreInner, copies_of, places};
use crate::metrics::lock;
use std::sync::Arc;
use std::time::Instant;
use stratakv_format::segment::KIND_LOG;
use stratakv_format::{FrameId, PAGE_BYTES};

/// The result of cleaning: segments emptied, and frames and bytes moved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CleaningResult {
    pub(crate) segments: u64,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
}

/// A segment worth cleaning.
struct Victim {
    key: SegmentKey,
    live_pages: u64,
    /// The live share of its pages, from 0 to 1.
    live: f64,
    score: f64,
}

/// Returns the sealed segments that can be cleaned, the best first: few live pages, and old ones.
fn victims(devices: &Devices, catalog: &Catalog, space: &SegmentAllocator) -> Vec<Victim> {
    let sealed = catalog.segments.iter().filter(|(key, meta)| {
        // Derived frames are released, never moved.
        let movable = meta.state == SegmentState::Sealed && meta.live_pages > 0 && meta.kind == KIND_LOG;
        // Repair moves the frames of devices that take no new frames.
        let takes = devices.list.get(usize::from(key.0.0)).is_some_and(Device::takes_frames);
        movable && takes && space.is_sealed(**key) && space.in_flight(**key) == 0 && !space.is_stuck(**key)
    });
    let oldest = |key: &SegmentKey| catalog.segments.get(key).map_or(0, |meta| meta.last_lsn);
    let newest = catalog.counters.lsn.max(1);
    let mut found: Vec<Victim> = sealed
        .map(|(key, meta)| {
            let live = meta.live_pages as f64 / f64::from(meta.pages - 2);
            let age = (newest.saturating_sub(oldest(key)) as f64 / newest as f64).max(1e-3);
            let score = (1.0 - live) * (0.25 + age) / (1.0 + live);
            Victim { key: *key, live_pages: meta.live_pages, live, score }
        })
        .collect();
    found.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.key.cmp(&b.key)));
    found
}

/// Cleans segments with a live share of at most `share` until `segments` whole ones are gained, at full speed.
///
/// Moves nothing if there are fewer dead pages than one segment has, or while cleaning gains nothing.
///
/// # Errors
/// A commit failed. Frames that are damaged in every copy, and frames that find no space, stay where they are and are
/// no error.
pub(crate) fn clean(inner: &StoreInner, share: f64, segments: u64) -> Result<CleaningResult> {
    let _urgent = inner.background.urgent();
    clean_at(inner, share, segments, true)
}

/// Cleans as [`clean`] does, at the rate that is in force. It is urgent if an append or a caller waits for space.
///
/// # Errors
/// As for [`clean`].
pub(super) fn clean_at(inner: &StoreInner, share: f64, segments: u64, urgent: bool) -> Result<CleaningResult> {
    let mut progress = lock(&inner.locks.cleaning);
    let _span = span!("clean");
    let mut done = CleaningResult::default();
    let usable = u64::from(inner.devices.identity.segment_pages - 2);
    let (list, candidates, dead) = {
        let catalog = lock(&inner.catalog);
        let mut victims = victims(&inner.devices, &catalog, &lock(&inner.space));
        let dead = victims.iter().map(|victim| usable.saturating_sub(victim.live_pages)).sum();
        if !progress.may_gain(dead, usable, urgent) {
            return Ok(done);
        }
        victims.retain(|victim| victim.live <= share);
        let candidates = victims.len() as u64;
        let mut gain = 0;
        let enough = victims.into_iter().take_while(|victim| {
            let wanted = gain < segments * usable;
            gain += if wanted { usable - victim.live_pages } else { 0 };
            wanted
        });
        let keys: Vec<SegmentKey> = enough.map(|victim| victim.key).collect();
        if gain < usable {
            return Ok(done);
        }
        let frames = |key| catalog.frames_in(key).into_iter().map(|(id, frame)| (id, frame.clone())).collect();
        let list: Vec<(SegmentKey, Vec<(FrameId, FrameMeta)>)> =
            keys.into_iter().map(|key| (key, frames(key))).collect();
        (list, candidates, dead)
    };
    let (start, mut opened) = (Instant::now(), 0);
    for (key, mut frames) in list {
        // The order in which they were written keeps the frames of a sequence together.
        frames.sort_by_key(|(_, frame)| frame.lsn);
        let moved = move_frames(inner, key, &frames, (start, done.bytes), &mut opened)?;
        done.frames += moved.frames;
        done.bytes += moved.bytes;
        done.segments += moved.segments;
        if moved.segments == 0 && lock(&inner.space).is_stuck(key) {
            continue;
        }
        if moved.segments == 0 {
            break;
        }
    }
    progress.add_round((done.segments, opened), candidates, dead);
    if done.frames > 0 {
        // This commit frees the segments that have no live frames left.
        inner.commit(CommitRequest::default())?;
    }
    inner.activity.counters.moved_bytes.add(done.bytes);
    inner.activity.counters.cleaned_segments.add(done.segments);
    Ok(done)
}

/// Returns the copies of a frame in the order in which cleaning reads them: the one in segment `key` first.
///
/// The others are read only where that one is damaged or unreadable.
fn sources(copies: Vec<CopyAt>, meta: &FrameMeta, key: SegmentKey) -> Vec<CopySource> {
    let source = |CopyAt { at, location }: CopyAt| CopySource::new(meta, location, at.header_crc, at.segment);
    let mut sources: Vec<CopySource> = copies.into_iter().map(source).collect();
    sources.sort_by_key(|source| source.segment() != key);
    sources
}

/// Moves the frames of one segment. `before` bytes were moved since `start`; the rate limit counts both.
///
/// Returns `segments == 1` if every frame was moved. `opened` grows by the segments that were opened for them.
fn move_frames(
    inner: &StoreInner,
    key: SegmentKey,
    frames: &[(FrameId, FrameMeta)],
    (start, before): (Instant, u64),
    opened: &mut u64,
) -> Result<CleaningResult> {
    let mut done = CleaningResult::default();
    let from = {
        let catalog = lock(&inner.catalog);
        let Some(meta) = catalog.segments.get(&key).filter(|meta| meta.state == SegmentState::Sealed) else {
            return Ok(done);
        };
        lock(&inner.space).handle(&inner.devices, key, meta)?
    };
    let mut request = CommitRequest::default();
    let mut whole = true;
    for (id, meta) in frames {
        let seen = places(meta);
        let sources = {
            let catalog = lock(&inner.catalog);
            // The frame may have been deleted or moved since it was listed.
            if catalog.frames.get(id).is_none_or(|now| places(now) != seen) {
                continue;
            }
            sources(copies_of(&inner.devices, &catalog, &mut lock(&inner.space), meta)?, meta, from.key)
        };
        // Only the copy in this segment moves.
        let Some(at) = seen.iter().position(|(at, _)| (at.device, at.segment) == key) else { continue };
        let copied = copy(&inner.devices, &inner.space, *id, &sources, key.0);
        if meta.copies() > 1 {
            // A copy that moved is good from now on.
            let stays = |source: &&CopySource| copied.is_err() || source.segment() != key;
            let bad = sources.iter().filter(stays).filter(|source| source.is_bad());
            bad.for_each(|source| inner.devices.suspects.add_at(*id, source.segment().0));
        }
        match copied {
            Ok(UnnamedCopy { location, header_crc, flight }) => {
                // The first frame of a segment is behind its header page.
                *opened += u64::from(location.page == 1);
                done.frames += 1;
                done.bytes += u64::from(meta.location.pages) * PAGE_BYTES as u64;
                request.segments.push(Arc::clone(flight.segment()));
                request.flights.push(flight);
                let mut wanted = seen.clone();
                wanted[at] = (location, header_crc);
                request.copies.push(CopyChange { frame: *id, seen, wanted });
                inner.background.limit_rate(start, before + done.bytes);
            }
            Err(e) => {
                whole = false;
                match e.kind() {
                    ErrorKind::NoSpace | ErrorKind::Busy | ErrorKind::MemoryLimit => break,
                    ErrorKind::Corruption | ErrorKind::Io => {}
                    _ => return Err(e),
                }
                // The segment cannot be emptied, so moving its other frames would gain nothing.
                lock(&inner.space).set_stuck(key);
                break;
            }
        }
    }
    if request.copies.is_empty() {
        return Ok(done);
    }
    let moved = request.copies.len();
    inner.commit(request)?;
    (0..moved).for_each(|_| coverage!(FrameMoved));
    done.segments = u64::from(whole);
    Ok(done)
}
