//! Repair: replaces damaged and missing copies of frames, and empties devices that leave the store.
//!
//! One round:
//!
//! 1. Verify every suspect copy, that is every copy of which a read failed.
//! 2. Release derived frames on devices that are not active. They are never copied.
//! 3. List the frames that are due: a copy is damaged, missing, or on a device that is not active.
//! 4. For each of them, write new copies from the good ones ([`super::frame_copy`]).
//! 5. Commit the new places in batches.
//! 6. Remove drained and lost devices that hold nothing any more from the membership.
//!
//! Invariants:
//! - A copy is dropped only if a verified copy remains.
//! - A commit changes a frame only if its places are those that the repair saw, so a crash leaves the old or the new
//!   copies.
//! - One repair runs at a time: [`Repair`] holds `repairing`. The catalog lock is taken before the allocator's.
//!
//! Callers: the maintenance thread ([`Repair::once`]) and the store's repair functions ([`Repair::all`]).

use super::frame_copy::{CopySource, UnnamedCopy, copy, verify};
use crate::catalog::{COPIES_MAX, FrameMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::planted;
use crate::log::{CommitRequest, CopyChange, CopyPlace, DerivedRelease, StoreInner, places};
use crate::metrics::lock;
use crate::sync::Guard;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST, MEMBER_REMOVED, Member};
use stratakv_format::{DeviceIndex, FrameId, Location, SequenceId};

/// The maximum number of frames that one commit changes.
const FRAMES_PER_COMMIT: usize = 32;

/// The result of a repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// Copies that were verified because a read of them failed.
    pub checked: u64,
    /// Damaged copies that were replaced.
    pub healed: u64,
    /// Missing copies that were written.
    pub copied: u64,
    /// Frames that still lack good copies, or that still have one on a leaving device, because no repair was possible
    /// now.
    pub left: u64,
    /// Devices that lost their last frame and left the membership.
    pub removed: u64,
}

impl RepairReport {
    /// Adds the report of the next round. `left` is that of the last round.
    pub(crate) fn add(&mut self, next: &Self) {
        self.checked += next.checked;
        self.healed += next.healed;
        self.copied += next.copied;
        self.removed += next.removed;
        self.left = next.left;
    }
}

/// The devices that may hold copies.
struct CopyTargets {
    /// Devices that keep the copies they have.
    keep: BTreeSet<DeviceIndex>,
    /// Devices that take new copies.
    take: Vec<DeviceIndex>,
}

/// A frame that is due, with the number of copies that it should have.
struct DueFrame<'a> {
    id: FrameId,
    wanted: usize,
    /// The devices whose copy is damaged.
    bad: &'a BTreeSet<DeviceIndex>,
}

impl CopyTargets {
    fn of(inner: &StoreInner) -> Self {
        let active = || inner.devices.list.iter().filter(|device| device.member().state == MEMBER_ACTIVE);
        let keep = active().map(|device| device.index).collect();
        Self { keep, take: active().filter(|device| device.takes_frames()).map(|device| device.index).collect() }
    }
}

/// The right to repair. Only one exists at a time.
pub(crate) struct Repair<'a> {
    inner: &'a StoreInner,
    _one: Guard<'a, ()>,
}

impl<'a> Repair<'a> {
    /// Waits until no other thread repairs.
    pub(crate) fn new(inner: &'a StoreInner) -> Self {
        Self { inner, _one: lock(&inner.locks.repairing) }
    }

    /// Repairs everything that can be repaired now, copies that were given up before included.
    ///
    /// # Errors
    /// A commit failed.
    pub(crate) fn all(&self) -> Result<RepairReport> {
        let again = self.inner.devices.suspects.take_deferred();
        again.into_iter().for_each(|(frame, device)| self.inner.devices.suspects.add_at(frame, device));
        let mut all = repair(self.inner)?;
        // A device may have lost its last frame in this round and can leave in the next.
        while all.left == 0 {
            let next = repair(self.inner)?;
            all.add(&next);
            if next.healed + next.copied + next.removed == 0 {
                break;
            }
        }
        Ok(all)
    }

    /// Does one round.
    ///
    /// # Errors
    /// A commit failed.
    pub(super) fn once(&self) -> Result<RepairReport> {
        repair(self.inner)
    }
}

fn repair(inner: &StoreInner) -> Result<RepairReport> {
    inner.committer.check()?;
    let mut done = RepairReport::default();
    inner.devices.suspects.clear_owed();
    let suspects = inner.devices.suspects.take();
    {
        let catalog = lock(&inner.catalog);
        inner.devices.suspects.retain_deferred(|frame| catalog.frames.contains_key(&frame));
    }
    let mut bad: BTreeMap<FrameId, BTreeSet<DeviceIndex>> = BTreeMap::new();
    for (frame, device) in suspects {
        done.checked += 1;
        if is_bad(inner, frame, device) {
            bad.entry(frame).or_default().insert(device);
        }
    }
    let members = CopyTargets::of(inner);
    release_derived(inner, &members)?;
    let unrepairable = inner.devices.suspects.unrepairable();
    for (frame, devices) in bad.iter().filter(|(frame, _)| unrepairable.contains(frame)) {
        inner.devices.suspects.defer(devices.iter().map(|device| (*frame, *device)));
    }
    let mut due = due(inner, &members, &bad);
    due.retain(|(frame, _)| !unrepairable.contains(frame));
    for batch in due.chunks(FRAMES_PER_COMMIT) {
        let mut request = CommitRequest::default();
        for (id, wanted) in batch {
            let none = BTreeSet::new();
            let damaged = bad.get(id).unwrap_or(&none);
            let frame = DueFrame { id: *id, wanted: *wanted, bad: damaged };
            let whole = match repair_frame(inner, &members, &frame, &mut request, &mut done) {
                Ok(whole) => whole,
                Err(e) if matches!(e.kind(), ErrorKind::Poisoned | ErrorKind::Closed) => return Err(e),
                Err(_) => false,
            };
            if !whole {
                done.left += 1;
                inner.devices.suspects.defer(damaged.iter().map(|device| (*id, *device)));
            }
        }
        if request.copies.is_empty() {
            continue;
        }
        if planted!(CopyNotHealed) && !bad.is_empty() {
            continue;
        }
        inner.commit(request)?;
    }
    for _ in 0..done.healed {
        coverage!(CopyHealed);
    }
    let waiting;
    (done.removed, waiting) = remove_empty(inner)?;
    if done.left > 0 || waiting {
        inner.devices.suspects.owe_without_wake();
    }
    Ok(done)
}

/// Releases the derived frames on devices that keep no copies, with one commit.
fn release_derived(inner: &StoreInner, members: &CopyTargets) -> Result<()> {
    let derived = {
        let catalog = lock(&inner.catalog);
        let leaves = |frame: &FrameId| {
            catalog.frames.get(frame).is_some_and(|frame| !members.keep.contains(&frame.location.device))
        };
        let of = |sequence: &SequenceId| {
            let sequence = *sequence;
            let leaving = catalog.derived_of(sequence).filter(|(frame, _)| leaves(frame));
            leaving.map(move |(frame, _)| DerivedRelease::Reference(sequence, frame)).collect::<Vec<_>>()
        };
        catalog.sequences.keys().flat_map(of).collect::<Vec<_>>()
    };
    if derived.is_empty() {
        return Ok(());
    }
    coverage!(ClustersLost);
    if planted!(LostClustersKept) {
        return Ok(());
    }
    inner.commit(CommitRequest { derived, ..CommitRequest::default() })
}

/// Returns whether a copy is damaged or cannot be read.
fn is_bad(inner: &StoreInner, id: FrameId, device: DeviceIndex) -> bool {
    let Some(meta) = lock(&inner.catalog).frames.get(&id).cloned() else { return false };
    let Some(place) = places(&meta).into_iter().find(|(location, _)| location.device == device) else { return false };
    match source(inner, &meta, place) {
        Ok(source) => verify(&inner.devices, id, &source).is_err_and(|e| {
            // A check that found no memory says nothing about the copy.
            matches!(e.kind(), ErrorKind::Corruption | ErrorKind::Io)
        }),
        Err(_) => true,
    }
}

/// Returns a frame as if this copy were its first, with the segment that holds it.
fn source(inner: &StoreInner, meta: &FrameMeta, (location, header_crc): CopyPlace) -> Result<CopySource> {
    inner.devices.get(location.device)?;
    let catalog = lock(&inner.catalog);
    let key = (location.device, location.segment);
    let segment = catalog.segments.get(&key).ok_or_else(|| {
        let text = format!("repair: the catalog has no segment {} of device {}", location.segment, location.device);
        Error::new(ErrorKind::NotFound, text)
    })?;
    let segment = lock(&inner.space).handle(&inner.devices, key, segment)?;
    Ok(CopySource::new(meta, location, header_crc, segment))
}

/// Returns the frames with damaged, missing or misplaced copies, each with the number of copies that it should have.
fn due(
    inner: &StoreInner,
    members: &CopyTargets,
    bad: &BTreeMap<FrameId, BTreeSet<DeviceIndex>>,
) -> Vec<(FrameId, usize)> {
    let catalog = lock(&inner.catalog);
    let mut wanted: BTreeMap<FrameId, usize> = BTreeMap::new();
    let mut want = |frame: FrameId, copies: usize| {
        let own = wanted.entry(frame).or_default();
        *own = (*own).max(copies);
    };
    for sequence in catalog.sequences.values() {
        let copies = usize::from(sequence.copies).clamp(1, COPIES_MAX).min(members.take.len().max(1));
        sequence.refs.iter().for_each(|(frame, _)| want(*frame, copies));
    }
    let is_due = |(id, wanted): &(FrameId, usize)| {
        let Some(frame) = catalog.frames.get(id) else { return false };
        if frame.derived {
            return false;
        }
        let kept = frame.locations().filter(|at| members.keep.contains(&at.device)).count();
        kept < *wanted || kept < frame.copies() || bad.contains_key(id)
    };
    wanted.into_iter().filter(is_due).collect()
}

/// Writes the copies that a frame lacks and adds the change to `request`. Returns whether the frame then has all it
/// needs.
fn repair_frame(
    inner: &StoreInner,
    members: &CopyTargets,
    &DueFrame { id, wanted, bad }: &DueFrame<'_>,
    request: &mut CommitRequest,
    done: &mut RepairReport,
) -> Result<bool> {
    let Some(meta) = lock(&inner.catalog).frames.get(&id).cloned() else { return Ok(true) };
    let seen = places(&meta);
    let mut bad = bad.clone();
    let goes = |at: &Location| bad.contains(&at.device) || !members.keep.contains(&at.device);
    if seen.len() > 1 && seen.iter().any(|(at, _)| goes(at)) {
        // Verify the copies that stay before any copy is dropped. If all are damaged, each may hold blocks the others
        // lack.
        let staying: Vec<_> = seen.iter().filter(|(at, _)| !goes(at)).map(|(at, _)| at.device).collect();
        bad.extend(staying.into_iter().filter(|device| is_bad(inner, id, *device)));
    }
    let (good, damaged): (Vec<CopyPlace>, Vec<CopyPlace>) = seen.iter().partition(|(at, _)| !bad.contains(&at.device));
    let mut now: Vec<CopyPlace> = good.iter().copied().filter(|(at, _)| members.keep.contains(&at.device)).collect();
    let wanted = wanted.max(now.len());
    // Devices with a damaged copy first, so that the frame stays where placement put it. Then the other devices.
    let here =
        bad.iter().filter(|device| members.take.contains(device) && seen.iter().any(|(at, _)| at.device == **device));
    let start = id.0 as usize % members.take.len().max(1);
    let others = members.take[start..].iter().chain(&members.take[..start]);
    let targets: Vec<DeviceIndex> = here.chain(others).copied().collect();
    // Damaged copies are sources too, because a block that is bad in one may be good in another.
    let sources: Vec<CopyPlace> = good.iter().chain(&damaged).copied().collect();
    for device in targets {
        if now.len() >= wanted {
            break;
        }
        if now.iter().any(|(at, _)| at.device == device) {
            continue;
        }
        let UnnamedCopy { location, header_crc, flight } = match duplicate(inner, id, &meta, &sources, device) {
            Ok(Some(copied)) => copied,
            Err(e) if e.kind() == ErrorKind::Closed => return Err(e),
            // This device has no space; another one may have.
            Ok(None) => continue,
            Err(e) => {
                if e.kind() == ErrorKind::Corruption {
                    inner.devices.suspects.mark_unrepairable(id);
                }
                continue;
            }
        };
        request.segments.push(Arc::clone(flight.segment()));
        request.flights.push(flight);
        now.push((location, header_crc));
        *(if bad.is_empty() { &mut done.copied } else { &mut done.healed }) += 1;
    }
    // If no good copy remains, the old ones stay: a damaged copy is better than none.
    if now.is_empty() {
        return Ok(false);
    }
    // Copies that could not be replaced are kept until the frame has enough others.
    if now.len() < wanted {
        for place in &seen {
            if now.len() < wanted
                && !now.iter().any(|(at, _)| at.device == place.0.device)
                && !bad.contains(&place.0.device)
            {
                now.push(*place);
            }
        }
    }
    let whole = now.len() >= wanted && now.iter().all(|(at, _)| members.keep.contains(&at.device));
    if now.iter().any(|place| !seen.contains(place)) || now.len() < seen.len() || now[0] != seen[0] {
        // The first copy stays first if it is kept.
        if let Some(at) = now.iter().position(|place| *place == seen[0]) {
            now.swap(0, at);
        }
        request.copies.push(CopyChange { frame: id, seen, wanted: now });
    }
    Ok(whole)
}

/// Copies a frame to a device from the copies at `places`. Returns `None` if the device has no space.
fn duplicate(
    inner: &StoreInner,
    id: FrameId,
    meta: &FrameMeta,
    places: &[CopyPlace],
    device: DeviceIndex,
) -> Result<Option<UnnamedCopy>> {
    let (mut sources, mut failed) = (Vec::new(), None);
    for place in places {
        match source(inner, meta, *place) {
            Ok(source) => sources.push(source),
            Err(e) => failed = Some(e),
        }
    }
    match (copy(&inner.devices, &inner.space, id, &sources, device), failed) {
        (Ok(copied), _) => Ok(Some(copied)),
        (Err(e), _) if e.kind() == ErrorKind::NoSpace => Ok(None),
        (Err(_), Some(e)) if sources.is_empty() => Err(e),
        (Err(e), _) => Err(e),
    }
}

/// Removes drained and lost devices that hold no frame from the membership.
///
/// Returns how many were removed, and whether others still hold pages that no commit has named or released yet.
fn remove_empty(inner: &StoreInner) -> Result<(u64, bool)> {
    // Queued commits may name frames on these devices that the catalog does not have yet.
    inner.flush_others()?;
    let (free, held): (Vec<Member>, Vec<Member>) = {
        let catalog = lock(&inner.catalog);
        let space = lock(&inner.space);
        let stays =
            |member: &Member| member.state == MEMBER_ACTIVE && inner.devices.is_sound(DeviceIndex(member.device.get()));
        if !catalog.members.values().any(stays) {
            return Ok((0, false));
        }
        let leaving = |member: &&Member| matches!(member.state, MEMBER_DRAINING | MEMBER_LOST);
        let empty = |member: &&Member| {
            let device = DeviceIndex(member.device.get());
            catalog.frames.values().all(|frame| frame.locations().all(|at| at.device != device))
        };
        let emptied = catalog.members.values().filter(leaving).filter(empty).copied();
        let quiet = inner.committer.is_idle();
        let unused = |member: &Member| space.is_unused(DeviceIndex(member.device.get()), member.state == MEMBER_LOST);
        emptied.partition(|member| quiet && unused(member))
    };
    for member in &free {
        inner.change_member(Member { state: MEMBER_REMOVED, ..*member })?;
    }
    Ok((free.len() as u64, !held.is_empty()))
}
