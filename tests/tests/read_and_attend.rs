//! Reading and attending in one call gives the bits of attention over the whole batch.
//!
//! - Selections are whole, of groups, or of entries of single heads. Forks share blocks with their origin.
//! - Layouts have codecs or none. Blocks may be cached, and keys may be reconstructed.
//! - The helper reads a half, or the calling thread reads everything.
//! - A damaged block is an error of its selection alone.

use std::fs;
use stratakv::attention::{HeadMask, TokenMask};
use stratakv::layout::{LayerSpec, PlaneCodec, Rope};
use stratakv::options::{CacheOptions, HelperUse};
use stratakv::read::AttendOptions;
use stratakv::retrieval::ReconstructOptions;
use stratakv::sequence::GroupEntries;
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, PlaneSet, SelectRequest, Selection,
    Sequence, Store, TensorView, attend,
};
use stratakv_testing::rng::{Rng, noise};
use stratakv_testing::{GroupPattern, TestStore, medium};

const KV_HEADS: usize = 2;
const DIM: usize = 64;
const Q_HEADS: usize = 4;
const ROW: usize = KV_HEADS * DIM;
/// A thread reads by itself from its third read on.
const REPEATS: usize = 4;

fn query(seed: usize) -> Vec<f32> {
    noise(seed + 1000, Q_HEADS * DIM)
}

fn append(sequence: &mut Sequence, tokens: usize, seed: usize) {
    let (keys, values) = (noise(seed, tokens * ROW), noise(seed + 1, tokens * ROW));
    let view = |rows| TensorView::token_major(rows, tokens, KV_HEADS, DIM);
    sequence.append(0, view(&keys), view(&values)).expect("an append");
}

/// Reads and attends in one call, several times, and compares the bits with attention over the batch.
fn compare(store: &Store, selections: &[Selection], what: &str) {
    let refs: Vec<&Selection> = selections.iter().collect();
    let queries: Vec<Vec<f32>> = (0..refs.len()).map(query).collect();
    let inputs: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    let batch = store.read(&refs).wait().expect("a read");
    let mut wanted = vec![vec![0.0; Q_HEADS * DIM]; refs.len()];
    for (at, wanted) in wanted.iter_mut().enumerate() {
        attend(&queries[at], refs[at], batch.get(at).expect("blocks"), wanted).expect("attention");
    }
    drop(batch);
    for repeat in 0..REPEATS {
        let mut outs = vec![vec![f32::NAN; Q_HEADS * DIM]; refs.len()];
        let mut slices: Vec<&mut [f32]> = outs.iter_mut().map(Vec::as_mut_slice).collect();
        store.read(&refs).attend(&inputs, &AttendOptions::default(), &mut slices).expect("read and attend");
        let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&outs) == bits(&wanted), "{what}, repeat {repeat}: other bits");
    }
}

/// Chooses everything, some groups, or entries of single heads.
fn choose(sequence: &Sequence, random: &mut Rng) -> Selection {
    let group = sequence.layout().group_tokens();
    let sealed = sequence.len() / group as u64;
    let groups: Vec<u64> = (0..sealed).filter(|_| random.below(3) > 0).collect();
    let request = match random.below(3) {
        0 => return sequence.select(0, SelectRequest::all()).expect("everything"),
        1 => return sequence.select(0, SelectRequest::groups(&groups)).expect("groups"),
        _ => groups,
    };
    let mut entries = Vec::new();
    for group_index in request {
        for head in 0..KV_HEADS {
            let bits = u128::from(random.next_u64()) | u128::from(random.next_u64()) << 64;
            let tokens = TokenMask::from_bits(bits).intersection(TokenMask::all(group));
            if !tokens.is_empty() {
                entries.push(GroupEntries { group: group_index, heads: HeadMask::one(head), tokens });
            }
        }
    }
    sequence.select(0, SelectRequest::entries(&entries)).expect("entries")
}

fn check_random_case(seed: u64, codec: PlaneCodec, helper: HelperUse) {
    let random = &mut Rng(seed);
    let group = [8, 16, 128][random.below(3)];
    let mut options = medium().attend_helper(helper);
    if random.below(3) == 0 {
        options = options.cache(CacheOptions::new(ByteSize::mib(2)));
    }
    let test = TestStore::new(options);
    let layout = KvLayout::builder().layers(1).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(group).codec(codec).build().expect("a layout");
    let mut one = test.create_sequence(&layout, CreateOptions::new().key("one")).expect("a sequence");
    append(&mut one, 1000 + random.below(5000), 3);
    one.commit(Durability::Sync).expect("a commit");
    let mut two = one.fork().expect("a fork");
    append(&mut two, 500 + random.below(500), 5);
    two.commit(Durability::Sync).expect("a commit");
    let count = 1 + random.below(3);
    let selections: Vec<Selection> =
        (0..count).map(|_| choose(if random.below(2) == 0 { &one } else { &two }, random)).collect();
    compare(&test, &selections, &format!("seed {seed}, {codec:?}, {helper:?}, groups of {group}"));
}

#[test]
fn random_selections_have_the_bits_of_attention_over_the_batch() {
    let mut seed = 0;
    for codec in [PlaneCodec::Raw, PlaneCodec::Int8, PlaneCodec::Int4] {
        for helper in [HelperUse::Off, HelperUse::Always] {
            for _ in 0..5 {
                check_random_case(seed, codec, helper);
                seed += 1;
            }
        }
    }
}

#[test]
fn reads_of_more_parts_than_are_kept_have_the_bits_of_attention_over_the_batch() {
    for helper in [HelperUse::Off, HelperUse::Always, HelperUse::Auto] {
        let test = TestStore::new(medium().attend_helper(helper));
        let layout = KvLayout::builder().layers(1).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
        let layout = layout.group_tokens(128).build().expect("a layout");
        let mut sequence = test.create_sequence(&layout, CreateOptions::new()).expect("a sequence");
        // 20 MiB: 80 parts, of which a thread keeps 32 before their turn.
        (0..10).for_each(|step| append(&mut sequence, 4096, step));
        sequence.commit(Durability::Sync).expect("a commit");
        let all = sequence.select(0, SelectRequest::all()).expect("everything");
        compare(&test, std::slice::from_ref(&all), &format!("{helper:?}"));
    }
}

#[test]
fn reconstructed_keys_give_the_bits_of_attention_over_the_batch() {
    for helper in [HelperUse::Off, HelperUse::Always] {
        let test = TestStore::new(medium().attend_helper(helper));
        let layer = LayerSpec::full(KV_HEADS as u16, DIM as u16).rope(Rope::new(DIM as u16, 10_000.0));
        let layout = KvLayout::builder().layer_specs([layer]).group_tokens(16).build().expect("a layout");
        let mut sequence = test.create_sequence(&layout, CreateOptions::new().key("keys")).expect("a sequence");
        append(&mut sequence, 4000, 9);
        sequence.commit(Durability::Sync).expect("a commit");
        drop(sequence);
        let mut sequence = test.open_sequence("keys", OpenSequence::new()).expect("there");
        sequence.reconstruct_keys(&ReconstructOptions::default().rank(ROW)).expect("keys of full rank");
        let groups: Vec<u64> = (0..250).filter(|group| group % 5 > 0).collect();
        let request = SelectRequest::groups(&groups).planes(PlaneSet::ReconstructedKeys);
        let selection = sequence.select(0, request).expect("values");
        compare(&test, std::slice::from_ref(&selection), &format!("{helper:?}"));
    }
}

#[test]
fn a_damaged_block_is_an_error_of_its_selection_alone() {
    let pattern = GroupPattern { heads: KV_HEADS, dim: DIM, group: 128 };
    for helper in [HelperUse::Off, HelperUse::Always] {
        let mut test = TestStore::new(medium().attend_helper(helper));
        drop(pattern.write(&test, CreateOptions::new().key("a"), 40));
        test.close().expect("closed");
        let [_, values] = pattern.planes(27);
        damage(&test, &values);
        test.reopen();
        let sequence = test.open_sequence("a", OpenSequence::new()).expect("there");
        let select = |groups: std::ops::Range<u64>| {
            sequence.select(0, SelectRequest::groups(&groups.collect::<Vec<_>>())).expect("groups")
        };
        let (good, bad, last) = (select(0..20), select(20..35), select(35..40));
        compare(&test, &[select(0..20)], "before the damaged block");
        for _ in 0..REPEATS {
            let (input, mut outs) = (query(0), vec![vec![f32::NAN; Q_HEADS * DIM]; 3]);
            let mut slices: Vec<&mut [f32]> = outs.iter_mut().map(Vec::as_mut_slice).collect();
            let selections = [&good, &bad, &last];
            let request = test.read(&selections);
            let error = request.attend(&[&input[..]; 3], &AttendOptions::default(), &mut slices).expect_err("damaged");
            assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
            assert!(outs[1].iter().all(|x| x.is_nan()), "a damaged selection has an output");
            for (out, selection) in [(&outs[0], &good), (&outs[2], &last)] {
                let batch = test.read(&[selection]).wait().expect("a read");
                let mut wanted = vec![0.0; Q_HEADS * DIM];
                attend(&input, selection, batch.get(0).expect("blocks"), &mut wanted).expect("attention");
                assert_eq!(*out, wanted);
            }
        }
    }
}

/// Flips one bit in every place of the store's files that holds these bytes.
fn damage(test: &TestStore, bytes: &[u8]) {
    let mut found = 0;
    for dir in test.dirs() {
        for path in stratakv_testing::scratch::files(dir) {
            let path = dir.join(path);
            let mut content = fs::read(&path).expect("a file of the store");
            let places = (0..content.len() / 4096).map(|page| page * 4096);
            let here: Vec<usize> = places.filter(|at| content[*at..].starts_with(bytes)).collect();
            here.iter().for_each(|at| content[at + 1234] ^= 4);
            if !here.is_empty() {
                fs::write(&path, content).expect("a file of the store");
            }
            found += here.len();
        }
    }
    assert!(found > 0, "the block is in no file");
}

#[test]
fn other_numbers_of_queries_or_outputs_are_refused() {
    let test = TestStore::new(medium());
    let pattern = GroupPattern { heads: KV_HEADS, dim: DIM, group: 16 };
    let sequence = pattern.write(&test, CreateOptions::new(), 4);
    let all = sequence.select(0, SelectRequest::all()).expect("everything");
    let (input, options) = (query(0), AttendOptions::default());
    let mut out = vec![0.0; Q_HEADS * DIM];
    let selections = [&all];
    let request = test.read(&selections);
    let refused = [
        request.attend(&[], &options, &mut [&mut out]),
        request.attend(&[&input], &options, &mut []),
        request.attend(&[&input[1..]], &options, &mut [&mut out]),
        request.attend(&[&input], &options, &mut [&mut []]),
    ];
    for refused in refused {
        assert_eq!(refused.expect_err("refused").kind(), ErrorKind::InvalidArgument);
    }
}
