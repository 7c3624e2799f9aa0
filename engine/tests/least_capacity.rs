//! The least capacity: below it a store without segments is refused, and from it on a store works.

use std::path::PathBuf;
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, OpenSequence, Sequence, Store, StoreOptions, TensorView,
};
use stratakv_testing::scratch::device_dirs;
use stratakv_testing::uniform_layout;

const MIB: u64 = 1 << 20;

/// Returns the metadata of a new store: superblocks, and two generations of each copy of the manifest.
fn metadata(devices: u64) -> u64 {
    let copies = if devices == 1 { 2 } else { devices.min(3) };
    devices * 8192 + 2 * copies * 4 * MIB
}

fn options(dirs: &[PathBuf]) -> StoreOptions {
    dirs.iter().fold(Store::options().memory_limit(ByteSize::mib(32)), StoreOptions::device)
}

fn write(store: &Store, key: &str, tokens: usize) -> stratakv::Result<Sequence> {
    let mut sequence = store.create_sequence(&uniform_layout(1, 2, 64, 8), CreateOptions::new().key(key))?;
    let rows = vec![0.5_f32; tokens * 2 * 64];
    let view = TensorView::token_major(&rows, tokens, 2, 64);
    sequence.append(0, view, view)?;
    sequence.commit(Durability::Sync)?;
    Ok(sequence)
}

/// Writes and deletes several times what the segments hold.
fn churn(store: &Store, segment_bytes: u64) {
    // A token has 512 bytes, and each sequence takes a quarter of a segment.
    let tokens = (segment_bytes / 4 / 512) as usize;
    for round in 0..24 {
        let sequence = write(store, "churn", tokens).unwrap_or_else(|e| panic!("round {round}: {e}"));
        sequence.delete(Durability::Lazy).unwrap();
    }
}

fn assert_refused(options: StoreOptions, capacity: u64, least: u64) {
    let error = options.capacity(ByteSize(capacity)).open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let text = error.to_string();
    for bytes in [capacity, least] {
        assert!(text.contains(&format!("{bytes} bytes")), "{bytes} is not in: {text}");
    }
}

#[test]
fn a_capacity_without_space_for_three_segments_per_device_is_refused() {
    for (devices, segment) in [(1, None), (1, Some(64 * MIB)), (2, None), (3, Some(MIB)), (5, Some(MIB))] {
        let scratch = tempfile::tempdir().unwrap();
        let dirs = device_dirs(scratch.path(), devices);
        let options = options(&dirs).segment_bytes(segment.map(ByteSize));
        let least = metadata(devices as u64) + 3 * devices as u64 * segment.unwrap_or(4 * MIB);
        for capacity in [0, 12 * MIB, least - 1] {
            assert_refused(options.clone(), capacity, least);
        }
        // A refused creation leaves no store.
        let error = options.clone().create(false).open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
        let open = || options.clone().capacity(ByteSize(least)).open().unwrap();
        let store = open();
        churn(&store, segment.unwrap_or(4 * MIB));
        store.close().unwrap();
        let store = open();
        churn(&store, segment.unwrap_or(4 * MIB));
        assert!(store.status().file_bytes <= least);
    }
}

#[test]
fn a_store_without_segments_is_refused_until_the_capacity_suffices() {
    let scratch = tempfile::tempdir().unwrap();
    let dirs = device_dirs(scratch.path(), 1);
    let options = options(&dirs).segment_bytes(ByteSize::mib(1));
    options.clone().open().unwrap().close().unwrap();
    let least = metadata(1) + 3 * MIB;
    assert_refused(options.clone(), least - 1, least);
    // A store that is open for reading takes no space.
    let store = options.clone().capacity(ByteSize::mib(12)).read_only(true).open().unwrap();
    assert!(store.sequences().is_empty());
    store.close().unwrap();
    let store = options.clone().capacity(ByteSize(least)).open().unwrap();
    drop(write(&store, "kept", 100).unwrap());
    store.close().unwrap();
    // Deletions free space in the segments that exist, so any capacity opens the store.
    let store = options.capacity(ByteSize::mib(12)).open().unwrap();
    drop(store.open_sequence("kept", OpenSequence::new()).unwrap());
    drop(write(&store, "more", 100).unwrap());
    assert_eq!(write(&store, "much", 10_000).unwrap_err().kind(), ErrorKind::NoSpace);
    store.open_sequence("kept", OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
}

#[test]
fn appends_reuse_the_segments_of_deleted_sequences_in_a_store_of_two_segments() {
    let scratch = tempfile::tempdir().unwrap();
    let dirs = device_dirs(scratch.path(), 1);
    let options = options(&dirs).segment_bytes(ByteSize::mib(1));
    let store = options.clone().capacity(ByteSize(metadata(1) + 3 * MIB)).open().unwrap();
    write(&store, "first", 1000).unwrap().delete(Durability::Sync).unwrap();
    store.close().unwrap();
    // The metadata takes this capacity, so no segment is added.
    let store = options.capacity(ByteSize::mib(12)).open().unwrap();
    churn(&store, MIB);
    let files = std::fs::read_dir(dirs[0].join("segments")).unwrap();
    let segments: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    assert!(segments.len() <= 2, "{segments:?}");
}

#[test]
fn a_store_opens_with_its_first_capacity_after_a_device_left_and_another_joined() {
    let scratch = tempfile::tempdir().unwrap();
    let dirs = device_dirs(scratch.path(), 3);
    let least = metadata(2) + 6 * MIB;
    let open = |dirs: &[&PathBuf], capacity| {
        let options = options(&dirs.iter().map(|dir| (*dir).clone()).collect::<Vec<_>>());
        options.segment_bytes(ByteSize::mib(1)).capacity(ByteSize(capacity)).open().unwrap()
    };
    let store = open(&[&dirs[0], &dirs[1]], least);
    store.remove_device(1).unwrap();
    // The device that stays has two copies of the manifest, and the new one gets a third.
    store.add_device(&dirs[2]).unwrap();
    store.close().unwrap();
    let store = open(&[&dirs[0], &dirs[2]], least);
    assert!(store.status().file_bytes <= least);
    store.close().unwrap();
    // Two generations of the third copy take the space of segments.
    let store = open(&[&dirs[0], &dirs[2]], least + 2 * 4 * MIB);
    churn(&store, MIB);
}
