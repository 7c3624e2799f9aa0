//! Thousands of reads that are waited for, dropped, polled or cancelled, on every driver.
//!
//! - No descriptor or buffer leaks.
//! - No late completion overwrites a buffer that is in use again.
//! - Device threads are shared and pinned as the options ask.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use stratakv::options::DriverChoice;
use stratakv::{ByteSize, CreateOptions, ErrorKind, ReadBatch, SelectRequest, Sequence, Store, StoreOptions};
use stratakv_testing::rng::Rng;
use stratakv_testing::scratch::{device_dirs, skipped};
use stratakv_testing::{GroupPattern, TestStore};

const PATTERN: GroupPattern = GroupPattern { heads: 2, dim: 128, group: 8 };
const GROUPS: u64 = 2048;

fn filled(store: &Store) -> Sequence {
    filled_with(store, 1)
}

fn filled_with(store: &Store, copies: u8) -> Sequence {
    PATTERN.write(store, CreateOptions::new().key("k").copies(copies), GROUPS)
}

/// Lets one test run at a time, because one of them counts the descriptors of the process.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

#[test]
fn an_event_loop_learns_of_a_read_by_eventfd() {
    let _alone = alone();
    let store = TestStore::new(options());
    let sequence = filled(&store);
    let events = std::sync::Arc::new(stratakv::read::EventWaker::new().unwrap());
    let waker = Waker::from(std::sync::Arc::clone(&events));
    for round in 0..100 {
        let chosen = [round, round + 500, round + 1000];
        let view = sequence.select(0, SelectRequest::groups(&chosen)).unwrap();
        let mut ticket = pin!(store.read(&[&view]).submit().unwrap());
        let batch = loop {
            match ticket.as_mut().poll(&mut Context::from_waker(&waker)) {
                std::task::Poll::Ready(batch) => break batch.unwrap(),
                std::task::Poll::Pending => {
                    let mut fds = [rustix::event::PollFd::new(&*events, rustix::event::PollFlags::IN)];
                    let limit = rustix::time::Timespec { tv_sec: 20, tv_nsec: 0 };
                    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "round {round}: not told");
                    events.clear();
                }
            }
        };
        PATTERN.check(&batch, 0, &chosen);
    }
}

fn random_groups(rng: &mut Rng) -> Vec<u64> {
    let mut chosen: Vec<u64> = (0..1 + rng.below(48)).map(|_| rng.next_u64() % GROUPS).collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

fn churn(store: &Store, sequence: &Sequence, seed: u64, batches: u64) -> [u64; 5] {
    let mut rng = Rng(seed);
    let mut kept: Vec<(ReadBatch, Vec<u64>)> = Vec::new();
    let mut seen = [0; 5];
    for _ in 0..batches {
        let chosen = random_groups(&mut rng);
        let view = sequence.select(0, SelectRequest::groups(&chosen)).unwrap();
        let way = rng.below(5);
        seen[way] += 1;
        let batch = match way {
            0 => Some(store.read(&[&view]).wait().unwrap()),
            1 => Some(store.read(&[&view]).submit().unwrap().wait().unwrap()),
            2 => {
                drop(store.read(&[&view]).submit().unwrap());
                None
            }
            3 => {
                let deadline = Instant::now() + Duration::from_micros(rng.next_u64() % 300);
                match store.read(&[&view]).submit().unwrap().wait_deadline(Some(deadline)) {
                    Ok(batch) => Some(batch),
                    Err(e) => {
                        assert_eq!(e.kind(), ErrorKind::Deadline, "{e}");
                        None
                    }
                }
            }
            _ => {
                // The ticket is polled once, then dropped.
                let mut ticket = pin!(store.read(&[&view]).submit().unwrap());
                let _ = ticket.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                None
            }
        };
        if let Some(batch) = batch {
            PATTERN.check(&batch, 0, &chosen);
            if rng.below(3) == 0 {
                kept.push((batch, chosen));
            }
        }
        // Buffers that are held while cancelled reads complete must keep their bytes.
        if kept.len() > 12 {
            kept.drain(..).for_each(|(batch, chosen)| PATTERN.check(&batch, 0, &chosen));
        }
    }
    kept.iter().for_each(|(batch, chosen)| PATTERN.check(batch, 0, chosen));
    seen
}

fn options() -> StoreOptions {
    Store::options().memory_limit(ByteSize::mib(24))
}

/// Returns every driver of this build.
fn drivers() -> Vec<DriverChoice> {
    vec![
        DriverChoice::Auto,
        DriverChoice::Posix,
        #[cfg(feature = "glommio")]
        DriverChoice::Glommio,
        #[cfg(feature = "tokio-uring")]
        DriverChoice::TokioUring,
    ]
}

#[test]
fn ten_thousand_batches_dropped_and_cancelled_leak_nothing() {
    drivers().into_iter().for_each(|driver| batches_leak_nothing(driver, 1, 1, None));
}

/// With two copies of everything, late reads are hedged even if their batch is dropped.
#[test]
fn ten_thousand_batches_of_copies_dropped_and_cancelled_leak_nothing() {
    drivers().into_iter().for_each(|driver| batches_leak_nothing(driver, 2, 2, None));
}

/// One thread serves all devices.
#[test]
fn ten_thousand_batches_of_one_thread_dropped_and_cancelled_leak_nothing() {
    drivers().into_iter().for_each(|driver| batches_leak_nothing(driver, 2, 4, Some(1)));
}

/// Returns the number of batches of a test, which STRATAKV_TEST_BATCHES can set.
fn batches() -> u64 {
    std::env::var("STRATAKV_TEST_BATCHES").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

fn batches_leak_nothing(driver: DriverChoice, copies: u8, devices: u8, threads: Option<usize>) {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let dirs = device_dirs(dir.path(), devices.into());
    let options = || {
        let options = Store::options().memory_limit(ByteSize::mib(24)).driver(driver).hedge_percentile(Some(0.5));
        let options = dirs.iter().fold(options, |options, own| options.device(own));
        options.shard_threads(threads)
    };
    let store = options().open().unwrap();
    let sequence = filled_with(&store, copies);
    // These reads open every file.
    (0..10).for_each(|_| check_all(&store, &sequence));
    // The first rounds create all rings, registered files and slabs.
    churn(&store, &sequence, 1, 200);
    let before = descriptors();
    let seen = std::thread::scope(|scope| {
        let (store, sequence) = (&store, &sequence);
        let threads = [2, 3].map(|seed| scope.spawn(move || churn(store, sequence, seed, batches() / 2)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(seen.iter().flatten().all(|count| *count > batches() / 20), "{seen:?}");
    // The lanes of the two threads remain open.
    let most = before + 4 * usize::from(devices);
    assert!(descriptors() <= most, "{driver:?}: {} descriptors, before {before}", descriptors());
    check_all(&store, &sequence);
    drop(sequence);
    // Cancelled reads hold their directories until they complete.
    let until = Instant::now() + Duration::from_secs(20);
    match store.close() {
        Ok(()) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::InUse, "{driver:?}: {e}"),
    }
    let store = loop {
        match options().open() {
            Ok(store) => break store,
            Err(e) => assert!(e.kind() == ErrorKind::InUse && Instant::now() < until, "{driver:?}: {e}"),
        }
    };
    store.close().unwrap();
}

/// Checks that all buffers are free: a read of nearly all memory fits and is right.
fn check_all(store: &Store, sequence: &Sequence) {
    let all: Vec<u64> = (0..GROUPS).collect();
    let view = sequence.select(0, SelectRequest::groups(&all)).unwrap();
    let batch =
        store.read(&[&view]).submit().unwrap().wait_deadline(Some(Instant::now() + Duration::from_secs(20))).unwrap();
    PATTERN.check(&batch, 0, &all);
}

/// Returns the kernel's status of the threads of this process that serve devices.
fn device_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let statuses = tasks.map(|task| std::fs::read_to_string(task.join("status")).unwrap_or_default());
    statuses.filter(|status| status.starts_with("Name:\tstratakv-") && !status.contains("-io")).collect()
}

#[test]
fn devices_share_as_many_threads_as_there_may_be() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let dirs = device_dirs(dir.path(), 9);
    let of = |first: usize| dirs[first..first + 3].iter().fold(options(), |options, dir| options.device(dir));
    // The kernel lists a thread for a moment after its end.
    let devices = |wanted: usize| {
        let now = || device_threads().iter().filter(|status| is_of_a_device(status)).count();
        let polled = (0..3000).map(|turn| {
            std::thread::sleep(std::time::Duration::from_millis(if turn == 0 { 0 } else { 10 }));
            now()
        });
        polled.into_iter().find(|count| *count == wanted).unwrap_or_else(now)
    };
    for (first, options, wanted) in [(0, of(0), 3), (3, of(3).shard_threads(2), 2), (6, of(6).shard_threads(7), 3)] {
        let before = devices(0);
        let store = options.open().unwrap();
        assert_eq!(devices(before + wanted), before + wanted, "devices from {first}");
        let another = tempfile::tempdir().unwrap();
        store.add_device(another.path()).unwrap();
        let joined = before + if wanted == 2 { 2 } else { wanted + 1 };
        assert_eq!(devices(joined), joined, "and one that joined");
        let sequence = filled(&store);
        check_all(&store, &sequence);
        drop(sequence);
        store.close().unwrap();
        assert_eq!(devices(before), before, "none is left");
    }
    let refused = options().device(dir.path()).shard_threads(0).open().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Configuration);
}

/// Returns whether a thread is named after a device.
fn is_of_a_device(status: &str) -> bool {
    let name = status.lines().next().and_then(|line| line.strip_prefix("Name:\tstratakv-"));
    name.is_some_and(|name| name.parse::<u16>().is_ok())
}

#[test]
fn device_threads_stay_on_the_cpus_of_a_node() {
    let _alone = alone();
    let Ok(cpus) = std::fs::read_to_string("/sys/devices/system/node/node0/cpulist") else {
        return skipped("this system does not say which CPUs its NUMA nodes have");
    };
    for driver in [DriverChoice::Auto, DriverChoice::Posix] {
        let dir = tempfile::tempdir().unwrap();
        let store = options().device(dir.path()).driver(driver).shard_nodes([0]).open().unwrap();
        let statuses = device_threads();
        let allowed = format!("\nCpus_allowed_list:\t{}\n", cpus.trim());
        assert!(statuses.iter().any(|status| is_of_a_device(status) && status.contains(&allowed)), "{statuses:?}");
        store.close().unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let refused = options().device(dir.path()).shard_nodes([4321]).open().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Configuration);
    assert!(refused.to_string().contains("NUMA node 4321"), "{refused}");
    let refused = options().device(dir.path()).shard_nodes([0]).shard_cpus([0]).open().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Configuration);
}

#[test]
fn device_threads_stay_on_their_cpus() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let store = options().device(dir.path()).shard_cpus([0]).open().unwrap();
    let is_pinned = |device: u16| {
        device_threads().iter().any(|status| {
            status.starts_with(&format!("Name:\tstratakv-{device}\n")) && status.contains("\nCpus_allowed_list:\t0\n")
        })
    };
    assert!(is_pinned(0), "the device's thread is not on CPU 0 alone");
    // The thread of a device that joins later is pinned too.
    let other = tempfile::tempdir().unwrap();
    let joined = store.add_device(other.path()).unwrap();
    assert!(is_pinned(joined), "the thread of the device that joined is not on CPU 0 alone");
    store.close().unwrap();
    let third = tempfile::tempdir().unwrap();
    let refused = options().device(third.path()).shard_cpus([1023]).open().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Configuration);
    assert!(refused.to_string().contains("CPU 1023"), "{refused}");
}

#[test]
fn waiting_at_a_device_is_measured() {
    let _alone = alone();
    let store = TestStore::new(options());
    let sequence = filled(&store);
    let before = store.status().devices[0].counters;
    assert!(before.other_batches > 0, "writes are batches too");
    for round in 0..20 {
        let view = sequence.select(0, SelectRequest::groups(&[round, round + 700])).unwrap();
        store.read(&[&view]).submit().unwrap().wait().unwrap();
    }
    let after = store.status().devices[0].counters;
    assert_eq!(after.demand_batches - before.demand_batches, 20);
    assert!(after.demand_queue_us < 60_000_000, "microseconds, not something else: {}", after.demand_queue_us);
}
