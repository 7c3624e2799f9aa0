//! Eight and four bits per element, in even steps over the range of a group.
//!
//! Stored, per head: the parameters of its groups, then its rows. A group has two parameters in the plane's own dtype: the
//! least value, rounded down, and the step, rounded up, so that `least + levels * step` is never below the greatest value and
//! every level is used for something that occurs. A row of `dims` levels takes `dims` bytes, or half: two levels in a byte,
//! the lower half of the row in the low nibbles.

mod decode;
mod encode;

use super::{PlaneKind, PlaneShape, VALUE_RANGE_CHANNELS as RUN};
pub(super) use decode::{decode_4, decode_8};
pub(super) use encode::{encode_4, encode_8};
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

/// The elements of a head by the ranges they are in, taken in the order of their parameters, [`RUN`] ranges at a time. For keys
/// those are of channels beside each other, which have an element each in a run of every token; for values each is a run.
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

    /// How many there are from `first` on, of those taken at a time.
    #[inline(always)]
    fn some(&self, first: usize) -> usize {
        RUN.min(self.count - first)
    }

    /// How many runs these have.
    #[inline(always)]
    fn runs(&self, first: usize) -> usize {
        if self.keys { self.tokens } else { self.some(first) }
    }

    /// The first of these runs.
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

    /// The run after one.
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

/// A run: channels of a token.
#[derive(Clone, Copy)]
struct Place {
    token: usize,
    channel: usize,
    channels: usize,
}

/// Bytes of a plane in so many bits.
pub(super) fn stored_bytes<const BITS: u32>(shape: &PlaneShape) -> usize {
    shape.heads * head_bytes::<BITS>(shape)
}

#[inline(always)]
fn head_bytes<const BITS: u32>(shape: &PlaneShape) -> usize {
    let codec = if BITS == 4 { PlaneCodec::Int4 } else { PlaneCodec::Int8 };
    codec.head_bytes(&shape.stored())
}

/// A whole run of what is there; where it is less the first is repeated, in `spare`.
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

/// Least value and step of some ranges.
struct Parameters {
    least: [f32; RUN],
    steps: [f32; RUN],
}
