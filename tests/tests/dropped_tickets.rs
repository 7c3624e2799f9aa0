//! A host that drops futures and tickets at any await. Nothing leaks, and no other read gets wrong bytes.
//!
//! A ticket is dropped before its first poll, after some polls, after its deadline, or as a batch. Commits, cuts and
//! other reads run in between. `STRATAKV_TEST_TURNS` sets the number of turns.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use stratakv::read::ReadTicket;
use stratakv::{ByteSize, CreateOptions, Durability, ErrorKind, SelectRequest, Selection, Sequence, StoreOptions};
use stratakv_testing::rng::Rng;
use stratakv_testing::{GroupPattern, TestStore, medium};
use stratakv_tests::count_from_env;

const PATTERN: GroupPattern = GroupPattern { heads: 2, dim: 64, group: 8 };
const GROUPS: u64 = 1500;

stratakv_tests::on_threads!(
    tickets_dropped_at_any_poll_leave_no_buffer_and_no_wrong_byte,
    a_ticket_dropped_while_it_waits_for_memory_frees_its_place,
);

fn options(threads: Option<usize>) -> StoreOptions {
    medium().memory_limit(ByteSize::mib(16)).shard_threads(threads)
}

fn some_groups(rng: &mut Rng, count: usize) -> Vec<u64> {
    let mut groups: Vec<u64> = (0..count).map(|_| rng.below(GROUPS as usize) as u64).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn select(sequence: &Sequence, groups: &[u64]) -> Selection {
    sequence.select(0, SelectRequest::groups(groups)).expect("groups that are there")
}

/// Polls a ticket up to `polls` times, with pauses, and drops it. Checks its bytes if it ends before.
fn poll_and_drop(mut ticket: ReadTicket, polls: usize, groups: &[u64]) -> bool {
    let mut context = Context::from_waker(Waker::noop());
    for poll in 0..polls {
        match Pin::new(&mut ticket).poll(&mut context) {
            Poll::Ready(batch) => {
                PATTERN.check(&batch.expect("a read"), 0, groups);
                return true;
            }
            Poll::Pending if poll % 3 == 2 => std::thread::sleep(Duration::from_micros(50)),
            Poll::Pending => {}
        }
    }
    false
}

fn tickets_dropped_at_any_poll_leave_no_buffer_and_no_wrong_byte(threads: Option<usize>) {
    let mut store = TestStore::on_devices(2, options(threads));
    let mut sequence = PATTERN.write(&store, CreateOptions::new().key("s").copies(2), GROUPS);
    let mut rng = Rng(7);
    let (mut finished, mut dropped, mut kept) = (0, 0, Vec::new());
    for turn in 0..count_from_env("STRATAKV_TEST_TURNS", 400) {
        let count = 1 + rng.below(60);
        let groups = some_groups(&mut rng, count);
        let selection = select(&sequence, &groups);
        let selections = [&selection];
        let request = store.read(&selections);
        let ticket = if rng.below(3) == 0 { request.prefetch() } else { request }.submit().expect("a ticket");
        match rng.below(6) {
            0 => drop(ticket),
            1 | 2 => {
                let polls = rng.below(12);
                let ended = poll_and_drop(ticket, polls, &groups);
                (finished, dropped) = (finished + usize::from(ended), dropped + usize::from(!ended));
            }
            3 => match ticket.wait_deadline(Some(Instant::now() + Duration::from_micros(rng.below(300) as u64))) {
                Ok(batch) => PATTERN.check(&batch, 0, &groups),
                Err(e) => assert_eq!(e.kind(), ErrorKind::Deadline, "{e}"),
            },
            4 => kept.push((ticket, groups)),
            _ => PATTERN.check(&ticket.wait().expect("a read"), 0, &groups),
        }
        if kept.len() > 6 {
            let at = rng.below(kept.len());
            let (ticket, groups) = kept.swap_remove(at);
            let polls = rng.below(40);
            poll_and_drop(ticket, polls, &groups);
        }
        // Groups behind those that are read come and go.
        if turn % 16 == 0 {
            PATTERN.append(&mut sequence, GROUPS);
            sequence.commit(Durability::Sync).expect("a commit beside dropped reads");
            sequence.truncate(GROUPS * PATTERN.group as u64).expect("a cut");
        }
    }
    assert!(finished > 0 && dropped > 0, "{finished} tickets finished, {dropped} were dropped while pending");
    for (ticket, groups) in kept.drain(..) {
        PATTERN.check(&ticket.wait().expect("a read"), 0, &groups);
    }
    // Dropped reads held more memory than there is, one after the other. A read of everything takes most of it.
    let all: Vec<u64> = (0..GROUPS).collect();
    let everything = store.read(&[&select(&sequence, &all)]).submit().expect("a ticket");
    let batch = everything.wait_deadline(Some(Instant::now() + Duration::from_secs(20))).expect("free memory");
    PATTERN.check(&batch, 0, &all);
    drop(batch);
    assert!(store.health().is_well(), "{:?}", store.health());
    drop(sequence);
    store.close().expect("no dropped read holds the store");
}

fn a_ticket_dropped_while_it_waits_for_memory_frees_its_place(threads: Option<usize>) {
    let store = TestStore::new(options(threads));
    let sequence = PATTERN.write(&store, CreateOptions::new().key("s"), GROUPS);
    let groups: Vec<u64> = (0..400).collect();
    let selection = select(&sequence, &groups);
    let mut rng = Rng(11);
    for _ in 0..20 {
        // Batches take the memory, until a ticket has to wait for some.
        let mut batches = Vec::new();
        let waiting = loop {
            let mut ticket = store.read(&[&selection]).submit().expect("a ticket");
            let mut context = Context::from_waker(Waker::noop());
            let deadline = Instant::now() + Duration::from_millis(100);
            let batch = loop {
                match Pin::new(&mut ticket).poll(&mut context) {
                    Poll::Ready(batch) => break Some(batch.expect("a read")),
                    Poll::Pending if Instant::now() > deadline => break None,
                    Poll::Pending => std::thread::yield_now(),
                }
            };
            match batch {
                Some(batch) => batches.push(batch),
                None => break ticket,
            }
            assert!(batches.len() < 200, "memory for {} batches", batches.len());
        };
        let first = rng.below(2) == 0;
        if first {
            drop(waiting);
            batches.clear();
        } else {
            batches.clear();
            drop(waiting);
        }
        PATTERN.check(&store.read(&[&selection]).wait().expect("a read"), 0, &groups);
    }
}
