//! Driver `glommio`, for hosts that run glommio. Its files read into buffers of their own, so each read is copied once.

use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use glommio::io::{BufferedFile, DmaFile, ReadResult};
use glommio::{GlommioError, LocalExecutor, LocalExecutorBuilder, Placement, PoolPlacement};

use super::{DEPTH, OnRuntime, Runtime};
use crate::error::Result;
use crate::io::driver::interface::Driver;
use crate::io::driver::progress::InFlight;
use crate::io::file::device_file::DeviceFile;

/// Bytes of the executor's own buffers that it registers. It allocates more when needed.
const BUFFER_BYTES: usize = 16 << 20;
/// Threads that write and sync for all devices of the executor.
const BLOCKING: usize = 4;

/// The runtime.
struct Glommio(LocalExecutor);

/// An open file. It uses O_DIRECT if the file of the store does.
pub(super) enum GlommioFile {
    Direct(DmaFile),
    Buffered(BufferedFile),
}

fn io_error(e: GlommioError<()>) -> io::Error {
    match e {
        GlommioError::IoError(source) | GlommioError::EnhancedIoError { source, .. } => source,
        other => other.into(),
    }
}

/// Starts an executor on the calling thread.
///
/// # Errors
/// glommio's error: the kernel refuses a ring, or less than the 512 KiB that glommio needs may be locked.
pub(crate) fn start() -> io::Result<Box<dyn Driver>> {
    let builder = LocalExecutorBuilder::new(Placement::Unbound).io_memory(BUFFER_BYTES).ring_depth(DEPTH);
    let builder = builder.blocking_thread_pool_placement(PoolPlacement::Unbound(BLOCKING));
    let executor = builder.make().map_err(io_error)?;
    let note = format!("glommio reads into memory of its own ({} MiB outside the memory limit)", BUFFER_BYTES >> 20);
    Ok(Box::new(OnRuntime::new(Glommio(executor), vec![note])))
}

impl Runtime for Glommio {
    const NAME: &'static str = "glommio";
    type File = GlommioFile;

    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.0.run(future)
    }

    fn spawn(task: impl Future<Output = ()> + 'static) {
        glommio::spawn_local(task).detach();
    }

    fn spawn_blocking(work: impl FnOnce() -> Result<()> + Send + 'static) -> impl Future<Output = Result<()>> {
        glommio::executor().spawn_blocking(work)
    }

    async fn sleep(duration: Duration) {
        glommio::timer::sleep(duration).await;
    }

    async fn open(file: &DeviceFile) -> io::Result<GlommioFile> {
        // glommio opens files only by path. This path follows the descriptor, also of an unlinked file.
        let path = format!("/proc/self/fd/{}", file.fd().as_raw_fd());
        match file.is_direct() {
            true => DmaFile::open(path).await.map(GlommioFile::Direct),
            false => BufferedFile::open(path).await.map(GlommioFile::Buffered),
        }
        .map_err(io_error)
    }

    async fn read(file: &GlommioFile, flight: InFlight) -> (io::Result<usize>, InFlight) {
        let Some((offset, len)) = flight.rest().map(|(offset, memory)| (offset, memory.len)) else {
            return (Err(io::ErrorKind::InvalidInput.into()), flight);
        };
        let read = match file {
            GlommioFile::Direct(file) => file.read_at(offset, len).await,
            GlommioFile::Buffered(file) => file.read_at(offset, len).await,
        };
        let moved = read.map(|bytes| copy(&bytes, &flight)).map_err(io_error);
        (moved, flight)
    }
}

/// Copies bytes into what is left of the read. Returns how many.
fn copy(bytes: &ReadResult, flight: &InFlight) -> usize {
    let Some((_, memory)) = flight.rest() else { return 0 };
    let len = bytes.len().min(memory.len);
    // SAFETY: the read target inside the flight is the permission to write into these bytes. There are at least `len`
    // of them, and glommio's buffer does not overlap them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.address.as_ptr(), len) };
    len
}
