//! The accounting of `Store::usage`, after every operation of random histories.
//!
//! - The parts add up to the capacity, and the sequences to the live bytes.
//! - The files have the bytes that the usage reports.
//! - A reopen changes nothing but what recovery must seal, and deleting everything frees all space.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use stratakv::store::{SequenceInfo, Usage};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, Error, ErrorKind, OpenSequence, Sequence, Store, StoredSummary,
};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::mix;
use tempfile::TempDir;

const SLOTS: usize = 6;
const SEGMENT: u64 = 256 << 10;

#[derive(Clone, Debug)]
enum Op {
    Append { slot: usize, tokens: usize },
    Commit { slot: usize, durability: usize, state: usize },
    Truncate { slot: usize, part: usize },
    Fork { from: usize, to: usize },
    Delete { slot: usize, durability: usize },
    Drop { slot: usize },
    Clean,
    Tend,
    Flush,
    Capacity { segments: Option<u64> },
    Reopen { close: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let slot = 0..SLOTS;
    prop_oneof![
        8 => (slot.clone(), prop_oneof![1_usize..20, 20_usize..900])
            .prop_map(|(slot, tokens)| Op::Append { slot, tokens }),
        6 => (slot.clone(), 0_usize..3, 0_usize..3000)
            .prop_map(|(slot, durability, state)| Op::Commit { slot, durability, state }),
        2 => (slot.clone(), 0_usize..101).prop_map(|(slot, part)| Op::Truncate { slot, part }),
        2 => (slot.clone(), slot.clone()).prop_map(|(from, to)| Op::Fork { from, to }),
        3 => (slot.clone(), 0_usize..3).prop_map(|(slot, durability)| Op::Delete { slot, durability }),
        3 => slot.prop_map(|slot| Op::Drop { slot }),
        2 => Just(Op::Clean),
        1 => Just(Op::Tend),
        1 => Just(Op::Flush),
        1 => proptest::option::of(8_u64..40).prop_map(|segments| Op::Capacity { segments }),
        1 => any::<bool>().prop_map(|close| Op::Reopen { close }),
    ]
}

/// Returns the shape of a slot. Even and odd slots have different models, so they are in two namespaces.
fn shape(slot: usize) -> SequenceShape {
    match slot % 2 {
        0 => SequenceShape {
            layers: vec![LayerShape::full(2, 32), LayerShape::full(1, 16)],
            dtype: DType::F16,
            group: 4,
        },
        _ => SequenceShape { layers: vec![LayerShape::full(1, 64)], dtype: DType::F32, group: 8 },
    }
}

struct World {
    store: Option<Store>,
    dirs: Vec<PathBuf>,
    slots: [Option<Sequence>; SLOTS],
    capacity: Option<u64>,
    step: u64,
    _root: TempDir,
}

/// Returns the bytes of the files below a directory.
fn length(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry"));
    let of = |entry: std::fs::DirEntry| match entry.file_type().expect("a file type").is_dir() {
        true => length(&entry.path()),
        // The background may have removed the file since.
        false => entry.metadata().map_or(0, |meta| meta.len()),
    };
    entries.map(of).sum()
}

impl World {
    fn new(devices: usize, segments: Option<u64>) -> Self {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), devices);
        let mut world =
            Self { store: None, dirs, slots: [const { None }; SLOTS], capacity: segments, step: 0, _root: root };
        world.open();
        world
    }

    /// Returns the capacity of `segments` segments and two generations of the manifest.
    fn capacity(&self, segments: u64) -> ByteSize {
        let copies = if self.dirs.len() == 1 { 2 } else { self.dirs.len().min(3) } as u64;
        ByteSize(2 * copies * (4 << 20) + 8192 * self.dirs.len() as u64 + segments * SEGMENT)
    }

    fn open(&mut self) {
        let capacity = self.capacity.map(|segments| self.capacity(segments));
        let options = small_options(&self.dirs).capacity(capacity);
        self.store = Some(options.open().expect("the store opens"));
    }

    fn store(&self) -> &Store {
        self.store.as_ref().expect("an open store")
    }

    /// Returns the usage once it agrees with the files, because the background may be changing them.
    fn usage(&self) -> (Usage, Vec<SequenceInfo>) {
        for _ in 0..1000 {
            let usage = self.store().usage().expect("the usage");
            let segments: Vec<u64> = self.dirs.iter().map(|dir| length(&dir.join("segments"))).collect();
            let files: u64 = self.dirs.iter().map(|dir| length(dir)).sum();
            let listed = self.store().sequences();
            let again = self.store().usage().expect("the usage");
            let still = |u: &Usage| (u.file_bytes, u.lifetime_bytes, u.live_bytes, u.namespaces.clone());
            let matching = files == usage.file_bytes && usage.devices.iter().map(|d| d.segment_bytes).eq(segments);
            if matching && still(&usage) == still(&again) {
                return (usage, listed);
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let lengths: Vec<u64> = self.dirs.iter().map(|dir| length(dir)).collect();
        panic!("the files have {lengths:?} bytes, not as in {:#?}", self.store().usage());
    }

    fn check(&self) -> Usage {
        let (usage, listed) = self.usage();
        assert_eq!(usage.sum_bytes(), usage.capacity_bytes, "{usage:#?}");
        assert!(usage.file_bytes <= usage.capacity_bytes, "{usage:#?}");
        for device in &usage.devices {
            let known = device.live_bytes + device.dead_bytes + device.in_flight_bytes + device.metadata_bytes;
            assert_eq!(known + device.free_bytes + device.reserved_bytes, device.segment_bytes, "{usage:#?}");
        }
        let sum = |part: fn(&stratakv::store::DeviceUsage) -> u64| usage.devices.iter().map(part).sum::<u64>();
        assert_eq!(sum(|device| device.live_bytes), usage.live_bytes);
        assert_eq!(sum(|device| device.dead_bytes), usage.dead_bytes);
        assert_eq!(sum(|device| device.in_flight_bytes), usage.in_flight_bytes);
        assert!(sum(|device| device.free_bytes) <= usage.free_bytes);
        assert!(sum(|device| device.reserved_bytes) <= usage.reserved_bytes);
        assert_eq!(usage.namespaces.iter().map(|own| own.live_bytes).sum::<u64>(), usage.live_bytes, "{usage:#?}");
        assert_eq!(usage.namespaces.iter().map(|own| own.sequences).sum::<u64>(), listed.len() as u64);
        let tokens: u64 = usage.namespaces.iter().map(|own| own.tokens).sum();
        assert_eq!(tokens, listed.iter().map(|info| info.tokens).sum::<u64>());
        if let Some(segments) = self.capacity {
            assert!(usage.limited && usage.capacity_bytes >= self.capacity(segments).bytes());
        }
        usage
    }

    /// Returns the value of an operation that succeeded, or none if it lacked space. Fails on any other error.
    fn allow<T>(&self, outcome: Result<T, Error>) -> Option<T> {
        match outcome {
            Ok(done) => Some(done),
            Err(e) if e.kind() == ErrorKind::NoSpace && self.capacity.is_some() => None,
            Err(e) => panic!("{e:?}\n{:#?}", self.store().usage()),
        }
    }

    /// Takes the handle of a slot. Opens or creates its sequence if it has none.
    fn take(&mut self, slot: usize) -> Sequence {
        if let Some(sequence) = self.slots[slot].take() {
            return sequence;
        }
        match self.store().open_sequence(&slot.to_string(), OpenSequence::new()) {
            Ok(sequence) => sequence,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NotFound, "{e:?}");
                let options = CreateOptions::new().key(slot.to_string()).evictable((slot % 3) as u8);
                let options = options.copies((1 + slot % 2).min(self.dirs.len()) as u8);
                let options = if slot < 3 { options.store_summary(StoredSummary::MinMax) } else { options };
                let layout = shape(slot).layout().expect("a layout");
                self.store().create_sequence(&layout, options).expect("a sequence")
            }
        }
    }

    fn run(&mut self, op: &Op) {
        self.step += 1;
        let durability = |n: usize| [Durability::Sync, Durability::Lazy, Durability::None][n];
        match *op {
            Op::Append { slot, tokens } => {
                let mut sequence = self.take(slot);
                let shape = shape(slot);
                let seeds: Vec<u64> = (0..tokens as u64).map(|at| mix(self.step << 32 | at)).collect();
                for layer in shape.kv_layers() {
                    let appended = shape.append(&mut sequence, layer, &seeds, Order::nth(layer));
                    self.allow(appended);
                }
                self.slots[slot] = Some(sequence);
            }
            Op::Commit { slot, durability: how, state } => {
                let mut sequence = self.take(slot);
                let committed = sequence.commit_with(&vec![7; state], durability(how));
                self.allow(committed);
                self.slots[slot] = Some(sequence);
            }
            Op::Truncate { slot, part } => {
                let mut sequence = self.take(slot);
                let cut = sequence.truncate(sequence.len() * part as u64 / 100);
                self.allow(cut);
                self.slots[slot] = Some(sequence);
            }
            Op::Fork { from, to } => {
                // A fork has the model of its parent, and needs a free key.
                let (from, to) = (from, (to & !1) | (from & 1));
                let mut sequence = self.take(from);
                let taken = self.slots[to].is_some() || from == to;
                if !taken && self.store().open_sequence(&to.to_string(), OpenSequence::new()).is_err() {
                    let child = sequence.fork_as(&to.to_string());
                    self.slots[to] = self.allow(child);
                }
                self.slots[from] = Some(sequence);
            }
            Op::Delete { slot, durability: how } => {
                let deleted = self.take(slot).delete(durability(how));
                self.allow(deleted);
            }
            Op::Drop { slot } => self.slots[slot] = None,
            Op::Clean => {
                let cleaned = self.store().clean();
                self.allow(cleaned);
            }
            Op::Tend => {
                let tended = self.store().run_maintenance();
                self.allow(tended);
            }
            Op::Flush => {
                let flushed = self.store().flush();
                self.allow(flushed);
            }
            Op::Capacity { segments } => {
                self.capacity = segments;
                let outcome = self.store().set_capacity(segments.map(|segments| self.capacity(segments)));
                self.allow(outcome);
            }
            Op::Reopen { close } => self.reopen(close),
        }
    }

    /// Reopens the store. The open may seal open segments. Everything else must be the same.
    fn reopen(&mut self, close: bool) {
        self.slots = [const { None }; SLOTS];
        let flushed = self.store().flush();
        self.allow(flushed);
        let before = self.check();
        let store = self.store.take().expect("an open store");
        if close {
            if let Err(e) = store.close() {
                assert_eq!(e.kind(), ErrorKind::NoSpace, "{e:?}");
            }
        } else {
            drop(store);
        }
        assert_clean(&self.dirs, "before opening again");
        self.open();
        let after = self.check();
        assert_eq!(after.in_flight_bytes, 0);
        let sequences = |usage: &Usage| -> Vec<_> {
            usage.namespaces.iter().map(|own| (own.layout, own.sequences, own.tokens)).collect()
        };
        // The background may now evict sequences that had a handle, and make copies that found no space before.
        let more = self.dirs.len() > 1 && after.live_bytes > before.live_bytes;
        let copied = more && sequences(&after) == sequences(&before);
        if !copied && (after.live_bytes, &after.namespaces) != (before.live_bytes, &before.namespaces) {
            let evicted = (0..500).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                self.store().health().evictions > 0
            });
            assert!(evicted && self.capacity.is_some(), "{before:#?}\n{after:#?}");
        }
        assert!(after.lifetime_bytes >= before.lifetime_bytes);
    }

    /// Deletes everything and checks that all space is free.
    fn empty(&mut self) {
        for slot in 0..SLOTS {
            self.run(&Op::Delete { slot, durability: 0 });
        }
        // Copies that the background was making become dead too.
        let usage = (0..100).find_map(|_| {
            self.allow(self.store().clean());
            let usage = self.check();
            (usage.in_flight_bytes + usage.dead_bytes == 0).then_some(usage)
        });
        let usage = usage.unwrap_or_else(|| self.check());
        assert_eq!((usage.live_bytes, usage.in_flight_bytes, usage.dead_bytes), (0, 0, 0), "{usage:#?}");
        assert_eq!(usage.free_bytes + usage.reserved_bytes + usage.metadata_bytes, usage.capacity_bytes);
        self.reopen(true);
        let usage = self.check();
        assert_eq!((usage.live_bytes, usage.dead_bytes), (0, 0), "{usage:#?}");
    }
}

#[test]
fn the_sums_hold_through_random_histories() {
    let cases = count_from_env("STRATAKV_TEST_USAGE", 60) as u32;
    let config = Config { cases, max_shrink_iters: 2000, ..Config::default() };
    let histories = (1_usize..3, proptest::option::of(10_u64..40), proptest::collection::vec(op(), 1..70));
    let outcome = TestRunner::new(config).run(&histories, |(devices, segments, ops)| {
        let mut world = World::new(devices, segments);
        for op in &ops {
            world.run(op);
            world.check();
        }
        world.capacity = None;
        world.run(&Op::Capacity { segments: None });
        world.empty();
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// Files of free segments that could not be removed are removed later, and counted until then.
#[test]
fn files_that_cannot_be_removed_are_removed_later() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = small_options(&dirs).open().expect("a store");
    let shape = shape(0);
    let mut all = Vec::new();
    for name in 0..40_u64 {
        let options = CreateOptions::new().key(name.to_string());
        let mut sequence = store.create_sequence(&shape.layout().expect("a layout"), options).expect("a sequence");
        let seeds: Vec<u64> = (0..1200).map(|token| mix(name << 32 | token)).collect();
        for layer in shape.kv_layers() {
            shape.append(&mut sequence, layer, &seeds, Order::nth(layer)).expect("an append");
        }
        sequence.commit(Durability::Sync).expect("a commit");
        all.push(sequence);
    }
    let (segments, aside) = (dirs[0].join("segments"), root.path().join("aside"));
    std::fs::create_dir(&aside).expect("a directory");
    let names: Vec<_> =
        std::fs::read_dir(&segments).expect("segments").map(|entry| entry.expect("one").file_name()).collect();
    assert!(names.len() > 20, "{}", names.len());
    // Each name always exists, because the background would take a missing file for removed.
    let exchange = |name: &OsStr| {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        renameat_with(CWD, segments.join(name), CWD, aside.join(name), RenameFlags::EXCHANGE)
    };
    for name in &names {
        std::fs::create_dir(aside.join(name)).expect("a directory instead of the file");
        exchange(name).expect("exchanged");
    }
    all.into_iter().for_each(|sequence| sequence.delete(Durability::Sync).expect("deleted"));
    store.run_maintenance().expect_err("they cannot be removed");
    for name in &names {
        exchange(name).expect("back");
    }
    // The background may still be removing files.
    let there = || (store.usage().expect("the usage").devices[0].segment_bytes, length(&segments));
    let same = (0..500).find_map(|_| {
        let _ = store.run_maintenance();
        let (counted, files) = there();
        std::thread::sleep(std::time::Duration::from_millis(2));
        (counted == files && files < names.len() as u64 / 2 * SEGMENT).then_some(files)
    });
    assert!(same.is_some(), "counted and on the device: {:?} of {}", there(), names.len() as u64 * SEGMENT);
    assert!(store.health().read_only.is_none());
}

#[test]
fn cut_and_grown_a_thousand_times_leaks_nothing() {
    let mut world = World::new(1, Some(24));
    let mut sequence = world.take(0);
    let shape = shape(0);
    let grow = |sequence: &mut Sequence, round: u64, tokens: u64| {
        let seeds: Vec<u64> = (0..tokens).map(|at| mix(round << 32 | at)).collect();
        for layer in shape.kv_layers() {
            shape.append(sequence, layer, &seeds, Order::nth(layer)).expect("an append");
        }
    };
    grow(&mut sequence, 0, 400);
    sequence.commit(Durability::Sync).expect("a commit");
    let memory = world.store().status().memory.used_bytes;
    let mut most = 0;
    let mut after_ten = None;
    for round in 1..=1000 {
        sequence.truncate(397 - round % 5).expect("a cut");
        grow(&mut sequence, round, 3 + round % 5);
        let durability = if round % 7 == 0 { Durability::Sync } else { Durability::Lazy };
        sequence.commit(durability).expect("a commit");
        if round % 50 == 0 {
            world.store().flush().expect("a flush");
            let usage = world.check();
            most = most.max(usage.live_bytes);
            after_ten.get_or_insert(usage.live_bytes);
        }
    }
    let first = after_ten.expect("rounds");
    assert!(most <= first + first / 2, "live bytes grew from {first} to {most}");
    let now = world.store().status().memory.used_bytes;
    assert!(now <= memory + (1 << 20), "memory grew from {memory} to {now}");
    drop(sequence);
    world.empty();
}
