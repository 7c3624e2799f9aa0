//! How devices come to a thread that runs already.
//!
//! A thread ends when its last device has gone, and shuts its registrations first: who comes before that is served, who comes later
//! learns that there is nobody. Those who enter wake the thread in any case, so it need not announce its sleep here.

use std::sync::{Arc, OnceLock};

use crate::io::driver::interface::Wake;
use crate::sync::{Mutex, hold};

pub(super) struct RegistrationQueue<T> {
    state: Mutex<State<T>>,
    waker: OnceLock<Arc<dyn Wake>>,
}

struct State<T> {
    waiting: Vec<T>,
    shut: bool,
}

impl<T> RegistrationQueue<T> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State { waiting: Vec::new(), shut: false }), waker: OnceLock::new() }
    }

    /// Set once, by the thread, before it first looks who waits.
    pub(super) fn set_waker(&self, waker: Arc<dyn Wake>) {
        let _ = self.waker.set(waker);
    }

    /// Gives the guest back when the thread has ended or is about to.
    pub(super) fn enter(&self, guest: T) -> Result<(), T> {
        {
            let mut state = hold(&self.state);
            if state.shut {
                return Err(guest);
            }
            state.waiting.push(guest);
        }
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
        Ok(())
    }

    /// Those who wait.
    pub(super) fn take(&self) -> Vec<T> {
        std::mem::take(&mut hold(&self.state).waiting)
    }

    /// Shuts it if nobody waits; whether it is shut.
    pub(super) fn shut(&self) -> bool {
        let mut state = hold(&self.state);
        state.shut |= state.waiting.is_empty();
        state.shut
    }

    /// Shuts it whoever waits, and turns those away.
    pub(super) fn turn_away(&self) -> Vec<T> {
        let mut state = hold(&self.state);
        state.shut = true;
        std::mem::take(&mut state.waiting)
    }

    pub(super) fn is_shut(&self) -> bool {
        hold(&self.state).shut
    }
}
