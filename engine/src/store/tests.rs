//! Copies whose device is late or fails, and what others learn of a change that somebody queued.

use super::{Store, StoreStatus};
use crate::device::posix::trouble::{self, Trouble};
use crate::device::slab::SLAB_BYTES;
use crate::layout::{KvLayout, TensorView};
use crate::log::{CommitRequest, CopyChange, places};
use crate::metrics::{Evicted, EvictionReason, lock};
use crate::options::{ByteSize, DriverChoice, Durability, SequenceOptions};
use crate::sequence::Sequence;

use std::os::unix::fs::DirBuilderExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const DIM: usize = 64;
const GROUP: usize = 8;
const GROUPS: u64 = 512;
/// Parts that must have been read before any counts as late.
const ROUNDS: u64 = 300;
/// Segments of the store, at most.
const SEGMENTS_MAX: usize = 6;
/// What the late device takes longer, beyond any pause of a busy machine.
const DELAY: Duration = Duration::from_secs(2);

/// Two devices with a copy of everything each; every element of a group is its number.
fn filled(dir: &std::path::Path) -> (Store, Sequence) {
    for device in ["0", "1"] {
        std::fs::DirBuilder::new().mode(0o700).create(dir.join(device)).unwrap();
    }
    let options = Store::options().device(dir.join("0")).device(dir.join("1")).driver(DriverChoice::Posix);
    let options = options.memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::mib(1)).hedge_percentile(Some(0.9));
    let store = options.frame_bytes(ByteSize::kib(128)).gap_limit(ByteSize(0)).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let options = SequenceOptions::new().key("s").replicas(2);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), options).unwrap();
    for group in 0..GROUPS {
        let row = vec![group as f32; GROUP * DIM];
        let view = TensorView::token_major(&row, GROUP, 1, DIM);
        sequence.append(0, view, view).unwrap();
    }
    sequence.commit(Durability::Sync).unwrap();
    (store, sequence)
}

/// Reads some groups, every byte compared. How long it took.
fn read(store: &Store, sequence: &Sequence, groups: &[u64]) -> Duration {
    let view = sequence.select_groups(0, groups).unwrap();
    let start = Instant::now();
    let batch = store.read(&[&view]).unwrap().wait().unwrap();
    let took = start.elapsed();
    for (nth, group) in groups.iter().enumerate() {
        let wanted = half::f16::from_f32(*group as f32).to_le_bytes();
        let (keys, values) = batch.get(0).unwrap().group(nth).unwrap();
        let same = |plane: &[u8]| plane.as_chunks::<2>().0.iter().all(|element| *element == wanted);
        assert!(same(keys) && same(values), "group {group} holds something else");
    }
    took
}

fn sum(status: &StoreStatus, of: impl Fn(&crate::metrics::DeviceSnapshot) -> u64) -> u64 {
    status.devices.iter().map(|device| of(&device.counters)).sum()
}

/// What must be the same before and after: descriptors, and slabs that can be had.
fn resources(store: &Store) -> (usize, usize) {
    let arena = &store.inner.devices.arena;
    let slabs: Vec<_> = std::iter::from_fn(|| arena.lease(SLAB_BYTES).ok()).collect();
    (std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count), slabs.len())
}

/// What is late may still land, in buffers that nobody reads; then they are free.
fn nothing_is_held(store: &Store, before: (usize, usize)) {
    let deadline = Instant::now() + 10 * DELAY;
    // Files of segments that were not read before stay open.
    let held = |(files, slabs): (usize, usize)| files > before.0 + SEGMENTS_MAX || slabs != before.1;
    while held(resources(store)) {
        assert!(Instant::now() < deadline, "descriptors and slabs: {:?}, before {before:?}", resources(store));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_is_late_or_fails_is_read_from_another_copy() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path());
    for round in 0..ROUNDS {
        read(&store, &sequence, &[round % GROUPS, (round + 200) % GROUPS]);
    }
    read(&store, &sequence, &(0..GROUPS).collect::<Vec<_>>());
    let held = resources(&store);
    let before = store.status();
    for slow in ["stratakv-0-", "stratakv-1-"] {
        trouble::set(Some((slow, Trouble::Late(DELAY))));
        for round in 0..4 {
            let took = read(&store, &sequence, &[round * 7, round * 7 + 1, round * 7 + 300]);
            assert!(took < DELAY, "{slow} is late, and {took:?} were waited for it");
        }
        trouble::set(None);
        // Its threads are late until what they have begun has ended.
        std::thread::sleep(DELAY);
        nothing_is_held(&store, held);
    }
    let late = store.status();
    assert!(sum(&late, |d| d.hedged) > sum(&before, |d| d.hedged), "no read of either device was late");
    assert_eq!(sum(&late, |d| d.errors), sum(&before, |d| d.errors));
    assert!(store.health().is_well(), "late is not wrong: {:?}", store.health());
    for broken in ["stratakv-0-", "stratakv-1-"] {
        trouble::set(Some((broken, Trouble::Fails)));
        for round in 0..8 {
            read(&store, &sequence, &[round * 11, round * 11 + 1, round * 11 + 400]);
        }
        trouble::set(None);
        nothing_is_held(&store, held);
    }
    let failed = store.status();
    assert!(sum(&failed, |d| d.errors) > sum(&late, |d| d.errors));
    assert!(sum(&failed, |d| d.other_copies) > sum(&late, |d| d.other_copies));
    assert!(!store.health().is_well());
}

#[test]
fn copies_that_were_not_written_are_made_by_the_background() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut sequence) = filled(dir.path());
    let before = store.status();
    trouble::set(Some(("stratakv-1-", Trouble::NotWritten)));
    for group in GROUPS..2 * GROUPS {
        let row = vec![group as f32; GROUP * DIM];
        let view = TensorView::token_major(&row, GROUP, 1, DIM);
        sequence.append(0, view, view).unwrap();
    }
    trouble::set(None);
    sequence.commit(Durability::Sync).unwrap();
    assert!(sum(&store.status(), |d| d.errors) > sum(&before, |d| d.errors), "every copy was written");
    let deadline = Instant::now() + Duration::from_secs(60);
    let alone = || lock(&store.inner.catalog).frames.values().filter(|frame| frame.copies() < 2).count();
    while alone() > 0 {
        assert!(Instant::now() < deadline, "{} frames have one copy", alone());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn whoever_reads_a_frame_learns_of_a_change_of_copies_that_others_committed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path());
    let frames: Vec<_> = lock(&store.inner.catalog).frames.clone().into_iter().collect();
    let mut request = CommitRequest::default();
    for (id, frame) in &frames {
        let seen = places(frame);
        let wanted = seen.iter().rev().copied().collect();
        request.copies.push(CopyChange { frame: *id, seen, wanted });
    }
    // As a move that found no space for a checkpoint: kept, and made by the next commit that does.
    store.inner.committer.enqueue(request, None);
    store.inner.flush_commits().unwrap();
    for (id, before) in frames {
        let now = lock(&store.inner.catalog).frames[&id].location;
        assert_ne!(now.device, before.location.device);
        let slot = lock(&store.inner.space).frame_slot(id).expect("the sequence is open");
        assert_eq!(slot.now().segment.key, (now.device, now.segment));
    }
    read(&store, &sequence, &(0..GROUPS).collect::<Vec<_>>());
}

#[test]
fn evictions_that_were_kept_are_told_once_they_are_durable() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _sequence) = filled(dir.path());
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&told);
    store.observe(move |event| lock(&events).push(event.id));
    let (id, key, reason) = (77, String::new(), EvictionReason::Space);
    store.inner.observers.keep(vec![Evicted { id, key, tokens: 1, bytes: 4096, reason }]);
    store.tend().unwrap();
    // The background may have been faster, and tell it now.
    let deadline = Instant::now() + Duration::from_secs(60);
    while lock(&told).is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    store.tend().unwrap();
    assert_eq!((lock(&told).as_slice(), store.health().evictions), (&[77][..], 1));
}
