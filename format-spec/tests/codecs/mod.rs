//! The golden store `v0.3/store-codecs`: a layout with codecs.
//!
//! Its planes have levels of 8 and of 4 bits, odd numbers of channels and a layer without V. Its tails are raw.

use crate::builder::{self as b, Extent, GoldenFile, GoldenFrame, TOKEN_SEQUENCE, f16, lay_out};
use std::fs;
use std::path::PathBuf;
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::codec::PlaneShape;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::features::Features;
use stratakv_format::frame::{FrameView, tail_plane_bytes};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::ManifestPage;
use stratakv_format::superblock::Slot;
use stratakv_format::{DType, FormatError, PAGE_BYTES, PlaneCodec, Unverified};
use zerocopy::little_endian::U16;

const GROUP: usize = 8;

fn directory() -> PathBuf {
    b::golden_directory("v0.3/store-codecs")
}

/// Returns a layout with groups of eight tokens.
fn layout() -> Layout {
    use PlaneCodec::{Int4, Int8, Raw};
    let layer =
        |kv_heads, key_dim, value_dim, codecs| LayerGeometry { codecs, ..b::layer(kv_heads, key_dim, value_dim) };
    let layers = vec![
        layer(2, 40, 40, [Int8, Int8]),
        layer(0, 0, 0, RAW_PLANES),
        layer(2, 33, 33, [Int4, Int4]),
        layer(2, 64, 0, [Int8, Raw]),
    ];
    Layout { group_tokens: GROUP as u16, ..b::layout_of(layers) }
}

/// Returns a stored plane of levels.
///
/// The minimum of range r is -r / 8, and every step is 1 / 16. The levels grow by 37 per channel, from a start that
/// depends on token, head, group and plane.
fn plane(codec: PlaneCodec, shape: &PlaneShape, group: usize) -> Vec<u8> {
    let levels = if codec == PlaneCodec::Int4 { 16 } else { 256 };
    let mut bytes = Vec::new();
    for head in 0..shape.heads {
        bytes.extend((0..shape.ranges()).flat_map(|range| f16(-(range as f32) / 8.0)));
        bytes.extend((0..shape.ranges()).flat_map(|_| f16(1.0 / 16.0)));
        for token in 0..shape.tokens {
            let level =
                |channel: usize| ((channel * 37 + token * 11 + head * 5 + group * 3 + shape.plane) % levels) as u8;
            let half = shape.dims.div_ceil(2);
            match codec {
                PlaneCodec::Int4 => bytes.extend((0..half).map(|channel| {
                    let upper = if half + channel < shape.dims { level(half + channel) } else { 0 };
                    level(channel) | upper << 4
                })),
                _ => bytes.extend((0..shape.dims).map(level)),
            }
        }
    }
    bytes
}

/// Returns two groups of a layer.
fn groups(layer: u16) -> Extent {
    let layout = layout();
    let geometry = layout.layers[usize::from(layer)];
    let stored = |group, index| plane(geometry.codecs[index], &layout.plane_shape(&geometry, index), group);
    let mut extent = b::two_groups(&layout, layer, stored);
    extent.descriptor.codec = U16::new([0x0101, 0, 0x0202, 0x0001][usize::from(layer)]);
    extent
}

/// Returns the three tokens after the groups, raw. Keys count up and values down, both in steps of 1/16.
fn tail(layer: u16) -> Extent {
    let geometry = layout().layers[usize::from(layer)];
    let (key, value) = tail_plane_bytes(&geometry, DType::F16, 3);
    let plane = |bytes: usize, sign: f32| (0..bytes / 2).flat_map(|i| f16(sign * i as f32 / 16.0)).collect::<Vec<u8>>();
    let planes = [(key, 1.0), (value, -1.0)].into_iter().filter(|(bytes, _)| *bytes > 0);
    b::tail_of(layer, 2 * GROUP as u64, 3, planes.map(|(bytes, sign)| plane(bytes, sign)).collect())
}

fn frame() -> GoldenFrame {
    let extents = vec![tail(0), tail(2), tail(3), groups(0), groups(2), groups(3)];
    lay_out(&layout(), 1, TOKEN_SEQUENCE, (0, 1), extents)
}

fn files() -> Vec<GoldenFile> {
    b::token_store_files(Features::current().with_codecs(), &layout(), frame(), 2 * GROUP as u64 + 3)
}

b::golden_file_tests!(directory(), files());

#[test]
fn superblocks_and_manifests_name_the_feature_of_codecs() {
    let superblock = fs::read(directory().join("superblock")).expect("a superblock");
    for index in 0..2 {
        let page = &superblock[index * PAGE_BYTES..(index + 1) * PAGE_BYTES];
        let slot = Unverified::<Slot>::at_front(page, "slot").and_then(|slot| slot.verify(index)).expect("valid");
        assert_eq!(slot.features.incompat.get(), 5);
        assert!(slot.features.has_codecs() && !slot.features.has_copies());
    }
    for copy in 0..2 {
        let file = fs::read(directory().join(format!("manifest/0000000000000003-{copy}"))).expect("a manifest");
        let page = Unverified::<ManifestPage>::at_front(&file[..PAGE_BYTES], "page").and_then(|page| page.verify());
        assert!(page.expect("valid").features.has_codecs());
    }
}

#[test]
fn the_frame_holds_the_encoded_planes() {
    let frame = frame();
    let bytes = b::read_segment_frame(&directory(), &frame);
    let view = FrameView::verify(&bytes, &frame.place).expect("valid");
    assert_eq!(view.layout(), &layout());
    let codecs: Vec<u16> = view.descriptors().iter().map(|descriptor| descriptor.codec.get()).collect();
    assert_eq!(codecs, [0, 0, 0, 0x0101, 0x0202, 0x0001]);
    let blocks: Vec<_> = [0, 2, 3].map(|layer| layout().block(&layout().layers[layer])).into();
    assert_eq!(
        blocks.iter().map(|b| (b.key_bytes, b.value_bytes)).collect::<Vec<_>>(),
        [(960, 768), (536, 400), (1536, 0)]
    );
    b::assert_planes_match(PayloadChecksum::Crc64Nvme, &frame, &bytes);
}

#[test]
fn first_bad_finds_parameters_that_are_not_finite() {
    for layer in [0, 2, 3] {
        let geometry = &layout().layers[layer];
        for index in 0..geometry.planes() {
            let (codec, shape) = (geometry.codecs[index], layout().plane_shape(geometry, index));
            let mut stored = plane(codec, &shape, 1);
            assert_eq!(codec.first_bad(&shape, &stored), None);
            assert_eq!(codec.first_bad(&shape, &stored[1..]), Some(stored.len() - 1));
            // The first step of the second head becomes infinite, then not a number.
            let at = codec.head_bytes(&shape) + 2 * shape.ranges();
            for bits in [0x7c00_u16, 0xfe01] {
                stored[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                assert_eq!(codec.first_bad(&shape, &stored), Some(at));
            }
        }
    }
}

#[test]
fn layouts_with_wrong_codecs_are_refused() {
    let mut bytes = Vec::new();
    layout().encode(&mut bytes);
    let codecs = 48 + 4 * 12;
    assert_eq!((bytes.len(), bytes[9]), (codecs + 4 * 2, 4));
    assert_eq!(bytes[codecs..], [1, 1, 0, 0, 2, 2, 1, 0]);
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = bytes.clone();
        change(&mut changed);
        Layout::decode(&changed).map(|_| ()).unwrap_err()
    };
    let unknown = refused(&|b| b[codecs + 1] = 3);
    assert_eq!((unknown.code, unknown.field, unknown.offset), (FormatErrorCode::Unsupported, "codec", codecs + 1));
    assert!(refused(&|b| b[9] = 0).to_string().contains("layout bytes"), "the flag is missing");
    assert!(
        refused(&|b| b[codecs..].fill(0)).to_string().contains("codecs"),
        "the flag is set, but all planes are raw"
    );
    assert!(refused(&|b| b[codecs + 2] = 1).to_string().contains("codec of a layer without KV"));
    assert!(refused(&|b| b[codecs + 7] = 1).to_string().contains("does not shrink"), "there is no V plane");
    let four_tokens = refused(&|b| b[6] = 4).to_string();
    assert!(four_tokens.contains("does not shrink"), "int8 keys of four tokens take as many bytes as f16 keys");
    assert!(refused(&|b| b.truncate(codecs + 7)).to_string().contains("layout"));
}

#[test]
fn descriptors_with_another_codec_than_the_layout_are_refused() {
    let verify = |extent: Extent| -> FormatError {
        let frame = lay_out(&layout(), 1, TOKEN_SEQUENCE, (0, 1), vec![extent]);
        FrameView::verify(&frame.bytes, &frame.place).map(|_| ()).unwrap_err()
    };
    for (codec, unsupported) in [(0, false), (0x0100, false), (0x0202, false), (0x0103, true), (0x0301, true)] {
        let mut extent = groups(0);
        extent.descriptor.codec = U16::new(codec);
        let error = verify(extent);
        assert_eq!(error.code == FormatErrorCode::Unsupported, unsupported, "{error}");
        assert!(error.field.contains("codec"), "{error}");
    }
    let mut extent = tail(0);
    extent.descriptor.codec = U16::new(0x0101);
    assert_eq!(verify(extent).field, "codec of the layout");
}
