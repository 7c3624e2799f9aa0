//! Elements to levels.
//!
//! For [`RUN`] ranges at a time:
//! 1. [`range_ends`] finds the least and the greatest value of each range.
//! 2. [`steps`] computes the step of each range, and the parameters are stored.
//! 3. [`quantise_run`] writes the level nearest to each element.
#![allow(clippy::needless_range_loop, reason = "several arrays are indexed by one number")]

use super::ranges::{ChannelRun, QuantisedShape, RUN, RangeLayout, RangeParameters, full_run};
use crate::kernels::convert::{Bf16, F16, F32, StoredElement};
use crate::kernels::dispatch::multiversion;
use stratakv_format::DType;

multiversion! {
    /// Quantises a plane to eight bits per element.
    ///
    /// `out` has `heads * head_bytes` bytes. Returns false if an element is not finite, or if a range is too large for
    /// f32. `out` is unspecified then.
    pub(crate) fn quantise_8(shape: &QuantisedShape, plane: &[u8], out: &mut [u8]) -> bool = quantise::<8>;
}

multiversion! {
    /// Quantises a plane to four bits per element, as [`quantise_8`] does to eight.
    pub(crate) fn quantise_4(shape: &QuantisedShape, plane: &[u8], out: &mut [u8]) -> bool = quantise::<4>;
}

#[inline(always)]
fn quantise<const BITS: u32>(shape: &QuantisedShape, plane: &[u8], out: &mut [u8]) -> bool {
    match shape.dtype {
        DType::F32 => quantise_heads::<F32, BITS>(shape, plane, out),
        DType::F16 => quantise_heads::<F16, BITS>(shape, plane, out),
        DType::Bf16 => quantise_heads::<Bf16, BITS>(shape, plane, out),
    }
}

#[inline(always)]
fn quantise_heads<E: StoredElement, const BITS: u32>(shape: &QuantisedShape, plane: &[u8], out: &mut [u8]) -> bool {
    let ranges = RangeLayout::of::<BITS>(shape);
    let heads = E::words(plane).chunks_exact(shape.tokens * shape.dims);
    for (plane, stored) in heads.zip(out.chunks_exact_mut(shape.head_bytes)) {
        let (parameters, rows) = stored.split_at_mut(2 * ranges.count * size_of::<E::Word>());
        let (all_least, all_steps) = E::words_mut(parameters).split_at_mut(ranges.count);
        for first in (0..ranges.count).step_by(RUN) {
            let Some((least, greatest)) = range_ends::<E>(&ranges, plane, first) else { return false };
            let mut parameters = RangeParameters { least, steps: [0.0; RUN] };
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
                let run = full_run(&plane[place.token * ranges.dims + place.channel..][..place.channels], &mut spare);
                let row = &mut rows[place.token * ranges.row_bytes..][..ranges.row_bytes];
                let nth = if ranges.per_channel { None } else { Some(nth) };
                quantise_run::<E, BITS>(run, &parameters, nth, row, &place);
                place = ranges.after(place);
            }
        }
    }
    true
}

/// Narrows the first `out.len()` values.
#[inline(always)]
fn narrow<E: StoredElement>(values: &[f32; RUN], out: &mut [E::Word]) {
    let mut words = [E::Word::default(); RUN];
    for at in 0..RUN {
        words[at] = E::narrow(values[at]);
    }
    out.copy_from_slice(&words[..out.len()]);
}

/// Returns the least and the greatest value of the ranges from `first` on, or none if an element is not finite. Of
/// several zeros it is the first, because a zero has a sign.
#[inline(always)]
fn range_ends<E: StoredElement>(
    ranges: &RangeLayout,
    plane: &[E::Word],
    first: usize,
) -> Option<([f32; RUN], [f32; RUN])> {
    let start = if ranges.per_channel { (f32::INFINITY, f32::NEG_INFINITY) } else { (0.0, 0.0) };
    let (mut least, mut greatest) = ([start.0; RUN], [start.1; RUN]);
    let mut magnitudes = [0_u32; RUN];
    let mut place = ranges.place(first);
    for nth in 0..ranges.runs(first) {
        let mut spare = [E::Word::default(); RUN];
        let run = full_run(&plane[place.token * ranges.dims + place.channel..][..place.channels], &mut spare);
        if ranges.per_channel {
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

/// Returns the lesser number, `than` if either is NaN.
#[inline(always)]
fn lesser(x: f32, than: f32) -> f32 {
    if x < than { x } else { than }
}

/// Returns the greater number, `than` if either is NaN.
#[inline(always)]
fn greater(x: f32, than: f32) -> f32 {
    if x > than { x } else { than }
}

/// Returns the least and the greatest value of a run, and takes its magnitudes into account.
#[inline(always)]
fn ends_of_run<E: StoredElement>(run: &[E::Word; RUN], magnitudes: &mut [u32; RUN]) -> (f32, f32) {
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

/// The step of a range whose rounded step has no finite inverse in f32: 2^-127, which is an element of f32 and bf16.
/// Steps of f16 are larger.
const LEAST_STEP: f32 = f32::from_bits(1 << 22);

/// Computes the steps of ranges. Returns whether each of them reaches a finite value.
#[inline(always)]
fn steps<E: StoredElement, const BITS: u32>(greatest: &[f32; RUN], of: &mut RangeParameters) -> bool {
    let levels = ((1_u32 << BITS) - 1) as f32;
    let mut all = true;
    for at in 0..RUN {
        let (least, greatest) = (of.least[at], greatest[at]);
        // f64, because the difference of two f32 may be infinite in f32.
        let exact = (f64::from(greatest) - f64::from(least)) / f64::from(levels);
        let step = E::round_up(exact as f32);
        let is_usable = (1.0 / step).is_finite() | (greatest <= least);
        let step = if is_usable { step } else { LEAST_STEP };
        of.steps[at] = step;
        all &= (least + levels * step).is_finite();
    }
    all
}

/// Replaces steps by their inverses, or by 0 if a range of equal elements has none.
#[inline(always)]
fn invert(steps: &mut [f32; RUN]) {
    for step in steps {
        let inverse = 1.0 / *step;
        *step = if inverse.is_finite() { inverse } else { 0.0 };
    }
}

/// Writes the levels of a run to its row.
///
/// `of` has the inverses of the steps: that of the run at `nth`, or one for each element. The runs of a row are
/// written in ascending order, because two elements share a byte.
#[inline(always)]
fn quantise_run<E: StoredElement, const BITS: u32>(
    run: &[E::Word; RUN],
    of: &RangeParameters,
    nth: Option<usize>,
    row: &mut [u8],
    place: &ChannelRun,
) {
    let half = row.len();
    let &ChannelRun { channel, channels, .. } = place;
    let upper = BITS == 4 && channel >= half;
    let (keep, shift) = if upper { (15, 4) } else { (0, 0) };
    let mut spare = [0; RUN];
    // A run that crosses from the lower half of the row to the upper one is written element by element below.
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

/// Returns the nearest level. The addition of 2^23 rounds, because an f32 of that size has no fraction.
#[inline(always)]
fn nearest_level<const BITS: u32>(x: f32) -> u8 {
    let levels = ((1_u32 << BITS) - 1) as f32;
    (lesser(greater(x, 0.0), levels) + 8_388_608.0).to_bits() as u8
}
