//! [`Partial`]: the state of one streaming softmax, and the buffers that additions to it need.
//!
//! 1. [`Partial::add_all`] joins small blocks to runs and works on one run at a time.
//! 2. For each run, the kernels compute scores, weights and weighted values. The next run is prefetched meanwhile.
//! 3. [`Partial::merge`] combines the states of two chunks, and [`Partial::finish`] divides by the sums.
//!
//! Invariant: a run whose scores are not finite changes nothing, because the scores are checked before the state is
//! written.

use super::block::KvBlock;
use super::block_run::BlockRun;
use super::query::Query;
use super::shape::AttentionShape;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{Kernel, PAD, Plane, PrefetchCursor, Prefetcher, SCRATCH, SoftmaxOutcome, merge_sums};

/// The buffers of [`Partial::add`], one per thread. They grow to the size of the largest run and are then reused.
pub struct Workspace {
    kernel: &'static Kernel,
    /// `[tokens, columns]`, one column per query head that takes part.
    scores: Vec<f32>,
    /// `[columns]`, as are the sums and factors.
    max: Vec<f32>,
    sum: Vec<f32>,
    factor: Vec<f32>,
    /// Widened rows.
    scratch: Box<[f32; SCRATCH]>,
}

impl Workspace {
    /// Returns empty buffers with the fastest kernel of this processor.
    #[must_use]
    pub fn new() -> Self {
        Self::with_kernel(Kernel::best())
    }

    /// Returns empty buffers with a given kernel, for comparisons.
    #[doc(hidden)]
    #[must_use]
    pub fn with_kernel(kernel: &'static Kernel) -> Self {
        let scratch = Box::new([0.0; SCRATCH]);
        Self { kernel, scores: Vec::new(), max: Vec::new(), sum: Vec::new(), factor: Vec::new(), scratch }
    }

    /// Returns the kernel that `add` runs with this workspace.
    #[must_use]
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Returns the bytes of the buffers.
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

/// The state of one streaming softmax: the running maximum, the sum of weights and the weighted sum of values of each
/// query head, in f32.
#[derive(Clone, Debug)]
pub struct Partial {
    shape: AttentionShape,
    stride: usize,
    /// `[q_heads]`. A head without tokens has -inf.
    max: Vec<f32>,
    /// `[q_heads]`. A head without tokens has 0, another one at least 1.
    sum: Vec<f32>,
    /// `[q_heads, stride]`, of which the first `value_dims` of each row are used.
    acc: Vec<f32>,
}

impl Partial {
    /// Returns the state without tokens.
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

    /// Returns to the state without tokens and keeps the memory.
    pub fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Returns the bytes of the state for a shape.
    #[must_use]
    pub fn bytes(shape: &AttentionShape) -> usize {
        shape.q_heads() * (shape.value_dims().next_multiple_of(PAD) + 2) * size_of::<f32>()
    }

    /// Returns whether a token was added for query head `head`. It is false for heads that the shape does not have.
    #[must_use]
    pub fn has_tokens(&self, head: usize) -> bool {
        self.sum.get(head).is_some_and(|&sum| sum > 0.0)
    }

    /// Adds the tokens `block.positions` of one block, for the query heads of `block.heads`. An empty selection adds
    /// nothing.
    ///
    /// # Errors
    /// `InvalidArgument`, and the partial is unchanged:
    /// - The query is of another shape, or the block does not fit the shape.
    /// - A score is NaN or infinite, because the stored keys are not finite or the dot product overflows f32. The error
    ///   names query head and token.
    pub fn add(&mut self, query: &Query, block: &KvBlock<'_>, workspace: &mut Workspace) -> Result<()> {
        self.check(query)?;
        block.check(&self.shape)?;
        let mut run = BlockRun::new(&self.shape);
        run.set(std::slice::from_ref(block));
        let [k, v] = run.stored();
        let none = Plane { rows: &[], ..k };
        let mut cursor = PrefetchCursor::new();
        self.add_run(query, &run, &mut Prefetcher { cursor: &mut cursor, planes: [k, v, none, none] }, workspace)
    }

    /// Adds blocks in order. Up to rounding the result is that of [`add`](Self::add) for each block.
    ///
    /// It is faster, because small blocks of equal heads and slots are joined and the next ones are prefetched. The
    /// join depends on the blocks alone, so the same blocks give the same bits.
    ///
    /// # Errors
    /// As [`add`](Self::add). The error names the block, and the blocks before it were added.
    pub fn add_all(&mut self, query: &Query, blocks: &[KvBlock<'_>], workspace: &mut Workspace) -> Result<()> {
        self.check(query)?;
        let mut cursor = PrefetchCursor::new();
        let (this, next) = (&mut BlockRun::new(&self.shape), &mut BlockRun::new(&self.shape));
        let (mut this, mut next, mut done) = (this, next, 0);
        this.set(blocks);
        while done < blocks.len() {
            let name = |e: Error, i: usize| e.during(format_args!("block {i}"));
            if this.blocks() == 0 {
                // The run has no blocks, because the next block does not fit the shape.
                blocks[done].check(&self.shape).map_err(|e| name(e, done))?;
            }
            next.set(&blocks[done + this.blocks()..]);
            let ([k, v], [next_k, next_v]) = (this.stored(), next.stored());
            let mut prefetcher = Prefetcher { cursor: &mut cursor, planes: [k, v, next_k, next_v] };
            let added = self.add_run(query, this, &mut prefetcher, workspace);
            if added.is_err() {
                // The run added nothing. The blocks are added one by one, up to the bad one, which the error then
                // names.
                for (i, block) in blocks.iter().enumerate().skip(done).take(this.blocks()) {
                    self.add(query, block, workspace).map_err(|e| name(e, i))?;
                }
            }
            done += this.blocks();
            std::mem::swap(&mut this, &mut next);
            cursor.next_run();
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
        run: &BlockRun<'_>,
        prefetcher: &mut Prefetcher<'_>,
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

        kernel.scores(&keys, query.scaled(), query.stride(), group, scores, columns, scratch, prefetcher);
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
        if kernel.softmax(scores, tokens, max, sum, factor) == SoftmaxOutcome::NotFinite {
            return Err(not_finite(scores, columns, group, heads, run.positions()));
        }
        for (j, &head) in heads.iter().enumerate() {
            let (column, head) = (j * group, usize::from(head) * group);
            self.max[head..head + group].copy_from_slice(&max[column..column + group]);
            self.sum[head..head + group].copy_from_slice(&sum[column..column + group]);
        }
        // If values are part of the keys, the scores have brought them into the caches.
        let prefetcher = (shape.dv() > 0).then_some(prefetcher);
        kernel.values(&run.values(), scores, columns, group, factor, &mut self.acc, self.stride, scratch, prefetcher);
        Ok(())
    }

    /// Adds the tokens of `other`. Merges of fixed chunks in a fixed order give the same bits.
    ///
    /// # Errors
    /// `InvalidArgument` if the shapes differ. Nothing changes then.
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
            // The larger maximum gives exp(0) = 1, and a head without tokens exp(-inf) = 0.
            let (a, b) = ((self.max[head] - max).exp(), (other.max[head] - max).exp());
            self.max[head] = max;
            self.sum[head] = self.sum[head] * a + other.sum[head] * b;
            merge_sums(acc, a, other_acc, b);
        }
        Ok(())
    }

    /// Writes the attention output `[q_heads, value_dims]`. Heads without tokens are zero (see
    /// [`has_tokens`](Self::has_tokens)).
    ///
    /// # Errors
    /// `InvalidArgument`:
    /// - `out` has another length.
    /// - An output is NaN or infinite, because stored values are or their weighted sum overflows f32. The error names
    ///   query head and index, and `out` is unspecified.
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
                        "attention output of query head {head}, index {index} is {}: stored values are not finite or \
                         too large",
                        out[index]
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Returns the error for the first score that is not finite.
fn not_finite(scores: &[f32], columns: usize, group: usize, heads: &[u8], tokens: &[u8]) -> Error {
    let at = scores.iter().position(|s| !s.is_finite()).unwrap_or(0);
    let (t, column) = (at / columns, at % columns);
    let head = heads.get(column / group).map_or(0, |&head| usize::from(head) * group + column % group);
    let token = tokens.get(t).copied().unwrap_or(0);
    let what = if scores[at].is_nan() { "NaN" } else { "infinite" };
    Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "score of query head {head} and token {token} of the block is {what}: \
             stored keys are not finite, or their product with the query overflows"
        ),
    )
}
