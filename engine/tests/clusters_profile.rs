//! Methods that need recorded queries: what they attend to after a profile, growth and cuts.

use proptest::prelude::*;
use std::collections::BTreeSet;
use stratakv::retrieval::clusters::ClusterLists;
use stratakv::retrieval::{EntryRequest, HeadAggregation, KeyGroup, MethodSpec, QueryProfile, SealedKeys};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, ErrorKind, OpenSequence, SelectRequest, Selection, Sequence, Store,
};
use stratakv_testing::{EntrySequence, EntryShape};

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };
const KV_HEADS: usize = SHAPE.kv_heads;
const Q_HEADS: usize = SHAPE.q_heads;
const DIM: usize = SHAPE.dim;
const GROUP: usize = SHAPE.group;

fn empty() -> EntrySequence {
    EntrySequence::new(SHAPE, Store::options())
}

/// Returns the tokens that every KV head attends to, each once.
fn entries(selection: &Selection) -> Vec<u64> {
    let mut heads = SHAPE.entries(selection);
    assert_eq!(heads[0], heads[1], "an entry of these methods is a token of all heads");
    heads.swap_remove(0)
}

#[test]
fn a_method_without_a_profile_says_what_to_call() {
    for method in ["swarm", "swarm:4", "infllm:16"] {
        let mut stored = empty();
        stored.append(600, 1);
        let id = stored.attach(method);
        let error = stored.try_select(id, &SHAPE.query(0), 64, HeadAggregation::Softmax).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("call Sequence::profile"), "{error}");
        // A budget that holds everything needs no choice.
        assert_eq!(stored.select(id, &SHAPE.query(0), 600).tokens(), 600);
        assert_eq!(stored.sequence.selector_bytes(id).unwrap(), 0);
        stored.profile(id);
        assert!(entries(&stored.select(id, &SHAPE.query(0), 64)).len() <= 64);
        assert!(stored.sequence.selector_bytes(id).unwrap() > 0);
        // A cut to nothing forgets the profile.
        stored.sequence.truncate(3).unwrap();
        stored.append(600, 2);
        assert!(stored.try_select(id, &SHAPE.query(0), 64, HeadAggregation::Softmax).is_err());
    }
}

#[test]
fn entries_are_attended_once_and_all_of_them_are_full_attention_to_the_bit() {
    for method in ["swarm:8", "swarm:3", "swarm:8:members", "infllm:16", "infllm:5"] {
        let mut stored = empty();
        stored.append(1003, 3);
        let id = stored.attach(method);
        stored.profile(id);
        let all = stored.sequence.select(0, SelectRequest::all()).unwrap();
        for seed in 0..4 {
            let chosen = stored.select(id, &SHAPE.query(seed), 1003);
            assert_eq!(stored.output(&SHAPE.query(seed), &chosen), stored.output(&SHAPE.query(seed), &all));
            // One group less than everything is left to the method, which leaves out some cluster.
            let most = entries(&stored.select(id, &SHAPE.query(seed), 995)).len();
            assert!((900..=995).contains(&most), "{method}: {most}");
            for heads in [HeadAggregation::Sum, HeadAggregation::Softmax, HeadAggregation::GroupSoftmax] {
                let chosen = stored.try_select(id, &SHAPE.query(seed), 200, heads).unwrap();
                let entries = entries(&chosen).len();
                assert!(entries <= 200 && entries > 180 && chosen.cluster_runs().unwrap() > 3, "{method}: {entries}");
            }
        }
    }
}

#[test]
fn clusters_hold_what_the_profile_activated_together() {
    let mut stored = empty();
    stored.append(1200, 4);
    // Blocks are of consecutive tokens, which here have nothing in common.
    let methods = [("swarm:8", 2.0), ("swarm:8:members", 2.0), ("infllm:8", 1.5)];
    // The chosen tokens hold more of the attention weight than as many of the newest.
    let weight = |tokens: &[u64]| -> f32 {
        let (keys, query) = (SHAPE.rows(0, 1200, 4), SHAPE.query(2));
        let mut sum = 0.0;
        for (head, row) in query.chunks(DIM).enumerate() {
            let power = |token: usize| {
                let key = &keys[(token * KV_HEADS + head / (Q_HEADS / KV_HEADS)) * DIM..][..DIM];
                (key.iter().zip(row).map(|(k, q)| k * q).sum::<f32>() / (DIM as f32).sqrt()).exp()
            };
            let all: f32 = (0..1200).map(power).sum();
            sum += tokens.iter().map(|token| power(*token as usize)).sum::<f32>() / all;
        }
        sum
    };
    let newest: Vec<u64> = (1070..1200).collect();
    for (method, factor) in methods {
        let id = stored.attach(method);
        stored.profile(id);
        let found = weight(&entries(&stored.select(id, &SHAPE.query(2), 130)));
        assert!(found > factor * weight(&newest), "{method}: {found} {}", weight(&newest));
    }
}

#[test]
fn tokens_that_are_appended_leave_the_window_for_clusters() {
    // The most tokens that wait, and the fewest once that many were appended.
    let swarm = 256 - GROUP as u64;
    let windows = [("swarm:8:window", 256, swarm), ("swarm:8:members:window", 256, swarm), ("infllm:32", 64, 32)];
    for (method, window, least) in windows {
        let mut stored = empty();
        stored.append(800, 5);
        let id = stored.attach(method);
        stored.profile(id);
        for step in 0..60 {
            stored.append(12, 5);
            let chosen = stored.select(id, &SHAPE.query(step % 7), window + 150);
            let entries = entries(&chosen);
            assert!(entries.len() <= window + 150, "{method}: {}", entries.len());
            let length = stored.sequence.len();
            let waits = (length - 800).min(least);
            assert!((length - waits..length).all(|token| entries.contains(&token)), "{method}: {length}");
        }
        // All of them can still be attended.
        let length = stored.sequence.len() as usize;
        let entries = entries(&stored.select(id, &SHAPE.query(1), length - GROUP)).len();
        assert!(entries > length - 100, "{method}: {entries} of {length}");
    }
}

#[test]
fn wrong_profiles_and_names_are_refused() {
    let mut stored = empty();
    stored.append(300, 3);
    let ids = ["swarm:8", "infllm:16"].map(|method| stored.attach(method));
    let query = SHAPE.query(0);
    for id in ids {
        for refused in [
            stored.sequence.profile(id, 3, &[&query], None),
            stored.sequence.profile(id, 0, &[], None),
            stored.sequence.profile(id, 0, &[&query[1..]], None),
            stored.sequence.profile(id, 0, &[&query, &query[..KV_HEADS * DIM]], None),
            stored.sequence.profile(id, 0, &[&query], Some(f32::NAN)),
            stored.sequence.profile(id, 0, &[&query], Some(0.0)),
            stored.sequence.profile(id, 0, &[&[f32::MAX; Q_HEADS * DIM]], Some(f32::MAX)),
        ] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        // Nothing changed: there is no profile yet.
        assert!(stored.try_select(id, &query, 64, HeadAggregation::Softmax).is_err());
    }
    for name in ["swarm:heads", "swarm:4:members", "infllm:100000"] {
        let error = name.parse::<MethodSpec>().unwrap().selector(None).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}");
    }
    for name in ["infllm:members", "infllm:0", "swarm:0"] {
        assert!(name.parse::<MethodSpec>().is_err(), "{name}");
    }
    let mut empty = empty();
    let id = empty.attach("swarm:8");
    assert_eq!(empty.sequence.profile(id, 0, &[&query], None).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_profile_that_memory_does_not_hold_is_refused() {
    let mut stored = EntrySequence::new(SHAPE, Store::options().memory_limit(ByteSize::mib(16)));
    stored.append(3000, 2);
    let id = stored.attach("swarm:8");
    let error = stored.sequence.profile(id, 0, &[&SHAPE.query(1)], None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert!(stored.try_select(id, &SHAPE.query(0), 64, HeadAggregation::Softmax).is_err());
    assert_eq!(stored.sequence.selector_bytes(id).unwrap(), 0);
    // Blocks take less.
    let id = stored.attach("infllm:64");
    stored.profile(id);
    assert!(entries(&stored.select(id, &SHAPE.query(0), 128)).len() <= 128);
}

/// Returns the clusters that methods with and without a profile make of a sequence.
fn clusters(sequence: &mut Sequence) -> Vec<Vec<ClusterLists>> {
    let queries: Vec<Vec<f32>> = (0..40).map(|seed| SHAPE.query(seed)).collect();
    let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    let of = |method| {
        let id = sequence.attach(SHAPE.selector(method)).unwrap();
        let takes_profile =
            sequence.selector_summaries(id, 0).unwrap().iter().any(|summary| summary.profile_bytes(1).is_some());
        if takes_profile {
            assert!(sequence.selector_summaries(id, 0).unwrap()[0].cluster_lists().is_empty(), "{method}");
            sequence.profile(id, 0, &queries, None).unwrap();
        }
        sequence.selector_summaries(id, 0).unwrap()[0].cluster_lists()
    };
    ["swarm:4", "swarm:4:members", "infllm:16", "dynakv:8", "dynakv:8:joint", "kmeans:8", "pqcache"].map(of).to_vec()
}

#[test]
fn a_sequence_that_is_opened_again_has_the_same_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&SHAPE.layout(), CreateOptions::new().key("s")).unwrap();
    SHAPE.append(&mut sequence, &SHAPE.rows(0, 603, 3), &SHAPE.rows(0, 603, 4)).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    let before = clusters(&mut sequence);
    sequence.close().unwrap();
    store.close().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let mut sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    let after = clusters(&mut sequence);
    assert_eq!(before, after);
    let lists: Vec<usize> = after.iter().map(Vec::len).collect();
    assert_eq!(lists, [1, 1, 1, KV_HEADS, 1, KV_HEADS, 0], "one list per KV head, or one for all");
    for list in after.iter().flatten() {
        let members: BTreeSet<u32> = list.iter().flatten().copied().collect();
        assert!(members.iter().copied().eq(0..members.len() as u32), "the newest tokens are in no cluster");
        assert!((500..=600).contains(&members.len()) && list.iter().all(|own| !own.is_empty()));
    }
}

#[test]
fn a_reader_has_a_profile_of_its_own() {
    let mut stored = empty();
    stored.append(600, 7);
    let mut reader = stored.sequence.reader().unwrap();
    let id = reader.attach(SHAPE.selector("swarm:8")).unwrap();
    reader.profile(id, 0, &[&SHAPE.query(1), &SHAPE.query(2)], None).unwrap();
    stored.append(100, 7);
    let query = SHAPE.query(1);
    let request = SelectRequest::query(&query).budget(Budget::tokens(64)).selector(id);
    assert!(reader.select(0, request).unwrap().entries(0).count() <= 64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The engine accounts the bytes before it pushes groups, and the summary must keep within them.
    #[test]
    fn summaries_take_at_most_the_bytes_that_they_announced(
        steps in prop::collection::vec((0_usize..60, prop::option::of(0_usize..300)), 1..12),
        which in 0_usize..4, seed in 0_u64..99,
    ) {
        let method = ["swarm:8", "swarm:2", "infllm:16", "infllm:3"][which];
        let shape = SHAPE.keys();
        let selector = SHAPE.selector(method);
        let mut layer = selector.summaries()[0].layer(0, shape).unwrap();
        let mut keys = SealedKeys::new(shape, 0);
        let push = |index: usize, seed: u64| -> Vec<u8> {
            SHAPE.rows(index * GROUP, GROUP, seed).into_iter().flat_map(f32::to_le_bytes).collect()
        };
        for index in 0..20 {
            let plane = push(index, seed);
            let group = KeyGroup::new(shape, &plane, index as u64).unwrap();
            keys.push(&group);
            layer.push(&group);
        }
        let recorded: Vec<Vec<f32>> = (0..9).map(|seed| SHAPE.query(seed)).collect();
        let queries: Vec<&[f32]> = recorded.iter().map(Vec::as_slice).collect();
        let most = layer.profile_bytes(queries.len()).unwrap();
        layer.profile(&QueryProfile { keys: &keys, shape, queries: &queries, scale: 0.4 }).unwrap();
        prop_assert!(layer.bytes_for(0) <= most, "{} of {most}", layer.bytes_for(0));
        for (groups, cut) in steps {
            let most = layer.bytes_for(groups);
            for index in layer.groups()..layer.groups() + groups {
                let plane = push(index, seed ^ 3);
                layer.push(&KeyGroup::new(shape, &plane, index as u64).unwrap());
            }
            prop_assert!(layer.bytes() <= most, "{} of {most}", layer.bytes());
            layer.advance().unwrap();
            prop_assert!(layer.bytes() <= most, "{} of {most}", layer.bytes());
            prop_assert!(layer.bytes_for(0) <= most && layer.bytes() <= layer.bytes_for(0));
            let entries = selector.entries().unwrap();
            if let Ok(covered) = entries.covered_groups(&[layer.as_ref()]) {
                let (tokens, aggregation) = (0..covered * GROUP, HeadAggregation::Softmax);
                // With room for all, a choice has each covered token once.
                let (query, budget) = (queries[0], tokens.len());
                let ask = EntryRequest { query, shape, scale: 0.4, aggregation, budget, tokens };
                let chosen = entries.choose(&[layer.as_ref()], &ask).unwrap();
                let distinct: BTreeSet<u32> = chosen.heads[0].iter().copied().collect();
                prop_assert!(distinct.len() == chosen.heads[0].len() && distinct.len() == covered * GROUP);
                prop_assert!(layer.bytes() <= layer.bytes_for(0));
            }
            if let Some(cut) = cut {
                layer.truncate(cut);
                prop_assert!(layer.bytes() <= layer.bytes_for(0));
            }
        }
    }

    /// Clusters depend on tokens, cuts, profiles and selections, not on the pieces in which tokens are appended.
    #[test]
    fn pieces_of_appends_and_cuts_do_not_change_what_is_selected(
        pieces in prop::collection::vec(1_usize..120, 1..12), at_once in 16_usize..500, which in 0_usize..5,
        cut in 8_usize..900, seed in 0_u64..50, raw in any::<bool>(),
    ) {
        let method = ["swarm:8", "swarm:4", "swarm:8:members", "infllm:16", "infllm:13"][which];
        let heads = if raw { HeadAggregation::Sum } else { HeadAggregation::Softmax };
        let total: usize = pieces.iter().sum();
        let mut both = Vec::new();
        for whole in [true, false] {
            let mut stored = empty();
            let parts = if whole { vec![total] } else { pieces.clone() };
            stored.append(at_once, seed);
            let id = stored.attach(method);
            stored.profile(id);
            let mut found = Vec::new();
            // Rounds of growth, a cut, and growth with other tokens.
            for round in 0..3 {
                let chosen = stored.try_select(id, &SHAPE.query(seed + round), 40, heads).unwrap();
                found.push((entries(&chosen), stored.output(&SHAPE.query(seed), &chosen)));
                parts.iter().for_each(|tokens| stored.append(*tokens, seed));
            }
            stored.sequence.truncate(cut.min(at_once + 3 * total) as u64).unwrap();
            for round in 0..3 {
                let chosen = stored.try_select(id, &SHAPE.query(seed + round), 60, heads).unwrap();
                found.push((entries(&chosen), stored.output(&SHAPE.query(seed), &chosen)));
                parts.iter().for_each(|tokens| stored.append(*tokens, seed ^ 5));
            }
            let bytes = stored.sequence.selector_bytes(id).unwrap();
            prop_assert!(bytes > 0 && bytes < 4 << 20);
            both.push(found);
        }
        prop_assert_eq!(&both[0], &both[1]);
    }
}
