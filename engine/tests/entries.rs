//! Selections of entries: each KV head attends to tokens of its own.

use proptest::prelude::*;
use std::collections::BTreeSet;
use stratakv::attention::{HeadMask, TokenMask};
use stratakv::layout::LayerSpec;
use stratakv::sequence::GroupEntries;
use stratakv::{
    CreateOptions, DType, Durability, ErrorKind, KvLayout, SelectRequest, Sequence, Store, TensorView, attend,
};

const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 8;
const GROUP: usize = 8;

fn layout(window: Option<u32>) -> KvLayout {
    let (heads, dim) = (KV_HEADS as u16, DIM as u16);
    let layer = window.map_or(LayerSpec::full(heads, dim), |window| LayerSpec::sliding(heads, dim, window));
    KvLayout::builder().layer_specs([layer]).group_tokens(GROUP as u16).dtype(DType::F32).build().unwrap()
}

/// Returns `[tokens, KV_HEADS, DIM]` elements between -1 and 1.
fn rows(tokens: usize, seed: u32) -> Vec<f32> {
    let hash = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca6b);
    (0..(tokens * KV_HEADS * DIM) as u32).map(|i| (hash(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// A committed sequence of `tokens`, with its keys and values.
struct Stored {
    store: Store,
    sequence: Sequence,
    keys: Vec<f32>,
    values: Vec<f32>,
    _dir: tempfile::TempDir,
}

fn stored(tokens: usize, window: Option<u32>) -> Stored {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(window), CreateOptions::new()).unwrap();
    let (keys, values) = (rows(tokens, 1), rows(tokens, 2));
    let view = |rows| TensorView::token_major(rows, tokens, KV_HEADS, DIM);
    sequence.append(0, view(&keys), view(&values)).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    Stored { store, sequence, keys, values, _dir: dir }
}

impl Stored {
    /// Returns the attention output of the engine for these entries and the tail.
    fn output(&self, entries: &[GroupEntries], query: &[f32]) -> Vec<f32> {
        let selection = self.sequence.select(0, SelectRequest::entries(entries)).unwrap();
        let ticket = self.store.read(&[&selection]).submit().unwrap();
        let groups: BTreeSet<u64> = entries.iter().map(|item| item.group).collect();
        let block = 2 * KV_HEADS * GROUP * DIM * 4;
        // Small groups may still be in memory, where a later commit gathers them.
        assert!(ticket.selected_bytes() <= (groups.len() * block) as u64, "a group is read twice");
        let mut out = vec![0.0; Q_HEADS * DIM];
        attend(query, &selection, ticket.wait().unwrap().get(0).unwrap(), &mut out).unwrap();
        out
    }

    /// Returns the output by the definition, in f64. `of(head)` are the tokens of a KV head.
    fn reference(&self, query: &[f32], of: impl Fn(usize) -> Vec<usize>) -> Vec<f64> {
        let row = |rows: &[f32], token: usize, head: usize| -> Vec<f64> {
            let at = (token * KV_HEADS + head) * DIM;
            rows[at..at + DIM].iter().map(|&x| f64::from(x)).collect()
        };
        let mut out = Vec::new();
        for q_head in 0..Q_HEADS {
            let head = q_head / (Q_HEADS / KV_HEADS);
            let q: Vec<f64> = query[q_head * DIM..][..DIM].iter().map(|&x| f64::from(x)).collect();
            let tokens = of(head);
            let scores = tokens.iter().map(|&token| {
                let dot: f64 = row(&self.keys, token, head).iter().zip(&q).map(|(k, q)| k * q).sum();
                (dot / (DIM as f64).sqrt()).exp()
            });
            let weights: Vec<f64> = scores.collect();
            let sum: f64 = weights.iter().sum();
            for at in 0..DIM {
                let parts = tokens.iter().zip(&weights).map(|(&token, w)| w * row(&self.values, token, head)[at]);
                out.push(parts.sum::<f64>() / sum);
            }
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn each_head_attends_to_its_own_entries_once(
        masks in prop::collection::vec((0_u128..256, 0_u128..256), 6), tail in 1_usize..GROUP, seed in any::<u32>(),
    ) {
        let tokens = 6 * GROUP + tail;
        let stored = stored(tokens, None);
        let mut entries = Vec::new();
        for (group, (first, second)) in masks.iter().enumerate() {
            for (head, bits) in [*first, *second].into_iter().enumerate().filter(|(_, bits)| *bits != 0) {
                let (heads, tokens) = (HeadMask::one(head), TokenMask::from_bits(bits));
                entries.push(GroupEntries { group: group as u64, heads, tokens });
            }
        }
        let of = |head: usize| -> Vec<usize> {
            let sealed = masks.iter().enumerate().flat_map(|(group, (first, second))| {
                let bits = if head == 0 { *first } else { *second };
                TokenMask::from_bits(bits).iter().map(move |at| group * GROUP + at)
            });
            sealed.chain(6 * GROUP..tokens).collect()
        };
        let query = rows(2, seed);
        let (found, expected) = (stored.output(&entries, &query), stored.reference(&query, of));
        for (found, expected) in found.iter().zip(&expected) {
            prop_assert!((f64::from(*found) - expected).abs() < 1e-5, "{found}, expected {expected}");
        }
        let selection = stored.sequence.select(0, SelectRequest::entries(&entries)).unwrap();
        for head in 0..KV_HEADS {
            let positions: Vec<usize> = selection.entries(head).map(|at| at as usize).collect();
            prop_assert_eq!(positions, of(head));
        }
        let union: BTreeSet<usize> = (0..KV_HEADS).flat_map(of).collect();
        prop_assert_eq!(selection.tokens(), union.len());
        prop_assert!(selection.positions().eq(union.into_iter().map(|at| at as u64)));
    }
}

#[test]
fn every_entry_of_all_heads_gives_the_bits_of_full_attention() {
    let stored = stored(100, None);
    let query = rows(2, 9);
    let all = HeadMask::all(KV_HEADS);
    let entries: Vec<GroupEntries> = (0..100 / GROUP as u64)
        .map(|group| GroupEntries { group, heads: all, tokens: TokenMask::all(GROUP) })
        .collect();
    let selection = stored.sequence.select(0, SelectRequest::all()).unwrap();
    let mut full = vec![0.0; Q_HEADS * DIM];
    attend(&query, &selection, stored.store.read(&[&selection]).wait().unwrap().get(0).unwrap(), &mut full).unwrap();
    assert_eq!(stored.output(&entries, &query), full);
    let selection = stored.sequence.select(0, SelectRequest::entries(&entries)).unwrap();
    let bytes = stored.store.read(&[&selection]).submit().unwrap().selected_bytes();
    assert_eq!(bytes, (entries.len() * 2 * KV_HEADS * GROUP * DIM * 4) as u64, "each group is read once");
}

#[test]
fn entries_that_the_layer_does_not_have_are_refused() {
    let stored = stored(100, Some(60));
    let item = |group, heads, tokens| GroupEntries { group, heads, tokens };
    let (head, token) = (HeadMask::one(0), TokenMask::one(7));
    let refused = |entries: &[GroupEntries], part: &str| {
        let e = stored.sequence.select(0, SelectRequest::entries(entries)).map(|_| ()).unwrap_err();
        assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains(part), "{e}");
    };
    refused(&[item(7, head, token), item(6, head, token)], "groups must rise");
    refused(&[item(12, head, token)], "the layer attends to groups 5..12");
    refused(&[item(4, head, token)], "the layer attends to groups 5..12");
    refused(&[item(5, HeadMask::one(2), token)], "has 2 KV heads");
    refused(&[item(5, head, TokenMask::one(8))], "has 8 tokens");
    refused(&[item(5, HeadMask::EMPTY, token)], "without heads");
    refused(&[item(5, head, TokenMask::EMPTY)], "without tokens");
    refused(&[item(6, head, token), item(6, HeadMask::all(2), TokenMask::one(1))], "named twice");
    let window = 100 - 60;
    assert_eq!(window, 5 * GROUP, "group 5 is the first in the window");
    assert!(stored.sequence.select(0, SelectRequest::entries(&[item(5, head, token)])).is_ok());
}
