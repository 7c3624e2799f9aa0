//! Tests of the upkeep of a layer: which clusters new tokens join, and what a cut leaves.

use super::selector::Swarm;
use super::summary::{ProfiledClusters, SwarmLayer, SwarmSpec, Unactivated};
use crate::retrieval::cluster_choice::{ChosenBy, ClusterOptions, HeadSharing};
use crate::retrieval::cluster_state::{StateReader, StateWriter};
use crate::retrieval::entry_selector::{EntryRequest, EntrySelector};
use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::key_group::KeyGroup;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::sealed_keys::{QueryProfile, SealedKeys};
use crate::retrieval::summary::LayerSummary;
use stratakv_format::DType;

const SHAPE: KeyShape = KeyShape { kv_heads: 1, key_dim: 2, group_tokens: 4, dtype: DType::F32 };
const GROUPS: usize = 100;

/// Returns a key around one of ten directions.
fn key(token: usize) -> [f32; 2] {
    let angle = (token * 7 % 10) as f32 * 0.6 + (token * 13 % 17) as f32 * 0.001;
    [8.0 * angle.cos(), 8.0 * angle.sin()]
}

fn plane(keys: impl Iterator<Item = [f32; 2]>) -> Vec<u8> {
    keys.flatten().flat_map(f32::to_le_bytes).collect()
}

fn push(layer: &mut SwarmLayer, keys: impl Iterator<Item = [f32; 2]>) {
    let (plane, index) = (plane(keys), layer.groups() as u64);
    layer.push(&KeyGroup::new(SHAPE, &plane, index).unwrap());
}

fn options(mean_size: usize, chosen_by: ChosenBy, whole_window: bool) -> ClusterOptions {
    ClusterOptions { mean_size, chosen_by, sharing: HeadSharing::Joint, whole_window, single: false }
}

fn profiled(chosen_by: ChosenBy) -> SwarmLayer {
    profiled_with(options(8, chosen_by, false))
}

fn profiled_with(options: ClusterOptions) -> SwarmLayer {
    let mut layer = SwarmLayer::new(SHAPE, options);
    let mut keys = SealedKeys::new(SHAPE, 0);
    for group in 0..GROUPS {
        let own = || (group * 4..group * 4 + 4).map(key);
        let plane = plane(own());
        keys.push(&KeyGroup::new(SHAPE, &plane, group as u64).unwrap());
        push(&mut layer, own());
    }
    let queries: Vec<[f32; 2]> = (0..30).map(key).collect();
    let queries: Vec<&[f32]> = queries.iter().map(<[f32; 2]>::as_slice).collect();
    layer.profile(&QueryProfile { keys: &keys, shape: SHAPE, queries: &queries, scale: 1.0 }).unwrap();
    layer
}

/// Returns the clusters that hold a token.
fn clusters_of(layer: &SwarmLayer, token: u32) -> Vec<usize> {
    let members = &layer.clusters().unwrap().members;
    (0..members.len()).filter(|cluster| members.of(*cluster).contains(&token)).collect()
}

#[test]
fn tokens_join_the_clusters_of_their_steps_before_those_of_their_age() {
    let mut layer = profiled(ChosenBy::Members);
    let members = &layer.clusters().unwrap().members;
    let clusters = members.len();
    let with_room: Vec<usize> = (0..clusters).filter(|cluster| members.has_room(*cluster)).collect();
    let (of_key, of_steps) = (with_room[0], *with_room.last().unwrap());
    assert_ne!(of_key, of_steps);
    let near = key(members.medoids()[of_key] as usize);
    // Four tokens with the key of one medoid, of which the first is activated together with another.
    push(&mut layer, [near; 4].into_iter());
    layer.advance().unwrap();
    for _ in 0..3 {
        layer.record(vec![of_steps as u32, clusters as u32]);
        layer.advance().unwrap();
    }
    // A selection without an append behind it counts once.
    layer.record(vec![of_key as u32, clusters as u32]);
    layer.record(vec![of_steps as u32, clusters as u32]);
    for group in GROUPS + 1..GROUPS + 65 {
        assert!(clusters_of(&layer, GROUPS as u32 * 4).is_empty(), "group {group}: the window holds it");
        push(&mut layer, (group * 4..group * 4 + 4).map(key));
        layer.advance().unwrap();
    }
    let first = GROUPS as u32 * 4;
    assert_eq!(clusters_of(&layer, first), [of_steps]);
    assert!(!clusters_of(&layer, first + 1).contains(&of_steps) && !clusters_of(&layer, first + 1).is_empty());
    assert!(clusters_of(&layer, first + 4).is_empty());
}

#[test]
fn tokens_that_no_step_activated_join_by_key_or_form_clusters_of_neighbours() {
    for chosen_by in [ChosenBy::Representative, ChosenBy::Members] {
        let mut layer = profiled(chosen_by);
        let clusters = layer.clusters().unwrap().members.len();
        for group in GROUPS..GROUPS + 74 {
            push(&mut layer, (group * 4..group * 4 + 4).map(key));
            layer.advance().unwrap();
        }
        // Of 296 tokens, 256 wait.
        let first = GROUPS as u32 * 4;
        let opened: Vec<usize> = (first..first + 40).map(|token| clusters_of(&layer, token)[0]).collect();
        match chosen_by {
            ChosenBy::Representative => assert!(opened.iter().any(|cluster| *cluster < clusters)),
            ChosenBy::Members => {
                assert!(opened.iter().enumerate().all(|(at, cluster)| *cluster == clusters + at / 8), "{opened:?}");
                // Neither the window nor the medoids have keys.
                let has_keys = matches!(layer.clusters().unwrap().unactivated, Unactivated::Key(_));
                assert!(!has_keys && layer.waiting().bytes() == 0);
            }
        }
        // A cut that shortens the newest cluster begins another one.
        layer.truncate(GROUPS + 3);
        push(&mut layer, (0..4).map(|_| [0.0; 2]));
        assert!(clusters_of(&layer, first + 11).len() == 1 && clusters_of(&layer, first + 12).is_empty());
    }
}

#[test]
fn tokens_of_the_window_are_chosen_one_by_one_or_attended_whole() {
    let mut layer = profiled(ChosenBy::Representative);
    let wanted = GROUPS as u32 * 4 + 22;
    for group in GROUPS..GROUPS + 20 {
        let loud = |token: usize| key(token).map(|x| if token as u32 == wanted { 3.0 * x } else { x });
        push(&mut layer, (group * 4..group * 4 + 4).map(loud));
    }
    layer.advance().unwrap();
    let chooser = |window| Swarm::new(options(8, ChosenBy::Representative, window), None).unwrap();
    let summaries: [&dyn LayerSummary; 1] = [&layer];
    assert_eq!(chooser(true).covered_groups(&summaries).unwrap(), GROUPS);
    assert_eq!(chooser(false).covered_groups(&summaries).unwrap(), GROUPS + 20);
    let query = key(wanted as usize);
    for aggregation in [HeadAggregation::Sum, HeadAggregation::Softmax] {
        let tokens = 0..(GROUPS + 20) * 4;
        let ask = EntryRequest { query: &query, shape: SHAPE, scale: 1.0, aggregation, tokens, budget: 20 };
        let chosen = chooser(false).choose(&summaries, &ask).unwrap();
        assert_eq!(chosen.heads[0][0], wanted, "the token with the best key comes first");
        assert!(chosen.heads[0].len() <= 20 && chosen.heads[0].len() > 10, "{chosen:?}");
    }
}

#[test]
fn a_cluster_whose_medoid_is_cut_keeps_its_key() {
    let mut layer = profiled(ChosenBy::Representative);
    let before = layer.clusters().unwrap();
    let members = &before.members;
    let cut = (1..GROUPS as u32).map(|group| group * 4).find(|cut| {
        (0..members.len()).any(|at| members.medoids()[at] >= *cut && members.of(at).iter().any(|token| token < cut))
    });
    let cut = cut.unwrap();
    let is_left = |at: &usize| members.of(*at).iter().any(|token| *token < cut);
    let left: Vec<usize> = (0..members.len()).filter(is_left).collect();
    let key_of = |clusters: &ProfiledClusters, at: usize| match &clusters.unactivated {
        Unactivated::Key(keys) => keys.key(at),
        Unactivated::Age(_) => panic!("medoids choose by their keys"),
    };
    let keys: Vec<Vec<f32>> = left.iter().map(|at| key_of(before, *at)).collect();
    layer.truncate(cut as usize / 4);
    let after = layer.clusters().unwrap();
    assert_eq!(after.members.len(), left.len());
    assert!(keys.iter().enumerate().all(|(at, key)| *key == key_of(after, at)));
    assert!((0..cut).all(|token| !clusters_of(&layer, token).is_empty()));
    assert!((cut..4 * GROUPS as u32).all(|token| clusters_of(&layer, token).is_empty()));
    // A new token of the same number is another one: it waits.
    push(&mut layer, [[0.0; 2]; 4].into_iter());
    layer.advance().unwrap();
    assert!(clusters_of(&layer, cut).is_empty());
}

#[test]
fn a_state_with_wrong_bytes_is_an_error_or_whole() {
    for chosen_by in [ChosenBy::Representative, ChosenBy::Members] {
        let grow = |layer: &mut SwarmLayer, groups: usize| {
            for group in layer.groups()..groups {
                push(layer, (group * 4..group * 4 + 4).map(key));
            }
        };
        let state = |layer: &SwarmLayer| {
            let mut out = StateWriter::new();
            assert!(layer.put_state(&mut out));
            out.into_bytes()
        };
        let mut layer = profiled(chosen_by);
        for group in GROUPS..GROUPS + 70 {
            layer.record(vec![group as u32 % 7, layer.clusters().unwrap().members.len() as u32]);
            grow(&mut layer, group + 1);
            layer.advance().unwrap();
        }
        layer.record(vec![0, layer.clusters().unwrap().members.len() as u32]);
        let (good, groups) = (state(&layer), layer.groups());
        assert!(good.len() <= layer.state_bytes(), "{} of {}", good.len(), layer.state_bytes());
        let take = |bytes: &[u8]| {
            let mut other = SwarmLayer::new(SHAPE, options(8, chosen_by, false));
            other.take_state(&mut StateReader::new(bytes), groups).map(|()| other)
        };
        let mut restored = take(&good).unwrap();
        grow(&mut restored, groups);
        assert_eq!(state(&restored), good);
        (0..good.len()).step_by(13).for_each(|end| assert!(take(&good[..end]).is_err(), "cut at {end}"));
        for at in (0..good.len()).step_by(11) {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Ok(mut other) = take(&bytes) {
                    grow(&mut other, groups + 2);
                    other.advance().unwrap();
                    other.truncate(groups / 2);
                }
            }
        }
    }
}

#[test]
fn specifications_that_choose_differently_share_no_clusters() {
    use crate::retrieval::summary::SummarySpec;
    let of = |(mean_size, chosen_by, window)| SwarmSpec { options: options(mean_size, chosen_by, window) }.id();
    let (members, medoids) = (ChosenBy::Members, ChosenBy::Representative);
    let ids = [(8, members, false), (8, medoids, false), (4, members, false), (8, members, true)];
    let single = SwarmSpec { options: ClusterOptions { single: true, ..options(8, medoids, false) } }.id();
    let ids = ids.map(of).into_iter().chain([single]);
    assert_eq!(ids.collect::<std::collections::BTreeSet<String>>().len(), 5);
}

#[test]
fn an_entry_is_in_one_cluster_if_the_method_asks_for_it() {
    let most = |single| {
        let mut layer = profiled_with(ClusterOptions { single, ..options(8, ChosenBy::Representative, false) });
        for group in GROUPS..GROUPS + 74 {
            push(&mut layer, (group * 4..group * 4 + 4).map(key));
            layer.record((0..6).chain([layer.clusters().unwrap().members.len() as u32]).collect());
            layer.advance().unwrap();
        }
        let counts = (0..GROUPS as u32 * 4 + 40).map(|token| clusters_of(&layer, token).len());
        counts.fold((usize::MAX, 0), |(least, most), count| (least.min(count), most.max(count)))
    };
    assert_eq!((most(true), most(false)), ((1, 1), (1, 2)));
}
