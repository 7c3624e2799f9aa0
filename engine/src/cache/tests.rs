//! Tests of every policy against the interface, and of each policy against a plain model.

use super::factory::policy;
use super::policy::ReplacementPolicy;
use crate::options::{CachePolicy, ReadCost};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

const COST: CachePolicy = CachePolicy::CostEffective { read_cost: Some(ReadCost { request_us: 80, mib_per_s: 1000 }) };
const ALL: [CachePolicy; 7] = CachePolicy::ALL;

#[derive(Clone, Debug)]
enum Step {
    /// A request for a key, which is admitted if it is not held.
    Request(u16),
    Remove(u16),
    Evict,
    Next,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0_u16..40).prop_map(Step::Request),
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
    fn policies_hold_what_was_admitted_and_not_evicted(
        steps in steps(), capacity in 1_usize..80, mixed in any::<bool>(), choice in 0_usize..ALL.len(),
    ) {
        let mut cache: Box<dyn ReplacementPolicy<u16>> = policy(ALL[choice], capacity);
        let mut model: BTreeMap<u16, usize> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Request(key) if model.contains_key(&key) => cache.touch(key),
                Step::Request(key) => {
                    let mut evicted = Vec::new();
                    let admitted = cache.admit(key, size(key, mixed), &mut evicted);
                    for old in evicted {
                        prop_assert!(model.remove(&old).is_some(), "{old} was evicted and not held");
                    }
                    if admitted {
                        model.insert(key, size(key, mixed));
                    }
                    // S3-FIFO reserves a part of the capacity for new keys and refuses keys larger than the rest.
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
    fn fifo_and_lru_keep_their_order(
        keys in prop::collection::vec(0_u16..30, 1..400), slots in 1_usize..20, lru in any::<bool>(),
    ) {
        let choice = if lru { CachePolicy::Lru } else { CachePolicy::Fifo };
        let mut cache: Box<dyn ReplacementPolicy<u16>> = policy(choice, slots * 4);
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
                let expected = if queue.len() == slots { queue.pop_front() } else { None };
                prop_assert_eq!(evicted, Vec::from_iter(expected));
                queue.push_back(key);
            }
        }
    }

    /// The model counts `f` step by step as the paper says, over keys of one size.
    #[test]
    fn the_cost_policy_evicts_the_lowest_score(
        steps in prop::collection::vec(prop::collection::btree_set(0_u16..24, 0..12), 1..40), slots in 1_usize..10,
    ) {
        let mut cache: Box<dyn ReplacementPolicy<u16>> = policy(COST, slots * 4);
        let mut held: BTreeMap<u16, u64> = BTreeMap::new();
        let mut absent: BTreeMap<u16, u64> = BTreeMap::new();
        for asked in steps {
            cache.end_step();
            // Held keys that are not requested decay first. The policy computes the same when it compares keys.
            for (key, f) in &mut held {
                if !asked.contains(key) {
                    *f = f.saturating_sub(1);
                }
            }
            // A read looks up all keys before it admits any, so the held ones are used first.
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
fn the_cost_policy_keeps_small_blocks() {
    // At equal use, the smaller block saves more time per byte held.
    let mut cache: Box<dyn ReplacementPolicy<u16>> = policy(COST, 100);
    let mut evicted = Vec::new();
    assert!(cache.admit(1, 60, &mut evicted) && cache.admit(2, 20, &mut evicted));
    assert!(cache.admit(3, 30, &mut evicted));
    assert_eq!(evicted, [1]);
}

#[test]
fn the_cost_policy_keeps_some_of_a_step_that_does_not_fit_and_fifo_none() {
    // Every step requests the same 16 keys in the same order and 8 fit, which defeats any queue.
    let hits = |choice| {
        let mut cache: Box<dyn ReplacementPolicy<u16>> = policy(choice, 8 * 4);
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

/// Replays requests, removals and steps of mixed sizes. Returns a hash of every decision.
fn hash_of_decisions(choice: CachePolicy) -> u64 {
    let mut cache: Box<dyn ReplacementPolicy<u16>> = policy(choice, 400);
    let (mut random, mut hash) = (1_u64, 0_u64);
    let mut note = |word: u64| hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..20_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (draw, place) = (random >> 33, (random >> 20) % 64);
        // The keys in front are requested more often.
        let key = (place * place / 64) as u16;
        match draw % 16 {
            0..12 if cache.holds(key) => cache.touch(key),
            0..12 => {
                let mut evicted = Vec::new();
                note(u64::from(cache.admit(key, size(key, draw % 2 == 0), &mut evicted)));
                evicted.into_iter().for_each(|old| note(u64::from(old)));
            }
            12 => cache.remove(key),
            13 => note(cache.evict().map_or(99, u64::from)),
            _ => cache.end_step(),
        }
        note(cache.bytes() as u64);
    }
    hash
}

/// The hashes were computed before policies knew clusters. Caches of group methods decide as they did then.
#[test]
fn policies_by_block_decide_as_ever() {
    let decisions = [CachePolicy::Fifo, CachePolicy::Lru, COST, CachePolicy::S3Fifo].map(hash_of_decisions);
    let before =
        [1_305_892_839_895_505_948, 16_914_185_668_156_861_781, 13_337_640_204_700_912_231, 16_853_362_075_955_643_461];
    assert_eq!(decisions, before);
}
