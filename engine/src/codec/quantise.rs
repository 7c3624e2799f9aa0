//! Eight and four bits per element, in even steps over the range of a group.
//!
//! Stored, per head: the parameters of its groups, then its rows. A group has two parameters in the plane's own dtype: the
//! least value, rounded down, and the step, rounded up, so that `least + levels * step` is never below the greatest value and
//! every level is used for something that occurs. A row of `dims` levels takes `dims` bytes, or half: two levels in a byte,
//! the lower half of the row in the low nibbles.

use super::{PlaneKind, PlaneShape, VALUE_RUN, damaged};
use crate::error::Result;
use crate::simd::widest;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use stratakv_format::{DType, PlaneCodec};

/// The most by which a decoded element differs from what was encoded, when its group spans `range` (greatest less least) and
/// holds no element larger than `magnitude`: half a step, the rounding of the parameters, and the rounding of the result to
/// the dtype.
#[must_use]
pub fn error_bound(bits: u32, dtype: DType, range: f32, magnitude: f32) -> f32 {
    let (unit, tiny) = precision(dtype);
    let levels = ((1_u32 << bits) - 1) as f32;
    // The least value moves down by at most 2 units of the magnitude, and the step grows with it and by its own rounding.
    let step = (range + 2.0 * unit * magnitude) / levels * (1.0 + 2.0 * unit) + 2.0 * tiny;
    0.5 * step * 1.001 + 2.0 * unit * (magnitude + step) + 2.0 * tiny
}

/// The relative spacing of a dtype's numbers, and its smallest one.
fn precision(dtype: DType) -> (f32, f32) {
    match dtype {
        DType::F32 => (f32::EPSILON, f32::MIN_POSITIVE),
        DType::F16 => (f16::EPSILON.to_f32(), 6e-8),
        DType::Bf16 => (bf16::EPSILON.to_f32(), f32::MIN_POSITIVE),
    }
}

/// Ranges of one head: how many, and which elements of a row share one.
struct Groups {
    /// Per head.
    count: usize,
    /// Per row; all rows share them for keys.
    per_row: usize,
    /// Channels of one.
    run: usize,
}

impl Groups {
    fn of(shape: &PlaneShape) -> Self {
        match shape.kind {
            PlaneKind::Keys => Self { count: shape.dims, per_row: shape.dims, run: 1 },
            PlaneKind::Values => {
                let per_row = shape.dims.div_ceil(VALUE_RUN);
                Self { count: per_row * shape.tokens, per_row, run: VALUE_RUN }
            }
        }
    }
}

fn row_bytes<const BITS: u32>(dims: usize) -> usize {
    if BITS == 4 { dims.div_ceil(2) } else { dims }
}

fn head_bytes<const BITS: u32>(shape: &PlaneShape) -> usize {
    let codec = if BITS == 4 { PlaneCodec::Int4 } else { PlaneCodec::Int8 };
    codec.head_bytes(&shape.stored())
}

widest! {
    /// Whether it could be encoded: every element finite, and every range one that the dtype has and f32 can divide by.
    pub(super) fn encode_8(shape: &PlaneShape, plane: &[u8], out: &mut Vec<u8>) -> bool = encode_heads::<8>;
}

widest! {
    /// As [`encode_8`].
    pub(super) fn encode_4(shape: &PlaneShape, plane: &[u8], out: &mut Vec<u8>) -> bool = encode_heads::<4>;
}

#[inline(always)]
fn encode_heads<const BITS: u32>(shape: &PlaneShape, plane: &[u8], out: &mut Vec<u8>) -> bool {
    let groups = Groups::of(shape);
    let (tokens, dims) = (shape.tokens, shape.dims);
    let levels = ((1_u32 << BITS) - 1) as f32;
    let mut values = vec![0.0_f32; tokens * dims];
    let (mut least, mut step) = (vec![0.0_f32; groups.count], vec![0.0_f32; groups.count]);
    let mut row_levels = vec![0_u8; dims];
    out.reserve(shape.heads * head_bytes::<BITS>(shape));
    for head in plane.chunks_exact(tokens * dims * shape.dtype.bytes()) {
        widen(shape.dtype, head, &mut values);
        if !values.iter().fold(true, |finite, x| finite & x.is_finite()) {
            return false;
        }
        least.fill(f32::INFINITY);
        step.fill(f32::NEG_INFINITY);
        for (token, row) in values.chunks_exact(dims).enumerate() {
            let first = if shape.kind == PlaneKind::Keys { 0 } else { token * groups.per_row };
            for (group, run) in row.chunks(groups.run).enumerate() {
                for &x in run {
                    let (low, high) = (&mut least[first + group], &mut step[first + group]);
                    *low = if x < *low { x } else { *low };
                    *high = if x > *high { x } else { *high };
                }
            }
        }
        for (least, step) in least.iter_mut().zip(&mut step) {
            let greatest = *step;
            *least = round_to(shape.dtype, *least, false);
            // In f64: the range of f32 numbers may not be one.
            let exact = (f64::from(greatest) - f64::from(*least)) / f64::from(levels);
            *step = round_to(shape.dtype, exact as f32, true);
            if !least.is_finite() || !step.is_finite() || !(*least + levels * *step).is_finite() {
                return false;
            }
            // Among the smallest numbers a step has no inverse, and all levels would be the lowest.
            if greatest > *least && !(1.0 / *step).is_finite() {
                return false;
            }
        }
        narrow(shape.dtype, &least, out);
        narrow(shape.dtype, &step, out);
        // From here on the steps' inverses.
        for step in &mut step {
            let inverse = if *step > 0.0 { 1.0 / *step } else { 0.0 };
            *step = if inverse.is_finite() { inverse } else { 0.0 };
        }
        for (token, row) in values.chunks_exact(dims).enumerate() {
            if shape.kind == PlaneKind::Keys {
                for ((level, x), (least, inverse)) in row_levels.iter_mut().zip(row).zip(least.iter().zip(&step)) {
                    *level = nearest_level((x - least) * inverse, levels);
                }
            } else {
                let first = token * groups.per_row;
                for (group, (run, into)) in row.chunks(groups.run).zip(row_levels.chunks_mut(groups.run)).enumerate() {
                    let (least, inverse) = (least[first + group], step[first + group]);
                    for (level, x) in into.iter_mut().zip(run) {
                        *level = nearest_level((x - least) * inverse, levels);
                    }
                }
            }
            if BITS == 4 {
                let (low, high) = row_levels.split_at(dims.div_ceil(2));
                out.extend(low.iter().enumerate().map(|(at, l)| l | high.get(at).copied().unwrap_or(0) << 4));
            } else {
                out.extend_from_slice(&row_levels);
            }
        }
    }
    true
}

/// Rounded to the nearest from 0 to `levels`, at most 255: behind 2^23 an f32 has no room for anything but whole numbers.
#[inline(always)]
fn nearest_level(x: f32, levels: f32) -> u8 {
    let x = if x > 0.0 { x } else { 0.0 };
    let x = if x < levels { x } else { levels };
    (x + 8_388_608.0).to_bits() as u8
}

widest! {
    pub(super) fn decode_8(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> = decode_heads::<8>;
}

widest! {
    pub(super) fn decode_4(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> = decode_heads::<4>;
}

#[inline(always)]
fn decode_heads<const BITS: u32>(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let groups = Groups::of(shape);
    let (tokens, dims, head) = (shape.tokens, shape.dims, head_bytes::<BITS>(shape));
    if stored.len() != head * shape.heads {
        return Err(damaged(format!("{} bytes where {BITS} bits take {}", stored.len(), head * shape.heads)));
    }
    let parameters = groups.count * shape.dtype.bytes();
    let (mut least, mut step) = (vec![0.0_f32; groups.count], vec![0.0_f32; groups.count]);
    let mut values = vec![0.0_f32; tokens * dims];
    let heads = plane.chunks_exact_mut(tokens * dims * shape.dtype.bytes());
    for (stored, plane) in stored.chunks_exact(head).zip(heads) {
        widen(shape.dtype, &stored[..parameters], &mut least);
        widen(shape.dtype, &stored[parameters..2 * parameters], &mut step);
        if !least.iter().chain(&step).fold(true, |finite, x| finite & x.is_finite()) {
            return Err(damaged("a range that is not finite".into()));
        }
        let rows = stored[2 * parameters..].chunks_exact(row_bytes::<BITS>(dims)).zip(values.chunks_exact_mut(dims));
        for (token, (row, values)) in rows.enumerate() {
            let first = if shape.kind == PlaneKind::Keys { 0 } else { token * groups.per_row };
            let of_row = first..first + groups.per_row;
            let (least, step) = (&least[of_row.clone()], &step[of_row]);
            if BITS == 4 {
                let (low, high) = values.split_at_mut(row.len());
                low.iter_mut().zip(row).for_each(|(x, byte)| *x = f32::from(byte & 15));
                high.iter_mut().zip(row).for_each(|(x, byte)| *x = f32::from(byte >> 4));
            } else {
                values.iter_mut().zip(row).for_each(|(x, byte)| *x = f32::from(*byte));
            }
            match shape.kind {
                PlaneKind::Keys => {
                    for ((x, least), step) in values.iter_mut().zip(least).zip(step) {
                        *x = *x * step + least;
                    }
                }
                PlaneKind::Values => {
                    for ((run, least), step) in values.chunks_mut(VALUE_RUN).zip(least).zip(step) {
                        run.iter_mut().for_each(|x| *x = *x * step + least);
                    }
                }
            }
        }
        narrow_into(shape.dtype, &values, plane);
    }
    Ok(())
}

/// Elements to f32; both of the same number.
#[inline(always)]
fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    const BATCH: usize = 256;
    match dtype {
        DType::F32 => {
            let words = bytes.as_chunks::<4>().0;
            out.iter_mut().zip(words).for_each(|(x, word)| *x = f32::from_le_bytes(*word));
        }
        DType::F16 => {
            let mut elements = [f16::ZERO; BATCH];
            for (out, bytes) in out.chunks_mut(BATCH).zip(bytes.chunks(2 * BATCH)) {
                let elements = &mut elements[..out.len()];
                elements.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(x, word)| *x = f16::from_le_bytes(*word));
                elements.convert_to_f32_slice(out);
            }
        }
        DType::Bf16 => {
            let words = bytes.as_chunks::<2>().0;
            out.iter_mut().zip(words).for_each(|(x, word)| {
                *x = f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16);
            });
        }
    }
}

fn narrow(dtype: DType, values: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + values.len() * dtype.bytes(), 0);
    narrow_into(dtype, values, &mut out[start..]);
}

/// f32 to elements, rounded to the nearest; f16 saturates: a level above the greatest value that was encoded is no infinity.
#[inline(always)]
fn narrow_into(dtype: DType, values: &[f32], out: &mut [u8]) {
    const BATCH: usize = 256;
    match dtype {
        DType::F32 => {
            let words = out.as_chunks_mut::<4>().0;
            words.iter_mut().zip(values).for_each(|(word, x)| *word = x.to_le_bytes());
        }
        DType::F16 => {
            let (mut elements, mut clamped) = ([f16::ZERO; BATCH], [0.0_f32; BATCH]);
            for (values, out) in values.chunks(BATCH).zip(out.chunks_mut(2 * BATCH)) {
                let (elements, clamped) = (&mut elements[..values.len()], &mut clamped[..values.len()]);
                let most = f16::MAX.to_f32();
                clamped.iter_mut().zip(values).for_each(|(to, x)| *to = x.clamp(-most, most));
                elements.convert_from_f32_slice(clamped);
                out.as_chunks_mut::<2>().0.iter_mut().zip(elements).for_each(|(word, x)| *word = x.to_le_bytes());
            }
        }
        DType::Bf16 => {
            let words = out.as_chunks_mut::<2>().0;
            let most = bf16::MAX.to_f32();
            words.iter_mut().zip(values).for_each(|(word, x)| {
                // To the nearest, ties to even; there is no NaN here.
                let bits = x.clamp(-most, most).to_bits();
                *word = (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes();
            });
        }
    }
}

/// The nearest number of the dtype that is not above (or not below) `x`.
fn round_to(dtype: DType, x: f32, up: bool) -> f32 {
    let past = |rounded: f32| if up { rounded < x } else { rounded > x };
    match dtype {
        // One unit more, for what the caller computed itself.
        DType::F32 if up => x.next_up(),
        DType::F32 => x,
        DType::F16 => {
            let near = f16::from_f32(x);
            if !past(near.to_f32()) { near.to_f32() } else { f16::from_bits(beside(near.to_bits(), up)).to_f32() }
        }
        DType::Bf16 => {
            let near = bf16::from_f32(x);
            if !past(near.to_f32()) { near.to_f32() } else { bf16::from_bits(beside(near.to_bits(), up)).to_f32() }
        }
    }
}

/// The bits of the next number up or down of a 16-bit float that is finite.
fn beside(bits: u16, up: bool) -> u16 {
    let (negative, magnitude) = (bits >> 15 == 1, bits & 0x7fff);
    match (negative == up, magnitude) {
        // Towards zero.
        (true, 1..) => bits - 1,
        // Over zero.
        (true, 0) => u16::from(!up) << 15 | 1,
        (false, _) => bits + 1,
    }
}
