//! Decoding: converts rows of levels to elements in one pass.

#![allow(clippy::needless_range_loop, reason = "several arrays by one index")]

use super::{Parameters, Place, RUN, Ranges, head_bytes, whole};
use crate::codec::element::{Bf16, Element, F16, F32};
use crate::codec::{PlaneShape, damaged};
use crate::error::Result;
use crate::kernels::multiversion;
use stratakv_format::DType;

multiversion! {
    pub(in crate::codec) fn decode_8(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> = decode::<8>;
}

multiversion! {
    pub(in crate::codec) fn decode_4(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> = decode::<4>;
}

#[inline(always)]
fn decode<const BITS: u32>(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    match shape.dtype {
        DType::F32 => decode_heads::<F32, BITS>(shape, stored, plane),
        DType::F16 => decode_heads::<F16, BITS>(shape, stored, plane),
        DType::Bf16 => decode_heads::<Bf16, BITS>(shape, stored, plane),
    }
}

#[inline(always)]
fn decode_heads<E: Element, const BITS: u32>(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let (ranges, head) = (Ranges::of::<BITS>(shape), head_bytes::<BITS>(shape));
    if stored.len() != head * shape.heads {
        return Err(damaged(format!("{} bytes where {BITS} bits take {}", stored.len(), head * shape.heads)));
    }
    let heads = E::words_mut(plane).chunks_exact_mut(shape.tokens * shape.dims);
    for (stored, plane) in stored.chunks_exact(head).zip(heads) {
        let (parameters, rows) = stored.split_at(2 * ranges.count * size_of::<E::Word>());
        let (all_least, all_steps) = E::words(parameters).split_at(ranges.count);
        for first in (0..ranges.count).step_by(RUN) {
            let own = first..first + ranges.some(first);
            let Some(parameters) = read_parameters::<E>(&all_least[own.clone()], &all_steps[own]) else {
                return Err(damaged("a range that is not finite".into()));
            };
            let mut place = ranges.place(first);
            for nth in 0..ranges.runs(first) {
                let row = &rows[place.token * ranges.row_bytes..][..ranges.row_bytes];
                let out = &mut plane[place.token * ranges.dims + place.channel..][..place.channels];
                let nth = if ranges.keys { None } else { Some(nth) };
                take_run::<E, BITS>(row, &place, &parameters, nth, out);
                place = ranges.after(place);
            }
        }
    }
    Ok(())
}

/// Widens the parameters of some ranges. Returns `None` if one is not finite.
#[inline(always)]
fn read_parameters<E: Element>(least: &[E::Word], steps: &[E::Word]) -> Option<Parameters> {
    let mut spare = [[E::Word::default(); RUN]; 2];
    let [spare, other] = &mut spare;
    let (least, steps) = (whole(least, spare), whole(steps, other));
    let mut found = Parameters { least: [0.0; RUN], steps: [0.0; RUN] };
    let mut finite = true;
    for at in 0..RUN {
        (found.least[at], found.steps[at]) = (E::widen(least[at]), E::widen(steps[at]));
        finite &= found.least[at].is_finite() & found.steps[at].is_finite();
    }
    finite.then_some(found)
}

/// Decodes a run from its row. With `nth`, all elements use that range's parameters; otherwise each element has its
/// own.
#[inline(always)]
fn take_run<E: Element, const BITS: u32>(
    row: &[u8],
    place: &Place,
    of: &Parameters,
    nth: Option<usize>,
    out: &mut [E::Word],
) {
    let half = row.len();
    let &Place { channel, channels, .. } = place;
    let (mut spare, mut spare_out) = ([0; RUN], [E::Word::default(); RUN]);
    let mut shift = 0;
    let levels = if BITS == 8 || channel + channels <= half {
        whole(&row[channel..channel + channels], &mut spare)
    } else if channel >= half {
        shift = 4;
        whole(&row[channel - half..channel - half + channels], &mut spare)
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
