//! The golden store `v0.2/store-planes`: a layout with padded planes and with rotations.

use crate::builder::{self as b, Extent, GoldenFile, GoldenFrame, TOKEN_SEQUENCE, f16, lay_out};
use std::path::PathBuf;
use stratakv_format::features::Features;
use stratakv_format::frame::FrameView;
use stratakv_format::layout::{LayerGeometry, Layout};
use stratakv_format::rope::{Rope, RopePairing, RopeScaling};
use stratakv_format::{PAGE_BYTES, PayloadChecksum};

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
        LayerGeometry { rope, ..b::layer(heads, dim, dim) }
    };
    let layers = vec![layer(2, Some(halves)), layer(0, None), layer(2, None), layer(2, Some(interleaved))];
    Layout { padded_planes: true, ..b::layout_of(layers) }
}

/// Returns two groups of a layer. Keys count down and values up, both in steps of 1/16.
fn groups(layer: u16) -> Extent {
    b::two_groups(&layout(), layer, |group, plane| {
        let sign = [-1.0, 1.0][plane];
        (0..64).flat_map(|i| f16(sign * (i as f32 / 16.0 + group as f32))).collect()
    })
}

fn frame() -> GoldenFrame {
    lay_out(&layout(), 1, TOKEN_SEQUENCE, (0, 1), vec![groups(0), groups(2), groups(3)])
}

fn files() -> Vec<GoldenFile> {
    b::token_store_files(Features::current(), &layout(), frame(), 8)
}

b::golden_file_tests!(directory(), files());

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
