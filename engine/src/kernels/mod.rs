//! All arithmetic of the engine: dot products, softmax, weighted sums, conversions. This is the only room that uses
//! SIMD.
//!
//! | file | what it computes |
//! |---|---|
//! | `scores`, `softmax`, `values` | the three passes of attention |
//! | `row_scores`, `row_query` | query vectors against summary records of 16-bit elements |
//! | `dot` | one weighted sum over a record of 16-bit elements |
//! | `sign_sums`, `code_sums` | sums of table entries by sign bits, by code bytes |
//! | `softmax_parts` | the softmax of selection |
//! | `convert` | f16 and bf16 to f32, and back |
//!
//! Below them:
//! - `dispatch` asks the processor for its instruction sets. Plain loops are compiled for several of them by
//!   [`multiversion!`].
//! - `vector` has the trait that loops with intrinsics are written over, and `isa` its implementations.
//! - `kernel` has one table of entry points per instruction set.
//! - `plane` and `prefetch` describe what attention reads.
//!
//! Invariants:
//! - The room imports the element type of the format, `half` and `std`, and nothing of the engine.
//! - All its functions are pure, and the same input gives the same bits on one machine. Different instruction sets may
//!   add in different orders.
//! - Every `unsafe` block relies on bounds that are asserted in safe code of this room.

mod code_sums;
mod convert;
pub(crate) mod dispatch;
mod dot;
mod isa;
mod kernel;
mod plane;
mod prefetch;
mod row_query;
mod row_scores;
mod scores;
mod sign_sums;
mod softmax;
mod softmax_parts;
mod values;
mod vector;

pub(crate) use code_sums::{CodeSums, HalfPrecisionTables, code_sums};
pub(crate) use dispatch::multiversion;
pub(crate) use dot::dot_fn;
pub use kernel::{Kernel, kernel_name};
pub(crate) use plane::{PAD, Plane, SCRATCH};
pub(crate) use prefetch::{PrefetchCursor, Prefetcher, prefetch};
pub(crate) use row_query::RowQuery;
pub(crate) use sign_sums::{SIGN_BYTES, SignQuad, SignSums, SignTables, sign_sums};
pub(crate) use softmax::SoftmaxOutcome;
pub(crate) use softmax_parts::{WeightedSums, softmax_parts};
