//! The inbox of a device: a bounded lock-free queue of batches, with a wake-up that costs a system call only if the
//! shard sleeps.
//!
//! Callers push batches from any thread. The shard's thread pops them. Both sides follow one protocol:
//! 1. The producer pushes the batch, executes a fence and reads `sleeping`. If it is set, the producer wakes the shard.
//! 2. The shard sets `sleeping`, executes a fence and reads the queue. If the queue is empty, the shard blocks.
//!
//! Invariants:
//! - No wake-up is lost. Both fences are sequentially consistent, so at least one side sees the other's store. Either
//!   the producer wakes the shard, or the shard finds the batch and does not block.
//! - No batch is forgotten. If a batch is pushed while the shard ends, the producer or the shard completes it. The
//!   argument is the same, with `dead` in place of `sleeping`.
//!
//! `tests::loom` explores the interleavings of both sides.

use std::sync::{Arc, OnceLock};

use super::batch::AcceptedBatch;
use crate::io::driver::interface::Wake;
use crate::sync::atomic::{AtomicBool, Ordering, fence};
use crate::sync::{ArrayQueue, EventCount};

/// The most batches that an inbox holds.
pub(super) const BATCHES_MAX: usize = if cfg!(loom) { 1 } else { 256 };

/// The inbox of one device.
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

    /// Sets the waker. The shard's thread calls this once, before the first push.
    pub(super) fn set_waker(&self, waker: Arc<dyn Wake>) {
        let _ = self.waker.set(waker);
    }

    /// Pushes a batch and wakes the shard if it sleeps. A closed inbox completes the batch with `Closed`.
    ///
    /// # Errors
    /// The batch itself, if the queue is full.
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

    /// Pushes a batch. Blocks while the queue is full.
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

    /// Announces that the shard is about to block. Returns `false` if a batch is waiting, and then the shard must not
    /// block.
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

    /// Wakes the shard if it sleeps or is about to sleep. The caller has executed a fence after its store.
    fn wake(&self) {
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.swap(false, Ordering::AcqRel)
            && let Some(waker) = self.waker.get()
        {
            waker.wake();
        }
    }

    /// Wakes the shard, whether it sleeps or not.
    pub(super) fn nudge(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Closes the inbox. The shard still executes the batches that it accepted.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.nudge();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Marks the shard as ended. Batches in the queue, and batches pushed from now on, complete with `Closed`.
    pub(super) fn abandon(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.dead.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.drain();
    }

    fn drain(&self) {
        while self.pop().is_some() {}
    }
}
