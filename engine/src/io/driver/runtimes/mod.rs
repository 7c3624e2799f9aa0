//! Drivers on the runtimes glommio and tokio-uring, for hosts that run them.
//!
//! How an operation runs:
//! 1. [`Driver::queue`] keeps it.
//! 2. [`Driver::drive`] runs the runtime, which starts the queued operations. A read is a task of the runtime. A write
//!    or sync blocks a thread of the runtime's pool, because a killed process keeps the device's lock until such a call
//!    has returned.
//! 3. The task retries and continues the operation, and then pushes its completion.
//! 4. [`Driver::drive`] stops the runtime at enough completions or a wake-up, and takes the completions.
//!
//! A runtime lives on the thread of its shard and runs only inside [`Driver::drive`].
//!
//! Invariants:
//! - The runtime opens each device file once and closes it when the device has closed its own.
//! - An operation reports its completion after its memory and file are free.

#[cfg(feature = "glommio")]
pub(crate) mod glommio;
#[cfg(feature = "tokio-uring")]
pub(crate) mod tokio_uring;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::{Future, pending, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::io::driver::interface::{Completion, DeviceTable, Driver, Op, ServedDevice, Wait, Wake};
use crate::io::driver::posix;
use crate::io::driver::progress::{InFlight, Step};
use crate::io::file::device_file::DeviceFile;
use crate::io::signals::ignore_file_size_signal;
use crate::metrics::{DeviceCounters, OpKind, lock};

/// Operations of a device in flight, at most.
const DEPTH: usize = 256;
/// A wait for several completions ends after this time if one has arrived.
const SLICE_WAIT: Duration = Duration::from_millis(2);

/// A single-threaded runtime.
trait Runtime {
    const NAME: &'static str;
    /// The runtime's type of an open file.
    type File: 'static;

    /// Runs tasks on this thread until `future` has completed. Tasks of other runtimes do not call it.
    fn block_on<T>(&self, future: impl Future<Output = T>) -> T;

    /// Starts a task. Called inside [`Self::block_on`].
    fn spawn(task: impl Future<Output = ()> + 'static);

    /// Runs `work` on a thread of the pool. Called inside [`Self::block_on`].
    fn spawn_blocking(work: impl FnOnce() -> Result<()> + Send + 'static) -> impl Future<Output = Result<()>>;

    fn sleep(duration: Duration) -> impl Future<Output = ()>;

    /// Opens the file that `file` has open.
    fn open(file: &DeviceFile) -> impl Future<Output = io::Result<Self::File>>;

    /// Reads what is left of `flight` once. Returns the bytes moved, or an error.
    fn read(file: &Self::File, flight: InFlight) -> impl Future<Output = (io::Result<usize>, InFlight)>;
}

/// Completions of this thread's tasks, and the task that waits for them.
#[derive(Default)]
struct EndedOps {
    done: RefCell<Vec<Completion>>,
    want: Cell<usize>,
    waiting: RefCell<Option<Waker>>,
}

impl EndedOps {
    fn push(&self, completion: Completion) {
        self.done.borrow_mut().push(completion);
        if self.done.borrow().len() >= self.want.get()
            && let Some(waker) = self.waiting.borrow_mut().take()
        {
            waker.wake();
        }
    }
}

/// The wake-up flag, which other threads set.
#[derive(Default)]
struct Doorbell {
    rung: AtomicBool,
    waiting: Mutex<Option<Waker>>,
}

impl Wake for Doorbell {
    fn wake(&self) {
        self.rung.store(true, Ordering::SeqCst);
        if let Some(waker) = lock(&self.waiting).take() {
            waker.wake();
        }
    }
}

type RuntimeFiles<F> = HashMap<u64, (Weak<DeviceFile>, Rc<F>)>;

/// A driver on a runtime.
struct OnRuntime<R: Runtime> {
    /// Open files by their id, until the device closes them. Dropped inside the runtime.
    files: RuntimeFiles<R::File>,
    closed_seen: u64,
    runtime: R,
    queued: Vec<(usize, u64, Op)>,
    in_flight: usize,
    ended: Rc<EndedOps>,
    bell: Arc<Doorbell>,
    counters: DeviceTable<Arc<DeviceCounters>>,
    notes: Vec<String>,
}

impl<R: Runtime> OnRuntime<R> {
    fn new(runtime: R, notes: Vec<String>) -> Self {
        ignore_file_size_signal();
        Self {
            files: HashMap::new(),
            closed_seen: 0,
            runtime,
            queued: Vec::new(),
            in_flight: 0,
            ended: Rc::default(),
            bell: Arc::default(),
            counters: DeviceTable::default(),
            notes,
        }
    }

    /// Starts the queued operations. Then waits for `want` completions, or for one after `limit`, or for a wake-up.
    fn run(&mut self, want: usize, limit: Option<Duration>) {
        let Self { files, closed_seen, runtime, queued, ended, bell, counters, .. } = self;
        ended.want.set(want);
        runtime.block_on(async {
            let closed = DeviceFile::closed_count();
            if closed != *closed_seen {
                *closed_seen = closed;
                files.retain(|_, (file, _)| file.strong_count() > 0);
            }
            for (device, id, op) in queued.drain(..) {
                let counters = counters.get_mut(device).map(|own| Arc::clone(own)).unwrap_or_default();
                start::<R>(id, op, files, ended, counters).await;
            }
            let pause = async {
                match limit {
                    Some(limit) => R::sleep(limit).await,
                    None => pending().await,
                }
            };
            let (mut pause, mut late, mut had_a_turn) = (pin!(pause), false, false);
            poll_fn(|context| {
                ended.waiting.replace(Some(context.waker().clone()));
                lock(&bell.waiting).replace(context.waker().clone());
                late = late || pause.as_mut().poll(context).is_ready();
                if late {
                    ended.want.set(want.min(1));
                }
                if bell.rung.swap(false, Ordering::SeqCst) {
                    return Poll::Ready(());
                }
                if ended.done.borrow().len() < ended.want.get() {
                    return Poll::Pending;
                }
                // Tasks that were just started run once at least.
                if !std::mem::replace(&mut had_a_turn, true) {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
            .await;
        });
    }
}

/// Starts an operation as a task.
async fn start<R: Runtime>(
    id: u64,
    op: Op,
    files: &mut RuntimeFiles<R::File>,
    ended: &Rc<EndedOps>,
    counters: Arc<DeviceCounters>,
) {
    let ended = Rc::clone(ended);
    if !op.is_read() || op.len() == 0 {
        return R::spawn(async move {
            let outcome = R::spawn_blocking(move || posix::run(InFlight::new(op), &counters)).await;
            ended.push(Completion { id, outcome });
        });
    }
    let key = op.file().id();
    let file = match files.get(&key) {
        Some((_, file)) => Rc::clone(file),
        None => match R::open(op.file()).await {
            Ok(file) => {
                let file = Rc::new(file);
                files.insert(key, (Arc::downgrade(op.file()), Rc::clone(&file)));
                file
            }
            Err(e) => {
                counters.failed(OpKind::Read, false);
                let outcome = Err(Error::io(format!("open {} for {}", op.file().path(), R::NAME), e));
                return ended.push(Completion { id, outcome });
            }
        },
    };
    R::spawn(async move {
        let mut flight = InFlight::new(op);
        let outcome = loop {
            counters.submissions.add(1);
            let moved;
            (moved, flight) = R::read(&file, flight).await;
            let result = match moved {
                Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
                Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
            };
            match flight.on_result(result, &counters) {
                Step::Done(outcome) => break outcome,
                Step::Continue => {}
                Step::Later(at) => R::sleep(at.saturating_duration_since(Instant::now())).await,
            }
        };
        // Dropped before the report, because the sink may expect that the memory is free.
        drop(flight);
        drop(file);
        ended.push(Completion { id, outcome });
    });
}

impl<R: Runtime> Driver for OnRuntime<R> {
    fn add(&mut self, device: usize, served: &ServedDevice<'_>) -> Result<()> {
        self.counters.put(device, Arc::clone(served.counters));
        Ok(())
    }

    fn remove(&mut self, device: usize) {
        self.counters.take(device);
        // The runtime's files keep the device's files open.
        let Self { files, runtime, .. } = self;
        runtime.block_on(async { files.retain(|_, (file, _)| file.strong_count() > 0) });
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn queue(&mut self, device: usize, id: u64, op: Op) {
        self.in_flight += 1;
        self.queued.push((device, id, op));
    }

    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        match wait {
            Wait::No => self.run(0, None),
            Wait::Wake => self.run(1, None),
            Wait::Completions(n) => self.run(n.clamp(1, self.in_flight.max(1)), Some(SLICE_WAIT)),
        }
        let mut ended = self.ended.done.borrow_mut();
        self.in_flight -= ended.len();
        done.append(&mut ended);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.bell) as Arc<dyn Wake>
    }

    fn name(&self) -> &'static str {
        R::NAME
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl<R: Runtime> Drop for OnRuntime<R> {
    fn drop(&mut self) {
        // Operations are left only after a panic. The kernel may still write into their memory, so this waits for them.
        let mut done = Vec::new();
        while self.in_flight > 0 {
            if self.drive(Wait::Completions(1), &mut done).is_err() {
                break;
            }
        }
        let files = std::mem::take(&mut self.files);
        self.runtime.block_on(async move { drop(files) });
    }
}
