//! One thread per device: it owns the device's ring and moves the batches that other threads hand to it.

mod batch;
mod inbox;
#[cfg(feature = "sim")]
mod inline;
mod lane;
mod run;

#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::{JoinHandle, ThreadId};

use rustix::thread::{CpuSet, Pid};

pub(crate) use batch::{Batch, Priority, Request, Sink, Waiter};
pub(crate) use lane::{LaneBatch, Lanes};

use crate::device::arena::Arena;
use crate::device::directory::Directory;
use crate::device::driver::{Driver, DriverKind, DriverStatus, Op};
use crate::device::file::Poison;
use crate::device::here;
use crate::device::posix::Posix;
#[cfg(any(feature = "glommio", feature = "tokio-uring"))]
use crate::device::runtimes;
#[cfg(feature = "sim")]
use crate::device::sim::SimDriver;
use crate::device::uring::Uring;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{DeviceCounters, lock};

/// A running shard. Dropping it closes it.
pub(crate) struct ShardHandle {
    inbox: Arc<inbox::Inbox>,
    status: Arc<Mutex<DriverStatus>>,
    counters: Arc<DeviceCounters>,
    /// Demand reads that callers drive themselves.
    beside: Arc<AtomicUsize>,
    uring: bool,
    poison: Arc<Poison>,
    /// Held around syncs: two of one file at a time could share one error.
    syncs: Mutex<()>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: ThreadId,
    /// The kernel's number of the thread.
    kernel_id: Option<Pid>,
    #[cfg(feature = "sim")]
    inline: Option<inline::Inline>,
}

impl ShardHandle {
    /// Starts the thread of one device, with its driver. The directory's lock stays held at least until the last write ended.
    ///
    /// # Errors
    /// `Configuration`: the driver asked for cannot run here.
    pub(crate) fn spawn(
        name: &str,
        kind: DriverKind,
        dir: Arc<dyn Directory>,
        arena: Arena,
        counters: Arc<DeviceCounters>,
    ) -> Result<Self> {
        #[cfg(feature = "sim")]
        if dir.is_simulated() {
            return Ok(Self::simulated(&dir, counters));
        }
        let inbox = Arc::new(inbox::Inbox::new());
        let status = Arc::new(Mutex::new(DriverStatus::default()));
        let (report, started) = mpsc::channel();
        let beside = Arc::<AtomicUsize>::default();
        let (kept, poison) = (Arc::clone(&counters), Arc::clone(dir.poison()));
        let main = {
            let (inbox, status, name) = (Arc::clone(&inbox), Arc::clone(&status), name.to_owned());
            let beside = Arc::clone(&beside);
            move || {
                let _burial = Burial(Arc::clone(&inbox));
                // The ring belongs to the thread that made it.
                match start_driver(&name, kind, &*dir, &arena, &counters) {
                    Ok(driver) => {
                        let poison = Arc::clone(dir.poison());
                        let shard = run::Shard::new(driver, inbox, poison, status, counters).beside(beside);
                        let _ = report.send(Ok(rustix::thread::gettid()));
                        shard.run();
                    }
                    Err(e) => {
                        let _ = report.send(Err(e));
                    }
                }
                drop(arena);
                // Last, with the lock.
                drop(dir);
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(main);
        let thread = thread.map_err(|e| Error::io(format!("start the thread of device {name}"), e))?;
        let thread_id = thread.thread().id();
        let started = started.recv();
        let uring = lock(&status).name == Uring::NAME;
        match started {
            Ok(Ok(kernel_id)) => Ok(Self {
                kernel_id: Some(kernel_id),
                inbox,
                uring,
                poison,
                syncs: Mutex::default(),
                status,
                counters: kept,
                beside,
                thread: Mutex::new(Some(thread)),
                thread_id,
                #[cfg(feature = "sim")]
                inline: None,
            }),
            Ok(Err(e)) => {
                let _ = thread.join();
                Err(e)
            }
            Err(_) => Err(Error::new(ErrorKind::Io, format!("the thread of device {name} ended at its start"))),
        }
    }

    /// A shard without a thread of its own.
    #[cfg(feature = "sim")]
    fn simulated(dir: &Arc<dyn Directory>, counters: Arc<DeviceCounters>) -> Self {
        let inbox = Arc::new(inbox::Inbox::new());
        let status = Arc::new(Mutex::new(DriverStatus::default()));
        let driver = Box::new(SimDriver::new(Arc::clone(&counters)));
        let poison = Arc::clone(dir.poison());
        let kept = Arc::clone(&counters);
        let shard = run::Shard::new(driver, Arc::clone(&inbox), Arc::clone(&poison), Arc::clone(&status), counters);
        Self {
            inbox,
            status,
            counters: kept,
            beside: Arc::default(),
            uring: false,
            poison,
            syncs: Mutex::default(),
            thread: Mutex::default(),
            thread_id: std::thread::current().id(),
            kernel_id: None,
            inline: Some(inline::Inline::new(shard)),
        }
    }

    /// Hands a batch over. Its outcomes, that of a closed shard included, go to its sink, possibly before this returns.
    ///
    /// # Errors
    /// The batch itself, untouched, when the inbox is full.
    #[allow(dead_code, reason = "tests; for callers that must not block")]
    pub(crate) fn submit(&self, batch: Batch) -> Result<(), Batch> {
        let pushed = self.inbox.push(batch::Accepted::new(batch)).map_err(batch::Accepted::into_batch);
        self.submitted();
        pushed
    }

    /// The same, but waits for room. Not from a sink.
    pub(crate) fn submit_wait(&self, batch: Batch) {
        self.inbox.push_wait(batch::Accepted::new(batch));
        self.submitted();
    }

    #[inline]
    fn submitted(&self) {
        #[cfg(feature = "sim")]
        if let Some(inline) = &self.inline {
            inline.submitted();
        }
    }

    /// Submits requests and waits for all of them; the first error. Not from a sink.
    pub(crate) fn run(&self, requests: Vec<Request>, priority: Priority) -> Result<()> {
        let waiter = Waiter::new(requests.len());
        self.submit_wait(Batch { requests, priority, sink: Arc::clone(&waiter) as Arc<dyn Sink>, cancel: None });
        waiter.wait()
    }

    /// Executes a write or sync on the calling thread, which would only wait for the shard's: two thread hops less. A sync that
    /// fails poisons the device. Syncs hold [`Self::lock_syncs`].
    ///
    /// # Errors
    /// Its failure, or `Poisoned`.
    pub(crate) fn run_here(&self, op: Op) -> Result<()> {
        if self.is_simulated() {
            return self.run(vec![Request { op, tag: 0 }], Priority::Write);
        }
        self.poison.check()?;
        let is_sync = matches!(op, Op::Sync { .. });
        let outcome = here::execute(op, &self.counters);
        match &outcome {
            Ok(()) if is_sync => self.poison.check(),
            Err(e) if is_sync => {
                self.poison.set(e);
                outcome
            }
            _ => outcome,
        }
    }

    /// Executes writes on the calling thread, neighbours as one.
    ///
    /// # Errors
    /// The first failure, or `Poisoned`.
    pub(crate) fn write_here(&self, requests: Vec<Request>) -> Result<()> {
        if self.is_simulated() {
            return self.run(requests, Priority::Write);
        }
        self.poison.check()?;
        here::write_all(requests.into_iter().map(|request| request.op).collect(), &self.counters)
    }

    /// To be held while files of this device are synced, on whichever thread.
    pub(crate) fn lock_syncs(&self) -> MutexGuard<'_, ()> {
        lock(&self.syncs)
    }

    fn is_simulated(&self) -> bool {
        #[cfg(feature = "sim")]
        return self.inline.is_some();
        #[cfg(not(feature = "sim"))]
        false
    }

    /// Lets its thread run on one CPU only. Nothing without a thread.
    ///
    /// # Errors
    /// `Configuration`: no such CPU, or none that this process may use.
    pub(crate) fn pin(&self, cpu: usize) -> Result<()> {
        let Some(thread) = self.kernel_id else { return Ok(()) };
        let refused = |why: String| {
            Error::new(ErrorKind::Configuration, format!("a device's thread cannot be kept on CPU {cpu}: {why}"))
        };
        if cpu >= CpuSet::MAX_CPU {
            return Err(refused(format!("CPUs are numbered below {}", CpuSet::MAX_CPU)));
        }
        let mut cpus = CpuSet::new();
        cpus.set(cpu);
        rustix::thread::sched_setaffinity(Some(thread), &cpus).map_err(|e| refused(e.to_string()))
    }

    /// Makes the shard look around: after [`Arena::trim`] or after files were closed, so that it lets go of them too.
    pub(crate) fn nudge(&self) {
        self.inbox.nudge();
    }

    /// Whether its device is read through io_uring, so that callers may drive reads themselves.
    pub(super) fn drives_uring(&self) -> bool {
        self.uring
    }

    pub(super) fn counters(&self) -> &Arc<DeviceCounters> {
        &self.counters
    }

    pub(super) fn beside(&self) -> &AtomicUsize {
        &self.beside
    }

    /// The driver in use, and what it has to do without.
    pub(crate) fn status(&self) -> DriverStatus {
        lock(&self.status).clone()
    }

    /// Takes no more batches, executes those accepted, and ends the thread. A second call does nothing.
    pub(crate) fn close(&self) {
        self.inbox.close();
        #[cfg(feature = "sim")]
        if let Some(inline) = &self.inline {
            return inline.close();
        }
        // A sink may hold the last handle; its own thread cannot wait for itself.
        if std::thread::current().id() != self.thread_id
            && let Some(thread) = lock(&self.thread).take()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.close();
    }
}

/// Completes what is left when the thread ends, by a panic too.
struct Burial(Arc<inbox::Inbox>);

impl Drop for Burial {
    fn drop(&mut self) {
        self.0.bury();
    }
}

fn start_driver(
    name: &str,
    kind: DriverKind,
    dir: &dyn Directory,
    arena: &Arena,
    counters: &Arc<DeviceCounters>,
) -> Result<Box<dyn Driver>> {
    let posix = |notes| Posix::start(name, Arc::clone(counters), notes).map(|d| Box::new(d) as Box<dyn Driver>);
    let refused = |what: &str, e: std::io::Error| {
        Error::io(format!("{what} cannot be used: {}", remedy(&e)), e).with_kind(ErrorKind::Configuration)
    };
    match kind {
        DriverKind::Posix => posix(Vec::new()),
        #[cfg(feature = "glommio")]
        DriverKind::Glommio => runtimes::glommio::start(Arc::clone(counters)).map_err(|e| refused("glommio", e)),
        #[cfg(feature = "tokio-uring")]
        DriverKind::TokioUring => {
            runtimes::tokio_uring::start(Arc::clone(counters)).map_err(|e| refused("tokio-uring", e))
        }
        DriverKind::Uring | DriverKind::Auto => match Uring::start(dir, arena, Arc::clone(counters)) {
            Ok(driver) => Ok(Box::new(driver)),
            Err(e) if kind == DriverKind::Uring => Err(refused("io_uring", e)),
            Err(e) => posix(vec![format!(
                "io_uring cannot be used ({e}), threads read instead, at more CPU per read: {}",
                remedy(&e)
            )]),
        },
    }
}

fn remedy(e: &std::io::Error) -> &'static str {
    match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "it is forbidden by sysctl kernel.io_uring_disabled or by a seccomp profile (a container's, for example); allow it there"
        }
        Some(libc::ENOSYS) => "the kernel has none; it takes Linux 5.11 or later",
        Some(libc::ENOMEM) => "the limit of locked memory is too low; raise it (ulimit -l)",
        Some(libc::EMFILE | libc::ENFILE) => "too many open files; raise the limit (ulimit -n)",
        _ => "it takes Linux 5.11 or later",
    }
}
