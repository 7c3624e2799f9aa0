//! The size of blocks, the error of their elements, and what is computed from decoded blocks.

use crate::model::{Layer, Shape, element, number, shapes};
use crate::stores::{open, stored};
use half::f16;
use std::sync::Arc;
use stratakv::codec::{VALUE_RANGE_CHANNELS, error_bound};
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::retrieval::{LeoAm, Quest, ReconstructOptions, Selector, ShadowKv};
use stratakv::{CreateOptions, DType, Durability, KvLayout, OpenSequence, PlaneSet, SelectRequest, TensorView, attend};
use stratakv_tests::disk::{device_dirs, fast_scratch};

/// Blocks are as small as the layout says, and no element exceeds the documented error.
#[test]
fn blocks_are_smaller_and_elements_within_their_bound() {
    for (codec, bits, most) in [(PlaneCodec::Int8, 8, 0.66), (PlaneCodec::Int4, 4, 0.41)] {
        let layer = Layer { heads: 2, key_dim: 128, value_dim: 128, window: None, codecs: [codec; 2] };
        let shape = Shape { layers: vec![layer; 2], dtype: DType::F16, group: 8, separate: false };
        let (_scratch, dirs, model) = stored(&shape, 515);
        let store = open(&dirs, false);
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("there");
        let layout = sequence.layout().clone();
        let share = layout.stored_token_bytes() / layout.token_bytes() as f64;
        assert!(share < most && share > most - 0.02, "{share}");
        let view = sequence.select(0, SelectRequest::all()).expect("a view");
        let ticket = store.read(&[&view]).submit().expect("a read");
        let useful = layout.stored_token_bytes() / 2.0 * 512.0;
        assert!((ticket.selected_bytes() as f64 - useful).abs() < 1.0, "{} {useful}", ticket.selected_bytes());
        drop(ticket);
        for plane in 0..2 {
            for group in 0..64 {
                let found = model.block(0, group, plane);
                let exact: Vec<f32> = (0..2 * 8 * 128)
                    .map(|at| {
                        let (head, token, i) = (at / (8 * 128), at / 128 % 8, at % 128);
                        let x = element((group * 8 + token) as u64, 0, plane, head * 128 + i);
                        f16::from_f32(x).to_f32()
                    })
                    .collect();
                for (at, bytes) in found.chunks_exact(2).enumerate() {
                    let (head, token, i) = (at / (8 * 128), at / 128 % 8, at % 128);
                    let peers: Vec<f32> = match plane {
                        0 => (0..8).map(|token| exact[(head * 8 + token) * 128 + i]).collect(),
                        _ => exact[(head * 8 + token) * 128 + i / VALUE_RANGE_CHANNELS * VALUE_RANGE_CHANNELS..]
                            [..VALUE_RANGE_CHANNELS]
                            .to_vec(),
                    };
                    let (low, high) = peers.iter().fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
                    let bound = error_bound(bits, DType::F16, high - low, low.abs().max(high.abs()));
                    let off = (number(bytes, DType::F16) as f32 - exact[at]).abs();
                    assert!(off <= bound, "{off} over {bound}");
                }
            }
        }
        drop((view, sequence));
        store.close().expect("closed");
    }
}

/// Bounds hold for the decoded keys that attention reads, not for the appended ones.
#[test]
fn bounds_hold_for_decoded_keys() {
    for shape in shapes() {
        let (_scratch, dirs, model) = stored(&shape, 215);
        let store = open(&dirs, true);
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("there");
        // One selector uses the min/max records of the sequence, the other its keys.
        let selectors: [Arc<dyn Selector>; 2] = [Arc::new(Quest), Arc::new(LeoAm::default())];
        for selector in selectors {
            let id = sequence.attach(selector).expect("attached");
            for layer in shape.kv_layers() {
                let own = shape.layers[layer];
                let (width, element) = (own.heads * own.key_dim, shape.dtype.bytes());
                let records = &sequence.selector_summaries(id, layer).expect("summaries")[0];
                for group in 0..215 / shape.group {
                    let mut record = Vec::new();
                    records.encode(group..group + 1, &mut record);
                    let kind = if shape.dtype == DType::F16 { DType::F16 } else { DType::Bf16 };
                    let bound = |at: usize| number(&record[2 * at..2 * at + 2], kind);
                    let plane = model.block(layer, group, 0);
                    for seed in 0..6 {
                        for head in 0..own.heads {
                            let query: Vec<f64> =
                                (0..own.key_dim).map(|i| f64::from(self::element(seed, 3, 1, i))).collect();
                            let (mut lower, mut upper) = (0.0, 0.0);
                            for (i, q) in query.iter().enumerate() {
                                let (low, high) =
                                    (bound(head * own.key_dim + i) * q, bound(width + head * own.key_dim + i) * q);
                                (lower, upper) = (lower + low.min(high), upper + low.max(high));
                            }
                            for token in 0..shape.group {
                                let row = &plane[(head * shape.group + token) * own.key_dim * element..];
                                let key = row[..own.key_dim * element].chunks_exact(element);
                                let score: f64 = key.zip(&query).map(|(k, q)| number(k, shape.dtype) * q).sum();
                                let slack = 1e-9 * (1.0 + lower.abs().max(upper.abs()));
                                assert!(lower - slack <= score && score <= upper + slack, "{shape:?}");
                            }
                        }
                    }
                }
            }
        }
        drop(sequence);
        store.close().expect("closed");
    }
}

/// Low-rank keys are computed from decoded keys, values are decoded alone, and outliers are whole blocks.
#[test]
fn encoded_values_are_read_alone_with_reconstructed_keys() {
    use stratakv::layout::Rope;
    use stratakv::{Budget, SelectOptions};
    let layer = LayerSpec::full(2, 64).codecs(PlaneCodec::Int8, PlaneCodec::Int8).rope(Rope::new(64, 10_000.0));
    let layout = KvLayout::builder().layer_specs([layer]).group_tokens(8).build().expect("a layout");
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = open(&dirs, false);
    let mut sequence = store.create_sequence(&layout, CreateOptions::new()).expect("created");
    let tensor: Vec<f32> = (0..400 * 128).map(|i| element(i as u64 / 128, 0, 0, 1 + i % 128 * 28)).collect();
    let view = TensorView::token_major(&tensor, 400, 2, 64);
    sequence.append(0, view, view).expect("appended");
    sequence.commit(Durability::Sync).expect("committed");
    // Full rank reproduces the stored keys, except for a rounding to f16.
    sequence.reconstruct_keys(&ReconstructOptions::default().rank(128).outlier_share(0.1)).expect("rebuilt");
    let selector = sequence.attach(Arc::new(ShadowKv::default())).expect("attached");
    let query: Vec<f32> = (0..4 * 64).map(|i| element(5, 1, 1, 1 + 28 * i)).collect();
    let whole = sequence.select(0, SelectRequest::all()).expect("a view");
    let options = SelectOptions::new(Budget::All).planes(PlaneSet::ReconstructedKeys);
    let rebuilt = sequence.select(0, SelectRequest::query(&query).options(options).selector(selector)).expect("a view");
    let batch = store.read(&[&whole, &rebuilt]).submit().and_then(|ticket| ticket.wait()).expect("read");
    let [mut all, mut out] = [vec![0.0; 256], vec![0.0; 256]];
    attend(&query, &whole, batch.get(0).expect("blocks"), &mut all).expect("attention");
    attend(&query, &rebuilt, batch.get(1).expect("blocks"), &mut out).expect("attention");
    for (all, out) in all.iter().zip(&out) {
        assert!((all - out).abs() < 2e-2 * (1.0 + all.abs()), "{all} {out}");
    }
}
