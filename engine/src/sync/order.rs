//! The order of locks, watched in builds with assertions: threads that take two locks in different orders can wait for each other
//! for ever, and hardly ever do so in a test. Locks are told apart by what they hold, where that is a type of this crate.

use super::hold;
use std::any::type_name;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::ptr::from_ref;
use std::sync::{Mutex, MutexGuard};

type Place = &'static Location<'static>;

/// By what is held: what was taken under it, and where both were.
type Under = BTreeMap<&'static str, BTreeMap<&'static str, (Place, Place)>>;

/// A lock that a thread has.
struct Held {
    what: &'static str,
    address: usize,
    at: Place,
}

thread_local! {
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
    /// Pairs that this thread has seen to be in order.
    static FINE: RefCell<BTreeSet<(&'static str, &'static str)>> = const { RefCell::new(BTreeSet::new()) };
}

static TAKEN_UNDER: Mutex<Under> = Mutex::new(Under::new());

/// A lock that is watched while it is held.
pub(crate) struct Guard<'a, T> {
    guard: MutexGuard<'a, T>,
    note: Note,
}

/// An entry of [`HELD`], by its address.
struct Note(usize);

impl<'a, T> Guard<'a, T> {
    /// Takes a lock, after a look at those that this thread has.
    ///
    /// # Panics
    /// The thread has it already, or some thread took the two the other way round.
    #[track_caller]
    pub(crate) fn new(mutex: &'a Mutex<T>) -> Self {
        let (what, address, at) = (type_name::<T>(), from_ref(mutex).addr(), Location::caller());
        // While a thread ends there is nothing to note it in any more.
        let _ = HELD.try_with(|held| held.borrow().iter().for_each(|held| look(held, what, address, at)));
        let guard = hold(mutex);
        let _ = HELD.try_with(|held| held.borrow_mut().push(Held { what, address, at }));
        Self { guard, note: Note(address) }
    }

    /// The same lock after something that lets go of it meanwhile.
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

/// Whether a lock may be taken under one that is held.
fn look(held: &Held, what: &'static str, address: usize, at: Place) {
    assert!(held.address != address, "the {what} of {at} is held since {}", held.at);
    // What has no type of its own may be any of several locks.
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

/// How one kind is held, directly or not, while the other is taken; empty when it is not.
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
