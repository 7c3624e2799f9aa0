//! One test per class of bugs that storage and cache systems have shipped. The name of a test is the name of its class.
//!
//! Classes whose test lies elsewhere: `pooled_buffers_never_aligned` is `leases_are_aligned_and_disjoint` of the engine's
//! arena, `eight_tebibytes_from_a_length_field` is `every_wrong_size_in_a_header_is_refused` of the format and the fuzz
//! target `mutated_valid_image`, `repair_panics` has no subject yet: kvfsck repairs nothing.

use std::time::Duration;
use stratakv::sim::{Faults, Geometry, Simulation};
use stratakv::{
    ByteSize, DType, Durability, ErrorKind, KvLayout, Result, Sequence, SequenceOptions, Store, StoreOptions,
    TensorView,
};
use stratakv_tests::disk::{assert_clean, device_dirs, small_options};
use stratakv_tests::image::{Part, live_regions};
use stratakv_tests::rng::mix;

const HEADS: usize = 2;
const DIM: usize = 32;
const ROW: usize = HEADS * DIM;
const GROUP: usize = 4;

fn layout() -> KvLayout {
    let builder = KvLayout::builder().layers(1).kv_heads(HEADS as u16).head_dim(DIM as u16);
    builder.group_tokens(GROUP as u16).dtype(DType::F32).build().expect("a layout")
}

fn simulation(seed: u64) -> Simulation {
    let geometry = Geometry { devices: 1, device_bytes: 64 << 20, manifest_pages: 8, batch_bytes: 4000, whole: false };
    Simulation::new(&geometry, seed)
}

fn options() -> StoreOptions {
    Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize::kib(64))
}

fn value(name: u64, token: usize, i: usize) -> f32 {
    (mix(name ^ mix((token * ROW + i) as u64)) >> 48) as f32
}

fn tokens(name: u64, range: std::ops::Range<usize>) -> Vec<f32> {
    range.flat_map(|token| (0..ROW).map(move |i| value(name, token, i))).collect()
}

fn append(sequence: &mut Sequence, name: u64, count: usize) -> Result<()> {
    let from = sequence.layer_len(0)? as usize;
    let data = tokens(name, from..from + count);
    let view = || TensorView::token_major(&data, count, HEADS, DIM);
    sequence.append(0, view(), view())
}

fn create(store: &Store, key: &str) -> Sequence {
    store.create_sequence(&layout(), SequenceOptions::new().key(key)).expect("a sequence")
}

/// Every whole group of the sequence holds what was appended under this name.
fn check(store: &Store, sequence: &Sequence, name: u64) -> Result<()> {
    let view = sequence.select_all(0)?;
    let batch = store.read(&[&view])?.wait()?;
    let blocks = batch.get(0)?;
    for (nth, group) in view.groups().enumerate() {
        let (keys, _) = blocks.group(nth)?;
        for (index, bytes) in keys.as_chunks::<4>().0.iter().enumerate() {
            let (head, rest) = (index / (GROUP * DIM), index % (GROUP * DIM));
            let token = group as usize * GROUP + rest / DIM;
            assert_eq!(f32::from_le_bytes(*bytes), value(name, token, head * DIM + rest % DIM), "token {token}");
        }
    }
    Ok(())
}

fn power_cut(simulation: &Simulation, handles: impl Sized) {
    simulation.crash();
    drop(handles);
    simulation.restart();
}

#[test]
fn wrong_content_served_from_disk() {
    for seed in 0..40 {
        let simulation = simulation(seed);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = create(&store, "a");
        append(&mut sequence, 1, 40).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        assert!(simulation.rot("segments/", 1, u64::MAX));
        // Either the bit lies where nothing is, or it is reported.
        if let Err(e) = check(&store, &sequence, 1) {
            assert_eq!(e.kind(), ErrorKind::Corruption);
        }
    }
}

#[test]
fn failed_store_left_visible() {
    let simulation = simulation(1);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 8).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
    append(&mut sequence, 1, 8).expect("an append");
    simulation.set_faults(Faults { write: Some(0), ..Faults::default() });
    sequence.commit(Durability::Sync).expect_err("a failed write");
    power_cut(&simulation, (sequence, store));
    let store = simulation.open(options()).expect("the store");
    let sequence = store.open_sequence("a").expect("the sequence");
    assert!(sequence.len() == 8 || sequence.len() == 16, "{}", sequence.len());
    check(&store, &sequence, 1).expect("what is visible is whole");
}

#[test]
fn uninitialised_buffer_returned_as_a_hit() {
    let simulation = simulation(2);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 40).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
    simulation.set_faults(Faults { read: Some(0), read_stays: true, ..Faults::default() });
    let view = sequence.select_all(0).expect("a view");
    let batch = store.read(&[&view]).and_then(stratakv::ReadTicket::wait).expect("a batch");
    assert_eq!(batch.get(0).err().map(|e| e.kind()), Some(ErrorKind::Io));
}

#[test]
fn read_during_write() {
    let simulation = simulation(3);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    for _ in 0..30 {
        append(&mut sequence, 1, 7).expect("an append");
        check(&store, &sequence, 1).expect("what was just appended");
    }
}

#[test]
fn hash_collision_returned_the_wrong_value() {
    let simulation = simulation(4);
    let store = simulation.open(options()).expect("a store");
    let keys: Vec<String> = (0..300).map(|n| format!("{n:0>width$}", width = 1 + n % 40)).collect();
    for key in &keys {
        create(&store, key).commit_with(key.as_bytes(), Durability::Lazy).expect("a commit");
    }
    for key in &keys {
        assert_eq!(store.open_sequence(key).expect("the sequence").state(), Some(key.as_bytes()));
        let other = format!("{key} ");
        assert_eq!(store.open_sequence(&other).err().map(|e| e.kind()), Some(ErrorKind::NotFound));
    }
}

/// Cuts the power at every device operation of a commit, then commits more and cuts again: `after` looks.
fn cut_everywhere(mut after: impl FnMut(&Simulation, u64)) {
    for at in 0..24 {
        for seed in 0..6 {
            let simulation = simulation(seed);
            let store = simulation.open(options()).expect("a store");
            let mut sequence = create(&store, "a");
            append(&mut sequence, 1, 9).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
            append(&mut sequence, 1, 9).expect("an append");
            simulation.crash_in(at);
            let _ = sequence.commit(Durability::Sync);
            power_cut(&simulation, (sequence, store));
            after(&simulation, at);
        }
    }
}

#[test]
fn append_after_a_partial_record_loses_later_data() {
    cut_everywhere(|simulation, _| {
        let store = simulation.open(options()).expect("the store");
        let mut sequence = store.open_sequence("a").expect("the sequence");
        append(&mut sequence, 1, 5).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        let len = sequence.len();
        power_cut(simulation, (sequence, store));
        let store = simulation.open(options()).expect("the store");
        let sequence = store.open_sequence("a").expect("the sequence");
        assert_eq!(sequence.len(), len);
        check(&store, &sequence, 1).expect("all of it");
    });
}

#[test]
fn recovery_after_a_second_crash() {
    cut_everywhere(|simulation, at| {
        simulation.crash_in(at * 3);
        let half = simulation.open(options());
        power_cut(simulation, half);
        let store = simulation.open(options()).expect("the store");
        let sequence = store.open_sequence("a").expect("the sequence");
        assert!(sequence.len() == 9 || sequence.len() == 18);
        check(&store, &sequence, 1).expect("all of it");
    });
}

#[test]
fn torn_tail_indistinguishable_from_damage() {
    // Torn tails open: `cut_everywhere` does nothing else. Damage in front of what is durable does not.
    let simulation = simulation(5);
    let store = simulation.open(options()).expect("a store");
    for name in 0..6 {
        create(&store, &format!("s{name}")).commit(Durability::Sync).expect("a commit");
    }
    power_cut(&simulation, store);
    for path in simulation.files(0).iter().filter(|path| path.starts_with("manifest/")) {
        let mut bytes = simulation.contents(0, path).expect("the manifest");
        bytes[4096 * 3 + 60] ^= 1;
        simulation.replace(0, path, &bytes);
    }
    assert_eq!(simulation.open(options()).err().map(|e| e.kind()), Some(ErrorKind::Corruption));
}

#[test]
fn deleted_data_back() {
    for seed in 0..20 {
        let simulation = simulation(seed);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = create(&store, "a");
        append(&mut sequence, 1, 9).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        sequence.delete(Durability::Sync).expect("a deletion");
        power_cut(&simulation, store);
        for _ in 0..2 {
            let store = simulation.open(options()).expect("the store");
            assert!(store.sequences().is_empty());
            power_cut(&simulation, store);
        }
    }
}

#[test]
fn file_length_not_durable() {
    // Each seed loses another part of what no sync covered, lengths and names of files among it.
    for seed in 0..60 {
        let simulation = simulation(seed);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = create(&store, "a");
        append(&mut sequence, 1, 100).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        power_cut(&simulation, (sequence, store));
        let store = simulation.open(options()).expect("the store");
        let sequence = store.open_sequence("a").expect("the sequence");
        check(&store, &sequence, 1).expect("all of it");
        assert_eq!(sequence.len(), 100);
    }
}

#[test]
fn enospc_then_open_panics() {
    for full in 0..40 {
        let simulation = simulation(full);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = create(&store, "a");
        append(&mut sequence, 1, 9).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        simulation.set_faults(Faults { full: Some(full), create: Some(0), ..Faults::default() });
        for _ in 0..20 {
            let _ = append(&mut sequence, 1, 30).and_then(|()| sequence.commit(Durability::Sync));
        }
        power_cut(&simulation, (sequence, store));
        let store = simulation.open(options()).expect("the store");
        let sequence = store.open_sequence("a").expect("the sequence");
        assert!(sequence.len() >= 9);
        check(&store, &sequence, 1).expect("what was acknowledged");
    }
}

#[test]
fn beyond_four_gibibytes() {
    use stratakv_format::{DeviceIndex, Location, SegmentId};
    let place = Location { device: DeviceIndex(0), segment: SegmentId(0), page: (1 << 24) - 9, pages: 8 };
    assert_eq!(place.offset(), ((1_u64 << 24) - 9) * 4096);
    assert!(place.offset() > 15 * (1 << 32));
}

#[test]
fn panic_in_drop() {
    let simulation = simulation(6);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 50).expect("an append");
    let view = sequence.select_all(0).expect("a view");
    let ticket = store.read(&[&view]).expect("a read");
    simulation.crash();
    // In an order in which nothing is closed before what it needs.
    drop((store, sequence, view, ticket));
}

#[test]
fn recycled_log_tail_adopted() {
    for seed in 0..20 {
        let simulation = simulation(seed);
        let store = simulation.open(options().capacity(ByteSize::kib(64 * 8 + 400))).expect("a store");
        for life in 0..30 {
            let key = format!("s{life}");
            let mut sequence = create(&store, &key);
            append(&mut sequence, life, 60).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
            check(&store, &sequence, life).expect("all of it");
            if life < 29 {
                sequence.delete(Durability::Sync).expect("a deletion");
            }
        }
        power_cut(&simulation, store);
        let store = simulation.open(options()).expect("the store");
        assert_eq!(store.sequences().len(), 1);
        check(&store, &store.open_sequence("s29").expect("the last"), 29).expect("all of it");
    }
}

#[test]
fn forged_frame_inside_a_value_adopted_by_a_scan() {
    let simulation = simulation(7);
    let store = simulation.open(options()).expect("a store");
    let mut real = create(&store, "real");
    append(&mut real, 1, 40).and_then(|()| real.commit_with(b"real", Durability::Sync)).expect("a commit");
    // The bytes of a whole segment, real frames and all, as the caller state and tokens of another sequence.
    let segment = simulation.contents(0, "segments/00000000").expect("a segment");
    let mut forger = create(&store, "forger");
    let floats: Vec<f32> = segment.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).map(finite).collect();
    let count = floats.len() / ROW;
    let view = || TensorView::token_major(&floats[..count * ROW], count, HEADS, DIM);
    forger
        .append(0, view(), view())
        .and_then(|()| forger.commit_with(&segment[4096..12288], Durability::Sync))
        .expect("a commit");
    power_cut(&simulation, (real, forger, store));
    let store = simulation.open(options()).expect("the store");
    let keys: Vec<String> = store.sequences().into_iter().map(|info| info.key).collect();
    assert_eq!(keys, ["real", "forger"]);
    let real = store.open_sequence("real").expect("the real one");
    assert_eq!((real.len(), real.state()), (40, Some(&b"real"[..])));
    check(&store, &real, 1).expect("its bytes");
}

/// Numbers that the engine takes.
fn finite(x: f32) -> f32 {
    if x.is_finite() { x } else { 0.0 }
}

#[test]
fn buffer_freed_when_a_future_is_dropped() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 1);
    let store = small_options(&dirs).open().expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 2000).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
    for _ in 0..50 {
        let view = sequence.select_all(0).expect("a view");
        // Dropped with its reads under way; the buffers must not serve anybody else before those end.
        drop(store.read(&[&view]).expect("a read"));
        check(&store, &sequence, 1).expect("the right bytes");
    }
}

#[test]
fn short_read_taken_for_success() {
    for short in 0..30 {
        let simulation = simulation(short);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = create(&store, "a");
        simulation.set_faults(Faults { short: Some(short), interrupted: Some(short / 2), ..Faults::default() });
        append(&mut sequence, 1, 100).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        check(&store, &sequence, 1).expect("all of it");
        power_cut(&simulation, (sequence, store));
        let store = simulation.open(options()).expect("the store");
        check(&store, &store.open_sequence("a").expect("the sequence"), 1).expect("all of it");
    }
}

#[test]
fn in_progress_restore_visible() {
    let simulation = simulation(8);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 9).expect("an append");
    // Neither listed nor opened before its first commit, and by one handle at a time after it.
    assert!(store.sequences().is_empty());
    assert_eq!(store.open_sequence("a").err().map(|e| e.kind()), Some(ErrorKind::NotFound));
    sequence.commit(Durability::Sync).expect("a commit");
    assert_eq!(store.open_sequence("a").err().map(|e| e.kind()), Some(ErrorKind::InUse));
}

/// Seconds of computing that this process has used.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// In a process of its own, where nothing else computes.
fn alone(test: &str) -> bool {
    if std::env::var_os("STRATAKV_TEST_ALONE").is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("this program");
    let mut child = std::process::Command::new(program);
    let status = child.args(["--exact", test]).env("STRATAKV_TEST_ALONE", "1").status().expect("a child");
    assert!(status.success(), "{test} alone");
    false
}

#[test]
fn idle_spin() {
    if !alone("idle_spin") {
        return;
    }
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 2);
    let store = small_options(&dirs).lazy_delay(Duration::from_millis(5)).open().expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 50).and_then(|()| sequence.commit(Durability::Lazy)).expect("a commit");
    std::thread::sleep(Duration::from_millis(300));
    let before = cpu();
    std::thread::sleep(Duration::from_millis(1000));
    let used = cpu() - before;
    // A thread that spins uses a good part of the second, on the busiest machine.
    assert!(used < Duration::from_millis(100), "{used:?} of computing in an idle second");
}

#[test]
fn status_beside_commits_and_cleaning_never_deadlocks() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 1);
    let store = small_options(&dirs).capacity(ByteSize::mib(32)).open().expect("a store");
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    assert!(store.status().file_bytes > 0);
                }
            });
        }
        for life in 0..40 {
            let mut sequence = create(&store, &format!("s{life}"));
            append(&mut sequence, life, 300).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
            sequence.delete(Durability::Sync).expect("a deletion");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn writes_in_flight_when_everything_is_dropped() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 1);
    for life in 0..10 {
        let store = small_options(&dirs).open().expect("a store");
        let mut sequence = create(&store, &format!("s{life}"));
        append(&mut sequence, life, 1500).expect("an append");
        drop((sequence, store));
    }
    assert_clean(&dirs, "after writes in flight were dropped");
}

#[test]
fn padding_shows_no_old_bytes() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 1);
    let store = small_options(&dirs).capacity(ByteSize::mib(32)).open().expect("a store");
    for life in 0..25 {
        let mut sequence = create(&store, &format!("s{life}"));
        for _ in 0..5 {
            append(&mut sequence, life, 37).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        }
        if life < 22 {
            sequence.delete(Durability::Sync).expect("a deletion");
        }
    }
    store.close().expect("a close");
    let mut seen = 0;
    for region in live_regions(&dirs).iter().filter(|region| region.part == Part::FramePadding) {
        let bytes = std::fs::read(dirs[region.device].join(&region.file)).expect("the file");
        assert!(bytes[region.start..][..region.len].iter().all(|byte| *byte == 0), "{region:?}");
        seen += 1;
    }
    assert!(seen > 0, "no padding at all");
}
