//! Pieces joined for one pass: the rows of their taking-part tokens.

use super::kernel::Plane;
use super::piece::Piece;
use super::shape::{AttentionShape, MAX_GROUP_TOKENS, MAX_KV_HEADS};

/// Most tokens of pieces that are joined (a larger piece is a run of its own): enough that a pass over a head amortizes the
/// loads of query and accumulators, and few enough that one head's values stay in the L1 cache.
pub(super) const RUN_TOKENS: usize = 32;

/// Leading pieces of equal heads and slots, worked on as if they were one. Which pieces are joined depends on the pieces alone.
pub(super) struct Run<'a> {
    shape: AttentionShape,
    heads: [u8; MAX_KV_HEADS],
    n_heads: usize,
    /// The planes from each taking-part token of head 0 on.
    k: [&'a [u8]; MAX_GROUP_TOKENS],
    v: [&'a [u8]; MAX_GROUP_TOKENS],
    /// Of each token within its piece.
    positions: [u8; MAX_GROUP_TOKENS],
    tokens: usize,
    pieces: usize,
    group_tokens: usize,
}

impl<'a> Run<'a> {
    /// Of no pieces.
    pub(super) fn new(shape: &AttentionShape) -> Self {
        Self {
            shape: *shape,
            heads: [0; MAX_KV_HEADS],
            n_heads: 0,
            k: [&[]; MAX_GROUP_TOKENS],
            v: [&[]; MAX_GROUP_TOKENS],
            positions: [0; MAX_GROUP_TOKENS],
            tokens: 0,
            pieces: 0,
            group_tokens: 0,
        }
    }

    /// Becomes the run at the start of `pieces`; of no pieces where the first one does not fit the shape (or there is none).
    pub(super) fn set(&mut self, pieces: &[Piece<'a>]) {
        (self.pieces, self.tokens, self.n_heads, self.group_tokens) = (0, 0, 0, 0);
        let Some(first) = pieces.first() else { return };
        let element = self.shape.dtype().bytes();
        let (k_row, v_row) = (self.shape.dk() * element, self.shape.dv() * element);
        for piece in pieces {
            let selected = piece.selected_tokens();
            let joins = self.pieces == 0
                || piece.heads == first.heads
                    && piece.group_tokens == first.group_tokens
                    && self.tokens + selected.len() <= RUN_TOKENS;
            if !joins || piece.check(&self.shape).is_err() {
                break;
            }
            self.pieces += 1;
            for token in selected {
                // The checked piece has every token of its slots.
                self.k[self.tokens] = piece.k.get(token * k_row..).unwrap_or(&[]);
                self.v[self.tokens] = piece.v.get(token * v_row..).unwrap_or(&[]);
                self.positions[self.tokens] = token as u8; // masks have 128 bits
                self.tokens += 1;
            }
        }
        if self.pieces > 0 {
            self.group_tokens = first.group_tokens;
            for (to, head) in self.heads.iter_mut().zip(first.heads) {
                *to = head as u8; // masks have 128 bits
                self.n_heads += 1;
            }
        }
    }

    /// Pieces joined.
    pub(super) fn pieces(&self) -> usize {
        self.pieces
    }

    /// KV heads that take part, ascending.
    pub(super) fn heads(&self) -> &[u8] {
        &self.heads[..self.n_heads]
    }

    /// The position of each taking-part token within its piece.
    pub(super) fn positions(&self) -> &[u8] {
        &self.positions[..self.tokens]
    }

    /// The K plane.
    pub(super) fn keys(&self) -> Plane<'_> {
        self.plane(&self.k, self.shape.dk(), self.shape.dk())
    }

    /// The plane that values are read from: V, or K where there is no V.
    pub(super) fn values(&self) -> Plane<'_> {
        match self.shape.dv() {
            0 => self.plane(&self.k, self.shape.dk(), self.shape.value_dims()),
            dv => self.plane(&self.v, dv, dv),
        }
    }

    /// The planes in memory, for the prefetch: an empty second one where there is no V.
    pub(super) fn stored(&self) -> [Plane<'_>; 2] {
        [self.keys(), self.plane(&self.v, self.shape.dv(), self.shape.dv())]
    }

    fn plane<'b>(&'b self, rows: &'b [&'a [u8]; MAX_GROUP_TOKENS], row: usize, take: usize) -> Plane<'b> {
        let dtype = self.shape.dtype();
        let head_stride = self.group_tokens * row * dtype.bytes();
        Plane { rows: &rows[..self.tokens], head_stride, heads: self.heads(), dtype, take }
    }
}
