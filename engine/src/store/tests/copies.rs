//! Changes of copies in commits.

use super::{GROUP, GROUPS, Store, filled, read};
use crate::catalog::FrameMeta;
use crate::error::ErrorKind;
use crate::io::buffer::SLAB_BYTES;
use crate::log::{CommitRequest, CopyChange, Writer, allocate, places};
use crate::metrics::lock;
use crate::options::ByteSize;
use crate::plan::SelectRequest;
use crate::sequence::OpenSequence;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use stratakv_format::{DeviceIndex, FrameId, PAGE_BYTES, segment};

fn first_frame(store: &Store) -> (FrameId, FrameMeta) {
    let catalog = lock(&store.inner.catalog);
    let first = catalog.frames.iter().min_by_key(|(id, _)| **id).unwrap();
    (*first.0, first.1.clone())
}

/// Of two changes of one frame in one group commit the first counts, because the second was decided for the copies
/// before it.
#[test]
fn two_changes_of_a_frame_in_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 2);
    let inner = &store.inner;
    let (id, meta) = first_frame(&store);
    let seen = places(&meta);
    assert_eq!(seen.len(), 2, "a copy on each device");
    let mut wanted = Vec::new();
    for _ in 0..2 {
        // The second copy is written again on its own device. It is not read before it is replaced.
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
    assert_eq!(store.open_sequence("s", OpenSequence::new()).unwrap().len(), GROUPS * GROUP as u64);
}

/// Overwrites the middle page of every copy on a device, which holds groups.
fn damage_device(store: &Store, dir: &Path, device: u16) {
    let copies: Vec<_> = lock(&store.inner.catalog).frames.values().flat_map(places).collect();
    for (location, _) in copies.into_iter().filter(|(location, _)| location.device.0 == device) {
        let path = dir.join(device.to_string()).join(segment::file_name(location.segment));
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[0xee; 4096], location.offset() + location.bytes() / 8192 * 4096).unwrap();
        file.sync_all().unwrap();
    }
}

#[test]
fn reads_that_another_copy_gives_count_on_the_device_whose_copy_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut sequence) = filled(dir.path(), 2);
    let counted = || store.status().devices.iter().map(|device| device.counters.other_copies).collect::<Vec<_>>();
    // No repair replaces the damaged copies meanwhile.
    let one = lock(&store.inner.locks.repairing);
    damage_device(&store, dir.path(), 0);
    for _ in 0..4 {
        read(&store, &sequence, &(0..GROUPS).collect::<Vec<_>>());
    }
    let by_reads = counted();
    assert!(by_reads[0] > 0 && by_reads[1] == 0, "{by_reads:?}");
    // Blocks that the sequence reads for itself count alike.
    for group in (0..GROUPS).rev() {
        sequence.truncate(group * GROUP as u64 + 3).unwrap();
    }
    let by_sequence = counted();
    assert!(by_sequence[0] > by_reads[0] && by_sequence[1] == 0, "{by_sequence:?}");
    drop(one);
}

#[test]
fn a_copy_is_no_suspect_because_no_buffer_was_free() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut sequence) = filled(dir.path(), 2);
    let one = lock(&store.inner.locks.repairing);
    store.inner.devices.suspects.take();
    let arena = &store.inner.devices.arena;
    let slabs: Vec<_> = std::iter::from_fn(|| arena.lease(SLAB_BYTES).ok()).collect();
    let pages: Vec<_> = std::iter::from_fn(|| arena.lease(PAGE_BYTES).ok()).collect();
    let error = sequence.truncate(GROUPS / 2 * GROUP as u64 + 3).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Busy | ErrorKind::MemoryLimit), "{error}");
    assert!(store.inner.devices.suspects.take().is_empty());
    drop((slabs, pages));
    sequence.truncate(GROUPS / 2 * GROUP as u64 + 3).unwrap();
    drop(one);
}

/// A frame that is damaged in the same place of every copy is copied once. A call of `repair` tries it again.
#[test]
fn what_cannot_be_copied_is_tried_once() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 2);
    let inner = &store.inner;
    let (id, meta) = first_frame(&store);
    for (location, _) in places(&meta) {
        let path = dir.path().join(location.device.0.to_string()).join(segment::file_name(location.segment));
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[0xee; 4096], location.offset() + location.bytes() / 8192 * 4096).unwrap();
        file.sync_all().unwrap();
    }
    let all = sequence.select(0, SelectRequest::groups(&(0..GROUPS).collect::<Vec<_>>())).unwrap();
    let batch = store.read(&[&all]).submit().unwrap().wait();
    let error = batch.and_then(|batch| (0..GROUPS as usize).try_for_each(|nth| batch.get(0)?.group(nth).map(drop)));
    assert_eq!(error.err().map(|e| e.kind()), Some(ErrorKind::Corruption));
    let suspects = &inner.devices.suspects;
    let deadline = Instant::now() + Duration::from_secs(60);
    let until = |done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    suspects.add_at(id, meta.location.device);
    until(&|| suspects.unrepairable().contains(&id) && !suspects.any());
    let written = store.usage().unwrap().lifetime_bytes;
    suspects.owe();
    until(&|| !suspects.any());
    let repaired = store.repair().unwrap();
    assert!(repaired.left == 1 && repaired.checked == 1 && repaired.copied + repaired.healed == 0, "{repaired:?}");
    let again = store.usage().unwrap().lifetime_bytes;
    assert!(again - written <= 2 * meta.location.bytes(), "{} bytes were written", again - written);
    assert_eq!(store.health().suspect_copies, 1);
    // Another copy of the frame fails a read. It is checked, and kept for the next call of `repair`.
    let mut devices = places(&meta).into_iter().map(|(location, _)| location.device);
    suspects.add_at(id, devices.find(|device| *device != meta.location.device).unwrap());
    until(&|| !suspects.any());
    drop(lock(&inner.locks.repairing));
    assert_eq!(store.health().suspect_copies, 2);
    // No copy of the frame was written.
    assert!(store.usage().unwrap().lifetime_bytes - again < meta.location.bytes());
    let repaired = store.repair().unwrap();
    assert!(repaired.left == 1 && repaired.checked == 2 && repaired.copied + repaired.healed == 0, "{repaired:?}");
}
