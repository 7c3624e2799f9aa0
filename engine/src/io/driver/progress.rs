//! An operation on its way: what a raw result means and whether to go on. The same for every driver.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{IoMemory, PAGE_BYTES};
use crate::io::coverage;
use crate::io::driver::interface::Op;
use crate::io::planted;
use crate::metrics::{DeviceCounters, OpKind};

/// EINTR and EAGAIN are retried this often, the pauses doubling from 100 microseconds: about 3 seconds in all.
const RETRIES_MAX: u32 = 15;

/// What to do after a raw result.
pub(in crate::io) enum Step {
    /// It ended.
    Done(Result<()>),
    /// Submit the rest now.
    CopyRetry,
    /// Submit the rest from this moment on.
    Later(Instant),
}

/// An operation with how far it has come.
pub(in crate::io) struct InFlight {
    op: Op,
    /// Bytes that need not be asked for again.
    done: usize,
    /// The furthest byte ever reached; a continuation that does not pass it has met the end of the file.
    reached: usize,
    retries: u32,
}

impl InFlight {
    pub(in crate::io) fn new(op: Op) -> Self {
        Self { op, done: 0, reached: 0, retries: 0 }
    }

    pub(in crate::io) fn op(&self) -> &Op {
        &self.op
    }

    /// File offset and memory of what is left; none for a sync.
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

    /// Judges a raw result: bytes moved, or a negative error number.
    pub(in crate::io) fn on_result(&mut self, result: i32, counters: &DeviceCounters) -> Step {
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
            return self.fail(io::Error::other("the kernel reports more bytes than were asked for"), counters);
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
                true => (io::ErrorKind::UnexpectedEof, format!("the file ends after {now} bytes of these")),
                false => (io::ErrorKind::WriteZero, format!("no more than {now} bytes were taken")),
            };
            return self.fail(io::Error::new(kind, text), counters);
        }
        self.reached = now;
        // A direct file takes no odd offsets: go on from the last whole page, moving a few bytes twice.
        self.done = if self.op.file().is_direct() { now - now % PAGE_BYTES } else { now };
        Step::CopyRetry
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
        Step::Done(Err(error))
    }
}
