//! Members of a store on simulated disks: the copies of the manifest when disks fail, leave, or are full.

use stratakv::sim::{Faults, Geometry, Simulation};
use stratakv::{ByteSize, CreateOptions, DType, Durability, ErrorKind, OpenSequence, Store, StoreOptions};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::rng::mix;

const PAGE: u64 = 4096;
const SEGMENT_PAGES: u64 = 8;

stratakv_tests::on_threads!(
    a_device_that_fails_beside_a_full_manifest_is_given_up,
    the_last_device_gets_its_second_manifest_when_there_is_room,
    a_device_stays_as_long_as_it_alone_can_have_the_manifest,
    a_removal_that_is_interrupted_leaves_a_store_that_opens,
    a_full_device_keeps_space_for_the_manifest,
);

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(1, 16)], dtype: DType::F16, group: 4 }
}

fn geometry(devices: usize, device_bytes: u64) -> Geometry {
    Geometry { devices, device_bytes, manifest_pages: 5, batch_bytes: 4000, whole: true, open_files: None }
}

fn options(threads: Option<usize>) -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(8)).frame_bytes(ByteSize::kib(64));
    options.segment_bytes(ByteSize(SEGMENT_PAGES * PAGE)).shard_threads(threads)
}

fn seeds(name: u64) -> Vec<u64> {
    (0..6).map(|token| mix(mix(name) ^ token)).collect()
}

fn write(store: &Store, name: u64, copies: u8) -> stratakv::Result<()> {
    let options = CreateOptions::new().key(name.to_string()).copies(copies);
    let mut sequence = store.create_sequence(&shape().layout()?, options)?;
    shape().append(&mut sequence, 0, &seeds(name), Order::TokenMajor)?;
    sequence.commit(Durability::Sync)
}

fn check(store: &Store, name: u64) {
    let sequence = store.open_sequence(&name.to_string(), OpenSequence::new()).expect("a sequence");
    shape().check_all(store, &sequence, |_| seeds(name));
}

/// Returns how many copies of the current manifest generation a disk has.
fn manifests(simulation: &Simulation, disk: usize) -> usize {
    let slot = simulation.contents(disk, "superblock").expect("a superblock");
    let newest = stratakv_format::superblock::newest(&slot).expect("a slot").into_inner();
    let name = format!("manifest/{:016x}-", newest.manifest_generation.get());
    let there = simulation.files(disk).iter().filter(|file| file.starts_with(&name)).count();
    assert_eq!(there, usize::from(newest.manifest_copies), "the superblock counts the copies");
    there
}

/// A device fails the sync of data when the manifest is full. No part of the new generation may be written to it. (A
/// failure while a generation is written stops all writes instead.)
fn a_device_that_fails_beside_a_full_manifest_is_given_up(threads: Option<usize>) {
    let mut given_up = 0;
    for sync in 0..60 {
        let simulation = Simulation::new(&geometry(3, 8 << 20), sync);
        let store = simulation.open(options(threads)).expect("a store");
        simulation.set_faults(Faults { sync: Some(sync), ..Faults::default() });
        let there: Vec<u64> = (0..24).filter(|name| write(&store, *name, 3).is_ok()).collect();
        let health = store.health();
        let of_data = |text: &str| text.contains("sync segments/");
        assert!(!health.read_only.as_deref().is_some_and(of_data), "sync {sync}: {health:?}");
        if health.poisoned.iter().any(|(_, text)| of_data(text)) {
            assert_eq!((health.lost.len(), there.len()), (1, 24), "sync {sync}: {health:?}");
            given_up += 1;
        }
        there.iter().for_each(|name| check(&store, *name));
    }
    assert!(given_up > 8, "{given_up}");
}

/// A full disk that remains alone continues with its one copy of the manifest, also after crashes. It gets the second
/// copy when it has space.
fn the_last_device_gets_its_second_manifest_when_there_is_room(threads: Option<usize>) {
    let simulation = Simulation::new(&geometry(2, 60 * PAGE), 1);
    let store = simulation.open(options(threads)).expect("a store");
    let mut there: Vec<u64> = Vec::new();
    // Both disks are full of copies of the same sequences.
    let refused = loop {
        match write(&store, there.len() as u64, 2) {
            Ok(()) => there.push(there.len() as u64),
            Err(e) => break e,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    assert!(there.len() > 5, "{}", there.len());
    store.remove_device(0).expect("removed");
    assert_eq!((manifests(&simulation, 1), store.health().owed_manifests), (1, 1), "{:?}", store.health());
    assert!(!store.health().is_well());
    // Deletions start new generations.
    for name in there.extract_if(.., |name| *name % 3 == 0).collect::<Vec<_>>() {
        store
            .open_sequence(&name.to_string(), OpenSequence::new())
            .and_then(|one| one.delete(Durability::Sync))
            .expect("deleted");
    }
    simulation.crash();
    drop(store);
    simulation.restart();
    let store = simulation.open_on(options(threads), &[1]).expect("a full device");
    there.iter().for_each(|name| check(&store, *name));
    store.close().expect("closed");
    let store = simulation.open_on(options(threads), &[1]).expect("a closed store");
    assert_eq!(store.health().owed_manifests, 1);
    // The device is still full.
    store.run_maintenance().expect("maintenance");
    assert_eq!((manifests(&simulation, 1), store.health().owed_manifests), (1, 1), "{:?}", store.health());
    simulation.resize(200 * PAGE);
    store.run_maintenance().expect("maintenance");
    assert_eq!((manifests(&simulation, 1), store.health().owed_manifests), (2, 0), "{:?}", store.health());
    write(&store, 1000, 1).expect("room");
    store.close().expect("closed");
    assert!(simulation.rot("manifest/", 1, 4 * PAGE));
    let store = simulation.open_on(options(threads), &[1]).expect("the other copy");
    there.iter().for_each(|name| check(&store, *name));
    check(&store, 1000);
}

/// A device with the only manifest cannot be declared lost if the other has no space for one. Nothing else is refused.
fn a_device_stays_as_long_as_it_alone_can_have_the_manifest(threads: Option<usize>) {
    let simulation = Simulation::new(&geometry(2, 200 * PAGE), 1);
    let store = simulation.open_on(options(threads), &[0]).expect("a store");
    (0..4).for_each(|name| write(&store, name, 1).expect("written"));
    simulation.resize(4 * PAGE);
    simulation.add_device(&store, 1).expect("a superblock fits");
    assert_eq!(store.health().owed_manifests, 1);
    let refused = store.declare_lost(0).expect_err("no other device has the manifest");
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    assert_eq!(store.health().read_only, None);
    assert_eq!(store.health().lost, Vec::<u16>::new());
    store.open_sequence("0", OpenSequence::new()).and_then(|one| one.delete(Durability::Sync)).expect("deleted");
    (1..4).for_each(|name| check(&store, name));
    simulation.resize(400 * PAGE);
    store.remove_device(0).expect("removed");
    store.close().expect("closed");
    let store = simulation.open_on(options(threads), &[1]).expect("the other device");
    (1..4).for_each(|name| check(&store, name));
    write(&store, 9, 1).expect("written");
}

/// The checkpoint of the first change finds no space, and the power fails later in the removal. The store opens with
/// the device or without it.
fn a_removal_that_is_interrupted_leaves_a_store_that_opens(threads: Option<usize>) {
    let (mut stayed, mut left) = (0, 0);
    for case in 0..1800 {
        let (commits, full, crash) = (1 + case % 5, case / 5 % 12, case / 60 * 5);
        let simulation = Simulation::new(&geometry(3, 1 << 20), case);
        let store = simulation.open(options(threads)).expect("a store");
        (0..commits).for_each(|name| write(&store, name, 1).expect("a durable sequence"));
        simulation.set_faults(Faults { full: Some(full), ..Faults::default() });
        simulation.crash_in(crash);
        let removed = store.remove_device(2).is_ok();
        simulation.crash();
        drop(store);
        simulation.restart();
        let mut disks = vec![0, 1, 2];
        let store = loop {
            match simulation.open_on(options(threads), &disks) {
                // The device left, or failed and was given up.
                Err(e) if e.kind() == ErrorKind::StaleDevice => {
                    disks.retain(|disk| !e.to_string().contains(&format!("simulated-{disk}:")));
                }
                Err(e) => panic!("case {case}, {commits} commits, full at {full}, cut at {crash}, {disks:?}: {e:?}"),
                Ok(store) => break store,
            }
        };
        assert!(!removed || !disks.contains(&2), "case {case}: the device is back");
        *(if disks.contains(&2) { &mut stayed } else { &mut left }) += 1;
        (0..commits).for_each(|name| check(&store, name));
    }
    assert!(stayed > 100 && left > 100, "{stayed} stayed, {left} left");
}

/// A generation was smaller than its spare files when the power failed. The open writes the next generation into them.
/// The space of the smaller files is then kept for the generation after it, also if segments fill the device.
fn a_full_device_keeps_space_for_the_manifest(threads: Option<usize>) {
    for case in 0..60 {
        let simulation = Simulation::new(&geometry(1, 1 << 24), case);
        let store = simulation.open(options(threads)).expect("a store");
        let mut kept: Vec<u64> = (0..20).collect();
        kept.iter().for_each(|name| write(&store, *name, 1).expect("space"));
        simulation.crash();
        drop(store);
        simulation.restart();
        let bytes_of = |file: &str| simulation.contents(0, file).map(|bytes| bytes.len());
        let spare = || {
            let slot = simulation.contents(0, "superblock").expect("a superblock");
            let newest = stratakv_format::superblock::newest(&slot).expect("a slot").into_inner();
            [0, 1].map(|copy| format!("manifest/{:016x}-{copy}", newest.manifest_generation.get() + 1))
        };
        for file in spare() {
            let bytes = bytes_of(&file).expect("a spare file") + (1 + case as usize % 12) * PAGE as usize;
            simulation.replace(0, &file, &vec![0; bytes]);
        }
        simulation.resize(simulation.bytes(0) + case / 12 * PAGE);
        for life in 0..3 {
            let store = simulation.open(options(threads)).unwrap_or_else(|e| panic!("case {case}, life {life}: {e:?}"));
            kept.iter().for_each(|name| check(&store, *name));
            for name in (life + 1) * 1000.. {
                match write(&store, name, 1) {
                    Ok(()) => kept.push(name),
                    Err(e) if e.kind() == ErrorKind::NoSpace => break,
                    Err(e) => panic!("case {case}, life {life}: {e:?}"),
                }
            }
            let there = spare().map(|file| bytes_of(&file).unwrap_or(0));
            assert!(there[0].min(there[1]) >= 4 * PAGE as usize, "case {case}, life {life}: {there:?}");
            simulation.crash();
            drop(store);
            simulation.restart();
        }
    }
}
