//! Stores that are closed by several threads, by a drop, and in a child of their process.

use super::*;
use std::sync::Barrier;
use std::sync::mpsc;

fn create(dir: &Path) -> Store {
    Store::options().device(dir).memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize::mib(1)).open().unwrap()
}

#[test]
fn clones_that_are_closed_at_once_end_and_leave_a_store_that_opens() {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..20 {
            let stores = vec![create(dir.path()); 3];
            let barrier = Barrier::new(stores.len());
            std::thread::scope(|scope| {
                for store in stores {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        // The last one closes the store. The others find it in use.
                        store.close().is_ok()
                    });
                }
            });
        }
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(120)).expect("closes that end");
}

/// The maintenance thread holds the store while it works, and waits for its rate meanwhile.
#[test]
fn dropping_every_handle_ends_slow_maintenance() {
    let dir = tempfile::tempdir().unwrap();
    let options = || {
        let options = Store::options().device(dir.path()).memory_limit(ByteSize::mib(8));
        options.segment_bytes(ByteSize::mib(1)).cleaning_rate(ByteSize(1))
    };
    let store = options().open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), CreateOptions::new().key("s")).unwrap();
    let rows = vec![0.5; 4096 * DIM];
    for _ in 0..24 {
        let view = TensorView::token_major(&rows, 4096, 1, DIM);
        sequence.append(0, view, view).unwrap();
        sequence.commit(Durability::Sync).unwrap();
    }
    let files = || std::fs::read_dir(dir.path().join("segments")).unwrap().count();
    let all = files();
    assert!(all > 20, "{all} files");
    sequence.delete(Durability::Sync).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while files() >= all {
        assert!(Instant::now() < deadline, "the background removes files");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(store);
    options().open().expect("a store that nothing holds").close().unwrap();
}

/// A child has the files and the lock of its parent, but none of its threads.
#[test]
fn a_child_of_the_process_reads_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut sequence) = filled(dir.path(), 1);
    let files = || {
        let read = |name: &str| std::fs::read(dir.path().join("0").join(name)).unwrap();
        let manifests = std::fs::read_dir(dir.path().join("0/manifest")).unwrap();
        let mut manifests: Vec<_> = manifests.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
        manifests.sort();
        (read("superblock"), manifests)
    };
    // The threads of the parent must not write meanwhile. Lazy commits need something queued.
    store.inner.background.stop(&store.inner.devices.maintenance_wake);
    store.inner.flush_commits().unwrap();
    let before = files();
    let selection = sequence.select(0, SelectRequest::groups(&[1])).unwrap();
    store.inner.devices.become_child();
    let kind = |e: crate::error::Error| e.kind();
    assert_eq!(store.read(&[&selection]).wait().map(drop).map_err(kind), Err(ErrorKind::InUse));
    assert_eq!(store.read(&[&selection]).submit().map(drop).map_err(kind), Err(ErrorKind::InUse));
    assert_eq!(store.read(&[&selection]).prefetch().wait().map(drop).map_err(kind), Err(ErrorKind::InUse));
    drop(selection);
    let keys = vec![0.5_f32; DIM];
    let row = TensorView::token_major(&keys, 1, 1, DIM);
    assert_eq!(sequence.append(0, row, row).unwrap_err().kind(), ErrorKind::InUse);
    assert_eq!(sequence.commit(Durability::Sync).unwrap_err().kind(), ErrorKind::InUse);
    assert_eq!(sequence.fork().unwrap_err().kind(), ErrorKind::InUse);
    drop(sequence);
    assert_eq!(store.close().unwrap_err().kind(), ErrorKind::InUse);
    assert!(files() == before, "a child wrote");
}
