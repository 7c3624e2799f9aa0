//! Segment files that cannot be opened, are missing, or whose names are not durable. Appends continue, and everything
//! acknowledged stays.

use std::sync::OnceLock;
use stratakv::sim::{Faults, Simulation};
use stratakv::{ByteSize, CreateOptions, DType, Durability, OpenSequence, Store, StoreOptions};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_geometry, small_options};
use stratakv_tests::rng::mix;

const SEGMENT: u64 = 64 << 10;
const TOKENS: u64 = 40;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 32)], dtype: DType::F16, group: 8 }
}

fn simulation(seed: u64) -> Simulation {
    Simulation::new(&small_geometry(1), seed)
}

/// Returns the capacity of `segments` segments and two manifest generations of a new store. Must be called before the
/// test makes a simulation.
fn capacity(segments: u64) -> Option<ByteSize> {
    static METADATA: OnceLock<u64> = OnceLock::new();
    let new = || simulation(0).open(unlimited()).and_then(|store| store.usage()).expect("a store").file_bytes;
    let metadata = *METADATA.get_or_init(new);
    Some(ByteSize(metadata + segments * SEGMENT))
}

/// Returns options without a capacity.
fn unlimited() -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT));
    options.frame_bytes(ByteSize::kib(64))
}

/// Returns options with the [`capacity`] of `segments` segments.
fn options(segments: u64) -> StoreOptions {
    unlimited().capacity(capacity(segments))
}

fn seeds(tokens: u64) -> Vec<u64> {
    (0..tokens).map(mix).collect()
}

/// Makes a sequence of `tokens` tokens without a commit.
fn sequence(store: &Store, key: &str, tokens: u64) -> stratakv::Sequence {
    let layout = shape().layout().expect("a layout");
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key(key)).expect("a sequence");
    shape().append(&mut sequence, 0, &seeds(tokens), Order::TokenMajor).expect("memory");
    sequence
}

fn check(store: &Store, key: &str, tokens: u64) {
    let sequence = store.open_sequence(key, OpenSequence::new()).expect(key);
    assert_eq!(sequence.len(), tokens);
    shape().check_all(store, &sequence, |_| seeds(tokens));
}

/// The directory of the first segment cannot be opened to sync its name. The next commit still uses the segment.
#[test]
fn a_name_that_no_sync_covered_loses_nothing_acknowledged() {
    for seed in 0..24 {
        let (created, options) = (options(3), options(1));
        let simulation = simulation(seed);
        let store = simulation.open(created).expect("a store");
        // With space for one segment, the next commit cannot use another one.
        store.set_capacity(capacity(1)).expect("no segment exists");
        let mut sequence = sequence(&store, "s", 12);
        simulation.set_faults(Faults { names: Some(0), ..Faults::default() });
        let e = sequence.commit(Durability::Sync).expect_err("the name of the segment was not synced");
        assert_eq!(e.kind(), stratakv::ErrorKind::Io, "{e:?}");
        assert!(!store.health().is_well(), "{:?}", store.health());
        assert!(store.health().poisoned.is_empty(), "no sync failed: {:?}", store.health());
        sequence.commit(Durability::Sync).expect("the segment exists");
        drop((sequence, store));
        simulation.crash();
        simulation.restart();
        let store = simulation.open(options).expect("the store opens");
        check(&store, "s", 12);
    }
}

/// Makes a store whose segments are free.
fn emptied(open: impl Fn() -> Store, tokens: u64) {
    let store = open();
    let mut sequence = sequence(&store, "gone", tokens);
    sequence.commit(Durability::Sync).expect("a commit");
    sequence.delete(Durability::Sync).expect("a deletion");
    store.clean().expect("cleaned");
    store.close().expect("closed");
}

#[test]
fn the_missing_file_of_a_free_segment_is_created_again() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let open = || small_options(&dirs).open().expect("the store");
    emptied(open, 20 * TOKENS);
    let files: Vec<_> = std::fs::read_dir(dirs[0].join("segments")).expect("segments").collect();
    assert!(!files.is_empty());
    files.into_iter().for_each(|file| std::fs::remove_file(file.expect("a file").path()).expect("removed"));
    assert_clean(&dirs, "without the files of free segments");
    let store = open();
    let mut again = sequence(&store, "s", 20 * TOKENS);
    again.commit(Durability::Sync).expect("a commit");
    assert!(!store.health().is_well(), "{:?}", store.health());
    drop(again);
    store.close().expect("closed");
    check(&open(), "s", 20 * TOKENS);
    assert_clean(&dirs, "with files created again");
}

#[test]
fn a_free_segment_that_cannot_be_opened_is_skipped() {
    let options = options(8);
    let simulation = simulation(3);
    emptied(|| simulation.open(options.clone()).expect("the store"), 8 * TOKENS);
    let store = simulation.open(options.clone()).expect("the store");
    let files = store.usage().expect("usage").file_bytes;
    let mut again = sequence(&store, "s", 12);
    simulation.set_faults(Faults { names: Some(0), ..Faults::default() });
    again.commit(Durability::Sync).expect("another segment takes it");
    let health = store.health();
    assert_eq!(health.devices[0].name_errors, 1, "{health:?}");
    let usage = store.usage().expect("usage");
    assert_eq!(usage.sum_bytes(), usage.capacity_bytes);
    assert!(usage.file_bytes >= files, "the file still counts");
    // The segment is used again if no other is free.
    drop(again);
    let mut at = 0;
    while sequence(&store, &format!("more {at}"), 12).commit(Durability::Sync).is_ok() {
        at += 1;
    }
    let usage = store.usage().expect("usage");
    assert!(usage.free_bytes < SEGMENT, "{usage:?}");
    store.close().expect("closed");
}

/// The background prepares the next segment for a sequence that fills segments. A smaller capacity removes it.
#[test]
fn the_next_segment_is_ready_and_removed_when_the_capacity_shrinks() {
    let options = options(16);
    let simulation = simulation(7);
    let store = simulation.open(options).expect("a store");
    let files = || store.usage().expect("usage").file_bytes;
    let mut sequence = sequence(&store, "s", 700);
    sequence.commit(Durability::Sync).expect("room");
    // Small frames have a segment of their own.
    let all = seeds(810);
    shape().append(&mut sequence, 0, &all[700..710], Order::TokenMajor).expect("memory");
    sequence.commit(Durability::Sync).expect("room");
    let before = files();
    store.run_maintenance().expect("nothing is amiss");
    assert_eq!(files(), before + SEGMENT, "the next is ready");
    store.run_maintenance().expect("nothing is amiss");
    assert_eq!(files(), before + SEGMENT, "one is enough");
    // These tokens do not fit into the previous segment.
    shape().append(&mut sequence, 0, &all[710..], Order::TokenMajor).expect("memory");
    sequence.commit(Durability::Sync).expect("room");
    assert_eq!(files(), before + SEGMENT, "it was ready");
    store.run_maintenance().expect("nothing is amiss");
    // The prepared segment is a new file or a free one.
    let most = files() - SEGMENT;
    store.set_capacity(Some(ByteSize(most))).expect("the prepared segment is empty");
    assert!(files() <= most);
    shape().check_all(&store, &sequence, |_| all.clone());
}
