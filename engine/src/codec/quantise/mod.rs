//! The quantised codecs: 8 or 4 bits per element, in even steps over a range.
//!
//! Stored per head: the parameters of all ranges (first every least value, then every step), then the rows of levels.
//!
//! - The parameters have the plane's own dtype.
//! - The step is rounded up, so `least + levels * step` is never below the greatest value.
//! - A row of `dims` levels takes `dims` bytes with 8 bits. With 4 bits a byte holds two levels, and the low nibbles
//!   hold the first half of the row.
//!
//! Order of the work: [`RUN`] ranges at a time, whose elements are visited in runs of channels of one token.

mod decode;
mod encode;

use super::{PlaneKind, PlaneShape, VALUE_RANGE_CHANNELS as RUN};
pub(super) use decode::{decode_4, decode_8};
pub(super) use encode::{encode_4, encode_8};
use half::{bf16, f16};
use stratakv_format::{DType, PlaneCodec};

/// Returns the maximum difference between an element and its decoded value.
///
/// `range` is the greatest minus the least element of its range, and `magnitude` bounds their absolute values. The
/// bound adds half a step, the rounding of the parameters, and the rounding of the result to the dtype.
#[must_use]
pub fn error_bound(bits: u32, dtype: DType, range: f32, magnitude: f32) -> f32 {
    let (unit, tiny) = precision(dtype);
    let levels = ((1_u32 << bits) - 1) as f32;
    // Rounding moves the least value by at most 2 units of the magnitude. The step grows by that and by its own
    // rounding.
    let step = (range + 2.0 * unit * magnitude) / levels * (1.0 + 2.0 * unit) + 2.0 * tiny;
    0.5 * step * 1.001 + 2.0 * unit * (magnitude + step) + 2.0 * tiny
}

/// Returns the relative spacing of a dtype's numbers and its smallest number.
fn precision(dtype: DType) -> (f32, f32) {
    match dtype {
        DType::F32 => (f32::EPSILON, f32::MIN_POSITIVE),
        DType::F16 => (f16::EPSILON.to_f32(), 6e-8),
        DType::Bf16 => (bf16::EPSILON.to_f32(), f32::MIN_POSITIVE),
    }
}

/// The ranges of one head, in the order of their parameters and visited [`RUN`] at a time.
///
/// For keys these are adjacent channels: a run of each token has one element of every range. For values each range is a
/// run.
#[derive(Clone, Copy)]
struct Ranges {
    keys: bool,
    tokens: usize,
    dims: usize,
    row_bytes: usize,
    count: usize,
}

impl Ranges {
    #[inline(always)]
    fn of<const BITS: u32>(shape: &PlaneShape) -> Self {
        let (tokens, dims) = (shape.tokens, shape.dims);
        let row_bytes = if BITS == 4 { dims.div_ceil(2) } else { dims };
        Self { keys: shape.kind == PlaneKind::Keys, tokens, dims, row_bytes, count: shape.stored().ranges() }
    }

    /// Returns how many ranges from `first` on are visited together.
    #[inline(always)]
    fn some(&self, first: usize) -> usize {
        RUN.min(self.count - first)
    }

    /// Returns how many runs these ranges have.
    #[inline(always)]
    fn runs(&self, first: usize) -> usize {
        if self.keys { self.tokens } else { self.some(first) }
    }

    /// Returns the first run of these ranges.
    #[inline(always)]
    fn place(&self, first: usize) -> Place {
        let (token, channel) = if self.keys {
            (0, first)
        } else {
            let per_row = self.dims.div_ceil(RUN);
            (first / per_row, first % per_row * RUN)
        };
        Place { token, channel, channels: RUN.min(self.dims - channel) }
    }

    /// Returns the run after `place`.
    #[inline(always)]
    fn after(&self, place: Place) -> Place {
        let channel = place.channel + if self.keys { 0 } else { RUN };
        let (token, channel) = match self.keys || channel >= self.dims {
            true => (place.token + 1, if self.keys { channel } else { 0 }),
            false => (place.token, channel),
        };
        Place { token, channel, channels: RUN.min(self.dims - channel) }
    }
}

/// The place of a run: consecutive channels of one token.
#[derive(Clone, Copy)]
struct Place {
    token: usize,
    channel: usize,
    channels: usize,
}

/// Returns the bytes of a plane stored with `BITS` bits per element.
pub(super) fn stored_bytes<const BITS: u32>(shape: &PlaneShape) -> usize {
    shape.heads * head_bytes::<BITS>(shape)
}

#[inline(always)]
fn head_bytes<const BITS: u32>(shape: &PlaneShape) -> usize {
    let codec = if BITS == 4 { PlaneCodec::Int4 } else { PlaneCodec::Int8 };
    codec.head_bytes(&shape.stored())
}

/// Returns `some` as a whole run. A shorter slice is copied to `spare` and filled up with its first element.
#[inline(always)]
fn whole<'a, T: Copy>(some: &'a [T], spare: &'a mut [T; RUN]) -> &'a [T; RUN] {
    if let Some(all) = some.first_chunk() {
        return all;
    }
    for (at, to) in spare.iter_mut().enumerate() {
        *to = some[if at < some.len() { at } else { 0 }];
    }
    spare
}

/// The least values and steps of [`RUN`] ranges.
struct Parameters {
    least: [f32; RUN],
    steps: [f32; RUN],
}
