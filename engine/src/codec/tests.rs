//! Tests of round trips, error bounds, hostile bytes and the transfer model.

use super::*;
use half::{bf16, f16};
use proptest::prelude::*;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

fn to_bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let one = |x: &f32| match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

fn to_values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|w| f32::from_le_bytes(*w)).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|w| f16::from_le_bytes(*w).to_f32()).collect(),
        DType::Bf16 => bytes.as_chunks().0.iter().map(|w| bf16::from_le_bytes(*w).to_f32()).collect(),
    }
}

/// Generates realistic planes: channels of very different size, some of them constant or tiny.
fn planes() -> impl Strategy<Value = (PlaneShape, Vec<u8>)> {
    let shape = (any::<bool>(), 1_usize..4, 1_usize..18, 1_usize..70, 0_usize..3);
    shape.prop_flat_map(|(keys, heads, tokens, dims, dtype)| {
        let kind = if keys { PlaneKind::Keys } else { PlaneKind::Values };
        let shape = PlaneShape { kind, heads, tokens, dims, dtype: DTYPES[dtype] };
        let channel = (-6_i32..5, -1.0_f32..1.0, 0_u8..8);
        let element = -1.0_f32..1.0;
        let channels = prop::collection::vec(channel, dims);
        (channels, prop::collection::vec(element, heads * tokens * dims)).prop_map(move |(channels, elements)| {
            let values: Vec<f32> = elements
                .iter()
                .enumerate()
                .map(|(at, x)| {
                    let (exponent, centre, kind) = channels[at % dims];
                    let size = 10_f32.powi(exponent);
                    match kind {
                        0 => centre * size,
                        1 if *x > 0.0 => -0.0,
                        1 => 0.0,
                        _ => (centre + x) * size,
                    }
                })
                .collect();
            (shape, to_bytes(shape.dtype, &values))
        })
    })
}

/// Encodes a plane with `bits` bits. Returns whether that succeeded, and the bytes.
fn quantised(bits: u32, shape: &PlaneShape, plane: &[u8]) -> (bool, Vec<u8>) {
    let mut out =
        vec![0xee; if bits == 8 { quantise::stored_bytes::<8>(shape) } else { quantise::stored_bytes::<4>(shape) }];
    let encoded = match bits {
        8 => quantise::encode_8(shape, plane, &mut out),
        _ => quantise::encode_4(shape, plane, &mut out),
    };
    (encoded, out)
}

/// Returns the least and greatest element of every element's range.
fn ranges(shape: &PlaneShape, values: &[f32]) -> Vec<(f32, f32)> {
    let (tokens, dims) = (shape.tokens, shape.dims);
    let group = |at: usize| {
        let (head, token, dim) = (at / (tokens * dims), at / dims % tokens, at % dims);
        match shape.kind {
            PlaneKind::Keys => (head, 0, dim),
            PlaneKind::Values => (head, token, dim / VALUE_RANGE_CHANNELS),
        }
    };
    let mut found = std::collections::HashMap::new();
    for (at, x) in values.iter().enumerate() {
        let range = found.entry(group(at)).or_insert((f32::INFINITY, f32::NEG_INFINITY));
        *range = (range.0.min(*x), range.1.max(*x));
    }
    (0..values.len()).map(|at| found[&group(at)]).collect()
}

/// Encodes a plane with `bits` bits element by element, as the format defines it.
fn by_the_book(bits: u32, shape: &PlaneShape, values: &[f32]) -> Vec<u8> {
    let PlaneShape { tokens, dims, dtype, .. } = *shape;
    let number = |x: f32| to_values(dtype, &to_bytes(dtype, &[x]))[0];
    let levels = ((1_u32 << bits) - 1) as f32;
    let runs = dims.div_ceil(VALUE_RANGE_CHANNELS);
    let keys = shape.kind == PlaneKind::Keys;
    let range_of = |at: usize| if keys { at % dims } else { at / dims * runs + at % dims / VALUE_RANGE_CHANNELS };
    let mut out = Vec::new();
    for head in values.chunks_exact(tokens * dims) {
        let mut ends = vec![(f32::INFINITY, f32::NEG_INFINITY); if keys { dims } else { tokens * runs }];
        for (at, x) in head.iter().enumerate() {
            let (least, greatest) = &mut ends[range_of(at)];
            *least = if *x < *least { *x } else { *least };
            *greatest = if *x > *greatest { *x } else { *greatest };
        }
        let step = |(least, greatest): &(f32, f32)| {
            let exact = ((f64::from(*greatest) - f64::from(*least)) / f64::from(levels)) as f32;
            let next = |x: f32| match dtype {
                DType::F32 => x.next_up(),
                DType::F16 => f16::from_bits(f16::from_f32(x).to_bits() + 1).to_f32(),
                DType::Bf16 => bf16::from_bits(bf16::from_f32(x).to_bits() + 1).to_f32(),
            };
            let step = if number(exact) < exact || dtype == DType::F32 { next(number(exact)) } else { number(exact) };
            // A step has a finite inverse, unless all elements are equal.
            if greatest > least && !(1.0 / step).is_finite() { 2_f32.powi(-127) } else { step }
        };
        let steps: Vec<f32> = ends.iter().map(step).collect();
        out.extend(to_bytes(dtype, &ends.iter().map(|(least, _)| *least).collect::<Vec<_>>()));
        out.extend(to_bytes(dtype, &steps));
        for (token, row) in head.chunks_exact(dims).enumerate() {
            let level = |(dim, x): (usize, &f32)| {
                let range = range_of(token * dims + dim);
                let inverse = 1.0 / steps[range];
                let inverse = if inverse.is_finite() { inverse } else { 0.0 };
                ((x - ends[range].0) * inverse).clamp(0.0, levels).round_ties_even() as u8
            };
            let row: Vec<u8> = row.iter().enumerate().map(level).collect();
            let (low, high) = row.split_at(dims.div_ceil(2));
            match bits {
                8 => out.extend(&row),
                _ => out.extend((0..low.len()).map(|at| low[at] | high.get(at).copied().unwrap_or(0) << 4)),
            }
        }
    }
    out
}

#[test]
fn ranges_of_the_smallest_numbers_are_encoded_within_the_bound() {
    for (dtype, sizes) in
        [(DType::F32, [1e-36, 7e-37, 1e-38, 1e-40, 1e-44]), (DType::Bf16, [1e-36, 7e-37, 1e-38, 1e-40, 0.0])]
    {
        for (size, kind) in sizes.into_iter().flat_map(|size| [(size, PlaneKind::Keys), (size, PlaneKind::Values)]) {
            let shape = PlaneShape { kind, heads: 1, tokens: 8, dims: 4, dtype };
            let values: Vec<f32> =
                (0..32).map(|at| if at % 3 == 0 { 0.0 } else { size * (1.0 + at as f32 / 32.0) }).collect();
            let plane = to_bytes(dtype, &values);
            let values = to_values(dtype, &plane);
            for (codec, bits) in [(Codec::Int8, 8), (Codec::Int4, 4)] {
                let (encoded, out) = quantised(bits, &shape, &plane);
                assert!(encoded, "{dtype:?} {codec:?}: {size:e} is refused");
                assert_eq!(out, by_the_book(bits, &shape, &values), "{dtype:?} {codec:?}: {size:e}");
                let mut back = vec![0; plane.len()];
                decode(codec, &shape, &out, &mut back).unwrap();
                for ((x, found), (low, high)) in values.iter().zip(to_values(dtype, &back)).zip(ranges(&shape, &values))
                {
                    let bound = error_bound(bits, dtype, high - low, low.abs().max(high.abs()));
                    assert!((x - found).abs() <= bound, "{dtype:?} {x:e} came back as {found:e}, bound {bound:e}");
                    // Half of the least step, 2^-127, and the rounding of the dtype.
                    let is_near = size > 1e-38 || (x - found).abs() < 3.1e-39;
                    assert!(is_near, "{dtype:?} {x:e} came back as {found:e}");
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn lossless_codecs_give_back_the_exact_bytes((shape, plane) in planes(), noise in any::<u64>()) {
        let mut junk = fill(noise, plane.len());
        for codec in Codec::available().iter().filter(|codec| codec.is_lossless()) {
            for plane in [&plane, &junk] {
                let mut out = vec![7; 3];
                let used = encode(*codec, &shape, plane, &mut out).unwrap();
                prop_assert_eq!(&out[..3], &[7; 3]);
                prop_assert!(used == *codec || used == Codec::Raw);
                prop_assert!(used == Codec::Raw || (out.len() - 3) * 20 <= plane.len() * 19);
                let mut back = vec![0xee; plane.len()];
                decode(used, &shape, &out[3..], &mut back).unwrap();
                prop_assert_eq!(&back, plane);
            }
        }
        junk.clear();
    }

    #[test]
    fn quantised_codecs_stay_within_their_bound((shape, plane) in planes()) {
        let values = to_values(shape.dtype, &plane);
        for (codec, bits) in [(Codec::Int8, 8), (Codec::Int4, 4)] {
            let (encoded, out) = quantised(bits, &shape, &plane);
            prop_assert!(encoded);
            prop_assert_eq!(&out, &by_the_book(bits, &shape, &values));
            let mut back = vec![0; plane.len()];
            decode(codec, &shape, &out, &mut back).unwrap();
            let back = to_values(shape.dtype, &back);
            for ((x, found), (low, high)) in values.iter().zip(&back).zip(ranges(&shape, &values)) {
                let bound = error_bound(bits, shape.dtype, high - low, low.abs().max(high.abs()));
                let text = format!("{x} came back as {found}, bound {bound}, range {low} to {high}");
                prop_assert!((x - found).abs() <= bound, "{}", text);
            }
        }
    }

    /// Bounds of the decoded keys hold for every decoded key and any query. Selection must therefore summarise the
    /// decoded keys, which attention sees, and not the appended ones.
    #[test]
    fn bounds_over_decoded_keys_hold_for_each_of_them((shape, plane) in planes(), seed in any::<u64>()) {
        for codec in Codec::available() {
            let mut out = Vec::new();
            let used = encode(*codec, &shape, &plane, &mut out).unwrap();
            let mut back = vec![0; plane.len()];
            decode(used, &shape, &out, &mut back).unwrap();
            let back = to_values(shape.dtype, &back);
            prop_assert!(back.iter().all(|x| x.is_finite()));
            let query: Vec<f64> = fill(seed, shape.dims).iter().map(|b| f64::from(*b) - 128.0).collect();
            for head in back.chunks_exact(shape.tokens * shape.dims) {
                let column = |d: usize| head.iter().skip(d).step_by(shape.dims).map(|x| f64::from(*x));
                let least: Vec<f64> = (0..shape.dims).map(|d| column(d).fold(f64::INFINITY, f64::min)).collect();
                let most: Vec<f64> = (0..shape.dims).map(|d| column(d).fold(f64::NEG_INFINITY, f64::max)).collect();
                let (mut lower, mut upper) = (0.0, 0.0);
                for d in 0..shape.dims {
                    lower += (query[d] * least[d]).min(query[d] * most[d]);
                    upper += (query[d] * least[d]).max(query[d] * most[d]);
                }
                for key in head.chunks_exact(shape.dims) {
                    let score: f64 = key.iter().zip(&query).map(|(k, q)| f64::from(*k) * q).sum();
                    let slack = 1e-9 * (1.0 + lower.abs().max(upper.abs()));
                    prop_assert!(lower - slack <= score && score <= upper + slack);
                }
            }
        }
    }

    #[test]
    fn hostile_bytes_are_errors_or_planes_never_panics(
        (shape, plane) in planes(), cut in 0.0_f64..1.2,
        flips in prop::collection::vec((any::<u32>(), 1_u8..), 0..4), seed in any::<u64>(),
    ) {
        for codec in Codec::available() {
            let mut stored = Vec::new();
            encode(*codec, &shape, &plane, &mut stored).unwrap();
            let noise = fill(seed, stored.len());
            stored.resize((stored.len() as f64 * cut) as usize, 3);
            for (at, bits) in &flips {
                let at = *at as usize % stored.len().max(1);
                if let Some(byte) = stored.get_mut(at) {
                    *byte ^= bits;
                }
            }
            let mut back = vec![0; plane.len()];
            for bytes in [&stored, &noise] {
                if let Err(e) = decode(*codec, &shape, bytes, &mut back) {
                    prop_assert_eq!(e.kind(), ErrorKind::Corruption);
                }
            }
        }
    }

    #[test]
    fn the_solved_share_is_no_worse_than_any_other(
        bytes in 1e5_f64..1e8, bandwidth in 1e8_f64..2e10, ratio in 0.2_f64..1.1, compute in 0.0_f64..0.05,
        decode in 5e8_f64..2e10,
        base in 0.0_f64..0.001,
    ) {
        let model = TransferModel { base_s: base, bytes, bandwidth, ratio, compute_s: compute, decode };
        let chosen = model.layer_s(solve_share(&model));
        for step in 0..=100 {
            prop_assert!(chosen <= model.layer_s(f64::from(step) / 100.0) * (1.0 + 1e-9));
        }
    }

    #[test]
    fn solve_layers_chooses_by_the_time_of_a_step(
        bytes in 1e5_f64..1e8, bandwidth in 1e8_f64..2e10, ratio in 0.2_f64..1.1, compute in 0.0_f64..0.05,
        decode in 5e8_f64..2e10,
        base in 0.0_f64..0.001, layers in 0_u16..40,
    ) {
        let model = TransferModel { base_s: base, bytes, bandwidth, ratio, compute_s: compute, decode };
        let chosen = solve_layers(&model, layers);
        let taken = model.step_s(layers, chosen);
        for encoded in 0..=layers {
            let own = model.step_s(layers, encoded);
            let holds = taken <= own * 1.021 && (encoded >= chosen || own > taken);
            prop_assert!(holds, "{encoded}: {own}, {chosen}: {taken}");
            // A step takes at least as long as the reads or the computation of all layers.
            let share = f64::from(encoded) / f64::from(layers.max(1));
            prop_assert!(own >= model.layer_s(share) * f64::from(layers) * (1.0 - 1e-9), "{encoded}: {own}");
        }
    }
}

/// The model is compared with steps of 16 layers on a disk: 93.1 ms with no layer compressed, 61.7 with all, 73.8 with
/// 10.
#[test]
fn a_step_waits_for_each_layer_that_is_read_too_slowly() {
    let (bytes, bandwidth, decode) = (6.6e6, 1.134e9, f64::INFINITY);
    let model = TransferModel { base_s: 0.0, bytes, bandwidth, ratio: 0.663, compute_s: 2.77e-3, decode };
    for (encoded, measured) in [(0, 93.1e-3), (10, 73.8e-3), (16, 61.7e-3)] {
        let own = model.step_s(16, encoded);
        assert!((own / measured - 1.0).abs() < 0.01, "{encoded}: {own}, {measured}");
    }
    assert_eq!(solve_layers(&model, 16), 16);
    // If every layer gave the same share, three quarters would suffice here, but twelve of sixteen layers do not.
    let model = TransferModel { compute_s: 4.4e-3, ..model };
    let share = solve_share(&model);
    assert!((0.7..0.75).contains(&share), "{share}");
    assert_eq!(solve_layers(&model, 16), 16);
    let idle = TransferModel { compute_s: 1.0, ..model };
    assert_eq!((solve_layers(&idle, 16), solve_layers(&model, 0)), (0, 0));
    let broken = TransferModel { bandwidth: 0.0, ..model };
    assert_eq!(solve_layers(&broken, 16), 0, "no bandwidth is known");
}

fn fill(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}

#[test]
fn planes_without_a_finite_range_stay_raw() {
    let shape = PlaneShape { kind: PlaneKind::Keys, heads: 1, tokens: 8, dims: 16, dtype: DType::F16 };
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![0.5; 128];
        values[77] = odd;
        let plane = to_bytes(shape.dtype, &values);
        for codec in [Codec::Int8, Codec::Int4] {
            let mut out = Vec::new();
            assert_eq!(encode(codec, &shape, &plane, &mut out).unwrap(), Codec::Raw);
            assert_eq!(out, plane);
        }
    }
    // The widest range that f16 has.
    let most = f16::MAX.to_f32();
    let values: Vec<f32> = (0..128).map(|at| if at % 2 == 0 { most } else { -most }).collect();
    let values: Vec<f32> = (0..128).map(|at| values[(at + at / 16) % 128]).collect();
    let plane = to_bytes(shape.dtype, &values);
    for codec in [Codec::Int8, Codec::Int4] {
        let (mut out, mut back) = (Vec::new(), vec![0; plane.len()]);
        let used = encode(codec, &shape, &plane, &mut out).unwrap();
        decode(used, &shape, &out, &mut back).unwrap();
        assert!(to_values(shape.dtype, &back).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn encoded_sizes_follow_from_the_shape() {
    // Groups of 8 tokens of LLaMA-3-8B's width.
    let shape = |kind, tokens| PlaneShape { kind, heads: 8, tokens, dims: 128, dtype: DType::F16 };
    let size = |codec, kind, tokens| {
        let shape = shape(kind, tokens);
        let values: Vec<f32> = (0..8 * tokens * 128).map(|at| (at as f32 * 0.37).sin()).collect();
        let mut out = Vec::new();
        assert_eq!(encode(codec, &shape, &to_bytes(DType::F16, &values), &mut out).unwrap(), codec);
        out.len() as f64 / shape.bytes().unwrap() as f64
    };
    assert!((size(Codec::Int8, PlaneKind::Keys, 8) - 0.75).abs() < 1e-9);
    assert!((size(Codec::Int4, PlaneKind::Keys, 8) - 0.5).abs() < 1e-9);
    assert!((size(Codec::Int4, PlaneKind::Keys, 64) - 0.28125).abs() < 1e-9);
    assert!((size(Codec::Int8, PlaneKind::Values, 8) - 0.5625).abs() < 1e-9);
    assert!((size(Codec::Int4, PlaneKind::Values, 8) - 0.3125).abs() < 1e-9);
}

#[test]
fn wrong_lengths_and_shapes_are_errors() {
    let shape = PlaneShape { kind: PlaneKind::Values, heads: 2, tokens: 3, dims: 5, dtype: DType::Bf16 };
    let plane = vec![0; 60];
    let mut out = Vec::new();
    assert_eq!(encode(Codec::Int8, &shape, &plane[1..], &mut out).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(decode(Codec::Raw, &shape, &plane[1..], &mut [0; 60]).unwrap_err().kind(), ErrorKind::Corruption);
    assert_eq!(decode(Codec::Raw, &shape, &plane, &mut [0; 4]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    for (heads, tokens, dims) in [(0, 1, 1), (usize::MAX, 2, 2), (1 << 20, 1 << 20, 1)] {
        let shape = PlaneShape { heads, tokens, dims, ..shape };
        assert_eq!(decode(Codec::Int4, &shape, &plane, &mut []).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
