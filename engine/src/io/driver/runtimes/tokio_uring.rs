//! Driver `tokio-uring`, for hosts that run tokio-uring. Reads fill the arena in place.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio_uring::buf::{IoBuf, IoBufMut};
use tokio_uring::fs::File;

use super::{DEPTH, OnRuntime, Runtime};
use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::Driver;
use crate::io::driver::progress::InFlight;
use crate::io::file::device_file::DeviceFile;

/// The runtime.
struct TokioUring(tokio_uring::Runtime);

/// Starts the runtime on the calling thread.
///
/// # Errors
/// The kernel refuses a ring.
pub(crate) fn start() -> io::Result<Box<dyn Driver>> {
    let runtime = tokio_uring::Runtime::new(tokio_uring::builder().entries(DEPTH as u32))?;
    Ok(Box::new(OnRuntime::new(TokioUring(runtime), Vec::new())))
}

/// A read in flight, as the runtime's buffer.
struct RuntimeBuffer(InFlight);

impl RuntimeBuffer {
    /// Returns address and length of what is left to read. A read in flight always has bytes left.
    fn rest(&self) -> (*mut u8, usize) {
        self.0.rest().map_or((std::ptr::NonNull::dangling().as_ptr(), 0), |(_, m)| (m.address.as_ptr(), m.len))
    }
}

// SAFETY: the read target inside keeps the memory of its lease in flight, and a move of the target does not move that
// memory. The rest of the read changes only in `InFlight::on_result`, which needs the flight back from the runtime.
unsafe impl IoBuf for RuntimeBuffer {
    fn stable_ptr(&self) -> *const u8 {
        self.rest().0
    }

    fn bytes_init(&self) -> usize {
        0
    }

    fn bytes_total(&self) -> usize {
        self.rest().1
    }
}

// SAFETY: as above. The read target is the permission to write into these bytes.
unsafe impl IoBufMut for RuntimeBuffer {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.rest().0
    }

    // SAFETY: (of the caller) the number is not used, because arena memory is always initialised.
    unsafe fn set_init(&mut self, _: usize) {}
}

impl Runtime for TokioUring {
    const NAME: &'static str = "tokio-uring";
    type File = File;

    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.0.block_on(future)
    }

    fn spawn(task: impl Future<Output = ()> + 'static) {
        // The task continues after its handle is dropped.
        drop(tokio_uring::spawn(task));
    }

    async fn spawn_blocking(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let ended = tokio::task::spawn_blocking(work).await;
        ended.unwrap_or_else(|e| {
            Err(Error::new(ErrorKind::Io, format!("I/O request: a thread of tokio's pool failed: {e}")))
        })
    }

    fn sleep(duration: Duration) -> impl Future<Output = ()> {
        tokio::time::sleep(duration)
    }

    async fn open(file: &DeviceFile) -> io::Result<File> {
        Ok(File::from_std(file.fd().try_clone_to_owned()?.into()))
    }

    async fn read(file: &File, flight: InFlight) -> (io::Result<usize>, InFlight) {
        let offset = flight.rest().map_or(0, |(offset, _)| offset);
        let (moved, target) = file.read_at(RuntimeBuffer(flight), offset).await;
        (moved, target.0)
    }
}
