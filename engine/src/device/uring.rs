//! Driver `uring`: one io_uring per shard, a whole batch per system call, completions taken in slices.
//!
//! Invariants: at most [`DEPTH`] operations are queued or in the kernel, so neither ring overflows; a slot is freed only by
//! its own completion; a wake-up poll on the eventfd is in the ring whenever the thread blocks in it.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};

use super::arena::Arena;
use super::directory::Directory;
use super::driver::{Completion, Driver, Op, Wait, Wake, ignore_file_size_signal};
use super::progress::{InFlight, Step};
use super::registered::{BufferTable, FileTable};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::DeviceCounters;

const ENTRIES: u32 = 512;
/// Operations queued or in the kernel at most: the ring less the wake-up poll.
const DEPTH: usize = ENTRIES as usize - 1;
const WAKE: u64 = u64::MAX;
/// A wait for several completions ends after this long if there is one.
const SLICE_WAIT: Duration = Duration::from_millis(2);

/// An eventfd that the ring polls.
struct EventWake(OwnedFd);

impl Wake for EventWake {
    fn wake(&self) {
        // Cannot block before 2^64 - 2 wake-ups; EINTR is not possible on a write that does not block.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

struct Slot {
    id: u64,
    flight: InFlight,
}

/// See the top of the file.
pub(crate) struct Uring {
    // Dropped before what the kernel may touch; see also `Drop`.
    ring: IoUring,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Slots to be handed to the kernel, in order.
    queued: VecDeque<usize>,
    /// Slots that wait after EINTR or EAGAIN.
    later: Vec<(Instant, usize)>,
    in_kernel: usize,
    files: FileTable,
    buffers: BufferTable,
    wake: Arc<EventWake>,
    armed: bool,
    /// Whether one poll reports every wake-up (Linux 5.13), or each needs a new one.
    multishot: bool,
    broken: bool,
    counters: Arc<DeviceCounters>,
    notes: Vec<String>,
    /// Kept for its room.
    reaped: Vec<cqueue::Entry>,
}

impl Uring {
    pub(crate) const NAME: &'static str = "uring";

    /// Sets a ring up for the calling thread, and keeps the lock of `dir` in it.
    ///
    /// # Errors
    /// The kernel's refusal of a ring.
    pub(crate) fn start(dir: &dyn Directory, arena: &Arena, counters: Arc<DeviceCounters>) -> std::io::Result<Self> {
        Self::with_lock(dir.lock_fd(), arena, counters)
    }

    /// The same for reads that the calling thread waits for itself: nobody wakes it, and the lock is not in it, for a read
    /// that outlives its process harms nobody.
    ///
    /// # Errors
    /// The kernel's refusal of a ring.
    pub(crate) fn start_reader(arena: &Arena, counters: Arc<DeviceCounters>) -> std::io::Result<Self> {
        let mut ring = Self::with_lock(None, arena, counters)?;
        ring.armed = true;
        Ok(ring)
    }

    fn with_lock(lock: Option<BorrowedFd<'_>>, arena: &Arena, counters: Arc<DeviceCounters>) -> std::io::Result<Self> {
        ignore_file_size_signal();
        let mut notes = Vec::new();
        let ring = build()?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "io_uring of a kernel before 5.11"));
        }
        let wake = Arc::new(EventWake(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let files = FileTable::new(&ring, lock, &mut notes);
        let buffers = BufferTable::new(&ring, arena.slabs_max(), &mut notes);
        let mut slots = Vec::new();
        slots.resize_with(DEPTH, || None);
        Ok(Self {
            ring,
            slots,
            free: (0..DEPTH).rev().collect(),
            queued: VecDeque::new(),
            later: Vec::new(),
            in_kernel: 0,
            files,
            buffers,
            wake,
            armed: false,
            multishot: true,
            broken: false,
            counters,
            notes,
            reaped: Vec::new(),
        })
    }

    /// Fills the submission ring from the queue.
    fn push_queued(&mut self) -> Result<()> {
        if !self.armed {
            let poll =
                opcode::PollAdd::new(Fd(self.wake.0.as_raw_fd()), libc::POLLIN as u32).multi(self.multishot).build();
            // SAFETY: the poll refers to no memory, and the driver holds the eventfd for as long as the ring.
            self.armed = unsafe { self.ring.submission().push(&poll.user_data(WAKE)) }.is_ok();
        }
        while let Some(&index) = self.queued.front() {
            let Some(entry) = self.entry(index) else {
                self.queued.pop_front();
                continue;
            };
            // SAFETY: memory and file of the entry are owned by its slot, which only its completion frees.
            if unsafe { self.ring.submission().push(&entry.user_data(index as u64)) }.is_err() {
                break;
            }
            self.queued.pop_front();
            self.in_kernel += 1;
        }
        Ok(())
    }

    fn entry(&mut self, index: usize) -> Option<squeue::Entry> {
        let Self { slots, files, buffers, ring, notes, .. } = self;
        let flight = &slots.get(index)?.as_ref()?.flight;
        let file = flight.op().file();
        let fixed = files.slot(ring, file);
        let raw = Fd(file.fd().as_raw_fd());
        let Some((offset, memory)) = flight.rest() else {
            let flags = FsyncFlags::DATASYNC;
            return Some(match fixed {
                Some(slot) => opcode::Fsync::new(Fixed(slot)).flags(flags).build(),
                None => opcode::Fsync::new(raw).flags(flags).build(),
            });
        };
        let address = memory.address.as_ptr();
        let len = u32::try_from(memory.len).unwrap_or(u32::MAX);
        let buffer = buffers.slot(ring, memory.slab, notes);
        Some(match (flight.op().is_read(), fixed, buffer) {
            (true, Some(f), Some(b)) => opcode::ReadFixed::new(Fixed(f), address, len, b).offset(offset).build(),
            (true, None, Some(b)) => opcode::ReadFixed::new(raw, address, len, b).offset(offset).build(),
            (true, Some(f), None) => opcode::Read::new(Fixed(f), address, len).offset(offset).build(),
            (true, None, None) => opcode::Read::new(raw, address, len).offset(offset).build(),
            (false, Some(f), Some(b)) => opcode::WriteFixed::new(Fixed(f), address, len, b).offset(offset).build(),
            (false, None, Some(b)) => opcode::WriteFixed::new(raw, address, len, b).offset(offset).build(),
            (false, Some(f), None) => opcode::Write::new(Fixed(f), address, len).offset(offset).build(),
            (false, None, None) => opcode::Write::new(raw, address, len).offset(offset).build(),
        })
    }

    /// The one system call: submits, and waits for `want` completions or as told by `args`.
    fn enter(&mut self, want: usize, args: &SubmitArgs<'_, '_>) -> Result<()> {
        self.counters.submissions.add(1);
        match self.ring.submitter().submit_with_args(want, args) {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                // Interrupted, timed out, or more completions than the ring holds: look at what there is.
                Some(libc::EINTR | libc::ETIME | libc::EBUSY) => Ok(()),
                Some(libc::EAGAIN) => {
                    // No memory for requests; what is not submitted stays in the ring.
                    self.counters.retries.add(1);
                    std::thread::sleep(Duration::from_millis(1));
                    Ok(())
                }
                _ => {
                    self.broken = true;
                    Err(Error::io("io_uring_enter", e))
                }
            },
        }
    }

    fn wait(&mut self, wait: Wait) -> Result<()> {
        let due = self.later.iter().map(|l| l.0).min().map(|at| at.saturating_duration_since(Instant::now()));
        let unsubmitted = !self.ring.submission().is_empty();
        let want = match wait {
            Wait::No => 0,
            Wait::Wake => 1,
            Wait::Completions(n) => n.min(self.in_kernel).max(usize::from(due.is_some())),
        };
        if want == 0 && !unsubmitted {
            return Ok(());
        }
        let mut limit = due;
        let mut args = SubmitArgs::new();
        if want > 1 {
            if self.ring.params().is_feature_min_timeout() {
                args = args.min_wait_usec(SLICE_WAIT.as_micros() as u32);
            } else {
                // Older kernels can only end the whole wait; a slow device costs a few more calls then.
                limit = Some(limit.map_or(SLICE_WAIT, |l| l.min(SLICE_WAIT)));
            }
        }
        match limit {
            None => self.enter(want, &args),
            Some(limit) => {
                let limit = Timespec::from(limit);
                self.enter(want, &args.timespec(&limit))
            }
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        let mut entries = std::mem::take(&mut self.reaped);
        entries.extend(self.ring.completion());
        for entry in entries.drain(..) {
            if entry.user_data() == WAKE {
                if entry.result() < 0 {
                    // A kernel that refuses the single poll too would make this a busy loop.
                    self.broken = !self.multishot;
                    self.multishot = false;
                }
                if !cqueue::more(entry.flags()) {
                    // The poll ended; a new one would fire at once on a counter that still stands.
                    let _ = rustix::io::read(&self.wake.0, &mut [0; 8]);
                    self.armed = false;
                }
                continue;
            }
            let index = entry.user_data() as usize;
            self.in_kernel -= 1;
            let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { continue };
            match slot.flight.on_result(entry.result(), &self.counters) {
                Step::Again => self.queued.push_back(index),
                Step::Later(at) => self.later.push((at, index)),
                Step::Done(outcome) => {
                    done.push(Completion { id: slot.id, outcome });
                    self.slots[index] = None;
                    self.free.push(index);
                }
            }
        }
        self.reaped = entries;
    }

    /// Nothing to move: done without the kernel.
    fn finish_empty(&mut self, done: &mut Vec<Completion>) {
        let Self { queued, slots, free, .. } = self;
        queued.retain(|&index| {
            let empty = |s: &Slot| s.flight.op().len() == 0 && !matches!(s.flight.op(), Op::Sync { .. });
            let Some(slot) = slots[index].take_if(|s| empty(s)) else { return true };
            done.push(Completion { id: slot.id, outcome: Ok(()) });
            free.push(index);
            false
        });
    }
}

impl Driver for Uring {
    fn room(&self) -> usize {
        self.free.len()
    }

    fn queue(&mut self, id: u64, op: Op) {
        let Some(index) = self.free.pop() else {
            debug_assert!(false, "queued without room");
            // Kept in order behind the others, in a slot of its own.
            self.slots.push(Some(Slot { id, flight: InFlight::new(op) }));
            self.queued.push_back(self.slots.len() - 1);
            return;
        };
        self.slots[index] = Some(Slot { id, flight: InFlight::new(op) });
        self.queued.push_back(index);
    }

    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        let before = done.len();
        if !self.later.is_empty() {
            let now = Instant::now();
            let due = self.later.extract_if(.., |l| l.0 <= now).map(|l| l.1);
            self.queued.extend(due);
        }
        self.finish_empty(done);
        self.files.sweep(&self.ring);
        if wait == Wait::Wake || self.buffers.is_stale() {
            self.buffers.sweep(&self.ring);
        }
        self.push_queued()?;
        self.wait(if done.len() > before { Wait::No } else { wait })?;
        self.reap(done);
        if self.broken {
            return Err(Error::new(ErrorKind::Io, "io_uring cannot poll an eventfd"));
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.wake) as Arc<dyn Wake>
    }

    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // Only after a panic or a broken ring is anything left here. The kernel may still write: wait for it, and where that
        // is impossible give the memory up for good.
        self.queued.clear();
        self.later.clear();
        let mut done = Vec::new();
        while self.in_kernel > 0 && !self.broken {
            if self.wait(Wait::Completions(1)).is_err() {
                break;
            }
            self.reap(&mut done);
            self.queued.clear();
            self.later.clear();
        }
        if self.in_kernel > 0 {
            std::mem::forget(std::mem::take(&mut self.slots));
        }
        // Now, and not when the kernel gets to taking the ring apart: the lock is free when this returns.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// A ring with the best of what this kernel offers for a single thread that waits for its own completions.
fn build() -> std::io::Result<IoUring> {
    let base = || {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(2 * ENTRIES).setup_clamp().dontfork();
        builder
    };
    let mut result = Err(std::io::Error::from_raw_os_error(libc::EINVAL));
    for level in 0..4 {
        let mut builder = base();
        match level {
            // Linux 6.1, 6.0, 5.19, before.
            0 => builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all(),
            1 => builder.setup_single_issuer().setup_coop_taskrun().setup_submit_all(),
            2 => builder.setup_coop_taskrun().setup_submit_all(),
            _ => &mut builder,
        };
        result = builder.build(ENTRIES);
        if !matches!(&result, Err(e) if e.raw_os_error() == Some(libc::EINVAL)) {
            break;
        }
    }
    result
}
