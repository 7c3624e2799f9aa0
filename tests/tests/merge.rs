//! Commits of few tokens. They write small frames, which later commits merge into large ones. Crashes, truncations and
//! forks may happen in between.

use std::path::PathBuf;
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, OpenSequence, SelectRequest, Sequence, Store, StoredSummary,
};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{assert_clean, copy_devices, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::{Rng, mix};

/// The number of tokens that commits gather before one of them writes the groups.
const GATHERED: u64 = 64;

fn shape(group: usize) -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 32), LayerShape::full(1, 16)], dtype: DType::F16, group }
}

fn create(store: &Store, shape: &SequenceShape, key: &str) -> Sequence {
    let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax);
    store.create_sequence(&shape.layout().expect("a layout"), options).expect("a sequence")
}

fn seeds(tokens: u64) -> Vec<u64> {
    (0..tokens).map(mix).collect()
}

/// Appends tokens `range` one by one, with their ids, and commits after each.
fn decode(sequence: &mut Sequence, shape: &SequenceShape, range: std::ops::Range<u64>) {
    for token in range {
        for layer in shape.kv_layers() {
            shape.append(sequence, layer, &[mix(token)], Order::nth(layer)).expect("an append");
        }
        sequence.append_token_ids(&[token as u32]).expect("ids");
        sequence.commit(Durability::Sync).expect("a commit");
    }
}

fn check(store: &Store, sequence: &Sequence, shape: &SequenceShape, tokens: u64) {
    assert_eq!(sequence.len(), tokens);
    assert_eq!(sequence.token_ids(), (0..tokens as u32).collect::<Vec<_>>());
    shape.check_all(store, sequence, |_| seeds(tokens));
}

fn frames(store: &Store, key: &str) -> usize {
    store.sequences().iter().find(|info| info.key == key).map_or(0, |info| info.frames)
}

fn store(dirs: &[PathBuf]) -> Store {
    small_options(dirs).open().expect("the store opens")
}

#[test]
fn a_commit_per_token_leaves_few_frames() {
    for group in [1, 4, 5, 32, 128] {
        let (root, shape) = (fast_scratch(), shape(group));
        let dirs = device_dirs(root.path(), 1);
        let own = store(&dirs);
        let mut sequence = create(&own, &shape, "k");
        let mut most = 0;
        for end in 1..=600 {
            decode(&mut sequence, &shape, end - 1..end);
            most = most.max(frames(&own, "k"));
        }
        // Small frames hold the tokens since the last large frame, and the tokens before it that filled no group.
        let small = GATHERED.max(group as u64) + group as u64;
        let large = 600 / GATHERED.max(group as u64) + 1;
        assert!(most as u64 <= small + large, "{most} frames with groups of {group}");
        check(&own, &sequence, &shape, 600);
        drop(sequence);
        own.close().expect("close");
        assert_clean(&dirs, "closed");
        let own = store(&dirs);
        check(&own, &own.open_sequence("k", OpenSequence::new()).expect("the sequence"), &shape, 600);
    }
}

#[test]
fn write_amplification_of_commits() {
    let layers = vec![LayerShape::full(8, 128); 32];
    let shape = SequenceShape { layers, dtype: DType::F16, group: 8 };
    let root = fast_scratch();
    let kv = |tokens: u64| tokens * 32 * 4096;
    for (per, tokens, most) in [(1, 192_u64, 2.2), (64, 192, 1.05 + 7.0 / 64.0), (192, 192, 1.02)] {
        let dirs = device_dirs(&root.path().join(per.to_string()), 1);
        let options = small_options(&dirs).segment_bytes(ByteSize::mib(32)).memory_limit(ByteSize::mib(256));
        let store = options.frame_bytes(ByteSize::mib(4)).open().expect("a store");
        let layout = shape.layout().expect("a layout");
        let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("k")).expect("a sequence");
        let before = store.usage().expect("usage").lifetime_bytes;
        for first in (0..tokens).step_by(per) {
            let seeds: Vec<u64> = (first..tokens.min(first + per as u64)).map(mix).collect();
            for layer in 0..32 {
                shape.append(&mut sequence, layer, &seeds, Order::nth(layer)).expect("an append");
            }
            sequence.commit(Durability::Sync).expect("a commit");
        }
        let written = store.usage().expect("usage").lifetime_bytes - before;
        // The headers of the store's first segments are subtracted, because they distort the ratio of short sequences.
        let headers = 8 * 4096;
        let times = (written - headers) as f64 / kv(tokens) as f64;
        assert!(times <= most, "{times} x with a commit per {per} tokens");
    }
}

#[test]
fn a_crash_at_any_moment_loses_nothing_committed() {
    let (root, shape) = (fast_scratch(), shape(4));
    let dirs = device_dirs(&root.path().join("0"), 1);
    let own = store(&dirs);
    let mut sequence = create(&own, &shape, "k");
    // Large appends in between leave groups in memory and groups in flight.
    let mut tokens = 0;
    for round in 0..60_u64 {
        let more = [1, 3, 1, 70, 2, 9][round as usize % 6];
        let seeds: Vec<u64> = (tokens..tokens + more).map(mix).collect();
        for layer in 0..2 {
            shape.append(&mut sequence, layer, &seeds, Order::nth(layer)).expect("an append");
        }
        sequence.append_token_ids(&(tokens as u32..(tokens + more) as u32).collect::<Vec<_>>()).expect("ids");
        tokens += more;
        sequence.commit(Durability::Sync).expect("a commit");
        let image = copy_devices(&dirs, &root.path().join((round + 1).to_string()), &mut Rng(round));
        assert_clean(&image, "crashed");
        let crashed = store(&image);
        let mut again = crashed.open_sequence("k", OpenSequence::new()).expect("the sequence");
        check(&crashed, &again, &shape, tokens);
        // The recovered sequence grows like any other.
        decode(&mut again, &shape, tokens..tokens + round % 11);
        check(&crashed, &again, &shape, tokens + round % 11);
        drop((again, crashed));
        std::fs::remove_dir_all(root.path().join((round + 1).to_string())).expect("remove the image");
    }
}

#[test]
fn summaries_of_groups_in_memory_are_those_of_groups_on_disk() {
    let (root, shape) = (fast_scratch(), shape(4));
    let dirs = device_dirs(root.path(), 1);
    let own = store(&dirs);
    let mut whole = create(&own, &shape, "whole");
    for layer in 0..2 {
        shape.append(&mut whole, layer, &seeds(150), Order::nth(layer)).expect("an append");
    }
    whole.commit(Durability::Sync).expect("a commit");
    let mut single = create(&own, &shape, "single");
    decode(&mut single, &shape, 0..150);
    drop((whole, single));
    own.close().expect("close");
    let own = store(&dirs);
    let open = |key| own.open_sequence(key, OpenSequence::new()).expect("a sequence");
    let (whole, single) = (open("whole"), open("single"));
    for query in 0..20 {
        let query = shape.query(0, query);
        let groups = |s: &Sequence| {
            s.select(0, SelectRequest::query(&query).budget(Budget::tokens(40)))
                .expect("a view")
                .groups()
                .collect::<Vec<_>>()
        };
        assert_eq!(groups(&whole), groups(&single));
    }
}

#[test]
fn cuts_forks_and_states_between_merges() {
    let (root, shape) = (fast_scratch(), shape(8));
    let dirs = device_dirs(root.path(), 1);
    let mut own = store(&dirs);
    let mut parent = create(&own, &shape, "parent");
    decode(&mut parent, &shape, 0..20);
    parent.commit_with(b"as of 20", Durability::Sync).expect("a commit");
    decode(&mut parent, &shape, 20..50);
    // The groups of tokens 0 to 48 are in memory, and on disk only in small frames.
    let mut child = parent.fork_as("child").expect("a fork");
    let before = own.usage().expect("usage").lifetime_bytes;
    let unused = parent.fork().expect("a fork");
    drop(unused);
    assert_eq!(own.usage().expect("usage").lifetime_bytes, before, "a fork writes nothing");
    decode(&mut child, &shape, 50..53);
    // The truncation is inside a group and below several commits.
    parent.truncate(37).expect("a cut");
    decode(&mut parent, &shape, 37..45);
    for (close, key, tokens) in [(true, "parent", 45), (false, "child", 53)] {
        drop((parent, child));
        if close {
            own.close().expect("close");
        } else {
            drop(own);
        }
        assert_clean(&dirs, key);
        own = store(&dirs);
        parent = own.open_sequence("parent", OpenSequence::new()).expect("the parent");
        child = own.open_sequence("child", OpenSequence::new()).expect("the child");
        let of = if key == "parent" { &parent } else { &child };
        check(&own, of, &shape, tokens);
        assert_eq!(of.caller_state(), Some(&b"as of 20"[..]));
    }
    // Parent and fork merge independently. Shared frames live until both have replaced them.
    decode(&mut child, &shape, 53..140);
    check(&own, &child, &shape, 140);
    decode(&mut parent, &shape, 45..130);
    check(&own, &parent, &shape, 130);
    assert!(frames(&own, "child") < 90 && frames(&own, "parent") < 80);
    parent.delete(Durability::Sync).expect("a deletion");
    own.clean().expect("cleaning");
    drop(child);
    own.close().expect("close");
    assert_clean(&dirs, "closed");
    let own = store(&dirs);
    let child = own.open_sequence("child", OpenSequence::new()).expect("the child");
    check(&own, &child, &shape, 140);
    assert_eq!(child.caller_state(), Some(&b"as of 20"[..]));
}

#[test]
fn many_sequences_gather_within_the_memory_limit() {
    let (root, shape) =
        (fast_scratch(), SequenceShape { layers: vec![LayerShape::full(8, 64)], dtype: DType::F32, group: 8 });
    let dirs = device_dirs(root.path(), 1);
    let options = || small_options(&dirs).segment_bytes(ByteSize::mib(8)).memory_limit(ByteSize::mib(16));
    let own = options().open().expect("a store");
    // A token has 4 KiB, so all sequences together would gather more than a quarter of the memory.
    let mut all: Vec<Sequence> = (0..24).map(|nth| create(&own, &shape, &format!("{nth}"))).collect();
    for token in 0..63 {
        all.iter_mut().for_each(|sequence| decode(sequence, &shape, token..token + 1));
    }
    let arena = || own.status().memory.categories.iter().map(|own| own.used_bytes).max().unwrap_or(0);
    assert!(arena() <= 8 << 20, "{} bytes are held", arena());
    all.iter().for_each(|sequence| check(&own, sequence, &shape, 63));
    drop(all);
    own.close().expect("close");
    assert_clean(&dirs, "closed");
    let own = options().open().expect("the store opens");
    for nth in 0..24 {
        check(&own, &own.open_sequence(&format!("{nth}"), OpenSequence::new()).expect("a sequence"), &shape, 63);
    }
}
