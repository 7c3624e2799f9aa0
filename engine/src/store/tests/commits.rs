//! Commits of queued requests by another thread: copies that are repaired, and readers that learn of new places.

use super::*;
use crate::log::{CommitRequest, CopyChange, places};
use crate::metrics::{Evicted, EvictionReason};

#[test]
fn copies_that_were_not_written_are_made_by_the_background() {
    not_written_and_made(false);
}

#[test]
fn copies_that_could_not_be_made_either_are_tried_again() {
    not_written_and_made(true);
}

/// Copies fail to be written while a sequence grows. If `cannot_be_made`, they also fail for a while after its commit.
fn not_written_and_made(cannot_be_made: bool) {
    let _alone = lock(&ALONE);
    let dir = tempfile::tempdir().unwrap();
    let (store, mut sequence) = filled(dir.path(), 2);
    let before = store.status();
    // Writes to the manifest succeed, so the device stays a member.
    let trouble = trouble::set(&dir.path().join("1/segments"), &[("stratakv-1-", Trouble::NotWritten)]);
    for group in GROUPS..2 * GROUPS {
        let row = vec![group as f32; GROUP * DIM];
        let view = TensorView::token_major(&row, GROUP, 1, DIM);
        sequence.append(0, view, view).unwrap();
    }
    let errors = || sum(&store.status(), |device| device.errors);
    let deadline = Instant::now() + Duration::from_secs(60);
    // The background writes frames by itself.
    while errors() == sum(&before, |device| device.errors) {
        assert!(Instant::now() < deadline, "every copy was written");
        std::thread::sleep(Duration::from_millis(1));
    }
    let trouble = cannot_be_made.then_some(trouble);
    sequence.commit(Durability::Sync).unwrap();
    let alone = || lock(&store.inner.catalog).frames.values().filter(|frame| frame.copies() < 2).count();
    if let Some(trouble) = trouble {
        let (committed, frames) = (errors(), alone());
        assert!(frames > 0, "all were made");
        while errors() == committed {
            assert!(Instant::now() < deadline, "nobody tries");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(trouble);
    }
    while alone() > 0 {
        assert!(Instant::now() < deadline, "{} frames have one copy", alone());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn whoever_reads_a_frame_learns_of_a_change_of_copies_that_others_committed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 2);
    let frames: Vec<_> = lock(&store.inner.catalog).frames.clone().into_iter().collect();
    let mut request = CommitRequest::default();
    for (id, frame) in &frames {
        let seen = places(frame);
        let wanted = seen.iter().rev().copied().collect();
        request.copies.push(CopyChange { frame: *id, seen, wanted });
    }
    // The request is queued, like a move that found no space for a checkpoint. The next commit carries it out.
    store.inner.committer.enqueue(request, None);
    store.inner.flush_commits().unwrap();
    for (id, before) in frames {
        let now = lock(&store.inner.catalog).frames[&id].location;
        assert_ne!(now.device, before.location.device);
        let slot = lock(&store.inner.space).frame_slot(id).expect("the sequence is open");
        assert_eq!(slot.now().segment.key, (now.device, now.segment));
    }
    read(&store, &sequence, &(0..GROUPS).collect::<Vec<_>>());
}

#[test]
fn evictions_that_were_kept_are_told_once_they_are_durable() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _sequence) = filled(dir.path(), 2);
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&told);
    store.on_eviction(move |event| lock(&events).push(event.id));
    let (id, key, reason) = (77, String::new(), EvictionReason::Space);
    store.inner.activity.observers.keep(vec![Evicted { id, key, tokens: 1, bytes: 4096, reason }]);
    store.run_maintenance().unwrap();
    // The background may have been faster, and tell it now.
    let deadline = Instant::now() + Duration::from_secs(60);
    while lock(&told).is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    store.run_maintenance().unwrap();
    assert_eq!((lock(&told).as_slice(), store.health().evictions), (&[77][..], 1));
}

#[test]
fn a_segment_takes_no_frames_behind_one_that_failed() {
    let _alone = lock(&ALONE);
    let dir = tempfile::tempdir().unwrap();
    let (store, mut sequence) = filled(dir.path(), 1);
    let newest = || {
        let catalog = lock(&store.inner.catalog);
        catalog.frames.iter().max_by_key(|(id, _)| **id).map(|(_, frame)| frame.location).unwrap()
    };
    let append = |sequence: &mut Sequence, to: u64| {
        for group in sequence.layer_len(0)? / GROUP as u64..to {
            let row = vec![group as f32; GROUP * DIM];
            let view = TensorView::token_major(&row, GROUP, 1, DIM);
            sequence.append(0, view, view)?;
        }
        sequence.commit(Durability::Sync)
    };
    append(&mut sequence, GROUPS + 1).unwrap();
    let first = newest();
    append(&mut sequence, GROUPS + 2).unwrap();
    let last = newest();
    assert_eq!(last.segment, first.segment, "it has room");
    let trouble = trouble::set(&dir.path().join("0/segments"), &[("stratakv-0-", Trouble::NotWritten)]);
    // These are enough groups for whole frames, which the device's thread writes.
    let error = append(&mut sequence, GROUPS + 200).unwrap_err();
    drop(trouble);
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    append(&mut sequence, GROUPS + 200).unwrap();
    let frames: Vec<_> = lock(&store.inner.catalog).frames.values().map(|frame| frame.location).collect();
    let behind = frames.iter().find(|at| at.segment == last.segment && at.page > last.page);
    assert_eq!(behind, None, "what failed may still land there");
    read(&store, &sequence, &(0..GROUPS + 200).collect::<Vec<_>>());
}
