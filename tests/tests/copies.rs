//! Stores on several devices, through the public API.
//!
//! - Copies of a frame are on distinct devices. A damaged copy is replaced by another and repaired.
//! - A store opens without a lost device and restores the copies. A device can be drained, removed and added.
//! - Forks, readers and cleaning keep working meanwhile.
//!
//! Most tests run with one thread per device and with one thread for all.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use stratakv::options::BalancePolicy;
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Sequence, Store,
    StoreOptions, TensorView,
};
use stratakv_format::manifest;
use stratakv_format::superblock::newest;
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::device_dirs;
use stratakv_tests::rng::mix;

stratakv_tests::on_threads!(
    copies_are_on_distinct_devices_and_are_checked,
    a_damaged_device_is_read_around_and_healed,
    a_store_opens_without_a_device_and_restores_the_copies,
    a_device_is_drained_and_removed,
    cleaning_writes_nothing_to_a_device_that_is_drained,
    as_many_copies_as_devices,
    forks_have_the_copies_of_what_they_share,
    a_device_stays_while_a_handle_holds_uncommitted_frames,
    a_device_is_removed_while_sequences_are_written,
    a_device_joins,
    a_device_that_was_lost_comes_back,
    frames_without_copies_are_saved_when_a_lost_device_comes_back,
    an_old_image_of_a_device_is_refused,
    a_device_that_loses_its_files_is_not_missed_by_readers,
);

struct Place {
    _dir: tempfile::TempDir,
    devices: Vec<PathBuf>,
    /// The largest number of threads that serve the devices.
    threads: Option<usize>,
}

impl Place {
    fn new(devices: usize, threads: Option<usize>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let devices = device_dirs(dir.path(), devices);
        Self { _dir: dir, devices, threads }
    }

    fn options(&self) -> StoreOptions {
        self.options_of(self.devices.iter())
    }

    fn only(&self, device: usize) -> StoreOptions {
        self.options_of([&self.devices[device]].into_iter())
    }

    fn options_of<'a>(&self, devices: impl Iterator<Item = &'a PathBuf>) -> StoreOptions {
        let options = devices.fold(Store::options(), |options, device| options.device(device));
        let options = options.memory_limit(ByteSize::mib(48)).segment_bytes(ByteSize::mib(1));
        options.frame_bytes(ByteSize::kib(256)).shard_threads(self.threads)
    }

    fn without(&self, lost: usize) -> StoreOptions {
        let left = self.devices.iter().enumerate().filter(|(at, _)| *at != lost);
        self.options_of(left.map(|(_, path)| path))
    }

    /// Changes bytes of every segment file of a device.
    fn damage(&self, device: usize) {
        for entry in std::fs::read_dir(self.devices[device].join("segments")).unwrap() {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(entry.unwrap().path()).unwrap();
            let length = file.metadata().unwrap().len();
            let mut page = vec![0; 4096];
            for at in (4096..length - 4096).step_by(4096) {
                file.read_exact_at(&mut page, at).unwrap();
                page.iter_mut().skip(at as usize / 4096 % 64).step_by(97).for_each(|byte| *byte ^= 0x40);
                file.write_all_at(&page, at).unwrap();
            }
            file.sync_all().unwrap();
        }
    }

    fn check(&self, lost: Option<usize>) -> kvfsck::Report {
        let left: Vec<PathBuf> =
            self.devices.iter().enumerate().filter(|(at, _)| Some(*at) != lost).map(|(_, path)| path.clone()).collect();
        kvfsck::check(&left, &kvfsck::Options::default(), &()).unwrap()
    }

    fn damage_found(&self) -> Vec<String> {
        let findings = self.check(None).findings;
        findings.iter().filter(|f| f.severity == kvfsck::Severity::Damage).map(ToString::to_string).collect()
    }
}

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 16); 2], dtype: DType::F16, group: 8 }
}

fn layout() -> KvLayout {
    shape().layout().unwrap()
}

fn seeds(tokens: std::ops::Range<usize>) -> Vec<u64> {
    tokens.map(|token| mix(token as u64)).collect()
}

fn append(sequence: &mut Sequence, tokens: std::ops::Range<usize>) {
    for layer in shape().kv_layers() {
        shape().append(sequence, layer, &seeds(tokens.clone()), Order::nth(layer)).unwrap();
    }
}

/// Reads the whole sequence and compares every byte.
fn check(store: &Store, sequence: &Sequence, tokens: usize) -> stratakv::Result<()> {
    for layer in shape().kv_layers() {
        let selection = sequence.select(layer, SelectRequest::all())?;
        assert_eq!(selection.tokens(), tokens);
        let batch = store.read(&[&selection]).submit()?.wait()?;
        shape().check_blocks(layer, &seeds(0..tokens), &selection, batch.get(0)?);
    }
    Ok(())
}

fn create(store: &Store, copies: u8, tokens: usize) -> Sequence {
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new().key("s").copies(copies)).unwrap();
    for start in (0..tokens).step_by(500) {
        append(&mut sequence, start..(start + 500).min(tokens));
    }
    sequence.commit_with(b"state", Durability::Sync).unwrap();
    sequence
}

fn other_copies(store: &Store) -> u64 {
    store.status().devices.iter().map(|device| device.counters.other_copies).sum()
}

fn copies_are_on_distinct_devices_and_are_checked(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.options().open().unwrap();
    let sequence = create(&store, 2, 6001);
    check(&store, &sequence, 6001).unwrap();
    let written: Vec<u64> = store.status().devices.iter().map(|d| d.counters.write_bytes).collect();
    let (least, most) = (written.iter().min().unwrap(), written.iter().max().unwrap());
    assert!(*least * 2 > *most, "all devices get their share: {written:?}");
    drop(sequence);
    store.close().unwrap();
    assert_eq!(place.damage_found(), Vec::<String>::new());
    let store = place.options().open().unwrap();
    let mut sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    check(&store, &sequence, 6001).unwrap();
    append(&mut sequence, 6001..6500);
    sequence.commit(Durability::Sync).unwrap();
    check(&store, &sequence, 6500).unwrap();
    sequence.delete(Durability::Sync).unwrap();
    store.close().unwrap();
    assert_eq!(place.damage_found(), Vec::<String>::new());
}

fn a_damaged_device_is_read_around_and_healed(threads: Option<usize>) {
    for policy in [BalancePolicy::EarliestFinish, BalancePolicy::FewestReads, BalancePolicy::FirstCopy] {
        let place = Place::new(2, threads);
        let store = place.options().balance(policy).open().unwrap();
        drop(create(&store, 2, 3000));
        store.close().unwrap();
        place.damage(0);
        let damaged = place.damage_found().len();
        assert!(damaged > 0);
        let store = place.options().balance(policy).open().unwrap();
        let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
        assert_eq!(sequence.caller_state(), Some(&b"state"[..]));
        check(&store, &sequence, 3000).unwrap();
        assert!(other_copies(&store) > 0);
        // The background may have repaired some of them already.
        let repaired = store.repair().unwrap();
        assert_eq!(repaired.left, 0, "{repaired:?}");
        // Reads may now choose damaged copies that were never read. This ends once all are repaired.
        let healed = (0..20).any(|_| {
            let before = other_copies(&store);
            check(&store, &sequence, 3000).unwrap();
            assert_eq!(store.repair().unwrap().left, 0);
            other_copies(&store) == before
        });
        assert!(healed, "repaired copies are read without another copy");
        drop(sequence);
        store.close().unwrap();
        // Headers that no read needed are still damaged: segment headers, and headers of frames read from the other
        // copy.
        let found = place.damage_found();
        assert!(found.len() < damaged, "{found:?}");
    }
}

fn a_store_opens_without_a_device_and_restores_the_copies(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.options().open().unwrap();
    drop(create(&store, 2, 4000));
    store.close().unwrap();
    for lost in 0..3 {
        let error = place.without(lost).open().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        assert!(error.to_string().contains(&format!("device {lost} ")), "{error}");
    }
    let store = place.without(1).allow_degraded(true).open().unwrap();
    let mut sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    check(&store, &sequence, 4000).unwrap();
    append(&mut sequence, 4000..4400);
    sequence.commit(Durability::Sync).unwrap();
    let repaired = store.repair().unwrap();
    assert_eq!(repaired.left, 0, "{repaired:?}");
    check(&store, &sequence, 4400).unwrap();
    drop(sequence);
    store.close().unwrap();
    assert!(place.check(Some(1)).findings.iter().all(|f| f.severity != kvfsck::Severity::Damage));
    // The device is no longer a member. The store is complete without it, and refuses it with its old content.
    let store = place.without(1).open().unwrap();
    check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 4400).unwrap();
    store.close().unwrap();
    let error = place.options().open().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleDevice);
    assert!(error.to_string().contains("device 1 left the store"), "{error}");
    // Every frame has two copies again.
    let alone = || place.only(2);
    let store = alone().allow_degraded(true).open().unwrap();
    check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 4400).unwrap();
    // The remaining device now stores the manifest twice, like a store of one device.
    assert_eq!(store.health().owed_manifests, 0);
    store.close().unwrap();
    let slot = newest(&fs::read(place.devices[2].join("superblock")).unwrap()).unwrap();
    assert_eq!(slot.manifest_copies, 2);
    let first = manifest::file_name(slot.manifest_generation.get(), 0);
    fs::remove_file(place.devices[2].join(first)).unwrap();
    let store = alone().open().unwrap();
    check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 4400).unwrap();
}

fn a_device_is_drained_and_removed(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.options().open().unwrap();
    let sequence = create(&store, 1, 4000);
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    // A selection made before keeps its frames where they are.
    assert_eq!(store.remove_device(0).unwrap_err().kind(), ErrorKind::Busy);
    store.read(&[&view]).submit().unwrap().wait().unwrap().get(0).unwrap();
    check(&store, &sequence, 4000).unwrap();
    let usage = store.usage().unwrap();
    assert_eq!(
        (usage.devices[0].free_bytes, usage.devices[0].reserved_bytes),
        (0, 0),
        "the device takes no new frames"
    );
    assert!(usage.devices[0].dead_bytes > 0 && usage.sum_bytes() == usage.capacity_bytes, "{usage:?}");
    // The selection is dropped while the device is removed.
    let done = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(100));
            drop(view);
        });
        store.remove_device(0)
    });
    match done {
        Ok(done) => assert_eq!(done.removed, 1, "{done:?}"),
        // The background removed the device first.
        Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}"),
    }
    std::fs::remove_dir_all(&place.devices[0]).unwrap();
    check(&store, &sequence, 4000).unwrap();
    assert_eq!(store.remove_device(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    drop(sequence);
    store.close().unwrap();
    let store = place.without(0).open().unwrap();
    let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    check(&store, &sequence, 4000).unwrap();
    let error = store.remove_device(1).and_then(|_| store.remove_device(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

fn cleaning_writes_nothing_to_a_device_that_is_drained(threads: Option<usize>) {
    let place = Place::new(2, threads);
    let store = place.options().capacity(ByteSize::mib(52)).open().unwrap();
    let write = |at: usize| {
        let options = CreateOptions::new().key(at.to_string());
        let mut sequence = store.create_sequence(&layout(), options).unwrap();
        append(&mut sequence, 0..1000);
        sequence.commit(Durability::Sync)
    };
    let there = (0..).take_while(|at| write(*at).is_ok()).count();
    assert!(there > 40, "{there}");
    // The other device has no room for its frames.
    assert_eq!(store.remove_device(0).unwrap_err().kind(), ErrorKind::NoSpace);
    let content = || -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
        let entries = fs::read_dir(place.devices[0].join("segments")).unwrap();
        // The background removes free segments meanwhile.
        entries
            .map(|entry| entry.unwrap().path())
            .filter_map(|path| Some((path.clone(), fs::read(path).ok()?)))
            .collect()
    };
    let before = content();
    for at in (0..there).filter(|at| at % 4 != 0) {
        store.open_sequence(&at.to_string(), OpenSequence::new()).and_then(|one| one.delete(Durability::Sync)).unwrap();
    }
    let cleaned = store.clean().unwrap();
    for (path, bytes) in content() {
        assert!(before.get(&path) == Some(&bytes), "{} was written: {cleaned:?}", path.display());
    }
    for at in (0..there).step_by(4) {
        check(&store, &store.open_sequence(&at.to_string(), OpenSequence::new()).unwrap(), 1000).unwrap();
    }
    // The device is empty, or the removal empties it.
    match store.remove_device(0) {
        Ok(done) => assert_eq!((done.removed, done.left), (1, 0), "{done:?}"),
        Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}"),
    }
}

fn as_many_copies_as_devices(threads: Option<usize>) {
    let place = Place::new(2, threads);
    let store = place.options().open().unwrap();
    let with = |copies| store.create_sequence(&layout(), CreateOptions::new().copies(copies)).map(drop);
    assert_eq!(with(3).unwrap_err().kind(), ErrorKind::Configuration);
    assert_eq!(with(4).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(with(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    with(2).unwrap();
}

fn forks_have_the_copies_of_what_they_share(threads: Option<usize>) {
    // The first commit records the frames. It is that of the fork alone, of the fork first, or of the parent first.
    for order in 0..3 {
        let place = Place::new(2, threads);
        let store = place.options().open().unwrap();
        let mut parent = store.create_sequence(&layout(), CreateOptions::new().key("s").copies(2)).unwrap();
        append(&mut parent, 0..3000);
        if order == 2 {
            parent.commit(Durability::Sync).unwrap();
        }
        let mut fork = parent.fork_as("fork").unwrap();
        append(&mut fork, 3000..3100);
        fork.commit(Durability::Sync).unwrap();
        if order == 1 {
            parent.commit(Durability::Sync).unwrap();
        }
        drop((parent, fork));
        assert_eq!(store.repair().unwrap().copied, 0, "every frame has its copies");
        store.close().unwrap();
        assert_eq!(place.damage_found(), Vec::<String>::new());
        place.damage(order % 2);
        let store = place.options().open().unwrap();
        let fork = store.open_sequence("fork", OpenSequence::new()).unwrap();
        check(&store, &fork, 3100).unwrap();
        if order > 0 {
            check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 3000).unwrap();
        }
        drop(fork);
        store.close().unwrap();
    }
}

fn a_device_stays_while_a_handle_holds_uncommitted_frames(threads: Option<usize>) {
    let place = Place::new(2, threads);
    let store = place.options().open().unwrap();
    let mut parent = create(&store, 1, 3000);
    let mut fork = parent.fork_as("fork").unwrap();
    parent.delete(Durability::Sync).unwrap();
    assert_eq!(store.remove_device(1).unwrap_err().kind(), ErrorKind::Busy);
    fork.commit(Durability::Sync).unwrap();
    // The background may have removed the device first. Its index is then invalid.
    match store.remove_device(1) {
        Ok(done) => assert!(done.removed == 1, "{done:?}"),
        Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}"),
    }
    check(&store, &fork, 3000).unwrap();
    append(&mut fork, 3000..6000);
    fork.commit(Durability::Sync).unwrap();
    drop(fork);
    store.close().unwrap();
    let store = place.without(1).open().unwrap();
    check(&store, &store.open_sequence("fork", OpenSequence::new()).unwrap(), 6000).unwrap();
}

fn a_device_is_removed_while_sequences_are_written(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.options().open().unwrap();
    let mut kept: Vec<Sequence> =
        (0..8).map(|_| store.create_sequence(&layout(), CreateOptions::new().copies(2)).unwrap()).collect();
    kept.iter_mut().for_each(|sequence| append(sequence, 0..2500));
    let held = store.remove_device(2).map(|done| done.removed);
    assert_eq!(held.unwrap_err().kind(), ErrorKind::Busy, "no sequence is committed yet");
    kept.iter_mut().for_each(|sequence| sequence.commit(Durability::Sync).unwrap());
    match store.remove_device(2) {
        Ok(done) => assert!(done.removed == 1, "{done:?}"),
        Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}"),
    }
    // Segments that were open on the removed device are not sealed.
    for sequence in &mut kept {
        append(sequence, 2500..3500);
        sequence.commit(Durability::Sync).unwrap();
        check(&store, sequence, 3500).unwrap();
    }
    drop(kept);
    create(&store, 2, 1000);
    store.close().unwrap();
    assert_eq!(place.check(Some(2)).findings.iter().filter(|f| f.severity == kvfsck::Severity::Damage).count(), 0);
}

fn a_device_joins(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.only(0).open().unwrap();
    drop(create(&store, 1, 2000));
    for index in 1..3_u16 {
        assert_eq!(store.add_device(&place.devices[usize::from(index)]).unwrap(), index);
        assert_eq!(store.health().lost, Vec::<u16>::new());
    }
    let other = Place::new(1, threads);
    drop(other.options().open().unwrap());
    assert_eq!(store.add_device(&other.devices[0]).unwrap_err().kind(), ErrorKind::Configuration);
    let before: Vec<u64> = store.status().devices.iter().map(|d| d.counters.write_bytes).collect();
    let mut copied = store.create_sequence(&layout(), CreateOptions::new().key("copied").copies(3)).unwrap();
    append(&mut copied, 0..3000);
    copied.commit(Durability::Sync).unwrap();
    check(&store, &copied, 3000).unwrap();
    let after = store.status().devices.iter().map(|d| d.counters.write_bytes).collect::<Vec<_>>();
    assert!(after.iter().zip(&before).all(|(after, before)| after - before > 300_000), "{before:?} {after:?}");
    drop(copied);
    store.close().unwrap();
    assert_eq!(place.damage_found(), Vec::<String>::new());
    let error = place.only(0).open().map(drop).unwrap_err();
    assert!(error.to_string().contains("is missing"), "{error}");
    place.damage(1);
    let store = place.options().open().unwrap();
    check(&store, &store.open_sequence("copied", OpenSequence::new()).unwrap(), 3000).unwrap();
    check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 2000).unwrap();
}

fn a_device_that_was_lost_comes_back(threads: Option<usize>) {
    let place = Place::new(2, threads);
    let store = place.options().open().unwrap();
    drop(create(&store, 2, 3000));
    store.close().unwrap();
    let store = place.without(1).allow_degraded(true).open().unwrap();
    let mut sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    append(&mut sequence, 3000..3500);
    sequence.commit(Durability::Sync).unwrap();
    assert_eq!(store.add_device(&place.devices[0]).unwrap_err().kind(), ErrorKind::InUse);
    // The old content of the device is discarded, and it receives new copies.
    assert_eq!(store.add_device(&place.devices[1]).unwrap(), 2);
    // The background may have repaired everything already.
    assert_eq!(store.repair().unwrap().left, 0);
    drop(sequence);
    store.close().unwrap();
    assert_eq!(place.damage_found(), Vec::<String>::new());
    place.damage(0);
    let store = place.options().open().unwrap();
    check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 3500).unwrap();
}

fn frames_without_copies_are_saved_when_a_lost_device_comes_back(threads: Option<usize>) {
    let place = Place::new(2, threads);
    let store = place.options().open().unwrap();
    drop(create(&store, 1, 4000));
    store.close().unwrap();
    let store = place.without(0).allow_degraded(true).open().unwrap();
    assert_eq!(store.health().lost, [0]);
    assert_eq!(store.open_sequence("s", OpenSequence::new()).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(store.add_device(&place.devices[0]).unwrap(), 2);
    assert_eq!(store.health().lost, Vec::<u16>::new());
    check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 4000).unwrap();
    store.close().unwrap();
    assert_eq!(place.damage_found(), Vec::<String>::new());
}

fn an_old_image_of_a_device_is_refused(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.options().open().unwrap();
    drop(create(&store, 2, 2000));
    store.close().unwrap();
    let old = place.devices[1].with_extension("old");
    let copied = std::process::Command::new("cp").arg("-a").arg(&place.devices[1]).arg(&old).status().unwrap();
    assert!(copied.success());
    let store = place.options().open().unwrap();
    assert_eq!(store.remove_device(2).unwrap().removed, 1);
    store.close().unwrap();
    std::fs::remove_dir_all(&place.devices[1]).unwrap();
    std::fs::rename(&old, &place.devices[1]).unwrap();
    let error = place.without(2).open().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleDevice);
    let findings = place.check(Some(2)).findings;
    let stale = |f: &kvfsck::Finding| f.severity == kvfsck::Severity::Damage && f.code == kvfsck::Code::StaleDevice;
    assert!(findings.iter().any(stale), "{findings:?}");
}

fn a_device_that_loses_its_files_is_not_missed_by_readers(threads: Option<usize>) {
    let place = Place::new(3, threads);
    let store = place.options().open().unwrap();
    let sequence = create(&store, 2, 6000);
    assert!(store.health().is_well());
    let (rounds, gone) = (std::sync::atomic::AtomicUsize::new(0), std::sync::atomic::AtomicBool::new(false));
    let order = std::sync::atomic::Ordering::SeqCst;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut after = 0;
            while after < 20 {
                after += usize::from(gone.load(order));
                check(&store, &sequence, 6000).unwrap();
                rounds.fetch_add(1, order);
            }
        });
        while rounds.load(order) < 3 && !reader.is_finished() {
            std::thread::yield_now();
        }
        for entry in std::fs::read_dir(place.devices[0].join("segments")).unwrap() {
            std::fs::OpenOptions::new().write(true).open(entry.unwrap().path()).unwrap().set_len(0).unwrap();
        }
        gone.store(true, order);
    });
    assert!(!store.health().is_well());
    assert!(other_copies(&store) > 0);
    store.declare_lost(0).unwrap();
    let repaired = store.repair().unwrap();
    assert_eq!(repaired.left, 0, "{repaired:?}");
    check(&store, &sequence, 6000).unwrap();
    drop(sequence);
    store.close().unwrap();
    let damage = |f: &&kvfsck::Finding| f.severity == kvfsck::Severity::Damage;
    assert_eq!(place.check(Some(0)).findings.iter().filter(damage).count(), 0);
    // Each remaining device has a copy of every frame.
    for lost in 1..3 {
        let left = place.only(lost);
        let store = left.read_only(true).allow_degraded(true).open().unwrap();
        check(&store, &store.open_sequence("s", OpenSequence::new()).unwrap(), 6000).unwrap();
    }
}

/// Several blocks share a page of a device. A block read from another copy must not overwrite its neighbours, which the
/// first copy provided.
#[test]
fn blocks_of_one_sector_are_damaged_in_different_copies() {
    const GROUPS: u16 = 64;
    let place = Place::new(2, None);
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(16).group_tokens(4).build().unwrap();
    let store = place.options().open().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("small").copies(2)).unwrap();
    for group in 1..=GROUPS {
        let row = vec![f32::from(group); 4 * 16];
        let view = TensorView::token_major(&row, 4, 1, 16);
        sequence.append(0, view, view).unwrap();
    }
    sequence.commit(Durability::Sync).unwrap();
    drop(sequence);
    store.close().unwrap();
    let block = |group: u16| half::f16::from_f32(f32::from(group)).to_le_bytes().repeat(2 * 4 * 16);
    let mut flipped = 0;
    for device in 0..2 {
        for entry in fs::read_dir(place.devices[device].join("segments")).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            for group in (1..=GROUPS).filter(|group| usize::from(*group) % 2 == device) {
                let Some(at) = bytes.chunks(256).position(|chunk| chunk == block(group)) else { continue };
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.write_all_at(&[bytes[at * 256] ^ 1], at as u64 * 256).unwrap();
                flipped += 1;
            }
        }
    }
    assert_eq!(flipped, GROUPS);
    let store = place.options().open().unwrap();
    let sequence = store.open_sequence("small", OpenSequence::new()).unwrap();
    for _ in 0..4 {
        let view = sequence.select(0, SelectRequest::all()).unwrap();
        let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
        for group in 1..=GROUPS {
            let (keys, values) = batch.get(0).unwrap().group(usize::from(group) - 1).unwrap();
            assert!([keys, values].concat() == block(group), "group {group}: wrong bytes");
        }
        // Both copies are damaged, at different blocks. The repair, here or in the background, rewrites both from the
        // good blocks of either.
        assert_eq!(store.repair().unwrap().left, 0);
    }
    drop(sequence);
    store.close().unwrap();
    assert_eq!(place.damage_found(), Vec::<String>::new());
}
