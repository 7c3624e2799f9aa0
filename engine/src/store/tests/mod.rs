//! A store whose devices are late, fail or hold damaged frames.
//!
//! - This file reads from other copies while a device is late or fails. Nothing stays held afterwards.
//! - `closing` closes stores, also in a child of their process.
//! - `cleaning` cleans segments with damaged frames.
//! - `commits` orders commits.
//! - `copies` changes and reads copies.
//! - `opening` opens stores.
//!
//! Tests that measure lateness hold [`ALONE`], so that one runs at a time.

mod cleaning;
mod closing;
mod commits;
mod copies;
mod opening;

use super::{Store, StoreStatus};
use crate::error::ErrorKind;
use crate::io::buffer::SLAB_BYTES;
use crate::io::driver::posix::trouble::{self, Trouble};
use crate::layout::{KvLayout, TensorView};
use crate::metrics::lock;
use crate::options::{ByteSize, CreateOptions, DriverChoice, Durability};
use crate::plan::{DeviceLoads, ReadPriority, SelectRequest, plan};
use crate::read::{AttendOptions, ReadBatch};
use crate::sequence::{OpenSequence, Sequence};

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const DIM: usize = 64;
const GROUP: usize = 8;
const GROUPS: u64 = 512;
/// Parts that must have been read before a part counts as late.
const ROUNDS: u64 = 300;
/// The delay of the late device, which is longer than any pause of a busy machine.
const DELAY: Duration = Duration::from_secs(2);

/// Held by tests that measure how late devices are, so that one runs at a time.
pub(crate) static ALONE: Mutex<()> = Mutex::new(());

/// Returns a store with a copy of everything on each device. Every element of a group is the number of the group.
pub(crate) fn filled(dir: &std::path::Path, devices: u8) -> (Store, Sequence) {
    filled_on(dir, devices, None)
}

/// Returns the same store with this number of threads for the devices.
fn filled_on(dir: &std::path::Path, devices: u8, threads: Option<usize>) -> (Store, Sequence) {
    let options = (0..devices).fold(Store::options().driver(DriverChoice::Posix), |options, device| {
        let device = dir.join(device.to_string());
        std::fs::DirBuilder::new().mode(0o700).create(&device).unwrap();
        options.device(device)
    });
    let options = options.memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::mib(1)).hedge_percentile(Some(0.9));
    let options = options.frame_bytes(ByteSize::kib(128)).gap_limit(ByteSize(0));
    let store = options.shard_threads(threads).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let options = CreateOptions::new().key("s").copies(devices);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), options).unwrap();
    for group in 0..GROUPS {
        let row = vec![group as f32; GROUP * DIM];
        let view = TensorView::token_major(&row, GROUP, 1, DIM);
        sequence.append(0, view, view).unwrap();
    }
    sequence.commit(Durability::Sync).unwrap();
    (store, sequence)
}

/// Reads some groups and compares every byte. Returns the duration of the read.
fn read(store: &Store, sequence: &Sequence, groups: &[u64]) -> Duration {
    let selection = sequence.select(0, SelectRequest::groups(groups)).unwrap();
    let start = Instant::now();
    let batch = store.read(&[&selection]).submit().unwrap().wait().unwrap();
    let took = start.elapsed();
    check(&batch, groups);
    took
}

fn check(batch: &ReadBatch, groups: &[u64]) {
    for (nth, group) in groups.iter().enumerate() {
        let wanted = half::f16::from_f32(*group as f32).to_le_bytes();
        let (keys, values) = batch.get(0).unwrap().group(nth).unwrap();
        let same = |plane: &[u8]| plane.as_chunks::<2>().0.iter().all(|element| *element == wanted);
        assert!(same(&keys) && same(&values), "group {group} holds something else");
    }
}

/// Reads enough parts that the store can tell late ones, and then every group.
fn warm_up(store: &Store, sequence: &Sequence) {
    for round in 0..ROUNDS {
        read(store, sequence, &[round % GROUPS, (round + 200) % GROUPS]);
    }
    read(store, sequence, &(0..GROUPS).collect::<Vec<_>>());
}

fn sum(status: &StoreStatus, of: impl Fn(&crate::metrics::DeviceSnapshot) -> u64) -> u64 {
    status.devices.iter().map(|device| of(&device.counters)).sum()
}

/// Returns the number of open descriptors of each file of the store, and the number of slabs that can be leased. After
/// a test there are no more descriptors and no fewer slabs than before.
fn resources(store: &Store, dir: &Path) -> (BTreeMap<PathBuf, usize>, usize) {
    let arena = &store.inner.devices.arena;
    let slabs: Vec<_> = std::iter::from_fn(|| arena.lease(SLAB_BYTES).ok()).collect();
    let mut files = BTreeMap::new();
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    for file in links.filter_map(|entry| std::fs::read_link(entry.path()).ok()).filter(|file| file.starts_with(dir)) {
        *files.entry(file).or_default() += 1;
    }
    (files, slabs.len())
}

/// Waits until all resources are free. Late reads may still complete, in buffers that no read uses.
fn nothing_is_held(store: &Store, dir: &Path, before: &(BTreeMap<PathBuf, usize>, usize)) {
    let deadline = Instant::now() + 10 * DELAY;
    let count = |of: &BTreeMap<PathBuf, usize>, file: &PathBuf| of.get(file).copied().unwrap_or(0);
    // A segment file may have been opened meanwhile. Before, a sync may have had a directory open.
    let no_more = |now: &BTreeMap<PathBuf, usize>, file: &PathBuf| match (count(&before.0, file), count(now, file)) {
        (0, 1) => file.to_string_lossy().contains("/segments/"),
        (before, now) => now <= before,
    };
    loop {
        let now = resources(store, dir);
        // A late read of the preparation may have held a slab.
        if now.1 >= before.1 && now.0.keys().all(|file| no_more(&now.0, file)) {
            return;
        }
        assert!(Instant::now() < deadline, "descriptors and slabs: {now:?}, before {before:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Opens the file of every segment on every device, as reads of all segments would.
fn open_every_file(store: &Store) {
    let inner = &store.inner;
    let catalog = lock(&inner.catalog);
    for (key, meta) in &catalog.segments {
        lock(&inner.space).handle(&inner.devices, *key, meta).unwrap().file().unwrap();
    }
}

#[test]
fn what_is_late_or_fails_is_read_from_another_copy() {
    late_or_failed(None);
}

#[test]
fn what_is_late_or_fails_is_read_from_another_copy_of_the_same_thread() {
    late_or_failed(Some(1));
}

fn late_or_failed(threads: Option<usize>) {
    let _alone = lock(&ALONE);
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled_on(dir.path(), 2, threads);
    warm_up(&store, &sequence);
    open_every_file(&store);
    let held = resources(&store, dir.path());
    let before = store.status();
    let slow: [(&str, &[_]); 2] =
        [("0", &[("stratakv-0-", Trouble::Late(DELAY))]), ("1", &[("stratakv-1-", Trouble::Late(DELAY))])];
    for (slow, troubles) in slow {
        let trouble = trouble::set(dir.path(), troubles);
        for round in 0..4 {
            let took = read(&store, &sequence, &[round * 7, round * 7 + 1, round * 7 + 300]);
            assert!(took < DELAY, "{slow} is late, and {took:?} were waited for it");
        }
        // A block that another copy gave is used again, although the late read is still in flight.
        let groups = [3, 77, 150, 222, 301, 402];
        let selection = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
        let mut ticket = store.read(&[&selection]).submit().unwrap();
        let (query, options, mut outs) = ([0.5; DIM], AttendOptions::default(), [[0.0; DIM]; 2]);
        for out in &mut outs {
            ticket.attend(0, &query, &selection, &options, out).unwrap();
            assert!(ticket.is_done(), "{slow} is waited for again");
        }
        assert_eq!(outs[0], outs[1]);
        check(&ticket.wait().unwrap(), &groups);
        drop(trouble);
        // Its threads are late until the operations that they have begun have ended.
        std::thread::sleep(DELAY);
        nothing_is_held(&store, dir.path(), &held);
    }
    let late = store.status();
    assert!(sum(&late, |d| d.hedged) > sum(&before, |d| d.hedged), "no read of either device was late");
    assert_eq!(sum(&late, |d| d.errors), sum(&before, |d| d.errors));
    assert!(store.health().is_well(), "late is not wrong: {:?}", store.health());
    let broken: [&[_]; 2] = [&[("stratakv-0-", Trouble::Fails)], &[("stratakv-1-", Trouble::Fails)]];
    for troubles in broken {
        let trouble = trouble::set(dir.path(), troubles);
        for round in 0..8 {
            read(&store, &sequence, &[round * 11, round * 11 + 1, round * 11 + 400]);
        }
        drop(trouble);
        nothing_is_held(&store, dir.path(), &held);
        // Copies that the background found damaged are written again before the other device fails.
        assert_eq!(store.repair().unwrap().left, 0);
    }
    let failed = store.status();
    assert!(sum(&failed, |d| d.errors) > sum(&late, |d| d.errors));
    assert!(sum(&failed, |d| d.other_copies) > sum(&late, |d| d.other_copies));
    assert!(!store.health().is_well());
}

#[test]
fn what_is_late_and_fails_elsewhere_is_read_from_the_third_copy() {
    read_from_the_third_copy(&[("stratakv-0-", Trouble::Late(DELAY)), ("stratakv-1-", Trouble::Fails)]);
}

/// While two devices are late, the store does not know which of them will answer.
#[test]
fn a_third_copy_that_is_late_for_a_while_is_read_as_well() {
    const THIRD: (&str, Trouble) = ("stratakv-2-", Trouble::Late(Duration::from_millis(250)));
    read_from_the_third_copy(&[("stratakv-0-", Trouble::Late(DELAY)), ("stratakv-1-", Trouble::Fails), THIRD]);
}

/// One device of three is late, one fails, and the third one must answer.
fn read_from_the_third_copy(troubles: &'static [(&'static str, Trouble)]) {
    let _alone = lock(&ALONE);
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 3);
    warm_up(&store, &sequence);
    open_every_file(&store);
    let held = resources(&store, dir.path());
    let trouble = trouble::set(dir.path(), troubles);
    for round in 0..3 {
        let groups: Vec<u64> = (0..12).map(|nth| (round * 5 + nth * 40) % GROUPS).collect();
        let took = read(&store, &sequence, &groups);
        assert!(took < DELAY, "one device is late, one fails, and {took:?} were waited");
    }
    drop(trouble);
    std::thread::sleep(DELAY);
    nothing_is_held(&store, dir.path(), &held);
}

#[test]
fn what_no_device_gave_says_nothing_of_what_is_late() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = filled(dir.path(), 2);
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), CreateOptions::new()).unwrap();
    let row = vec![1.0; 4 * GROUP * DIM];
    let tokens = TensorView::token_major(&row, 4 * GROUP, 1, DIM);
    sequence.append(0, tokens, tokens).unwrap();
    let selection = sequence.select(0, SelectRequest::all()).unwrap();
    for _ in 0..2 * ROUNDS {
        let ticket = store.read(&[&selection]).submit().unwrap();
        assert_eq!(ticket.requests(), 0);
        ticket.wait().unwrap();
    }
    assert_eq!(store.inner.devices.latencies.late(), None);
}

#[test]
fn gaps_make_no_part_longer_than_a_slab() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::DirBuilder::new().mode(0o700).create(dir.path().join("0")).unwrap();
    let options = Store::options().device(dir.path().join("0")).memory_limit(ByteSize::mib(32));
    let store = options.segment_bytes(ByteSize::mib(8)).frame_bytes(ByteSize::mib(4)).open().unwrap();
    // Blocks of 1 KiB, 256 to a part.
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(4).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("small")).unwrap();
    let row = vec![0.25; 9 * 300 * 4 * DIM];
    let tokens = TensorView::token_major(&row, 9 * 300 * 4, 1, DIM);
    sequence.append(0, tokens, tokens).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    sequence.close().unwrap();
    let sequence = store.open_sequence("small", OpenSequence::new()).unwrap();
    for step in [2, 5, 8, 9] {
        let groups: Vec<u64> = (0..256).map(|nth| nth * step).collect();
        let selection = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
        let mut loads = DeviceLoads::of(&store.inner.devices);
        loads.gaps = vec![8 << 10];
        let parts = plan(&[Arc::clone(&selection.inner)], ReadPriority::Demand(None), &loads);
        for part in &parts {
            assert_eq!(part.blocks.iter().flatten().count(), part.groups.len(), "everything is on the device");
            assert!(part.reads.len() < part.groups.len(), "step {step}: no gap was read");
            assert!(part.buffer_bytes <= SLAB_BYTES, "step {step}: {} bytes", part.buffer_bytes);
            let read: usize = part.reads.iter().map(|read| read.bytes).sum();
            assert_eq!(read, part.buffer_bytes);
        }
    }
}

#[test]
fn a_buffer_that_a_broken_driver_may_still_write_is_an_error_of_its_selection() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 2);
    let selection = sequence.select(0, SelectRequest::groups(&[5, 50])).unwrap();
    let mut ticket = store.read(&[&selection]).submit().unwrap();
    let under_way = ticket.never_ends().expect("a buffer");
    let batch = ticket.wait().unwrap();
    assert_eq!(batch.get(0).err().map(|e| e.kind()), Some(ErrorKind::Io));
    drop(under_way);
}
