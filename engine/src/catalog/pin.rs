//! Pins: they keep the space of a segment from being reused while a reader may still read it.
//!
//! 1. A reader loads the current place, which holds a [`Pin`], and keeps it while it reads.
//! 2. Cleaning replaces the current place first and checks the [`PinWatch`] of the old one afterwards.
//! 3. A reader that the check does not see has therefore loaded the new place.
//!
//! Invariant: all reads of a pinned place happen before its space is reused. `Pin::drop` releases, the check acquires.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, hold};
use std::sync::Arc;

/// A current value. A value loaded before a replacement stays valid for its holder.
pub(crate) struct Versioned<P>(Mutex<P>);

impl<P: Clone> Versioned<P> {
    pub(crate) fn new(place: P) -> Self {
        Self(Mutex::new(place))
    }

    pub(crate) fn load(&self) -> P {
        hold(&self.0).clone()
    }

    /// Calls `at` with the current value, under the lock and without cloning it.
    pub(crate) fn peek<T>(&self, at: impl FnOnce(&P) -> T) -> T {
        at(&hold(&self.0))
    }

    /// Replaces the current value with what `to` makes of it.
    pub(crate) fn replace(&self, to: impl FnOnce(&P) -> P) {
        let before = {
            let mut load = hold(&self.0);
            let next = to(&load);
            std::mem::replace(&mut *load, next)
        };
        // This may be the last reference, so the value is dropped after the lock is released.
        drop(before);
    }
}

/// A marker embedded in the pinned object. When the last reference drops, the [`PinWatch`] reads false.
pub(crate) struct Pin(Arc<AtomicBool>);

/// An observer of a [`Pin`].
pub(crate) struct PinWatch(Arc<AtomicBool>);

impl Pin {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    pub(crate) fn watch(&self) -> PinWatch {
        PinWatch(Arc::clone(&self.0))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // Release, because the reads of all holders must happen before the space is reused.
        self.0.store(false, Ordering::Release);
    }
}

impl PinWatch {
    pub(crate) fn is_held(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::atomic::AtomicUsize;
    use loom::sync::Arc as Counted;
    use loom::thread;

    /// The place of a frame: a segment and its expected content.
    struct TestPlace {
        segment: usize,
        bytes: usize,
        _pin: Pin,
    }

    struct Rig {
        segments: [AtomicUsize; 2],
        current: Versioned<Counted<TestPlace>>,
    }

    fn rig() -> (Arc<Rig>, PinWatch) {
        let pin = Pin::new();
        let held = pin.watch();
        let segments = [AtomicUsize::new(7), AtomicUsize::new(0)];
        let current = Versioned::new(Counted::new(TestPlace { segment: 0, bytes: 7, _pin: pin }));
        (Arc::new(Rig { segments, current }), held)
    }

    /// Reads through the current place, as a reader does between selection and the end of its reads.
    fn read(rig: &Rig) {
        let place = rig.current.load();
        for _ in 0..2 {
            let found = rig.segments[place.segment].load(Ordering::Relaxed);
            assert_eq!(found, place.bytes, "segment {} was reused under its reader", place.segment);
        }
    }

    /// Moves the live content of the first segment to the second, and reuses the first if no reader holds it.
    fn reclaim(rig: &Rig, held: &PinWatch) -> bool {
        rig.segments[1].store(7, Ordering::Relaxed);
        rig.current.replace(|old| Counted::new(TestPlace { segment: 1, bytes: old.bytes, _pin: Pin::new() }));
        let free = !held.is_held();
        if free {
            rig.segments[0].store(9, Ordering::Relaxed);
        }
        free
    }

    /// Two readers run at the same time as a move. The test fails if one of these is changed:
    /// - `reclaim` replaces the place before it checks for holders.
    /// - `read` holds the place until it has read.
    /// - `reclaim` checks whether the place is held, not whether it is current.
    #[test]
    fn loom_a_segment_is_reused_only_after_its_readers() {
        loom::model(|| {
            let (rig, held) = rig();
            let readers = [(); 2].map(|()| {
                let rig = Arc::clone(&rig);
                thread::spawn(move || read(&rig))
            });
            reclaim(&rig, &held);
            readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
            assert!(!held.is_held(), "no reader holds the segment");
        });
    }

    /// A later check sees a pin that ended late. It fails if dropping a pin does not clear the flag.
    #[test]
    fn loom_a_released_segment_becomes_reusable() {
        loom::model(|| {
            let (rig, held) = rig();
            let reader = {
                let rig = Arc::clone(&rig);
                thread::spawn(move || read(&rig))
            };
            let free = reclaim(&rig, &held);
            reader.join().expect("no panic");
            assert!(free || !held.is_held());
        });
    }
}
