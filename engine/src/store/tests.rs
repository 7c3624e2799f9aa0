//! Reads of copies whose device is late or fails.

mod copies;

use super::{Store, StoreStatus};
use crate::device::posix::trouble::{self, Trouble};
use crate::device::slab::SLAB_BYTES;
use crate::layout::{KvLayout, TensorView};
use crate::metrics::lock;
use crate::options::{ByteSize, DriverChoice, Durability, SequenceOptions};
use crate::sequence::Sequence;

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const DIM: usize = 64;
const GROUP: usize = 8;
const GROUPS: u64 = 512;
/// Parts that must have been read before any counts as late.
const ROUNDS: u64 = 300;
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

/// What must be the same before and after: descriptors of the store's files, by file, and slabs that can be had. Descriptors of
/// others of this process are their business.
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

/// What is late may still land, in buffers that nobody reads; then they are free.
fn nothing_is_held(store: &Store, dir: &Path, before: &(BTreeMap<PathBuf, usize>, usize)) {
    let deadline = Instant::now() + 10 * DELAY;
    let count = |of: &BTreeMap<PathBuf, usize>, file: &PathBuf| of.get(file).copied().unwrap_or(0);
    // A segment that was not open before may be now, or the other way round; once.
    let same = |now: &BTreeMap<PathBuf, usize>, file: &PathBuf| match (count(&before.0, file), count(now, file)) {
        (before, now) if before == now => true,
        (before, now) => before + now == 1 && file.to_string_lossy().contains("/segments/"),
    };
    loop {
        let now = resources(store, dir);
        if now.1 == before.1 && before.0.keys().chain(now.0.keys()).all(|file| same(&now.0, file)) {
            return;
        }
        assert!(Instant::now() < deadline, "descriptors and slabs: {now:?}, before {before:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// As if every segment had been read from every device: its file is open, and stays open.
fn open_every_file(store: &Store) {
    let inner = &store.inner;
    let catalog = lock(&inner.catalog);
    for (key, meta) in &catalog.segments {
        lock(&inner.space).handle(&inner.devices, *key, meta).unwrap().file().unwrap();
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
    open_every_file(&store);
    let held = resources(&store, dir.path());
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
        nothing_is_held(&store, dir.path(), &held);
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
        nothing_is_held(&store, dir.path(), &held);
    }
    let failed = store.status();
    assert!(sum(&failed, |d| d.errors) > sum(&late, |d| d.errors));
    assert!(sum(&failed, |d| d.other_copies) > sum(&late, |d| d.other_copies));
    assert!(!store.health().is_well());
}
