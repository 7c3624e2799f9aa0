//! Faults of the machine around a store: clocks that go back, devices that hang or turn read-only or stale, and memory
//! that is refused.

use std::sync::{Arc, Mutex};
use stratakv::sim::{Event, Faults, Geometry, Simulation, events, take_events};
use stratakv::{ByteSize, CreateOptions, DType, Durability, ErrorKind, OpenSequence, Sequence, Store, StoreOptions};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::rng::mix;

const SEGMENT: u64 = 64 << 10;
/// Tokens of a prompt. They take half a segment.
const TOKENS: u64 = 16;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 128)], dtype: DType::F32, group: 8 }
}

fn options() -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT));
    options.frame_bytes(ByteSize::kib(64))
}

fn machine(devices: usize) -> Simulation {
    let _ = take_events();
    let geometry = Geometry {
        devices,
        device_bytes: 64 << 20,
        manifest_pages: 12,
        batch_bytes: 12_000,
        whole: false,
        open_files: None,
    };
    Simulation::new(&geometry, 5)
}

/// Appends the tokens from `from` on that a prompt has more. Returns the seeds of all.
fn append(sequence: &mut Sequence, from: u64) -> Vec<u64> {
    let all: Vec<u64> = (0..from + TOKENS).map(mix).collect();
    shape().append(sequence, 0, &all[from as usize..], Order::TokenMajor).expect("an append");
    all
}

/// Creates a sequence and commits a prompt.
fn prompt(store: &Store, options: CreateOptions) -> (Sequence, Vec<u64>) {
    let layout = shape().layout().expect("a layout");
    let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
    let seeds = append(&mut sequence, 0);
    sequence.commit(Durability::Sync).expect("a commit");
    (sequence, seeds)
}

/// Cuts the power and checks that the sequence `s` has one of these contents.
fn comes_back(simulation: &Simulation, contents: &[&[u64]]) {
    simulation.crash();
    simulation.restart();
    let store = simulation.open(options()).expect("the store opens");
    let sequence = store.open_sequence("s", OpenSequence::new()).expect("the sequence is there");
    let found = contents.iter().find(|seeds| seeds.len() as u64 == sequence.len());
    let seeds = found.unwrap_or_else(|| panic!("{} tokens", sequence.len()));
    shape().check_all(&store, &sequence, |_| seeds.to_vec());
}

#[test]
fn eviction_keeps_the_order_of_use_when_the_clock_goes_back() {
    let simulation = machine(1);
    let store = simulation.open(options()).expect("a store");
    let gone = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&gone);
    store.on_eviction(move |event| events.lock().expect("no panic").push(event.key.clone()));
    for nth in 0..4 {
        if nth == 2 {
            simulation.set_clock(-3_600_000);
        }
        prompt(&store, CreateOptions::new().key(format!("prompt {nth}")).evictable(1));
    }
    // Used last, although the clock shows an earlier time than at its creation.
    drop(store.open_sequence("prompt 0", OpenSequence::new()).expect("it is there"));
    for capacity in (1..=12).rev() {
        let _ = store.set_capacity(Some(ByteSize(capacity * SEGMENT)));
        let _ = store.run_maintenance();
    }
    let gone = gone.lock().expect("no panic").clone();
    assert!(gone.len() >= 2, "{gone:?}");
    let order = ["prompt 1", "prompt 2", "prompt 3", "prompt 0"];
    assert_eq!(gone, order[..gone.len()]);
}

#[test]
fn an_open_whose_device_does_not_answer_changes_nothing() {
    let simulation = machine(1);
    let store = simulation.open(options()).expect("a store");
    let (sequence, seeds) = prompt(&store, CreateOptions::new().key("s"));
    drop((sequence, store));
    simulation.crash();
    simulation.restart();
    let faults = [Faults { names: Some(0), ..Faults::default() }, Faults { unreachable: Some(0), ..Faults::default() }];
    for faults in faults {
        simulation.set_faults(faults);
        let changes = simulation.changes();
        let error = simulation.open(options()).map(drop).expect_err("the device fails");
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert_eq!(simulation.changes(), changes, "{error}");
    }
    simulation.set_faults(Faults::default());
    comes_back(&simulation, &[&seeds]);
}

#[test]
fn a_device_that_turns_read_only_refuses_commits_and_is_read() {
    for operations in 0..12 {
        let simulation = machine(1);
        let store = simulation.open(options()).expect("a store");
        let (mut sequence, before) = prompt(&store, CreateOptions::new().key("s"));
        simulation.set_faults(Faults { read_only: Some((0, operations)), ..Faults::default() });
        let after = append(&mut sequence, TOKENS);
        let committed = sequence.commit(Durability::Sync);
        let kinds = [ErrorKind::Io, ErrorKind::Indeterminate, ErrorKind::Poisoned];
        assert!(committed.as_ref().err().is_none_or(|e| kinds.contains(&e.kind())), "{committed:?}");
        shape().check_all(&store, &sequence, |_| after.clone());
        drop((sequence, store));
        assert!(operations > 0 || events(Event::ReadOnlyMidway) > 0 && committed.is_err());
        match committed {
            Ok(()) => comes_back(&simulation, &[&after]),
            Err(_) => comes_back(&simulation, &[&before, &after]),
        }
    }
}

#[test]
fn a_device_that_turns_stale_gives_errors_until_the_machine_restarts() {
    let simulation = machine(1);
    let store = simulation.open(options()).expect("a store");
    let (mut sequence, before) = prompt(&store, CreateOptions::new().key("s"));
    simulation.set_faults(Faults { stale: Some((0, 1)), ..Faults::default() });
    let after = append(&mut sequence, TOKENS);
    assert!(sequence.commit(Durability::Sync).is_err());
    assert!(store.flush().is_err() || sequence.commit(Durability::Sync).is_err());
    assert!(events(Event::HandleStale) > 0);
    drop((sequence, store));
    comes_back(&simulation, &[&before, &after]);
}

#[test]
fn a_device_that_hangs_delays_a_commit_and_loses_nothing() {
    for (looks, resets) in [(40, false), (400, false), (40, true)] {
        let simulation = machine(2);
        let store = simulation.open(options()).expect("a store");
        let (mut sequence, before) = prompt(&store, CreateOptions::new().key("s").copies(2));
        let start = simulation.now();
        simulation.set_faults(Faults { hang: Some((1, looks, resets)), ..Faults::default() });
        let after = append(&mut sequence, TOKENS);
        let committed = sequence.commit(Durability::Sync);
        assert!(resets || committed.is_ok(), "{committed:?}");
        assert!(events(Event::DeviceHung) > 0 && simulation.now() - start >= looks * 1000);
        shape().check_all(&store, &sequence, |_| after.clone());
        let is_committed = committed.is_ok();
        let lost = store.health().lost;
        drop((sequence, store));
        simulation.crash();
        simulation.restart();
        let disks: Vec<usize> = (0..2).filter(|disk| !lost.contains(&(*disk as u16))).collect();
        let store = simulation.open_on(options(), &disks).expect("the store opens");
        let sequence = store.open_sequence("s", OpenSequence::new()).expect("the sequence is there");
        assert!(sequence.len() == after.len() as u64 || !is_committed && sequence.len() == before.len() as u64);
        let seeds = if sequence.len() == after.len() as u64 { after } else { before };
        shape().check_all(&store, &sequence, |_| seeds.clone());
    }
}

#[test]
fn an_operation_that_finds_no_memory_changes_nothing() {
    let (mut refused, mut done) = (0, 0);
    for before in 0..24 {
        let simulation = machine(1);
        let store = simulation.open(options()).expect("a store");
        let (mut sequence, mut seeds) = prompt(&store, CreateOptions::new().key("s"));
        simulation.set_faults(Faults { memory: Some((before, 8)), ..Faults::default() });
        let more: Vec<u64> = (0..seeds.len() as u64 + TOKENS).map(mix).collect();
        let appended = shape().append(&mut sequence, 0, &more[seeds.len()..], Order::TokenMajor);
        if appended.is_ok() {
            seeds = more;
        }
        let committed = sequence.commit(Durability::Sync);
        for outcome in [appended, committed] {
            match outcome {
                Ok(()) => done += 1,
                Err(e) if matches!(e.kind(), ErrorKind::MemoryLimit | ErrorKind::Busy) => refused += 1,
                Err(e) => panic!("{e:?}"),
            }
        }
        simulation.set_faults(Faults::default());
        assert_eq!(sequence.len(), seeds.len() as u64);
        sequence.commit(Durability::Sync).expect("memory is there again");
        drop((sequence, store));
        comes_back(&simulation, &[&seeds]);
    }
    assert!(refused > 3 && done > 3, "{refused} operations were refused and {done} were not");
}
