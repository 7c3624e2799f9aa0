//! Stored planes of every codec.
//!
//! The target decodes the input itself. It also encodes the input, decodes it, and decodes it again after changes.
//! A plane that does not decode is an error of kind `Corruption`, never a panic. A lossless codec gives the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, decode, encode};
use stratakv::{DType, ErrorKind};

/// Bytes of the input that choose codec, shape and changes.
const HEAD: usize = 6;

/// Decodes a plane. The only error is damage.
fn read(codec: Codec, shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) {
    if let Err(e) = decode(codec, shape, stored, plane) {
        assert_eq!(e.kind(), ErrorKind::Corruption, "{e:?}");
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&[codec, kind, heads, tokens, dims, flips], rest)) = data.split_first_chunk::<HEAD>() else { return };
    let all = Codec::available();
    let codec = all[usize::from(codec) % all.len()];
    let shape = PlaneShape {
        kind: if kind & 1 == 0 { PlaneKind::Keys } else { PlaneKind::Values },
        heads: 1 + usize::from(heads) % 4,
        tokens: 1 + usize::from(tokens) % 33,
        dims: 1 + usize::from(dims) % 70,
        dtype: [DType::F16, DType::Bf16, DType::F32][usize::from(kind / 2) % 3],
    };
    let bytes = shape.bytes().expect("a small plane");
    let mut back = vec![0; bytes];
    read(codec, &shape, rest, &mut back);

    let plane: Vec<u8> = rest.iter().copied().chain(std::iter::repeat(0)).take(bytes).collect();
    let mut stored = Vec::new();
    let used = encode(codec, &shape, &plane, &mut stored).expect("a plane of its shape");
    decode(used, &shape, &stored, &mut back).expect("an encoded plane");
    assert!(stored.len() <= bytes);
    assert!(!used.is_lossless() || back == plane, "{used:?} of {shape:?}");
    for flip in 0..usize::from(flips % 4) {
        let at = rest.get(flip).map_or(0, |byte| usize::from(*byte)) * 131 % stored.len();
        stored[at] ^= 1 << (flips % 8);
    }
    stored.truncate(stored.len() - usize::from(flips / 16).min(stored.len()));
    read(used, &shape, &stored, &mut back);
});
