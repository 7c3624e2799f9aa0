//! Driver `uring`: one io_uring per shard, a whole batch per system call, completions taken in slices.
//!
//! Invariants: at most [`DEPTH`] operations of a device are queued or in the kernel, so those of one device overflow neither ring, and
//! where several overflow them, the submission ring is emptied before it is filled again and the kernel keeps the completions; a slot
//! is freed only by its own completion; a wake-up poll on the eventfd is in the ring whenever the thread blocks in it.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use crate::io::driver::interface::{
    Completion, DeviceTable, Driver, Op, ServedDevice, Wait, Wake, ignore_file_size_signal,
};
use crate::io::driver::progress::{InFlight, Step};
use crate::io::driver::registered::{BufferTable, FileTable};
use crate::metrics::DeviceCounters;

const ENTRIES: u32 = 512;
/// Operations of a device queued or in the kernel at most: the ring less the wake-up poll.
const DEPTH: usize = ENTRIES as usize - 1;
const WAKE: u64 = u64::MAX;
/// A wait for several completions ends after this long if there is one.
const SLICE_WAIT: Duration = Duration::from_millis(2);
/// The same where nobody is kept waiting by it: the one who waits has nothing else to do.
const SLICE_WAIT_ALONE: Duration = Duration::from_millis(20);
/// The same where the ring serves several devices: what one of them is asked for meanwhile does not wait for the others longer.
const SLICE_WAIT_SHARED: Duration = Duration::from_micros(250);

/// An eventfd that the ring polls.
struct EventFdWaker(OwnedFd);

impl Wake for EventFdWaker {
    fn wake(&self) {
        // Cannot block before 2^64 - 2 wake-ups; EINTR is not possible on a write that does not block.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

struct RingOp {
    port: usize,
    id: u64,
    flight: InFlight,
}

/// What the ring keeps of a device.
struct RingDevice {
    counters: Arc<DeviceCounters>,
    /// Where its lock is registered.
    lock: Option<u32>,
    /// Operations queued or in the kernel.
    in_flight: usize,
}

/// See the top of the file.
pub(crate) struct Uring {
    // Dropped before what the kernel may touch; see also `Drop`.
    ring: IoUring,
    ports: DeviceTable<RingDevice>,
    slots: Vec<Option<RingOp>>,
    free: Vec<usize>,
    /// Slots to be handed to the kernel, in order.
    queued: VecDeque<usize>,
    /// Slots that wait after EINTR or EAGAIN.
    later: Vec<(Instant, usize)>,
    in_kernel: usize,
    files: FileTable,
    buffers: BufferTable,
    wake: Arc<EventFdWaker>,
    armed: bool,
    /// The ring of a thread that reads for itself.
    alone: bool,
    /// Whether one poll reports every wake-up (Linux 5.13), or each needs a new one.
    multishot: bool,
    broken: bool,
    notes: Vec<String>,
    /// Kept for its room.
    reaped: Vec<cqueue::Entry>,
}

impl Uring {
    pub(crate) const NAME: &'static str = "uring";

    /// Sets a ring up for the calling thread.
    ///
    /// # Errors
    /// The kernel's refusal of a ring.
    pub(crate) fn start(arena: &Arena) -> std::io::Result<Self> {
        ignore_file_size_signal();
        let mut notes = Vec::new();
        let ring = build()?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "io_uring of a kernel before 5.11"));
        }
        let wake = Arc::new(EventFdWaker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let files = FileTable::new(&ring, &mut notes);
        let buffers = BufferTable::new(&ring, arena.slabs_max(), &mut notes);
        Ok(Self {
            ring,
            ports: DeviceTable::default(),
            slots: Vec::new(),
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

    /// A ring for reads of one device, number 0, that the calling thread waits for itself: nobody wakes it, and it does not keep the
    /// device's lock, for a read that outlives its process harms nobody.
    ///
    /// # Errors
    /// The kernel's refusal of a ring.
    pub(crate) fn start_reader(arena: &Arena, counters: Arc<DeviceCounters>) -> std::io::Result<Self> {
        let mut ring = Self::start(arena)?;
        (ring.armed, ring.alone) = (true, true);
        ring.serve(0, RingDevice { counters, lock: None, in_flight: 0 });
        Ok(ring)
    }

    fn serve(&mut self, port: usize, device: RingDevice) {
        self.ports.put(port, device);
        // Those of devices that have gone are used again.
        let (before, all) = (self.slots.len(), self.ports.len() * DEPTH);
        if before < all {
            self.slots.resize_with(all, || None);
            self.free.extend((before..all).rev());
        }
    }

    /// Fills the submission ring from the queue, and empties it into the kernel where it is too small for all devices together.
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
            let entry = entry.user_data(index as u64);
            // SAFETY: memory and file of the entry are owned by its slot, which only its completion frees.
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
        self.count(|counters| counters.submissions.add(1));
        match self.ring.submitter().submit_with_args(want, args) {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                // Interrupted, timed out, or more completions than the ring holds: look at what there is.
                Some(libc::EINTR | libc::ETIME | libc::EBUSY) => Ok(()),
                Some(libc::EAGAIN) => {
                    // No memory for requests; what is not submitted stays in the ring.
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

    /// Counts a call at the devices that it was made for: those with something under way, and where all are idle the first.
    fn count(&mut self, add: impl Fn(&DeviceCounters)) {
        let idle = self.ports.iter_mut().all(|port| port.in_flight == 0);
        let involved = self.ports.iter_mut().filter(|port| idle || port.in_flight > 0);
        involved.take(if idle { 1 } else { usize::MAX }).for_each(|port| add(&port.counters));
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
            let slice = match self.ports.len() {
                _ if self.alone => SLICE_WAIT_ALONE,
                0 | 1 => SLICE_WAIT,
                _ => SLICE_WAIT_SHARED,
            };
            if self.ring.params().is_feature_min_timeout() {
                args = args.min_wait_usec(slice.as_micros() as u32);
            } else {
                // Older kernels can only end the whole wait; a slow device costs a few more calls then.
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
            let Some(port) = self.ports.get_mut(slot.port) else { continue };
            match slot.flight.on_result(entry.result(), &port.counters) {
                Step::CopyRetry => self.queued.push_back(index),
                Step::Later(at) => self.later.push((at, index)),
                Step::Done(outcome) => {
                    port.in_flight -= 1;
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
        let Self { queued, slots, free, ports, .. } = self;
        queued.retain(|&index| {
            let empty = |s: &RingOp| s.flight.op().len() == 0 && !matches!(s.flight.op(), Op::Sync { .. });
            let Some(slot) = slots[index].take_if(|s| empty(s)) else { return true };
            if let Some(port) = ports.get_mut(slot.port) {
                port.in_flight -= 1;
            }
            done.push(Completion { id: slot.id, outcome: Ok(()) });
            free.push(index);
            false
        });
    }
}

impl Driver for Uring {
    fn add(&mut self, port: usize, device: &ServedDevice<'_>) -> Result<()> {
        let lock = device.lock.and_then(|lock| self.files.hold(&self.ring, lock, &mut self.notes));
        self.serve(port, RingDevice { counters: Arc::clone(device.counters), lock, in_flight: 0 });
        Ok(())
    }

    fn remove(&mut self, port: usize) {
        let Some(gone) = self.ports.take(port) else { return };
        debug_assert!(gone.in_flight == 0, "a device that has something in flight");
        if let Some(lock) = gone.lock {
            self.files.release(&self.ring, lock);
        }
        // What of the device's files nobody has open any more.
        self.files.sweep(&self.ring);
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn queue(&mut self, port: usize, id: u64, op: Op) {
        if let Some(port) = self.ports.get_mut(port) {
            port.in_flight += 1;
        }
        let slot = Some(RingOp { port, id, flight: InFlight::new(op) });
        let Some(index) = self.free.pop() else {
            debug_assert!(false, "queued without room");
            // Kept in order behind the others, in a slot of its own.
            self.slots.push(slot);
            self.queued.push_back(self.slots.len() - 1);
            return;
        };
        self.slots[index] = slot;
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
