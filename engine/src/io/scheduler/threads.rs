//! ShardThreads of shards, and which devices each of them serves.

use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{JoinHandle, ThreadId};

use super::ShardHandle;
use super::affinity::Affinity;
use super::device_queue::DeviceHandle;
use super::inbox::Inbox;
use super::registration_queue::RegistrationQueue;
use super::run::Shard;
#[cfg(feature = "sim")]
use super::simulated::SimulatedShard;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use crate::io::driver::interface::{Driver, DriverKind};
use crate::io::driver::posix::Posix;
#[cfg(any(feature = "glommio", feature = "tokio-uring"))]
use crate::io::driver::runtimes;
use crate::io::driver::uring::Uring;
use crate::io::file::directory::Directory;
use crate::metrics::{DeviceCounters, lock};
use crate::sync::wait_for;

/// The threads of a store's devices, those that join later too.
pub(crate) struct ShardThreads {
    kind: DriverKind,
    arena: Arena,
    affinity: Affinity,
    /// As many as there may be; none: one per device.
    most: Option<usize>,
    running: Mutex<Vec<Weak<ShardThread>>>,
    #[cfg(feature = "sim")]
    inline: Mutex<Vec<u64>>,
}

impl ShardThreads {
    pub(crate) fn new(kind: DriverKind, arena: Arena, most: Option<usize>, affinity: Affinity) -> Self {
        let running = Mutex::default();
        Self {
            kind,
            arena,
            affinity,
            most,
            running,
            #[cfg(feature = "sim")]
            inline: Mutex::default(),
        }
    }

    /// Serves a device: on a thread of its own while there may be another one, else on that which serves the fewest. The directory's
    /// lock stays held at least until the last write ended.
    ///
    /// # Errors
    /// `Configuration`: the driver asked for cannot run here, or the thread not where it is to be kept.
    pub(crate) fn serve(
        &self,
        name: &str,
        dir: Arc<dyn Directory>,
        counters: Arc<DeviceCounters>,
    ) -> Result<ShardHandle> {
        let handle = DeviceHandle::new(Arc::clone(dir.poison()), counters);
        #[cfg(feature = "sim")]
        if dir.is_simulated() {
            return self.simulate(handle);
        }
        let end = Arc::<Termination>::default();
        let (report, served) = mpsc::channel();
        let completion_guard = CompletionGuard { inbox: Arc::clone(&handle.inbox), end: Arc::clone(&end) };
        let thread =
            self.admit(Registration { name: name.to_owned(), dir, handle: handle.clone(), completion_guard, report })?;
        let ended = |_| Err(Error::new(ErrorKind::Io, format!("the thread of device {name} ended at its start")));
        served.recv().unwrap_or_else(ended)?;
        Ok(ShardHandle::of(handle, end, thread))
    }

    /// Likewise for a simulated device, by shards without threads.
    #[cfg(feature = "sim")]
    fn simulate(&self, handle: DeviceHandle) -> Result<ShardHandle> {
        let mut shards = lock(&self.inline);
        shards.retain(|shard| SimulatedShard::count(*shard).is_some());
        let least = shards.iter().copied().min_by_key(|shard| (SimulatedShard::count(*shard), *shard));
        let inline = match least.filter(|_| self.most.is_some_and(|most| shards.len() >= most)) {
            Some(shard) => SimulatedShard::join(shard, handle.clone())?,
            None => SimulatedShard::new(handle.clone())?,
        };
        if !shards.contains(&inline.shard) {
            shards.push(inline.shard);
        }
        Ok(ShardHandle::simulated(handle, inline))
    }

    /// The thread that will serve a device.
    fn admit(&self, registration: Registration) -> Result<Arc<ShardThread>> {
        let mut running = lock(&self.running);
        let threads: Vec<_> = running.iter().filter_map(Weak::upgrade).filter(|t| !t.registrations.is_shut()).collect();
        let is_full = self.most.is_some_and(|most| threads.len() >= most);
        // Each device has one.
        let least = threads.iter().min_by_key(|thread| (Arc::strong_count(thread), thread.number));
        let entered = match least.filter(|_| is_full) {
            Some(thread) => thread.registrations.enter(registration).map(|()| Arc::clone(thread)),
            None => Err(registration),
        };
        match entered {
            Ok(thread) => Ok(thread),
            // Another one, perhaps in place of one that has just ended.
            Err(registration) => {
                let number = (0..).find(|number| threads.iter().all(|t| t.number != *number)).unwrap_or_default();
                let thread = self.start(number, registration)?;
                running.retain(|thread| thread.strong_count() > 0);
                running.push(Arc::downgrade(&thread));
                Ok(thread)
            }
        }
    }

    /// A thread with its first device.
    fn start(&self, number: usize, first: Registration) -> Result<Arc<ShardThread>> {
        let name = first.name.clone();
        let registrations = Arc::new(RegistrationQueue::new());
        let _ = registrations.enter(first);
        let main = {
            let (registrations, kind, arena, affinity) =
                (Arc::clone(&registrations), self.kind, self.arena.clone(), self.affinity.clone());
            move || {
                let _closing = DrainOnDrop(Arc::clone(&registrations));
                // The ring belongs to the thread that made it.
                match affinity.keep(number).and_then(|()| start_driver(kind, &arena)) {
                    Ok(driver) => Shard::new(driver, registrations).run(),
                    Err(e) => {
                        for Registration { dir, completion_guard, report, .. } in registrations.turn_away() {
                            drop((dir, completion_guard));
                            let _ = report.send(Err(e.duplicate()));
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.clone()).spawn(main);
        let thread = thread.map_err(|e| Error::io(format!("start the thread of device {name}"), e))?;
        let id = thread.thread().id();
        Ok(Arc::new(ShardThread { number, registrations, id, thread: Mutex::new(Some(thread)) }))
    }
}

/// A thread that serves devices. It ends with the last of them.
pub(super) struct ShardThread {
    /// The lowest that no other one of the store has.
    number: usize,
    registrations: Arc<RegistrationQueue<Registration>>,
    id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl ShardThread {
    pub(super) fn is_current(&self) -> bool {
        std::thread::current().id() == self.id
    }

    /// Waits for its end if its last device has gone.
    pub(super) fn join_if_ending(&self) {
        if self.registrations.is_shut() {
            self.join();
        }
    }

    fn join(&self) {
        // A sink may hold the last handle; the thread cannot wait for itself.
        if !self.is_current()
            && let Some(thread) = lock(&self.thread).take()
        {
            let _ = thread.join();
        }
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> ThreadId {
        self.id
    }
}

impl Drop for ShardThread {
    fn drop(&mut self) {
        self.join();
    }
}

/// A device that waits to be served.
pub(super) struct Registration {
    pub(super) name: String,
    pub(super) dir: Arc<dyn Directory>,
    pub(super) handle: DeviceHandle,
    pub(super) completion_guard: CompletionGuard,
    /// Told that it is served, or why not.
    pub(super) report: Sender<Result<()>>,
}

/// What a thread keeps for a device: the lock, then the word that it has gone.
pub(super) struct DeviceGuard {
    #[allow(dead_code, reason = "held, with the lock")]
    pub(super) dir: Arc<dyn Directory>,
    #[allow(dead_code, reason = "told by its drop")]
    pub(super) completion_guard: CompletionGuard,
}

/// Completes what is left when a device is served no more, by a panic too, and tells who waits for that.
pub(super) struct CompletionGuard {
    inbox: Arc<Inbox>,
    end: Arc<Termination>,
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        self.inbox.bury();
        *lock(&self.end.has_come) = true;
        self.end.told.notify_all();
    }
}

/// That a device is served no more, and its directory held no more.
#[derive(Default)]
pub(super) struct Termination {
    has_come: Mutex<bool>,
    told: Condvar,
}

impl Termination {
    pub(super) fn wait(&self) {
        let mut has_come = lock(&self.has_come);
        while !*has_come {
            has_come = wait_for(&self.told, has_come, None);
        }
    }
}

/// Turns away whoever comes to a thread that has ended, by a panic too.
struct DrainOnDrop(Arc<RegistrationQueue<Registration>>);

impl Drop for DrainOnDrop {
    fn drop(&mut self) {
        drop(self.0.turn_away());
    }
}

fn start_driver(kind: DriverKind, arena: &Arena) -> Result<Box<dyn Driver>> {
    let refused = |what: &str, e: std::io::Error| {
        Error::io(format!("{what} cannot be used: {}", remedy(&e)), e).with_kind(ErrorKind::Configuration)
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
                "io_uring cannot be used ({e}), threads read instead, at more CPU per read: {}",
                remedy(&e)
            )]))),
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
