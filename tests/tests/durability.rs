//! The cost and the promise of each level of durability without failures: when and how often the store syncs.

use std::path::PathBuf;
use std::time::{Duration, Instant};
use stratakv::{CreateOptions, DType, Durability, KvLayout, OpenSequence, Sequence, Store, TensorView};
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_options, try_copy_devices};
use stratakv_tests::rng::Rng;
use tempfile::TempDir;

const ROW: usize = 2 * 16;

fn layout() -> KvLayout {
    let builder = KvLayout::builder().layers(1).kv_heads(2).head_dim(16).group_tokens(4).dtype(DType::F32);
    builder.build().expect("a layout")
}

fn create(store: &Store, key: &str) -> Sequence {
    store.create_sequence(&layout(), CreateOptions::new().key(key)).expect("a sequence")
}

fn append(sequence: &mut Sequence, count: usize) {
    let data = vec![1.5; count * ROW];
    let view = || TensorView::token_major(&data, count, 2, 16);
    sequence.append(0, view(), view()).expect("an append");
}

fn store_on(devices: usize, lazy_delay: Duration) -> (TempDir, Vec<PathBuf>, Store) {
    let scratch = fast_scratch();
    let dirs = device_dirs(&scratch.path().join("store"), devices);
    let store = small_options(&dirs).lazy_delay(lazy_delay).open().expect("a store");
    (scratch, dirs, store)
}

/// Returns the number of syncs by device.
fn syncs(store: &Store) -> Vec<u64> {
    store.status().devices.iter().map(|device| device.counters.syncs).collect()
}

#[test]
fn a_lazy_commit_is_durable_within_its_delay_without_a_call() {
    let (scratch, dirs, store) = store_on(1, Duration::from_millis(20));
    let mut sequence = create(&store, "a");
    append(&mut sequence, 100);
    let before = syncs(&store);
    sequence.commit_with(b"state", Durability::Lazy).expect("a commit");
    let deadline = Instant::now() + Duration::from_secs(30);
    let found = (0..).find_map(|turn| {
        std::thread::sleep(Duration::from_millis(20));
        let copied = try_copy_devices(&dirs, &scratch.path().join(format!("copy-{turn}")), &mut Rng(turn)).ok()?;
        let there =
            small_options(&copied).open().expect("a copy of a store").open_sequence("a", OpenSequence::new()).ok();
        assert!(there.is_some() || Instant::now() < deadline, "a lazy commit does not become durable by itself");
        there
    });
    let there = found.expect("a sequence");
    assert_eq!((there.len(), there.caller_state()), (100, Some(&b"state"[..])));
    assert!(syncs(&store)[0] > before[0], "the data and the manifest were synced");
    assert_eq!(store.health().queued_commits, 0);
}

#[test]
fn a_commit_without_durability_syncs_nothing() {
    let (_scratch, dirs, store) = store_on(2, Duration::from_secs(3600));
    let mut sequence = create(&store, "a");
    // The first commit creates and syncs the files of the segments and their names.
    append(&mut sequence, 2000);
    sequence.commit(Durability::Sync).expect("a commit");
    store.run_maintenance().expect("maintenance");
    // The background syncs segments that it opens, and queued commits with them.
    let quiet = (0..8).any(|_| {
        let before = syncs(&store);
        for _ in 0..50 {
            append(&mut sequence, 4);
            sequence.commit(Durability::None).expect("a commit");
        }
        syncs(&store) == before
    });
    assert!(quiet, "every fifty commits something was synced");
    let tokens = sequence.len();
    drop(sequence);
    store.close().expect("closed");
    let store = small_options(&dirs).open().expect("a store");
    assert_eq!(store.open_sequence("a", OpenSequence::new()).expect("a sequence").len(), tokens);
    drop(store);
    assert_clean(&dirs, "after commits without durability");
}

/// A group of commits syncs the data and the two copies of the manifest once, for any number of sequences.
#[test]
fn a_group_of_commits_takes_the_syncs_of_one() {
    let (_scratch, _dirs, store) = store_on(1, Duration::from_secs(3600));
    let mut sequences: Vec<Sequence> = (0..40).map(|at| create(&store, &format!("s{at}"))).collect();
    sequences[0].commit(Durability::Sync).expect("a commit");
    let cost = |sequences: &mut [Sequence]| {
        let (last, rest) = sequences.split_last_mut().expect("one at least");
        for sequence in rest {
            append(sequence, 4);
            sequence.commit(Durability::Lazy).expect("queued");
        }
        append(last, 4);
        let before = syncs(&store)[0];
        last.commit(Durability::Sync).expect("a commit");
        syncs(&store)[0] - before
    };
    // The first commit creates the segment.
    cost(&mut sequences[..1]);
    // The minimum is taken, because some commits also start a segment or a manifest. On a busy machine, the background
    // makes spare segments meanwhile.
    let mut least = |count: usize| (0..40).map(|_| cost(&mut sequences[..count])).min();
    assert_eq!(least(1), Some(3), "data and two copies of the manifest");
    assert_eq!(least(40), Some(3));
}

#[test]
fn a_listing_has_sizes_and_times() {
    let now =
        || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_millis() as u64;
    let (_scratch, _dirs, store) = store_on(1, Duration::from_secs(3600));
    let start = now();
    let mut sequence = create(&store, "a");
    append(&mut sequence, 64);
    sequence.commit(Durability::Sync).expect("a commit");
    let middle = now();
    std::thread::sleep(Duration::from_millis(20));
    append(&mut sequence, 64);
    sequence.commit(Durability::Sync).expect("a commit");
    let end = now();
    let listed = store.sequences();
    assert_eq!(listed.len(), 1);
    let one = &listed[0];
    assert_eq!((one.key.as_str(), one.tokens, one.parent, one.ttl_ms), ("a", 128, None, 0));
    assert!((start..=middle).contains(&one.created_unix_ms), "{one:?}");
    assert!((middle + 20..=end).contains(&one.committed_unix_ms), "{one:?}");
    // The content is keys and values in f32. Headers and padding take at most the same again.
    let content = 128 * 2 * ROW as u64 * 4;
    assert!((content..2 * content).contains(&one.disk_bytes), "{one:?} of {content}");
    assert_eq!(one.disk_bytes, store.usage().expect("usage").live_bytes);
}
