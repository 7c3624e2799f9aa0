//! The conformance suite: each test runs on every driver, alone on its thread and on a thread with other devices.
//!
//! The tests check the invariants of the driver interface and of the scheduler, as a caller sees them:
//! - Each request completes exactly once, also when its batch is cancelled, its lease is dropped or the device closes.
//! - Bytes arrive where they belong, and errors name the file and the place.
//! - Demand reads overtake writes, and no class starves.
//! - Memory, files and locks are free after their last use, and an idle shard takes no CPU time.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::*;
use crate::error::ErrorKind;

/// Defines each test once per driver, alone on its thread and on a thread with other devices.
macro_rules! conformance {
    ($($name:ident),+ $(,)?) => {
        conformance!(on uring Uring 0; $($name),+);
        conformance!(on uring_shared Uring 3; $($name),+);
        conformance!(on posix Posix 0; $($name),+);
        conformance!(on posix_shared Posix 2; $($name),+);
        #[cfg(feature = "glommio")]
        conformance!(on glommio Glommio 0; $($name),+);
        #[cfg(feature = "glommio")]
        conformance!(on glommio_shared Glommio 1; $($name),+);
        #[cfg(feature = "tokio-uring")]
        conformance!(on tokio_uring TokioUring 0; $($name),+);
        #[cfg(feature = "tokio-uring")]
        conformance!(on tokio_uring_shared TokioUring 1; $($name),+);
    };
    (on $module:ident $kind:ident $neighbours:literal; $($name:ident),+) => {
        mod $module {
            use super::{DriverKind, On};
            $(#[test] fn $name() { super::$name(On { kind: DriverKind::$kind, neighbours: $neighbours }); })+
        }
    };
}

conformance!(
    random_batches_come_back,
    batches_larger_than_the_ring,
    reads_past_the_end,
    empty_requests,
    bad_alignment_is_an_error,
    cancelled_batches,
    leases_dropped_in_flight,
    close_executes_what_was_submitted,
    submit_after_close,
    full_inbox_gives_the_batch_back,
    many_submitters,
    priorities_all_progress,
    demand_overtakes_queued_writes,
    panicking_sink,
    poisoned_device_refuses_writes,
    lock_is_free_after_close,
    idle_costs_nothing,
    read_bytes_agree_with_the_kernel,
    trimmed_slabs_and_closed_files_are_released,
);

fn random_batches_come_back(on: On) {
    let rig = Rig::new(on);
    let mut random = Random(1);
    let size = 24 << 20;
    let mut model = random.bytes(size);
    let file = rig.dir.create_file("f", size as u64).expect("made");
    rig.write(&file, 0, &model).expect("written");
    rig.shard.run(vec![sync_of(&file, 0)], Priority::Write).expect("synced");
    for _ in 0..12 {
        // Writes ranges that do not overlap, and then reads any ranges.
        let mut at = 0;
        let mut writes = Vec::new();
        let mut leases = Vec::new();
        while at < size && leases.len() < 40 {
            let offset = at + 512 * random.below(1000);
            let len = (512 << random.below(12)).min(512 * (1 + random.below(300)));
            if offset + len > size {
                break;
            }
            let mut lease = rig.lease(len);
            lease.bytes_mut().expect("idle").copy_from_slice(&random.bytes(len));
            model[offset..offset + len].copy_from_slice(lease.bytes().expect("idle"));
            writes.push(write_of(&file, offset as u64, &lease, 0));
            leases.push(lease);
            at = offset + len;
        }
        rig.shard.run(writes, Priority::Write).expect("written");
        drop(leases);
        let mut wanted = Vec::new();
        let mut reads = Vec::new();
        for tag in 0..100 {
            let len = (512 << random.below(13)).min(if tag == 0 { SLAB_BYTES } else { 256 << 10 });
            let offset = 512 * random.below((size - len) / 512 + 1);
            let mut lease = rig.lease(len);
            reads.push(read_into(&file, offset as u64, &mut lease, tag));
            wanted.push((offset, lease));
        }
        let sink = Arc::new(Outcomes::default());
        rig.shard.submit_wait(batch(reads, Priority::Demand, &sink));
        let seen = sink.wait_for(100);
        let mut tags: Vec<u64> =
            seen.iter().map(|(tag, outcome)| outcome.as_ref().map(|()| *tag).expect("read")).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..100).collect::<Vec<u64>>(), "each exactly once");
        for (offset, lease) in &wanted {
            let bytes = lease.bytes().expect("idle");
            assert!(bytes == &model[*offset..offset + bytes.len()], "{} bytes at {offset}", bytes.len());
        }
    }
    let counted = rig.counters.snapshot();
    assert_eq!((counted.reads, counted.errors, counted.syncs), (1200, 0, 1));
}

fn batches_larger_than_the_ring(on: On) {
    let rig = Rig::new(on);
    let bytes = Random(2).bytes(8 << 20);
    let file = rig.dir.create_file("f", bytes.len() as u64).expect("made");
    rig.write(&file, 0, &bytes).expect("written");
    let mut leases: Vec<Lease> = (0..2000).map(|_| rig.lease(4096)).collect();
    let reads = leases.iter_mut().zip(0..).map(|(lease, i)| read_into(&file, i % 2048 * 4096, lease, i)).collect();
    rig.shard.run(reads, Priority::Demand).expect("read");
    for (i, lease) in leases.iter().enumerate() {
        assert_eq!(lease.bytes().expect("idle"), &bytes[i * 4096..][..4096]);
    }
}

fn reads_past_the_end(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("short", 0).expect("made");
    rig.write(&file, 0, &[7; 8192]).expect("written");
    assert_eq!(rig.read(&file, 4096, 4096).expect("the last page"), [7; 4096]);
    for (offset, len) in [(4096, 8192), (8192, 4096), (1 << 40, 512), (0, 1 << 20)] {
        let error = rig.read(&file, offset, len).expect_err("past the end");
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Io, "{text}");
        assert!(text.contains("short") && text.contains(&offset.to_string()) && text.contains("ends"), "{text}");
    }
    // A file that ends inside a page.
    let path = rig.dir.path().join("odd");
    std::fs::write(&path, [9; 5000]).expect("written");
    let odd = rig.dir.open_file("odd", Access::ReadOnly).expect("opened");
    assert_eq!(rig.read(&odd, 0, 4096).expect("whole page"), [9; 4096]);
    assert!(rig.read(&odd, 0, 8192).expect_err("too long").to_string().contains("5000"));
    assert_eq!(rig.counters.snapshot().errors, 5);
    let write = rig.write(&odd, 0, &[1; 4096]).expect_err("opened for reading");
    assert!(write.to_string().contains("odd") && write.raw_os_error().is_some(), "{write}");
}

fn empty_requests(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 4096).expect("made");
    assert_eq!(rig.read(&file, 0, 0).expect("nothing to read"), []);
    rig.shard.run(Vec::new(), Priority::Demand).expect("nothing to do");
    rig.shard.run(vec![sync_of(&file, 0), sync_of(&file, 1)], Priority::Write).expect("synced");
}

fn bad_alignment_is_an_error(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 1 << 20).expect("made");
    rig.write(&file, 0, &vec![3; 1 << 20]).expect("written");
    let odd = rig.read(&file, 100, 100);
    if file.is_direct() {
        // Some file systems read odd places through the page cache.
        assert!(odd.as_ref().map_or_else(|e| e.raw_os_error() == Some(22), |b| *b == [3; 100]), "{odd:?}");
    } else {
        assert_eq!(odd.expect("buffered"), [3; 100]);
    }
    assert_eq!(rig.read(&file, 0, 4096).expect("goes on"), [3; 4096]);
}

fn cancelled_batches(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 8 << 20).expect("made");
    rig.write(&file, 0, &vec![1; 8 << 20]).expect("written");
    let cancel = Arc::new(AtomicBool::new(true));
    let sink = Arc::new(Outcomes::default());
    let mut lease = rig.lease(4096);
    let mut cancelled = batch(vec![read_into(&file, 0, &mut lease, 5)], Priority::Prefetch, &sink);
    cancelled.cancel = Some(Arc::clone(&cancel));
    rig.shard.submit_wait(cancelled);
    assert_eq!(sink.wait_for(1)[0].1.as_ref().expect_err("cancelled").kind(), ErrorKind::Cancelled);
    assert!(lease.bytes().is_some(), "the buffer is free again");

    // Cancelled midway: every request ends once, read or cancelled.
    let cancel = Arc::new(AtomicBool::new(false));
    let sink = Arc::new(Outcomes { cancel_at: Some((20, Arc::clone(&cancel))), ..Outcomes::default() });
    let mut leases: Vec<Lease> = (0..500).map(|_| rig.lease(16384)).collect();
    let reads = leases.iter_mut().zip(0..).map(|(lease, i)| read_into(&file, i * 16384, lease, i)).collect();
    rig.shard.submit_wait(Batch { cancel: Some(Arc::clone(&cancel)), ..batch(reads, Priority::Clean, &sink) });
    let seen = sink.wait_for(500);
    let done = seen.iter().filter(|(_, outcome)| outcome.is_ok()).count();
    assert!((20..500).contains(&done), "{done} were read");
    assert!(seen.iter().filter_map(|(_, o)| o.as_ref().err()).all(|e| e.kind() == ErrorKind::Cancelled));
}

fn leases_dropped_in_flight(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 8 << 20).expect("made");
    rig.write(&file, 0, &vec![0xaa; 8 << 20]).expect("written");
    let sink = Arc::new(Outcomes::default());
    for round in 0..20 {
        let reads = (0..16).map(|i| read_into(&file, i * (64 << 10), &mut rig.lease(64 << 10), i)).collect();
        rig.shard.submit_wait(batch(reads, Priority::Demand, &sink));
        // No read in flight may write into pages that are free now.
        let mut fresh: Vec<Lease> = (0..4).map(|_| rig.lease(1 << 20)).collect();
        for lease in &mut fresh {
            lease.bytes_mut().expect("idle").fill(round);
        }
        drop(sink.wait_for(16 * (usize::from(round) + 1)));
        assert!(fresh.iter().all(|l| l.bytes().expect("idle").iter().all(|&b| b == round)));
    }
    assert_eq!(rig.arena.usage().leased_bytes, 0);
}

fn close_executes_what_was_submitted(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 16 << 20).expect("made");
    let sink = Arc::new(Outcomes::default());
    for i in 0..16u64 {
        let mut lease = rig.lease(1 << 20);
        lease.bytes_mut().expect("idle").fill(i as u8 + 1);
        rig.shard.submit_wait(batch(vec![write_of(&file, i << 20, &lease, i)], Priority::Write, &sink));
    }
    rig.shard.close();
    {
        let seen = lock(&sink.seen);
        assert_eq!(seen.len(), 16, "all told before close returned");
        assert!(seen.iter().all(|(_, outcome)| outcome.is_ok()));
    }
    let bytes = std::fs::read(rig.dir.path().join("f")).expect("read");
    assert!(bytes.chunks(1 << 20).zip(1..).all(|(chunk, i)| chunk.iter().all(|&b| b == i)));
}

fn submit_after_close(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 4096).expect("made");
    rig.shard.close();
    rig.shard.close();
    let error = rig.read(&file, 0, 4096).expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed);
    let sink = Arc::new(Outcomes::default());
    assert!(rig.shard.submit(batch(vec![sync_of(&file, 3)], Priority::Write, &sink)).is_ok());
    assert_eq!(lock(&sink.seen)[0].0, 3);
    assert_eq!(rig.arena.usage().leased_bytes, 0);
}

/// A sink that blocks the shard's thread until it is opened.
struct Gate(Mutex<bool>, Condvar);

impl Sink for Gate {
    fn complete(&self, _tag: u64, _outcome: Result<()>) {
        let mut open = lock(&self.0);
        while !*open {
            open = wait_for(&self.1, open, None);
        }
    }
}

fn hold(rig: &Rig, file: &Arc<DeviceFile>) -> Arc<Gate> {
    let gate = Arc::new(Gate(Mutex::new(false), Condvar::new()));
    let sink = Arc::clone(&gate) as Arc<dyn Sink>;
    let requests = vec![read_into(file, 0, &mut rig.lease(512), 0)];
    rig.shard.submit_wait(Batch { requests, priority: Priority::Demand, sink, cancel: None });
    // Waits until the shard's thread is blocked in the gate.
    while rig.counters.snapshot().reads == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20));
    gate
}

fn release(gate: &Gate) {
    *lock(&gate.0) = true;
    gate.1.notify_all();
}

fn full_inbox_gives_the_batch_back(on: On) {
    let rig = Rig::new(on);
    let path = rig.dir.path().join("f");
    std::fs::write(&path, [0; 4096]).expect("written");
    let file = rig.dir.open_file("f", Access::ReadWrite).expect("opened");
    let gate = hold(&rig, &file);
    let sink = Arc::new(Outcomes::default());
    let mut accepted = 0;
    let refused = loop {
        match rig.shard.submit(batch(vec![sync_of(&file, accepted)], Priority::Write, &sink)) {
            Ok(()) => accepted += 1,
            Err(refused) => break refused,
        }
        assert!(accepted < 100_000, "the inbox is bounded");
    };
    assert_eq!((refused.requests.len(), refused.requests[0].tag), (1, accepted));
    assert_eq!(lock(&sink.seen).len(), 0);
    std::thread::scope(|scope| {
        // Waits until the gate opens and the inbox has space.
        scope.spawn(|| rig.shard.submit_wait(refused));
        std::thread::sleep(Duration::from_millis(10));
        release(&gate);
    });
    assert!(sink.wait_for(accepted as usize + 1).iter().all(|(_, outcome)| outcome.is_ok()));
}

fn many_submitters(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 4 << 20).expect("made");
    let pages: Vec<u8> = (0..1024u32).flat_map(|page| page.to_le_bytes().repeat(1024)).collect();
    rig.write(&file, 0, &pages).expect("written");
    std::thread::scope(|scope| {
        for seed in 0..6 {
            let (rig, file) = (&rig, &file);
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..300 {
                    let page = random.below(1024) as u64;
                    let bytes = rig.read(file, page * 4096, 4096).expect("read");
                    assert_eq!(bytes[..4], (page as u32).to_le_bytes());
                }
            });
        }
    });
}

fn priorities_all_progress(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 16 << 20).expect("made");
    rig.write(&file, 0, &vec![5; 16 << 20]).expect("written");
    let sink = Arc::new(Outcomes::default());
    let mut total = 0;
    for round in 0..30u64 {
        for priority in [Priority::Clean, Priority::Write, Priority::Prefetch, Priority::Demand] {
            let requests: Vec<Request> = (0..8)
                .map(|i| {
                    let offset = ((round * 8 + i) % 256) * (64 << 10);
                    let mut lease = rig.lease(16 << 10);
                    match priority {
                        Priority::Write | Priority::Clean if i % 2 == 0 => {
                            lease.bytes_mut().expect("idle").fill(5);
                            write_of(&file, offset, &lease, total)
                        }
                        _ => read_into(&file, offset, &mut lease, total),
                    }
                })
                .collect();
            total += 8;
            rig.shard.submit_wait(batch(requests, priority, &sink));
        }
    }
    assert!(sink.wait_for(total as usize).iter().all(|(_, outcome)| outcome.is_ok()));
    assert_eq!(rig.arena.usage().leased_bytes, 0);
}

fn demand_overtakes_queued_writes(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 64 << 20).expect("made");
    rig.write(&file, 0, &vec![5; 1 << 20]).expect("written");
    let gate = hold(&rig, &file);
    let sink = Arc::new(Outcomes::default());
    let source = rig.lease_zeroed(256 << 10);
    let writes = (0..200).map(|i| write_of(&file, (i + 4) * (256 << 10), &source, i)).collect();
    rig.shard.submit_wait(batch(writes, Priority::Write, &sink));
    let mut lease = rig.lease(4096);
    rig.shard.submit_wait(batch(vec![read_into(&file, 0, &mut lease, 1000)], Priority::Demand, &sink));
    release(&gate);
    let seen = sink.wait_for(201);
    let place = seen.iter().position(|(tag, _)| *tag == 1000).expect("read");
    // Only the writes that may be in flight with a demand read, and one slice, may precede it.
    assert!(place <= 8 + 16, "the read came after {place} of 200 writes");
}

fn panicking_sink(on: On) {
    struct Panics;
    impl Sink for Panics {
        fn complete(&self, _tag: u64, _outcome: Result<()>) {
            std::panic::resume_unwind(Box::new("a panic in a sink"));
        }
    }
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 4096).expect("made");
    let requests = vec![sync_of(&file, 0)];
    rig.shard.submit_wait(Batch { requests, priority: Priority::Write, sink: Arc::new(Panics), cancel: None });
    rig.shard.run(vec![sync_of(&file, 1)], Priority::Write).expect("the shard lives on");
}

fn poisoned_device_refuses_writes(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 8192).expect("made");
    rig.write(&file, 0, &[1; 8192]).expect("written");
    // This file cannot be synced, so its sync fails.
    let Ok(unsyncable) = std::fs::OpenOptions::new().read(true).open("/proc/self/stat") else {
        crate::io::tests::skipped("no /proc/self/stat");
        return;
    };
    let unsyncable = Arc::new(DeviceFile::new(unsyncable.into(), "unsyncable", false, false));
    let error = rig.shard.run(vec![sync_of(&unsyncable, 0)], Priority::Write).expect_err("no such operation");
    assert!(error.to_string().contains("unsyncable"), "{error}");
    for request in [sync_of(&file, 0), write_of(&file, 0, &rig.lease(4096), 1)] {
        let refused = rig.shard.run(vec![request], Priority::Write).expect_err("read-only now");
        assert_eq!(refused.kind(), ErrorKind::Poisoned);
        assert!(refused.to_string().contains("unsyncable"), "names the cause: {refused}");
    }
    assert_eq!(rig.read(&file, 0, 8192).expect("reads go on"), [1; 8192]);
    assert_eq!(rig.dir.create_file("g", 0).map(|_| ()).expect_err("read-only").kind(), ErrorKind::Poisoned);
}

fn lock_is_free_after_close(on: On) {
    let tmp = tempfile::tempdir().expect("temporary directory");
    for _ in 0..30 {
        let dir: Arc<dyn Directory> = OsDirectory::open(&tmp.path().join("d"), OPTIONS).expect("free");
        let arena = Arena::new(MemoryBudget::new(SLAB_BYTES), usize::MAX);
        let shard = Shards::new("t", on, &dir, &arena, &Arc::default());
        let file = match dir.open_file("f", Access::ReadWrite) {
            Err(_) => dir.create_file("f", 4096).expect("made"),
            Ok(file) => file,
        };
        shard.run(vec![sync_of(&file, 0)], Priority::Write).expect("synced");
        assert!(OsDirectory::open(&tmp.path().join("d"), OPTIONS).is_err());
        shard.close();
        drop((dir, file));
    }
}

fn idle_costs_nothing(on: On) {
    let tmp = tempfile::tempdir().expect("temporary directory");
    let dir: Arc<dyn Directory> = OsDirectory::open(&tmp.path().join("d"), OPTIONS).expect("opened");
    let arena = Arena::new(MemoryBudget::new(SLAB_BYTES), usize::MAX);
    let name = format!("idle-{:?}-{}", on.kind, on.neighbours);
    let counters = Arc::new(DeviceCounters::default());
    let shard = Shards::new(&name, on, &dir, &arena, &counters);
    let file = dir.create_file("f", 4096).expect("made");
    shard.run(vec![sync_of(&file, 0)], Priority::Write).expect("synced");
    std::thread::sleep(Duration::from_millis(50));
    let (cpu, calls) = (cpu_ns(&name), counters.snapshot().submissions);
    std::thread::sleep(Duration::from_millis(300));
    let (cpu_used, calls_made) = (cpu_ns(&name) - cpu, counters.snapshot().submissions - calls);
    assert!(cpu_used < 1_000_000, "{cpu_used} ns of CPU in 300 ms of nothing");
    assert_eq!(calls_made, 0);
    let start = Instant::now();
    shard.run(vec![sync_of(&file, 0)], Priority::Write).expect("wakes up again");
    assert!(start.elapsed() < Duration::from_secs(10));
}

fn read_bytes_agree_with_the_kernel(on: On) {
    let rig = Rig::new(on);
    let file = rig.dir.create_file("f", 32 << 20).expect("made");
    if !file.is_direct() {
        crate::io::tests::skipped(format!("no direct I/O here: {:?}", rig.dir.direct_io()));
        return;
    }
    rig.write(&file, 0, &Random(9).bytes(32 << 20)).expect("written");
    // Other tests read at the same time, so the kernel's count may only be larger.
    let kernel = || {
        let io = std::fs::read_to_string("/proc/self/io").ok()?;
        io.lines().find_map(|l| l.strip_prefix("read_bytes: ")).and_then(|v| v.parse::<u64>().ok())
    };
    let Some(before) = kernel() else {
        crate::io::tests::skipped("no /proc/self/io");
        return;
    };
    let mut leases: Vec<Lease> = (0..256).map(|_| rig.lease(64 << 10)).collect();
    let reads = leases.iter_mut().zip(0..).map(|(lease, i)| read_into(&file, i * (64 << 10), lease, i)).collect();
    rig.shard.run(reads, Priority::Demand).expect("read");
    let counted = rig.counters.snapshot().read_bytes;
    let seen = kernel().expect("as before") - before;
    println!("counted {counted}, the kernel {seen}");
    assert_eq!(counted, 16 << 20);
    assert!(seen >= counted, "the kernel saw {seen}");
    assert_eq!((rig.counters.snapshot().reads, rig.counters.snapshot().short_completions), (256, 0));
}

fn trimmed_slabs_and_closed_files_are_released(on: On) {
    let rig = Rig::new(on);
    for round in 0..3 {
        let name = format!("f{round}");
        let file = rig.dir.create_file(&name, 4 << 20).expect("made");
        rig.write(&file, 0, &vec![round; 4 << 20]).expect("written");
        assert_eq!(rig.read(&file, 1 << 20, 4096).expect("read"), [round; 4096]);
        rig.dir.remove_file(&name).expect("removed");
        drop(file);
        let path = rig.dir.path().to_owned();
        assert!(rig.arena.trim() >= 1);
        // The shard drops the last reference to a slab or file at its next sweep.
        rig.shard.nudge();
        let deadline = Instant::now() + Duration::from_secs(20);
        while rig.arena.budget_used() > 0 {
            assert!(Instant::now() < deadline, "slabs stay pinned");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(std::fs::read_dir(path).expect("listed").count(), 0);
    }
}
