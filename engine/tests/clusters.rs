//! Methods that choose clusters: what they attend to, however the tokens came, were cut, or stored.

use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use stratakv::retrieval::{
    Adapter, AdapterFit, ChosenUnit, EntryRequest, HeadAggregation, KeyGroup, KeyShape, MethodSpec, SelectorId, methods,
};
use stratakv::{DType, Durability, ErrorKind, SelectRequest, Selection, Sequence, Store};
use stratakv_testing::rng::Rng;
use stratakv_testing::{EntrySequence, EntryShape};

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };
const KV_HEADS: usize = SHAPE.kv_heads;
const Q_HEADS: usize = SHAPE.q_heads;
const DIM: usize = SHAPE.dim;
const GROUP: usize = SHAPE.group;

/// Every method that chooses entries without a profile, some of them in two ways.
const METHODS: [&str; 11] = [
    "balanced:8",
    "balanced:8:joint",
    "dynakv:8",
    "dynakv:8:joint",
    "clusterkv:8",
    "clusterkv:8:joint",
    "kmeans:8",
    "kmeans:8:joint",
    "pqcache:16",
    "pqcache:300",
    "tokens",
];

fn empty() -> EntrySequence {
    EntrySequence::new(SHAPE, Store::options())
}

/// Attaches a method. Members are scored by the adapter of `tck:64`, if this build can fit it.
fn attach(stored: &mut EntrySequence, method: &str) -> SelectorId {
    let spec: MethodSpec = method.parse().unwrap();
    let adapter = spec.adapter_name().and_then(|_| adapter());
    stored.sequence.attach(spec.selector(adapter).unwrap()).unwrap()
}

/// Returns the adapter of `tck:64`, fitted to keys as [`EntryShape::rows`] makes them.
#[cfg(feature = "calibrate")]
fn adapter() -> Option<Arc<Adapter>> {
    use stratakv::retrieval::{Calibrator, CodeOptions};
    let mut calibrator = Calibrator::new(&[(KV_HEADS, DIM)]);
    calibrator.keys(0, &SHAPE.rows(5000, 800, 6));
    for decode in [true, false] {
        calibrator.queries(0, &SHAPE.rows(0, 400, 1), Q_HEADS, decode);
    }
    let options = CodeOptions { bits: 64, dimension_bits_max: 4, decode_only: false };
    Some(Arc::new(calibrator.codes("tck-64", 1, options).unwrap()))
}

#[cfg(not(feature = "calibrate"))]
fn adapter() -> Option<Arc<Adapter>> {
    None
}

fn entries(selection: &Selection) -> [Vec<u64>; KV_HEADS] {
    let entries = SHAPE.entries(selection);
    [0, 1].map(|head| entries[head].clone())
}

#[test]
fn every_cluster_is_full_attention_to_the_bit() {
    let mut stored = empty();
    stored.append(1003, 1);
    let all = stored.sequence.select(0, SelectRequest::all()).unwrap();
    for method in ["balanced:4", "dynakv:4", "clusterkv:4", "kmeans:4", "kmeans:4:joint", "pqcache:16", "tokens"] {
        let id = attach(&mut stored, method);
        for seed in 0..4 {
            let chosen = stored.select(id, &SHAPE.query(seed), 1003);
            assert_eq!(chosen.tokens(), 1003);
            assert_eq!(stored.output(&SHAPE.query(seed), &chosen), stored.output(&SHAPE.query(seed), &all), "{method}");
            // Less than everything is left to the method, which leaves out a cluster or single tokens.
            let chosen = stored.select(id, &SHAPE.query(seed), 995);
            let is_full = |own: &Vec<u64>| match method {
                "pqcache:16" | "tokens" => own.len() == 995,
                _ => (900..=995).contains(&own.len()),
            };
            assert!(entries(&chosen).iter().all(is_full), "{method}: {chosen:?}");
        }
    }
}

#[test]
fn heads_attend_to_clusters_of_their_own_or_to_joint_ones() {
    let mut stored = empty();
    stored.append(1200, 2);
    let [per_head, joint] = ["dynakv:8", "dynakv:8:joint"].map(|method| attach(&mut stored, method));
    let chosen = stored.select(per_head, &SHAPE.query(1), 128);
    let [a, b] = entries(&chosen);
    assert!(a != b && a.len() <= 128 && b.len() <= 128 && a.len().min(b.len()) > 90, "{} {}", a.len(), b.len());
    assert!(chosen.cluster_runs().unwrap() > 2);
    let [a, b] = entries(&stored.select(joint, &SHAPE.query(1), 128));
    assert!(a == b && (90..=128).contains(&a.len()), "{}", a.len());
}

#[test]
fn a_method_without_clusters_yet_attends_to_everything() {
    for method in ["dynakv:8", "clusterkv:8", "kmeans:8", "pqcache:16"] {
        let mut stored = empty();
        let id = attach(&mut stored, method);
        stored.append(200, 3);
        assert_eq!(stored.select(id, &SHAPE.query(0), 64).tokens(), 200, "{method}");
        // At 320 tokens the first clusters are built, without the newest 64 tokens.
        stored.append(120, 3);
        assert!(entries(&stored.select(id, &SHAPE.query(0), 64)).iter().all(|own| own.len() <= 64), "{method}");
    }
}

#[test]
fn new_tokens_of_clusterkv_are_chosen_one_by_one_until_they_are_clustered() {
    let mut stored = empty();
    stored.append(600, 4);
    let id = attach(&mut stored, "clusterkv:8");
    // Of 600 tokens, 536 are clustered. Then 304 and the newest 64 are clusters of one, which are no runs.
    stored.append(304, 4);
    let few = stored.select(id, &SHAPE.query(0), 64);
    stored.append(16, 4);
    let many = stored.select(id, &SHAPE.query(0), 64);
    for own in entries(&few).iter().chain(&entries(&many)) {
        assert_eq!(own.len(), 64, "tokens of their own fill the budget: {own:?}");
    }
    let new = |selection: &Selection| selection.entries(0).filter(|token| (536..840).contains(token)).count();
    assert!(new(&few) > 0 && few.cluster_runs() < many.cluster_runs(), "{:?} {:?}", few, many);
}

/// Returns the share of the weight of full attention that a selection keeps, over all query heads.
fn kept_weight(query: &[f32], keys: &[f32], selection: &Selection) -> f64 {
    let mut kept = 0.0;
    for (at, q) in query.chunks(DIM).enumerate() {
        let head = at * KV_HEADS / Q_HEADS;
        let weight = |token: usize| -> f64 {
            let key = &keys[(token * KV_HEADS + head) * DIM..][..DIM];
            let logit: f32 = q.iter().zip(key).map(|(q, k)| q * k).sum();
            f64::from(logit / (DIM as f32).sqrt()).exp()
        };
        let all: f64 = (0..keys.len() / (KV_HEADS * DIM)).map(weight).sum();
        kept += selection.entries(head).map(|token| weight(token as usize)).sum::<f64>() / all;
    }
    kept / Q_HEADS as f64
}

#[test]
fn the_best_single_tokens_keep_the_most_attention_weight() {
    let mut stored = empty();
    stored.append(1000, 6);
    let keys = SHAPE.rows(0, 1000, 6);
    let mut weights = Vec::new();
    let with_codes = ["balanced:8:members", "dynakv:8:members:heads", "clusterkv:8:members:heads", "kmeans:8:members"];
    let with_codes = with_codes.iter().filter(|_| adapter().is_some());
    for method in ["tokens"].iter().chain(&METHODS).chain(with_codes) {
        let id = attach(&mut stored, method);
        let kept: f64 =
            (0..8).map(|at| kept_weight(&SHAPE.query(at), &keys, &stored.select(id, &SHAPE.query(at), 128))).sum();
        weights.push((*method, kept / 8.0));
    }
    let best = weights[0].1;
    // The softmax by which tokens are ranked leaves out the window, so its choice is not the best to the last digit.
    assert!(weights.iter().all(|(_, kept)| *kept <= best + 0.01 && *kept > 0.6 * best), "{weights:?}");
}

#[test]
fn a_method_that_takes_no_profile_says_so() {
    let mut stored = empty();
    stored.append(300, 3);
    let id = attach(&mut stored, "dynakv:8");
    let query = SHAPE.query(0);
    for refused in [
        stored.sequence.profile(id, 0, &[&query], None),
        stored.sequence.profile(id, 3, &[&query], None),
        stored.sequence.profile(id, 0, &[], None),
        stored.sequence.profile(id, 0, &[&query[1..]], None),
        stored.sequence.profile(id, 0, &[&query], Some(f32::NAN)),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

/// Returns the entries that wait for each split, the most first.
fn buffers(sequence: &Sequence, id: SelectorId) -> Vec<usize> {
    let mut sizes = sequence.selector_summaries(id, 0).unwrap()[0].buffer_sizes();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes
}

#[test]
fn splits_in_idle_time_take_the_fullest_buffers_first() {
    let mut stored = empty();
    stored.append(640, 6);
    let dynakv = attach(&mut stored, "dynakv:8");
    // Other centres flag clusters.
    stored.append(320, 9);
    let before = buffers(&stored.sequence, dynakv);
    assert!(before.len() > 3, "{before:?}");
    assert_eq!(stored.sequence.split_clusters(dynakv, 0).unwrap(), 0);
    assert_eq!(buffers(&stored.sequence, dynakv), before);
    assert_eq!(stored.sequence.split_clusters(dynakv, 2).unwrap(), 2);
    assert_eq!(buffers(&stored.sequence, dynakv), before[2..]);
    assert_eq!(stored.sequence.split_clusters(dynakv, 1000).unwrap(), before.len() - 2);
    assert_eq!(buffers(&stored.sequence, dynakv), []);
    let all = stored.select(dynakv, &SHAPE.query(1), 960);
    assert!(entries(&all).iter().all(|own| own.len() == 960));
    for method in ["kmeans:8", "balanced:8", "tokens"] {
        let other = attach(&mut stored, method);
        assert_eq!(stored.sequence.split_clusters(other, 9).unwrap(), 0, "{method}");
    }
    // Selectors belong to one handle. A reader has clusters of its own.
    let mut reader = stored.sequence.reader().unwrap();
    assert_eq!(reader.split_clusters(dynakv, 9).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let own = reader.attach(SHAPE.selector("dynakv:8")).unwrap();
    assert_eq!(reader.split_clusters(own, 9).unwrap(), 0);
    stored.sequence.detach(dynakv).unwrap();
    assert_eq!(stored.sequence.split_clusters(dynakv, 9).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Splits between appends, selections and cuts lose no token, and a later append goes on from them.
    #[test]
    fn splits_in_idle_time_keep_every_token_in_one_place(
        steps in prop::collection::vec((0_u8..10, 1_usize..120), 1..24), at_once in 1_usize..600,
        method in prop::sample::select(vec!["dynakv:4", "dynakv:8", "dynakv:8:joint"]), seed in 0_u64..50,
    ) {
        let mut stored = empty();
        stored.append(at_once, seed);
        let id = attach(&mut stored, method);
        for (step, (what, size)) in steps.into_iter().enumerate() {
            match what {
                0..=3 => stored.append(size, seed + step as u64),
                4 => {
                    let left = stored.sequence.len().saturating_sub(size as u64).max(1);
                    stored.sequence.truncate(left).unwrap();
                }
                5 => drop(stored.select(id, &SHAPE.query(step as u64), 64)),
                6 => {
                    let length = stored.sequence.len() as usize;
                    let all = stored.select(id, &SHAPE.query(step as u64), length);
                    prop_assert!(entries(&all).iter().all(|own| own.len() == length), "{} tokens", length);
                }
                _ => {
                    let (before, limit) = (buffers(&stored.sequence, id), size % 9);
                    let split = stored.sequence.split_clusters(id, limit).unwrap();
                    prop_assert_eq!(split, limit.min(before.len()));
                    prop_assert_eq!(buffers(&stored.sequence, id), &before[split..]);
                }
            }
        }
        let length = stored.sequence.len() as usize;
        let all = stored.select(id, &SHAPE.query(seed), length);
        prop_assert!(entries(&all).iter().all(|own| own.len() == length), "{} tokens", length);
    }

    /// Clusters depend on tokens, cuts and selections, not on the pieces in which tokens are appended.
    #[test]
    fn pieces_of_appends_do_not_change_what_is_selected(
        pieces in prop::collection::vec(1_usize..90, 1..20), at_once in 1_usize..600,
        method in prop::sample::select(METHODS.to_vec()), cut in 0_usize..700, seed in 0_u64..50,
    ) {
        let total: usize = pieces.iter().sum();
        let mut both = Vec::new();
        for whole in [true, false] {
            let mut stored = empty();
            stored.append(at_once, seed);
            let id = attach(&mut stored, method);
            let _ = stored.select(id, &SHAPE.query(seed), 64);
            let parts = if whole { vec![total] } else { pieces.clone() };
            parts.into_iter().for_each(|tokens| stored.append(tokens, seed));
            let first = entries(&stored.select(id, &SHAPE.query(seed + 1), 96));
            stored.sequence.truncate(cut.min(at_once + total) as u64).unwrap();
            stored.sequence.commit(Durability::Lazy).unwrap();
            let parts = if whole { vec![total] } else { pieces.clone() };
            parts.into_iter().for_each(|tokens| stored.append(tokens, seed ^ 5));
            let chosen = stored.select(id, &SHAPE.query(seed + 2), 96);
            let second = entries(&chosen);
            let length = stored.sequence.len();
            for own in &second {
                prop_assert!((length - length % GROUP as u64..length).all(|token| own.contains(&token)));
                let most = if method.starts_with("clusterkv") { 320 + 16 } else { 96 };
                prop_assert!(own.len() <= most || length < 256 || own.len() as u64 == length, "{} {length}", own.len());
            }
            both.push((first, second, stored.output(&SHAPE.query(seed), &chosen)));
        }
        prop_assert_eq!(&both[0], &both[1]);
    }

    /// Keys that could not be read leave a split undone. A cut then removes tokens that clusters and the window hold.
    #[test]
    fn a_cut_while_a_split_waits_for_keys_leaves_no_token_behind(
        pushed in 1_usize..40, cut in 1_usize..90, method in prop::sample::select(vec!["dynakv:4", "dynakv:8:joint"]),
    ) {
        let (shape, selector) = (SHAPE.keys(), SHAPE.selector(method));
        let mut layer = selector.summaries()[0].layer(0, shape).unwrap();
        let plane = |group: usize, seed: u64| -> Vec<u8> {
            SHAPE.rows(group * GROUP, GROUP, seed).into_iter().flat_map(f32::to_le_bytes).collect()
        };
        let mut planes: Vec<Vec<u8>> = Vec::new();
        // Groups of other centres split clusters. No key is supplied for the second centres.
        for (groups, seed) in [(50, 1), (pushed, 9), (60, 5)] {
            for _ in 0..groups {
                planes.push(plane(planes.len(), seed));
                let group = planes.len() - 1;
                layer.push(&KeyGroup::new(shape, &planes[group], group as u64).unwrap());
            }
            layer.attached();
            let mut wanted = layer.advance().unwrap();
            if seed == 9 {
                planes.truncate(cut);
                layer.truncate(cut);
                continue;
            }
            while !wanted.is_empty() {
                prop_assert!(wanted.iter().all(|group| *group < planes.len() as u64), "{wanted:?} of {}", planes.len());
                for group in wanted {
                    layer.supply(&KeyGroup::new(shape, &planes[group as usize], group).unwrap());
                }
                wanted = layer.advance().unwrap();
            }
        }
        let (query, tokens) = (SHAPE.query(3), 0..planes.len() * GROUP);
        let (budget, aggregation) = (tokens.len(), HeadAggregation::Softmax);
        let ask = EntryRequest { query: &query, shape, scale: 1.0, aggregation, tokens: tokens.clone(), budget };
        let entries = selector.entries().unwrap();
        prop_assert_eq!(entries.covered_groups(&[layer.as_ref()]).unwrap(), planes.len());
        for own in entries.choose(&[layer.as_ref()], &ask).unwrap().heads {
            let distinct: BTreeSet<u32> = own.iter().copied().collect();
            prop_assert!(distinct.len() == own.len() && distinct.into_iter().eq(0..tokens.end as u32), "{own:?}");
        }
    }

    /// The engine accounts the bytes before it pushes groups, and the summary must keep within them.
    #[test]
    fn summaries_take_at_most_the_bytes_that_they_announced(
        steps in prop::collection::vec((0_usize..60, any::<bool>(), 0_usize..90), 1..10), attached_at in 0_usize..4,
        (key_dim, group_tokens, mean_size) in (1_usize..9, 1_usize..20, 1_usize..20), seed in any::<u64>(),
    ) {
        let shape = KeyShape { kv_heads: KV_HEADS, key_dim, group_tokens, dtype: DType::F32 };
        let mut random = Rng(seed);
        let entry_methods = methods().iter().filter(|method| method.unit != ChosenUnit::Groups);
        for method in entry_methods.filter(|method| method.adapter == AdapterFit::None) {
            let sized = format!("{}:{mean_size}", method.name);
            let spec: MethodSpec = sized.parse().or_else(|_| method.name.parse()).unwrap();
            let selector = spec.selector(None).unwrap();
            let mut layer = selector.summaries()[0].layer(0, shape).unwrap();
            let mut planes: Vec<Vec<u8>> = Vec::new();
            for (step, (groups, advances, left)) in steps.iter().enumerate() {
                let most = layer.bytes_for(*groups);
                for index in planes.len()..planes.len() + groups {
                    let elements = KV_HEADS * group_tokens * key_dim;
                    let topic = (random.below(9) as f32, 0.1 * random.unit());
                    let plane = (0..elements).flat_map(|_| (topic.0 + topic.1 * random.unit()).to_le_bytes()).collect();
                    planes.push(plane);
                    layer.push(&KeyGroup::new(shape, &planes[index], index as u64).unwrap());
                    prop_assert!(layer.bytes() <= most, "{spec}: {} of {most}", layer.bytes());
                }
                if step == attached_at {
                    layer.attached();
                }
                let mut wanted = if *advances { layer.advance().unwrap() } else { Vec::new() };
                while !wanted.is_empty() {
                    for group in wanted {
                        layer.supply(&KeyGroup::new(shape, &planes[group as usize], group).unwrap());
                    }
                    prop_assert!(layer.bytes() <= most, "{spec} in a split: {} of {most}", layer.bytes());
                    wanted = layer.advance().unwrap();
                }
                prop_assert!(layer.bytes() <= most, "{spec}: {} of {most}", layer.bytes());
                prop_assert!(layer.bytes() <= layer.bytes_for(0), "{spec}");
                if let Some(entries) = selector.entries().filter(|_| step % 2 == 0) {
                    let covered = entries.covered_groups(&[layer.as_ref()]).unwrap_or(0);
                    let tokens = 0..covered * group_tokens;
                    let query: Vec<f32> = (0..Q_HEADS * key_dim).map(|_| random.unit()).collect();
                    let aggregation = HeadAggregation::Softmax;
                    let ask = EntryRequest { query: &query, shape, scale: 1.0, aggregation, tokens, budget: 64 };
                    if covered > 0 {
                        let _ = entries.choose(&[layer.as_ref()], &ask).unwrap();
                    }
                }
                if *left < 30 {
                    planes.truncate(*left);
                    layer.truncate(planes.len());
                    prop_assert!(layer.bytes() <= layer.bytes_for(0), "{spec} after a cut");
                }
            }
        }
    }
}
