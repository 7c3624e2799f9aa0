//! The golden store of a layout with planes on pages of their own and with rotations. It is read completely and written again
//! byte for byte.

use crate::retrieval::store::{Extent, TOKENS, commit, create, descriptor, files_of, laid_out, refer, store_records};
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::frame::{FrameView, KIND_GROUPS};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::Kind;
use stratakv_format::rope::{Rope, RopePairing, RopeScaling};
use stratakv_format::{DType, PAGE_BYTES, PayloadChecksum};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v0.2/store-planes")
}

/// Groups of four tokens of two KV heads of 8.
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
        fingerprint: *b"fingerprint of the golden model.",
        layers: vec![layer(2, Some(halves)), layer(0, None), layer(2, None), layer(2, Some(interleaved))],
    }
}

/// Keys count down, values up, both in steps of 1/16.
fn groups(layer: u16) -> Extent {
    let layout = layout();
    let block = layout.block(&layout.layers[usize::from(layer)]);
    let mut planes = Vec::new();
    for group in 0..2_usize {
        for plane in 0..2_usize {
            let sign = [-1.0, 1.0][plane];
            let element = |i: usize| half::f16::from_f32(sign * (i as f32 / 16.0 + group as f32)).to_le_bytes();
            let at = block.block_offset(group) + block.plane(plane).0;
            planes.push((group as u64 * 4, 4, plane as u16, at, (0..64).flat_map(element).collect()));
        }
    }
    Extent { descriptor: descriptor(KIND_GROUPS, layer, 0, 8, 2), planes, bytes: block.extent_bytes(2) as u64 }
}

fn files() -> Vec<(String, Vec<u8>)> {
    let frames = vec![laid_out(&layout(), 1, TOKENS, (0, 1), vec![groups(0), groups(2), groups(3)])];
    let mut records = store_records(&layout(), &frames);
    records.put(Kind::SequenceCreate, &create(TOKENS, b"golden"), b"golden");
    refer(&mut records, TOKENS, &frames[0]);
    records.put(Kind::SequenceCommit, &commit(TOKENS, 8), &[]);
    files_of(frames, records)
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
fn the_frame_says_what_the_literals_say() {
    let frame = laid_out(&layout(), 1, TOKENS, (0, 1), vec![groups(0), groups(2), groups(3)]);
    let file = fs::read(directory().join("segments/00000001")).expect("a segment");
    let at = frame.place.location.offset() as usize;
    let bytes = &file[at..at + frame.place.location.bytes() as usize];
    let view = FrameView::verify(bytes, &frame.place).expect("valid");
    assert_eq!(view.layout(), &layout());
    let ropes = view.layout().ropes();
    assert_eq!(
        ropes.iter().map(|rope| rope.pairing()).collect::<Vec<_>>(),
        [RopePairing::Halves, RopePairing::Interleaved]
    );
    assert_eq!((ropes[1].first(), ropes[1].dims(), ropes[1].theta()), (2, 4, 500_000.0));
    let sums: Vec<u64> = view.descriptors().iter().flat_map(|d| view.checksums(d)).map(|sum| sum.get()).collect();
    for ((_, identity, at, data), sum) in frame.planes.iter().zip(sums) {
        assert_eq!(&bytes[*at..at + data.len()], &data[..]);
        assert_eq!(at % PAGE_BYTES, 0, "each plane starts on a page");
        assert_eq!(PayloadChecksum::Crc64Nvme.compute(identity, data), sum);
    }
}

#[test]
fn layouts_that_say_it_otherwise_are_refused() {
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
    assert!(refused(&|b| b[layers + 7] = 2).contains("rotation of a layer"), "the second one is named first");
    assert!(refused(&|b| b[layers + 36 + 7] = 1).contains("rotations"), "nobody names the second one");
    assert!(refused(&|b| b[layers + 12 + 7] = 1).contains("layer without KV"));
    assert!(refused(&|b| b.copy_within(ropes..ropes + 48, ropes + 48)).contains("rotations that differ"));
    assert!(refused(&|b| b[ropes + 2] = 7).contains("rotated dims"), "an odd number");
    assert!(refused(&|b| b[ropes + 2] = 10).contains("rotated dims"), "more than the key has");
    assert!(refused(&|b| b[ropes + 4] = 3).contains("pairing of a rotation: 0x3 is not supported"));
    assert!(refused(&|b| b[ropes + 5] = 9).contains("scaling of a rotation: 0x9 is not supported"));
    assert!(refused(&|b| b[ropes + 6] = 1).contains("reserved byte"));
    assert!(refused(&|b| b[ropes + 16] = 1).contains("reserved byte"), "no factor without scaling");
    assert!(refused(&|b| b[ropes + 8..ropes + 16].copy_from_slice(&f64::NAN.to_le_bytes())).contains("theta"));
    assert!(
        refused(&|b| b[ropes + 48 + 32..][..8].copy_from_slice(&1.0_f64.to_le_bytes())).contains("high frequencies")
    );
}
