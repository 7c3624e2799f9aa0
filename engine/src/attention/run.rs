//! Pieces joined for one pass: the rows of their taking-part tokens.

use super::kernel::Plane;
use super::mask::HeadMask;
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
    /// The run at the start of `pieces`, of at most `max_tokens` tokens or one piece; of no pieces where the first one does not
    /// fit the shape (or there is none).
    pub(super) fn new(shape: &AttentionShape, pieces: &[Piece<'a>], max_tokens: usize) -> Self {
        let mut run = Self {
            shape: *shape,
            heads: [0; MAX_KV_HEADS],
            n_heads: 0,
            k: [&[]; MAX_GROUP_TOKENS],
            v: [&[]; MAX_GROUP_TOKENS],
            positions: [0; MAX_GROUP_TOKENS],
            tokens: 0,
            pieces: 0,
            group_tokens: 0,
        };
        let Some(first) = pieces.first() else { return run };
        run.group_tokens = first.group_tokens;
        for piece in pieces {
            let selected = piece.selected_tokens();
            let joins = run.pieces == 0
                || piece.heads == first.heads
                    && piece.group_tokens == first.group_tokens
                    && run.tokens + selected.len() <= max_tokens.min(MAX_GROUP_TOKENS);
            if !joins || piece.check(shape).is_err() {
                break;
            }
            run.pieces += 1;
            if first.heads == HeadMask::EMPTY {
                continue;
            }
            let element = shape.dtype().bytes();
            for token in selected {
                // The checked piece has every token of its slots.
                run.k[run.tokens] = piece.k.get(token * shape.dk() * element..).unwrap_or(&[]);
                run.v[run.tokens] = piece.v.get(token * shape.dv() * element..).unwrap_or(&[]);
                run.positions[run.tokens] = token as u8; // masks have 128 bits
                run.tokens += 1;
            }
        }
        for head in first.heads.iter().take(if run.pieces > 0 { MAX_KV_HEADS } else { 0 }) {
            run.heads[run.n_heads] = head as u8; // masks have 128 bits
            run.n_heads += 1;
        }
        run
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
