//! Copies of frames that could not be read, until a repair has looked at them.
//!
//! A copy is a suspect once a read of it failed. A repair writes it again from another copy, or gives it up.

use crate::catalog::FrameBody;
use crate::metrics::{EventCount, lock};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use stratakv_format::{DeviceIndex, FrameId};

/// SuspectCopies that are remembered, at most. More of them mean that a device is at fault, not a place on it.
const SUSPECTS_MAX: usize = 65_536;

/// Copies that could not be read, and copies that are missing.
pub(crate) struct SuspectCopies {
    list: Mutex<BTreeSet<(FrameId, DeviceIndex)>>,
    /// Copies that a repair found damaged and could not mend. The next requested repair tries again.
    deferred: Mutex<BTreeSet<(FrameId, DeviceIndex)>>,
    /// Frames without a good copy of some part, so that no copy can be made. The next requested repair tries again.
    unrepairable: Mutex<BTreeSet<FrameId>>,
    /// True if frames may lack copies, or may be on devices that are to leave.
    owed: AtomicBool,
    /// Notified of every new suspect.
    changed: Arc<EventCount>,
}

impl SuspectCopies {
    /// Returns an empty list. A store that was just opened may lack copies.
    pub(crate) fn new(changed: Arc<EventCount>) -> Self {
        let (list, deferred, unrepairable) = Default::default();
        Self { list, deferred, unrepairable, owed: AtomicBool::new(true), changed }
    }

    /// Notes that copies may be missing, and wakes the repair.
    pub(crate) fn owe(&self) {
        self.owed.store(true, Ordering::Relaxed);
        self.changed.notify();
    }

    /// Notes that copies may be missing, for the next repair.
    pub(crate) fn owe_without_wake(&self) {
        self.owed.store(true, Ordering::Relaxed);
    }

    /// Notes that no copy is missing.
    pub(crate) fn clear_owed(&self) {
        self.owed.store(false, Ordering::Relaxed);
    }

    /// Returns whether a repair has anything to do.
    pub(crate) fn any(&self) -> bool {
        self.owed.load(Ordering::Relaxed) || !lock(&self.list).is_empty()
    }

    /// Adds a copy of a frame, by its number.
    pub(crate) fn add(&self, frame: &FrameBody, copy: usize) {
        self.add_at(frame.id, frame.copy(copy).0.key.0);
    }

    /// Adds the copy of a frame on a device.
    pub(crate) fn add_at(&self, frame: FrameId, device: DeviceIndex) {
        let mut list = lock(&self.list);
        if list.len() < SUSPECTS_MAX && list.insert((frame, device)) {
            drop(list);
            self.changed.notify();
        }
    }

    /// Takes all suspects, for a repair.
    pub(crate) fn take(&self) -> BTreeSet<(FrameId, DeviceIndex)> {
        std::mem::take(&mut *lock(&self.list))
    }

    /// Defers copies that a repair could not mend.
    pub(crate) fn defer(&self, copies: impl IntoIterator<Item = (FrameId, DeviceIndex)>) {
        let mut deferred = lock(&self.deferred);
        let room = SUSPECTS_MAX.saturating_sub(deferred.len());
        deferred.extend(copies.into_iter().take(room));
    }

    /// Notes that no copy of this frame can be made.
    pub(crate) fn mark_unrepairable(&self, frame: FrameId) {
        let mut unrepairable = lock(&self.unrepairable);
        if unrepairable.len() < SUSPECTS_MAX {
            unrepairable.insert(frame);
        }
    }

    pub(crate) fn unrepairable(&self) -> BTreeSet<FrameId> {
        lock(&self.unrepairable).clone()
    }

    /// Takes everything that was deferred, for a requested repair.
    pub(crate) fn take_deferred(&self) -> BTreeSet<(FrameId, DeviceIndex)> {
        lock(&self.unrepairable).clear();
        std::mem::take(&mut *lock(&self.deferred))
    }

    /// Forgets what was deferred of frames that no longer exist.
    pub(crate) fn retain_deferred(&self, exists: impl Fn(FrameId) -> bool) {
        lock(&self.deferred).retain(|(frame, _)| exists(*frame));
        lock(&self.unrepairable).retain(|frame| exists(*frame));
    }

    /// Returns how many copies are suspects or deferred.
    pub(crate) fn len(&self) -> usize {
        let list = lock(&self.list);
        list.len() + lock(&self.deferred).difference(&list).count()
    }
}
