//! Forks: sequences that share their first tokens. Each keeps every byte, whichever of them is committed, truncated,
//! deleted or reopened first.

use stratakv::{CreateOptions, DType, Durability, ErrorKind, OpenSequence, Sequence, Store, StoredSummary};
use stratakv_testing::{TestStore, small};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{assert_clean, fast_scratch};
use stratakv_tests::rng::mix;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 32), LayerShape::full(1, 16)], dtype: DType::F16, group: 4 }
}

struct World {
    store: TestStore,
}

/// A sequence and the seeds of its tokens.
struct Pair {
    sequence: Sequence,
    seeds: Vec<u64>,
}

impl World {
    fn new() -> Self {
        Self { store: TestStore::in_scratch(fast_scratch(), 1, small()) }
    }

    fn store(&self) -> &Store {
        &self.store
    }

    fn create(&self, key: &str) -> Pair {
        let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax);
        let layout = shape().layout().expect("a layout");
        Pair { sequence: self.store().create_sequence(&layout, options).expect("a sequence"), seeds: Vec::new() }
    }

    /// Closes or drops the store, and opens it again.
    fn reopen(&mut self, close: bool) {
        let store = self.store.take();
        if close {
            store.close().expect("close");
        } else {
            drop(store);
        }
        assert_clean(self.store.dirs(), "before opening again");
        self.store.reopen();
    }

    fn open(&self, key: &str, seeds: &[u64]) -> Pair {
        let pair =
            Pair { sequence: self.store().open_sequence(key, OpenSequence::new()).expect(key), seeds: seeds.to_vec() };
        self.check(&pair);
        pair
    }

    fn check(&self, pair: &Pair) {
        assert_eq!(pair.sequence.len(), pair.seeds.len() as u64);
        let ids: Vec<u32> = pair.seeds.iter().map(|seed| *seed as u32).collect();
        assert_eq!(pair.sequence.token_ids(), ids);
        shape().check_all(self.store(), &pair.sequence, |_| pair.seeds.clone());
    }

    fn live(&self) -> u64 {
        self.store().status().live_bytes
    }
}

impl Pair {
    fn append(&mut self, tokens: u64, salt: u64) {
        let seeds: Vec<u64> = (0..tokens).map(|at| mix(salt << 32 | at)).collect();
        for layer in 0..2 {
            shape().append(&mut self.sequence, layer, &seeds, Order::nth(layer)).expect("an append");
        }
        self.sequence.append_token_ids(&seeds.iter().map(|seed| *seed as u32).collect::<Vec<_>>()).expect("ids");
        self.seeds.extend(seeds);
    }

    fn fork(&mut self, key: &str) -> Self {
        Self { sequence: self.sequence.fork_as(key).expect("a fork"), seeds: self.seeds.clone() }
    }

    fn truncate(&mut self, tokens: usize) {
        self.sequence.truncate(tokens as u64).expect("a cut");
        self.seeds.truncate(tokens);
    }

    fn commit(&mut self) {
        self.sequence.commit(Durability::Sync).expect("a commit");
    }
}

#[test]
fn both_sides_grow_and_no_data_is_written_for_the_fork() {
    let mut world = World::new();
    let mut parent = world.create("parent");
    parent.append(500, 1);
    parent.commit();
    let (live, written) = (world.live(), world.store().status().written_bytes);
    let mut child = parent.fork("child");
    child.commit();
    assert_eq!(world.live(), live, "shared frames count once");
    assert_eq!(world.store().status().written_bytes, written, "a fork writes no frame");
    parent.append(70, 2);
    child.append(33, 3);
    world.check(&parent);
    world.check(&child);
    parent.commit();
    child.commit();
    let (of_parent, of_child) = (parent.seeds.clone(), child.seeds.clone());
    drop((parent, child));
    world.reopen(true);
    world.open("parent", &of_parent);
    world.open("child", &of_child);
}

#[test]
fn a_fork_commits_what_it_took_over_uncommitted() {
    for parent_first in [false, true] {
        let mut world = World::new();
        let mut parent = world.create("parent");
        parent.append(130, 1);
        let mut child = parent.fork("child");
        let mut grandchild = child.fork("grandchild");
        grandchild.append(9, 2);
        if parent_first {
            parent.commit();
        }
        grandchild.commit();
        child.commit();
        let (of_child, of_grandchild) = (child.seeds.clone(), grandchild.seeds.clone());
        // An uncommitted parent disappears. A committed one shares its frames with its children.
        drop((parent, child, grandchild));
        world.reopen(false);
        assert_eq!(world.store().sequences().len(), if parent_first { 3 } else { 2 });
        world.open("child", &of_child);
        world.open("grandchild", &of_grandchild);
    }
}

#[test]
fn deleted_in_any_order_the_others_keep_every_byte() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        for committed in [false, true] {
            let mut world = World::new();
            let mut first = world.create("0");
            first.append(301, 1);
            first.commit();
            let mut second = first.fork("1");
            second.append(50, 2);
            let mut third = second.fork("2");
            third.truncate(310);
            third.append(20, 3);
            let mut all = [Some(first), Some(second), Some(third)];
            if committed {
                all.iter_mut().flatten().for_each(Pair::commit);
            }
            for gone in order {
                let pair = all[gone].take().expect("a sequence that was not deleted");
                pair.sequence.delete(Durability::Sync).expect("a delete");
                // Another sequence uses the space if it is free.
                let mut other = world.create("other");
                other.append(600, 7);
                other.commit();
                other.sequence.delete(Durability::Sync).expect("a delete");
                for pair in all.iter_mut().flatten() {
                    world.check(pair);
                    pair.commit();
                }
                let seeds: Vec<_> = all.iter_mut().map(|pair| pair.take().map(|pair| pair.seeds)).collect();
                world.reopen(gone % 2 == 0);
                for (index, seeds) in seeds.into_iter().enumerate() {
                    all[index] = seeds.map(|seeds| world.open(&index.to_string(), &seeds));
                }
            }
            assert!(world.store().sequences().is_empty());
            assert_eq!(world.live(), 0, "no sequence refers to a frame");
        }
    }
}

#[test]
fn a_fork_that_was_never_committed_leaves_nothing() {
    let mut world = World::new();
    let mut parent = world.create("parent");
    parent.append(200, 1);
    parent.commit();
    let live = world.live();
    for round in 0..20 {
        let mut child = parent.fork("child");
        child.append(100, 2 + round);
        assert_eq!(
            world
                .store()
                .create_sequence(child.sequence.layout(), CreateOptions::new().key("child"))
                .map(|_| ())
                .unwrap_err()
                .kind(),
            ErrorKind::AlreadyExists
        );
    }
    parent.commit();
    assert_eq!(world.live(), live);
    assert_eq!(world.store().sequences().len(), 1);
    let files = world.store().status().file_bytes;
    for round in 0..60 {
        let mut child = parent.fork("");
        child.append(100, 30 + round);
        drop(child);
        parent.commit();
    }
    assert!(world.store().status().file_bytes <= files + (2 << 20), "space of dropped forks is used again");
    let seeds = parent.seeds.clone();
    drop(parent);
    world.reopen(true);
    world.open("parent", &seeds);
}

#[test]
fn a_fork_below_a_cut() {
    let mut world = World::new();
    let mut parent = world.create("parent");
    parent.append(203, 1);
    parent.commit();
    parent.truncate(101);
    let mut child = parent.fork("child");
    // The fork is committed, but the parent's truncation is not.
    child.append(5, 2);
    child.commit();
    parent.append(60, 3);
    world.check(&parent);
    parent.truncate(40);
    let of_child = child.seeds.clone();
    drop((parent, child));
    world.reopen(true);
    let child = world.open("child", &of_child);
    let parent = world.store().open_sequence("parent", OpenSequence::new()).expect("the parent as its commit left it");
    assert_eq!(parent.len(), 203);
    drop((child, parent));
}

/// A fork commits frames before their parent, and cleaning moves them. The parent's commit then names their new places.
#[test]
fn a_parent_commits_frames_that_were_moved_meanwhile() {
    let mut world = World::new();
    let (mut dead, mut pairs) = (Vec::new(), Vec::new());
    // The sequences are small, so several share a segment.
    for round in 0..12 {
        let mut other = world.create("");
        other.append(150, 100 + round);
        other.commit();
        dead.push(other);
        let mut parent = world.create(&format!("parent-{round}"));
        parent.append(100, 200 + round);
        let mut child = parent.fork(&format!("child-{round}"));
        child.commit();
        pairs.push((parent, child));
    }
    dead.into_iter().for_each(|other| other.sequence.delete(Durability::Sync).expect("deleted"));
    let moved = world.store().clean().expect("cleaned");
    assert!(moved.frames > 4, "{moved:?}");
    let mut all = Vec::new();
    for (mut parent, child) in pairs {
        parent.commit();
        world.check(&parent);
        world.check(&child);
        all.push(parent.seeds.clone());
    }
    for close in [false, true] {
        world.reopen(close);
        for (round, seeds) in all.iter().enumerate() {
            world.open(&format!("parent-{round}"), seeds);
            world.open(&format!("child-{round}"), seeds);
        }
    }
}
