//! Several devices on one thread: a device that hangs, fails, joins or leaves does not affect the others.
//!
//! [`Place`] holds the devices of a test with the thread that serves them. Each page of a device's file names the
//! device and the page, so a read of the wrong place is noticed.

use super::*;
use crate::error::ErrorKind;

/// Devices that one thread serves.
struct Place {
    // The fields are dropped in this order.
    shards: Vec<ShardHandle>,
    dirs: Vec<Arc<dyn Directory>>,
    counters: Vec<Arc<DeviceCounters>>,
    threads: ShardThreads,
    arena: Arena,
    tmp: tempfile::TempDir,
}

const KINDS: [DriverKind; 2] = [DriverKind::Uring, DriverKind::Posix];
const FILE_BYTES: usize = 8 << 20;

impl Place {
    fn new(kind: DriverKind, devices: usize, most: Option<usize>) -> Self {
        let arena = Arena::new(MemoryBudget::new(64 * SLAB_BYTES), usize::MAX);
        let threads = ShardThreads::new(kind, arena.clone(), most, Affinity::default(), None);
        let tmp = tempfile::tempdir().expect("temporary directory");
        let mut place = Self { shards: vec![], dirs: vec![], counters: vec![], threads, arena, tmp };
        for device in 0..devices {
            let (shard, dir) = place.serve(device);
            place.counters.push(Arc::clone(shard.counters()));
            place.shards.push(shard);
            place.dirs.push(dir);
        }
        place
    }

    fn serve(&self, device: usize) -> (ShardHandle, Arc<dyn Directory>) {
        let path = self.tmp.path().join(device.to_string());
        let dir: Arc<dyn Directory> = OsDirectory::open(&path, OPTIONS).expect("free");
        (self.threads.serve(&format!("shared-{device}"), Arc::clone(&dir), Arc::default()).expect("served"), dir)
    }

    /// Writes a file in which each page holds the number of the device and its own number.
    fn file(&self, device: usize) -> Arc<DeviceFile> {
        let bytes: Vec<u8> = (0..FILE_BYTES / 4096).flat_map(|page| page_of(device, page)).collect();
        std::fs::write(self.dirs[device].path().join("f"), bytes).expect("written");
        let file = self.dirs[device].open_file("f", Access::ReadWrite).expect("opened");
        // No write-back is left that could delay a read.
        self.dirs[device].sync_small(&file).expect("synced");
        file
    }

    fn check_read(&self, device: usize, file: &Arc<DeviceFile>, page: usize) {
        let mut lease = self.arena.lease(4096).expect("room");
        let request = read_into(file, page as u64 * 4096, &mut lease, 0);
        self.shards[device].run(vec![request], Priority::Demand).expect("read");
        assert_eq!(lease.bytes().expect("idle"), page_of(device, page));
    }
}

fn page_of(device: usize, page: usize) -> Vec<u8> {
    [device as u8, page as u8, (page >> 8) as u8, 0x77].repeat(1024)
}

/// Returns a file whose reads complete only after the other end is dropped.
fn hanging() -> (Arc<DeviceFile>, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    (Arc::new(DeviceFile::new(reader.into(), "hanging", false, false)), writer)
}

#[test]
fn a_device_that_hangs_delays_no_other_device() {
    let mut place = Place::new(DriverKind::Uring, 3, Some(1));
    let files = [0, 1, 2].map(|device| place.file(device));
    let (hung, release) = hanging();
    let sink = Arc::new(Outcomes::default());
    let mut total = 0;
    // More reads than the ring takes of a device: first prefetches, and then demand reads behind them.
    for priority in [Priority::Prefetch, Priority::Demand] {
        let requests: Vec<_> =
            (0..700).map(|tag| read_into(&hung, 0, &mut place.arena.lease(512).expect("room"), total + tag)).collect();
        total += requests.len() as u64;
        place.shards[1].submit_wait(batch(requests, priority, &sink));
        // Reads of the other devices wait for a slice that has begun, and for no more.
        let mut took = Vec::new();
        for page in 0..200 {
            let start = Instant::now();
            place.check_read(0, &files[0], page);
            place.check_read(2, &files[2], page);
            took.push(start.elapsed() / 2);
        }
        took.sort_unstable();
        println!("{priority:?} reads hang, another device's take {:?}, at best {:?}", took[took.len() / 2], took[0]);
        assert!(took[0] < Duration::from_micros(1500), "every read waited {:?} at least", took[0]);
    }
    assert_eq!(lock(&sink.seen).len(), 0);
    // One device leaves and another joins while this one hangs.
    drop(place.shards.remove(0));
    let (joined, _dir) = place.serve(7);
    assert_eq!(joined.thread_id(), place.shards[0].thread_id());
    let own = place.file(2);
    joined.run(vec![sync_of(&own, 0)], Priority::Write).expect("synced");
    drop(release);
    let seen = sink.wait_for(total as usize);
    assert!(seen.iter().all(|(_, outcome)| outcome.is_err()), "the file has ended");
    drop(seen);
    assert_eq!(place.arena.usage().leased_bytes, 0);
}

#[test]
fn posix_workers_belong_to_one_device() {
    let place = Place::new(DriverKind::Posix, 2, Some(1));
    let file = place.file(0);
    // Slow reads: the kernel computes for milliseconds in each.
    let random = std::fs::File::open("/dev/urandom").expect("exists");
    let random = Arc::new(DeviceFile::new(random.into(), "random", false, false));
    let mut lease = place.arena.lease(SLAB_BYTES).expect("room");
    let sink = Arc::new(Outcomes::default());
    let requests = (0..128).map(|tag| {
        let into = lease.read_target(0..SLAB_BYTES).expect("in range");
        Request { op: Op::Read { file: Arc::clone(&random), offset: 0, into }, tag }
    });
    let requests = requests.collect();
    place.shards[1].submit_wait(batch(requests, Priority::Demand, &sink));
    place.check_read(0, &file, 5);
    let ended = lock(&sink.seen).len();
    assert!(ended < 64, "the read came after {ended} of 128 slow ones of another device");
    drop(sink.wait_for(128));
}

#[test]
fn devices_together_may_overflow_the_rings() {
    /// A sink that lets completions pile up.
    struct Slow(Arc<Outcomes>);
    impl Sink for Slow {
        fn complete(&self, tag: u64, outcome: Result<()>) {
            if tag == 0 {
                std::thread::sleep(Duration::from_millis(50));
            }
            self.0.complete(tag, outcome);
        }
    }
    const READS: usize = 1200;
    for kind in KINDS {
        let place = Place::new(kind, 4, Some(1));
        let files: Vec<_> = (0..4).map(|device| place.file(device)).collect();
        let mut random = Random(3);
        for _ in 0..3 {
            let sink = Arc::new(Outcomes::default());
            let mut wanted = Vec::new();
            for (device, file) in files.iter().enumerate() {
                let mut requests = Vec::new();
                for tag in 0..READS {
                    let page = random.below(FILE_BYTES / 4096);
                    let mut lease = place.arena.lease(4096).expect("room");
                    requests.push(read_into(file, page as u64 * 4096, &mut lease, tag as u64));
                    wanted.push((device, page, lease));
                }
                let slow = Arc::new(Slow(Arc::clone(&sink))) as Arc<dyn Sink>;
                let batch = Batch { requests, priority: Priority::Demand, sink: slow, cancel: None };
                place.shards[device].submit_wait(batch);
            }
            assert!(sink.wait_for(4 * READS).iter().all(|(_, outcome)| outcome.is_ok()));
            for (device, page, lease) in &wanted {
                assert_eq!(lease.bytes().expect("idle"), page_of(*device, *page), "device {device}");
            }
        }
        for counters in &place.counters {
            let counted = counters.snapshot();
            assert_eq!((counted.reads, counted.demand_batches), (3 * READS as u64, 3), "each counts its own");
            assert_eq!(counted.read_bytes, 3 * 4096 * READS as u64);
        }
    }
}

#[test]
fn devices_join_and_leave_a_running_thread() {
    for kind in KINDS {
        let mut place = Place::new(kind, 3, Some(1));
        let files = [0, 1, 2].map(|device| place.file(device));
        let stays = place.shards[0].thread_id();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (leaves, dir) = (place.shards.remove(1), place.dirs.remove(1));
        drop(files[1].clone());
        let rounds = std::thread::scope(|scope| {
            let (place, stop, file) = (&place, &stop, &files[0]);
            let busy = scope.spawn(move || {
                let mut rounds = 0;
                // On a busy machine the other device may be done before these.
                while !stop.load(std::sync::atomic::Ordering::Relaxed) || rounds <= 20 {
                    place.check_read(0, file, rounds % 512);
                    rounds += 1;
                }
                rounds
            });
            let mut current = Some((leaves, dir));
            for round in 0..20 {
                let Some((shard, dir)) = current.take() else { unreachable!() };
                assert_eq!(shard.thread_id(), stays);
                let file = dir.open_file("f", Access::ReadWrite).expect("opened");
                let sink = Arc::new(Outcomes::default());
                let requests = (0..64).map(|tag| {
                    let lease = place.arena.lease_zeroed(16 << 10).expect("room");
                    write_of(&file, (tag % 64) * (16 << 10), &lease, tag)
                });
                shard.submit_wait(batch(requests.collect(), Priority::Write, &sink));
                if round % 2 == 0 {
                    shard.close()
                } else {
                    drop(shard)
                }
                assert_eq!(lock(&sink.seen).iter().filter(|(_, outcome)| outcome.is_ok()).count(), 64);
                drop((file, dir));
                // The lock is free at once, so the same directory can be served again.
                current = Some(place.serve(1));
            }
            drop(current);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            busy.join().expect("no panic")
        });
        assert!(rounds > 20, "{kind:?}: {rounds} reads of another device meanwhile");
        place.shards.clear();
        place.dirs.clear();
        // The thread has ended with its last device. Another thread takes its place.
        let (again, _dir) = place.serve(0);
        assert_ne!(again.thread_id(), stays);
    }
}

#[test]
fn devices_are_spread_over_threads() {
    for (most, wanted) in [(None, vec![1; 5]), (Some(1), vec![5]), (Some(2), vec![2, 3]), (Some(9), vec![1; 5])] {
        let mut place = Place::new(DriverKind::Auto, 5, most);
        let dealt = |place: &Place| {
            let mut counts: Vec<usize> = Vec::new();
            let mut ids: Vec<_> = place.shards.iter().map(|shard| shard.thread_id()).collect();
            while let Some(id) = ids.first().copied() {
                counts.push(ids.iter().filter(|other| **other == id).count());
                ids.retain(|other| *other != id);
            }
            counts.sort_unstable();
            counts
        };
        assert_eq!(dealt(&place), wanted, "{most:?}");
        // A later device joins the thread that two devices have left.
        if most == Some(2) {
            drop((place.shards.remove(4), place.shards.remove(2)));
            let (joined, _dir) = place.serve(9);
            assert_eq!(joined.thread_id(), place.shards[0].thread_id());
        }
    }
}

#[test]
fn a_device_that_fails_a_sync_fails_alone() {
    for kind in KINDS {
        let place = Place::new(kind, 2, Some(1));
        let files = [0, 1].map(|device| place.file(device));
        let Ok(unsyncable) = std::fs::File::open("/proc/self/stat") else {
            println!("skipped: no /proc/self/stat");
            return;
        };
        let unsyncable = Arc::new(DeviceFile::new(unsyncable.into(), "unsyncable", false, false));
        place.shards[0].run(vec![sync_of(&unsyncable, 0)], Priority::Write).expect_err("no such operation");
        let refused = place.shards[0].run(vec![sync_of(&files[0], 0)], Priority::Write).expect_err("read-only now");
        assert_eq!(refused.kind(), ErrorKind::Poisoned);
        place.check_read(0, &files[0], 3);
        place.shards[1].run(vec![sync_of(&files[1], 0)], Priority::Write).expect("another device");
        assert_eq!((place.counters[0].snapshot().errors, place.counters[1].snapshot().errors), (1, 0));
    }
}

#[test]
fn the_last_handle_may_be_dropped_on_the_shard_thread() {
    struct Holds(Mutex<Option<ShardHandle>>, std::sync::mpsc::Sender<()>);
    impl Sink for Holds {
        fn complete(&self, _tag: u64, _outcome: Result<()>) {
            drop(lock(&self.0).take());
            let _ = self.1.send(());
        }
    }
    for kind in KINDS {
        for devices in [1, 2] {
            let mut place = Place::new(kind, devices, Some(1));
            let file = place.file(0);
            let handle = place.shards.remove(0);
            let (told, dropped) = std::sync::mpsc::channel();
            let sink = Arc::new(Holds(Mutex::new(None), told));
            let held = Arc::clone(&sink);
            let mut kept = lock(&held.0);
            let as_sink = Arc::clone(&sink) as Arc<dyn Sink>;
            let requests = vec![sync_of(&file, 0)];
            handle.submit_wait(Batch { requests, priority: Priority::Write, sink: as_sink, cancel: None });
            *kept = Some(handle);
            drop(kept);
            dropped.recv_timeout(Duration::from_secs(20)).expect("does not wait for itself");
            if devices == 2 {
                let own = place.dirs[1].create_file("g", 4096).expect("made");
                place.shards[0].run(vec![sync_of(&own, 0)], Priority::Write).expect("the other goes on");
            }
        }
    }
}
