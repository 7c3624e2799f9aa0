//! Contention for handles, keys and memory. It must neither damage the store nor block it.

use std::path::Path;
use std::time::Duration;
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Sequence, Store,
    StoreOptions, StoredSummary, TensorView,
};
use stratakv_testing::scratch::device_dirs;
use stratakv_testing::uniform_layout;

/// Makes two tests of each function: on one device, and on three devices that one thread serves.
macro_rules! on_devices {
    ($($name:ident),+ $(,)?) => {
        mod one_device {
            $(#[test] fn $name() { super::$name(1); })+
        }
        mod three_devices_of_one_thread {
            $(#[test] fn $name() { super::$name(3); })+
        }
    };
}

on_devices!(
    a_key_of_a_lazy_commit_in_progress_is_taken,
    a_sequence_that_is_being_deleted_is_not_opened_again,
    commits_larger_than_a_fresh_manifest_get_room,
    idle_buffers_make_room_for_sequences,
    a_read_that_does_not_fit_beside_the_rest_is_an_error_not_a_wait,
    commits_need_no_memory_that_reads_hold,
    a_store_that_this_process_has_open_is_refused_at_once,
);

fn options(dir: &Path, devices: usize) -> StoreOptions {
    let dirs = device_dirs(dir, devices);
    let options = dirs.iter().fold(Store::options(), |options, dir| options.device(dir));
    let options = options.memory_limit(ByteSize::mib(32)).shard_threads(1);
    options.segment_bytes(ByteSize::mib(1)).frame_bytes(ByteSize::kib(256))
}

fn append(sequence: &mut Sequence, layer: usize, tokens: usize) {
    let data: Vec<f32> = (0..tokens * 32).map(|i| (i % 61) as f32 / 8.0).collect();
    let view = TensorView::token_major(&data, tokens, 2, 16);
    sequence.append(layer, view, view).unwrap();
}

fn a_key_of_a_lazy_commit_in_progress_is_taken(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path(), devices).lazy_delay(Duration::from_millis(1)).open().unwrap();
    for round in 0..60_u32 {
        let key = format!("key {round}");
        let mut first = store.create_sequence(&uniform_layout(1, 2, 16, 4), CreateOptions::new().key(&key)).unwrap();
        append(&mut first, 0, 5);
        first.commit(Durability::Lazy).unwrap();
        drop(first);
        // Sometimes the commit of the first sequence has left the queue but is not in the tables yet.
        std::thread::sleep(Duration::from_micros(u64::from(round) * 60));
        let again = store.create_sequence(&uniform_layout(1, 2, 16, 4), CreateOptions::new().key(&key));
        assert_eq!(again.err().map(|e| e.kind()), Some(ErrorKind::AlreadyExists), "round {round}");
    }
    store.close().unwrap();
    assert_eq!(options(dir.path(), devices).open().unwrap().sequences().len(), 60);
}

fn a_sequence_that_is_being_deleted_is_not_opened_again(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path(), devices).open().unwrap();
    for round in 0..40 {
        let durability = [Durability::Sync, Durability::Lazy, Durability::None][round % 3];
        let mut sequence = store.create_sequence(&uniform_layout(1, 2, 16, 4), CreateOptions::new().key("k")).unwrap();
        append(&mut sequence, 0, 9);
        sequence.commit(Durability::Sync).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    match store.open_sequence("k", OpenSequence::new()) {
                        Ok(_) => panic!("round {round}: opened while it is being deleted"),
                        Err(e) if e.kind() == ErrorKind::NotFound => return,
                        Err(e) => assert_eq!(e.kind(), ErrorKind::InUse),
                    }
                }
            });
            std::thread::sleep(Duration::from_micros(300));
            sequence.delete(durability).unwrap();
        });
    }
    store.close().unwrap();
    assert!(options(dir.path(), devices).open().unwrap().sequences().is_empty());
}

fn commits_larger_than_a_fresh_manifest_get_room(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path(), devices).lazy_delay(Duration::from_secs(600)).open().unwrap();
    // Every creation record contains the layout.
    let layout = KvLayout::builder().layers(400).kv_heads(1).head_dim(2).group_tokens(1).build().unwrap();
    for index in 0..3000 {
        let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
        sequence.append_token_ids(&[index]).unwrap();
        sequence.commit(Durability::Lazy).unwrap();
    }
    store.flush().unwrap();
    store.close().unwrap();
    assert_eq!(options(dir.path(), devices).open().unwrap().sequences().len(), 3000);
}

fn idle_buffers_make_room_for_sequences(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path(), devices).memory_limit(ByteSize::mib(8)).open().unwrap();
    let mut sequence = store.create_sequence(&uniform_layout(1, 2, 16, 4), CreateOptions::new().key("k")).unwrap();
    append(&mut sequence, 0, 40_000);
    sequence.commit(Durability::Sync).unwrap();
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    // The arena keeps 5 MB of buffers as idle slabs.
    drop(store.read(&[&view]).submit().unwrap().wait().unwrap());
    assert!(store.status().memory.used_bytes > 6 << 20, "{:?}", store.status().memory);
    let wide = KvLayout::builder().layers(40).kv_heads(8).head_dim(128).group_tokens(16).build().unwrap();
    let options = CreateOptions::new().store_summary(StoredSummary::MinMax);
    let kept: Vec<_> = (0..1).map(|_| store.create_sequence(&wide, options.clone()).unwrap()).collect();
    assert!(store.status().memory.used_bytes <= 8 << 20);
    drop(kept);
}

fn a_read_that_does_not_fit_beside_the_rest_is_an_error_not_a_wait(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path(), devices).memory_limit(ByteSize::mib(12)).open().unwrap();
    let mut sequence = store.create_sequence(&uniform_layout(1, 2, 16, 4), CreateOptions::new()).unwrap();
    append(&mut sequence, 0, 80_000);
    sequence.commit(Durability::Sync).unwrap();
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    // The read needs 10.2 MB: less than `memory_limit`, but more than the tails of another sequence leave.
    let wide = KvLayout::builder().layers(40).kv_heads(8).head_dim(128).group_tokens(16).build().unwrap();
    let _other = store.create_sequence(&wide, CreateOptions::new()).unwrap();
    let read = || store.read(&[&view]).submit().and_then(|ticket| ticket.wait());
    assert_eq!(read().err().map(|e| e.kind()), Some(ErrorKind::MemoryLimit));
    // Even the buffers that another read holds would not suffice.
    let few = sequence.select(0, SelectRequest::groups(&[1, 2, 3])).unwrap();
    let held = store.read(&[&few]).submit().unwrap().wait().unwrap();
    assert_eq!(read().err().map(|e| e.kind()), Some(ErrorKind::MemoryLimit));
    drop(held);
}

fn commits_need_no_memory_that_reads_hold(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path(), devices).memory_limit(ByteSize::mib(8)).open().unwrap();
    let mut sequence = store.create_sequence(&uniform_layout(1, 2, 16, 4), CreateOptions::new().key("k")).unwrap();
    append(&mut sequence, 0, 40_000);
    sequence.commit(Durability::Sync).unwrap();
    append(&mut sequence, 0, 10);
    let groups: Vec<u64> = (0..100).collect();
    let view = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
    let one = sequence.select(0, SelectRequest::groups(&groups[..1])).unwrap();
    let mut held = Vec::new();
    for view in [&view, &one] {
        // One late commit may be due to a busy disk. Only several of them show a lack of memory.
        let mut late = 0;
        while late < 5 {
            let soon = std::time::Instant::now() + Duration::from_millis(100);
            match store.read(&[view]).submit().unwrap().wait_deadline(Some(soon)) {
                Ok(batch) => held.push(batch),
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Deadline);
                    late += 1;
                }
            }
        }
    }
    assert!(held.len() > 20);
    let start = std::time::Instant::now();
    sequence.commit(Durability::Sync).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    drop((held, view, one, sequence));
    store.close().unwrap();
    let store = options(dir.path(), devices).memory_limit(ByteSize::mib(8)).open().unwrap();
    let sequence = store.open_sequence("k", OpenSequence::new()).unwrap();
    assert_eq!(sequence.len(), 40_010);
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    assert!((0..view.groups().len()).all(|nth| batch.get(0).unwrap().group(nth).is_ok()));
}

fn a_store_that_this_process_has_open_is_refused_at_once(devices: usize) {
    let dir = tempfile::tempdir().unwrap();
    let refused_at_once = |read_only: bool| {
        let start = std::time::Instant::now();
        let error = options(dir.path(), devices).read_only(read_only).open().unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.to_string().contains("a store of this process"), "{error}");
    };
    let store = options(dir.path(), devices).open().unwrap();
    refused_at_once(false);
    refused_at_once(true);
    // A clone keeps the store open.
    let clone = store.clone();
    drop(store);
    refused_at_once(false);
    clone.close().unwrap();
    // Stores that only read share the lock, and a writer waits for none of them.
    let readers = [0, 1].map(|_| options(dir.path(), devices).read_only(true).open().unwrap());
    refused_at_once(false);
    let [first, second] = readers;
    drop(first);
    refused_at_once(false);
    drop(second);
    options(dir.path(), devices).open().unwrap().close().unwrap();
}
