//! All arithmetic of the engine: dot products, softmax, weighted sums, conversions. This is the only room that uses
//! SIMD.
//!
//! | file | what it computes |
//! |---|---|
//! | `scores`, `softmax`, `values` | the three passes of attention |
//! | `row_scores`, `row_query` | query vectors against summary records of 16 or 8 bits per element |
//! | `dot` | one weighted sum over a record of 16-bit elements |
//! | `sign_sums`, `code_sums`, `table_sums` | sums of table entries by sign bits, by code bytes |
//! | `softmax_parts`, `lane_softmax` | the softmax of selection, in bf16 and in f32 |
//! | `merge_sums` | the merge of two streaming softmaxes |
//! | `row_softmax` | the softmax of one query head over all entries |
//! | `common_bits` | common bits of bit sets |
//! | `level_codes` | codes of keys: nearest levels, packed into bytes |
//! | `nearest` | squared distances |
//! | `nearest_bytes` | the nearest of many rows of signed bytes |
//! | `point_products` | products of rows with points side by side, and the nearest row |
//! | `maxima` | the best units of groups |
//! | `extremes` | minima and maxima of keys |
//! | `matmul`, `subspace` | products of matrices, and the strongest directions of one |
//! | `plane_checksum` | the CRC-64 of a plane and its identity |
//! | `rope`, `hadamard` | rotations of keys |
//! | `quantise` | eight and four bits per element, and back |
//! | `convert` | f16 and bf16 to f32, and back |
//! | `scaled_halves`, `scaled_bytes` | rows of f16 with a power of two, rows of signed bytes with a factor |
//! | `strided` | checks and conversions of the rows that a caller appends |
//!
//! Below them:
//! - `dispatch` asks the processor for its instruction sets. Plain loops are compiled for several of them by
//!   [`multiversion!`].
//! - `vector` has the trait that loops with intrinsics are written over, and `isa` its implementations.
//! - `kernel` has one table of entry points per instruction set.
//! - `plane` and `prefetch` describe what attention reads.
//!
//! Invariants:
//! - The room imports the format, `half`, `bytemuck` and `std`, and nothing of the engine.
//! - All its functions are pure, and the same input gives the same bits on one machine. Different instruction sets may
//!   add in different orders.
//! - Every `unsafe` block relies on bounds that are asserted in safe code of this room.

mod code_sums;
mod common_bits;
mod convert;
mod dispatch;
mod dot;
mod extremes;
mod hadamard;
mod isa;
mod kernel;
mod lane_softmax;
mod level_codes;
mod matmul;
mod maxima;
mod merge_sums;
mod nearest;
mod nearest_bytes;
mod plane;
mod plane_checksum;
mod point_products;
mod prefetch;
mod quantise;
mod rope;
mod row_query;
mod row_scores;
mod row_softmax;
mod scaled_bytes;
mod scaled_halves;
mod scores;
mod sign_sums;
mod softmax;
mod softmax_parts;
mod strided;
mod subspace;
mod table_sums;
mod values;
mod vector;

pub(crate) use code_sums::{CodeSums, HalfPrecisionTables, code_sums};
pub(crate) use common_bits::{
    BLOCK_ENTRIES, common_counts, count_pairs_within, count_within, equal_counts, largest_counts,
};
pub(crate) use convert::{
    f16_to_f32, f32_to_f16, f32_to_finite_f16, is_finite_f16, largest_finite, narrow, narrow_bf16, precision, widen,
    widen_bf16, widen_f16,
};
pub(crate) use dot::dot_fn;
pub(crate) use extremes::{extremes, merge_extremes};
pub(crate) use hadamard::rotate_randomly;
pub use kernel::{Kernel, kernel_name};
pub(crate) use lane_softmax::{exponentiate, join_lanes, lane_weights, powers};
pub(crate) use level_codes::pack_levels;
pub(crate) use matmul::{add_weighted_rows, multiply_add, multiply_add_upper, multiply_by_lanes};
pub(crate) use maxima::{all_below, best_by_head, best_query_heads, best_scores, best_units, packed_sums};
pub(crate) use merge_sums::merge_sums;
pub(crate) use nearest::{add_row, lower_distances, nearest_columns, scale_row, squared_norms, transpose};
pub(crate) use nearest_bytes::{ByteBlocks, BytePoints, NearestBytes, nearest_bytes};
pub(crate) use plane::{PAD, Plane, SCRATCH};
pub use plane_checksum::plane_checksum;
pub(crate) use point_products::{
    POINTS, PointLanes, indexed_point_products, nearest_rows, point_block, point_products,
};
pub(crate) use prefetch::{PrefetchCursor, Prefetcher, prefetch};
pub(crate) use quantise::{DequantiseError, QuantisedShape, dequantise_4, dequantise_8, quantise_4, quantise_8};
pub(crate) use rope::{Angles, Rotation};
pub(crate) use row_query::RowQuery;
pub(crate) use row_softmax::add_softmax;
pub(crate) use scaled_bytes::{narrow_to_bytes, narrow_to_bytes_evenly, squared_norm_of_bytes, widen_bytes};
pub(crate) use scaled_halves::{SCALED_EXPONENT_MAX, narrow_scaled, power_of_two, widen_scaled};
pub(crate) use sign_sums::{SIGN_BYTES, SignQuad, SignSums, SignTables, pack_signs, sign_sums, signed_sum};
pub(crate) use softmax::SoftmaxOutcome;
pub(crate) use softmax_parts::{WeightedSums, softmax_parts};
pub(crate) use strided::{CallerElements, StridedRows, first_larger, first_not_finite};
pub(crate) use subspace::strongest_directions;
pub(crate) use table_sums::{QuantisedTables, look_up};
