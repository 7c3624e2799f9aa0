//! The order of locks, checked in builds with assertions.
//!
//! Threads that take two locks in different orders may deadlock, which tests rarely hit. This records every pair of
//! locks that is held together, and panics on the opposite order. Locks are identified by the type they hold, if that
//! is a type of this crate.

use super::hold;
use std::any::type_name;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::ptr::from_ref;
use std::sync::{Mutex, MutexGuard};

type Place = &'static Location<'static>;

/// For each lock: the locks that were taken under it, and where.
type Under = BTreeMap<&'static str, BTreeMap<&'static str, (Place, Place)>>;

/// A lock that a thread holds.
struct Held {
    what: &'static str,
    address: usize,
    at: Place,
}

thread_local! {
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
    /// Pairs that this thread has checked.
    static FINE: RefCell<BTreeSet<(&'static str, &'static str)>> = const { RefCell::new(BTreeSet::new()) };
}

static TAKEN_UNDER: Mutex<Under> = Mutex::new(Under::new());

/// A guard of a lock whose order is checked.
pub(crate) struct Guard<'a, T> {
    guard: MutexGuard<'a, T>,
    note: Note,
}

/// An entry of [`HELD`], by its address.
struct Note(usize);

impl<'a, T> Guard<'a, T> {
    /// Takes a lock after checking it against the locks that this thread holds.
    ///
    /// # Panics
    /// The thread holds it already, or a thread took the two in the opposite order.
    #[track_caller]
    pub(crate) fn new(mutex: &'a Mutex<T>) -> Self {
        let (what, address, at) = (type_name::<T>(), from_ref(mutex).addr(), Location::caller());
        // A thread that is ending has no list any more.
        let _ = HELD.try_with(|held| held.borrow().iter().for_each(|held| look(held, what, address, at)));
        let guard = hold(mutex);
        let _ = HELD.try_with(|held| held.borrow_mut().push(Held { what, address, at }));
        Self { guard, note: Note(address) }
    }

    /// Returns the same lock after a wait that released it meanwhile.
    pub(super) fn through(self, wait: impl FnOnce(MutexGuard<'a, T>) -> MutexGuard<'a, T>) -> Self {
        let Self { guard, note } = self;
        Self { guard: wait(guard), note }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|held| held.address == self.0) {
                held.remove(at);
            }
        });
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Checks that a lock may be taken under one that is held.
fn look(held: &Held, what: &'static str, address: usize, at: Place) {
    assert!(held.address != address, "the {what} of {at} is held since {}", held.at);
    // A lock without a type of its own may be any of several locks.
    let (pair, own) = ((held.what, what), concat!(env!("CARGO_CRATE_NAME"), "::"));
    if held.what == what || !held.what.starts_with(own) || !what.starts_with(own) {
        return;
    }
    if !FINE.try_with(|fine| fine.borrow_mut().insert(pair)).unwrap_or(false) {
        return;
    }
    let mut under = hold(&TAKEN_UNDER);
    under.entry(held.what).or_default().entry(what).or_insert((held.at, at));
    let round = way(&under, what, held.what);
    drop(under);
    assert!(
        round.is_empty(),
        "{what} is taken at {at} under {}, held since {}, and elsewhere: {round:#?}",
        held.what,
        held.at
    );
}

/// Returns how one lock is held, directly or indirectly, while the other is taken. Empty if it is not.
fn way(under: &Under, from: &'static str, to: &'static str) -> Vec<String> {
    let (mut seen, mut ways) = (BTreeSet::from([from]), vec![(from, Vec::new())]);
    while let Some((what, way)) = ways.pop() {
        for (next, (held, taken)) in under.get(what).into_iter().flatten() {
            let mut way = way.clone();
            way.push(format!("{next} at {taken} under {what}, held since {held}"));
            if *next == to {
                return way;
            }
            if seen.insert(next) {
                ways.push((next, way));
            }
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    struct First;
    struct Second;
    struct Third;

    #[test]
    fn what_is_taken_the_other_way_round_is_found_where_nobody_waits() {
        let (first, second, third) = (Mutex::new(First), Mutex::new(Second), Mutex::new(Third));
        let both = || (Guard::new(&first), Guard::new(&second));
        drop((both(), Guard::new(&third)));
        drop(both());
        let other = catch_unwind(|| drop((Guard::new(&third), Guard::new(&first))));
        let text = *other.expect_err("a round").downcast::<String>().unwrap();
        assert!(text.contains("Third at") && text.contains("under") && text.contains("order.rs"), "{text}");
        let twice = catch_unwind(|| drop((Guard::new(&first), Guard::new(&first))));
        assert!(twice.is_err(), "it would wait for itself");
        drop(both());
    }
}
