//! Policies against what any of them promises, and each against a plain model of itself.

use super::policy::{Replacement, policy};
use crate::options::CachePolicy;
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

const COST: CachePolicy = CachePolicy::CostEffective { base_us: 80, mib_per_s: 1000 };
const ALL: [CachePolicy; 4] = [CachePolicy::Fifo, CachePolicy::Lru, COST, CachePolicy::S3Fifo];

#[derive(Clone, Debug)]
enum Step {
    /// A key is asked for, and admitted when it is not held.
    ScoreRequest(u16),
    Remove(u16),
    Evict,
    Next,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0_u16..40).prop_map(Step::ScoreRequest),
        1 => (0_u16..40).prop_map(Step::Remove),
        1 => Just(Step::Evict),
        2 => Just(Step::Next),
    ];
    prop::collection::vec(step, 1..300)
}

fn size(key: u16, mixed: bool) -> usize {
    if mixed { 1 + usize::from(key % 5) * 3 } else { 4 }
}

proptest! {
    #[test]
    fn what_is_held_is_what_was_admitted_and_not_evicted(
        steps in steps(), capacity in 1_usize..80, mixed in any::<bool>(), choice in 0_usize..ALL.len(),
    ) {
        let mut cache: Box<dyn Replacement<u16>> = policy(ALL[choice], capacity);
        let mut model: BTreeMap<u16, usize> = BTreeMap::new();
        for step in steps {
            match step {
                Step::ScoreRequest(key) if model.contains_key(&key) => cache.touch(key),
                Step::ScoreRequest(key) => {
                    let mut evicted = Vec::new();
                    let admitted = cache.admit(key, size(key, mixed), &mut evicted);
                    for old in evicted {
                        prop_assert!(model.remove(&old).is_some(), "{old} was evicted and not held");
                    }
                    if admitted {
                        model.insert(key, size(key, mixed));
                    }
                    // S3-FIFO keeps a part of the capacity for newcomers, and takes nothing that is larger than the rest.
                    let fits = size(key, mixed) * 2 <= capacity;
                    prop_assert!(admitted || !fits || !model.is_empty());
                }
                Step::Remove(key) => {
                    cache.remove(key);
                    model.remove(&key);
                }
                Step::Evict => {
                    let gone = cache.evict();
                    prop_assert_eq!(gone.is_some(), !model.is_empty());
                    if let Some(gone) = gone {
                        prop_assert!(model.remove(&gone).is_some());
                    }
                }
                Step::Next => cache.end_step(),
            }
            prop_assert_eq!(cache.len(), model.len());
            prop_assert_eq!(cache.bytes(), model.values().sum::<usize>());
            prop_assert!(cache.bytes() <= capacity);
            prop_assert!((0..40).all(|key| cache.holds(key) == model.contains_key(&key)));
        }
    }

    #[test]
    fn fifo_and_lru_keep_their_order(keys in prop::collection::vec(0_u16..30, 1..400), slots in 1_usize..20, lru in any::<bool>()) {
        let choice = if lru { CachePolicy::Lru } else { CachePolicy::Fifo };
        let mut cache: Box<dyn Replacement<u16>> = policy(choice, slots * 4);
        let mut queue: VecDeque<u16> = VecDeque::new();
        for key in keys {
            let mut evicted = Vec::new();
            if let Some(at) = queue.iter().position(|k| *k == key) {
                cache.touch(key);
                if lru {
                    queue.remove(at);
                    queue.push_back(key);
                }
            } else {
                prop_assert!(cache.admit(key, 4, &mut evicted));
                let expected: Vec<u16> = if queue.len() == slots { queue.pop_front().into_iter().collect() } else { vec![] };
                prop_assert_eq!(evicted, expected);
                queue.push_back(key);
            }
        }
    }

    /// Against `f` counted step by step as the paper says, over keys of one size: nobody goes who is worth more than one who stays.
    #[test]
    fn the_heap_gives_up_the_lowest_score(steps in prop::collection::vec(prop::collection::btree_set(0_u16..24, 0..12), 1..40), slots in 1_usize..10) {
        let mut cache: Box<dyn Replacement<u16>> = policy(COST, slots * 4);
        let mut held: BTreeMap<u16, u64> = BTreeMap::new();
        let mut absent: BTreeMap<u16, u64> = BTreeMap::new();
        for asked in steps {
            cache.end_step();
            // What is held decays first, unless asked for; the heap does the same when it looks.
            for (key, f) in &mut held {
                if !asked.contains(key) {
                    *f = f.saturating_sub(1);
                }
            }
            // A step asks for what is held first, as a read does, which looks up everything before it admits anything.
            for key in asked.iter().filter(|key| held.contains_key(key)) {
                cache.touch(*key);
            }
            for (key, f) in &mut held {
                *f += u64::from(asked.contains(key));
            }
            let newcomers: Vec<u16> = asked.iter().copied().filter(|key| !held.contains_key(key)).collect();
            for key in newcomers {
                let f = absent.remove(&key).unwrap_or(0) + 1;
                let mut evicted = Vec::new();
                let admitted = cache.admit(key, 4, &mut evicted);
                let least = held.values().min().copied();
                prop_assert_eq!(admitted, held.len() < slots || least.is_some_and(|least| least < f));
                for old in evicted {
                    let gone = held.remove(&old);
                    prop_assert_eq!(gone, least, "{} went", old);
                    absent.insert(old, gone.unwrap_or(0));
                }
                if admitted { held.insert(key, f) } else { absent.insert(key, f) };
            }
        }
    }
}

#[test]
fn small_and_dear_blocks_stay() {
    // Equal use: the smaller block costs more time per byte held.
    let mut cache: Box<dyn Replacement<u16>> = policy(COST, 100);
    let mut evicted = Vec::new();
    assert!(cache.admit(1, 60, &mut evicted) && cache.admit(2, 20, &mut evicted));
    assert!(cache.admit(3, 30, &mut evicted));
    assert_eq!(evicted, [1]);
}

#[test]
fn a_step_that_reads_more_than_fits_keeps_some_under_cost_and_none_under_fifo() {
    // Every step asks for the same 16 keys in turn, 8 fit: the case that turns over any queue.
    let hits = |choice| {
        let mut cache: Box<dyn Replacement<u16>> = policy(choice, 8 * 4);
        let mut hits = 0;
        for _ in 0..50 {
            cache.end_step();
            for key in 0..16 {
                if cache.holds(key) {
                    cache.touch(key);
                    hits += 1;
                } else {
                    cache.admit(key, 4, &mut Vec::new());
                }
            }
        }
        hits
    };
    assert_eq!(hits(CachePolicy::Fifo), 0);
    assert_eq!(hits(CachePolicy::Lru), 0);
    assert!(hits(COST) > 200, "{} of 800", hits(COST));
}
