//! The state of one streaming softmax, and the buffers that adding to it needs.

use super::ahead::{Ahead, Cursor};
use super::kernel::{Kernel, PAD, Plane, SCRATCH, Scores};
use super::piece::Piece;
use super::query::Query;
use super::run::Run;
use super::shape::AttentionShape;
use crate::error::{Error, ErrorKind, Result};

/// Buffers for [`Partial::add`]; one per thread. Grows to what the largest piece needs and then allocates no more.
pub struct Workspace {
    kernel: &'static Kernel,
    scores: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    factor: Vec<f32>,
    scratch: Box<[f32; SCRATCH]>,
}

impl Workspace {
    /// Empty buffers, and the fastest kernel of this CPU.
    #[must_use]
    pub fn new() -> Self {
        Self::with_kernel(Kernel::best())
    }

    /// With a kernel of choice, for comparisons.
    #[doc(hidden)]
    #[must_use]
    pub fn with_kernel(kernel: &'static Kernel) -> Self {
        let scratch = Box::new([0.0; SCRATCH]);
        Self { kernel, scores: Vec::new(), max: Vec::new(), sum: Vec::new(), factor: Vec::new(), scratch }
    }

    /// The kernel that `add` runs with this workspace.
    #[must_use]
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let floats = self.scores.capacity() + self.max.capacity() + self.sum.capacity() + self.factor.capacity();
        (floats + SCRATCH) * size_of::<f32>()
    }

    fn reserve(&mut self, tokens: usize, columns: usize) {
        if self.scores.len() < tokens * columns {
            self.scores.resize(tokens * columns, 0.0);
        }
        for buffer in [&mut self.max, &mut self.sum, &mut self.factor] {
            if buffer.len() < columns {
                buffer.resize(columns, 0.0);
            }
        }
    }
}

impl Default for Workspace {
    fn default() -> Self {
        Self::new()
    }
}

/// The state of one streaming softmax: per query head the running maximum, the sum of weights, and the weighted sum of values
/// (not yet divided), all f32.
#[derive(Clone, Debug)]
pub struct Partial {
    shape: AttentionShape,
    stride: usize,
    /// `[q_heads]`; -inf where no token was added.
    max: Vec<f32>,
    /// `[q_heads]`; at least 1 where a token was added, else 0.
    sum: Vec<f32>,
    /// `[q_heads, stride]`, `value_dims` of each row used.
    acc: Vec<f32>,
}

impl Partial {
    /// The state before any token.
    #[must_use]
    pub fn new(shape: &AttentionShape) -> Self {
        let stride = shape.value_dims().next_multiple_of(PAD);
        let heads = shape.q_heads();
        Self {
            shape: *shape,
            stride,
            max: vec![f32::NEG_INFINITY; heads],
            sum: vec![0.0; heads],
            acc: vec![0.0; heads * stride],
        }
    }

    /// Back to the state before any token, keeping the memory.
    pub fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Bytes that the state of a shape takes.
    #[must_use]
    pub fn bytes(shape: &AttentionShape) -> usize {
        shape.q_heads() * (shape.value_dims().next_multiple_of(PAD) + 2) * size_of::<f32>()
    }

    /// Whether query head `head` has met a token. False for heads beyond the shape's.
    #[must_use]
    pub fn has_tokens(&self, head: usize) -> bool {
        self.sum.get(head).is_some_and(|&sum| sum > 0.0)
    }

    /// Adds the tokens of one piece: those of `piece.positions`, for the query heads of `piece.heads`. An empty selection adds
    /// nothing.
    ///
    /// # Errors
    /// `InvalidArgument`: the query is of another shape; the piece does not fit the shape; a score is NaN or infinite (the stored
    /// keys are not finite, or the dot product overflows f32): the error names query head and token. The partial is unchanged.
    pub fn add(&mut self, query: &Query, piece: &Piece<'_>, workspace: &mut Workspace) -> Result<()> {
        self.check(query)?;
        piece.check(&self.shape)?;
        let mut run = Run::new(&self.shape);
        run.set(std::slice::from_ref(piece));
        let [k, v] = run.stored();
        let none = Plane { rows: &[], ..k };
        let mut cursor = Cursor::new();
        self.add_run(query, &run, &mut Ahead { cursor: &mut cursor, planes: [k, v, none, none] }, workspace)
    }

    /// Adds pieces in order, the same as [`add`](Self::add) for each up to rounding, and faster: small pieces of equal heads and
    /// slots are joined, and the next ones are prefetched while some are worked on. Which pieces are joined depends on the pieces
    /// alone, so the same pieces give the same bits.
    ///
    /// # Errors
    /// As [`add`](Self::add), naming the piece; the pieces before it have been added.
    pub fn add_all(&mut self, query: &Query, pieces: &[Piece<'_>], workspace: &mut Workspace) -> Result<()> {
        self.check(query)?;
        let mut cursor = Cursor::new();
        let (this, next) = (&mut Run::new(&self.shape), &mut Run::new(&self.shape));
        let (mut this, mut next, mut done) = (this, next, 0);
        this.set(pieces);
        while done < pieces.len() {
            let name = |e: Error, i: usize| e.during(format_args!("piece {i}"));
            if this.pieces() == 0 {
                // The first piece behind a run that could not be joined to anything: it does not fit the shape.
                pieces[done].check(&self.shape).map_err(|e| name(e, done))?;
            }
            next.set(&pieces[done + this.pieces()..]);
            let ([k, v], [next_k, next_v]) = (this.stored(), next.stored());
            let mut ahead = Ahead { cursor: &mut cursor, planes: [k, v, next_k, next_v] };
            let added = self.add_run(query, this, &mut ahead, workspace);
            if added.is_err() {
                // Nothing of the run was added. One by one, to add the pieces before the bad one and to name it.
                for (i, piece) in pieces.iter().enumerate().skip(done).take(this.pieces()) {
                    self.add(query, piece, workspace).map_err(|e| name(e, i))?;
                }
            }
            done += this.pieces();
            std::mem::swap(&mut this, &mut next);
            cursor.advance();
        }
        Ok(())
    }

    fn check(&self, query: &Query) -> Result<()> {
        if *query.shape() == self.shape {
            return Ok(());
        }
        let shape = self.shape;
        let context = format!("query of shape {:?} on a partial of shape {shape:?}", query.shape());
        Err(Error::new(ErrorKind::InvalidArgument, context))
    }

    fn add_run(
        &mut self,
        query: &Query,
        run: &Run<'_>,
        ahead: &mut Ahead<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let shape = self.shape;
        let (heads, keys) = (run.heads(), run.keys());
        let tokens = keys.rows.len();
        if heads.is_empty() || tokens == 0 {
            return Ok(());
        }
        let group = shape.group_heads();
        let used = heads.len() * group;
        let columns = used.next_multiple_of(PAD);
        workspace.reserve(tokens, columns);
        let Workspace { kernel, scores, max, sum, factor, scratch } = workspace;
        let scores = &mut scores[..tokens * columns];
        let (max, sum, factor) = (&mut max[..columns], &mut sum[..columns], &mut factor[..columns]);

        kernel.scores(&keys, query.scaled(), query.stride(), group, scores, columns, scratch, ahead);
        if used < columns {
            scores.chunks_exact_mut(columns).for_each(|row| row[used..].fill(0.0));
            max[used..].fill(0.0);
            sum[used..].fill(0.0);
        }
        for (j, &head) in heads.iter().enumerate() {
            let (column, head) = (j * group, usize::from(head) * group);
            max[column..column + group].copy_from_slice(&self.max[head..head + group]);
            sum[column..column + group].copy_from_slice(&self.sum[head..head + group]);
        }
        if kernel.softmax(scores, tokens, max, sum, factor) == Scores::NotFinite {
            return Err(not_finite(scores, columns, group, heads, run.positions()));
        }
        for (j, &head) in heads.iter().enumerate() {
            let (column, head) = (j * group, usize::from(head) * group);
            self.max[head..head + group].copy_from_slice(&max[column..column + group]);
            self.sum[head..head + group].copy_from_slice(&sum[column..column + group]);
        }
        // Where values are part of the keys, the V pass reads nothing that is not in the caches already.
        let ahead = (shape.dv() > 0).then_some(ahead);
        kernel.values(&run.values(), scores, columns, group, factor, &mut self.acc, self.stride, scratch, ahead);
        Ok(())
    }

    /// Adds what `other` has seen. Merging the partials of fixed chunks in a fixed order gives bit-identical results.
    ///
    /// # Errors
    /// `InvalidArgument` where the shapes differ; nothing changed.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if self.shape != other.shape {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("merge of a partial of shape {:?} into one of {:?}", other.shape, self.shape),
            ));
        }
        let rows = self.acc.chunks_exact_mut(self.stride).zip(other.acc.chunks_exact(self.stride));
        for (head, (acc, other_acc)) in rows.enumerate() {
            if other.sum[head] == 0.0 {
                continue;
            }
            let max = self.max[head].max(other.max[head]);
            // exp(-inf) = 0 where nothing was added to self; exp(0) = 1 for the larger one.
            let (a, b) = ((self.max[head] - max).exp(), (other.max[head] - max).exp());
            self.max[head] = max;
            self.sum[head] = self.sum[head] * a + other.sum[head] * b;
            for (x, y) in acc.iter_mut().zip(other_acc) {
                *x = *x * a + *y * b;
            }
        }
        Ok(())
    }

    /// Writes the attention output `[q_heads, value_dims]`. Heads that met no token are zero (ask
    /// [`has_tokens`](Self::has_tokens)).
    ///
    /// # Errors
    /// `InvalidArgument`: `out` has another length; or an output is NaN or infinite because stored values are, or their weighted
    /// sum overflows f32 (the error names query head and index; `out` is then unspecified).
    pub fn finish(&self, out: &mut [f32]) -> Result<()> {
        let dims = self.shape.value_dims();
        if out.len() != self.shape.output_len() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("output of {} elements: {} heads of {dims} are needed", out.len(), self.shape.q_heads()),
            ));
        }
        let rows = out.chunks_exact_mut(dims).zip(self.acc.chunks_exact(self.stride));
        for (head, (out, acc)) in rows.enumerate() {
            if self.sum[head] == 0.0 {
                out.fill(0.0);
                continue;
            }
            let sum = self.sum[head];
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = acc / sum;
            }
            if !out.iter().fold(true, |finite, x| finite & x.is_finite()) {
                let index = out.iter().position(|x| !x.is_finite()).unwrap_or(0);
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!(
                        "attention output of query head {head}, index {index} is {}: the stored values are not finite or too large",
                        out[index]
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The error for the first score that is not finite.
fn not_finite(scores: &[f32], columns: usize, group: usize, heads: &[u8], tokens: &[u8]) -> Error {
    let at = scores.iter().position(|s| !s.is_finite()).unwrap_or(0);
    let (t, column) = (at / columns, at % columns);
    let head = heads.get(column / group).map_or(0, |&head| usize::from(head) * group + column % group);
    let token = tokens.get(t).copied().unwrap_or(0);
    let what = if scores[at].is_nan() { "NaN" } else { "infinite" };
    Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "score of query head {head} and token {token} of the piece is {what}: the stored keys are not finite, or their product with the query overflows"
        ),
    )
}
