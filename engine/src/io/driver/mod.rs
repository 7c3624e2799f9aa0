//! Drivers: they move bytes between files and memory.
//!
//! | Driver | File | When |
//! |---|---|---|
//! | io_uring | [`uring`] | the default |
//! | threads with pread and pwrite | [`posix`] | io_uring is absent or forbidden, or the options ask for it |
//! | glommio, tokio-uring | `runtimes` | the host runs that runtime, with the feature of that name |
//!
//! All drivers implement [`interface::Driver`] and judge raw results by [`progress::InFlight`]. [`blocking`] executes
//! single operations on the calling thread. The callers are the shards and thread rings of the scheduler.

pub(crate) mod blocking;
pub(crate) mod interface;
pub(crate) mod posix;
pub(crate) mod progress;
mod registered;
#[cfg(any(feature = "glommio", feature = "tokio-uring"))]
mod runtimes;
pub(crate) mod uring;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use interface::Driver;
use posix::Posix;
use uring::Uring;

/// The driver to start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DriverKind {
    /// io_uring. If it is absent or forbidden, threads, with a note that says why.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads that call pread and pwrite.
    Posix,
    /// glommio or an error.
    #[cfg(feature = "glommio")]
    Glommio,
    /// tokio-uring or an error.
    #[cfg(feature = "tokio-uring")]
    TokioUring,
}

/// Starts a driver on the calling thread, which is the only one that may use it.
///
/// # Errors
/// [`ErrorKind::Configuration`]: the system refuses the requested driver.
pub(in crate::io) fn start_driver(kind: DriverKind, arena: &Arena) -> Result<Box<dyn Driver>> {
    let refused = |what: &str, e: std::io::Error| {
        Error::io(format!("open: driver {what} cannot start: {}", remedy(&e)), e).with_kind(ErrorKind::Configuration)
    };
    match kind {
        DriverKind::Posix => Ok(Box::new(Posix::start(Vec::new()))),
        #[cfg(feature = "glommio")]
        DriverKind::Glommio => runtimes::glommio::start().map_err(|e| refused("glommio", e)),
        #[cfg(feature = "tokio-uring")]
        DriverKind::TokioUring => runtimes::tokio_uring::start().map_err(|e| refused("tokio-uring", e)),
        DriverKind::Uring | DriverKind::Auto => match Uring::start(arena) {
            Ok(driver) => Ok(Box::new(driver)),
            Err(e) if kind == DriverKind::Uring => Err(refused("io_uring", e)),
            Err(e) => Ok(Box::new(Posix::start(vec![format!(
                "io_uring cannot be used ({e}), so threads read with more CPU time per read: {}",
                remedy(&e)
            )]))),
        },
    }
}

/// Returns what helps if the kernel refuses a ring with this error.
fn remedy(e: &std::io::Error) -> &'static str {
    match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "sysctl kernel.io_uring_disabled or a seccomp profile, such as a container's, forbids it; allow it there"
        }
        Some(libc::ENOSYS) => "the kernel has no io_uring; use Linux 5.11 or later",
        Some(libc::ENOMEM) => "the limit of locked memory is too low; raise it (ulimit -l)",
        Some(libc::EMFILE | libc::ENFILE) => "too many files are open; raise the limit (ulimit -n)",
        _ => "use Linux 5.11 or later",
    }
}
