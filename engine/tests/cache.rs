//! The block cache.
//!
//! - Resident blocks save reads and change no bit of attention, under every policy.
//! - A truncation, or a new sequence in recycled space, never hits old blocks.
//! - The capacity is part of the memory limit.

use proptest::prelude::*;
use stratakv::options::{CacheOptions, CachePolicy};
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Selection, Sequence, Store,
    TensorView, attend,
};
use stratakv_testing::rng::Rng;
use stratakv_testing::{TestStore, medium, uniform_layout};

const HEADS: usize = 2;
const DIM: usize = 128;
const GROUP: usize = 4;
const COST: CachePolicy = CachePolicy::COST_EFFECTIVE;
const POLICIES: [CachePolicy; 7] = CachePolicy::ALL;

/// Appends tokens whose keys and values depend on `seed`.
fn append(sequence: &mut Sequence, tokens: usize, seed: u64) {
    let mut rng = Rng(seed);
    for layer in 0..2 {
        let keys: Vec<f32> = (0..tokens * HEADS * DIM).map(|_| rng.unit()).collect();
        let values: Vec<f32> = (0..tokens * HEADS * DIM).map(|_| rng.unit()).collect();
        let view = |data| TensorView::token_major(data, tokens, HEADS, DIM);
        sequence.append(layer, view(&keys), view(&values)).unwrap();
    }
}

fn query() -> Vec<f32> {
    (0..4 * DIM).map(|i| (i % 17) as f32 / 20.0 - 0.4).collect()
}

/// Returns the bits of attention over a selection, and the bytes of the blocks that were read from devices for it.
fn attended(store: &Store, view: &Selection) -> (Vec<u32>, u64) {
    let ticket = store.read(&[view]).submit().unwrap();
    let bytes = ticket.selected_bytes();
    let mut out = vec![0.0; 4 * DIM];
    attend(&query(), view, ticket.wait().unwrap().get(0).unwrap(), &mut out).unwrap();
    (out.iter().map(|x| x.to_bits()).collect(), bytes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_resident_changes_no_bit(
        selections in prop::collection::vec(
            (0_usize..2, prop::collection::btree_set(0_u64..120, 1..60), 0_usize..8),
            4..24,
        ),
        policy in 0..POLICIES.len(),
    ) {
        let cache = CacheOptions::new(ByteSize::mib(2)).policy(POLICIES[policy]);
        let store = TestStore::new(medium());
        let layout = uniform_layout(2, HEADS, DIM, GROUP);
        let mut cached = store.create_sequence(&layout, CreateOptions::new().key("cached")).unwrap();
        let mut plain = store.create_sequence(&layout, CreateOptions::new().key("plain")).unwrap();
        // Two layers have 240 groups of 4 KiB, of which less than half fit.
        for sequence in [&mut cached, &mut plain] {
            append(sequence, 120 * GROUP, 1);
            sequence.commit(Durability::Lazy).unwrap();
        }
        cached.set_cache(Some(cache)).unwrap();
        let mut seed = 1;
        for (layer, groups, action) in selections {
            if action == 0 {
                // A truncation inside a group, then other tokens at the same places.
                seed += 1;
                for sequence in [&mut cached, &mut plain] {
                    sequence.truncate(50 * GROUP as u64 + 1).unwrap();
                    append(sequence, 70 * GROUP + 2, seed);
                    sequence.commit(Durability::Lazy).unwrap();
                }
            }
            let groups: Vec<u64> = groups.into_iter().collect();
            let (with, read) = attended(&store, &cached.select(layer, SelectRequest::groups(&groups)).unwrap());
            let (without, all) = attended(&store, &plain.select(layer, SelectRequest::groups(&groups)).unwrap());
            prop_assert_eq!(with, without);
            prop_assert!(read <= all);
        }
        let status = cached.cache_status().unwrap();
        prop_assert!(status.resident_bytes <= status.capacity_bytes);
        prop_assert_eq!(status.misses, status.admitted + status.refused);
        prop_assert_eq!(status.saved_bytes, status.hits * 4096);
        prop_assert!(plain.cache_status().is_none());
    }
}

#[test]
fn what_was_read_is_not_read_again() {
    for policy in POLICIES {
        let cache = CacheOptions::new(ByteSize::mib(8)).policy(policy);
        let store = TestStore::new(medium().cache(cache));
        let mut sequence =
            store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new().key("s")).unwrap();
        append(&mut sequence, 100 * GROUP, 1);
        sequence.commit(Durability::Sync).unwrap();
        drop(sequence);
        let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
        let groups: Vec<u64> = (0..100).step_by(3).collect();
        let first = attended(&store, &sequence.select(1, SelectRequest::groups(&groups)).unwrap());
        let second = attended(&store, &sequence.select(1, SelectRequest::groups(&groups)).unwrap());
        assert!(first.1 >= 34 * 4096);
        assert_eq!((second.1, second.0), (0, first.0), "{policy:?}");
        let status = store.status().cache.unwrap();
        assert_eq!((status.hits, status.misses, status.admitted), (34, 34, 34));
        assert!((status.hit_rate() - 0.5).abs() < 1e-12);
        assert_eq!(Some(status), sequence.cache_status());
        // The other layer has the same groups in other blocks.
        assert!(attended(&store, &sequence.select(0, SelectRequest::groups(&groups)).unwrap()).1 >= 34 * 4096);
    }
}

#[test]
fn a_new_sequence_in_recycled_space_hits_nothing_of_the_old() {
    let store = TestStore::new(medium().cache(CacheOptions::new(ByteSize::mib(8))));
    for round in 0..6 {
        let mut sequence =
            store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new().key("k")).unwrap();
        append(&mut sequence, 300 * GROUP, round);
        sequence.commit(Durability::Sync).unwrap();
        drop(sequence);
        let mut sequence = store.open_sequence("k", OpenSequence::new()).unwrap();
        let groups: Vec<u64> = (0..300).step_by(5).collect();
        let view = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
        let (with, _) = attended(&store, &view);
        let (again, read) = attended(&store, &view);
        assert_eq!(read, 0);
        drop(view);
        sequence.set_cache(None).unwrap();
        let (without, _) = attended(&store, &sequence.select(0, SelectRequest::groups(&groups)).unwrap());
        assert_eq!((&with, &again), (&without, &without), "round {round}");
        sequence.delete(Durability::Sync).unwrap();
    }
    assert_eq!(store.status().cache.unwrap().hits, 6 * 60);
}

#[test]
fn the_capacity_is_taken_off_the_limit_and_given_back() {
    let mut store = TestStore::new(medium().cache(CacheOptions::new(ByteSize::mib(8))));
    let held = |store: &Store| store.status().memory.used_bytes;
    let before = held(&store);
    assert!(before >= 8 << 20);
    let mut sequence = store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new()).unwrap();
    sequence.set_cache(Some(CacheOptions::new(ByteSize::mib(16)))).unwrap();
    assert!(held(&store) >= before + (16 << 20));
    let error = sequence.set_cache(Some(CacheOptions::new(ByteSize::mib(64)))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit);
    assert!(sequence.cache_status().is_none());
    let error = sequence.set_cache(Some(CacheOptions::new(ByteSize::mib(1)))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    drop(sequence);
    assert_eq!(held(&store), before);
    store.close().unwrap();
    let error = store.options().cache(CacheOptions::new(ByteSize::gib(1))).open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit);
}

#[test]
fn blocks_of_several_sizes_share_a_cache() {
    let store = TestStore::new(medium().cache(CacheOptions::new(ByteSize::mib(2))));
    let mut sequences = Vec::new();
    for (index, group) in [4_u16, 20, 36].into_iter().enumerate() {
        let layout = KvLayout::builder().layers(2).kv_heads(HEADS as u16).head_dim(DIM as u16).group_tokens(group);
        let mut sequence = store.create_sequence(&layout.build().unwrap(), CreateOptions::new()).unwrap();
        append(&mut sequence, 40 * usize::from(group), index as u64);
        sequence.commit(Durability::Lazy).unwrap();
        sequences.push(sequence);
    }
    let mut last = 0;
    for round in 0..30_u64 {
        for sequence in &sequences {
            let groups: Vec<u64> = (0..40).filter(|group| (group + round) % 3 == 0).collect();
            let view = sequence.select((round % 2) as usize, SelectRequest::groups(&groups)).unwrap();
            attended(&store, &view);
        }
        let status = store.status().cache.unwrap();
        assert!(status.resident_bytes <= status.capacity_bytes);
        // The cache keeps admitting blocks.
        assert!(status.admitted > last, "{status:?}");
        last = status.admitted;
    }
}

#[test]
fn a_reader_beside_the_writer_begins_no_step_of_its_own() {
    let cache = CacheOptions::new(ByteSize::mib(2)).policy(COST);
    let store = TestStore::new(medium().cache(cache));
    let mut writer =
        store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new().key("s")).unwrap();
    append(&mut writer, 500 * GROUP, 1);
    writer.commit(Durability::Sync).unwrap();
    drop(writer);
    let mut writer = store.open_sequence("s", OpenSequence::new()).unwrap();
    let reader = writer.reader().unwrap();
    let (own, others): (Vec<u64>, Vec<u64>) = ((0..200).collect(), (200..400).collect());
    for step in 0..6 {
        append(&mut writer, 1, step);
        attended(&store, &writer.select(0, SelectRequest::groups(&own)).unwrap());
        attended(&store, &reader.select(0, SelectRequest::groups(&others)).unwrap());
    }
    let before = store.status().cache.unwrap();
    assert_eq!((before.admitted, before.evicted), (400, 0));
    // Blocks that every step uses are not evicted for blocks that a new reader uses once.
    let late = writer.reader().unwrap();
    attended(&store, &late.select(0, SelectRequest::groups(&(400..500).collect::<Vec<u64>>())).unwrap());
    let after = store.status().cache.unwrap();
    assert_eq!(after.evicted, 0, "{after:?}");
    assert!(after.refused > 0, "{after:?}");
}

/// LeoAM's residency: blocks that every step uses have the highest value. Dense first layers therefore stay resident,
/// with the often selected blocks of other layers, whatever those read in between.
#[test]
fn dense_first_layers_stay_where_they_fit() {
    const LAYERS: u16 = 4;
    const GROUPS: u64 = 300;
    // The dense layer takes 1.2 MiB of the cache. A step uses 2.3 MiB in all.
    let cache = CacheOptions::new(ByteSize::mib(2)).policy(COST);
    let store = TestStore::new(medium().cache(cache));
    let layout = KvLayout::builder().layers(LAYERS).kv_heads(HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(GROUP as u16).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
    let data = vec![0.25_f32; GROUPS as usize * GROUP * HEADS * DIM];
    for layer in 0..usize::from(LAYERS) {
        let view = TensorView::token_major(&data, GROUPS as usize * GROUP, HEADS, DIM);
        sequence.append(layer, view, view).unwrap();
    }
    sequence.commit(Durability::Lazy).unwrap();
    let mut random = 7_u64;
    let mut dense = Vec::new();
    for _ in 0..12 {
        for layer in 0..usize::from(LAYERS) {
            let token = vec![0.5_f32; HEADS * DIM];
            let token = TensorView::token_major(&token, 1, HEADS, DIM);
            sequence.append(layer, token, token).unwrap();
            let view = if layer == 0 {
                sequence.select(layer, SelectRequest::all()).unwrap()
            } else {
                let groups: std::collections::BTreeSet<u64> = (0..100)
                    .map(|_| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        (random >> 33) % GROUPS
                    })
                    .collect();
                sequence.select(layer, SelectRequest::groups(&groups.into_iter().collect::<Vec<_>>())).unwrap()
            };
            let ticket = store.read(&[&view]).submit().unwrap();
            if layer == 0 {
                dense.push(ticket.selected_bytes());
            }
            ticket.wait().unwrap().get(0).unwrap();
        }
    }
    assert_eq!(dense[0], GROUPS * (GROUP * HEADS * DIM * 2 * 2) as u64, "all of it at first");
    assert_eq!(dense[8..], [0; 4], "{dense:?}");
    let status = store.status().cache.unwrap();
    assert!(status.capacity_bytes <= 2 << 20 && status.hits >= 8 * GROUPS, "{status:?}");
}
