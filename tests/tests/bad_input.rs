//! Mistakes of callers and operators, and faults of disks: each is a clear error, and no data is lost.
//!
//! - Tensors, directories, versions and file systems that do not fit are refused with words that name the cause.
//! - A store that runs out of capacity, disk, file size or memory keeps everything acknowledged and works again after
//!   a deletion.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, OpenSequence, SelectRequest, Sequence, Store,
    StoreOptions, StoredSummary, TensorView,
};
use stratakv_format::features::Features;
use stratakv_format::superblock::{SLOTS, Slot};
use stratakv_format::{PAGE_BYTES, Unverified};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{assert_clean, copy_devices, device_dirs, skipped, small_options};
use stratakv_tests::rng::{Rng, mix};
use tempfile::TempDir;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 32), LayerShape::full(2, 32)], dtype: DType::F16, group: 8 }
}

fn seeds(name: u64, tokens: std::ops::Range<usize>) -> Vec<u64> {
    tokens.map(|t| mix(mix(name) ^ t as u64)).collect()
}

fn create(store: &Store, key: &str) -> Sequence {
    let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax);
    store.create_sequence(&shape().layout().expect("a layout"), options).expect("a sequence")
}

fn grow(sequence: &mut Sequence, name: u64, to: usize) -> stratakv::Result<()> {
    for layer in 0..2 {
        let from = sequence.layer_len(layer)? as usize;
        shape().append(sequence, layer, &seeds(name, from..to), Order::TokenMajor)?;
    }
    Ok(())
}

/// Writes and closes a store with one committed sequence "kept" of 100 tokens.
fn store_in(root: &Path, devices: usize) -> Vec<PathBuf> {
    let dirs = device_dirs(root, devices);
    let store = small_options(&dirs).open().expect("a store");
    let mut sequence = create(&store, "kept");
    grow(&mut sequence, 1, 100).expect("an append");
    sequence.commit(Durability::Sync).expect("a commit");
    drop(sequence);
    store.close().expect("close");
    dirs
}

/// Checks that the store of [`store_in`] still holds its sequence.
fn assert_kept(options: StoreOptions) {
    let store = options.create(false).open().expect("the store opens as before");
    let sequence = store.open_sequence("kept", OpenSequence::new()).expect("the sequence");
    shape().check_all(&store, &sequence, |_| seeds(1, 0..100));
}

fn refused(options: StoreOptions, kind: ErrorKind, words: &[&str]) {
    let started = Instant::now();
    let error = options.open().map(|_| ()).expect_err("must be refused");
    assert_eq!(error.kind(), kind, "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is not in {error}");
    }
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn tensors_that_do_not_fit() {
    let root = tempfile::tempdir().expect("a directory");
    let store = small_options(&device_dirs(root.path(), 1)).open().expect("a store");
    let mut sequence = create(&store, "t");
    grow(&mut sequence, 9, 11).expect("an append");
    let data = vec![0.25_f32; 4 * 2 * 32];
    let good = TensorView::token_major(&data, 4, 2, 32);
    let max = usize::MAX;
    let bad = [
        TensorView::token_major(&data, 5, 2, 32),
        TensorView::token_major(&data, 4, 2, 31),
        TensorView::token_major(&data, 4, 3, 32),
        TensorView::head_major(&data, 5, 2, 32),
        TensorView::head_major(&data, max, 2, 32),
        TensorView::token_major(&data, max, 2, 32),
        TensorView::token_major(&data, max, max, max),
        TensorView::strided(&data, 4, 2, 32, 65, 32),
        TensorView::strided(&data, 4, 2, 32, max, 1),
        TensorView::strided(&data, 4, 2, 32, 1, max),
        TensorView::strided(&data, 4, 2, 32, max / 3, max / 2),
        TensorView::empty(4),
    ];
    for wrong in bad {
        for outcome in [sequence.append(0, wrong, good), sequence.append(0, good, wrong)] {
            assert_eq!(outcome.expect_err("a wrong tensor").kind(), ErrorKind::InvalidArgument);
        }
    }
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65_520.0, -1e30] {
        for at in [0, 77, data.len() - 1] {
            let mut hurt = data.clone();
            hurt[at] = poison;
            let views = [TensorView::token_major(&hurt, 4, 2, 32), TensorView::head_major(&hurt, 4, 2, 32)];
            for wrong in views {
                for outcome in [sequence.append(1, wrong, good), sequence.append(1, good, wrong)] {
                    assert_eq!(outcome.expect_err("no number").kind(), ErrorKind::InvalidArgument);
                }
            }
        }
    }
    assert_eq!(sequence.append(2, good, good).expect_err("no such layer").kind(), ErrorKind::InvalidArgument);
    for query in [vec![0.0; 63], vec![f32::NAN; 64], Vec::new()] {
        assert_eq!(
            sequence.select(0, SelectRequest::query(&query).budget(Budget::All)).expect_err("a query").kind(),
            ErrorKind::InvalidArgument
        );
    }
    for budget in [Budget::tokens(0), Budget::share(0.0), Budget::share(-1.0), Budget::share(f64::NAN)] {
        let outcome = sequence.select(0, SelectRequest::query(&[0.0; 64]).options(budget));
        assert_eq!(outcome.expect_err("a budget").kind(), ErrorKind::InvalidArgument);
    }
    let state = vec![0; (64 << 10) + 1];
    let outcome = sequence.commit_with(&state, Durability::Sync);
    assert_eq!(outcome.expect_err("a large state").kind(), ErrorKind::InvalidArgument);
    let options = CreateOptions::new().key("k".repeat(513));
    let outcome = store.create_sequence(&shape().layout().expect("a layout"), options);
    assert_eq!(outcome.expect_err("a long key").kind(), ErrorKind::InvalidArgument);
    grow(&mut sequence, 9, 40).expect("an append");
    sequence.commit(Durability::Sync).expect("a commit");
    shape().check_all(&store, &sequence, |_| seeds(9, 0..40));
}

#[test]
fn directories_that_are_wrong() {
    let root = tempfile::tempdir().expect("a directory");
    let mine = store_in(&root.path().join("mine"), 2);
    let other = store_in(&root.path().join("other"), 2);
    let with = |dirs: &[&Path]| small_options(&dirs.iter().map(|d| d.to_path_buf()).collect::<Vec<_>>());
    let configuration = ErrorKind::Configuration;

    refused(StoreOptions::default(), configuration, &["no device"]);
    let file = root.path().join("file");
    fs::write(&file, "text").expect("a file");
    let error = with(&[&file]).open().map(|_| ()).expect_err("a file is no directory");
    assert!(matches!(error.kind(), ErrorKind::Configuration | ErrorKind::Io), "{error:?}");
    assert!(error.to_string().contains("file"), "{error}");
    let missing = root.path().join("missing");
    let error = with(&[&missing]).create(false).open().map(|_| ()).expect_err("a missing directory");
    assert!(matches!(error.kind(), ErrorKind::Configuration | ErrorKind::NotFound), "{error:?}");
    assert!(error.to_string().contains("missing"), "{error}");

    refused(with(&[&mine[0]]), configuration, &["device 1", "missing"]);
    refused(with(&[&mine[1]]), configuration, &["device 0", "missing"]);
    refused(with(&[&mine[0], &other[1]]), configuration, &["another store"]);
    refused(with(&[&mine[0], &mine[1], &other[0]]), configuration, &["another store"]);
    refused(with(&[&mine[0], &mine[0]]), configuration, &["same directory"]);
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&mine[0], &link).expect("a link");
    refused(with(&[&mine[0], &link]), configuration, &["same directory"]);
    let copies = copy_devices(&mine, &root.path().join("copies"), &mut Rng(1));
    refused(with(&[&mine[0], &copies[0]]), configuration, &["copy"]);
    refused(with(&[&mine[0], &mine[1], &copies[1]]), configuration, &["copy"]);
    let empty = device_dirs(&root.path().join("empty"), 1);
    refused(with(&[&mine[0], &empty[0]]), configuration, &["holds no store"]);
    refused(with(&[&empty[0]]).create(false), configuration, &["holds no store"]);
    let full = device_dirs(&root.path().join("full"), 1);
    fs::write(full[0].join("notes.txt"), "mine").expect("a file");
    refused(with(&[&full[0]]), configuration, &["notes.txt"]);
    assert_eq!(fs::read(full[0].join("notes.txt")).expect("still there"), b"mine");
    assert_kept(small_options(&mine));
    // The order of the device directories does not matter.
    assert_kept(with(&[&other[1], &other[0]]));
    assert_clean(&mine, "after the refused opens");
}

/// Changes both superblock slots of a device, and keeps their checksums right. `change` also gets whether the slot is
/// the newest.
fn change_slots(dir: &Path, change: impl Fn(&mut Slot, bool)) {
    let path = dir.join("superblock");
    let bytes = fs::read(&path).expect("the superblock");
    let slots = bytes.chunks(PAGE_BYTES).enumerate().map(|(nth, page)| {
        let slot = Unverified::<Slot>::at_front(page, "superblock").and_then(|slot| slot.verify(nth));
        slot.expect("a slot").into_inner()
    });
    let mut slots: Vec<Slot> = slots.collect();
    let newest = slots.iter().map(|slot| slot.sequence.get()).max();
    slots.iter_mut().for_each(|slot| change(slot, Some(slot.sequence.get()) == newest));
    fs::write(path, slots.iter().flat_map(Slot::encode).collect::<Vec<u8>>()).expect("the superblock");
}

#[test]
fn devices_whose_superblocks_disagree() {
    let many = (0..257).map(|nth| PathBuf::from(format!("/no/device/{nth}"))).collect::<Vec<_>>();
    refused(small_options(&many), ErrorKind::Configuration, &["257 device directories", "maximum of 256"]);
    let root = tempfile::tempdir().expect("a directory");
    let dirs = store_in(root.path(), 2);
    let wrong = |device: usize, change: fn(&mut Slot, bool), kind: ErrorKind, words: &[&str]| {
        let path = dirs[device].join("superblock");
        let whole = fs::read(&path).expect("the superblock");
        change_slots(&dirs[device], change);
        refused(small_options(&dirs), kind, words);
        let report = kvfsck::check(&dirs, &kvfsck::Options::default(), &()).expect("a report");
        assert_eq!(report.exit_code, kvfsck::EXIT_DAMAGE, "{}", report.to_text());
        fs::write(&path, whole).expect("the superblock");
        assert_kept(small_options(&dirs));
    };
    let larger: fn(&mut Slot, bool) = |slot, _| slot.segment_bytes = (2 * slot.segment_bytes.get()).into();
    wrong(1, larger, ErrorKind::Corruption, &["1: has another checksum or segment size", "superblock is damaged"]);
    // The newest epoch counts one device. In both slots it shows that the other device left.
    fn fewer(slot: &mut Slot) {
        slot.epoch = (slot.epoch.get() + 1).into();
        slot.device_count = 1.into();
        slot.manifest_copies = 2;
    }
    let both: fn(&mut Slot, bool) = |slot, _| fewer(slot);
    wrong(0, both, ErrorKind::StaleDevice, &["device 1 left the store"]);
    let one: fn(&mut Slot, bool) = |slot, is_newest| {
        if is_newest {
            fewer(slot);
        }
    };
    wrong(0, one, ErrorKind::Configuration, &["1: is device 1, but the store has 1"]);
}

#[test]
fn written_by_a_newer_build() {
    for (version, incompat) in [(Some(7), 0), (None, 1_u64 << 40)] {
        for slot in 0..SLOTS {
            let root = tempfile::tempdir().expect("a directory");
            let dirs = store_in(root.path(), 1);
            let path = dirs[0].join("superblock");
            let whole = fs::read(&path).expect("the superblock");
            let mut bytes = whole.clone();
            let page = slot * PAGE_BYTES..(slot + 1) * PAGE_BYTES;
            let found = Unverified::<Slot>::at_front(&bytes[page.clone()], "superblock").and_then(|s| s.verify(slot));
            let mut newer = found.expect("a slot").into_inner();
            let Features { mut major, incompat: mut bits, .. } = newer.features;
            if let Some(version) = version {
                major.set(version);
            }
            bits.set(bits.get() | incompat);
            newer.features.major = major;
            newer.features.incompat = bits;
            bytes[page].copy_from_slice(&newer.encode());
            fs::write(&path, &bytes).expect("the superblock");
            refused(small_options(&dirs), ErrorKind::Unsupported, &["version"]);
            assert_eq!(fs::read(&path).expect("the superblock"), bytes, "a refusal changed it");
            let check = kvfsck::check(&dirs, &kvfsck::Options::default(), &());
            assert_eq!(check.map_or_else(|e| e.exit_code(), |r| r.exit_code), kvfsck::EXIT_UNSUPPORTED);
            fs::write(&path, whole).expect("the superblock");
            assert_kept(small_options(&dirs));
        }
    }
}

/// A mounted file system. Dropping it unmounts.
struct Mount {
    dir: TempDir,
}

impl Mount {
    /// Mounts a small file system in memory. Returns none if this process may not mount.
    fn tmpfs(bytes: u64) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let size = format!("size={bytes}");
        Self::run(&["-t", "tmpfs", "-o", &size, "tmpfs"], dir.path()).then_some(Self { dir })
    }

    fn run(args: &[&str], target: &Path) -> bool {
        Command::new("mount").args(args).arg(target).output().is_ok_and(|out| out.status.success())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).output();
    }
}

#[test]
fn a_read_only_file_system() {
    let Some(mount) = Mount::tmpfs(64 << 20) else {
        skipped("this process may not mount");
        return;
    };
    let dirs = store_in(mount.dir.path(), 1);
    if !Mount::run(&["-o", "remount,ro"], mount.dir.path()) {
        skipped("cannot remount");
        return;
    }
    let error = small_options(&dirs).open().map(|_| ()).expect_err("nothing can be written there");
    assert!(matches!(error.kind(), ErrorKind::Configuration | ErrorKind::Io), "{error:?}");
    assert!(error.to_string().to_lowercase().contains("read-only"), "{error}");
    assert!(Mount::run(&["-o", "remount,rw"], mount.dir.path()));
    assert_kept(small_options(&dirs));
}

/// Fills a store until a commit is refused. Everything acknowledged must be intact, and the same commit must succeed
/// after a deletion.
fn fill(options: impl Fn() -> StoreOptions, dirs: &[PathBuf]) {
    let store = options().open().expect("a store");
    let mut kept = create(&store, "kept");
    grow(&mut kept, 1, 100).expect("an append");
    kept.commit(Durability::Sync).expect("a commit");
    let mut victim = create(&store, "victim");
    grow(&mut victim, 2, 20_000).expect("an append");
    victim.commit(Durability::Sync).expect("a commit");
    let mut filler = create(&store, "filler");
    let mut durable = 0;
    let error = loop {
        let to = filler.len() as usize + 3000;
        let outcome = grow(&mut filler, 3, to).and_then(|()| filler.commit(Durability::Sync));
        match outcome {
            Ok(()) => durable = to,
            Err(e) => break e,
        }
        assert!(durable < 2_000_000, "never full");
    };
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
    shape().check_all(&store, &kept, |_| seeds(1, 0..100));
    victim.delete(Durability::Sync).expect("a delete on a full store");
    let to = durable + 3000;
    grow(&mut filler, 3, to).expect("the same append after a delete");
    filler.commit(Durability::Sync).expect("the same commit after a delete");
    shape().check_all(&store, &filler, |_| seeds(3, 0..to));
    drop((kept, filler));
    store.close().expect("close");
    assert_clean(dirs, "full");
    let store = options().open().expect("a full store opens");
    for (key, name, tokens) in [("kept", 1, 100), ("filler", 3, to)] {
        let sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
        shape().check_all(&store, &sequence, |_| seeds(name, 0..tokens));
    }
    assert_eq!(
        store.open_sequence("victim", OpenSequence::new()).map(|_| ()).expect_err("deleted").kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn the_capacity_is_used_up() {
    let root = tempfile::tempdir().expect("a directory");
    let dirs = device_dirs(root.path(), 2);
    fill(|| small_options(&dirs).segment_bytes(ByteSize::mib(1)).capacity(ByteSize::mib(40)), &dirs);
}

#[test]
fn the_device_is_full() {
    let Some(mount) = Mount::tmpfs(48 << 20) else {
        skipped("this process may not mount");
        return;
    };
    let dirs = device_dirs(mount.dir.path(), 1);
    fill(|| small_options(&dirs).segment_bytes(ByteSize::mib(1)), &dirs);
}

const CHILD: &str = "STRATAKV_TEST_INPUT_CHILD";

/// Runs the process that holds the store, or that may write only small files. It is not a test of its own.
#[test]
fn child_of_another_test() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let (what, root) = spec.split_once(' ').expect("a task");
    let dirs = device_dirs(Path::new(root), 1);
    match what {
        "hold" => {
            let _store = small_options(&dirs).open().expect("a store");
            fs::write(Path::new(root).join("held"), "").expect("a word");
            std::thread::sleep(Duration::from_secs(60));
        }
        _ => {
            let limit = rustix::process::Rlimit { current: Some(8 << 20), maximum: Some(8 << 20) };
            rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).expect("a limit");
            let error = small_options(&dirs).segment_bytes(ByteSize::mib(16)).open().and_then(|store| {
                let mut sequence = create(&store, "s");
                grow(&mut sequence, 1, 50_000)?;
                sequence.commit(Durability::Sync)
            });
            assert_eq!(error.expect_err("the limit").kind(), ErrorKind::NoSpace);
            fs::write(Path::new(root).join("refused"), "").expect("a word");
        }
    }
}

fn child(task: &str, root: &Path) -> std::process::Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "child_of_another_test", "--test-threads=1"])
        .env(CHILD, format!("{task} {}", root.display()))
        .spawn()
        .expect("a child")
}

#[test]
fn a_store_in_use() {
    let root = tempfile::tempdir().expect("a directory");
    let mut holder = child("hold", root.path());
    while !root.path().join("held").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let dirs = device_dirs(root.path(), 1);
    refused(small_options(&dirs), ErrorKind::InUse, &["device-0"]);
    let check = kvfsck::check(&dirs, &kvfsck::Options::default(), &());
    assert_eq!(check.expect_err("in use").exit_code(), kvfsck::EXIT_IN_USE);
    holder.kill().expect("kill");
    holder.wait().expect("its end");
    let store = small_options(&dirs).open().expect("a store whose holder has exited");
    refused(small_options(&dirs), ErrorKind::InUse, &["device-0"]);
    let sequence = create(&store, "once");
    let again = store.create_sequence(&shape().layout().expect("a layout"), CreateOptions::new().key("once"));
    assert_eq!(again.expect_err("the key").kind(), ErrorKind::AlreadyExists);
    assert_eq!(store.clone().close().expect_err("in use").kind(), ErrorKind::InUse);
    drop(sequence);
    store.close().expect("close");
}

#[test]
fn files_of_limited_size() {
    let root = tempfile::tempdir().expect("a directory");
    let status = child("fsize", root.path()).wait().expect("its end");
    assert!(status.success() && root.path().join("refused").exists(), "{status}");
}

#[test]
fn reads_and_the_memory_limit() {
    let root = tempfile::tempdir().expect("a directory");
    let dirs = device_dirs(root.path(), 1);
    let options = || small_options(&dirs).segment_bytes(ByteSize::mib(4)).memory_limit(ByteSize::mib(12));
    refused(options().memory_limit(ByteSize::kib(64)), ErrorKind::Configuration, &["memory_limit"]);
    let store = options().open().expect("a store");
    let tokens = 60_000;
    let mut sequence = create(&store, "big");
    grow(&mut sequence, 1, tokens).expect("an append");
    sequence.commit(Durability::Sync).expect("a commit");
    let all = sequence.select(0, SelectRequest::all()).expect("a view");
    let started = Instant::now();
    let error = store.read(&[&all, &all]).submit().map(|_| ()).expect_err("more than the memory limit");
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(1), "the read waited for memory that cannot become free");

    // Two reads of half the memory each.
    let part = |from: usize, groups: usize| {
        let list: Vec<u64> = (from as u64..(from + groups) as u64).collect();
        sequence.select(0, SelectRequest::groups(&list)).expect("a view")
    };
    let (one, two) = (part(0, 2500), part(2500, 2500));
    let check = |view, batch: &stratakv::ReadBatch| {
        shape().check_blocks(0, &seeds(1, 0..tokens), view, batch.get(0).expect("blocks"));
    };
    let mut held: Vec<stratakv::ReadBatch> = Vec::new();
    let waiting = loop {
        let ticket = store.read(&[&one]).submit().expect("a ticket");
        match ticket.wait_deadline(Some(Instant::now() + Duration::from_secs(3))) {
            Ok(batch) => held.push(batch),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Deadline, "{e:?}");
                break store.read(&[&two]).submit().expect("a ticket that waits");
            }
        }
        assert!(held.len() < 100, "the limit is no limit");
    };
    assert!(!waiting.is_done());
    let reader = std::thread::spawn(move || waiting.wait());
    std::thread::sleep(Duration::from_millis(50));
    assert!(!reader.is_finished());
    held.iter().for_each(|batch| check(&one, batch));
    drop(held);
    check(&two, &reader.join().expect("the reader").expect("the read that waited"));

    // Tickets are dropped early, then awaited.
    for _ in 0..50 {
        drop(store.read(&[&one]).submit().expect("a ticket"));
    }
    check(&two, &pollster::block_on(store.read(&[&two]).submit().expect("a ticket")).expect("a read"));
    let usage = store.status().memory;
    println!("{usage:?}");
    drop((one, two, all));
    sequence.delete(Durability::Sync).expect("a delete");
    store.close().expect("close");
    assert_clean(&dirs, "in the end");
}

#[test]
fn token_ids_beyond_the_memory_are_refused_and_those_before_stay() {
    let scratch = TempDir::new().unwrap();
    let dirs = device_dirs(scratch.path(), 1);
    let options = || small_options(&dirs).memory_limit(ByteSize::mib(8));
    let store = options().open().unwrap();
    let mut sequence = create(&store, "s");
    grow(&mut sequence, 1, 20).unwrap();
    let ids: Vec<u32> = (0..20).collect();
    sequence.append_token_ids(&ids).unwrap();
    let error = sequence.append_token_ids(&vec![7; 4 << 20]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert_eq!(sequence.token_ids(), ids);
    grow(&mut sequence, 1, 21).unwrap();
    sequence.append_token_ids(&[20]).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    drop(sequence);
    store.close().unwrap();
    let store = options().open().unwrap();
    let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    assert_eq!((sequence.len(), sequence.token_ids().len()), (21, 21));
    shape().check_all(&store, &sequence, |_| seeds(1, 0..21));
}
