//! Changes of copies as commits take them.

use super::{GROUP, GROUPS, Store, filled};
use crate::log::{CommitRequest, CopyChange, Writer, allocate, places};
use crate::metrics::lock;
use crate::options::ByteSize;
use stratakv_format::DeviceIndex;

/// Of two changes of one frame in one group commit the first counts: the second was decided for what was there before it.
#[test]
fn two_changes_of_a_frame_in_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 2);
    let inner = &store.inner;
    let (id, meta) = {
        let catalog = lock(&inner.catalog);
        let first = catalog.frames.iter().min_by_key(|(id, _)| **id).unwrap();
        (*first.0, first.1.clone())
    };
    let seen = places(&meta);
    assert_eq!(seen.len(), 2, "a copy on each device");
    let mut wanted = Vec::new();
    for _ in 0..2 {
        // The second copy anew, on its own device. Nobody reads it before it is replaced again.
        let device: DeviceIndex = seen[1].0.device;
        let pages = meta.location.pages;
        let (location, flight) = allocate(&inner.devices, &inner.space, device, Writer::Cleaning, pages).unwrap();
        let change = CopyChange { frame: id, seen: seen.clone(), wanted: vec![seen[0], (location, 7)] };
        wanted.push(change.wanted.clone());
        let segments = vec![std::sync::Arc::clone(flight.segment())];
        let (copies, flights) = (vec![change], vec![flight]);
        inner.committer.enqueue(CommitRequest { copies, segments, flights, ..CommitRequest::default() }, None);
    }
    store.flush().unwrap();
    assert_eq!(places(&lock(&inner.catalog).frames[&id]), wanted[0]);
    assert_eq!(store.health().read_only, None);
    // The records can be replayed.
    drop(sequence);
    store.close().unwrap();
    let options = Store::options().device(dir.path().join("0")).device(dir.path().join("1"));
    let store = options.memory_limit(ByteSize::mib(32)).read_only(true).open().unwrap();
    assert_eq!(places(&lock(&store.inner.catalog).frames[&id]), wanted[0]);
    assert_eq!(store.open_sequence("s").unwrap().len(), GROUPS * GROUP as u64);
}
