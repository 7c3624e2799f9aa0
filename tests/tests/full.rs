//! Full stores: operations that free space must succeed.
//!
//! - A full store can be truncated inside groups and deleted from.
//! - Forks that fill the manifest can be deleted.
//! - Commits that wait for space in the manifest are bounded.

use std::sync::{Arc, Mutex};
use stratakv::sim::{Geometry, Simulation};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, Error, ErrorKind, OpenSequence, Sequence, SequenceId, Store,
    StoreOptions, StoredSummary,
};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{MANIFEST_PAGES, small_geometry};
use stratakv_tests::rng::mix;

const SEGMENT: u64 = 64 << 10;
/// The number of truncations. The reserve has space for their tails.
const CUTS: usize = 8;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 32), LayerShape::full(1, 16)], dtype: DType::F16, group: 8 }
}

fn simulation(seed: u64) -> Simulation {
    Simulation::new(&small_geometry(1), seed)
}

/// Returns the bytes of `segments` segments and two generations of the manifest.
fn capacity(segments: u64) -> u64 {
    segments * SEGMENT + 8192 + 4 * MANIFEST_PAGES * 4096
}

fn options(segments: u64) -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT));
    options.capacity(ByteSize(capacity(segments))).frame_bytes(ByteSize::kib(64))
}

fn append(sequence: &mut Sequence, seeds: &mut Vec<u64>, tokens: usize) -> stratakv::Result<()> {
    let more: Vec<u64> = (seeds.len()..seeds.len() + tokens).map(|at| mix(sequence.id().0 << 32 | at as u64)).collect();
    for layer in 0..2 {
        if let Err(e) = shape().append(sequence, layer, &more, Order::nth(layer)) {
            // Both layers keep their length.
            sequence.truncate(seeds.len() as u64)?;
            return Err(e);
        }
    }
    seeds.extend(more);
    Ok(())
}

fn create(store: &Store, key: &str) -> Sequence {
    let layout = shape().layout().expect("a layout");
    store
        .create_sequence(&layout, CreateOptions::new().key(key).store_summary(StoredSummary::MinMax))
        .expect("a sequence")
}

fn check(store: &Store, key: &str, seeds: &[u64]) {
    let sequence = store.open_sequence(key, OpenSequence::new()).expect(key);
    assert_eq!(sequence.len(), seeds.len() as u64, "{key}");
    shape().check_all(store, &sequence, |_| seeds.to_vec());
}

fn no_space(outcome: &Result<(), Error>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(e) => {
            assert_eq!(e.kind(), ErrorKind::NoSpace, "{e:?}");
            true
        }
    }
}

/// Fills the store with sequences to the last page. Returns the seeds of each by key.
fn fill(store: &Store) -> Vec<(String, Vec<u64>)> {
    let mut whole: Vec<(String, Vec<u64>)> = Vec::new();
    for tokens in [59, 3] {
        loop {
            let key = format!("s{}", whole.len());
            let (mut sequence, mut seeds) = (create(store, &key), Vec::new());
            let committed = append(&mut sequence, &mut seeds, tokens).and_then(|()| sequence.commit(Durability::Sync));
            if no_space(&committed) {
                assert!(!committed.is_err_and(|e| e.is_queued()), "segments are short, not the manifest");
                break;
            }
            whole.push((key, seeds));
        }
    }
    whole
}

#[test]
fn a_full_store_is_cut_inside_groups_and_deleted() {
    let simulation = simulation(1);
    let store = simulation.open(options(14)).expect("a store");
    let mut whole = fill(&store);
    assert!(whole.len() > 4, "{}", whole.len());
    for (at, (key, seeds)) in whole.iter_mut().filter(|(_, seeds)| seeds.len() > 3).take(CUTS).enumerate() {
        let mut sequence = store.open_sequence(&*key, OpenSequence::new()).expect(key);
        // Each truncation is inside a group and below the last commit. The first frees no frame.
        let left = if at == 0 { 58 } else { 8 * (1 + at % 6) + 3 };
        sequence.truncate(left as u64).expect("a cut");
        seeds.truncate(left);
        sequence.commit(Durability::Sync).unwrap_or_else(|e| panic!("{at}: {e:?} {:#?}", store.usage()));
        drop(sequence);
        check(&store, key, seeds);
    }
    // Half of the sequences are deleted, which frees space.
    let (mut nth, mut gone) = (0, Vec::new());
    whole.retain(|(key, _)| {
        nth += 1;
        gone.extend((nth % 2 == 0).then(|| key.clone()));
        nth % 2 == 1
    });
    for key in gone {
        store
            .open_sequence(&key, OpenSequence::new())
            .expect("a sequence")
            .delete(Durability::Sync)
            .expect("a deletion");
    }
    store.clean().expect("cleaning");
    let (mut more, mut seeds) = (create(&store, "more"), Vec::new());
    append(&mut more, &mut seeds, 100).expect("room");
    more.commit(Durability::Sync).expect("room");
    drop(more);
    whole.push(("more".into(), seeds));
    drop(store);
    simulation.crash();
    simulation.restart();
    let store = simulation.open(options(14)).expect("the store opens");
    for (key, seeds) in &whole {
        check(&store, key, seeds);
        store.open_sequence(key, OpenSequence::new()).expect(key).delete(Durability::Sync).expect("a deletion");
    }
    store.clean().expect("cleaning");
    let usage = store.usage().expect("usage");
    assert_eq!((usage.live_bytes, usage.dead_bytes), (0, 0), "{usage:#?}");
}

#[test]
fn forks_that_fill_the_manifest_are_deleted_again() {
    for (seed, crash) in [(2, false), (3, true)] {
        let simulation = simulation(seed);
        let mut store = simulation.open(options(10)).expect("a store");
        let (mut parent, mut seeds) = (create(&store, "parent"), Vec::new());
        for _ in 0..12 {
            append(&mut parent, &mut seeds, 24).expect("room");
            parent.commit(Durability::Sync).expect("room");
        }
        // The loop ends when no checkpoint has space.
        let mut refused = 0;
        for _ in 0..20_000 {
            let committed = parent.fork().and_then(|mut child| child.commit(Durability::Sync));
            refused += usize::from(no_space(&committed));
            if refused > 20 {
                break;
            }
        }
        assert!(refused > 20, "{:#?}", store.usage());
        drop(parent);
        if crash {
            drop(store);
            simulation.crash();
            simulation.restart();
            store = simulation.open(options(10)).expect("the store opens");
        }
        let forks: Vec<SequenceId> =
            store.sequences().iter().filter(|info| info.key.is_empty()).map(|info| SequenceId(info.id)).collect();
        assert!(forks.len() > 10, "{}", forks.len());
        assert!(store.usage().expect("usage").file_bytes <= capacity(10));
        for id in forks {
            let deleted = store.delete_sequence_id(id, Durability::Sync);
            deleted.unwrap_or_else(|e| panic!("{e:?} {:#?}", store.usage()));
        }
        check(&store, "parent", &seeds);
        assert!(store.sequences().iter().filter(|info| info.key.is_empty()).count() <= 21);
        // The same number of forks fits again.
        let mut parent = store.open_sequence("parent", OpenSequence::new()).expect("the parent");
        for _ in 0..10 {
            parent.fork().and_then(|mut child| child.commit(Durability::Sync)).expect("room for a fork");
        }
        drop(parent);
        assert!(store.health().read_only.is_none(), "{:#?}", store.health());
        store.close().expect("the store closes");
    }
}

#[test]
fn appends_after_a_truncation_are_admitted_like_others() {
    let simulation = simulation(4);
    let store = simulation.open(options(24)).expect("a store");
    // Deleting the fillers below leaves free segments, while forks fill the manifest.
    for at in 0..8 {
        let (mut filler, mut seeds) = (create(&store, &format!("filler {at}")), Vec::new());
        append(&mut filler, &mut seeds, 160).expect("room");
        filler.commit(Durability::Sync).expect("room");
    }
    let (mut parent, mut seeds) = (create(&store, "parent"), Vec::new());
    for _ in 0..12 {
        append(&mut parent, &mut seeds, 24).expect("room");
        parent.commit(Durability::Sync).expect("room");
    }
    for at in 0..8 {
        let filler = store.open_sequence(&format!("filler {at}"), OpenSequence::new()).expect("a filler");
        filler.delete(Durability::Sync).expect("a deletion");
    }
    let refused = (0..20_000).any(|_| no_space(&parent.fork().and_then(|mut child| child.commit(Durability::Sync))));
    assert!(refused, "{:#?}", store.usage());
    let small = |at| {
        let (mut sequence, mut seeds) = (create(&store, &format!("small {at}")), Vec::new());
        append(&mut sequence, &mut seeds, 3).and_then(|()| sequence.commit(Durability::Sync))
    };
    let refused = (0..1000).map(small).find(no_space).expect("no end of sequences").expect_err("refused");
    assert!(refused.to_string().contains("the manifest has no space"), "{refused}");
    let committed = seeds.len();
    let mut grown = (0..100).map(|_| {
        let seeds = &mut seeds;
        append(&mut parent, seeds, 96).and_then(|()| parent.commit(Durability::Sync)).map(|()| seeds.len())
    });
    let mut last = committed;
    let refused = grown.find_map(|outcome| outcome.map(|len| last = len).err()).expect("no end of frames");
    drop(grown);
    assert!(refused.to_string().contains("the manifest has no space"), "{refused}");
    // A truncation that removes nothing does not help.
    parent.truncate(seeds.len() as u64).expect("a cut");
    let again = parent.commit(Durability::Sync).expect_err("refused");
    assert!(again.to_string().contains("the manifest has no space"), "{again}");
    // A truncation that removes tokens finds space.
    parent.truncate(last as u64 - 5).expect("a cut");
    seeds.truncate(last - 5);
    parent.commit(Durability::Sync).expect("a cut finds room");
    drop(parent);
    check(&store, "parent", &seeds);
}

/// The number of lazy commits that wait for space in the manifest is bounded, over all sequences.
#[test]
fn commits_that_wait_for_room_are_bounded() {
    let options = || Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT));
    let simulation = Simulation::new(&Geometry { whole: true, ..small_geometry(1) }, 1);
    let store = simulation.open(options()).expect("a store");
    let mut sequences = [create(&store, "a"), create(&store, "b")];
    sequences.iter_mut().for_each(|sequence| sequence.commit(Durability::Sync).expect("a commit"));
    // The files for the next generation are removed, and no file can be created or grown.
    let manifests: Vec<String> = simulation.files(0).into_iter().filter(|path| path.starts_with("manifest/")).collect();
    let generation = |path: &str| path.split('-').next().map(str::to_owned);
    let now = generation(&manifests[0]);
    let kept: Vec<&String> = manifests.iter().filter(|path| generation(path) != now).collect();
    assert_eq!(kept.len(), 2, "{manifests:?}");
    kept.into_iter().for_each(|path| simulation.replace(0, path, &[0; 4096]));
    simulation.resize(0);
    let mut stalled = 0;
    for at in 0..10_000_usize {
        let committed = sequences[at % 2].commit(if stalled < 2 { Durability::Sync } else { Durability::Lazy });
        match committed {
            Ok(()) => {}
            Err(e) => {
                assert!(e.is_queued(), "{e:?}");
                stalled += 1;
            }
        }
        assert!(store.health().queued_commits <= 4096, "{at}: {:?}", store.health());
    }
    assert!(stalled >= 2, "there was room for all");
    for _ in 0..5000 {
        sequences[0].commit(Durability::Sync).map_or_else(|e| assert!(e.is_queued(), "{e:?}"), |()| panic!("no room"));
        assert!(store.health().queued_commits <= 4096, "{:?}", store.health());
    }
    simulation.resize(64 << 20);
    store.flush().expect("there is room");
    assert_eq!(store.health().queued_commits, 0);
    assert!(store.health().read_only.is_none());
    drop(sequences);
    store.close().expect("closed");
    let store = simulation.open(options()).expect("the store");
    assert_eq!(store.sequences().len(), 2);
}

/// A device that is too full for the spare files of the next generation gives the pages that it has.
#[test]
fn a_spare_file_takes_the_space_that_is_left() {
    const LEFT: usize = 3 * 4096;
    let options = || Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT));
    let geometry = Geometry { whole: true, ..small_geometry(1) };
    let simulation = Simulation::new(&geometry, 1);
    let store = simulation.open(options()).expect("a store");
    let mut seeds = Vec::new();
    let mut sequence = create(&store, "a");
    append(&mut sequence, &mut seeds, 59).and_then(|()| sequence.commit(Durability::Sync)).expect("space");
    drop(sequence);
    store.close().expect("closed");
    let content = |path: String| (0, path.clone(), simulation.contents(0, &path).expect("a file"));
    let files = simulation.files(0).into_iter().map(content);
    let is_spare = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    let (spare, kept): (Vec<_>, Vec<_>) =
        files.partition(|(_, path, bytes)| path.starts_with("manifest/") && is_spare(bytes));
    assert_eq!(spare.len(), 2, "one for each copy of the manifest");
    assert!(spare.iter().all(|(.., bytes)| bytes.len() > LEFT));
    let full = Simulation::with_files(&geometry, 2, &kept);
    full.resize((kept.iter().map(|(.., bytes)| bytes.len()).sum::<usize>() + LEFT) as u64);
    let store = full.open(options()).expect("the store");
    let taken: Vec<_> = spare.iter().map(|(_, path, _)| full.contents(0, path).map(|bytes| bytes.len())).collect();
    assert_eq!(taken, [Some(LEFT), None]);
    check(&store, "a", &seeds);
}

/// Eviction takes the sequence whose handle was dropped first, whichever was opened first.
#[test]
fn a_sequence_is_in_use_until_its_handle_is_dropped() {
    let simulation = simulation(2);
    let store = simulation.open(options(10)).expect("a store");
    let kept = |key: &str| {
        let layout = shape().layout().expect("a layout");
        let options = CreateOptions::new().key(key).evictable(1);
        let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
        append(&mut sequence, &mut Vec::new(), 59).and_then(|()| sequence.commit(Durability::Sync)).expect("room");
    };
    kept("long");
    kept("short");
    let long = store.open_sequence("long", OpenSequence::new()).expect("a sequence");
    drop(store.open_sequence("short", OpenSequence::new()).expect("a sequence"));
    simulation.advance(1000);
    drop(long);
    let gone = Arc::new(Mutex::new(Vec::new()));
    let tell = Arc::clone(&gone);
    store.on_eviction(move |event| tell.lock().expect("no panic").push(event.key.clone()));
    for at in 0..1000 {
        kept(&format!("more {at}"));
        if !gone.lock().expect("no panic").is_empty() {
            break;
        }
    }
    let gone = gone.lock().expect("no panic");
    assert_eq!(gone.first().map(String::as_str), Some("short"), "{gone:?}");
}

/// Listings, namespaces and totals all count every copy of a frame.
#[test]
fn bytes_of_copies_are_reported_alike() {
    let simulation = Simulation::new(&small_geometry(2), 3);
    let store = simulation.open(Store::options().memory_limit(ByteSize::mib(8))).expect("a store");
    let layout = shape().layout().expect("a layout");
    let options = CreateOptions::new().key("twice").copies(2);
    let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
    append(&mut sequence, &mut Vec::new(), 59).and_then(|()| sequence.commit(Durability::Sync)).expect("room");
    let (usage, listed) = (store.usage().expect("usage"), store.sequences());
    assert!(usage.devices.iter().all(|device| device.live_bytes > 0), "{usage:?}");
    assert_eq!((usage.namespaces[0].live_bytes, listed[0].disk_bytes), (usage.live_bytes, usage.live_bytes));
}
