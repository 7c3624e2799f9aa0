//! Pins against reclaim: who may still read a place holds it, and its space is used again only when nobody does.
//!
//! A reader takes the place that is current and holds it while it reads. Cleaning makes another place current first, and looks
//! for holders afterwards: whoever it does not see took the new place. What a holder did happens before the space is used again.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, hold};
use std::sync::Arc;

/// What is current; whoever took it before keeps what it took.
pub(crate) struct Current<P>(Mutex<P>);

impl<P: Clone> Current<P> {
    pub(crate) fn new(place: P) -> Self {
        Self(Mutex::new(place))
    }

    pub(crate) fn now(&self) -> P {
        hold(&self.0).clone()
    }

    /// Looks at what is current without holding it.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&P) -> T) -> T {
        at(&hold(&self.0))
    }

    /// What is made of it is current from now on.
    pub(crate) fn turn(&self, to: impl FnOnce(&P) -> P) {
        let before = {
            let mut now = hold(&self.0);
            let next = to(&now);
            std::mem::replace(&mut *now, next)
        };
        // It may be the last to hold the place, whose end is not for others to wait for.
        drop(before);
    }
}

/// Lies in what is held: its end is that of the last holder.
pub(crate) struct Hold(Arc<AtomicBool>);

/// Tells whether anybody holds it.
pub(crate) struct Held(Arc<AtomicBool>);

impl Hold {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    pub(crate) fn watch(&self) -> Held {
        Held(Arc::clone(&self.0))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Release: what holders read, they read before.
        self.0.store(false, Ordering::Release);
    }
}

impl Held {
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
    struct Place {
        segment: usize,
        bytes: usize,
        _pin: Hold,
    }

    struct Rig {
        segments: [AtomicUsize; 2],
        current: Current<Counted<Place>>,
    }

    fn rig() -> (Arc<Rig>, Held) {
        let pin = Hold::new();
        let held = pin.watch();
        let segments = [AtomicUsize::new(7), AtomicUsize::new(0)];
        let current = Current::new(Counted::new(Place { segment: 0, bytes: 7, _pin: pin }));
        (Arc::new(Rig { segments, current }), held)
    }

    /// Reads through the place that is current, as a view does between its selection and the end of its reads.
    fn read(rig: &Rig) {
        let place = rig.current.now();
        for _ in 0..2 {
            let found = rig.segments[place.segment].load(Ordering::Relaxed);
            assert_eq!(found, place.bytes, "segment {} was used again under its reader", place.segment);
        }
    }

    /// Moves what lives in the first segment to the second, and uses the first again if nobody holds it.
    fn reclaim(rig: &Rig, held: &Held) -> bool {
        rig.segments[1].store(7, Ordering::Relaxed);
        rig.current.turn(|old| Counted::new(Place { segment: 1, bytes: old.bytes, _pin: Hold::new() }));
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
