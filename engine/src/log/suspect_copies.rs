//! What reads tell about copies: which of them failed, and how long reads take.

use crate::catalog::FrameBody;
use crate::metrics::{EventCount, lock};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stratakv_format::{DeviceIndex, FrameId};

/// Suspects that are remembered at most: more say that a device is at fault, not a place on it.
const SUSPECTS_MAX: usize = 65_536;

/// Copies that failed to give what they hold, until somebody has looked at them.
pub(crate) struct Suspects {
    list: Mutex<BTreeSet<(FrameId, DeviceIndex)>>,
    /// Those that a repair found damaged and could not help. They are looked at again when somebody asks for a repair.
    given_up: Mutex<BTreeSet<(FrameId, DeviceIndex)>>,
    /// Frames of which no copy can be made any more: a part of them is good nowhere. They are looked at again with those.
    unrepairable: Mutex<BTreeSet<FrameId>>,
    /// Frames may have fewer copies than they should have, or lie on devices that are to go.
    owed: AtomicBool,
    /// Told of every new one.
    changed: Arc<EventCount>,
}

impl Suspects {
    /// A store that was just opened may owe copies.
    pub(crate) fn new(changed: Arc<EventCount>) -> Self {
        let (list, given_up, unrepairable) = Default::default();
        Self { list, given_up, unrepairable, owed: AtomicBool::new(true), changed }
    }

    pub(crate) fn owe(&self) {
        self.owed.store(true, Ordering::Relaxed);
        self.changed.notify();
    }

    /// The same without waking anybody: it could not be helped just now.
    pub(crate) fn owe_without_wake(&self) {
        self.owed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn paid(&self) {
        self.owed.store(false, Ordering::Relaxed);
    }

    /// Whether there is anything to repair.
    pub(crate) fn any(&self) -> bool {
        self.owed.load(Ordering::Relaxed) || !lock(&self.list).is_empty()
    }

    pub(crate) fn add(&self, frame: &FrameBody, copy: usize) {
        self.add_at(frame.id, frame.copy(copy).0.key.0);
    }

    pub(crate) fn add_at(&self, frame: FrameId, device: DeviceIndex) {
        let mut list = lock(&self.list);
        if list.len() < SUSPECTS_MAX && list.insert((frame, device)) {
            drop(list);
            self.changed.notify();
        }
    }

    pub(crate) fn take(&self) -> BTreeSet<(FrameId, DeviceIndex)> {
        std::mem::take(&mut *lock(&self.list))
    }

    /// A repair could not help these.
    pub(crate) fn give_up(&self, copies: impl IntoIterator<Item = (FrameId, DeviceIndex)>) {
        let mut given_up = lock(&self.given_up);
        let room = SUSPECTS_MAX.saturating_sub(given_up.len());
        given_up.extend(copies.into_iter().take(room));
    }

    /// No copy of this frame can be made.
    pub(crate) fn mark_unrepairable(&self, frame: FrameId) {
        let mut unrepairable = lock(&self.unrepairable);
        if unrepairable.len() < SUSPECTS_MAX {
            unrepairable.insert(frame);
        }
    }

    pub(crate) fn unrepairable(&self) -> BTreeSet<FrameId> {
        lock(&self.unrepairable).clone()
    }

    /// Everything that was given up, to be looked at again.
    pub(crate) fn take_given_up(&self) -> BTreeSet<(FrameId, DeviceIndex)> {
        lock(&self.unrepairable).clear();
        std::mem::take(&mut *lock(&self.given_up))
    }

    /// Forgets what was given up of frames that are no more.
    pub(crate) fn retain_given_up(&self, exists: impl Fn(FrameId) -> bool) {
        lock(&self.given_up).retain(|(frame, _)| exists(*frame));
        lock(&self.unrepairable).retain(|frame| exists(*frame));
    }

    pub(crate) fn len(&self) -> usize {
        let list = lock(&self.list);
        list.len() + lock(&self.given_up).difference(&list).count()
    }
}

/// Steps of the histogram per doubling.
const STEPS: u32 = 4;
const BUCKETS: usize = 128;
/// Parts that must have been seen before any is called late.
const SAMPLES_MIN: u64 = 256;
/// From so many on old ones are forgotten by half.
const SAMPLES_MAX: u64 = 65_536;

/// How long parts of reads take, as a histogram of microseconds in steps of a fourth of a doubling.
pub(crate) struct Latencies {
    buckets: [AtomicU64; BUCKETS],
    count: AtomicU64,
    /// See `StoreOptions::hedge_percentile`; none switches it off.
    share: Option<f64>,
}

impl Latencies {
    pub(crate) fn new(share: Option<f64>) -> Self {
        let share = share.filter(|share| share.is_finite()).map(|share| share.clamp(0.5, 1.0));
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], count: AtomicU64::new(0), share }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.share.is_some()
    }

    pub(crate) fn add(&self, took: Duration) {
        if self.share.is_none() {
            return;
        }
        let micros = (took.as_secs_f64() * 1e6).max(1.0);
        let at = ((micros.log2() * f64::from(STEPS)) as usize).min(BUCKETS - 1);
        self.buckets[at].fetch_add(1, Ordering::Relaxed);
        if self.count.fetch_add(1, Ordering::Relaxed) + 1 == SAMPLES_MAX {
            self.count.store(0, Ordering::Relaxed);
            let mut left = 0;
            for bucket in &self.buckets {
                let half = bucket.load(Ordering::Relaxed) / 2;
                bucket.store(half, Ordering::Relaxed);
                left += half;
            }
            self.count.fetch_add(left, Ordering::Relaxed);
        }
    }

    /// What only a small share of all parts took longer than; none before enough were seen.
    pub(crate) fn late(&self) -> Option<Duration> {
        let share = self.share?;
        let count = self.count.load(Ordering::Relaxed);
        if count < SAMPLES_MIN {
            return None;
        }
        let wanted = (count as f64 * share) as u64;
        let mut seen = 0;
        let at = self.buckets.iter().position(|bucket| {
            seen += bucket.load(Ordering::Relaxed);
            seen >= wanted
        });
        let steps = (at.unwrap_or(BUCKETS - 1) + 1) as f64 / f64::from(STEPS);
        Some(Duration::from_secs_f64(steps.exp2() * 1e-6))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_few_parts_exceed_is_late() {
        let latencies = Latencies::new(Some(0.99));
        for at in 0..2000_u64 {
            latencies.add(Duration::from_micros(if at % 200 == 0 { 50_000 } else { 900 }));
        }
        let late = latencies.late().expect("enough were seen");
        assert!(late > Duration::from_micros(900) && late < Duration::from_micros(1300), "{late:?}");
        (0..200_000).for_each(|_| latencies.add(Duration::from_millis(10)));
        assert!(latencies.late().expect("old ones are forgotten") >= Duration::from_millis(10));
        assert!(Latencies::new(None).late().is_none() && Latencies::new(Some(0.9)).late().is_none());
    }
}
