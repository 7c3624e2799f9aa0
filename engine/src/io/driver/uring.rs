//! Driver `uring`: one io_uring per shard or thread, a whole batch per system call, completions taken in slices.
//!
//! One call of [`Driver::drive`]:
//! 1. Queues operations whose pause after EINTR or EAGAIN is over, and completes empty ones.
//! 2. Unregisters files that are closed and slabs that are retired.
//! 3. Fills the submission ring from the queue. If the ring is full, empties it into the kernel first.
//! 4. Submits and waits in one system call.
//! 5. Takes the completions. Short transfers are queued again for the rest.
//!
//! Invariants:
//! - At most [`DEPTH`] operations of a device are queued or in the kernel, so one device overflows neither ring. If
//!   several devices overflow the completion ring, the kernel keeps the completions (`NODROP`).
//! - An entry of `ops` owns the memory and the file of its operation. Only the operation's own completion frees it.
//! - Whenever the thread blocks in a shard's ring, the ring holds a poll of the wake-up eventfd.
//! - The ring is dropped before the memory that the kernel may touch. If operations cannot be waited for, their memory
//!   is leaked.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use crate::io::driver::interface::{Completion, DeviceTable, Driver, Op, ServedDevice, Wait, Wake};
use crate::io::driver::progress::{InFlight, Step};
use crate::io::driver::registered::{BufferTable, FileTable};
use crate::io::signals::ignore_file_size_signal;
use crate::metrics::DeviceCounters;

const ENTRIES: u32 = 512;
/// Operations of a device that are queued or in the kernel, at most: the ring minus the wake-up poll.
const DEPTH: usize = ENTRIES as usize - 1;
const WAKE: u64 = u64::MAX;
/// A wait for several completions ends after this time if one has arrived.
const SLICE_WAIT: Duration = Duration::from_millis(2);
/// The same for a thread's own ring, because that thread has nothing else to do.
const SLICE_WAIT_ALONE: Duration = Duration::from_millis(20);
/// The same if the ring serves several devices, because new requests of one device wait for the slice of another.
const SLICE_WAIT_SHARED: Duration = Duration::from_micros(250);

/// An eventfd that the ring polls.
struct EventFdWaker(OwnedFd);

impl Wake for EventFdWaker {
    fn wake(&self) {
        // The write cannot block before 2^64 - 2 wake-ups, and a write that does not block is not interrupted.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

struct RingOp {
    device: usize,
    id: u64,
    flight: InFlight,
}

/// The state of a device in the ring.
struct RingDevice {
    counters: Arc<DeviceCounters>,
    /// The slot in which its lock is registered.
    lock: Option<u32>,
    /// Operations queued or in the kernel.
    in_flight: usize,
}

/// The driver.
pub(crate) struct Uring {
    // Dropped before the memory that the kernel may touch. See also `Drop`.
    ring: IoUring,
    devices: DeviceTable<RingDevice>,
    ops: Vec<Option<RingOp>>,
    free: Vec<usize>,
    /// Operations to submit, in order, by their index in `ops`.
    queued: VecDeque<usize>,
    /// Operations that pause after EINTR or EAGAIN, with the end of the pause.
    later: Vec<(Instant, usize)>,
    in_kernel: usize,
    files: FileTable,
    buffers: BufferTable,
    wake: Arc<EventFdWaker>,
    /// True if the wake-up poll is in the ring.
    armed: bool,
    /// True if a thread drives its own reads on this ring.
    alone: bool,
    /// True if one poll reports every wake-up (Linux 5.13). Otherwise each wake-up needs a new poll.
    multishot: bool,
    broken: bool,
    notes: Vec<String>,
    /// Kept for its capacity.
    reaped: Vec<cqueue::Entry>,
}

impl Uring {
    pub(crate) const NAME: &'static str = "uring";

    /// Sets a ring up for the calling thread.
    ///
    /// # Errors
    /// The kernel refuses a ring. `Unsupported`: the kernel is older than Linux 5.11.
    pub(crate) fn start(arena: &Arena) -> std::io::Result<Self> {
        ignore_file_size_signal();
        let mut notes = Vec::new();
        let ring = build()?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "io_uring of a kernel before Linux 5.11"));
        }
        let wake = Arc::new(EventFdWaker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let files = FileTable::new(&ring, &mut notes);
        let buffers = BufferTable::new(&ring, arena.slabs_max(), &mut notes);
        Ok(Self {
            ring,
            devices: DeviceTable::default(),
            ops: Vec::new(),
            free: Vec::new(),
            queued: VecDeque::new(),
            later: Vec::new(),
            in_kernel: 0,
            files,
            buffers,
            wake,
            armed: false,
            alone: false,
            multishot: true,
            broken: false,
            notes,
            reaped: Vec::new(),
        })
    }

    /// Sets a ring up on which the calling thread drives its own reads of one device, which has number 0.
    ///
    /// No other thread wakes the ring. The ring does not hold the device's lock, because a read that outlives the
    /// process is harmless.
    ///
    /// # Errors
    /// The kernel refuses a ring.
    pub(crate) fn start_reader(arena: &Arena, counters: Arc<DeviceCounters>) -> std::io::Result<Self> {
        let mut ring = Self::start(arena)?;
        (ring.armed, ring.alone) = (true, true);
        ring.serve(0, RingDevice { counters, lock: None, in_flight: 0 });
        Ok(ring)
    }

    fn serve(&mut self, number: usize, device: RingDevice) {
        self.devices.put(number, device);
        // Entries of released devices are used again.
        let (before, all) = (self.ops.len(), self.devices.len() * DEPTH);
        if before < all {
            self.ops.resize_with(all, || None);
            self.free.extend((before..all).rev());
        }
    }

    /// Fills the submission ring from the queue. If the ring is too small for all devices together, empties it into the
    /// kernel.
    fn push_queued(&mut self) -> Result<()> {
        if !self.armed {
            let poll =
                opcode::PollAdd::new(Fd(self.wake.0.as_raw_fd()), libc::POLLIN as u32).multi(self.multishot).build();
            // SAFETY: the poll refers to no memory, and the driver holds the eventfd as long as the ring.
            self.armed = unsafe { self.ring.submission().push(&poll.user_data(WAKE)) }.is_ok();
        }
        while let Some(&index) = self.queued.front() {
            let Some(entry) = self.entry(index) else {
                self.queued.pop_front();
                continue;
            };
            let entry = entry.user_data(index as u64);
            // SAFETY: the entry of `ops` owns the operation's memory and file, and only its completion frees the entry.
            let mut pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
            if !pushed {
                self.enter(0, &SubmitArgs::new())?;
                // SAFETY: as above.
                pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
            }
            if !pushed {
                break;
            }
            self.queued.pop_front();
            self.in_kernel += 1;
        }
        Ok(())
    }

    fn entry(&mut self, index: usize) -> Option<squeue::Entry> {
        let Self { ops, files, buffers, ring, notes, .. } = self;
        let flight = &ops.get(index)?.as_ref()?.flight;
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

    /// Makes the one system call: submits, and waits for `want` completions or as `args` say.
    fn enter(&mut self, want: usize, args: &SubmitArgs<'_, '_>) -> Result<()> {
        self.count(|counters| counters.submissions.add(1));
        match self.ring.submitter().submit_with_args(want, args) {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                // Interrupted, timed out, or more completions than the ring holds: take the completions that are there.
                Some(libc::EINTR | libc::ETIME | libc::EBUSY) => Ok(()),
                Some(libc::EAGAIN) => {
                    // The kernel has no memory for requests. Requests that it did not take stay in the ring.
                    self.count(|counters| counters.retries.add(1));
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

    /// Counts a system call at the devices with operations in flight, or at the first device if all are idle.
    fn count(&mut self, add: impl Fn(&DeviceCounters)) {
        let idle = self.devices.iter_mut().all(|device| device.in_flight == 0);
        let involved = self.devices.iter_mut().filter(|device| idle || device.in_flight > 0);
        involved.take(if idle { 1 } else { usize::MAX }).for_each(|device| add(&device.counters));
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
            let slice = match self.devices.len() {
                _ if self.alone => SLICE_WAIT_ALONE,
                0 | 1 => SLICE_WAIT,
                _ => SLICE_WAIT_SHARED,
            };
            if self.ring.params().is_feature_min_timeout() {
                args = args.min_wait_usec(slice.as_micros() as u32);
            } else {
                // Older kernels can only end the whole wait. A slow device costs a few more system calls then.
                limit = Some(limit.map_or(slice, |l| l.min(slice)));
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
                    // The kernel refuses a multishot poll. If it refuses the single poll too, this would become a busy
                    // loop.
                    self.broken = !self.multishot;
                    self.multishot = false;
                }
                if !cqueue::more(entry.flags()) {
                    // The poll ended. Without this read a new poll would complete at once.
                    let _ = rustix::io::read(&self.wake.0, &mut [0; 8]);
                    self.armed = false;
                }
                continue;
            }
            let index = entry.user_data() as usize;
            self.in_kernel -= 1;
            let Some(op) = self.ops.get_mut(index).and_then(Option::as_mut) else { continue };
            let Some(device) = self.devices.get_mut(op.device) else { continue };
            match op.flight.on_result(entry.result(), &device.counters) {
                Step::Continue => self.queued.push_back(index),
                Step::Later(at) => self.later.push((at, index)),
                Step::Done(outcome) => {
                    device.in_flight -= 1;
                    done.push(Completion { id: op.id, outcome });
                    self.ops[index] = None;
                    self.free.push(index);
                }
            }
        }
        self.reaped = entries;
    }

    /// Completes operations that move no bytes, without the kernel.
    fn finish_empty(&mut self, done: &mut Vec<Completion>) {
        let Self { queued, ops, free, devices, .. } = self;
        queued.retain(|&index| {
            let empty = |op: &RingOp| op.flight.op().len() == 0 && !matches!(op.flight.op(), Op::Sync { .. });
            let Some(op) = ops[index].take_if(|op| empty(op)) else { return true };
            if let Some(device) = devices.get_mut(op.device) {
                device.in_flight -= 1;
            }
            done.push(Completion { id: op.id, outcome: Ok(()) });
            free.push(index);
            false
        });
    }
}

impl Driver for Uring {
    fn add(&mut self, device: usize, served: &ServedDevice<'_>) -> Result<()> {
        let lock = served.lock.and_then(|lock| self.files.hold(&self.ring, lock, &mut self.notes));
        self.serve(device, RingDevice { counters: Arc::clone(served.counters), lock, in_flight: 0 });
        Ok(())
    }

    fn remove(&mut self, device: usize) {
        let Some(gone) = self.devices.take(device) else { return };
        debug_assert!(gone.in_flight == 0, "a released device has operations in flight");
        if let Some(lock) = gone.lock {
            self.files.release(&self.ring, lock);
        }
        // Unregisters the device's files that are not open any more.
        self.files.sweep(&self.ring);
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn queue(&mut self, device: usize, id: u64, op: Op) {
        if let Some(own) = self.devices.get_mut(device) {
            own.in_flight += 1;
        }
        let op = Some(RingOp { device, id, flight: InFlight::new(op) });
        let Some(index) = self.free.pop() else {
            debug_assert!(false, "more operations than the depth allows");
            // Beyond the depth the table grows.
            self.ops.push(op);
            self.queued.push_back(self.ops.len() - 1);
            return;
        };
        self.ops[index] = op;
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
            return Err(Error::new(ErrorKind::Io, "io_uring_enter: the kernel refuses to poll an eventfd"));
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
        // Operations are left only after a panic or in a broken ring. The kernel may still write into their memory, so
        // this waits for them. If that is impossible, the memory is leaked.
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
            std::mem::forget(std::mem::take(&mut self.ops));
        }
        // The kernel takes the ring apart later. Unregistering now makes sure that the lock is free when this returns.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// Builds a ring with the best features of this kernel for a single thread that waits for its own completions.
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
            // Linux 6.1, 6.0, 5.19, and older.
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
