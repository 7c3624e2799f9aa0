//! Where threads meet, and what a simulation does instead of letting one wait: everything there runs on a single thread, so
//! whoever waits does what is under way until it has happened.

#[cfg(feature = "sim")]
use std::cell::Cell;

#[cfg(feature = "sim")]
thread_local! {
    /// Does a piece of what is under way; `false` when nothing is. None outside of a simulation.
    static DRIVE: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// From now on waiting on this thread means driving the simulation.
#[cfg(feature = "sim")]
pub(crate) fn set_drive(drive: Option<fn() -> bool>) {
    DRIVE.set(drive);
}

/// In a simulation, drives it until `done` or until nothing is under way any more; whether this is a simulation.
/// Elsewhere nothing: block.
#[inline]
pub(crate) fn drive_until(done: impl FnMut() -> bool) -> bool {
    #[cfg(feature = "sim")]
    if let Some(drive) = DRIVE.get() {
        let mut done = done;
        while !done() && drive() {}
        return true;
    }
    let _ = done;
    false
}
