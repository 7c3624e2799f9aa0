//! Driver `posix`: a small pool of threads per device that call pread, pwrite and fdatasync. For systems without
//! io_uring.
//!
//! How an operation runs:
//! 1. [`Driver::queue`] keeps it in the pool of its device.
//! 2. [`Driver::drive`] hands the queued operations of all pools to the workers and waits for completions.
//! 3. A worker executes the operation, with its retries, and pushes the completion to the queue of all devices.
//! 4. [`Driver::drive`] takes the completions.
//!
//! Invariants:
//! - A slow device delays only its own workers.
//! - A pool joins its workers when it is dropped, so no system call outlives the device.
//!
//! Lock order: a worker holds either the jobs of its device or the completion queue, never both.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::{Completion, DeviceTable, Driver, Op, ServedDevice, Wait, Wake};
use crate::io::driver::progress::{InFlight, Step};
use crate::io::signals::ignore_file_size_signal;
use crate::metrics::{DeviceCounters, lock};
use crate::sync::wait_for;

/// The most operations of a device in flight. They wait for a worker or run in one.
const DEPTH: usize = 256;
/// Worker threads of a device, each with one system call in flight.
pub(crate) const THREADS: usize = 12;

#[derive(Default)]
struct CompletedOps {
    done: Vec<Completion>,
    woken: bool,
    /// Number of completions that the driver's thread waits for.
    want: usize,
}

/// The completions of the workers of all devices.
#[derive(Default)]
struct CompletionQueue {
    state: Mutex<CompletedOps>,
    /// The driver's thread waits here for completions and wake-ups.
    news: Condvar,
}

impl Wake for CompletionQueue {
    fn wake(&self) {
        lock(&self.state).woken = true;
        self.news.notify_one();
    }
}

#[derive(Default)]
struct JobList {
    waiting: VecDeque<(u64, Op)>,
    stopping: bool,
}

/// The work of one device's workers.
struct DeviceJobs {
    jobs: Mutex<JobList>,
    /// Workers wait here for jobs.
    more: Condvar,
    counters: Arc<DeviceCounters>,
    shared: Arc<CompletionQueue>,
}

/// The workers of one device.
struct WorkerPool {
    work: Arc<DeviceJobs>,
    workers: Vec<JoinHandle<()>>,
    queued: Vec<(u64, Op)>,
}

impl WorkerPool {
    fn start(served: &ServedDevice<'_>, shared: &Arc<CompletionQueue>, notes: &mut Vec<String>) -> Result<Self> {
        let (counters, shared) = (Arc::clone(served.counters), Arc::clone(shared));
        let work = Arc::new(DeviceJobs { jobs: Mutex::default(), more: Condvar::new(), counters, shared });
        let mut pool = Self { work, workers: Vec::new(), queued: Vec::new() };
        let name = served.name;
        for i in 0..THREADS {
            let work = Arc::clone(&pool.work);
            let spawned = std::thread::Builder::new().name(format!("{name}-io{i}")).spawn(move || work.run());
            match spawned {
                Ok(worker) => pool.workers.push(worker),
                Err(e) if i == 0 => return Err(Error::io(format!("open: start an I/O thread of {name}"), e)),
                Err(e) => {
                    notes.push(format!("only {i} of {THREADS} I/O threads of {name} could be started ({e})"));
                    break;
                }
            }
        }
        Ok(pool)
    }

    /// Hands the queued operations to the workers.
    fn submit(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let one = self.queued.len() == 1;
        lock(&self.work.jobs).waiting.extend(self.queued.drain(..));
        if one { self.work.more.notify_one() } else { self.work.more.notify_all() }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        // Workers complete the operation they execute, whose memory stays alive. Waiting operations are dropped.
        {
            let mut jobs = lock(&self.work.jobs);
            jobs.stopping = true;
            jobs.waiting.clear();
        }
        self.work.more.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// The driver.
pub(crate) struct Posix {
    shared: Arc<CompletionQueue>,
    pools: DeviceTable<WorkerPool>,
    in_flight: usize,
    notes: Vec<String>,
}

impl Posix {
    /// Returns a driver without devices. `notes` say why it replaces another driver.
    pub(crate) fn start(notes: Vec<String>) -> Self {
        ignore_file_size_signal();
        Self { shared: Arc::default(), pools: DeviceTable::default(), in_flight: 0, notes }
    }
}

impl Driver for Posix {
    fn add(&mut self, device: usize, served: &ServedDevice<'_>) -> Result<()> {
        let pool = WorkerPool::start(served, &self.shared, &mut self.notes)?;
        self.pools.put(device, pool);
        Ok(())
    }

    fn remove(&mut self, device: usize) {
        drop(self.pools.take(device));
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn queue(&mut self, device: usize, id: u64, op: Op) {
        self.in_flight += 1;
        match self.pools.get_mut(device) {
            Some(pool) => pool.queued.push((id, op)),
            None => {
                debug_assert!(false, "an operation for a device that is not served");
                drop(op);
                let outcome = Err(Error::new(ErrorKind::Closed, "I/O request: the device was closed"));
                lock(&self.shared.state).done.push(Completion { id, outcome });
            }
        }
    }

    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        let before = done.len();
        self.pools.iter_mut().for_each(WorkerPool::submit);
        let (want, limit) = match wait {
            Wait::No => (0, None),
            Wait::Wake => (1, None),
            Wait::Completions(n) => {
                (n.clamp(1, self.in_flight.max(1)), Some(Instant::now() + Duration::from_millis(2)))
            }
        };
        let mut state = lock(&self.shared.state);
        while want > 0 && !state.woken && state.done.len() < want {
            // Past the limit, any completion ends the wait.
            let rest = limit.map(|l| l.saturating_duration_since(Instant::now()));
            let news = &self.shared.news;
            state.want = if rest == Some(Duration::ZERO) { 1 } else { want };
            state = match rest {
                Some(Duration::ZERO) if !state.done.is_empty() => break,
                rest => wait_for(news, state, rest.filter(|rest| !rest.is_zero())),
            };
        }
        state.woken = false;
        state.want = 0;
        done.append(&mut state.done);
        self.in_flight -= done.len() - before;
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.shared) as Arc<dyn Wake>
    }

    fn name(&self) -> &'static str {
        "posix"
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl DeviceJobs {
    /// Runs a worker until its device is released.
    fn run(&self) {
        loop {
            let (id, op) = {
                let mut jobs = lock(&self.jobs);
                loop {
                    if let Some(job) = jobs.waiting.pop_front() {
                        break job;
                    }
                    if jobs.stopping {
                        return;
                    }
                    jobs = wait_for(&self.more, jobs, None);
                }
            };
            let outcome = run(InFlight::new(op), &self.counters);
            let mut state = lock(&self.shared.state);
            state.done.push(Completion { id, outcome });
            if state.want > 0 && state.done.len() >= state.want {
                drop(state);
                self.shared.news.notify_one();
            }
        }
    }
}

/// Executes an operation on the calling thread, with its retries.
pub(in crate::io) fn run(mut flight: InFlight, counters: &DeviceCounters) -> Result<()> {
    if flight.op().len() == 0 && !matches!(flight.op(), Op::Sync { .. }) {
        return Ok(());
    }
    loop {
        let result = call(&flight, counters);
        match flight.on_result(result, counters) {
            Step::Done(outcome) => return outcome,
            Step::Continue => {}
            Step::Later(at) => std::thread::sleep(at.saturating_duration_since(Instant::now())),
        }
    }
}

/// Makes one system call. Returns the bytes moved, or a negative error number.
fn call(flight: &InFlight, counters: &DeviceCounters) -> i32 {
    use std::os::fd::AsRawFd;
    counters.submissions.add(1);
    #[cfg(test)]
    if trouble::strikes(flight.op()) {
        return -libc::EIO;
    }
    let fd = flight.op().file().fd().as_raw_fd();
    let result = match flight.rest() {
        None => {
            // SAFETY: the descriptor is open: the operation holds the file.
            unsafe { libc::fdatasync(fd) as isize }
        }
        Some((offset, memory)) => {
            let Ok(offset) = libc::off64_t::try_from(offset) else { return -libc::EINVAL };
            let address = memory.address.as_ptr().cast::<libc::c_void>();
            if flight.op().is_read() {
                // SAFETY: the read target allows the kernel to write these bytes while the operation lives.
                unsafe { libc::pread64(fd, address, memory.len, offset) }
            } else {
                // SAFETY: the write source keeps these bytes mapped and unchanged while the operation lives.
                unsafe { libc::pwrite64(fd, address, memory.len, offset) }
            }
        }
    };
    match i32::try_from(result) {
        Ok(moved) if moved >= 0 => moved,
        _ => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Faults in the reads and writes of single directories, for tests.
#[cfg(test)]
pub(crate) mod trouble {
    use crate::io::driver::interface::Op;
    use crate::metrics::lock;
    use std::os::fd::AsRawFd;
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;
    use std::time::Duration;

    #[derive(Clone, Copy)]
    pub(crate) enum Trouble {
        /// Reads take this much longer.
        Late(Duration),
        /// Reads fail.
        Fails,
        /// Writes fail. Syncs succeed, because a failed sync would poison the device.
        NotWritten,
    }

    /// A directory with its faults. Each fault meets the threads whose names have its prefix.
    type Troubled = (PathBuf, &'static [(&'static str, Trouble)]);

    static TROUBLED: Mutex<Vec<Troubled>> = Mutex::new(Vec::new());

    /// Ends the fault when it is dropped.
    #[must_use]
    pub(crate) struct TroubleGuard(PathBuf);

    impl Drop for TroubleGuard {
        fn drop(&mut self) {
            lock(&TROUBLED).retain(|(directory, _)| *directory != self.0);
        }
    }

    /// Makes threads whose names have these prefixes meet these faults in files below `directory`.
    pub(crate) fn set(directory: &Path, trouble: &'static [(&'static str, Trouble)]) -> TroubleGuard {
        let directory = directory.canonicalize().unwrap();
        lock(&TROUBLED).push((directory.clone(), trouble));
        TroubleGuard(directory)
    }

    /// Returns whether an operation of this thread fails. Sleeps first if the fault is a delay.
    pub(in crate::io) fn strikes(op: &Op) -> bool {
        if lock(&TROUBLED).is_empty() {
            return false;
        }
        let Ok(path) = std::fs::read_link(format!("/proc/self/fd/{}", op.file().fd().as_raw_fd())) else {
            return false;
        };
        let current = std::thread::current();
        let name = current.name().unwrap_or_default();
        let own = lock(&TROUBLED)
            .iter()
            .filter(|(directory, _)| path.starts_with(directory))
            .flat_map(|(_, all)| all.iter())
            .find(|(threads, _)| name.starts_with(threads))
            .map(|(_, trouble)| *trouble);
        match own {
            None => false,
            Some(Trouble::NotWritten) => matches!(op, Op::Write { .. }),
            Some(_) if !op.is_read() => false,
            Some(Trouble::Fails) => true,
            Some(Trouble::Late(delay)) => {
                std::thread::sleep(delay);
                false
            }
        }
    }
}
