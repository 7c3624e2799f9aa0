//! The golden store of a layout with codecs: planes of 8 and of 4 bits, odd numbers of channels, a layer without V, a tail that
//! is as it is. It is read completely and written again byte for byte.

use crate::golden_store as g;
use crate::retrieval::store::{Extent, TOKENS, commit, create, descriptor, files_of, laid_out, refer, store_records};
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::codec::PlaneShape;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::features::Features;
use stratakv_format::frame::{FrameView, KIND_GROUPS, KIND_TAIL, tail_plane_bytes};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{Kind, ManifestPage};
use stratakv_format::superblock::Slot;
use stratakv_format::{DType, PAGE_BYTES, PlaneCodec, Unverified};
use zerocopy::little_endian::{U16, U64};

const GROUP: usize = 8;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v0.3/store-codecs")
}

/// Groups of eight tokens of two KV heads.
fn layout() -> Layout {
    use PlaneCodec::{Int4, Int8, Raw};
    let layer = |kv_heads, key_dim, value_dim, codecs| LayerGeometry {
        kv_heads,
        key_dim,
        value_dim,
        window: None,
        rope: None,
        codecs,
    };
    Layout {
        dtype: DType::F16,
        group_tokens: GROUP as u16,
        padded_planes: false,
        fingerprint: *b"fingerprint of the golden model.",
        layers: vec![
            layer(2, 40, 40, [Int8, Int8]),
            layer(0, 0, 0, RAW_PLANES),
            layer(2, 33, 33, [Int4, Int4]),
            layer(2, 64, 0, [Int8, Raw]),
        ],
    }
}

fn f16(x: f32) -> [u8; 2] {
    half::f16::from_f32(x).to_le_bytes()
}

/// A plane: the least value of range r is -r / 8 (-r / 64 where there are many), every step 1 / 16, the levels count in steps of 37 from
/// the number of the group, the head and the plane on.
fn plane(codec: PlaneCodec, shape: &PlaneShape, group: usize) -> Vec<u8> {
    let most = if codec == PlaneCodec::Int4 { 16 } else { 256 };
    let mut bytes = Vec::new();
    for head in 0..shape.heads {
        bytes.extend((0..shape.ranges()).flat_map(|range| f16(-(range as f32) / 8.0)));
        bytes.extend((0..shape.ranges()).flat_map(|_| f16(1.0 / 16.0)));
        for token in 0..shape.tokens {
            let level =
                |channel: usize| ((channel * 37 + token * 11 + head * 5 + group * 3 + shape.plane) % most) as u8;
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

fn groups(layer: u16) -> Extent {
    let layout = layout();
    let geometry = layout.layers[usize::from(layer)];
    let block = layout.block(&geometry);
    let mut planes = Vec::new();
    for group in 0..2_usize {
        for index in 0..geometry.planes() {
            let data = plane(geometry.codecs[index], &layout.plane_shape(&geometry, index), group);
            let at = block.block_offset(group) + block.plane(index).0;
            planes.push(((group * GROUP) as u64, GROUP as u32, index as u16, at, data));
        }
    }
    let mut descriptor = descriptor(KIND_GROUPS, layer, 0, 2 * GROUP as u32, 2);
    descriptor.codec = U16::new([0x0101, 0, 0x0202, 0x0001][usize::from(layer)]);
    Extent { descriptor, planes, bytes: block.extent_bytes(2) as u64 }
}

/// Three tokens behind the groups, as they are: keys count up, values down, both in steps of 1/16.
fn tail(layer: u16) -> Extent {
    let geometry = layout().layers[usize::from(layer)];
    let (key, value) = tail_plane_bytes(&geometry, DType::F16, 3);
    let plane = |bytes: usize, sign: f32| (0..bytes / 2).flat_map(|i| f16(sign * i as f32 / 16.0)).collect::<Vec<u8>>();
    let (keys, values) = (plane(key, 1.0), plane(value, -1.0));
    let first = 2 * GROUP as u64;
    let mut planes = vec![(first, 3, 0, 0, keys)];
    if value > 0 {
        planes.push((first, 3, 1, key, values));
    }
    Extent { descriptor: descriptor(KIND_TAIL, layer, first, 3, 1), planes, bytes: (key + value) as u64 }
}

fn frames() -> Vec<g::GoldenFrame> {
    let extents = vec![tail(0), tail(2), tail(3), groups(0), groups(2), groups(3)];
    vec![laid_out(&layout(), 1, TOKENS, (0, 1), extents)]
}

fn features() -> Features {
    Features::current().with_codecs()
}

fn files() -> Vec<(String, Vec<u8>)> {
    let frames = frames();
    let mut records = store_records(&layout(), &frames);
    records.put(Kind::SequenceCreate, &create(TOKENS, b"golden"), b"golden");
    refer(&mut records, TOKENS, &frames[0]);
    records.put(Kind::SequenceCommit, &commit(TOKENS, 2 * GROUP as u64 + 3), &[]);
    let mut files = files_of(frames, records);
    // Superblock and manifest name the feature.
    for (name, bytes) in &mut files {
        if name == "superblock" {
            let slot = |index: usize| {
                let synced_through = U64::new([40, 41][index]);
                let slot = g::slot(index, PayloadChecksum::Crc64Nvme);
                Slot { features: features(), synced_through, ..slot }.encode()
            };
            *bytes = [slot(0), slot(1)].concat();
        } else if let Some(copy) = name.strip_prefix("manifest/0000000000000003-") {
            let copy = copy.parse().expect("a copy");
            let page = ManifestPage { features: features(), ..g::manifest_page(copy) };
            bytes[..PAGE_BYTES].copy_from_slice(&page.encode());
        }
    }
    files
}

#[test]
#[ignore = "writes the golden files of the version in the making"]
fn generate() {
    for (name, bytes) in files() {
        let path = directory().join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
        fs::write(path, bytes).expect("written");
    }
}

#[test]
fn written_again_byte_for_byte() {
    for (name, bytes) in files() {
        let golden = fs::read(directory().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let differs = golden.iter().zip(&bytes).position(|(a, b)| a != b);
        assert_eq!((differs, golden.len()), (None, bytes.len()), "{name} differs");
    }
}

#[test]
fn superblocks_and_manifests_name_the_feature() {
    let superblock = fs::read(directory().join("superblock")).expect("a superblock");
    for index in 0..2 {
        let page = &superblock[index * PAGE_BYTES..(index + 1) * PAGE_BYTES];
        let slot = Unverified::<Slot>::at_front(page, "slot").and_then(|slot| slot.verify(index)).expect("valid");
        assert_eq!(slot.features.incompat.get(), 5);
        assert!(slot.features.has_codecs() && !slot.features.has_replicas());
    }
    for copy in 0..2 {
        let file = fs::read(directory().join(format!("manifest/0000000000000003-{copy}"))).expect("a manifest");
        let page = Unverified::<ManifestPage>::at_front(&file[..PAGE_BYTES], "page").and_then(|page| page.verify());
        assert!(page.expect("valid").features.has_codecs());
    }
}

#[test]
fn the_frame_says_what_the_literals_say() {
    let frame = &frames()[0];
    let file = fs::read(directory().join("segments/00000001")).expect("a segment");
    let at = frame.place.location.offset() as usize;
    let bytes = &file[at..at + frame.place.location.bytes() as usize];
    let view = FrameView::verify(bytes, &frame.place).expect("valid");
    assert_eq!(view.layout(), &layout());
    let codecs: Vec<u16> = view.descriptors().iter().map(|descriptor| descriptor.codec.get()).collect();
    assert_eq!(codecs, [0, 0, 0, 0x0101, 0x0202, 0x0001]);
    let blocks: Vec<_> = [0, 2, 3].map(|layer| layout().block(&layout().layers[layer])).into();
    assert_eq!(
        blocks.iter().map(|b| (b.key_bytes, b.value_bytes)).collect::<Vec<_>>(),
        [(960, 768), (536, 400), (1536, 0)]
    );
    let sums: Vec<u64> = view.descriptors().iter().flat_map(|d| view.checksums(d)).map(|sum| sum.get()).collect();
    for ((_, identity, at, data), sum) in frame.planes.iter().zip(sums) {
        assert_eq!(&bytes[*at..at + data.len()], &data[..]);
        assert_eq!(PayloadChecksum::Crc64Nvme.compute(identity, data), sum);
    }
    for layer in [0, 2, 3] {
        let geometry = &layout().layers[layer];
        for index in 0..geometry.planes() {
            let (codec, shape) = (geometry.codecs[index], layout().plane_shape(geometry, index));
            let mut stored = plane(codec, &shape, 1);
            assert_eq!(codec.first_bad(&shape, &stored), None);
            assert_eq!(codec.first_bad(&shape, &stored[1..]), Some(stored.len() - 1));
            // The first step of the second head: infinite, then no number.
            let at = codec.head_bytes(&shape) + 2 * shape.ranges();
            for bits in [0x7c00_u16, 0xfe01] {
                stored[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                assert_eq!(codec.first_bad(&shape, &stored), Some(at));
            }
        }
    }
}

#[test]
fn layouts_and_descriptors_that_say_it_otherwise_are_refused() {
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
    assert!(refused(&|b| b[codecs..].fill(0)).to_string().contains("codecs"), "a flag for nothing");
    assert!(refused(&|b| b[codecs + 2] = 1).to_string().contains("codec of a layer without KV"));
    assert!(refused(&|b| b[codecs + 7] = 1).to_string().contains("does not shrink"), "there is no V plane");
    assert!(
        refused(&|b| b[6] = 4).to_string().contains("does not shrink"),
        "int8 keys of four tokens are as long as f16"
    );
    assert!(refused(&|b| b.truncate(codecs + 7)).to_string().contains("layout"));

    // A descriptor says what the layout says.
    for (codec, unsupported) in [(0, false), (0x0100, false), (0x0202, false), (0x0103, true), (0x0301, true)] {
        let mut extent = groups(0);
        extent.descriptor.codec = U16::new(codec);
        let frame = laid_out(&layout(), 1, TOKENS, (0, 1), vec![extent]);
        let error = FrameView::verify(&frame.bytes, &frame.place).map(|_| ()).unwrap_err();
        assert_eq!(error.code == FormatErrorCode::Unsupported, unsupported, "{error}");
        assert!(error.field.contains("codec"), "{error}");
    }
    let mut extent = tail(0);
    extent.descriptor.codec = U16::new(0x0101);
    let frame = laid_out(&layout(), 1, TOKENS, (0, 1), vec![extent]);
    assert_eq!(FrameView::verify(&frame.bytes, &frame.place).map(|_| ()).unwrap_err().field, "codec of the layout");
}
