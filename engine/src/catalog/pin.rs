//! Pins against reclaim: who may still read a place holds it, and its space is used again only when nobody does.
//!
//! A reader takes the place that is current and holds it while it reads. Cleaning makes another place current first, and looks
//! for holders afterwards: whoever it does not see took the new place. What a holder did happens before the space is used again.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, hold};
use std::sync::Arc;

/// What is current; whoever took it before keeps what it took.
pub(crate) struct Versioned<P>(Mutex<P>);

impl<P: Clone> Versioned<P> {
    pub(crate) fn new(place: P) -> Self {
        Self(Mutex::new(place))
    }

    pub(crate) fn load(&self) -> P {
        hold(&self.0).clone()
    }

    /// Looks at what is current without holding it.
    pub(crate) fn peek<T>(&self, at: impl FnOnce(&P) -> T) -> T {
        at(&hold(&self.0))
    }

    /// What is made of it is current from now on.
    pub(crate) fn replace(&self, to: impl FnOnce(&P) -> P) {
        let before = {
            let mut load = hold(&self.0);
            let next = to(&load);
            std::mem::replace(&mut *load, next)
        };
        // It may be the last to hold the place, whose end is not for others to wait for.
        drop(before);
    }
}

/// Lies in what is held: its end is that of the last holder.
pub(crate) struct Pin(Arc<AtomicBool>);

/// Tells whether anybody holds it.
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
        // Release: what holders read, they read before.
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

    /// A place of a frame: a segment, and what must stand there.
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

    /// Reads through the place that is current, as a view does between its selection and the end of its reads.
    fn read(rig: &Rig) {
        let place = rig.current.load();
        for _ in 0..2 {
            let found = rig.segments[place.segment].load(Ordering::Relaxed);
            assert_eq!(found, place.bytes, "segment {} was used again under its reader", place.segment);
        }
    }

    /// Moves what lives in the first segment to the second, and uses the first again if nobody holds it.
    fn reclaim(rig: &Rig, held: &PinWatch) -> bool {
        rig.segments[1].store(7, Ordering::Relaxed);
        rig.current.replace(|old| Counted::new(TestPlace { segment: 1, bytes: old.bytes, _pin: Pin::new() }));
        let free = !held.is_held();
        if free {
            rig.segments[0].store(9, Ordering::Relaxed);
        }
        free
    }

    /// Two readers beside a move. Fails when `reclaim` looks for holders before it turns the place, when `read` lets go of the place
    /// before it reads, and when what is looked for is whether the place is current instead of whether it is held.
    #[test]
    fn loom_a_segment_is_used_again_only_behind_its_readers() {
        loom::model(|| {
            let (rig, held) = rig();
            let readers = [(); 2].map(|()| {
                let rig = Arc::clone(&rig);
                thread::spawn(move || read(&rig))
            });
            reclaim(&rig, &held);
            readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
            assert!(!held.is_held(), "nobody holds it any more");
        });
    }

    /// A pin that ends late is seen by whoever looks next: space that was held comes back. Fails when the end of a pin is not told.
    #[test]
    fn loom_what_was_held_comes_back() {
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
