//! Shards over faulty drivers.

use std::sync::Arc;

use super::*;
use crate::error::{Error, ErrorKind};
use crate::io::driver::interface::{Completion, Driver, ServedDevice, Wait, Wake};
use crate::io::file::poison::Poison;
use crate::io::scheduler::batch::AcceptedBatch;
use crate::io::scheduler::device_handle::DeviceHandle;
use crate::io::scheduler::inbox::Inbox;
use crate::io::scheduler::registration_queue::RegistrationQueue;
use crate::io::scheduler::shard::Shard;

struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

/// A driver that completes `good` operations, the latest first, and then breaks.
struct Breaks {
    good: usize,
    held: Vec<(u64, Op)>,
    room: usize,
}

impl Driver for Breaks {
    fn add(&mut self, _port: usize, _device: &ServedDevice<'_>) -> Result<()> {
        Ok(())
    }

    fn remove(&mut self, _port: usize) {}

    fn depth(&self) -> usize {
        self.room
    }

    fn queue(&mut self, _port: usize, id: u64, op: Op) {
        assert!(self.held.iter().all(|(held, _)| *held != id) && self.held.len() < self.room);
        self.held.push((id, op));
    }

    fn drive(&mut self, _wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        if self.good == 0 {
            return Err(Error::new(ErrorKind::Io, "the ring is broken"));
        }
        for _ in 0..self.good.min(3) {
            let Some((id, _)) = self.held.pop() else { break };
            self.good -= 1;
            done.push(Completion { id, outcome: Ok(()) });
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWake)
    }

    fn name(&self) -> &'static str {
        "breaks"
    }

    fn notes(&self) -> &[String] {
        &[]
    }
}

#[test]
fn broken_driver_completes_everything_once() {
    let null = std::fs::File::open("/dev/null").expect("exists");
    let file = Arc::new(DeviceFile::new(null.into(), "null", false, false));
    let arena = Arena::new(MemoryBudget::new(SLAB_BYTES), usize::MAX);
    for (good, room) in [(0, 8), (1, 1), (50, 8), (99, 500)] {
        let poison = Arc::new(Poison::default());
        let handle = DeviceHandle::new(Arc::clone(&poison), Arc::default());
        let inbox = Arc::clone(&handle.inbox);
        let driver = Box::new(Breaks { good, held: Vec::new(), room });
        let mut shard = Shard::new(driver, Arc::new(RegistrationQueue::new()));
        shard.serve("test", handle).expect("served");
        let sink = Arc::new(Outcomes::default());
        for i in 0..10u64 {
            let priority = [Priority::Demand, Priority::Prefetch, Priority::Write, Priority::Clean][i as usize % 4];
            let requests =
                (0..10).map(|k| read_into(&file, 0, &mut arena.lease(4096).expect("room"), i * 10 + k)).collect();
            assert!(inbox.push(AcceptedBatch::new(batch(requests, priority, &sink))).is_ok());
        }
        shard.run();
        let mut seen = std::mem::take(&mut *lock(&sink.seen));
        assert_eq!(seen.iter().filter(|(_, outcome)| outcome.is_ok()).count(), good);
        let kinds = [ErrorKind::Io, ErrorKind::Closed];
        assert!(seen.iter().filter_map(|(_, o)| o.as_ref().err()).all(|e| kinds.contains(&e.kind())));
        seen.sort_by_key(|(tag, _)| *tag);
        assert!(seen.iter().map(|(tag, _)| *tag).eq(0..100), "each exactly once");
        assert_eq!(arena.usage().leased_bytes, 0);
        assert!(poison.check().is_err(), "nothing may be written through a broken driver");
        // A later batch completes at once.
        assert!(inbox.push(AcceptedBatch::new(batch(vec![sync_of(&file, 7)], Priority::Write, &sink))).is_ok());
        assert_eq!(lock(&sink.seen)[0].1.as_ref().expect_err("closed").kind(), ErrorKind::Closed);
    }
}

#[test]
fn broken_driver_fails_every_device_of_its_thread() {
    let null = std::fs::File::open("/dev/null").expect("exists");
    let file = Arc::new(DeviceFile::new(null.into(), "null", false, false));
    let arena = Arena::new(MemoryBudget::new(SLAB_BYTES), usize::MAX);
    for good in [0, 7, 30] {
        let driver = Box::new(Breaks { good, held: Vec::new(), room: 100 });
        let links: Vec<DeviceHandle> = (0..3).map(|_| DeviceHandle::new(Arc::default(), Arc::default())).collect();
        let mut shard = Shard::new(driver, Arc::new(RegistrationQueue::new()));
        for handle in &links {
            shard.serve("test", handle.clone()).expect("served");
        }
        let sink = Arc::new(Outcomes::default());
        for (handle, device) in links.iter().zip(0..) {
            let requests =
                (0..12).map(|k| read_into(&file, 0, &mut arena.lease(4096).expect("room"), device * 12 + k)).collect();
            assert!(handle.inbox.push(AcceptedBatch::new(batch(requests, Priority::Demand, &sink))).is_ok());
        }
        shard.run();
        let mut seen = std::mem::take(&mut *lock(&sink.seen));
        assert_eq!(seen.iter().filter(|(_, outcome)| outcome.is_ok()).count(), good);
        seen.sort_by_key(|(tag, _)| *tag);
        assert!(seen.iter().map(|(tag, _)| *tag).eq(0..36), "each exactly once");
        assert_eq!(arena.usage().leased_bytes, 0);
        assert!(links.iter().all(|handle| handle.poison.check().is_err() && handle.inbox.is_closing()));
        let failed: u64 = links.iter().map(|handle| handle.counters.snapshot().errors).sum();
        assert_eq!(failed, 36 - good as u64);
    }
}

/// A driver that forgets failures like the kernel: the first sync fails, and every later sync succeeds.
struct ForgetsFailures {
    held: Vec<(u64, Op)>,
    syncs_seen: Arc<Mutex<usize>>,
    inbox: Arc<Inbox>,
}

impl Driver for ForgetsFailures {
    fn add(&mut self, _port: usize, _device: &ServedDevice<'_>) -> Result<()> {
        Ok(())
    }

    fn remove(&mut self, _port: usize) {}

    fn depth(&self) -> usize {
        100
    }

    fn queue(&mut self, _port: usize, id: u64, op: Op) {
        self.held.push((id, op));
    }

    fn drive(&mut self, _wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        // The latest first, which is the worst order.
        while let Some((id, op)) = self.held.pop() {
            let mut seen = lock(&self.syncs_seen);
            *seen += usize::from(matches!(op, Op::Sync { .. }));
            let failed = matches!(op, Op::Sync { .. }) && *seen == 1;
            let outcome = if failed { Err(Error::new(ErrorKind::Io, "sync f: EIO")) } else { Ok(()) };
            done.push(Completion { id, outcome });
        }
        self.inbox.close();
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWake)
    }

    fn name(&self) -> &'static str {
        "forgets"
    }

    fn notes(&self) -> &[String] {
        &[]
    }
}

#[test]
fn syncs_are_not_believed_after_one_failed() {
    let open = || std::fs::File::open("/dev/null").expect("exists");
    let file = |name| Arc::new(DeviceFile::new(open().into(), name, false, false));
    let (first, second) = (file("first"), file("second"));
    let handle = DeviceHandle::new(Arc::default(), Arc::default());
    let inbox = Arc::clone(&handle.inbox);
    let syncs_seen = Arc::new(Mutex::new(0));
    let driver =
        Box::new(ForgetsFailures { held: Vec::new(), syncs_seen: Arc::clone(&syncs_seen), inbox: Arc::clone(&inbox) });
    let mut shard = Shard::new(driver, Arc::new(RegistrationQueue::new()));
    shard.serve("test", handle).expect("served");
    let sink = Arc::new(Outcomes::default());
    for (tag, file, priority) in [
        (0, &first, Priority::Write),
        (1, &first, Priority::Clean),
        (2, &second, Priority::Prefetch),
        (3, &first, Priority::Write),
    ] {
        assert!(inbox.push(AcceptedBatch::new(batch(vec![sync_of(file, tag)], priority, &sink))).is_ok());
    }
    shard.run();
    let seen = lock(&sink.seen);
    assert_eq!(seen.len(), 4);
    for (tag, outcome) in seen.iter() {
        let kind = outcome.as_ref().expect_err("a failed device").kind();
        assert_eq!(kind == ErrorKind::Io, *tag == 0, "{tag}: {kind:?}");
    }
    // One sync of each file. The shard never submitted the other syncs of the first file.
    assert_eq!(*lock(&syncs_seen), 2);
}

#[test]
fn submitters_that_race_with_the_end_hear_every_outcome() {
    let null = std::fs::File::open("/dev/null").expect("exists");
    let file = Arc::new(DeviceFile::new(null.into(), "null", false, false));
    for _ in 0..200 {
        let inbox = Inbox::new();
        let sink = Arc::new(Outcomes::default());
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (inbox, sink, file) = (&inbox, &sink, &file);
                scope.spawn(move || {
                    for i in 0..20 {
                        inbox.push_wait(AcceptedBatch::new(batch(
                            vec![sync_of(file, thread * 20 + i)],
                            Priority::Write,
                            sink,
                        )));
                    }
                });
            }
            scope.spawn(|| inbox.abandon());
        });
        let mut tags: Vec<u64> = lock(&sink.seen).iter().map(|(tag, _)| *tag).collect();
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..40));
    }
}
