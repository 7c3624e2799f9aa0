//! What keeps a store going: sequences expire, evictable ones go when it is too full, dead space is cleaned before it is
//! needed. In the background on real devices; where space ran out, by whoever needs it; in a simulation only then.

use super::clean::{Cleaned, clean, clean_at};
use super::evict::{evict, evict_silently, expire, next_expiry_ms, tell};
use crate::catalog::SegmentKey;
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::log::{CommitRequest, StoreInner, Watermarks, open_ahead, unix_ms};
use crate::metrics::{Evicted, lock};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use stratakv_format::segment;

/// Segments with more living in them are left alone in the background.
const LIVE_SHARE_BACKGROUND: f64 = 0.75;
/// The same when an append waits for room.
const LIVE_SHARE_URGENT: f64 = 0.97;
/// Rounds of cleaning without a smaller file after which what lives does not fit.
const SHRINK_ROUNDS: u32 = 3;
/// Files that are given back with one commit, at most.
const GIVEN_AT_ONCE: usize = 16;
/// Free segments below which cleaning starts in the background, at least.
const FREE_FEW: u64 = 2;
/// A repair that could not help somebody is tried again after so long, whatever else wakes the background.
const REPAIRED_AGAIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Makes room for an append that found none. Whether there is more than before.
///
/// # Errors
/// A commit failed.
pub(crate) fn make_room(inner: &Arc<StoreInner>) -> Result<bool> {
    let before = available(inner);
    lock(&inner.space).retry();
    seal_wasted(inner);
    // What was deleted since, or held by views until now, gives its segments back with a commit.
    inner.commit(CommitRequest::default())?;
    if available(inner) > before {
        return Ok(true);
    }
    let mut cleaned = Cleaned::default();
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
    let segment = lock(&inner.space).segment_bytes();
    let evicted = evict(inner, segment)?;
    if evicted == 0 {
        return Ok(cleaned.segments > 0 && available(inner) >= before);
    }
    seal_wasted(inner);
    inner.commit(CommitRequest::default())?;
    if available(inner) <= before {
        clean(inner, LIVE_SHARE_URGENT, 2)?;
    }
    Ok(true)
}

/// Bytes that appends may take: as [`crate::store::Usage::free_bytes`], but whole segments only.
fn available(inner: &StoreInner) -> u64 {
    let space = lock(&inner.space);
    space.free_segments(&inner.devices)
}

/// Open segments of which most is dead take no more, so that they can be cleaned.
fn seal_wasted(inner: &StoreInner) {
    let catalog = lock(&inner.catalog);
    lock(&inner.space).seal_wasted(&catalog);
}

/// Everything that is due now, in the `background` at its pace. Gives what was cleaned.
///
/// # Errors
/// A commit failed.
pub(crate) fn tend(inner: &Arc<StoreInner>, background: bool) -> Result<Cleaned> {
    inner.committer.check()?;
    lock(&inner.space).retry();
    // First: somebody may be about to need it.
    open_ahead(&inner.devices, &inner.space);
    expire(inner)?;
    above_the_mark(inner)?;
    let done = clean_ahead(inner, background)?;
    let given = give_back(inner);
    inner.committer.complete_manifest()?;
    given?;
    Ok(done)
}

/// Cleans until there are some free segments.
fn clean_ahead(inner: &Arc<StoreInner>, background: bool) -> Result<Cleaned> {
    let mut done = Cleaned::default();
    loop {
        let (free, all) = {
            let space = lock(&inner.space);
            (space.free_segments(&inner.devices), space.all_segments(&inner.devices))
        };
        if free > FREE_FEW.max(all / 32) {
            return Ok(done);
        }
        seal_wasted(inner);
        let round = if background {
            clean_at(inner, LIVE_SHARE_BACKGROUND, 1)?
        } else {
            clean(inner, LIVE_SHARE_BACKGROUND, 1)?
        };
        done.segments += round.segments;
        done.frames += round.frames;
        done.bytes += round.bytes;
        if round.segments == 0 {
            return Ok(done);
        }
    }
}

/// Evicts down to the low watermark when what lives is above the high one.
fn above_the_mark(inner: &Arc<StoreInner>) -> Result<()> {
    let mut events = Vec::new();
    let outcome = down_to_the_mark(inner, &mut events);
    // Whoever is told may use the store.
    tell(inner, events);
    outcome
}

fn down_to_the_mark(inner: &Arc<StoreInner>, events: &mut Vec<Evicted>) -> Result<()> {
    // Two would both make all of the room.
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

/// Cleans everything that has anything dead in it.
///
/// # Errors
/// A commit failed.
pub(crate) fn clean_all(inner: &Arc<StoreInner>) -> Result<Cleaned> {
    let mut done = Cleaned::default();
    // Each round makes at least one segment of what lived in several; nothing lives in more than there are.
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

/// Brings the files down to the capacity, by removing free ones, cleaning, and evicting.
///
/// # Errors
/// [`ErrorKind::NoSpace`]: what lives takes more. The capacity holds all the same: nothing grows.
pub(crate) fn shrink(inner: &Arc<StoreInner>) -> Result<()> {
    let mut events = Vec::new();
    let outcome = down_to_the_capacity(inner, &mut events);
    tell(inner, events);
    outcome
}

fn down_to_the_capacity(inner: &Arc<StoreInner>, events: &mut Vec<Evicted>) -> Result<()> {
    // What the background evicts meanwhile would be missing here, and not yet be room.
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
        let cleaned = if rounds_left > 0 { clean(inner, LIVE_SHARE_URGENT, 1)? } else { Cleaned::default() };
        if cleaned.segments > 0 || evict_silently(inner, over.min(segment), events)? > 0 {
            stuck = false;
        } else if !stuck {
            // The background may have cleaned what was cleaned here before: looked at once more.
            stuck = true;
        } else {
            let text = format!("the files take {over} bytes more than the capacity, and what lives in them stays");
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
    }
}

/// Gives files back of which there are many more than will be used again soon, at the pace of the background.
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

/// Removes files of free segments beyond the reserve as long as there are more bytes than the capacity allows.
fn remove_free(inner: &StoreInner) -> Result<()> {
    let mut leaving = lock(&inner.locks.removals);
    let doomed = lock(&inner.space).take_removable(&inner.devices);
    if doomed.is_empty() && leaving.is_empty() { Ok(()) } else { remove(inner, &mut leaving, doomed) }
}

/// Removes the files of segments that were taken out: first the word, durably, then the file. `leaving` are those that are taken
/// out and still there: where the commit has to wait, or a file cannot be removed now, it goes with a later removal.
fn remove(inner: &StoreInner, leaving: &mut Vec<(SegmentKey, u64)>, doomed: Vec<(SegmentKey, u64)>) -> Result<()> {
    leaving.extend_from_slice(&doomed);
    // With it all that was queued is recorded.
    inner.commit(CommitRequest { removed: doomed, ..CommitRequest::default() })?;
    // What no commit had named yet stays.
    let (doomed, stays): (Vec<_>, Vec<_>) = {
        let catalog = lock(&inner.catalog);
        leaving.drain(..).partition(|(key, _)| !catalog.segments.contains_key(key))
    };
    stays.into_iter().for_each(|(key, ended)| lock(&inner.space).stays(key, ended));
    // Idle rings hold files that they have read, and so their blocks; those of shards let go when they wake, below.
    inner.devices.lanes.close_idle();
    let mut failed = None;
    for (key, ended) in doomed {
        let (device, id) = key;
        // One that is gone has taken them along.
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

/// The background: tends the store when it is woken, and when a sequence expires. Ends with the store.
pub(crate) fn run(store: &Weak<StoreInner>, wake: &crate::metrics::EventCount) {
    let mut repair_from = Instant::now();
    loop {
        let seen = wake.epoch();
        let until = {
            let Some(inner) = store.upgrade() else { return };
            if inner.background.is_stopping() {
                return;
            }
            // Whoever lets go of a sequence meanwhile wakes this anew.
            inner.background.set_next_expiry_check(None);
            // An error stands in the committer and comes back with the next call.
            let _ = tend(&inner, true);
            let due = || inner.devices.list.slots() > 1 && inner.devices.suspects.any();
            if due() && Instant::now() >= repair_from {
                let all_done = matches!(super::Repair::new(&inner).once(), Ok(done) if done.left == 0);
                // What is due all the same, and not for something new, waits for somebody.
                if !all_done || (due() && wake.epoch() == seen) {
                    repair_from = Instant::now() + REPAIRED_AGAIN;
                }
            }
            let again = due().then(|| repair_from.saturating_duration_since(Instant::now()));
            let expiry = next_expiry_ms(&inner).map(|end| {
                inner.background.set_next_expiry_check(Some(end));
                let wait = Duration::from_millis(end.saturating_sub(unix_ms()).max(1000));
                wait.min(Duration::from_secs(3600))
            });
            again.into_iter().chain(expiry).min().map(|wait| Instant::now() + wait)
        };
        wake.wait_past(seen, until);
    }
}
