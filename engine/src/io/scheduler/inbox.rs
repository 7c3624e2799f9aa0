//! The way into a shard: a bounded lock-free queue, and a wake-up that costs a system call only when the shard sleeps.
//!
//! No lost wake-ups: the producer pushes, fences, then reads `sleeping`; the shard sets `sleeping`, fences, then reads the
//! queue. With sequentially consistent fences between, at least one sees the other's store: either the producer wakes, or
//! the shard finds the batch and does not sleep. The same argument with `dead` in place of `sleeping` shows that a batch
//! pushed while the shard ends is completed by one of the two.

use std::sync::{Arc, OnceLock};

use super::batch::AcceptedBatch;
use crate::io::driver::interface::Wake;
use crate::sync::atomic::{AtomicBool, Ordering, fence};
use crate::sync::{ArrayQueue, EventCount};

/// Batches that may wait to be looked at.
pub(super) const BATCHES_MAX: usize = if cfg!(loom) { 1 } else { 256 };

pub(super) struct Inbox {
    queue: ArrayQueue<AcceptedBatch>,
    sleeping: AtomicBool,
    closing: AtomicBool,
    dead: AtomicBool,
    space: EventCount,
    waker: OnceLock<Arc<dyn Wake>>,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            queue: ArrayQueue::new(BATCHES_MAX),
            sleeping: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            space: EventCount::default(),
            waker: OnceLock::new(),
        }
    }

    /// Set once, by the shard's thread, before the first push.
    pub(super) fn set_waker(&self, waker: Arc<dyn Wake>) {
        let _ = self.waker.set(waker);
    }

    /// Gives the batch back when the queue is full.
    pub(super) fn push(&self, batch: AcceptedBatch) -> Result<(), AcceptedBatch> {
        if self.is_closing() {
            drop(batch);
            return Ok(());
        }
        self.queue.push(batch)?;
        fence(Ordering::SeqCst);
        if self.dead.load(Ordering::Relaxed) {
            self.drain();
        } else {
            self.wake();
        }
        Ok(())
    }

    /// Blocks while the queue is full.
    pub(super) fn push_wait(&self, mut batch: AcceptedBatch) {
        loop {
            let seen = self.space.epoch();
            batch = match self.push(batch) {
                Ok(()) => return,
                Err(batch) => batch,
            };
            self.space.wait_past(seen, None);
        }
    }

    pub(super) fn pop(&self) -> Option<AcceptedBatch> {
        let batch = self.queue.pop()?;
        self.space.notify();
        Some(batch)
    }

    #[cfg(feature = "sim")]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Before the shard blocks. `false`: something has come in, do not block.
    pub(super) fn fall_asleep(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let asleep = self.queue.is_empty();
        if !asleep {
            self.sleeping.store(false, Ordering::Relaxed);
        }
        asleep
    }

    pub(super) fn woke_up(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Wakes the shard if it sleeps (or is about to). Preceded by a fence behind whatever it should notice.
    fn wake(&self) {
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.swap(false, Ordering::AcqRel)
            && let Some(waker) = self.waker.get()
        {
            waker.wake();
        }
    }

    /// Wakes the shard in any case.
    pub(super) fn nudge(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.nudge();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// The shard has ended: what is here and what still comes completes with `Closed`.
    pub(super) fn bury(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.dead.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.drain();
    }

    fn drain(&self) {
        while self.pop().is_some() {}
    }
}
