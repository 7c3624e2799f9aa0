//! Methods that choose entries while simulated devices fail, come back, or stay lost.
//!
//! [`EntryHistory`] checks every selection: each entry is attended once per head, with its own bytes.
//! `STRATAKV_TEST_HISTORIES` sets the number of random histories, `STRATAKV_TEST_SEED` the first seed.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use stratakv::retrieval::{HeadAggregation, SelectorId};
use stratakv::sim::{Faults, Geometry, Rng, Simulation};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, ErrorKind, SelectOptions, SelectRequest, Selection, Sequence, Store,
    StoreOptions,
};
use stratakv_testing::{DeviceState, EntryHistory, EntryShape};

/// The operations of all devices after which a history counts as endless.
const OPERATIONS_MAX: u64 = 1_000_000;

fn machine(devices: usize, seed: u64) -> Simulation {
    let geometry = Geometry {
        devices,
        device_bytes: 64 << 20,
        manifest_pages: 24,
        batch_bytes: 4000,
        whole: false,
        open_files: None,
    };
    let simulation = Simulation::new(&geometry, seed);
    simulation.limit_operations(OPERATIONS_MAX);
    simulation
}

/// Returns options with frames so large that only a commit writes one.
fn options() -> StoreOptions {
    Store::options().memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::mib(2)).frame_bytes(ByteSize::mib(1))
}

fn fail(simulation: &Simulation, device: Option<usize>) {
    simulation.set_faults(Faults { unreachable: device, ..Faults::default() });
}

/// How often histories saw what they are for.
#[derive(Debug, Default)]
struct Seen {
    /// A device came back while the store was open.
    came_back: usize,
    /// A store opened without a device.
    degraded: usize,
    /// A commit gave up a device that failed.
    given_up: usize,
    /// A device that was lost joined again.
    joined: usize,
    /// A selection read pages of stored clusters.
    paged: usize,
}

/// A history on several devices, each group with two copies.
struct Machine {
    simulation: Simulation,
    /// The devices of the store.
    members: Vec<usize>,
    history: EntryHistory,
    rng: Rng,
}

impl Machine {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0xdead);
        let devices = 2 + rng.below(2) as usize;
        let simulation = machine(devices, seed);
        let store = simulation.open(options()).expect("a store");
        let history = EntryHistory::new(store, format!("history-{seed}"), CreateOptions::new().copies(2), seed);
        Self { simulation, members: (0..devices).collect(), history, rng }
    }

    fn steps(&mut self, most: u64) {
        (0..self.rng.below(most)).for_each(|_| self.history.step());
    }

    /// Cuts the power and opens the store on its members, which may have lost a device.
    fn restart(&mut self, states: &[Vec<u64>]) {
        self.simulation.crash();
        self.history.leave();
        self.simulation.restart();
        let options = options().allow_degraded(true);
        let store = self.simulation.open_on(options, &self.members).expect("the store opens");
        self.history.set_devices(DeviceState::Sound);
        self.history.resume(store, states);
    }

    /// Runs steps, has a device fail in the middle, and continues in one of the ways in which that ends.
    fn life(&mut self, seen: &mut Seen) {
        self.steps(8);
        self.history.commit(Durability::Sync).expect("a commit on sound devices");
        let durable = self.history.tokens().to_vec();
        let at = self.rng.below(self.members.len() as u64) as usize;
        let device = self.members[at];
        fail(&self.simulation, Some(device));
        self.history.set_devices(DeviceState::Degraded);
        self.steps(8);
        match self.rng.below(3) {
            0 => {
                fail(&self.simulation, None);
                self.history.set_devices(DeviceState::Sound);
                seen.came_back += 1;
                return self.steps(8);
            }
            1 => {
                self.members.remove(at);
                self.restart(&[durable]);
            }
            _ => {
                let committed = self.history.commit(Durability::Sync);
                let states = match committed {
                    Ok(()) => vec![self.history.tokens().to_vec()],
                    Err(_) => vec![self.history.tokens().to_vec(), durable],
                };
                seen.given_up += usize::from(committed.is_ok());
                self.members.remove(at);
                self.restart(&states);
            }
        }
        seen.degraded += 1;
        self.steps(8);
        if self.members.len() == 1 || self.rng.one_in(2) {
            self.history.commit(Durability::Sync).expect("a commit without the lost device");
            let store = self.history.store().clone();
            self.simulation.add_device(&store, device).expect("the device joins again");
            self.members.push(device);
            seen.joined += 1;
        }
        // The next device that fails may have the only copy of a group.
        assert_eq!(self.history.store().repair().expect("a repair").left, 0);
        self.history.check_all();
    }
}

#[test]
fn histories_attend_to_each_entry_once_while_devices_fail_and_come_back() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let (histories, first) =
        (number("STRATAKV_TEST_HISTORIES").unwrap_or(60), number("STRATAKV_TEST_SEED").unwrap_or(1));
    let mut seen = Seen::default();
    for seed in first..first + histories {
        let run = catch_unwind(AssertUnwindSafe(|| {
            let mut machine = Machine::new(seed);
            (0..1 + machine.rng.below(3)).for_each(|_| machine.life(&mut seen));
            seen.paged += machine.history.paged();
        }));
        if let Err(panic) = run {
            eprintln!("repeat with STRATAKV_TEST_HISTORIES=1 STRATAKV_TEST_SEED={seed}");
            resume_unwind(panic);
        }
    }
    let least = seen.came_back.min(seen.degraded).min(seen.given_up).min(seen.joined).min(seen.paged);
    assert!(least > 0 || histories < 40, "{seen:?}");
}

#[test]
fn histories_on_one_device_continue_after_it_could_not_be_read() {
    for seed in 1..30 {
        let mut rng = Rng::new(seed);
        let simulation = machine(1, seed);
        let store = simulation.open(options()).expect("a store");
        let mut history = EntryHistory::new(store, "history".to_owned(), CreateOptions::new(), seed);
        for _ in 0..3 {
            (0..rng.below(8)).for_each(|_| history.step());
            history.commit(Durability::Sync).expect("a commit on a sound device");
            fail(&simulation, Some(0));
            history.set_devices(DeviceState::Unreadable);
            (0..rng.below(8)).for_each(|_| history.step());
            fail(&simulation, None);
            history.set_devices(DeviceState::Sound);
            history.check_all();
        }
    }
}

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };

/// A sequence whose groups are on a device, with a method.
struct Growing {
    sequence: Sequence,
    method: SelectorId,
    store: Store,
    simulation: Simulation,
}

impl Growing {
    fn new() -> Self {
        let simulation = machine(1, 5);
        let store = simulation.open(options()).expect("a store");
        let mut sequence = store.create_sequence(&SHAPE.layout(), CreateOptions::new()).expect("a sequence");
        let (keys, values) = (SHAPE.rows(0, 600, 1), SHAPE.rows(0, 600, 2));
        SHAPE.append(&mut sequence, &keys, &values).expect("an append");
        sequence.commit(Durability::Sync).expect("a commit");
        let method = sequence.attach(SHAPE.selector("dynakv:8")).expect("a selector");
        Self { sequence, method, store, simulation }
    }

    /// Appends 16 tokens whose keys are around other centres than those of the first tokens, so that clusters split.
    fn append(&mut self) {
        let first = self.sequence.len() as usize;
        let (keys, values) = (SHAPE.rows(first, 16, 9), SHAPE.rows(first, 16, 8));
        SHAPE.append(&mut self.sequence, &keys, &values).expect("an append needs no device");
    }

    fn select(&self, seed: u64, budget: usize) -> Selection {
        let query = SHAPE.query(seed);
        let options = SelectOptions::new(Budget::tokens(budget)).aggregation(HeadAggregation::Softmax);
        self.sequence.select(0, SelectRequest::query(&query).options(options).selector(self.method)).expect("a choice")
    }

    /// Checks that a selection is read, and attends to its own bytes.
    fn check(&self, seed: u64, budget: usize) {
        let (query, chosen) = (SHAPE.query(seed), self.select(seed, budget));
        let expected = SHAPE.attention(&query, &SHAPE.entries(&chosen), |token, plane| {
            let seeds = if token < 600 { [1, 2] } else { [9, 8] };
            SHAPE.rows(token as usize, 1, seeds[plane as usize])
        });
        let out = SHAPE.output(&self.store, &query, &chosen).expect("a read of the device");
        assert!(out.iter().zip(expected).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-3));
    }

    fn bytes(&self) -> u64 {
        self.sequence.selector_bytes(self.method).expect("an attached selector")
    }
}

#[test]
fn groups_wait_while_keys_cannot_be_read_and_later_appends_catch_up() {
    let (mut failing, mut sound) = (Growing::new(), Growing::new());
    fail(&failing.simulation, Some(0));
    let mut waits = 0;
    for _ in 0..40 {
        failing.append();
        sound.append();
        waits += usize::from(failing.bytes() > sound.bytes());
    }
    assert!(waits > 20, "groups waited after {waits} appends");
    assert!(failing.store.health().devices[0].errors > 0);
    fail(&failing.simulation, None);
    failing.append();
    sound.append();
    // The clusters depend on the tokens, not on when their keys could be read.
    assert_eq!(failing.bytes(), sound.bytes(), "nothing waits any more");
    for seed in 0..8 {
        let [entries, expected] = [&failing, &sound].map(|own| SHAPE.entries(&own.select(seed, 128)));
        assert_eq!(entries, expected, "query {seed}");
    }
    failing.check(3, 128);
}

#[test]
fn groups_that_wait_are_chosen_and_cut_while_keys_cannot_be_read() {
    let mut failing = Growing::new();
    fail(&failing.simulation, Some(0));
    for turn in 0..60 {
        failing.append();
        let length = failing.sequence.len();
        let entries = SHAPE.entries(&failing.select(turn, length as usize - 8));
        assert!(entries.iter().all(|own| own.len() as u64 >= length - 60), "{turn}");
        // Tokens that a cluster has taken in, and others that wait, are cut.
        if turn % 12 == 11 {
            failing.sequence.truncate(length - 8 * (turn % 7 + 4)).expect("a cut between groups reads nothing");
            SHAPE.entries(&failing.select(turn, 200)).iter().for_each(|own| assert!(own.len() <= 200));
        }
    }
    let (query, chosen) = (SHAPE.query(3), failing.select(3, 128));
    let lost = SHAPE.output(&failing.store, &query, &chosen).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Io, "{lost}");
    fail(&failing.simulation, None);
    let waiting = failing.bytes();
    failing.append();
    assert!(failing.bytes() < waiting, "{} bytes, {waiting} while groups waited", failing.bytes());
    for budget in [64, 128, 700] {
        failing.check(3, budget);
    }
}

#[test]
fn a_method_is_not_attached_while_keys_cannot_be_read_and_nothing_changes() {
    let mut growing = Growing::new();
    // The clusters of the first selection are remembered, and their list takes memory from then on.
    let chosen = SHAPE.entries(&growing.select(1, 96));
    let before = (growing.bytes(), chosen);
    fail(&growing.simulation, Some(0));
    for method in ["dynakv:4", "kmeans:8", "pqcache:16", "clusterkv:8:joint"] {
        let refused = growing.sequence.attach(SHAPE.selector(method)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Io, "{method}: {refused}");
    }
    // A method that needs recorded queries reads the keys when it is profiled.
    let swarm = growing.sequence.attach(SHAPE.selector("swarm:4")).ok();
    if let Some(swarm) = swarm {
        let refused = growing.sequence.profile(swarm, 0, &[&SHAPE.query(2)], None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Io, "{refused}");
        assert_eq!(growing.sequence.selector_bytes(swarm).expect("an attached selector"), 0);
    }
    assert_eq!((growing.bytes(), SHAPE.entries(&growing.select(1, 96))), before);
    fail(&growing.simulation, None);
    let joint = growing.sequence.attach(SHAPE.selector("clusterkv:8:joint")).expect("a sound device");
    growing.sequence.detach(joint).expect("an attached selector");
    assert_eq!((growing.bytes(), SHAPE.entries(&growing.select(1, 96))), before);
}
