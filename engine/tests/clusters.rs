//! Methods that choose clusters: what they attend to, however the tokens came, were cut, or stored.

use proptest::prelude::*;
use std::collections::BTreeSet;
use stratakv::retrieval::{HeadAggregation, MethodSpec, SelectorId};
use stratakv::{
    Budget, CreateOptions, DType, Durability, ErrorKind, KvLayout, SelectOptions, SelectRequest, Selection, Sequence,
    Store, TensorView, attend,
};

const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 8;
const GROUP: usize = 8;

/// Returns `[tokens, KV_HEADS, DIM]` elements around one of a few centres, as the tokens from `first` on have them.
fn rows(first: usize, tokens: usize, seed: u64) -> Vec<f32> {
    let hash =
        |i: u64| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let unit = |i: u64| (hash(i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let element = |token: u64, at: u64| unit((hash(token) >> 60) * 1000 + at) * 3.0 + unit(token * 100 + at);
    let width = (KV_HEADS * DIM) as u64;
    (first as u64..(first + tokens) as u64).flat_map(|token| (0..width).map(move |at| element(token, at))).collect()
}

struct Stored {
    store: Store,
    sequence: Sequence,
    _dir: tempfile::TempDir,
}

fn empty() -> Stored {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(GROUP as u16).dtype(DType::F32).build().unwrap();
    let sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
    Stored { store, sequence, _dir: dir }
}

impl Stored {
    fn append(&mut self, tokens: usize, seed: u64) {
        let first = self.sequence.len() as usize;
        let (keys, values) = (rows(first, tokens, seed), rows(first, tokens, seed ^ 77));
        let view = |rows| TensorView::token_major(rows, tokens, KV_HEADS, DIM);
        self.sequence.append(0, view(&keys), view(&values)).unwrap();
    }

    fn attach(&mut self, method: &str) -> SelectorId {
        let spec: MethodSpec = method.parse().unwrap();
        self.sequence.attach(spec.selector(None).unwrap()).unwrap()
    }

    fn select(&self, selector: SelectorId, query: &[f32], budget: usize) -> Selection {
        let options = SelectOptions::new(Budget::tokens(budget)).aggregation(HeadAggregation::Softmax).recent(16);
        self.sequence.select(0, SelectRequest::query(query).options(options).selector(selector)).unwrap()
    }

    fn output(&self, query: &[f32], selection: &Selection) -> Vec<f32> {
        let mut out = vec![0.0; Q_HEADS * DIM];
        let batch = self.store.read(&[selection]).wait().unwrap();
        attend(query, selection, batch.get(0).unwrap(), &mut out).unwrap();
        out
    }
}

fn query(seed: u64) -> Vec<f32> {
    rows(seed as usize * 31, 2, 1)
}

fn entries(selection: &Selection) -> [Vec<u64>; KV_HEADS] {
    [0, 1].map(|head| selection.entries(head).collect())
}

#[test]
fn every_cluster_is_full_attention_to_the_bit() {
    let mut stored = empty();
    stored.append(1003, 1);
    let id = stored.attach("dynakv:4");
    let all = stored.sequence.select(0, SelectRequest::all()).unwrap();
    for seed in 0..4 {
        let chosen = stored.select(id, &query(seed), 1003);
        assert_eq!(chosen.tokens(), 1003);
        assert_eq!(stored.output(&query(seed), &chosen), stored.output(&query(seed), &all));
        // One entry less than everything is left to the method, which leaves out a cluster.
        let chosen = stored.select(id, &query(seed), 995);
        assert!(entries(&chosen).iter().all(|own| (900..=995).contains(&own.len())), "{chosen:?}");
    }
}

#[test]
fn heads_attend_to_clusters_of_their_own_or_to_joint_ones() {
    let mut stored = empty();
    stored.append(1200, 2);
    let [per_head, joint] = ["dynakv:8", "dynakv:8:joint"].map(|method| stored.attach(method));
    let chosen = stored.select(per_head, &query(1), 128);
    let [a, b] = entries(&chosen);
    assert!(a != b && a.len() <= 128 && b.len() <= 128 && a.len().min(b.len()) > 90, "{} {}", a.len(), b.len());
    assert!(chosen.clusters().unwrap() > 2);
    let [a, b] = entries(&stored.select(joint, &query(1), 128));
    assert!(a == b && (90..=128).contains(&a.len()), "{}", a.len());
}

#[test]
fn a_method_without_clusters_yet_attends_to_everything() {
    let mut stored = empty();
    let id = stored.attach("dynakv:8");
    stored.append(200, 3);
    assert_eq!(stored.select(id, &query(0), 64).tokens(), 200);
    // At 256 tokens the first clusters are built.
    stored.append(120, 3);
    assert!(entries(&stored.select(id, &query(0), 64)).iter().all(|own| own.len() <= 64));
}

#[test]
fn a_method_that_takes_no_profile_says_so() {
    let mut stored = empty();
    stored.append(300, 3);
    let id = stored.attach("dynakv:8");
    let query = query(0);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Clusters depend on tokens, cuts and selections, not on the pieces in which tokens are appended.
    #[test]
    fn pieces_of_appends_do_not_change_what_is_selected(
        pieces in prop::collection::vec(1_usize..90, 1..20), at_once in 1_usize..600, joint in any::<bool>(),
        cut in 0_usize..700, seed in 0_u64..50,
    ) {
        let method = if joint { "dynakv:8:joint" } else { "dynakv:8" };
        let total: usize = pieces.iter().sum();
        let mut both = Vec::new();
        for whole in [true, false] {
            let mut stored = empty();
            stored.append(at_once, seed);
            let id = stored.attach(method);
            let _ = stored.select(id, &query(seed), 64);
            let parts = if whole { vec![total] } else { pieces.clone() };
            parts.into_iter().for_each(|tokens| stored.append(tokens, seed));
            let first = entries(&stored.select(id, &query(seed + 1), 96));
            stored.sequence.truncate(cut.min(at_once + total) as u64).unwrap();
            stored.sequence.commit(Durability::Lazy).unwrap();
            let parts = if whole { vec![total] } else { pieces.clone() };
            parts.into_iter().for_each(|tokens| stored.append(tokens, seed ^ 5));
            let chosen = stored.select(id, &query(seed + 2), 96);
            let second = entries(&chosen);
            let length = stored.sequence.len();
            for own in &second {
                let distinct: BTreeSet<u64> = own.iter().copied().collect();
                prop_assert!(distinct.len() == own.len() && own.iter().all(|token| *token < length));
                prop_assert!((length - length % GROUP as u64..length).all(|token| distinct.contains(&token)));
                prop_assert!(own.len() <= 96 || length < 256 || own.len() as u64 == length, "{} {length}", own.len());
            }
            both.push((first, second, stored.output(&query(seed), &chosen)));
        }
        prop_assert_eq!(&both[0], &both[1]);
    }
}
