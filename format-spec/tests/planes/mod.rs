//! The golden store `v0.2/store-planes`: a layout with padded planes and with rotations.

use crate::builder::{self as b, Extent, ExtentPlane, GoldenFile, GoldenFrame, TOKEN_SEQUENCE, descriptor, lay_out};
use std::path::PathBuf;
use stratakv_format::features::Features;
use stratakv_format::frame::{FrameView, KIND_GROUPS};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::Kind;
use stratakv_format::rope::{Rope, RopePairing, RopeScaling};
use stratakv_format::{DType, PAGE_BYTES, PayloadChecksum};

fn directory() -> PathBuf {
    b::golden_directory("v0.2/store-planes")
}

/// Returns a layout with groups of four tokens and two KV heads of 8.
fn layout() -> Layout {
    let halves = Rope::new(8, 10_000.0);
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
    let interleaved = Rope::new(4, 500_000.0).interleaved().starting_at(2).scaled(llama3);
    let layer = |heads, rope| {
        let dim = if heads == 0 { 0 } else { 8 };
        LayerGeometry { kv_heads: heads, key_dim: dim, value_dim: dim, window: None, rope, codecs: RAW_PLANES }
    };
    Layout {
        dtype: DType::F16,
        group_tokens: 4,
        padded_planes: true,
        fingerprint: b::FINGERPRINT,
        layers: vec![layer(2, Some(halves)), layer(0, None), layer(2, None), layer(2, Some(interleaved))],
    }
}

/// Returns two groups of a layer. Keys count down and values up, both in steps of 1/16.
fn groups(layer: u16) -> Extent {
    let layout = layout();
    let block = layout.block(&layout.layers[usize::from(layer)]);
    let mut planes = Vec::new();
    for group in 0..2_usize {
        for plane in 0..2_usize {
            let sign = [-1.0, 1.0][plane];
            let element = |i: usize| half::f16::from_f32(sign * (i as f32 / 16.0 + group as f32)).to_le_bytes();
            let offset = block.block_offset(group) + block.plane(plane).0;
            let (first_token, bytes) = (group as u64 * 4, (0..64).flat_map(element).collect());
            planes.push(ExtentPlane { first_token, tokens: 4, plane: plane as u16, offset, bytes });
        }
    }
    Extent { descriptor: descriptor(KIND_GROUPS, layer, 0, 8, 2), planes, bytes: block.extent_bytes(2) as u64 }
}

fn frame() -> GoldenFrame {
    lay_out(&layout(), 1, TOKEN_SEQUENCE, (0, 1), vec![groups(0), groups(2), groups(3)])
}

fn files() -> Vec<GoldenFile> {
    let frames = [frame()];
    let mut records = b::checkpoint_start(&layout(), &frames);
    records.put(Kind::SequenceCreate, &b::create(TOKEN_SEQUENCE, b::KEY), b::KEY);
    records.put_reference(TOKEN_SEQUENCE, &frames[0]);
    records.put(Kind::SequenceCommit, &b::commit(TOKEN_SEQUENCE, 8), &[]);
    b::store_files(Features::current(), &frames, records)
}

#[test]
#[ignore = "writes golden files that do not exist yet"]
fn generate_writes_the_golden_files() {
    b::write_new_files(&directory(), files());
}

#[test]
fn golden_files_are_built_byte_for_byte() {
    b::assert_same_files(&directory(), &files());
}

#[test]
fn the_frame_holds_planes_that_start_on_pages() {
    let frame = frame();
    let bytes = b::read_segment_frame(&directory(), &frame);
    let view = FrameView::verify(&bytes, &frame.place).expect("valid");
    assert_eq!(view.layout(), &layout());
    let ropes = view.layout().ropes();
    assert_eq!(
        ropes.iter().map(|rope| rope.pairing()).collect::<Vec<_>>(),
        [RopePairing::Halves, RopePairing::Interleaved]
    );
    assert_eq!((ropes[1].first(), ropes[1].dims(), ropes[1].theta()), (2, 4, 500_000.0));
    assert!(frame.planes.iter().all(|plane| plane.offset % PAGE_BYTES == 0), "each plane starts on a page");
    b::assert_planes_match(PayloadChecksum::Crc64Nvme, &frame, &bytes);
}

#[test]
fn layouts_with_wrong_rotations_are_refused() {
    let mut bytes = Vec::new();
    layout().encode(&mut bytes);
    let (layers, ropes) = (48, 48 + 4 * 12);
    assert_eq!((bytes.len(), bytes[9], bytes[10]), (ropes + 2 * 48, 3, 2));
    assert_eq!([0, 1, 2, 3].map(|layer| bytes[layers + 12 * layer + 7]), [1, 0, 0, 2]);
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = bytes.clone();
        change(&mut changed);
        Layout::decode(&changed).map(|_| ()).unwrap_err().to_string()
    };
    assert!(refused(&|b| b[9] = 11).contains("layout flags: 0xb is not supported"));
    assert!(refused(&|b| b[9] = 1).contains("rotations"));
    assert!(refused(&|b| b[layers + 7] = 2).contains("rotation of a layer"), "a layer names the second one first");
    assert!(refused(&|b| b[layers + 36 + 7] = 1).contains("rotations"), "no layer names the second one");
    assert!(refused(&|b| b[layers + 12 + 7] = 1).contains("layer without KV"));
    assert!(refused(&|b| b.copy_within(ropes..ropes + 48, ropes + 48)).contains("rotations that differ"));
    assert!(refused(&|b| b[ropes + 2] = 7).contains("rotated dims"), "an odd number");
    assert!(refused(&|b| b[ropes + 2] = 10).contains("rotated dims"), "more than the key has");
    assert!(refused(&|b| b[ropes + 4] = 3).contains("pairing of a rotation: 0x3 is not supported"));
    assert!(refused(&|b| b[ropes + 5] = 9).contains("scaling of a rotation: 0x9 is not supported"));
    assert!(refused(&|b| b[ropes + 6] = 1).contains("reserved byte"));
    assert!(refused(&|b| b[ropes + 16] = 1).contains("reserved byte"), "a factor without scaling");
    assert!(refused(&|b| b[ropes + 8..ropes + 16].copy_from_slice(&f64::NAN.to_le_bytes())).contains("theta"));
    assert!(
        refused(&|b| b[ropes + 48 + 32..][..8].copy_from_slice(&1.0_f64.to_le_bytes())).contains("high frequencies")
    );
}
