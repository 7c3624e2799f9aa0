//! An operation in flight: what a raw result of the system means, and whether to continue. All drivers share it.
//!
//! A short transfer continues with the rest. EINTR and EAGAIN are retried after a pause, except in a sync. A transfer
//! that makes no progress, and any other error number, fails the operation.

use crate::events::event;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::lease::IoMemory;
use crate::io::coverage;
use crate::io::driver::interface::Op;
use crate::io::planted;
use crate::metrics::{DeviceCounters, OpKind};

/// Retries after EINTR and EAGAIN. The pauses double from 100 microseconds, about 3 seconds in all.
const RETRIES_MAX: u32 = 15;

/// The next step of a driver after a raw result.
pub(crate) enum Step {
    /// Reports the outcome.
    Done(Result<()>),
    /// Submits the rest now.
    Continue,
    /// Submits the rest at this time.
    Later(Instant),
}

/// An operation with its progress.
pub(crate) struct InFlight {
    op: Op,
    /// Bytes that need not be moved again.
    done: usize,
    /// The furthest byte ever reached. A continuation that does not pass it has met the end of the file.
    reached: usize,
    retries: u32,
}

impl InFlight {
    pub(crate) fn new(op: Op) -> Self {
        Self { op, done: 0, reached: 0, retries: 0 }
    }

    pub(crate) fn op(&self) -> &Op {
        &self.op
    }

    /// Returns file offset and memory of what is left, or none for a sync.
    pub(in crate::io) fn rest(&self) -> Option<(u64, IoMemory<'_>)> {
        let (offset, memory) = match &self.op {
            Op::Read { offset, into, .. } => (*offset, into.memory()),
            Op::Write { offset, from, .. } => (*offset, from.memory()),
            Op::Sync { .. } => return None,
        };
        // SAFETY: done <= len, so the address stays inside (or one past the end of) the extent.
        let address = unsafe { memory.address.add(self.done) };
        Some((offset + self.done as u64, IoMemory { address, len: memory.len - self.done, slab: memory.slab }))
    }

    /// Judges a raw result, which is the bytes moved or a negative error number.
    pub(crate) fn on_result(&mut self, result: i32, counters: &DeviceCounters) -> Step {
        let Ok(moved) = usize::try_from(result) else {
            return self.on_errno(-result, counters);
        };
        let (len, read) = match &self.op {
            Op::Sync { .. } => {
                counters.syncs.add(1);
                return Step::Done(Ok(()));
            }
            op => (op.len(), op.is_read()),
        };
        let now = self.done + moved;
        if now > len {
            return self.fail(io::Error::other("the kernel reports more bytes than were requested"), counters);
        }
        if read { &counters.read_bytes } else { &counters.write_bytes }.add(now.saturating_sub(self.reached) as u64);
        if now == len {
            if read { &counters.reads } else { &counters.writes }.add(1);
            return Step::Done(Ok(()));
        }
        counters.short_completions.add(1);
        if planted!(ShortAccepted) {
            return Step::Done(Ok(()));
        }
        coverage!(Continued);
        if now <= self.reached {
            let (kind, text) = match read {
                true => (io::ErrorKind::UnexpectedEof, format!("the file ends after {now} bytes of this read")),
                false => (io::ErrorKind::WriteZero, format!("the system took only {now} bytes")),
            };
            return self.fail(io::Error::new(kind, text), counters);
        }
        self.reached = now;
        // A direct file needs aligned offsets. The rest begins at the last whole page, so a few bytes move twice.
        self.done = if self.op.file().is_direct() { now - now % PAGE_BYTES } else { now };
        Step::Continue
    }

    fn on_errno(&mut self, errno: i32, counters: &DeviceCounters) -> Step {
        let passing = [Errno::INTR, Errno::AGAIN].iter().any(|e| e.raw_os_error() == errno);
        if passing && self.retries < RETRIES_MAX && !matches!(self.op, Op::Sync { .. }) {
            counters.retries.add(1);
            let pause = Duration::from_micros(100 << self.retries);
            self.retries += 1;
            return Step::Later(Instant::now() + pause);
        }
        self.fail(io::Error::from_raw_os_error(errno), counters)
    }

    fn fail(&self, source: io::Error, counters: &DeviceCounters) -> Step {
        let kind = match self.op {
            Op::Read { .. } => OpKind::Read,
            Op::Write { .. } => OpKind::Write,
            Op::Sync { .. } => OpKind::Sync,
        };
        let error = Error::io(self.op.describe(), source);
        counters.failed(kind, error.kind() == ErrorKind::NoSpace);
        event!(warn, error = error, "an operation of a device failed");
        Step::Done(Err(error))
    }
}

/// Access to an operation for a driver that makes no system calls.
#[cfg(feature = "sim")]
impl InFlight {
    /// Returns file offset and length of what is left, or none for a sync.
    pub(crate) fn rest_range(&self) -> Option<(u64, usize)> {
        self.rest().map(|(offset, memory)| (offset, memory.len))
    }

    /// Returns file offset and bytes of what a write has left, or none for other operations.
    pub(crate) fn unwritten(&self) -> Option<(u64, &[u8])> {
        let (offset, _) = self.rest()?;
        self.op.write_bytes().map(|bytes| (offset, &bytes[self.done..]))
    }

    /// Copies bytes to the beginning of what a read has left, up to its end.
    pub(crate) fn fill(&mut self, bytes: &[u8]) {
        let Op::Read { into, .. } = &self.op else { return };
        let memory = into.memory();
        let len = bytes.len().min(memory.len - self.done);
        // SAFETY: the read target inside is the permission to write into these bytes, of which `len` are left from
        // `done` on. The source is other memory, because no slice over the target's memory exists while the target
        // lives.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.address.as_ptr().add(self.done), len) };
    }
}
