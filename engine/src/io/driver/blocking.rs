//! Blocking operations on the calling thread. They save a caller the wait for another thread that would make the same
//! call.

use std::io::IoSlice;

use crate::error::Result;
use crate::io::driver::interface::Op;
use crate::io::driver::posix;
use crate::io::driver::progress::InFlight;
use crate::metrics::DeviceCounters;

/// The most buffers of one vectored write: the kernel's limit (UIO_MAXIOV).
const VECTOR_MAX: usize = 1024;

/// Executes one operation.
///
/// # Errors
/// The failure of the operation.
pub(crate) fn execute(op: Op, counters: &DeviceCounters) -> Result<()> {
    posix::run(InFlight::new(op), counters)
}

/// Executes writes in order. Writes that continue each other in one file become one system call.
///
/// # Errors
/// The first failure. Later writes have not begun then.
pub(crate) fn write_all(ops: Vec<Op>, counters: &DeviceCounters) -> Result<()> {
    let mut ops = ops.into_iter().peekable();
    let mut run: Vec<Op> = Vec::new();
    while let Some(op) = ops.next() {
        let end = end_of(&op);
        let continues = ops.peek().is_some_and(|next| start_of(next) == end && end.is_some());
        run.push(op);
        if !continues || run.len() == VECTOR_MAX {
            write_run(std::mem::take(&mut run), counters)?;
        }
    }
    Ok(())
}

fn start_of(op: &Op) -> Option<(u64, u64)> {
    match op {
        Op::Write { file, offset, .. } => Some((file.id(), *offset)),
        Op::Read { .. } | Op::Sync { .. } => None,
    }
}

fn end_of(op: &Op) -> Option<(u64, u64)> {
    start_of(op).map(|(file, offset)| (file, offset + op.len() as u64))
}

/// Writes a run of adjacent operations with one vectored write. Executes the operations that it did not complete one
/// by one, which retries them and describes their errors.
fn write_run(run: Vec<Op>, counters: &DeviceCounters) -> Result<()> {
    let mut written = 0;
    if run.len() > 1
        && let Some(Op::Write { file, offset, .. }) = run.first()
    {
        let slices: Vec<IoSlice<'_>> = run.iter().filter_map(Op::write_bytes).map(IoSlice::new).collect();
        counters.submissions.add(1);
        // A write that fails here fails again below, where the error is described.
        written = rustix::io::pwritev(file.fd(), &slices, *offset).unwrap_or(0);
    }
    for op in run {
        let len = op.len();
        if written >= len {
            written -= len;
            counters.writes.add(1);
            counters.write_bytes.add(len as u64);
        } else {
            written = 0;
            execute(op, counters)?;
        }
    }
    Ok(())
}
