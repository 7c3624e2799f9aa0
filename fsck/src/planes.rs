//! The elements of planes, and the decoder for planes under a codec, written from SPEC.md chapter 8 alone.

use half::{bf16, f16};
use stratakv_format::codec::{PlaneShape, VALUE_RANGE_CHANNELS};
use stratakv_format::{DType, PlaneCodec};

/// Returns element `at` of a plane as `f32`.
pub(crate) fn element(dtype: DType, bytes: &[u8], at: usize) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]]),
        DType::F16 => f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
        DType::Bf16 => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
    }
}

/// Returns the elements of a plane in the dtype of the layout. [`PlaneCodec::first_bad`] has accepted `stored`.
pub(crate) fn decoded(codec: PlaneCodec, shape: &PlaneShape, stored: &[u8]) -> Vec<u8> {
    if codec == PlaneCodec::Raw {
        return stored.to_vec();
    }
    let (dims, dtype) = (shape.dims, shape.dtype);
    let (ranges, parameters) = (shape.ranges(), codec.parameter_bytes(shape));
    let mut plain = Vec::with_capacity(shape.bytes());
    for head in stored.chunks_exact(codec.head_bytes(shape)) {
        let (parameters, levels) = head.split_at(parameters);
        for token in 0..shape.tokens {
            for channel in 0..dims {
                let range = match shape.plane {
                    0 => channel,
                    _ => token * dims.div_ceil(VALUE_RANGE_CHANNELS) + channel / VALUE_RANGE_CHANNELS,
                };
                let half = dims.div_ceil(2);
                let level = match codec {
                    PlaneCodec::Int4 if channel < half => levels[token * half + channel] & 15,
                    PlaneCodec::Int4 => levels[token * half + channel - half] >> 4,
                    _ => levels[token * dims + channel],
                };
                let (least, step) = (element(dtype, parameters, range), element(dtype, parameters, ranges + range));
                let x = f32::from(level) * step + least;
                match dtype {
                    DType::F32 => plain.extend(x.to_le_bytes()),
                    DType::F16 => {
                        plain.extend(f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_le_bytes());
                    }
                    DType::Bf16 => {
                        plain.extend(bf16::from_f32(x.clamp(bf16::MIN.to_f32(), bf16::MAX.to_f32())).to_le_bytes());
                    }
                }
            }
        }
    }
    plain
}
