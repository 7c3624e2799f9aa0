//! The helper of a store: a thread that does a part of a caller's work on a second core.
//!
//! Invariants:
//! - It is started when a caller first needs it, and does one job at a time. Callers never queue behind each other.
//! - A caller may take its job back until the thread has begun it, so that a busy core never delays the caller.

use crate::sync::{lock, wait_for};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Work for the helper.
pub(crate) type HelperJob = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct HelperState {
    /// A job that was not begun.
    job: Option<HelperJob>,
    /// True from the offer of a job until its end.
    busy: bool,
    closing: bool,
}

#[derive(Default)]
struct HelperShared {
    state: Mutex<HelperState>,
    changed: Condvar,
}

/// The helper of a store.
#[derive(Default)]
pub(crate) struct HelperThread {
    shared: Arc<HelperShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl HelperThread {
    /// Hands a job to the thread.
    ///
    /// # Errors
    /// The job: the thread is busy with that of another caller, or the system gives no thread.
    pub(crate) fn offer(&self, job: HelperJob) -> Result<(), HelperJob> {
        if !self.start() {
            return Err(job);
        }
        let mut state = lock(&self.shared.state);
        if state.busy {
            return Err(job);
        }
        (state.job, state.busy) = (Some(job), true);
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Takes the caller's job back, if the thread has not begun it. Only the caller whose offer was accepted may call
    /// this.
    pub(crate) fn take_back(&self) -> Option<HelperJob> {
        let mut state = lock(&self.shared.state);
        let job = state.job.take()?;
        state.busy = false;
        Some(job)
    }

    /// Starts the thread if it was not. Returns whether there is one.
    fn start(&self) -> bool {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new().name("stratakv-help".into()).spawn(move || shared.run());
            *thread = started.ok();
        }
        thread.is_some()
    }
}

impl HelperShared {
    fn run(&self) {
        loop {
            let mut state = lock(&self.state);
            let job = loop {
                if let Some(job) = state.job.take() {
                    break job;
                }
                if state.closing {
                    return;
                }
                state = wait_for(&self.changed, state, None);
            };
            drop(state);
            job();
            lock(&self.state).busy = false;
        }
    }
}

impl Drop for HelperThread {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.changed.notify_one();
        let thread = lock(&self.thread).take();
        // The last owner of a store may be the helper itself, which cannot wait for its own end.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn helper_does_one_job_at_a_time_and_gives_back_what_it_has_not_begun() {
        let helper = HelperThread::default();
        let (done, ended) = channel();
        let (go, wait) = channel::<()>();
        let (begun, begins) = channel();
        let first = move || {
            let _ = begun.send(());
            let _ = wait.recv();
            let _ = done.send(1);
        };
        assert!(helper.offer(Box::new(first)).is_ok());
        begins.recv().expect("the helper begins");
        assert!(helper.take_back().is_none(), "the job was begun");
        assert!(helper.offer(Box::new(|| {})).is_err(), "the helper is busy");
        go.send(()).expect("the helper waits");
        assert_eq!(ended.recv(), Ok(1));
        drop(helper);
    }
}
