//! Attention of one decode query over keys and values that lie in memory in pieces: streaming (online) softmax.
//!
//! The executor is pure: it does no I/O and knows no store. A [`Query`] is validated once; each [`Piece`] (a block that was
//! read, the tail, a resident group) is added to a [`Partial`]; partials of fixed chunks are merged in a fixed order; `finish`
//! divides by the sum.
//!
//! ```
//! use stratakv::DType;
//! use stratakv::attention::{AttentionShape, HeadMask, Partial, Piece, Query, Workspace};
//!
//! # fn main() -> stratakv::Result<()> {
//! let shape = AttentionShape::new(2, 1, 2, 2, DType::F32)?; // 2 query heads share 1 KV head; dk = dv = 2
//! let bytes = |x: &[f32]| x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
//! let (k, v) = (bytes(&[1.0, 0.0, 0.0, 1.0]), bytes(&[10.0, 20.0, 30.0, 40.0])); // 2 tokens
//! let piece = Piece { k: &k, v: &v, group_tokens: 2, tokens: 2, heads: HeadMask::all(1), positions: None };
//!
//! let query = Query::new(&shape, &[0.0; 4])?;
//! let mut partial = Partial::new(&shape);
//! partial.add(&query, &piece, &mut Workspace::new())?;
//! let mut out = [0.0; 4];
//! partial.finish(&mut out)?;
//! assert_eq!(out, [20.0, 30.0, 20.0, 30.0]); // equal scores: the mean of the values
//! # Ok(())
//! # }
//! ```
//!
//! # Method
//! Per piece and query head: scores `s_t = scale * q . k_t`; `m' = max(m, max_t s_t)`; accumulator and sum are multiplied by
//! `exp(m - m')` where the maximum grew; then `l += sum_t exp(s_t - m')` and `acc += sum_t exp(s_t - m') v_t` (Milakov and
//! Gimelshein 2018, "Online normalizer calculation for softmax"; the merge of partials is that of Dao et al. 2023,
//! "Flash-Decoding"). All arithmetic is f32. A score of magnitude S carries a rounding error of about `2^-24 S`, and the weights
//! inherit it as a relative error: that is the precision of any f32 attention.
//!
//! # Determinism
//! The same pieces in the same order give bit-identical results on one machine, whichever thread computes them. Kernels of
//! different instruction sets sum dot products in different orders, so results differ in the last bits between kinds of CPU.

mod ahead;
mod codes;
mod dot;
mod kernel;
mod mask;
mod partial;
mod parts;
mod piece;
mod query;
mod rows;
mod run;
mod shape;
mod signs;

pub(crate) use codes::{CodeSums, HalfTables, code_sums};
pub(crate) use dot::dot_fn;
pub use kernel::{Kernel, kernel_name};
pub use mask::{HeadMask, MaskIter, TokenMask};
pub use partial::{Partial, Workspace};
pub(crate) use parts::{Weighted, softmax_parts};
pub use piece::Piece;
pub use query::Query;
pub(crate) use rows::RowQuery;
pub use shape::{AttentionShape, MAX_GROUP_TOKENS, MAX_HEAD_DIM, MAX_KV_HEADS, MAX_Q_HEADS};
pub(crate) use signs::{FourSigns, SIGN_BYTES, SignSums, SignTables, sign_sums};
