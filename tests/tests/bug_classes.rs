//! One test per class of bugs that storage and cache systems have shipped. The name of a test is the name of its class.
//!
//! Two classes are tested elsewhere:
//! - `pooled_buffers_never_aligned` is `leases_are_aligned_and_disjoint` of the engine's arena.
//! - `eight_tebibytes_from_a_length_field` is `every_wrong_size_in_a_header_is_refused` of the format, and the fuzz
//!   target `mutated_valid_image`.

use std::path::{Path, PathBuf};
use std::time::Duration;
use stratakv::sim::{Faults, Geometry, Simulation};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Result, SelectRequest, Sequence,
    Store, StoreOptions, TensorView,
};
use stratakv_tests::damage::ManifestLog;
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, skipped, small_options};
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
    let geometry = Geometry {
        devices: 1,
        device_bytes: 64 << 20,
        manifest_pages: 8,
        batch_bytes: 4000,
        whole: false,
        open_files: None,
    };
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
    store.create_sequence(&layout(), CreateOptions::new().key(key)).expect("a sequence")
}

/// Checks that every whole group of the sequence holds what was appended under this name.
fn check(store: &Store, sequence: &Sequence, name: u64) -> Result<()> {
    let view = sequence.select(0, SelectRequest::all())?;
    let batch = store.read(&[&view]).submit()?.wait()?;
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
        // The bit is in unused space, or the damage is reported.
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
    let sequence = store.open_sequence("a", OpenSequence::new()).expect("the sequence");
    assert!(sequence.len() == 8 || sequence.len() == 16, "{}", sequence.len());
    check(&store, &sequence, 1).expect("visible tokens are whole");
}

#[test]
fn uninitialised_buffer_returned_as_a_hit() {
    let simulation = simulation(2);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 40).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
    simulation.set_faults(Faults { read: Some(0), read_stays: true, ..Faults::default() });
    let view = sequence.select(0, SelectRequest::all()).expect("a view");
    let batch = store.read(&[&view]).submit().and_then(stratakv::read::ReadTicket::wait).expect("a batch");
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
        assert_eq!(
            store.open_sequence(key, OpenSequence::new()).expect("the sequence").caller_state(),
            Some(key.as_bytes())
        );
        let other = format!("{key} ");
        assert_eq!(store.open_sequence(&other, OpenSequence::new()).err().map(|e| e.kind()), Some(ErrorKind::NotFound));
    }
}

/// Cuts the power at every device operation of a commit, then commits more and cuts again. Then calls `after`.
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
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("the sequence");
        append(&mut sequence, 1, 5).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        let len = sequence.len();
        power_cut(simulation, (sequence, store));
        let store = simulation.open(options()).expect("the store");
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("the sequence");
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
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("the sequence");
        assert!(sequence.len() == 9 || sequence.len() == 18);
        check(&store, &sequence, 1).expect("all of it");
    });
}

#[test]
fn torn_tail_indistinguishable_from_damage() {
    // `cut_everywhere` shows that torn tails open. Damage before a durable batch must not.
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
    // Each seed loses other parts of what no sync covered, including lengths and names of files.
    for seed in 0..60 {
        let simulation = simulation(seed);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = create(&store, "a");
        append(&mut sequence, 1, 100).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
        power_cut(&simulation, (sequence, store));
        let store = simulation.open(options()).expect("the store");
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("the sequence");
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
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("the sequence");
        assert!(sequence.len() >= 9);
        check(&store, &sequence, 1).expect("what was acknowledged");
    }
}

/// The test moves a frame beyond 4 GiB of its segment. The store reads it, writes after it, moves it and checks it.
#[test]
fn beyond_four_gibibytes() {
    use std::os::unix::fs::FileExt;
    use stratakv_format::checksum::{crc_with_hole, page_crc};
    use stratakv_format::manifest::{FrameMoved, Kind, Record, encode_record};
    use stratakv_format::superblock::{STATE_OPEN, Slot};
    use stratakv_format::{Location, PAGE_BYTES, segment};
    const FAR: u32 = (1 << 20) + 5;
    let scratch = tempfile::tempdir().expect("a directory");
    let free = rustix::fs::statvfs(scratch.path()).map(|s| s.f_bavail * s.f_frsize).expect("its space");
    if free < 14 << 30 {
        return skipped("14 GiB of disk are not free");
    }
    let dirs = device_dirs(&scratch.path().join("first"), 1);
    let options =
        |dirs: &[PathBuf]| small_options(dirs).segment_bytes(ByteSize::mib(4100)).frame_bytes(ByteSize::mib(1));
    let store = options(&dirs).open().expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 400).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
    drop(sequence);
    store.close().expect("closed");
    // The superblock must not record the close, because the test appends a batch to the manifest.
    let superblock = dirs[0].join(stratakv_format::superblock::FILE);
    let mut slots = std::fs::read(&superblock).expect("read");
    for slot in slots.chunks_exact_mut(PAGE_BYTES) {
        slot[std::mem::offset_of!(Slot, state)] = STATE_OPEN;
        let crc = page_crc((&*slot).try_into().expect("a page"));
        slot[508..512].copy_from_slice(&crc.to_le_bytes());
    }
    std::fs::write(&superblock, slots).expect("written");

    let log = ManifestLog::of(&dirs[0]);
    let (mut frame, mut nonce) = (None, 0);
    log.records(&mut |record| match record {
        Record::Frame(own) => frame = Some(**own),
        Record::SegmentOpen(open) => nonce = open.nonce.get(),
        _ => {}
    });
    let frame = frame.expect("a frame");
    let from = Location::from_raw(&frame.location);
    let to = Location { page: FAR, ..from };
    assert!(to.offset() > 1 << 32);
    let path = dirs[0].join(segment::file_name(from.segment));
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("a segment");
    let mut bytes = vec![0; from.bytes() as usize];
    file.read_exact_at(&mut bytes, from.offset()).expect("read");
    let at = std::mem::offset_of!(stratakv_format::frame::FrameHeader, location);
    let place = to.to_raw();
    let place = zerocopy::IntoBytes::as_bytes(&place);
    bytes[at..at + place.len()].copy_from_slice(place);
    let header = frame.header_pages.get() as usize * PAGE_BYTES;
    let crc = crc_with_hole(&nonce.to_le_bytes(), &bytes[..header], 4..8);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    file.write_all_at(&bytes, to.offset()).expect("written");
    file.write_all_at(&vec![0xee; bytes.len()], from.offset()).expect("written over");
    let moved = FrameMoved { frame: frame.frame, location: to.to_raw(), header_crc: crc.into(), reserved: 0.into() };
    let mut record = Vec::new();
    encode_record(&mut record, Kind::FrameMoved, &moved, &[]);
    log.append(&record, 1);

    assert_clean(&dirs, "after the frame was put beyond 4 GiB");
    let store = options(&dirs).open().expect("a store");
    let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
    check(&store, &sequence, 1).expect("read");
    append(&mut sequence, 1, 400)
        .and_then(|()| sequence.commit(Durability::Sync))
        .expect("a commit after the moved frame");
    check(&store, &sequence, 1).expect("read");
    drop(sequence);
    store.close().expect("closed");
    assert_clean(&dirs, "with frames after it");
    let store = options(&dirs).open().expect("a store");
    let sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
    assert_eq!(sequence.len(), 800);
    check(&store, &sequence, 1).expect("read");
}

/// Some or all copies are damaged, short or missing. A repair reports what it did, and a second one has nothing to do.
#[test]
fn repair_panics() {
    type Harm = fn(&Path);
    let harms: [(&str, Harm); 4] = [
        ("bytes turned", |path| {
            let bytes: Vec<u8> = std::fs::read(path).expect("read").iter().map(|byte| byte ^ 0x11).collect();
            std::fs::write(path, bytes).expect("written");
        }),
        ("cut short", |path| {
            let file = std::fs::OpenOptions::new().write(true).open(path).expect("open");
            file.set_len(5000).expect("cut");
        }),
        ("empty", |path| std::fs::write(path, []).expect("written")),
        ("gone", |path| std::fs::remove_file(path).expect("removed")),
    ];
    for (what, harm) in harms {
        for sides in [[true, false], [false, true], [true, true]] {
            let scratch = fast_scratch();
            let dirs = device_dirs(scratch.path(), 2);
            let store = small_options(&dirs).open().expect("a store");
            let options = CreateOptions::new().key("a").copies(2);
            let mut sequence = store.create_sequence(&layout(), options).expect("a sequence");
            append(&mut sequence, 1, 300).and_then(|()| sequence.commit(Durability::Sync)).expect("a commit");
            drop(sequence);
            store.close().expect("closed");
            for (dir, _) in dirs.iter().zip(sides).filter(|(_, harmed)| *harmed) {
                let segments = std::fs::read_dir(dir.join("segments")).expect("segments");
                segments.for_each(|entry| harm(&entry.expect("an entry").path()));
            }
            // The manifest is whole.
            let store = small_options(&dirs).open().expect("a store");
            let read = store.open_sequence("a", OpenSequence::new()).and_then(|sequence| check(&store, &sequence, 1));
            let first = store.repair().expect("a repair");
            let second = store.repair().expect("a repair");
            assert_eq!(
                (second.healed, second.copied, second.removed),
                (0, 0, 0),
                "{what} {sides:?}: {first:?} {second:?}"
            );
            if sides == [true, true] {
                let kind = read.expect_err("nothing is left").kind();
                assert!(
                    matches!(kind, ErrorKind::Corruption | ErrorKind::NotFound | ErrorKind::Io),
                    "{what}: {kind:?}"
                );
                assert!(second.left > 0, "{what}: {first:?} {second:?}");
                continue;
            }
            read.unwrap_or_else(|e| panic!("{what} {sides:?}: {e}"));
            let sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
            check(&store, &sequence, 1).unwrap_or_else(|e| panic!("{what} {sides:?}: {e}"));
            drop(sequence);
            // Cleaning removes damaged segments without live frames.
            store.clean().expect("cleaned");
            store.close().expect("closed");
            // Only kvfsck finds a damaged copy that no read used.
            if first.healed > 0 {
                assert_clean(&dirs, what);
            }
        }
    }
}

#[test]
fn panic_in_drop() {
    let simulation = simulation(6);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 50).expect("an append");
    let view = sequence.select(0, SelectRequest::all()).expect("a view");
    let ticket = store.read(&[&view]).submit().expect("a read");
    simulation.crash();
    // The store is dropped before the handles that use it.
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
        check(&store, &store.open_sequence("s29", OpenSequence::new()).expect("the last"), 29).expect("all of it");
    }
}

#[test]
fn forged_frame_inside_a_value_adopted_by_a_scan() {
    let simulation = simulation(7);
    let store = simulation.open(options()).expect("a store");
    let mut real = create(&store, "real");
    append(&mut real, 1, 40).and_then(|()| real.commit_with(b"real", Durability::Sync)).expect("a commit");
    // Another sequence holds the bytes of a whole segment, including real frames, as caller state and tokens.
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
    let real = store.open_sequence("real", OpenSequence::new()).expect("the real one");
    assert_eq!((real.len(), real.caller_state()), (40, Some(&b"real"[..])));
    check(&store, &real, 1).expect("its bytes");
}

/// Returns `x`, or 0 for a number that the engine refuses.
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
        let view = sequence.select(0, SelectRequest::all()).expect("a view");
        // The ticket is dropped with its reads in flight. Its buffers must not be reused before they complete.
        drop(store.read(&[&view]).submit().expect("a read"));
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
        check(&store, &store.open_sequence("a", OpenSequence::new()).expect("the sequence"), 1).expect("all of it");
    }
}

#[test]
fn in_progress_restore_visible() {
    let simulation = simulation(8);
    let store = simulation.open(options()).expect("a store");
    let mut sequence = create(&store, "a");
    append(&mut sequence, 1, 9).expect("an append");
    // A sequence is neither listed nor opened before its first commit, and has one handle at a time afterwards.
    assert!(store.sequences().is_empty());
    assert_eq!(store.open_sequence("a", OpenSequence::new()).err().map(|e| e.kind()), Some(ErrorKind::NotFound));
    sequence.commit(Durability::Sync).expect("a commit");
    assert_eq!(store.open_sequence("a", OpenSequence::new()).err().map(|e| e.kind()), Some(ErrorKind::InUse));
}

/// Returns the CPU time that this process has used.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs a test in a process of its own, where no other test uses CPU time. Returns false in the calling process.
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
    // A spinning thread uses most of the second even on a busy machine.
    assert!(used < Duration::from_millis(100), "{used:?} of CPU time in an idle second");
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
