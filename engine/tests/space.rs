//! Space: accounting, reserve, cleaning, eviction, time to live and capacity.
//!
//! After most operations, [`sound`] compares the usage with the files on disk and with itself.

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use stratakv::metrics::{Evicted, EvictionReason};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Selection, Sequence,
    Store, TensorView, attend,
};
use stratakv_testing::{small_options, uniform_layout};

const HEADS: usize = 2;
const DIM: usize = 16;
const MIB: u64 = 1 << 20;

/// Returns the capacity of `count` segments and the manifest.
fn segments(count: u64) -> ByteSize {
    ByteSize(16 * MIB + 8192 + count * (256 << 10))
}

fn layout() -> KvLayout {
    uniform_layout(1, HEADS, DIM, 8)
}

/// Returns deterministic values that f16 represents exactly.
fn values(seed: u64, token: usize, plane: usize) -> Vec<f32> {
    let element = |i: usize| {
        let mut x = seed ^ (token as u64) << 20 ^ (plane as u64) << 50 ^ i as u64;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x >> 40) % 256) as f32 / 64.0 - 2.0
    };
    (0..HEADS * DIM).map(element).collect()
}

fn append(sequence: &mut Sequence, seed: u64, tokens: std::ops::Range<usize>) -> stratakv::Result<()> {
    let rows = |plane| tokens.clone().flat_map(|t| values(seed, t, plane)).collect::<Vec<f32>>();
    let (keys, vals) = (rows(0), rows(1));
    let view = |data| TensorView::token_major(data, tokens.len(), HEADS, DIM);
    sequence.append(0, view(&keys), view(&vals))
}

fn write(store: &Store, options: CreateOptions, seed: u64, tokens: usize) -> stratakv::Result<u64> {
    let mut sequence = store.create_sequence(&layout(), options)?;
    append(&mut sequence, seed, 0..tokens)?;
    sequence.commit(Durability::Sync)?;
    Ok(sequence.id().0)
}

fn key(name: impl ToString) -> CreateOptions {
    CreateOptions::new().key(name.to_string())
}

/// Compares the engine's attention over a whole selection with a naive one.
fn check_view(store: &Store, view: &Selection, seed: u64, tokens: usize) {
    let query: Vec<f32> = (0..HEADS * DIM).map(|i| (i % 7) as f32 / 8.0 - 0.25).collect();
    let batch = store.read(&[view]).submit().unwrap().wait().unwrap();
    let mut out = vec![0.0; HEADS * DIM];
    attend(&query, view, batch.get(0).unwrap(), &mut out).unwrap();
    for head in 0..HEADS {
        let own = |plane, token| values(seed, token, plane)[head * DIM..(head + 1) * DIM].to_vec();
        let score = |t| -> f64 {
            let dot: f64 = own(0, t).iter().zip(&query[head * DIM..]).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum();
            dot / (DIM as f64).sqrt()
        };
        let scores: Vec<f64> = (0..tokens).map(score).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..DIM {
            let wanted: f64 = (0..tokens).map(|t| weights[t] * f64::from(own(1, t)[d])).sum::<f64>() / sum;
            let got = f64::from(out[head * DIM + d]);
            assert!((wanted - got).abs() < 1e-3, "seed {seed}, head {head}, {d}: {got}, not {wanted}");
        }
    }
}

fn check(store: &Store, name: impl ToString, seed: u64, tokens: usize) {
    let sequence = store.open_sequence(&name.to_string(), OpenSequence::new()).unwrap();
    assert_eq!(sequence.len(), tokens as u64);
    check_view(store, &sequence.select(0, SelectRequest::all()).unwrap(), seed, tokens);
}

/// Returns the bytes that the files below a directory take on disk, and the sum of their lengths.
fn du(dir: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    std::fs::read_dir(dir).unwrap().map(Result::unwrap).fold((0, 0), |sum, entry| {
        // The background may have removed the file.
        let Ok(meta) = entry.metadata() else { return sum };
        let own = if meta.is_dir() { du(&entry.path()) } else { (meta.blocks() * 512, meta.len()) };
        (sum.0 + own.0, sum.1 + own.1)
    })
}

fn sound(store: &Store, dir: &Path) -> stratakv::store::Usage {
    // The background may be creating or removing files, so the usage is taken until it agrees with them.
    let still = (0..5000).find_map(|_| {
        let (usage, files) = (store.usage().unwrap(), du(dir));
        let same = usage.file_bytes == files.1 && store.usage().unwrap().file_bytes == files.1;
        if !same {
            std::thread::sleep(Duration::from_millis(2));
        }
        same.then_some((usage, files.0))
    });
    let (usage, blocks) = still.unwrap_or_else(|| panic!("{:?}, not as in {:?}", du(dir), store.usage()));
    assert_eq!(usage.sum_bytes(), usage.capacity_bytes, "{usage:?}");
    if usage.preallocated {
        // Directories and the block maps of files take a little more.
        assert!(blocks.abs_diff(usage.file_bytes) <= usage.file_bytes / 50 + 65_536, "{blocks} {usage:?}");
    }
    let namespaces: u64 = usage.namespaces.iter().map(|own| own.live_bytes).sum();
    assert_eq!(usage.live_bytes, namespaces);
    usage
}

#[test]
fn files_follow_what_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    let segments = || du(&dir.path().join("segments")).1;
    for i in 0..60 {
        write(&store, key(i), i, 600).unwrap();
    }
    let full = segments();
    for i in 0..56 {
        store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    // The background cleans without a call.
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while segments() > full / 2 {
        assert!(std::time::Instant::now() < deadline, "{} of {full} bytes: {:?}", segments(), store.usage());
        std::thread::sleep(Duration::from_millis(5));
    }
    store.run_maintenance().unwrap();
    sound(&store, dir.path());
    // Later sequences use the segments that were kept, without new files.
    let kept = segments();
    for i in 60..66 {
        write(&store, key(i), i, 600).unwrap();
    }
    assert!(segments() <= kept, "{} bytes, not {kept}", segments());
    (56..66).for_each(|i| check(&store, i, i, 600));
    store.close().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    (56..66).for_each(|i| check(&store, i, i, 600));
    sound(&store, dir.path());
}

#[test]
fn half_is_deleted_and_cleaned_and_the_rest_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(40)).open().unwrap();
    let tokens = |i: u64| 200 + (i * 37 % 400) as usize;
    for i in 0..60 {
        write(&store, key(i), i, tokens(i)).unwrap();
        sound(&store, dir.path());
    }
    // Cleaning does not change an open sequence or a selection of another.
    let mut open = store.open_sequence("1", OpenSequence::new()).unwrap();
    let pinned = store.open_sequence("3", OpenSequence::new()).unwrap().select(0, SelectRequest::all()).unwrap();
    for i in (0..60).step_by(2) {
        store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    let before = sound(&store, dir.path());
    let done = store.clean().unwrap();
    assert!(done.frames > 0 && done.segments > 2, "{done:?}");
    let after = sound(&store, dir.path());
    assert_eq!(after.live_bytes, before.live_bytes);
    assert!(after.dead_bytes < before.dead_bytes / 2, "{before:?} {after:?}");
    check_view(&store, &pinned, 3, tokens(3));
    check_view(&store, &open.select(0, SelectRequest::all()).unwrap(), 1, tokens(1));
    append(&mut open, 1, tokens(1)..tokens(1) + 100).unwrap();
    open.commit(Durability::Sync).unwrap();
    check_view(&store, &open.select(0, SelectRequest::all()).unwrap(), 1, tokens(1) + 100);
    drop((open, pinned));
    for i in (5..60).step_by(2) {
        check(&store, i, i, tokens(i));
    }
    assert!(store.health().is_well(), "{:?}", store.health());
    let lifetime = store.usage().unwrap().lifetime_bytes;
    store.close().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(40)).open().unwrap();
    let reopened = sound(&store, dir.path());
    assert!(reopened.lifetime_bytes >= lifetime && reopened.live_bytes > 0);
    check(&store, 1, 1, tokens(1) + 100);
    for i in (3..60).step_by(2) {
        check(&store, i, i, tokens(i));
    }
}

#[test]
fn churn_far_beyond_the_capacity() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(24)).open().unwrap();
    let tokens = |i: u64| 60 + (i * 271 % 900) as usize;
    let mut alive = std::collections::VecDeque::new();
    let mut bytes = 0;
    for i in 0..400_u64 {
        // Sequences are deleted in another order than created, so that segments keep live frames.
        while bytes + tokens(i) > 24_000 {
            let at = (i * 7919 % alive.len() as u64) as usize;
            let gone: u64 = alive.remove(at).unwrap();
            bytes -= tokens(gone);
            store.open_sequence(&gone.to_string(), OpenSequence::new()).unwrap().delete(Durability::Lazy).unwrap();
        }
        write(&store, key(i), i, tokens(i)).unwrap_or_else(|e| panic!("{i}: {e} {:#?}", store.usage()));
        bytes += tokens(i);
        alive.push_back(i);
    }
    sound(&store, dir.path());
    for i in alive.iter().step_by(3) {
        check(&store, *i, *i, tokens(*i));
    }
    assert!(store.health().is_well());
}

#[test]
fn a_full_store_deletes_checkpoints_cleans_and_opens() {
    let dir = tempfile::tempdir().unwrap();
    let open = || small_options(&[dir.path()]).capacity(segments(12)).open().unwrap();
    let store = open();
    let mut count = 0_u64;
    let error = loop {
        match write(&store, key(count), count, 300) {
            Ok(_) => count += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    let full = sound(&store, dir.path());
    assert!(full.reserved_bytes >= 2 * (256 << 10), "{full:?}");
    store.close().unwrap();
    let store = open();
    // Half of the sequences are deleted, so that no segment is free without cleaning.
    for i in (0..count).step_by(2) {
        store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    for i in 0..count / 3 {
        write(&store, key(1000 + i), i, 300).unwrap();
    }
    assert!(store.health().cleaned_segments > 0);
    for i in (1..count).step_by(2) {
        check(&store, i, i, 300);
    }
    sound(&store, dir.path());
}

#[test]
fn evictable_sequences_make_room_and_the_observer_hears_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(16)).open().unwrap();
    write(&store, key("kept"), 7, 500).unwrap();
    let seen: Arc<Mutex<Vec<Evicted>>> = Arc::default();
    let (own, again) = (Arc::clone(&seen), store.clone());
    store.on_eviction(move |event| {
        // The observer may use the store.
        assert!(again.open_sequence(&event.key, OpenSequence::new()).is_err());
        own.lock().unwrap().push(event.clone());
    });
    for i in 0..80_u64 {
        let priority = if i % 4 == 0 { 9 } else { 1 };
        write(&store, key(i).evictable(priority), i, 400).unwrap();
    }
    let gone = seen.lock().unwrap().clone();
    assert!(
        gone.len() > 10 && gone.iter().all(|e| e.reason == EvictionReason::Space && e.tokens == 400 && e.bytes > 0)
    );
    // Eviction starts with the highest priority, and with the oldest among those.
    let ids: Vec<u64> = gone.iter().map(|event| event.key.parse().unwrap()).collect();
    assert_eq!(&ids[..3], &[0, 4, 8], "{ids:?}");
    check(&store, "kept", 7, 500);
    check(&store, 79, 79, 400);
    assert_eq!(store.health().evictions, gone.len() as u64);
    store.on_eviction(|_| {});
}

#[test]
fn eviction_begins_above_the_high_watermark_and_ends_at_the_low_one() {
    const TOKENS: usize = 400;
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(64)).watermarks(0.6, 0.4).open().unwrap();
    let seen: Arc<Mutex<Vec<Evicted>>> = Arc::default();
    let events = Arc::clone(&seen);
    store.on_eviction(move |event: &Evicted| events.lock().unwrap().push(event.clone()));
    let one = {
        write(&store, key("first").evictable(1), 0, TOKENS).unwrap();
        store.usage().unwrap().live_bytes
    };
    // The level is a share of the space for frames.
    let level = || {
        let usage = sound(&store, dir.path());
        let room = usage.capacity_bytes - usage.reserved_bytes - usage.metadata_bytes;
        ((usage.live_bytes + usage.in_flight_bytes) as f64 / room as f64, one as f64 / room as f64)
    };
    let (mut turns, mut highest, mut gone) = (0, 0.0_f64, 0);
    for i in 1..600 {
        let (before, _) = level();
        write(&store, key(i).evictable(1), i, TOKENS).unwrap();
        store.run_maintenance().unwrap();
        let (now, step) = level();
        assert!(now <= 0.6 + 1e-9, "{now} lives after sequence {i}");
        let events = seen.lock().unwrap();
        if events.len() > gone {
            assert!(before + step > 0.6 - 1e-3, "{before} lived, and something went");
            // The metadata changes a little meanwhile.
            assert!((now - 0.4).abs() < 2.0 * step, "down to {now}");
            turns += 1;
        }
        gone = events.len();
        highest = highest.max(now);
    }
    let seen = seen.lock().unwrap();
    assert!(turns > 2 && highest > 0.58, "{turns} turns, at most {highest}");
    assert!(seen.iter().all(|event| event.reason == EvictionReason::Space && event.bytes == one));
    // The evicted sequences are those that were used least recently.
    let names: Vec<&str> = seen.iter().map(|event| event.key.as_str()).collect();
    let wanted: Vec<String> = std::iter::once("first".into()).chain((1..gone).map(|i| i.to_string())).collect();
    assert_eq!(names, wanted);
}

#[test]
fn a_time_to_live_ends_in_the_background_and_at_open() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    write(&store, key("short").ttl(Duration::from_millis(1)), 1, 100).unwrap();
    write(&store, key("long").ttl(Duration::from_secs(3600)), 2, 100).unwrap();
    let held = store.create_sequence(&layout(), key("held").ttl(Duration::from_millis(1)));
    let mut held = held.unwrap();
    append(&mut held, 3, 0..10).unwrap();
    held.commit(Durability::Sync).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    store.run_maintenance().unwrap();
    assert_eq!(store.open_sequence("short", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    // A sequence does not expire while it has a handle. Afterwards the background removes it at once, or else the next
    // open does.
    append(&mut held, 3, 10..20).unwrap();
    held.commit(Durability::Sync).unwrap();
    let seen: Arc<Mutex<Vec<Evicted>>> = Arc::default();
    let observe = |store: &Store| {
        let own = Arc::clone(&seen);
        store.on_eviction(move |event| own.lock().unwrap().push(event.clone()));
    };
    observe(&store);
    drop(held);
    store.close().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    observe(&store);
    store.run_maintenance().unwrap();
    assert_eq!(store.open_sequence("held", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    check(&store, "long", 2, 100);
    let seen: Vec<_> = seen.lock().unwrap().iter().filter(|event| event.key != "short").cloned().collect();
    assert!(matches!(&seen[..], [e] if e.key == "held" && e.reason == EvictionReason::Expired), "{seen:?}");
}

#[test]
fn a_time_to_live_ends_without_a_call() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    let (tell, gone) = mpsc::channel();
    store.on_eviction(move |event: &Evicted| tell.send((event.key.clone(), event.reason)).unwrap());
    // The background first has nothing to wait for, then a distant expiry, then a near one.
    for (name, seconds) in [("far", 3600), ("near", 2)] {
        std::thread::sleep(Duration::from_millis(200));
        write(&store, key(name).ttl(Duration::from_secs(seconds)), 1, 20).unwrap();
    }
    let event = gone.recv_timeout(Duration::from_secs(60)).expect("it expires without a call");
    assert_eq!(event, ("near".into(), EvictionReason::Expired));
    assert_eq!(store.sequences().len(), 1);
}

#[test]
fn a_smaller_capacity_is_reached_by_cleaning() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(60)).open().unwrap();
    for i in 0..100_u64 {
        write(&store, key(i), i, 400).unwrap();
    }
    for i in (0..100_u64).filter(|i| i % 4 != 1) {
        store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().delete(Durability::Lazy).unwrap();
    }
    let before = sound(&store, dir.path());
    store.set_capacity(Some(segments(24))).unwrap();
    let after = sound(&store, dir.path());
    assert!(after.file_bytes <= segments(24).bytes() && after.file_bytes < before.file_bytes, "{after:?}");
    assert_eq!(store.set_capacity(Some(segments(2))).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(write(&store, key("more"), 1, 4000).unwrap_err().kind(), ErrorKind::NoSpace);
    store.set_capacity(None).unwrap();
    write(&store, key("even more"), 1, 4000).unwrap();
    store.close().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    sound(&store, dir.path());
    for i in (1..100_u64).step_by(4) {
        check(&store, i, i, 400);
    }
}

#[test]
fn a_capacity_that_views_keep_from_being_reached_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(60)).open().unwrap();
    let mut views = Vec::new();
    for i in 0..12_u64 {
        let options = key(i).evictable(1);
        write(&store, options, i, 3000).unwrap();
        views.push(
            store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().select(0, SelectRequest::all()).unwrap(),
        );
    }
    // The selections keep their segments, so neither cleaning nor eviction removes a file.
    assert_eq!(store.set_capacity(Some(segments(2))).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(store.health().evictions, 12);
    for (i, view) in views.iter().enumerate() {
        check_view(&store, view, i as u64, 3000);
    }
    drop(views);
    store.set_capacity(Some(segments(4))).unwrap();
    sound(&store, dir.path());
}

#[test]
fn a_slow_background_holds_up_neither_appends_nor_the_end() {
    let dir = tempfile::tempdir().unwrap();
    // At a byte per second, cleaning pauses for longer than any test.
    let open = || small_options(&[dir.path()]).capacity(segments(20)).cleaning_rate(ByteSize(1)).open().unwrap();
    let store = open();
    let mut alive: Vec<u64> = Vec::new();
    for i in 0..200_u64 {
        if alive.len() == 50 {
            let gone = alive.remove((i * 7919 % 50) as usize);
            store.open_sequence(&gone.to_string(), OpenSequence::new()).unwrap().delete(Durability::Lazy).unwrap();
        }
        write(&store, key(i), i, 500).unwrap_or_else(|e| panic!("{i}: {e} {:#?}", store.usage()));
        alive.push(i);
    }
    let health = store.health();
    assert!(health.no_space > 0 && health.cleaned_segments > 0, "{} {}", health.no_space, health.cleaned_segments);
    sound(&store, dir.path());
    check(&store, 199, 199, 500);
    store.close().unwrap();
    check(&open(), 199, 199, 500);
}

#[test]
fn cleaning_takes_one_buffer_and_one_frame_header_whatever_it_moves() {
    let dir = tempfile::tempdir().unwrap();
    let open = || small_options(&[dir.path()]).capacity(segments(80)).open().unwrap();
    let store = open();
    for i in 0..48_u64 {
        write(&store, key(i), i, 2000).unwrap();
    }
    for i in (0..48_u64).step_by(2) {
        store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    store.close().unwrap();
    let store = open();
    let before = store.status().memory.peak_bytes;
    let done = store.clean().unwrap();
    let after = store.status().memory.peak_bytes;
    assert!(done.bytes > 4 * MIB, "{done:?}");
    // Buffers are allocated in slabs of 2 MiB.
    assert!(after <= before + 3 * MIB as usize, "from {before} to {after} for {done:?}");
}

#[test]
fn closing_with_a_read_in_flight_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).open().unwrap();
    write(&store, key("a"), 1, 100).unwrap();
    let view = store.open_sequence("a", OpenSequence::new()).unwrap().select(0, SelectRequest::all()).unwrap();
    let ticket = store.read(&[&view]).submit().unwrap();
    let error = store.close().unwrap_err();
    assert!(error.kind() == ErrorKind::InUse && error.to_string().contains("is closed, but 1 reads"), "{error}");
    assert!(ticket.wait().unwrap().get(0).is_ok());
    drop(view);
    check(&small_options(&[dir.path()]).open().unwrap(), "a", 1, 100);
}

#[test]
fn a_selection_survives_the_move_of_its_groups() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_options(&[dir.path()]).capacity(segments(30)).open().unwrap();
    for i in 0..40_u64 {
        write(&store, key(i).store_summary(stratakv::StoredSummary::MinMax), i, 300).unwrap();
    }
    let sequence = store.open_sequence("21", OpenSequence::new()).unwrap();
    let query = vec![0.5; HEADS * DIM];
    let before = sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(64))).unwrap();
    for i in (0..40_u64).filter(|i| i % 5 != 1) {
        store.open_sequence(&i.to_string(), OpenSequence::new()).unwrap().delete(Durability::Sync).unwrap();
    }
    assert!(store.clean().unwrap().frames > 0);
    let after = sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(64))).unwrap();
    let attended = |view: &Selection| {
        let batch = store.read(&[view]).submit().unwrap().wait().unwrap();
        let mut out = vec![0.0_f32; HEADS * DIM];
        attend(&query, view, batch.get(0).unwrap(), &mut out).unwrap();
        out
    };
    assert_eq!(attended(&before), attended(&after));
}

/// Copies a directory tree with the permissions of a private store.
fn copy(from: &Path, to: &Path) {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to),
            false => assert!(std::fs::copy(entry.path(), to).is_ok()),
        }
    }
}

#[test]
fn an_interrupted_creation_starts_again_unless_the_store_was_used() {
    for used in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let dirs: Vec<_> = (0..3).map(|i| root.path().join(i.to_string())).collect();
        dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        let opened = |prefix: &str| {
            let dirs = (0..3).map(|i| root.path().join(format!("{prefix}{i}")));
            dirs.fold(Store::options().segment_bytes(ByteSize::kib(256)), |o, dir| o.device(dir)).open()
        };
        let store = opened("").unwrap();
        if used {
            write(&store, key("kept"), 1, 100).unwrap();
        }
        for (i, dir) in dirs.iter().enumerate() {
            copy(dir, &root.path().join(format!("cut-{i}")));
        }
        // The creation ended before the last device got its superblock.
        std::fs::remove_file(root.path().join("cut-2/superblock")).unwrap();
        match (used, opened("cut-")) {
            (false, Ok(store)) => {
                write(&store, key("new"), 2, 100).unwrap();
                check(&store, "new", 2, 100);
            }
            (true, Err(e)) => assert_eq!(e.kind(), ErrorKind::Configuration, "{e}"),
            (used, outcome) => panic!("used: {used}, {outcome:?}"),
        }
        drop(store);
    }
}
