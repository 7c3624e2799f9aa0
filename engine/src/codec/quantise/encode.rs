//! Encoding: finds the ends and the step of every range, and the nearest level of each element.

#![allow(clippy::needless_range_loop, reason = "several arrays by one index")]

use super::{Parameters, Place, RUN, Ranges, head_bytes, whole};
use crate::codec::PlaneShape;
use crate::codec::element::{Bf16, Element, F16, F32};
use crate::kernels::multiversion;
use stratakv_format::DType;

multiversion! {
    /// Encodes a plane to `out`, which must have [`stored_bytes`](super::stored_bytes). Returns whether it succeeded.
    ///
    /// It fails if an element is not finite, or if a range overflows the dtype or has a step without an f32 inverse.
    /// The content of `out` is then unspecified.
    pub(in crate::codec) fn encode_8(shape: &PlaneShape, plane: &[u8], out: &mut [u8]) -> bool = encode::<8>;
}

multiversion! {
    /// Encodes as [`encode_8`] does, with 4 bits.
    pub(in crate::codec) fn encode_4(shape: &PlaneShape, plane: &[u8], out: &mut [u8]) -> bool = encode::<4>;
}

#[inline(always)]
fn encode<const BITS: u32>(shape: &PlaneShape, plane: &[u8], out: &mut [u8]) -> bool {
    match shape.dtype {
        DType::F32 => encode_heads::<F32, BITS>(shape, plane, out),
        DType::F16 => encode_heads::<F16, BITS>(shape, plane, out),
        DType::Bf16 => encode_heads::<Bf16, BITS>(shape, plane, out),
    }
}

#[inline(always)]
fn encode_heads<E: Element, const BITS: u32>(shape: &PlaneShape, plane: &[u8], out: &mut [u8]) -> bool {
    let ranges = Ranges::of::<BITS>(shape);
    let heads = E::words(plane).chunks_exact(shape.tokens * shape.dims);
    for (plane, stored) in heads.zip(out.chunks_exact_mut(head_bytes::<BITS>(shape))) {
        let (parameters, rows) = stored.split_at_mut(2 * ranges.count * size_of::<E::Word>());
        let (all_least, all_steps) = E::words_mut(parameters).split_at_mut(ranges.count);
        for first in (0..ranges.count).step_by(RUN) {
            let Some((least, greatest)) = ends::<E>(&ranges, plane, first) else { return false };
            let mut parameters = Parameters { least, steps: [0.0; RUN] };
            if !steps::<E, BITS>(&greatest, &mut parameters) {
                return false;
            }
            let own = first..first + ranges.some(first);
            narrow::<E>(&parameters.least, &mut all_least[own.clone()]);
            narrow::<E>(&parameters.steps, &mut all_steps[own]);
            invert(&mut parameters.steps);
            let mut place = ranges.place(first);
            for nth in 0..ranges.runs(first) {
                let mut spare = [E::Word::default(); RUN];
                let run = whole(&plane[place.token * ranges.dims + place.channel..][..place.channels], &mut spare);
                let row = &mut rows[place.token * ranges.row_bytes..][..ranges.row_bytes];
                let nth = if ranges.keys { None } else { Some(nth) };
                put_run::<E, BITS>(run, &parameters, nth, row, &place);
                place = ranges.after(place);
            }
        }
    }
    true
}

#[inline(always)]
fn narrow<E: Element>(values: &[f32; RUN], out: &mut [E::Word]) {
    let mut words = [E::Word::default(); RUN];
    for at in 0..RUN {
        words[at] = E::narrow(values[at]);
    }
    out.copy_from_slice(&words[..out.len()]);
}

/// Returns the least and greatest elements of the ranges from `first` on, or `None` if an element is not finite.
///
/// Of zeros of both signs, the first one counts.
#[inline(always)]
fn ends<E: Element>(ranges: &Ranges, plane: &[E::Word], first: usize) -> Option<([f32; RUN], [f32; RUN])> {
    let start = if ranges.keys { (f32::INFINITY, f32::NEG_INFINITY) } else { (0.0, 0.0) };
    let (mut least, mut greatest) = ([start.0; RUN], [start.1; RUN]);
    let mut magnitudes = [0_u32; RUN];
    let mut place = ranges.place(first);
    for nth in 0..ranges.runs(first) {
        let mut spare = [E::Word::default(); RUN];
        let run = whole(&plane[place.token * ranges.dims + place.channel..][..place.channels], &mut spare);
        if ranges.keys {
            for at in 0..RUN {
                let x = E::widen(run[at]);
                magnitudes[at] = magnitudes[at].max(x.abs().to_bits());
                least[at] = lesser(x, least[at]);
                greatest[at] = greater(x, greatest[at]);
            }
        } else {
            (least[nth], greatest[nth]) = ends_of_run::<E>(run, &mut magnitudes);
        }
        place = ranges.after(place);
    }
    let mut most = 0;
    for magnitude in magnitudes {
        most = most.max(magnitude);
    }
    f32::from_bits(most).is_finite().then_some((least, greatest))
}

#[inline(always)]
fn lesser(x: f32, than: f32) -> f32 {
    if x < than { x } else { than }
}

#[inline(always)]
fn greater(x: f32, than: f32) -> f32 {
    if x > than { x } else { than }
}

#[inline(always)]
fn ends_of_run<E: Element>(run: &[E::Word; RUN], magnitudes: &mut [u32; RUN]) -> (f32, f32) {
    let mut values = [0.0; RUN];
    for at in 0..RUN {
        let x = E::widen(run[at]);
        values[at] = x;
        magnitudes[at] = magnitudes[at].max(x.abs().to_bits());
    }
    let (mut least, mut greatest) = (values, values);
    let mut width = RUN / 2;
    while width > 0 {
        for at in 0..width {
            least[at] = lesser(least[at + width], least[at]);
            greatest[at] = greater(greatest[at + width], greatest[at]);
        }
        width /= 2;
    }
    let (least, greatest) = (least[0], greatest[0]);
    if least != 0.0 && greatest != 0.0 {
        return (least, greatest);
    }
    let zero = values.into_iter().find(|x| *x == 0.0).unwrap_or_default();
    (if least == 0.0 { zero } else { least }, if greatest == 0.0 { zero } else { greatest })
}

/// Computes the steps of some ranges. Returns whether every step is finite and has an inverse.
#[inline(always)]
fn steps<E: Element, const BITS: u32>(greatest: &[f32; RUN], of: &mut Parameters) -> bool {
    let levels = ((1_u32 << BITS) - 1) as f32;
    let mut all = true;
    for at in 0..RUN {
        let (least, greatest) = (of.least[at], greatest[at]);
        // In f64, because the range of two f32 numbers may overflow f32.
        let exact = (f64::from(greatest) - f64::from(least)) / f64::from(levels);
        let step = E::round_up(exact as f32);
        of.steps[at] = step;
        // A very small step has no finite inverse, and every level would be the lowest.
        all &= (least + levels * step).is_finite() & ((1.0 / step).is_finite() | (greatest <= least));
    }
    all
}

/// Inverts the steps. A step without a finite inverse becomes 0.
#[inline(always)]
fn invert(steps: &mut [f32; RUN]) {
    for step in steps {
        let inverse = 1.0 / *step;
        *step = if inverse.is_finite() { inverse } else { 0.0 };
    }
}

/// Writes the levels of a run to its row. `of` holds the inverses of the steps.
///
/// With `nth`, all elements use that range; otherwise each element has its own. The runs of a row must be written in
/// order, because with 4 bits two elements share a byte.
#[inline(always)]
fn put_run<E: Element, const BITS: u32>(
    run: &[E::Word; RUN],
    of: &Parameters,
    nth: Option<usize>,
    row: &mut [u8],
    place: &Place,
) {
    let half = row.len();
    let &Place { channel, channels, .. } = place;
    let upper = BITS == 4 && channel >= half;
    let (keep, shift) = if upper { (15, 4) } else { (0, 0) };
    let mut spare = [0; RUN];
    // A run that crosses the middle of the row is written element by element below.
    let first = if upper { channel - half } else { channel };
    let bytes = row.get_mut(first..first + channels).filter(|bytes| bytes.len() == RUN);
    let straight = bytes.is_some();
    let bytes: &mut [u8; RUN] = bytes.and_then(|bytes| bytes.first_chunk_mut()).unwrap_or(&mut spare);
    if let Some(nth) = nth {
        let (least, inverse) = (of.least[nth], of.steps[nth]);
        for at in 0..RUN {
            let level = nearest_level::<BITS>((E::widen(run[at]) - least) * inverse);
            bytes[at] = bytes[at] & keep | level << shift;
        }
    } else {
        for at in 0..RUN {
            let level = nearest_level::<BITS>((E::widen(run[at]) - of.least[at]) * of.steps[at]);
            bytes[at] = bytes[at] & keep | level << shift;
        }
    }
    if !straight {
        for (channel, level) in (channel..channel + channels).zip(spare) {
            match channel.checked_sub(half) {
                Some(channel) => row[channel] |= level >> shift << 4,
                None => row[channel] = level,
            }
        }
    }
}

/// Rounds to the nearest level, at most 255. Adding 2^23 leaves no fraction bits, so the low byte is the level.
#[inline(always)]
fn nearest_level<const BITS: u32>(x: f32) -> u8 {
    let levels = ((1_u32 << BITS) - 1) as f32;
    (lesser(greater(x, 0.0), levels) + 8_388_608.0).to_bits() as u8
}
