//! Attention of one decode query over blocks of keys and values in memory, by streaming (online) softmax.
//!
//! The executor is pure: it does no I/O and knows no store.
//! 1. A [`Query`] is validated and scaled once.
//! 2. Each [`KvBlock`] (a block that was read, the tail, a resident group) is added to a [`Partial`].
//! 3. The partials of fixed chunks are merged in a fixed order.
//! 4. [`Partial::finish`] divides by the sums of weights.
//!
//! ```
//! use stratakv::DType;
//! use stratakv::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, Workspace};
//!
//! # fn main() -> stratakv::Result<()> {
//! let shape = AttentionShape::new(2, 1, 2, 2, DType::F32)?; // 2 query heads share 1 KV head; dk = dv = 2
//! let bytes = |x: &[f32]| x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
//! let (k, v) = (bytes(&[1.0, 0.0, 0.0, 1.0]), bytes(&[10.0, 20.0, 30.0, 40.0])); // 2 tokens
//! let heads = HeadMask::all(1);
//! let block = KvBlock { k: &k, v: &v, group_tokens: 2, tokens: 2, heads, positions: None, one_head: false };
//!
//! let query = Query::new(&shape, &[0.0; 4])?;
//! let mut partial = Partial::new(&shape);
//! partial.add(&query, &block, &mut Workspace::new())?;
//! let mut out = [0.0; 4];
//! partial.finish(&mut out)?;
//! assert_eq!(out, [20.0, 30.0, 20.0, 30.0]); // equal scores: the mean of the values
//! # Ok(())
//! # }
//! ```
//!
//! # Method
//! For each block and query head:
//! 1. The scores are `s_t = scale * q . k_t`.
//! 2. The new maximum is `m' = max(m, max_t s_t)`. If it grew, accumulator and sum are multiplied by `exp(m - m')`.
//! 3. The weights `exp(s_t - m')` are added: `l += sum_t exp(s_t - m')` and `acc += sum_t exp(s_t - m') v_t`.
//!
//! All arithmetic is f32. A score of magnitude S has a rounding error of about `2^-24 S`, which the weights inherit as
//! a relative error. Any attention in f32 has that precision.
//!
//! # Determinism
//! The same blocks in the same order give the same bits on one machine, whichever thread computes them. Kernels of
//! different instruction sets add dot products in different orders, so results differ in the last bits between kinds of
//! processor.
//!
//! # Sources
//! Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". The merge of partials is from Dao et al.
//! 2023, "Flash-Decoding".

mod block;
mod block_run;
mod mask;
mod partial;
mod query;
mod shape;

pub use crate::kernels::{Kernel, kernel_name};
pub use block::KvBlock;
pub use mask::{HeadMask, MaskIter, TokenMask};
pub use partial::{Partial, Workspace};
pub use query::Query;
pub use shape::{AttentionShape, MAX_GROUP_TOKENS, MAX_HEAD_DIM, MAX_KV_HEADS, MAX_Q_HEADS};
