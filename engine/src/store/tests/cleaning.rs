//! Cleaning of segments with damaged frames.

use super::{DIM, GROUP, Store, filled};
use crate::catalog::{FrameMeta, SegmentState};
use crate::layout::{KvLayout, TensorView};
use crate::log::{CopyPlace, places};
use crate::metrics::lock;
use crate::options::{CreateOptions, Durability};
use crate::sequence::{OpenSequence, Sequence};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use stratakv_format::{FrameId, PAGE_BYTES, segment};

/// The number of sequences of one small frame each. Every other one is deleted.
const SMALL: u8 = 48;

/// Returns a store on two devices whose segments are half dead, its filled sequence, and a live frame on both devices
/// in sealed segments.
fn half_dead(dir: &Path) -> (Store, Sequence, FrameId, FrameMeta) {
    let (store, sequence) = filled(dir, 2);
    let filled = lock(&store.inner.catalog).frames.values().next().unwrap().origin;
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let layout = layout.build().unwrap();
    for i in 0..SMALL {
        let options = CreateOptions::new().key(i.to_string()).copies(2);
        let mut small = store.create_sequence(&layout, options).unwrap();
        let rows = vec![f32::from(i); 32 * GROUP * DIM];
        let view = TensorView::token_major(&rows, 32 * GROUP, 1, DIM);
        small.append(0, view, view).unwrap();
        small.commit(Durability::Sync).unwrap();
    }
    for i in (0..SMALL).step_by(2) {
        store.open_sequence(i.to_string().as_str(), OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    let (id, meta) = {
        let catalog = lock(&store.inner.catalog);
        let is_sealed = |(at, _): &CopyPlace| catalog.segments[&(at.device, at.segment)].state == SegmentState::Sealed;
        let mut frames = catalog.frames.iter().filter(|(_, frame)| frame.origin != filled);
        let found = frames.find(|(_, frame)| places(frame).iter().all(is_sealed)).expect("a frame in sealed segments");
        (*found.0, found.1.clone())
    };
    assert_eq!(meta.copies(), 2);
    // Nothing else lives in its segments, so that they are the first to be cleaned.
    let segments: Vec<_> = places(&meta).iter().map(|(at, _)| (at.device, at.segment)).collect();
    let beside = |frame: &FrameMeta| places(frame).iter().any(|(at, _)| segments.contains(&(at.device, at.segment)));
    let others: BTreeSet<_> = {
        let catalog = lock(&store.inner.catalog);
        let frames = catalog.frames.iter().filter(|(other, frame)| **other != id && beside(frame));
        frames.map(|(_, frame)| frame.origin).collect()
    };
    assert!(!others.contains(&filled) && !others.contains(&meta.origin));
    for other in others {
        store.open_sequence(other, OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    (store, sequence, id, meta)
}

fn file(dir: &Path, (location, _): &CopyPlace) -> File {
    let path = dir.join(location.device.0.to_string()).join(segment::file_name(location.segment));
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Overwrites the middle page of a copy, which holds groups.
fn damage(dir: &Path, place: &CopyPlace) {
    let file = file(dir, place);
    let middle = place.0.bytes() / (2 * PAGE_BYTES as u64) * PAGE_BYTES as u64;
    file.write_all_at(&[0xee; PAGE_BYTES], place.0.offset() + middle).unwrap();
    file.sync_all().unwrap();
}

/// Returns the bytes of a copy behind its header.
fn bytes(dir: &Path, meta: &FrameMeta, place: &CopyPlace) -> Vec<u8> {
    let header = u64::from(meta.header_pages) * PAGE_BYTES as u64;
    let mut bytes = vec![0; (place.0.bytes() - header) as usize];
    file(dir, place).read_exact_at(&mut bytes, place.0.offset() + header).unwrap();
    bytes
}

#[test]
fn cleaning_reads_a_damaged_block_from_another_copy() {
    for damaged in 0..2 {
        let dir = tempfile::tempdir().unwrap();
        let (store, _sequence, id, meta) = half_dead(dir.path());
        let seen = places(&meta);
        let good = bytes(dir.path(), &meta, &seen[1 - damaged]);
        damage(dir.path(), &seen[damaged]);
        assert_ne!(bytes(dir.path(), &meta, &seen[damaged]), good);
        let done = store.clean().unwrap();
        let health = store.health();
        assert!(done.segments > 0 && health.checksum_failures > 0, "{done:?} {health:?}");
        assert_eq!(health.stuck_segments, 0);
        let now = places(&lock(&store.inner.catalog).frames[&id]);
        assert_eq!(now.len(), 2);
        assert!(now.iter().all(|place| !seen.contains(place)), "both copies moved: {seen:?} {now:?}");
        assert!(now.iter().all(|place| bytes(dir.path(), &meta, place) == good), "both copies are good");
    }
}

#[test]
fn cleaning_leaves_a_block_that_is_damaged_in_every_copy() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _sequence, id, meta) = half_dead(dir.path());
    let seen = places(&meta);
    seen.iter().for_each(|place| damage(dir.path(), place));
    {
        // No repair takes the suspects meanwhile.
        let _one = lock(&store.inner.locks.repairing);
        let suspects = store.inner.devices.suspects.take();
        assert!(suspects.iter().all(|(frame, _)| *frame != id), "{suspects:?}");
        store.clean().unwrap();
        let suspects = store.inner.devices.suspects.take();
        assert!(seen.iter().all(|(at, _)| suspects.contains(&(id, at.device))), "{suspects:?}");
        suspects.iter().for_each(|(frame, device)| store.inner.devices.suspects.add_at(*frame, *device));
    }
    assert_eq!(store.health().stuck_segments, 2, "a segment of each device");
    // No repair is possible, so the copies stay suspects.
    assert_eq!(store.repair().unwrap().left, 1);
    assert_eq!(store.health().suspect_copies, 2);
    assert_eq!(places(&lock(&store.inner.catalog).frames[&id]), seen);
}
