//! Tests of policies by cluster: invariants over random histories, and the decisions of each policy.

use super::order::UnitOrder;
use super::{ByCost, BySize, ClusterReplacement, FirstIn, LastUsed};
use crate::cache::key::ClusterKey;
use crate::cache::policy::{PriceSource, ReplacementPolicy};
use crate::cache::replay::{PolicyReplay, ReplayedCluster};
use crate::cache::request::{ActivatedClusters, ClusterBlock, ClusterRequest};
use crate::options::{CachePolicy, ReadCost};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const COST: ReadCost = ReadCost { request_us: 80, mib_per_s: 1000 };

#[derive(Clone, Debug)]
enum Event {
    /// A request for blocks of clusters and for single blocks, whose missing blocks are then admitted.
    Clusters(Vec<(u8, BTreeSet<u16>)>, BTreeSet<u16>),
    Touch(u16),
    Admit(u16),
    Change(u8),
    Remove(u16),
    Evict,
    Next,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let blocks = || prop::collection::btree_set(0_u16..60, 1..6);
    let clusters = prop::collection::vec((0_u8..20, blocks()), 1..6);
    let event = prop_oneof![
        8 => (clusters, prop::collection::btree_set(0_u16..60, 0..3)).prop_map(|(c, b)| Event::Clusters(c, b)),
        2 => (0_u16..60).prop_map(Event::Touch),
        2 => (0_u16..60).prop_map(Event::Admit),
        2 => (0_u8..20).prop_map(Event::Change),
        1 => (0_u16..60).prop_map(Event::Remove),
        1 => Just(Event::Evict),
        4 => Just(Event::Next),
    ];
    prop::collection::vec(event, 1..80)
}

fn size(block: u16) -> usize {
    4 + usize::from(block % 3) * 2
}

fn key(cluster: u8) -> ClusterKey {
    ClusterKey { selector: 1, layer: 0, list: 0, cluster: u32::from(cluster) }
}

/// Returns the blocks of a request, and its clusters.
fn request(clusters: &[(u8, BTreeSet<u16>)], others: &BTreeSet<u16>) -> (Vec<u16>, ActivatedClusters) {
    let all: BTreeSet<u16> = clusters.iter().flat_map(|(_, blocks)| blocks).chain(others).copied().collect();
    let all: Vec<u16> = all.into_iter().collect();
    let mut named = ActivatedClusters::default();
    for (cluster, own) in clusters {
        let index = |block: &u16| all.binary_search(block).map_or(0, |at| at as u32);
        named.push(key(*cluster), 0.0, own.iter().map(|block| ClusterBlock { index: index(block), joins: false }));
    }
    (all, named)
}

/// Replays a history, and compares what is held with a plain model after every event.
fn check_history<O: UnitOrder>(mut cache: ClusterReplacement<u16, O>, capacity: usize, events: Vec<Event>) {
    let mut model: BTreeMap<u16, usize> = BTreeMap::new();
    let mut changes = 0;
    for event in events {
        let mut missing: Vec<u16> = Vec::new();
        match event {
            Event::Clusters(clusters, others) => {
                let (blocks, named) = request(&clusters, &others);
                let blocks: Vec<Option<(u16, usize)>> =
                    blocks.into_iter().map(|block| Some((block, size(block)))).collect();
                cache.activate(&ClusterRequest { blocks: &blocks, clusters: &named });
                missing.extend(blocks.iter().flatten().map(|(block, _)| *block).filter(|b| !model.contains_key(b)));
            }
            Event::Touch(block) => cache.touch(block),
            Event::Admit(block) if !model.contains_key(&block) => missing.push(block),
            Event::Admit(_) => {}
            Event::Change(cluster) => {
                let mut named = ActivatedClusters::default();
                changes += 1;
                named.change(key(cluster), changes);
                cache.activate(&ClusterRequest { blocks: &[], clusters: &named });
            }
            Event::Remove(block) => {
                cache.remove(block);
                model.remove(&block);
            }
            Event::Evict => {
                let protected = cache.protected();
                match cache.evict() {
                    Some(gone) => assert!(model.remove(&gone).is_some() && !protected.contains(&gone), "{gone}"),
                    None => assert!(model.keys().all(|block| protected.contains(block)), "{protected:?}"),
                }
            }
            Event::Next => cache.end_step(),
        }
        for block in missing {
            let (protected, mut evicted) = (cache.protected(), Vec::new());
            let admitted = cache.admit(block, size(block), &mut evicted);
            for gone in evicted {
                assert!(model.remove(&gone).is_some() && !protected.contains(&gone), "{gone} was evicted");
            }
            if admitted {
                model.insert(block, size(block));
            }
        }
        cache.check();
        assert_eq!((cache.len(), cache.bytes()), (model.len(), model.values().sum::<usize>()));
        assert!(cache.bytes() <= capacity);
        assert!((0..60).all(|block| cache.holds(block) == model.contains_key(&block)));
    }
}

proptest! {
    #[test]
    fn histories_hold_what_a_plain_model_holds(
        events in events(), capacity in 1_usize..160, which in 0_usize..4,
        (percent, steps) in (0_u8..=100, 0_u32..5),
    ) {
        match which {
            0 => check_history(ClusterReplacement::new(capacity, FirstIn), capacity, events),
            1 => check_history(ClusterReplacement::new(capacity, LastUsed), capacity, events),
            2 => {
                let cache = ClusterReplacement::new(capacity, ByCost::new(PriceSource::new(None)));
                check_history(cache, capacity, events);
            }
            _ => {
                let cache = ClusterReplacement::new(capacity, BySize::default()).with_changed_share(percent, steps);
                check_history(cache, capacity, events);
            }
        }
    }

    #[test]
    fn clusters_of_one_block_are_ranked_like_blocks(
        steps in prop::collection::vec(prop::collection::btree_set(0_u32..24, 0..8), 1..60), slots in 1_usize..12,
    ) {
        for (by_block, by_cluster) in
            [(CachePolicy::Lru, CachePolicy::ClusterLru), (CachePolicy::Fifo, CachePolicy::ClusterFifo)]
        {
            let mut blocks = PolicyReplay::new(by_block, slots * 4);
            let mut clusters = PolicyReplay::new(by_cluster, slots * 4);
            for step in &steps {
                let plain: Vec<(u64, usize)> = step.iter().map(|at| (u64::from(*at), 4)).collect();
                let named: Vec<ReplayedCluster> = step.iter().map(|at| of_blocks(*at, &[u64::from(*at)], 4)).collect();
                let hits: Vec<bool> = clusters.step_of_clusters(&named, &[]).into_iter().map(|block| block.2).collect();
                prop_assert_eq!(blocks.step(&plain), hits);
            }
        }
    }
}

/// Returns a cluster whose blocks have `bytes` each.
fn of_blocks(cluster: u32, blocks: &[u64], bytes: usize) -> ReplayedCluster {
    ReplayedCluster { cluster, profiled: 0.0, blocks: blocks.iter().map(|block| (*block, bytes)).collect() }
}

fn cost(capacity: usize) -> PolicyReplay {
    PolicyReplay::new(CachePolicy::CostEffective { read_cost: Some(COST) }, capacity)
}

/// Replays a step. Returns the blocks that were held.
fn held(cache: &mut PolicyReplay, clusters: &[ReplayedCluster]) -> Vec<u64> {
    let found = cache.step_of_clusters(clusters, &[]);
    found.into_iter().filter(|(.., hit)| *hit).map(|(block, ..)| block).collect()
}

#[test]
fn the_cost_policy_keeps_clusters_that_many_steps_use() {
    let mut cache = cost(400);
    let often = of_blocks(1, &[10, 11], 100);
    for step in 0..40 {
        // A cluster of half of the steps, and clusters that are used once.
        let other = of_blocks(100 + step, &[1000 + 2 * u64::from(step), 1001 + 2 * u64::from(step)], 100);
        held(&mut cache, &if step % 2 == 0 { vec![often.clone(), other] } else { vec![other] });
    }
    assert_eq!(held(&mut cache, &[often]), [10, 11]);
    // The paper's rule, by block: after a step without a use, nothing distinguishes both.
    let mut blocks = cost(200);
    for step in 0..40 {
        blocks.step(&if step % 2 == 0 { vec![(1, 100)] } else { vec![(100 + step, 100), (200 + step, 100)] });
    }
    assert_eq!(blocks.step(&[(1, 100)]), [false]);
}

#[test]
fn the_cost_policy_begins_with_the_frequencies_of_the_profile() {
    let mut cache = cost(100);
    held(&mut cache, &[of_blocks(1, &[10], 100)]);
    held(&mut cache, &[of_blocks(1, &[10], 100)]);
    // Unknown, it does not replace a cluster that was used twice. With a profile it does.
    held(&mut cache, &[of_blocks(2, &[20], 100)]);
    assert_eq!(held(&mut cache, &[of_blocks(1, &[10], 100)]), [10]);
    held(&mut cache, &[ReplayedCluster { profiled: 0.2, ..of_blocks(3, &[30], 100) }]);
    assert_eq!(held(&mut cache, &[of_blocks(3, &[30], 100)]), [30]);
}

#[test]
fn the_cost_policy_prices_a_cluster_by_the_blocks_that_are_missing() {
    // Both clusters have four blocks, each read by a request of its own. Three of the second one's are held already.
    let mut cache = cost(800);
    let shared = [20, 22, 24];
    for _ in 0..3 {
        held(&mut cache, &[of_blocks(9, &shared, 100)]);
    }
    held(&mut cache, &[of_blocks(1, &[1, 3, 5, 7], 100)]);
    let second = of_blocks(2, &[20, 22, 24, 26], 100);
    held(&mut cache, std::slice::from_ref(&second));
    // Cluster 9 keeps the blocks that it uses more often, so cluster 2 takes the bytes of one block.
    assert_eq!((held(&mut cache, &[second]), cache.held_bytes()), (vec![20, 22, 24, 26], 800));
}

#[test]
fn the_cost_policy_prefers_one_request_to_many() {
    // Equal bytes and uses, but the blocks of the first are neighbours.
    let mut cache = cost(400);
    let (run, scattered) = (of_blocks(1, &[1, 2, 3, 4], 100), of_blocks(2, &[10, 20, 30, 40], 100));
    held(&mut cache, std::slice::from_ref(&run));
    held(&mut cache, std::slice::from_ref(&scattered));
    assert_eq!(held(&mut cache, &[scattered]), [10, 20, 30, 40]);
    assert_eq!(held(&mut cache, &[run]), []);
}

#[test]
fn a_cluster_that_grows_brings_its_new_block_in() {
    for policy in [CachePolicy::COST_EFFECTIVE, CachePolicy::ClusterLru, CachePolicy::CLUSTER_ALIGNED] {
        let mut cache = PolicyReplay::new(policy, 400);
        for _ in 0..4 {
            held(&mut cache, &[of_blocks(1, &[1, 3], 100)]);
        }
        held(&mut cache, &[of_blocks(2, &[10, 12], 100)]);
        held(&mut cache, &[of_blocks(1, &[1, 3, 5], 100)]);
        assert_eq!(held(&mut cache, &[of_blocks(1, &[1, 3, 5], 100)]), [1, 3, 5], "{policy}");
        assert_eq!(held(&mut cache, &[of_blocks(2, &[10, 12], 100)]).len(), 1, "{policy}");
    }
}

/// Replays a step of clusters, whose blocks have `bytes` each, on a policy of its own.
fn step(cache: &mut ClusterReplacement<u16, BySize>, clusters: &[(u8, &[u16])], bytes: usize, changed: Option<u8>) {
    let clusters: Vec<(u8, BTreeSet<u16>)> =
        clusters.iter().map(|(cluster, blocks)| (*cluster, blocks.iter().copied().collect())).collect();
    let (blocks, mut named) = request(&clusters, &BTreeSet::new());
    changed.into_iter().for_each(|cluster| named.change(key(cluster), 1));
    let blocks: Vec<Option<(u16, usize)>> = blocks.into_iter().map(|block| Some((block, bytes))).collect();
    cache.activate(&ClusterRequest { blocks: &blocks, clusters: &named });
    for (block, _) in blocks.into_iter().flatten() {
        if !cache.holds(block) {
            cache.admit(block, bytes, &mut Vec::new());
        }
    }
    cache.end_step();
}

#[test]
fn changed_clusters_stay_for_their_steps_and_no_longer() {
    for changes in [true, false] {
        let mut cache = ClusterReplacement::new(400, BySize::default()).with_changed_share(50, 3);
        step(&mut cache, &[(1, &[1, 2])], 100, None);
        // The change is named again in later steps, and counts once.
        let change = changes.then_some(1);
        step(&mut cache, &[(1, &[1, 2])], 100, change);
        let mut stays = Vec::new();
        for at in 0..3_u16 {
            // Smaller clusters than the changed one, which fill half of the cache in each step.
            let blocks: Vec<[u16; 1]> = (0..4).map(|block| [10 + at * 4 + block]).collect();
            let others: Vec<(u8, &[u16])> = blocks.iter().map(|own| (own[0] as u8, &own[..])).collect();
            step(&mut cache, &others, 50, change);
            stays.push(cache.holds(1) && cache.holds(2));
        }
        assert_eq!(stays, if changes { [true, true, false] } else { [true, false, false] });
    }
}

#[test]
fn the_share_of_changed_clusters_is_bounded() {
    let policy = CachePolicy::ClusterAligned { kept_steps: 100, reserved_percent: 50 };
    let mut cache = PolicyReplay::new(policy, 400);
    // Three clusters of 100 bytes change. Two fit the share, the newest ones.
    for cluster in 1..=3 {
        cache.step_of_clusters(&[of_blocks(cluster, &[u64::from(cluster) * 10], 100)], &[cluster]);
    }
    // Small clusters take the rest of the capacity.
    for step in 0..40 {
        held(&mut cache, &[of_blocks(100 + step, &[1000 + 2 * u64::from(step)], 20)]);
    }
    let left: Vec<u64> = (1..=3).flat_map(|c| held(&mut cache, &[of_blocks(c, &[u64::from(c) * 10], 100)])).collect();
    assert_eq!(left, [20, 30]);
}

#[test]
fn the_aligned_policy_keeps_small_clusters_and_some_of_a_step_that_does_not_fit() {
    let mut cache = PolicyReplay::new(CachePolicy::CLUSTER_ALIGNED, 400);
    held(&mut cache, &[of_blocks(1, &[1], 40), of_blocks(2, &[2, 3, 4], 100)]);
    held(&mut cache, &[of_blocks(3, &[8, 9], 100)]);
    assert_eq!(held(&mut cache, &[of_blocks(1, &[1], 40)]), [1]);
    // Every step requests the same 16 clusters, and 8 fit.
    let step: Vec<ReplayedCluster> = (0..16).map(|at| of_blocks(50 + at, &[100 + 2 * u64::from(at)], 50)).collect();
    let mut cache = PolicyReplay::new(CachePolicy::CLUSTER_ALIGNED, 400);
    let hits: usize = (0..20).map(|_| held(&mut cache, &step).len()).sum();
    assert_eq!(hits, 19 * 8);
}

#[test]
fn blocks_without_a_cluster_share_the_cache() {
    for policy in [CachePolicy::COST_EFFECTIVE, CachePolicy::ClusterLru, CachePolicy::CLUSTER_ALIGNED] {
        let mut cache = PolicyReplay::new(policy, 300);
        for _ in 0..3 {
            cache.step(&[(7, 100)]);
            held(&mut cache, &[of_blocks(1, &[1, 2], 100)]);
        }
        assert_eq!(cache.step(&[(7, 100), (1, 100), (2, 100)]), [true, true, true], "{policy}");
        assert_eq!(cache.held_bytes(), 300);
    }
}
