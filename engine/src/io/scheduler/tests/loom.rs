//! Loom models: every interleaving, up to a bound on preemptions, of the threads that use a shard. `.ci/loom` runs
//! them.
//!
//! The models use the real inbox, registration queue, waiter and arena. A small loop takes the place of the shard's,
//! and a [`Bell`] takes the place of the eventfd that wakes it. They check three invariants:
//! - No wake-up is lost: a sleeping shard hears of every batch, device and closing.
//! - Each request completes exactly once, also if the shard ends meanwhile.
//! - A lease returns its pages after its last token.

use crate::error::Result;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::arena::Arena;
use crate::io::driver::interface::{Op, Wake};
use crate::io::file::device_file::DeviceFile;
use crate::io::scheduler::batch::{AcceptedBatch, Batch, Priority, Request, Sink, Waiter};
use crate::io::scheduler::inbox::Inbox;
use crate::io::scheduler::registration_queue::RegistrationQueue;
use crate::metrics::MemoryBudget;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Condvar, EventCount, Mutex, hold};
use loom::thread;
use std::sync::Arc;

/// Counts outcomes.
struct Count(AtomicUsize);

impl Sink for Count {
    fn complete(&self, _tag: u64, _outcome: Result<()>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// The bell that wakes a sleeping shard, as an eventfd does.
struct Bell(Mutex<bool>, Condvar);

impl Wake for Bell {
    fn wake(&self) {
        *hold(&self.0) = true;
        self.1.notify_one();
    }
}

impl Bell {
    fn sleep(&self) {
        let mut rung = hold(&self.0);
        while !*rung {
            rung = self.1.wait(rung).expect("no panic");
        }
        *rung = false;
    }
}

fn file() -> Arc<DeviceFile> {
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    Arc::new(DeviceFile::new(null.into(), "null", false, false))
}

fn batch(file: &Arc<DeviceFile>, sink: &Arc<Count>) -> AcceptedBatch {
    let requests = vec![Request { op: Op::Sync { file: Arc::clone(file) }, tag: 0 }];
    let sink = Arc::clone(sink) as Arc<dyn Sink>;
    AcceptedBatch::new(Batch { requests, priority: Priority::Write, sink, cancel: None })
}

fn complete(mut batch: AcceptedBatch) {
    while let Some((op, pending)) = batch.next() {
        drop(op);
        pending.complete(Ok(()));
    }
}

/// Runs the loop of a shard as `Shard::run` does, with a driver that completes each operation at once. It serves these
/// devices and those that register.
fn shard(inboxes: &[Arc<Inbox>], registrations: &RegistrationQueue<Arc<Inbox>>, bell: &Bell) {
    let mut inboxes = inboxes.to_vec();
    loop {
        inboxes.extend(registrations.take());
        let closing: Vec<bool> = inboxes.iter().map(|inbox| inbox.is_closing()).collect();
        for inbox in &inboxes {
            while let Some(batch) = inbox.pop() {
                complete(batch);
            }
        }
        let (gone, left): (Vec<_>, Vec<_>) = inboxes.into_iter().zip(closing).partition(|(_, closing)| *closing);
        gone.iter().for_each(|(inbox, _)| inbox.abandon());
        if left.is_empty() && registrations.close_if_empty() {
            return;
        }
        if left.iter().all(|(inbox, closing)| inbox.fall_asleep() && inbox.is_closing() == *closing) {
            bell.sleep();
        }
        inboxes = left.into_iter().map(|(inbox, _)| inbox).collect();
        inboxes.iter().for_each(|inbox| inbox.woke_up());
    }
}

fn registrations(bell: &Arc<Bell>) -> Arc<RegistrationQueue<Arc<Inbox>>> {
    let registrations = RegistrationQueue::new();
    registrations.set_waker(Arc::clone(bell) as Arc<dyn Wake>);
    Arc::new(registrations)
}

fn inbox(bell: &Arc<Bell>) -> Arc<Inbox> {
    let inbox = Arc::new(Inbox::new());
    inbox.set_waker(Arc::clone(bell) as Arc<dyn Wake>);
    inbox
}

fn rig() -> (Arc<Inbox>, Arc<Bell>, Arc<Count>) {
    let bell = Arc::new(Bell(Mutex::new(false), Condvar::new()));
    (inbox(&bell), bell, Arc::new(Count(AtomicUsize::new(0))))
}

#[test]
fn loom_a_notification_is_never_lost() {
    loom::model(|| {
        let (event, flag) = (Arc::new(EventCount::default()), Arc::new(AtomicBool::new(false)));
        let notifier = {
            let (event, flag) = (Arc::clone(&event), Arc::clone(&flag));
            thread::spawn(move || {
                flag.store(true, Ordering::Release);
                event.notify();
            })
        };
        loop {
            let seen = event.epoch();
            if flag.load(Ordering::Acquire) {
                break;
            }
            event.wait_past(seen, None);
        }
        notifier.join().expect("no panic");
        assert_eq!(event.waiters(), 0);
    });
}

#[test]
fn loom_a_waiter_wakes_when_all_ended() {
    loom::model(|| {
        let waiter = Waiter::new(2);
        let sinks: Vec<_> = (0..2)
            .map(|tag| {
                let waiter = Arc::clone(&waiter);
                thread::spawn(move || waiter.complete(tag, Ok(())))
            })
            .collect();
        assert!(waiter.wait().is_ok() && waiter.is_done());
        sinks.into_iter().for_each(|sink| sink.join().expect("no panic"));
    });
}

#[test]
fn loom_a_sleeping_shard_hears_of_every_batch() {
    let file = file();
    loom::model(move || {
        let (inbox, bell, count) = rig();
        let worker = {
            let (inbox, bell) = (Arc::clone(&inbox), Arc::clone(&bell));
            thread::spawn(move || shard(&[inbox], &registrations(&bell), &bell))
        };
        // Two batches are more than the inbox holds under loom.
        inbox.push_wait(batch(&file, &count));
        inbox.push_wait(batch(&file, &count));
        inbox.close();
        worker.join().expect("no panic");
        assert_eq!(count.0.load(Ordering::Acquire), 2);
    });
}

#[test]
fn loom_a_sleeping_shard_hears_of_every_device() {
    let file = file();
    loom::model(move || {
        let (first, bell, count) = rig();
        let second = inbox(&bell);
        let worker = {
            let (inboxes, bell) = ([Arc::clone(&first), Arc::clone(&second)], Arc::clone(&bell));
            thread::spawn(move || shard(&inboxes, &registrations(&bell), &bell))
        };
        let producer = {
            let (second, accepted) = (Arc::clone(&second), batch(&file, &count));
            thread::spawn(move || {
                second.push_wait(accepted);
                second.close();
            })
        };
        first.push_wait(batch(&file, &count));
        first.close();
        producer.join().expect("no panic");
        worker.join().expect("no panic");
        assert_eq!(count.0.load(Ordering::Acquire), 2);
    });
}

#[test]
fn loom_a_device_that_joins_is_served_or_turned_away() {
    let file = file();
    loom::model(move || {
        let (first, bell, count) = rig();
        let registrations = registrations(&bell);
        let worker = {
            let (first, registrations, bell) = (Arc::clone(&first), Arc::clone(&registrations), Arc::clone(&bell));
            thread::spawn(move || shard(&[first], &registrations, &bell))
        };
        let registration = {
            let (registrations, second, accepted) = (Arc::clone(&registrations), inbox(&bell), batch(&file, &count));
            thread::spawn(move || {
                if registrations.push(Arc::clone(&second)).is_ok() {
                    second.push_wait(accepted);
                    second.close();
                }
            })
        };
        // The last device of the thread closes meanwhile.
        first.close();
        registration.join().expect("no panic");
        worker.join().expect("no panic");
        // The shard completed the batch, or the refused registration dropped it.
        assert_eq!(count.0.load(Ordering::Acquire), 1);
        assert!(registrations.push(inbox(&bell)).is_err());
    });
}

#[test]
fn loom_a_closing_shard_completes_each_batch_once() {
    let file = file();
    loom::model(move || {
        let (inbox, bell, count) = rig();
        let worker = {
            let (inbox, bell) = (Arc::clone(&inbox), Arc::clone(&bell));
            thread::spawn(move || shard(&[inbox], &registrations(&bell), &bell))
        };
        let producer = {
            let (inbox, accepted) = (Arc::clone(&inbox), batch(&file, &count));
            thread::spawn(move || drop(inbox.push(accepted)))
        };
        inbox.close();
        producer.join().expect("no panic");
        worker.join().expect("no panic");
        // The shard completed the batch, the end of the inbox, or the producer.
        assert_eq!(count.0.load(Ordering::Acquire), 1);
    });
}

#[test]
fn loom_a_shard_that_dies_completes_each_batch_once() {
    let file = file();
    loom::model(move || {
        let (inbox, _bell, count) = rig();
        let producer = {
            let (inbox, accepted) = (Arc::clone(&inbox), batch(&file, &count));
            thread::spawn(move || drop(inbox.push(accepted)))
        };
        inbox.abandon();
        producer.join().expect("no panic");
        assert_eq!(count.0.load(Ordering::Acquire), 1);
    });
}

#[test]
fn loom_a_request_that_is_dropped_tells_its_waiter() {
    let file = file();
    loom::model(move || {
        let waiter = Waiter::new(2);
        let requests = (0..2).map(|tag| Request { op: Op::Sync { file: Arc::clone(&file) }, tag }).collect();
        let sink = Arc::clone(&waiter) as Arc<dyn Sink>;
        let mut accepted = AcceptedBatch::new(Batch { requests, priority: Priority::Write, sink, cancel: None });
        let (_, first) = accepted.next().expect("a request");
        let driver = thread::spawn(move || first.complete(Ok(())));
        let shard = thread::spawn(move || drop(accepted));
        assert!(waiter.wait().is_err(), "one was never executed");
        driver.join().expect("no panic");
        shard.join().expect("no panic");
    });
}

#[test]
fn loom_a_lease_returns_with_its_last_token() {
    loom::model(|| {
        let arena = Arena::new(MemoryBudget::new(2 * SLAB_BYTES), usize::MAX);
        let mut lease = arena.lease(4096).expect("a lease");
        let target = lease.read_target(0..4096).expect("a target");
        assert!(lease.bytes().is_none());
        let driver = thread::spawn(move || drop(target));
        // The bytes are out of reach as long as the read is in flight.
        let seen = lease.bytes().is_some();
        drop(lease);
        driver.join().expect("no panic");
        assert!(arena.usage().leased_bytes == 0, "seen {seen}");
    });
}
