//! Levels to elements, from a row of levels to the plane in one pass.
#![allow(clippy::needless_range_loop, reason = "several arrays are indexed by one number")]

use super::ranges::{ChannelRun, QuantisedShape, RUN, RangeLayout, RangeParameters, full_run};
use crate::kernels::convert::{Bf16, F16, F32, StoredElement};
use crate::kernels::dispatch::multiversion;
use stratakv_format::DType;

/// The reason why bytes are not a quantised plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DequantiseError {
    /// Their number is not that of the shape.
    Length,
    /// A parameter of a range is not finite.
    NotFinite,
}

multiversion! {
    /// Writes the plane of a quantised form with eight bits per element. `plane` is unspecified after an error.
    pub(crate) fn dequantise_8(shape: &QuantisedShape, stored: &[u8], plane: &mut [u8]) -> Result<(), DequantiseError>
        = dequantise::<8>;
}

multiversion! {
    /// Writes the plane of a quantised form with four bits per element. `plane` is unspecified after an error.
    pub(crate) fn dequantise_4(shape: &QuantisedShape, stored: &[u8], plane: &mut [u8]) -> Result<(), DequantiseError>
        = dequantise::<4>;
}

#[inline(always)]
fn dequantise<const BITS: u32>(shape: &QuantisedShape, stored: &[u8], plane: &mut [u8]) -> Result<(), DequantiseError> {
    match shape.dtype {
        DType::F32 => dequantise_heads::<F32, BITS>(shape, stored, plane),
        DType::F16 => dequantise_heads::<F16, BITS>(shape, stored, plane),
        DType::Bf16 => dequantise_heads::<Bf16, BITS>(shape, stored, plane),
    }
}

#[inline(always)]
fn dequantise_heads<E: StoredElement, const BITS: u32>(
    shape: &QuantisedShape,
    stored: &[u8],
    plane: &mut [u8],
) -> Result<(), DequantiseError> {
    let (ranges, head) = (RangeLayout::of::<BITS>(shape), shape.head_bytes);
    if stored.len() != head * shape.heads {
        return Err(DequantiseError::Length);
    }
    let heads = E::words_mut(plane).chunks_exact_mut(shape.tokens * shape.dims);
    for (stored, plane) in stored.chunks_exact(head).zip(heads) {
        let (parameters, rows) = stored.split_at(2 * ranges.count * size_of::<E::Word>());
        let (all_least, all_steps) = E::words(parameters).split_at(ranges.count);
        for first in (0..ranges.count).step_by(RUN) {
            let own = first..first + ranges.some(first);
            let Some(parameters) = read_parameters::<E>(&all_least[own.clone()], &all_steps[own]) else {
                return Err(DequantiseError::NotFinite);
            };
            let mut place = ranges.place(first);
            for nth in 0..ranges.runs(first) {
                let row = &rows[place.token * ranges.row_bytes..][..ranges.row_bytes];
                let out = &mut plane[place.token * ranges.dims + place.channel..][..place.channels];
                let nth = if ranges.per_channel { None } else { Some(nth) };
                dequantise_run::<E, BITS>(row, &place, &parameters, nth, out);
                place = ranges.after(place);
            }
        }
    }
    Ok(())
}

/// Returns the parameters of some ranges, or none if one is not finite.
#[inline(always)]
fn read_parameters<E: StoredElement>(least: &[E::Word], steps: &[E::Word]) -> Option<RangeParameters> {
    let mut spare = [[E::Word::default(); RUN]; 2];
    let [spare, other] = &mut spare;
    let (least, steps) = (full_run(least, spare), full_run(steps, other));
    let mut found = RangeParameters { least: [0.0; RUN], steps: [0.0; RUN] };
    let mut finite = true;
    for at in 0..RUN {
        (found.least[at], found.steps[at]) = (E::widen(least[at]), E::widen(steps[at]));
        finite &= found.least[at].is_finite() & found.steps[at].is_finite();
    }
    finite.then_some(found)
}

/// Writes the elements of a run from its row. `of` has the parameters of the run at `nth`, or the
/// parameters of each element.
#[inline(always)]
fn dequantise_run<E: StoredElement, const BITS: u32>(
    row: &[u8],
    place: &ChannelRun,
    of: &RangeParameters,
    nth: Option<usize>,
    out: &mut [E::Word],
) {
    let half = row.len();
    let &ChannelRun { channel, channels, .. } = place;
    let (mut spare, mut spare_out) = ([0; RUN], [E::Word::default(); RUN]);
    let mut shift = 0;
    let levels = if BITS == 8 || channel + channels <= half {
        full_run(&row[channel..channel + channels], &mut spare)
    } else if channel >= half {
        shift = 4;
        full_run(&row[channel - half..channel - half + channels], &mut spare)
    } else {
        for (channel, level) in (channel..channel + channels).zip(&mut spare) {
            *level = channel.checked_sub(half).map_or_else(|| row[channel], |channel| row[channel] >> 4);
        }
        &spare
    };
    let mask = ((1_u32 << BITS) - 1) as u8;
    let words: &mut [E::Word; RUN] = match out.first_chunk_mut() {
        Some(words) => words,
        None => &mut spare_out,
    };
    if let Some(nth) = nth {
        let (least, step) = (of.least[nth], of.steps[nth]);
        for at in 0..RUN {
            words[at] = E::narrow(f32::from(levels[at] >> shift & mask) * step + least);
        }
    } else {
        for at in 0..RUN {
            words[at] = E::narrow(f32::from(levels[at] >> shift & mask) * of.steps[at] + of.least[at]);
        }
    }
    if out.len() < RUN {
        out.copy_from_slice(&spare_out[..out.len()]);
    }
}
