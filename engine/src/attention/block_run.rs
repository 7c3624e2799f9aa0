//! [`BlockRun`]: consecutive blocks joined for one pass.
//!
//! A pass over a small block spends most of its time on loads of query and accumulators. Blocks of equal heads and
//! slots are therefore joined up to [`RUN_TOKENS`] tokens, and a pass works on the rows of all their tokens.
//!
//! Invariant: the join depends on the blocks alone, so the same blocks give the same bits.

use super::block::KvBlock;
use super::shape::{AttentionShape, MAX_GROUP_TOKENS, MAX_KV_HEADS};
use crate::kernels::Plane;

/// The most tokens of blocks that are joined. A larger block is a run of its own.
///
/// They are enough to amortize the loads of query and accumulators, and few enough that the values of one head stay in
/// the L1 cache.
const RUN_TOKENS: usize = 32;

/// Consecutive blocks of equal heads and slots, which the passes treat as one.
pub(super) struct BlockRun<'a> {
    shape: AttentionShape,
    heads: [u8; MAX_KV_HEADS],
    n_heads: usize,
    /// For each token that takes part, the K plane from its row of head 0 on.
    k: [&'a [u8]; MAX_GROUP_TOKENS],
    /// The same rows of the V plane.
    v: [&'a [u8]; MAX_GROUP_TOKENS],
    /// The position of each token within its block.
    positions: [u8; MAX_GROUP_TOKENS],
    tokens: usize,
    blocks: usize,
    group_tokens: usize,
    one_head: bool,
}

impl<'a> BlockRun<'a> {
    /// Returns a run of no blocks.
    pub(super) fn new(shape: &AttentionShape) -> Self {
        Self {
            shape: *shape,
            heads: [0; MAX_KV_HEADS],
            n_heads: 0,
            k: [&[]; MAX_GROUP_TOKENS],
            v: [&[]; MAX_GROUP_TOKENS],
            positions: [0; MAX_GROUP_TOKENS],
            tokens: 0,
            blocks: 0,
            group_tokens: 0,
            one_head: false,
        }
    }

    /// Becomes the run at the start of `blocks`. It has no blocks if there are none or the first one does not fit the
    /// shape.
    pub(super) fn set(&mut self, blocks: &[KvBlock<'a>]) {
        (self.blocks, self.tokens, self.n_heads, self.group_tokens) = (0, 0, 0, 0);
        let Some(first) = blocks.first() else { return };
        let element = self.shape.dtype().bytes();
        let (k_row, v_row) = (self.shape.dk() * element, self.shape.dv() * element);
        for block in blocks {
            let selected = block.selected_tokens();
            let joins = self.blocks == 0
                || block.heads == first.heads
                    && (block.group_tokens, block.one_head) == (first.group_tokens, first.one_head)
                    && self.tokens + selected.len() <= RUN_TOKENS;
            if !joins || block.check(&self.shape).is_err() {
                break;
            }
            self.blocks += 1;
            for token in selected {
                // The block was checked, so its planes contain every token.
                self.k[self.tokens] = block.k.get(token * k_row..).unwrap_or(&[]);
                self.v[self.tokens] = block.v.get(token * v_row..).unwrap_or(&[]);
                self.positions[self.tokens] = token as u8; // a mask has 128 bits
                self.tokens += 1;
            }
        }
        if self.blocks > 0 {
            (self.group_tokens, self.one_head) = (first.group_tokens, first.one_head);
            for (to, head) in self.heads.iter_mut().zip(first.heads) {
                *to = head as u8; // a mask has 128 bits
                self.n_heads += 1;
            }
        }
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the KV heads that take part, in ascending order.
    pub(super) fn heads(&self) -> &[u8] {
        &self.heads[..self.n_heads]
    }

    /// Returns the position within its block of each token that takes part.
    pub(super) fn positions(&self) -> &[u8] {
        &self.positions[..self.tokens]
    }

    /// Returns the K plane.
    pub(super) fn keys(&self) -> Plane<'_> {
        self.plane(&self.k, self.shape.dk(), self.shape.dk())
    }

    /// Returns the plane that values are read from: V, or K if there is no V plane.
    pub(super) fn values(&self) -> Plane<'_> {
        match self.shape.dv() {
            0 => self.plane(&self.k, self.shape.dk(), self.shape.value_dims()),
            dv => self.plane(&self.v, dv, dv),
        }
    }

    /// Returns the planes in memory, for the prefetches. The second one is empty if there is no V plane.
    pub(super) fn stored(&self) -> [Plane<'_>; 2] {
        [self.keys(), self.plane(&self.v, self.shape.dv(), self.shape.dv())]
    }

    fn plane<'b>(&'b self, rows: &'b [&'a [u8]; MAX_GROUP_TOKENS], row: usize, take: usize) -> Plane<'b> {
        let dtype = self.shape.dtype();
        // Rows of the only head are those of head 0 in the planes, whatever its number is.
        let head_stride = if self.one_head { 0 } else { self.group_tokens * row * dtype.bytes() };
        Plane { rows: &rows[..self.tokens], head_stride, heads: self.heads(), dtype, take }
    }
}
