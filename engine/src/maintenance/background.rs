//! Background maintenance: expiry, eviction, cleaning, repair and the return of surplus files.
//!
//! The maintenance thread calls [`run`]. [`run_due`] does one round, in this order:
//!
//! 1. Open the segments that the next appends will need.
//! 2. Delete expired sequences.
//! 3. Evict down to the low watermark if the live bytes exceed the high watermark.
//! 4. Clean until some segments are free. If cleaning gains nothing, release the frames of mostly dead pools.
//! 5. Remove files of surplus free segments.
//! 6. Write manifest copies that are still missing.
//!
//! After each round the thread repairs suspect copies, and then waits for a wake-up, an expiry or the next repair
//! attempt. A simulation starts no thread. There, and when an append finds no free space, the calling thread uses
//! [`make_room`].
//!
//! Lock order: `evicting`, `removals` and `cleaning` are taken before the catalog, and the catalog before the
//! allocator. No maintenance lock is held while an observer is notified, because an observer may use the store.

use super::clean::{CleaningResult, clean, clean_at};
use super::evict::{evict, evict_silently, expire, next_expiry_ms, notify_observers, release_closed};
use super::pool_space::release_wasted_pool;
use crate::catalog::SegmentKey;
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::log::{CommitRequest, StoreInner, Watermarks, open_ahead};
use crate::metrics::{Evicted, lock};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use stratakv_format::segment;

/// The background leaves segments with a larger live share alone.
const LIVE_SHARE_BACKGROUND: f64 = 0.75;
/// The largest live share of a segment that is cleaned while an append waits for free space.
const LIVE_SHARE_URGENT: f64 = 0.97;
/// [`shrink`] stops cleaning after this number of consecutive rounds that did not reduce the bytes of files.
const SHRINK_ROUNDS: u32 = 3;
/// The maximum number of files that one commit gives back.
const GIVEN_AT_ONCE: usize = 16;
/// Background cleaning starts when at most this number of segments is free. Larger stores use a 32nd of their segments.
const FREE_FEW: u64 = 2;
/// The wait before a repair that left frames unrepaired is tried again, even if other events wake the thread.
const REPAIRED_AGAIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Frees space for an append that found none. Returns whether the append should try again.
///
/// 1. Commit until the segments that hold nothing live are free.
/// 2. Clean up to four times, one segment of gain each.
/// 3. Release the derived frames of a segment for pools that is mostly dead.
/// 4. Release derived frames or evict sequences worth one segment, commit, and clean again.
///
/// Each step runs only if the steps before it freed nothing.
///
/// # Errors
/// A commit failed.
pub(crate) fn make_room(inner: &Arc<StoreInner>) -> Result<bool> {
    let before = available(inner);
    lock(&inner.space).retry();
    free_dead(inner, before)?;
    if available(inner) > before {
        return Ok(true);
    }
    let mut cleaned = CleaningResult::default();
    for _ in 0..4 {
        let round = clean(inner, LIVE_SHARE_URGENT, 1)?;
        cleaned.segments += round.segments;
        if available(inner) > before || round.frames == 0 {
            break;
        }
    }
    if available(inner) > before {
        return Ok(true);
    }
    if release_wasted_pool(inner)? && available(inner) > before {
        return Ok(true);
    }
    let segment = lock(&inner.space).segment_bytes();
    let evicted = evict(inner, segment)?;
    if evicted == 0 {
        return Ok(cleaned.segments > 0 && available(inner) >= before);
    }
    free_dead(inner, before)?;
    if available(inner) <= before {
        clean(inner, LIVE_SHARE_URGENT, 2)?;
    }
    Ok(true)
}

/// Frees space for clusters that are being stored, without evicting a sequence. Returns whether another try may
/// succeed.
///
/// 1. Commit until the segments that hold nothing live are free.
/// 2. Release the derived frames of a segment for pools that is mostly dead.
/// 3. Release derived frames of closed sequences worth one segment, and commit again.
///
/// # Errors
/// A commit failed.
pub(crate) fn release_clusters(inner: &Arc<StoreInner>) -> Result<bool> {
    let before = available(inner);
    free_dead(inner, before)?;
    if available(inner) > before {
        return Ok(true);
    }
    if release_wasted_pool(inner)? && available(inner) > before {
        return Ok(true);
    }
    let segment = lock(&inner.space).segment_bytes();
    if release_closed(inner, segment)? == 0 {
        return Ok(false);
    }
    free_dead(inner, before)?;
    Ok(true)
}

/// Returns the number of segments that appends may still take.
fn available(inner: &StoreInner) -> u64 {
    let space = lock(&inner.space);
    space.free_segments(&inner.devices)
}

/// Commits until more than `before` segments are free, or no commit can free one.
///
/// A commit frees segments whose frames were deleted, or whose last reader left. An open segment is sealed first. The
/// next commit records it, and the one after that frees it. A queued deletion may leave a segment to seal behind it.
///
/// # Errors
/// A commit failed.
fn free_dead(inner: &StoreInner, before: u64) -> Result<()> {
    let mut last = 0;
    for commit in 0..4 {
        if seal_wasted(inner) {
            last = commit + 1;
        }
        if commit > last {
            break;
        }
        inner.commit(CommitRequest::default())?;
        if available(inner) > before {
            break;
        }
    }
    Ok(())
}

/// Seals open segments that are mostly dead, because only sealed segments can be cleaned. Returns whether there were
/// any.
fn seal_wasted(inner: &StoreInner) -> bool {
    let catalog = lock(&inner.catalog);
    lock(&inner.space).seal_wasted(&catalog)
}

/// Does everything that is due now. With `background`, cleaning keeps to its configured rate. Returns what was cleaned.
///
/// # Errors
/// A commit failed.
pub(crate) fn run_due(inner: &Arc<StoreInner>, background: bool) -> Result<CleaningResult> {
    inner.committer.check()?;
    lock(&inner.space).retry();
    // First, because an append may need the segment before the rest is done.
    open_ahead(&inner.devices, &inner.space);
    expire(inner)?;
    evict_above_watermark(inner)?;
    let done = clean_ahead(inner, background)?;
    let given = give_back(inner);
    inner.committer.complete_manifest()?;
    given?;
    Ok(done)
}

/// Cleans until more than the threshold of segments is free, or nothing more can be cleaned.
fn clean_ahead(inner: &Arc<StoreInner>, background: bool) -> Result<CleaningResult> {
    let mut done = CleaningResult::default();
    // This ends, because cleaning stops when it gains nothing, and a released segment has no live frame left.
    loop {
        let (free, all) = {
            let space = lock(&inner.space);
            (space.free_segments(&inner.devices), space.all_segments(&inner.devices))
        };
        if free > FREE_FEW.max(all / 32) || (background && inner.background.is_stopping()) {
            return Ok(done);
        }
        seal_wasted(inner);
        // No append waits for the space, so cleaning needs a good chance of a gain. A caller has it at full speed.
        let _full_speed = (!background).then(|| inner.background.urgent());
        let round = clean_at(inner, LIVE_SHARE_BACKGROUND, 1, false)?;
        done.segments += round.segments;
        done.frames += round.frames;
        done.bytes += round.bytes;
        if round.segments == 0 && !release_wasted_pool(inner)? {
            return Ok(done);
        }
    }
}

/// Evicts down to the low watermark if the live bytes exceed the high watermark.
fn evict_above_watermark(inner: &Arc<StoreInner>) -> Result<()> {
    let mut events = Vec::new();
    let outcome = evict_to_watermark(inner, &mut events);
    // After the lock is released, because an observer may use the store.
    notify_observers(inner, events);
    outcome
}

fn evict_to_watermark(inner: &Arc<StoreInner>, events: &mut Vec<Evicted>) -> Result<()> {
    // One thread at a time, because two would each evict the whole excess.
    let _one = lock(&inner.locks.evicting);
    let (live, room) = {
        let catalog = lock(&inner.catalog);
        let bytes = lock(&inner.space).bytes(&inner.devices, &catalog);
        let Some(capacity) = bytes.capacity else { return Ok(()) };
        let parts = bytes.devices.iter().map(|(_, own)| own);
        let live: u64 = parts.clone().map(|own| own.live + own.in_flight).sum();
        let taken: u64 = parts.map(|own| own.reserved + own.metadata).sum();
        let taken = taken + bytes.manifest + bytes.spare_manifest + bytes.superblocks;
        (live, capacity.saturating_sub(taken))
    };
    let Watermarks { high, low } = inner.limits.watermarks;
    if live as f64 > room as f64 * high {
        let target = (room as f64 * low) as u64;
        evict_silently(inner, live.saturating_sub(target), events)?;
    }
    Ok(())
}

/// Cleans every sealed segment that contains dead pages, at full speed.
///
/// # Errors
/// A commit failed.
pub(crate) fn clean_all(inner: &Arc<StoreInner>) -> Result<CleaningResult> {
    let mut done = CleaningResult::default();
    // Each round frees at least one segment, so the number of files bounds the rounds.
    let rounds = lock(&inner.space).files();
    for _ in 0..=rounds {
        seal_wasted(inner);
        inner.commit(CommitRequest::default())?;
        let round = clean(inner, 1.0 - 1e-9, 1)?;
        done.segments += round.segments;
        done.frames += round.frames;
        done.bytes += round.bytes;
        if round.segments == 0 {
            break;
        }
    }
    let _urgent = inner.background.urgent();
    give_back(inner)?;
    Ok(done)
}

/// Brings the files down to the capacity: removes free ones, then cleans, then evicts.
///
/// # Errors
/// [`ErrorKind::NoSpace`]: the live data exceeds the capacity. The capacity stays in force: no file grows.
pub(crate) fn shrink(inner: &Arc<StoreInner>) -> Result<()> {
    let mut events = Vec::new();
    let outcome = shrink_to_capacity(inner, &mut events);
    notify_observers(inner, events);
    outcome
}

fn shrink_to_capacity(inner: &Arc<StoreInner>, events: &mut Vec<Evicted>) -> Result<()> {
    // The background must not evict meanwhile: its candidates would be missing here before their space is free.
    let _one = lock(&inner.locks.evicting);
    lock(&inner.space).retry();
    let mut least = u64::MAX;
    let mut rounds_left = SHRINK_ROUNDS;
    let mut stuck = false;
    loop {
        if lock(&inner.space).seal_unused() {
            inner.commit(CommitRequest::default())?;
        }
        seal_wasted(inner);
        inner.commit(CommitRequest::default())?;
        remove_free(inner)?;
        let (over, segment) = {
            let space = lock(&inner.space);
            let capacity = space.capacity().unwrap_or(u64::MAX);
            (space.file_bytes(&inner.devices).saturating_sub(capacity), space.segment_bytes())
        };
        if over == 0 {
            return Ok(());
        }
        rounds_left = if over < least { SHRINK_ROUNDS } else { rounds_left.saturating_sub(1) };
        least = least.min(over);
        let cleaned = if rounds_left > 0 { clean(inner, LIVE_SHARE_URGENT, 1)? } else { CleaningResult::default() };
        if cleaned.segments > 0 || evict_silently(inner, over.min(segment), events)? > 0 {
            stuck = false;
        } else if !stuck {
            // The background may have just cleaned the same segments, so one more round follows before giving up.
            stuck = true;
        } else {
            let text = format!(
                "shrink: the files exceed the capacity by {over} bytes of live data; \
                 delete sequences or raise the capacity"
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
    }
}

/// Removes files of free segments beyond those that will be reused soon, at the configured rate.
///
/// # Errors
/// A commit failed, or a file cannot be removed.
fn give_back(inner: &StoreInner) -> Result<()> {
    let (start, segment) = (Instant::now(), lock(&inner.space).segment_bytes());
    let mut bytes = 0;
    loop {
        let mut leaving = lock(&inner.locks.removals);
        let doomed = lock(&inner.space).take_surplus(&inner.devices, GIVEN_AT_ONCE);
        if doomed.is_empty() && leaving.is_empty() {
            return Ok(());
        }
        bytes += doomed.len() as u64 * segment;
        if !doomed.is_empty() {
            coverage!(SegmentGivenBack);
        }
        remove(inner, &mut leaving, doomed)?;
        drop(leaving);
        // A file system frees the blocks of large files no faster than it writes them.
        inner.background.limit_rate(start, bytes);
        if inner.background.is_stopping() {
            return Ok(());
        }
    }
}

/// Removes files of free segments beyond the reserve until the files fit the capacity.
fn remove_free(inner: &StoreInner) -> Result<()> {
    let mut leaving = lock(&inner.locks.removals);
    let doomed = lock(&inner.space).take_removable(&inner.devices);
    if doomed.is_empty() && leaving.is_empty() { Ok(()) } else { remove(inner, &mut leaving, doomed) }
}

/// Removes the files of segments that the allocator gave up.
///
/// 1. Commit the removal of `doomed`. This is durable before any file is removed.
/// 2. Return the segments that the catalog still names to the allocator.
/// 3. Remove the other files.
///
/// `leaving` holds the segments whose files still exist. A segment stays in it for a
/// later call if its commit fails or its file cannot be removed now.
fn remove(inner: &StoreInner, leaving: &mut Vec<(SegmentKey, u64)>, doomed: Vec<(SegmentKey, u64)>) -> Result<()> {
    leaving.extend_from_slice(&doomed);
    // This commit also records everything that was queued before it.
    inner.commit(CommitRequest { removed: doomed, ..CommitRequest::default() })?;
    // A segment is still in the catalog if no commit has recorded its removal.
    let (doomed, stays): (Vec<_>, Vec<_>) = {
        let catalog = lock(&inner.catalog);
        leaving.drain(..).partition(|(key, _)| !catalog.segments.contains_key(key))
    };
    stays.into_iter().for_each(|(key, ended)| lock(&inner.space).stays(key, ended));
    // An idle ring keeps its files open, and an open file keeps its blocks. The rings of shards release them on
    // wake-up, below.
    inner.devices.lanes.close_idle();
    let mut failed = None;
    for (key, ended) in doomed {
        let (device, id) = key;
        // A lost device has no files left to remove.
        let there = inner.devices.list.get(usize::from(device.0)).filter(|device| !device.is_lost());
        match there.map_or(Ok(()), |own| own.directory.remove_file(&segment::file_name(id))) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                leaving.push((key, ended));
                failed.get_or_insert(e);
            }
            _ => lock(&inner.space).left(device),
        }
    }
    inner.devices.list.iter().for_each(|device| device.shard.nudge());
    failed.map_or(Ok(()), Err)
}

/// Runs the maintenance thread: does what is due at each wake-up, expiry and repair time. Returns when the store
/// closes.
pub(crate) fn run(store: &Weak<StoreInner>, wake: &crate::metrics::EventCount) {
    let mut repair_from = Instant::now();
    loop {
        let seen = wake.epoch();
        let until = {
            let Some(inner) = store.upgrade() else { return };
            if inner.background.is_stopping() {
                return;
            }
            // A handle that closes a sequence from here on wakes the thread again.
            inner.background.set_next_expiry_check(None);
            // The committer keeps the error and returns it from the next call.
            let _ = run_due(&inner, true);
            let due = || inner.devices.list.slots() > 1 && inner.devices.suspects.any();
            if due() && Instant::now() >= repair_from {
                let all_done = matches!(super::Repair::new(&inner).once(), Ok(done) if done.left == 0);
                // Work that is still due without a new event cannot be done yet, so it is retried later.
                if !all_done || (due() && wake.epoch() == seen) {
                    repair_from = Instant::now() + REPAIRED_AGAIN;
                }
            }
            let again = due().then(|| repair_from.saturating_duration_since(Instant::now()));
            let expiry = next_expiry_ms(&inner).map(|end| {
                inner.background.set_next_expiry_check(Some(end));
                let wait = Duration::from_millis(end.saturating_sub(inner.devices.environment.unix_ms()).max(1000));
                wait.min(Duration::from_secs(3600))
            });
            again.into_iter().chain(expiry).min().map(|wait| Instant::now() + wait)
        };
        wake.wait_past(seen, until);
    }
}
