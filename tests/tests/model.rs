//! Random histories compared with a plain model in memory.
//!
//! 1. Operations are applied to a store and to the model.
//! 2. The store is closed, dropped, or copied while it is open, and opened again.
//! 3. Each key must hold one of its candidates: the last state known durable, or a later commit.
//! 4. A selection must show the tokens of the time when it was made.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use std::collections::BTreeMap;
use std::path::PathBuf;
use stratakv::options::ChecksumChoice;
use stratakv::{
    Budget, CreateOptions, DType, Durability, ErrorKind, OpenSequence, SelectOptions, SelectRequest, Selection,
    Sequence, Store, StoredSummary,
};
use stratakv_tests::content::{LayerShape, Order, SequenceShape, varied_shapes};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_options, try_copy_devices};
use stratakv_tests::rng::{Rng, mix};
use tempfile::TempDir;

const KEYS: usize = 4;
const VIEWS_MAX: usize = 12;

fn shapes() -> Vec<SequenceShape> {
    let layers = vec![LayerShape::full(3, 80), LayerShape::full(1, 16)];
    let large = SequenceShape { layers, dtype: DType::F16, group: 32 };
    varied_shapes().into_iter().chain([large]).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Append { key: usize, layer: usize, tokens: usize, order: usize },
    AppendAll { key: usize, tokens: usize, order: usize },
    Decode { key: usize, tokens: usize, order: usize },
    Ids { key: usize, count: usize },
    Commit { key: usize, durability: usize, state: Option<usize> },
    Select { key: usize, layer: usize, budget: usize, sinks: usize, recent: usize },
    SelectGroups { key: usize, layer: usize, seed: u64 },
    Read,
    DropViews,
    DropHandle { key: usize, close: bool },
    Delete { key: usize, durability: usize },
    Truncate { key: usize, part: usize },
    Fork { from: usize, to: usize },
    Flush,
    Reopen { close: bool },
    Crash { seed: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let key = 0..KEYS;
    let tokens = prop_oneof![3 => 1_usize..4, 3 => 4_usize..60, 1 => 60_usize..400, 1 => Just(0)];
    prop_oneof![
        2 => (key.clone(), 0_usize..3, tokens.clone(), 0_usize..3)
            .prop_map(|(key, layer, tokens, order)| Op::Append { key, layer, tokens, order }),
        8 => (key.clone(), tokens, 0_usize..3).prop_map(|(key, tokens, order)| Op::AppendAll { key, tokens, order }),
        3 => (key.clone(), prop_oneof![3 => 1_usize..12, 1 => 12_usize..150], 0_usize..3)
            .prop_map(|(key, tokens, order)| Op::Decode { key, tokens, order }),
        2 => (key.clone(), 0_usize..40).prop_map(|(key, count)| Op::Ids { key, count }),
        6 => (key.clone(), 0_usize..3, proptest::option::of(0_usize..3000))
            .prop_map(|(key, durability, state)| Op::Commit { key, durability, state }),
        5 => (key.clone(), 0_usize..3, 0_usize..200, 0_usize..20, 0_usize..20)
            .prop_map(|(key, layer, budget, sinks, recent)| Op::Select { key, layer, budget, sinks, recent }),
        2 => (key.clone(), 0_usize..3, any::<u64>())
            .prop_map(|(key, layer, seed)| Op::SelectGroups { key, layer, seed }),
        5 => Just(Op::Read),
        1 => Just(Op::DropViews),
        2 => (key.clone(), any::<bool>()).prop_map(|(key, close)| Op::DropHandle { key, close }),
        1 => (key.clone(), 0_usize..3).prop_map(|(key, durability)| Op::Delete { key, durability }),
        2 => (key.clone(), 0_usize..101).prop_map(|(key, part)| Op::Truncate { key, part }),
        3 => (key.clone(), key).prop_map(|(from, to)| Op::Fork { from, to }),
        1 => Just(Op::Flush),
        1 => any::<bool>().prop_map(|close| Op::Reopen { close }),
        1 => any::<u64>().prop_map(|seed| Op::Crash { seed }),
    ]
}

/// The content of a sequence at a commit.
#[derive(Clone, Debug, Default, PartialEq)]
struct Snapshot {
    /// The seeds of the tokens, by layer.
    layers: Vec<Vec<u64>>,
    ids: Vec<u32>,
    state: Option<Vec<u8>>,
    shape: usize,
    summary: bool,
}

impl Snapshot {
    fn len(&self) -> usize {
        let shape = &shapes()[self.shape];
        shape.kv_layers().map(|layer| self.layers[layer].len()).min().unwrap_or(0)
    }

    fn committed(&self) -> Self {
        let mut out = self.clone();
        let len = self.len();
        out.layers.iter_mut().for_each(|layer| layer.truncate(len));
        out
    }
}

/// A key. Its candidates are the states since the last one known durable, oldest first; none means no sequence.
struct Slot {
    candidates: Vec<Option<Snapshot>>,
    /// The content that the handle shows.
    now: Snapshot,
    /// True if the last commit was one at `Durability::None`, which the handle may not have written yet.
    owed: bool,
    handle: Option<Sequence>,
}

impl Slot {
    fn last(&self) -> Option<&Snapshot> {
        self.candidates.last().and_then(Option::as_ref)
    }

    /// Returns true if a sequence that shows `snapshot` may be another candidate, with other tokens.
    fn may_be_confused(&self, snapshot: &Snapshot) -> bool {
        let looks_same = |c: &Snapshot| {
            c.len() == snapshot.len() && c.ids == snapshot.ids && c.state == snapshot.state && c.shape == snapshot.shape
        };
        self.candidates.iter().flatten().any(|c| looks_same(c) && c.layers != snapshot.layers)
    }

    fn forget_handle(&mut self) {
        self.handle = None;
        self.owed = false;
        self.now = self.last().cloned().unwrap_or_default();
    }
}

struct Held {
    view: Selection,
    shape: usize,
    layer: usize,
    seeds: Vec<u64>,
}

struct World {
    // `World` drops its directories last.
    slots: BTreeMap<usize, Slot>,
    views: Vec<Held>,
    store: Option<Store>,
    shapes: Vec<SequenceShape>,
    dirs: Vec<PathBuf>,
    crc32: bool,
    tokens_given: u64,
    crashes: usize,
    root: TempDir,
}

fn durability(n: usize) -> Durability {
    [Durability::Sync, Durability::Lazy, Durability::None][n]
}

impl World {
    fn new(devices: usize, crc32: bool) -> Self {
        let root = fast_scratch();
        let dirs = device_dirs(&root.path().join("0"), devices);
        let slot = || Slot { candidates: vec![None], now: Snapshot::default(), owed: false, handle: None };
        let slots = (0..KEYS).map(|key| (key, slot())).collect();
        let mut world = Self {
            slots,
            views: Vec::new(),
            store: None,
            shapes: shapes(),
            dirs,
            crc32,
            tokens_given: 0,
            crashes: 0,
            root,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let checksum = if self.crc32 { ChecksumChoice::Crc32 } else { ChecksumChoice::Crc64Nvme };
        self.store = Some(small_options(&self.dirs).checksum(checksum).open().expect("the store opens"));
    }

    fn store(&self) -> Store {
        self.store.clone().expect("an open store")
    }

    /// Returns the slot of a key. Opens or creates its sequence if it has no handle.
    fn slot(&mut self, key: usize) -> &mut Slot {
        let store = self.store();
        let slot = self.slots.get_mut(&key).expect("a slot");
        if slot.handle.is_none() {
            let name = format!("key-{key}");
            let handle = match slot.last() {
                Some(snapshot) => {
                    let handle =
                        store.open_sequence(&name, OpenSequence::new()).expect("a sequence that was committed");
                    assert_same(&handle, snapshot);
                    handle
                }
                None => {
                    let missing =
                        store.open_sequence(&name, OpenSequence::new()).expect_err("a sequence that does not exist");
                    assert_eq!(missing.kind(), ErrorKind::NotFound);
                    let seed = mix(self.tokens_given ^ key as u64);
                    let (shape, summary) = (seed as usize % self.shapes.len(), seed & 1 << 40 != 0);
                    let layers = vec![Vec::new(); self.shapes[shape].layers.len()];
                    slot.now = Snapshot { layers, shape, summary, ..Snapshot::default() };
                    let options = CreateOptions::new().key(name);
                    let options = if summary { options.store_summary(StoredSummary::MinMax) } else { options };
                    let layout = self.shapes[shape].layout().expect("a layout");
                    store.create_sequence(&layout, options).expect("a sequence")
                }
            };
            slot.handle = Some(handle);
        }
        slot
    }

    fn append(&mut self, key: usize, layer: Option<usize>, tokens: usize, order: usize) {
        let shapes = self.shapes.clone();
        let first = self.tokens_given;
        self.tokens_given += tokens as u64 + 1;
        let slot = self.slot(key);
        let shape = &shapes[slot.now.shape];
        let seeds: Vec<u64> = (first..first + tokens as u64).map(mix).collect();
        let layers: Vec<usize> = match layer {
            Some(nth) => shape.kv_layers().nth(nth % shape.kv_layers().count()).into_iter().collect(),
            None => shape.kv_layers().collect(),
        };
        for layer in layers {
            let handle = slot.handle.as_mut().expect("a handle");
            shape.append(handle, layer, &seeds, Order::nth(order + layer)).expect("an append");
            slot.now.layers[layer].extend(&seeds);
            assert_eq!(handle.layer_len(layer).expect("a layer"), slot.now.layers[layer].len() as u64);
        }
        assert_eq!(slot.handle.as_ref().map(|h| h.len()), Some(slot.now.len() as u64));
    }

    fn push_ids(&mut self, key: usize, count: usize) {
        let first = self.tokens_given as u32;
        self.tokens_given += count as u64;
        let slot = self.slot(key);
        let ids: Vec<u32> = (first..first + count as u32).collect();
        slot.handle.as_mut().expect("a handle").append_token_ids(&ids).expect("token ids");
        slot.now.ids.extend(ids);
    }

    /// Appends tokens one by one with their ids, and commits after each, sometimes with a new state.
    fn decode(&mut self, key: usize, tokens: usize, order: usize) {
        for step in 0..tokens {
            self.append(key, None, 1, order);
            self.push_ids(key, 1);
            let level = if step.is_multiple_of(3) { Durability::Sync } else { Durability::Lazy };
            self.commit(key, level, (step % 7 == 2).then_some(step));
        }
    }

    fn commit(&mut self, key: usize, level: Durability, state: Option<usize>) {
        let unique = self.tokens_given;
        self.tokens_given += 1;
        let slot = self.slot(key);
        // `verify` tells candidates apart by what a sequence shows, so each that differs gets its own state.
        let state = state.or_else(|| slot.may_be_confused(&slot.now.committed()).then_some(0));
        let handle = slot.handle.as_mut().expect("a handle");
        match state {
            None => handle.commit(level),
            Some(len) => {
                let bytes: Vec<u8> = (0..len as u64 + 8).map(|at| mix(unique * 5000 + at) as u8).collect();
                let outcome = handle.commit_with(&bytes, level);
                slot.now.state = Some(bytes);
                outcome
            }
        }
        .expect("a commit");
        if level == Durability::Sync {
            slot.candidates.clear();
        }
        slot.owed = level == Durability::None;
        slot.candidates.push(Some(slot.now.committed()));
    }

    fn select(
        &mut self,
        key: usize,
        layer: usize,
        choose: impl FnOnce(&Sequence, usize, &SequenceShape) -> Option<Selection>,
    ) {
        let shapes = self.shapes.clone();
        let slot = self.slot(key);
        let shape = &shapes[slot.now.shape];
        let layer = shape.kv_layers().nth(layer % shape.kv_layers().count()).expect("a layer");
        let handle = slot.handle.as_ref().expect("a handle");
        if slot.now.layers[layer].is_empty() {
            assert_eq!(
                handle.select(layer, SelectRequest::all()).map(|_| ()).unwrap_err().kind(),
                ErrorKind::InvalidArgument
            );
            return;
        }
        let Some(view) = choose(handle, layer, shape) else { return };
        let seeds = slot.now.layers[layer].clone();
        assert_eq!(view.length(), seeds.len() as u64);
        let positions: Vec<u64> = view.positions().collect();
        assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "a position twice");
        assert_eq!(positions.len(), view.tokens());
        let held = Held { view, shape: slot.now.shape, layer, seeds };
        if self.views.len() == VIEWS_MAX {
            self.views.remove(0);
        }
        self.views.push(held);
    }

    fn select_budget(&mut self, key: usize, layer: usize, budget: usize, sinks: usize, recent: usize) {
        let summary = self.slot(key).now.summary;
        self.select(key, layer, |handle, layer, shape| {
            let length = handle.layer_len(layer).expect("a layer") as usize;
            let window = shape.layers[layer].window.map_or(length, |w| (w as usize).min(length));
            let options = match budget {
                0..20 => SelectOptions::new(Budget::All),
                20..60 => SelectOptions::new(Budget::share((budget - 19) as f64 / 41.0)),
                _ => SelectOptions::new(Budget::tokens(budget - 59)),
            };
            let options = options.sinks(sinks).recent(recent);
            let query = shape.query(layer, budget as u64);
            let view = match handle.select(layer, SelectRequest::query(&query).options(options)) {
                Ok(view) => view,
                Err(e) if !summary && e.kind() == ErrorKind::InvalidArgument => return None,
                Err(e) => panic!("select: {e:?}"),
            };
            let budget = options.budget.of(window).expect("a budget");
            let tail = length % shape.group;
            let least = if tail == 0 { shape.group } else { tail };
            assert!(view.tokens() <= budget.max(least), "{} tokens of a budget of {budget}", view.tokens());
            assert_eq!(view.positions().last(), Some(length as u64 - 1), "the newest token is not among them");
            if budget >= window {
                assert!(view.positions().eq((length - window) as u64..length as u64));
            }
            if sinks > 0 && window == length && budget >= sinks.next_multiple_of(shape.group) + recent + 2 * shape.group
            {
                assert_eq!(view.positions().next(), Some(0), "no sink");
            }
            Some(view)
        });
    }

    fn select_groups(&mut self, key: usize, layer: usize, seed: u64) {
        self.select(key, layer, |handle, layer, shape| {
            let length = handle.layer_len(layer).expect("a layer") as usize;
            let first = shape.layers[layer].window.map_or(0, |w| length.saturating_sub(w as usize)) / shape.group;
            let sealed = length / shape.group;
            let groups: Vec<u64> = (first as u64..sealed as u64).filter(|g| mix(seed ^ g) & 3 == 0).collect();
            if groups.is_empty() && length.is_multiple_of(shape.group) {
                return None;
            }
            let past = handle.select(layer, SelectRequest::groups(&[sealed as u64])).map(|_| ()).unwrap_err();
            assert_eq!(past.kind(), ErrorKind::InvalidArgument);
            let view = handle.select(layer, SelectRequest::groups(&groups)).expect("existing groups");
            assert!(view.groups().eq(groups));
            Some(view)
        });
    }

    /// Reads all selections in one call.
    fn read(&mut self) {
        let views: Vec<&Selection> = self.views.iter().map(|held| &held.view).collect();
        let batch = self.store().read(&views).submit().and_then(|ticket| ticket.wait()).expect("a read");
        for (at, held) in self.views.iter().enumerate() {
            let blocks = batch.get(at).expect("blocks that are whole");
            self.shapes[held.shape].check_blocks(held.layer, &held.seeds, &held.view, blocks);
        }
    }

    fn delete(&mut self, key: usize, level: Durability) {
        let slot = self.slot(key);
        slot.handle.take().expect("a handle").delete(level).expect("a delete");
        if level == Durability::Sync && slot.candidates.iter().any(Option::is_some) {
            slot.candidates.clear();
        }
        slot.candidates.push(None);
        slot.forget_handle();
    }

    /// Truncates to about `part` percent of the tokens.
    fn truncate(&mut self, key: usize, part: usize) {
        let slot = self.slot(key);
        let kept = slot.now.len() * part / 100;
        slot.handle.as_mut().expect("a handle").truncate(kept as u64).expect("a cut");
        let cut = |snapshot: &mut Snapshot| {
            snapshot.layers.iter_mut().for_each(|layer| layer.truncate(kept));
            snapshot.ids.truncate(kept);
        };
        cut(&mut slot.now);
        if slot.owed {
            let mut last = slot.last().cloned().expect("a commit");
            cut(&mut last);
            let confused = slot.may_be_confused(&last);
            slot.candidates.push(Some(last));
            if confused {
                self.commit(key, Durability::Sync, None);
            }
        }
    }

    /// Forks `from` under the key `to`, unless `to` has a sequence.
    fn fork(&mut self, from: usize, to: usize) {
        if from == to || self.slots[&to].last().is_some() || self.slots[&to].handle.is_some() {
            return;
        }
        let parent = self.slot(from);
        let handle = parent.handle.as_mut().expect("a handle").fork_as(&format!("key-{to}")).expect("a fork");
        let now = parent.now.clone();
        assert_same(&handle, &now);
        let slot = self.slots.get_mut(&to).expect("a slot");
        (slot.handle, slot.now) = (Some(handle), now);
    }

    fn reopen(&mut self, close: bool) {
        self.views.clear();
        self.slots.values_mut().for_each(Slot::forget_handle);
        let store = self.store.take().expect("an open store");
        if close {
            store.close().expect("close");
        } else {
            drop(store);
        }
        assert_clean(&self.dirs, "closed");
        self.open();
        for slot in self.slots.values_mut() {
            // The close made everything durable.
            slot.candidates.drain(..slot.candidates.len() - 1);
        }
        self.verify("reopened");
    }

    /// Replaces the directories by a copy made while the store is open.
    fn crash(&mut self, seed: u64) {
        let store = self.store();
        let done = || store.status().devices.iter().map(|d| (d.counters.writes, d.counters.syncs)).collect::<Vec<_>>();
        // Files are copied one after another, so a copy counts only if the background wrote nothing meanwhile.
        let copy = loop {
            store.run_maintenance().expect("the background's work");
            let before = done();
            self.crashes += 1;
            let to = self.root.path().join(self.crashes.to_string());
            let copy = try_copy_devices(&self.dirs, &to, &mut Rng(seed));
            if let (Ok(copy), true) = (copy, done() == before) {
                break copy;
            }
            assert!(self.crashes < 1000, "the background never rests");
            std::fs::remove_dir_all(&to).expect("remove the copy");
        };
        drop(store);
        self.views.clear();
        for slot in self.slots.values_mut() {
            slot.handle = None;
        }
        self.store = None;
        let old = std::mem::replace(&mut self.dirs, copy);
        std::fs::remove_dir_all(old[0].parent().expect("a parent")).expect("remove the original");
        assert_clean(&self.dirs, "crashed");
        self.open();
        self.verify("recovered");
        if seed & 1 == 1 {
            // The store crashes again right after recovery.
            self.store = None;
            assert_clean(&self.dirs, "recovered");
            self.open();
            self.verify("recovered again");
        }
    }

    /// Checks that every key holds one of its candidates, which is then its only one.
    fn verify(&mut self, when: &str) {
        let store = self.store();
        let there: Vec<String> = store.sequences().into_iter().map(|info| info.key).collect();
        for (key, slot) in &mut self.slots {
            let name = format!("key-{key}");
            let found = there
                .contains(&name)
                .then(|| store.open_sequence(&name, OpenSequence::new()).expect("a sequence that is listed"));
            let held = match &found {
                None => slot.candidates.iter().find(|c| c.is_none()).cloned(),
                Some(found) => {
                    let same = |c: &&Option<Snapshot>| c.as_ref().is_some_and(|c| is_same(found, c));
                    slot.candidates.iter().rev().find(same).cloned()
                }
            };
            let Some(held) = held else {
                let lens: Vec<_> = slot.candidates.iter().map(|c| c.as_ref().map(Snapshot::len)).collect();
                panic!("{when}: {name} is {found:?}, it may be {lens:?}");
            };
            if let (Some(found), Some(held)) = (&found, &held) {
                self.shapes[held.shape].check_all(&store, found, |layer| held.layers[layer].clone());
            }
            slot.candidates = vec![held];
            drop(found);
            slot.forget_handle();
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Append { key, layer, tokens, order } => self.append(key, Some(layer), tokens, order),
            Op::AppendAll { key, tokens, order } => self.append(key, None, tokens, order),
            Op::Decode { key, tokens, order } => self.decode(key, tokens, order),
            Op::Ids { key, count } => self.push_ids(key, count),
            Op::Commit { key, durability: level, state } => self.commit(key, durability(level), state),
            Op::Select { key, layer, budget, sinks, recent } => self.select_budget(key, layer, budget, sinks, recent),
            Op::SelectGroups { key, layer, seed } => self.select_groups(key, layer, seed),
            Op::Read => self.read(),
            Op::DropViews => self.views.clear(),
            Op::DropHandle { key, close } => {
                let slot = self.slot(key);
                if let (true, Some(handle)) = (close, slot.handle.take()) {
                    handle.close().expect("close a sequence");
                }
                slot.forget_handle();
            }
            Op::Truncate { key, part } => self.truncate(key, part),
            Op::Fork { from, to } => self.fork(from, to),
            Op::Delete { key, durability: level } => self.delete(key, durability(level)),
            Op::Flush => self.store().flush().expect("flush"),
            Op::Reopen { close } => self.reopen(close),
            Op::Crash { seed } => self.crash(seed),
        }
    }
}

fn is_same(found: &Sequence, snapshot: &Snapshot) -> bool {
    found.len() == snapshot.len() as u64
        && found.token_ids() == snapshot.ids
        && found.caller_state() == snapshot.state.as_deref()
        && found.layout() == &shapes()[snapshot.shape].layout().expect("a layout")
}

fn assert_same(found: &Sequence, snapshot: &Snapshot) {
    assert_eq!(found.len(), snapshot.len() as u64);
    assert_eq!(found.token_ids(), snapshot.ids);
    assert_eq!(found.caller_state(), snapshot.state.as_deref());
}

fn history(devices: usize, crc32: bool, ops: &[Op]) {
    let mut world = World::new(devices, crc32);
    for op in ops {
        world.apply(op);
    }
    world.read();
    world.reopen(true);
    world.reopen(false);
}

/// Runs `cases` random histories from a seed. The error is the smallest that fails.
fn random_histories(cases: u32, seed: u64) -> Result<(), String> {
    let rng_seed = RngSeed::Fixed(seed);
    let config = Config { cases, rng_seed, failure_persistence: None, max_shrink_iters: 600, ..Config::default() };
    let strategy = (1_usize..4, any::<bool>(), proptest::collection::vec(op(), 10..60));
    let run = |(devices, crc32, ops): (usize, bool, Vec<Op>)| {
        history(devices, crc32, &ops);
        Ok(())
    };
    TestRunner::new(config).run(&strategy, run).map_err(|e| e.to_string())
}

#[test]
fn histories_follow_the_model() {
    let cases = count_from_env("STRATAKV_TEST_HISTORIES", 40) as u32;
    // Without a given seed, the clock gives every run new histories.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock that is set");
    let seed = count_from_env("STRATAKV_TEST_SEED", now.as_micros() as usize) as u64;
    // Several workers, because a history mostly waits for threads and rings.
    let workers = (cases / 40).clamp(1, 8);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let share = |nth| cases / workers + u32::from(nth < cases % workers);
        let running: Vec<_> = (0..workers)
            .map(|nth| scope.spawn(move || random_histories(share(nth), seed.wrapping_add(nth.into()))))
            .collect();
        let ended = running.into_iter().map(|worker| worker.join().expect("a worker that does not panic"));
        ended.filter_map(Result::err).collect()
    });
    let repeat = format!("STRATAKV_TEST_HISTORIES={cases} STRATAKV_TEST_SEED={seed}");
    assert!(failures.is_empty(), "repeat with {repeat}\n{}", failures.join("\n"));
    println!("{cases} histories passed, 0 failed, {repeat}");
}

#[test]
fn a_lost_commit_of_equal_length_is_told_apart() {
    for seed in 0..2 {
        let ops = [
            Op::AppendAll { key: 0, tokens: 204, order: 0 },
            Op::Commit { key: 0, durability: 0, state: None },
            Op::Truncate { key: 0, part: 99 },
            Op::AppendAll { key: 0, tokens: 3, order: 0 },
            Op::Commit { key: 0, durability: 2, state: None },
            Op::Crash { seed },
        ];
        history(1, false, &ops);
    }
}
