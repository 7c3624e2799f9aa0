//! Methods that choose entries, on layers under codecs: they see what a group decodes to, and the tail exactly.

use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::retrieval::SelectorId;
use stratakv::{Budget, CreateOptions, DType, Durability, KvLayout, SelectRequest, Selection, Sequence, Store};
use stratakv_testing::{EntryShape, TestStore, small_options};

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 32, group: 8 };
/// A number that leaves a tail of seven tokens.
const TOKENS: usize = 903;

const METHODS: [&str; 9] = [
    "balanced:8:joint",
    "dynakv:8",
    "dynakv:8:joint",
    "clusterkv:8",
    "kmeans:8:joint",
    "pqcache:16",
    "tokens",
    "swarm:8",
    "infllm:32",
];

fn layout(codec: PlaneCodec) -> KvLayout {
    let layer = LayerSpec::full(SHAPE.kv_heads as u16, SHAPE.dim as u16).codecs(codec, codec);
    let layout = KvLayout::builder().layer_specs([layer]).group_tokens(SHAPE.group as u16).dtype(DType::F32);
    layout.build().unwrap()
}

fn create(store: &Store, codec: PlaneCodec, planes: &[Vec<f32>; 2]) -> Sequence {
    let mut sequence = store.create_sequence(&layout(codec), CreateOptions::new()).unwrap();
    SHAPE.append(&mut sequence, &planes[0], &planes[1]).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    sequence
}

/// Returns the planes `[tokens, kv_heads, dim]` as a read gives them, with the rows of the tail as they were appended.
fn decoded(store: &Store, sequence: &Sequence, appended: &[Vec<f32>; 2]) -> [Vec<f32>; 2] {
    let all = sequence.select(0, SelectRequest::all()).unwrap();
    let batch = store.read(&[&all]).wait().unwrap();
    let (width, mut planes) = (SHAPE.width(), appended.clone());
    for group in 0..TOKENS / SHAPE.group {
        let (keys, values) = batch.get(0).unwrap().group(group).unwrap();
        for (plane, bytes) in planes.iter_mut().zip([keys, values]) {
            for (at, element) in bytes.chunks_exact(4).enumerate() {
                let (head, token, dim) = (at / SHAPE.dim / SHAPE.group, at / SHAPE.dim % SHAPE.group, at % SHAPE.dim);
                let row = (group * SHAPE.group + token) * width;
                plane[row + head * SHAPE.dim + dim] = f32::from_le_bytes(element.try_into().unwrap());
            }
        }
    }
    planes
}

fn attach(sequence: &mut Sequence, method: &str) -> SelectorId {
    let id = sequence.attach(SHAPE.selector(method)).unwrap();
    if method.starts_with("swarm") || method.starts_with("infllm") {
        let queries: Vec<Vec<f32>> = (100..140).map(|seed| SHAPE.query(seed)).collect();
        let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        sequence.profile(id, 0, &queries, None).unwrap();
    }
    id
}

fn select(sequence: &Sequence, id: SelectorId, query: &[f32]) -> Selection {
    sequence.select(0, SelectRequest::query(query).budget(Budget::tokens(120)).selector(id)).unwrap()
}

#[test]
fn entries_under_a_codec_are_those_of_the_decoded_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let store: Store = small_options(&[dir.path()]).open().unwrap();
    let appended = [1, 2].map(|seed| SHAPE.rows(0, TOKENS, seed));
    for codec in [PlaneCodec::Int8, PlaneCodec::Int4] {
        let mut coded = create(&store, codec, &appended);
        assert_eq!(coded.layout().codecs(0).unwrap(), [codec; 2]);
        let planes = decoded(&store, &coded, &appended);
        assert!(planes[0] != appended[0] && planes[1] != appended[1], "{codec:?} is lossy");
        let mut raw = create(&store, PlaneCodec::Raw, &planes);
        for method in METHODS {
            let ids = [attach(&mut coded, method), attach(&mut raw, method)];
            for seed in 0..4 {
                let query = SHAPE.query(seed);
                let [one, other] = [select(&coded, ids[0], &query), select(&raw, ids[1], &query)];
                let chosen = SHAPE.entries(&one);
                assert_eq!(chosen, SHAPE.entries(&other), "{method} under {codec:?}");
                assert!(chosen.iter().all(|own| own.len() < TOKENS / 2), "{method} under {codec:?}");
                let [out, wanted] = [&one, &other].map(|own| SHAPE.output(&store, &query, own).unwrap());
                let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5;
                assert!(out.iter().zip(&wanted).all(is_close), "{method} under {codec:?}: {out:?}, not {wanted:?}");
            }
            coded.detach(ids[0]).unwrap();
            raw.detach(ids[1]).unwrap();
        }
    }
}

#[test]
fn a_method_follows_appends_of_groups_under_a_codec() {
    // Attached first, the method sees each group when it is encoded. The groups of the other sequence are all there.
    let store = TestStore::new(Store::options());
    let appended = [1, 2].map(|seed| SHAPE.rows(0, TOKENS, seed));
    for method in ["clusterkv:8", "pqcache:16", "tokens"] {
        for codec in [PlaneCodec::Int8, PlaneCodec::Int4] {
            let whole = create(&store, codec, &appended);
            let planes = decoded(&store, &whole, &appended);
            whole.delete(Durability::Sync).unwrap();
            let [mut coded, mut raw] = [codec, PlaneCodec::Raw].map(|codec| {
                let mut sequence = store.create_sequence(&layout(codec), CreateOptions::new()).unwrap();
                let id = attach(&mut sequence, method);
                (sequence, id)
            });
            let width = SHAPE.width();
            for start in (0..TOKENS).step_by(100) {
                // Whole groups, so that both decode the same rows. The last piece leaves the tail.
                let (start, end) = (start / SHAPE.group * SHAPE.group, (start + 100).min(TOKENS));
                let end = if end == TOKENS { end } else { end / SHAPE.group * SHAPE.group };
                for ((sequence, _), planes) in [(&mut coded, &appended), (&mut raw, &planes)] {
                    let [keys, values] = [0, 1].map(|plane: usize| &planes[plane][start * width..end * width]);
                    SHAPE.append(sequence, keys, values).unwrap();
                }
            }
            for seed in 0..4 {
                let query = SHAPE.query(seed);
                let [one, other] = [&coded, &raw].map(|(sequence, id)| SHAPE.entries(&select(sequence, *id, &query)));
                assert_eq!(one, other, "{method} under {codec:?}");
            }
        }
    }
}
