//! Threads of shards, and which devices each of them serves.

use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{JoinHandle, ThreadId};

use super::ShardHandle;
use super::affinity::Affinity;
use super::device_queue::Link;
use super::inbox::Inbox;
use super::registration_queue::Door;
use super::run::Shard;
#[cfg(feature = "sim")]
use super::simulated::Inline;
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
pub(crate) struct Threads {
    kind: DriverKind,
    arena: Arena,
    affinity: Affinity,
    /// As many as there may be; none: one per device.
    most: Option<usize>,
    running: Mutex<Vec<Weak<ShardThread>>>,
    #[cfg(feature = "sim")]
    inline: Mutex<Vec<u64>>,
}

impl Threads {
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
        let link = Link::new(Arc::clone(dir.poison()), counters);
        #[cfg(feature = "sim")]
        if dir.is_simulated() {
            return self.simulate(link);
        }
        let end = Arc::<End>::default();
        let (report, served) = mpsc::channel();
        let burial = Burial { inbox: Arc::clone(&link.inbox), end: Arc::clone(&end) };
        let thread = self.admit(Joining { name: name.to_owned(), dir, link: link.clone(), burial, report })?;
        let ended = |_| Err(Error::new(ErrorKind::Io, format!("the thread of device {name} ended at its start")));
        served.recv().unwrap_or_else(ended)?;
        Ok(ShardHandle::of(link, end, thread))
    }

    /// Likewise for a simulated device, by shards without threads.
    #[cfg(feature = "sim")]
    fn simulate(&self, link: Link) -> Result<ShardHandle> {
        let mut shards = lock(&self.inline);
        shards.retain(|shard| Inline::count(*shard).is_some());
        let least = shards.iter().copied().min_by_key(|shard| (Inline::count(*shard), *shard));
        let inline = match least.filter(|_| self.most.is_some_and(|most| shards.len() >= most)) {
            Some(shard) => Inline::join(shard, link.clone())?,
            None => Inline::new(link.clone())?,
        };
        if !shards.contains(&inline.shard) {
            shards.push(inline.shard);
        }
        Ok(ShardHandle::simulated(link, inline))
    }

    /// The thread that will serve a device.
    fn admit(&self, joining: Joining) -> Result<Arc<ShardThread>> {
        let mut running = lock(&self.running);
        let threads: Vec<_> = running.iter().filter_map(Weak::upgrade).filter(|t| !t.door.is_shut()).collect();
        let is_full = self.most.is_some_and(|most| threads.len() >= most);
        // Each device has one.
        let least = threads.iter().min_by_key(|thread| (Arc::strong_count(thread), thread.number));
        let entered = match least.filter(|_| is_full) {
            Some(thread) => thread.door.enter(joining).map(|()| Arc::clone(thread)),
            None => Err(joining),
        };
        match entered {
            Ok(thread) => Ok(thread),
            // Another one, perhaps in place of one that has just ended.
            Err(joining) => {
                let number = (0..).find(|number| threads.iter().all(|t| t.number != *number)).unwrap_or_default();
                let thread = self.start(number, joining)?;
                running.retain(|thread| thread.strong_count() > 0);
                running.push(Arc::downgrade(&thread));
                Ok(thread)
            }
        }
    }

    /// A thread with its first device.
    fn start(&self, number: usize, first: Joining) -> Result<Arc<ShardThread>> {
        let name = first.name.clone();
        let door = Arc::new(Door::new());
        let _ = door.enter(first);
        let main = {
            let (door, kind, arena, affinity) =
                (Arc::clone(&door), self.kind, self.arena.clone(), self.affinity.clone());
            move || {
                let _closing = Closing(Arc::clone(&door));
                // The ring belongs to the thread that made it.
                match affinity.keep(number).and_then(|()| start_driver(kind, &arena)) {
                    Ok(driver) => Shard::new(driver, door).run(),
                    Err(e) => {
                        for Joining { dir, burial, report, .. } in door.turn_away() {
                            drop((dir, burial));
                            let _ = report.send(Err(e.duplicate()));
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.clone()).spawn(main);
        let thread = thread.map_err(|e| Error::io(format!("start the thread of device {name}"), e))?;
        let id = thread.thread().id();
        Ok(Arc::new(ShardThread { number, door, id, thread: Mutex::new(Some(thread)) }))
    }
}

/// A thread that serves devices. It ends with the last of them.
pub(super) struct ShardThread {
    /// The lowest that no other one of the store has.
    number: usize,
    door: Arc<Door<Joining>>,
    id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl ShardThread {
    pub(super) fn is_current(&self) -> bool {
        std::thread::current().id() == self.id
    }

    /// Waits for its end if its last device has gone.
    pub(super) fn join_if_ending(&self) {
        if self.door.is_shut() {
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
pub(super) struct Joining {
    pub(super) name: String,
    pub(super) dir: Arc<dyn Directory>,
    pub(super) link: Link,
    pub(super) burial: Burial,
    /// Told that it is served, or why not.
    pub(super) report: Sender<Result<()>>,
}

/// What a thread keeps for a device: the lock, then the word that it has gone.
pub(super) struct Kept {
    #[allow(dead_code, reason = "held, with the lock")]
    pub(super) dir: Arc<dyn Directory>,
    #[allow(dead_code, reason = "told by its drop")]
    pub(super) burial: Burial,
}

/// Completes what is left when a device is served no more, by a panic too, and tells who waits for that.
pub(super) struct Burial {
    inbox: Arc<Inbox>,
    end: Arc<End>,
}

impl Drop for Burial {
    fn drop(&mut self) {
        self.inbox.bury();
        *lock(&self.end.has_come) = true;
        self.end.told.notify_all();
    }
}

/// That a device is served no more, and its directory held no more.
#[derive(Default)]
pub(super) struct End {
    has_come: Mutex<bool>,
    told: Condvar,
}

impl End {
    pub(super) fn wait(&self) {
        let mut has_come = lock(&self.has_come);
        while !*has_come {
            has_come = wait_for(&self.told, has_come, None);
        }
    }
}

/// Turns away whoever comes to a thread that has ended, by a panic too.
struct Closing(Arc<Door<Joining>>);

impl Drop for Closing {
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
