//! The blocks of one layer and the keys of their representatives.
//!
//! How the summary takes in groups:
//! 1. Without a profile, it counts them.
//! 2. [`LayerSummary::profile`] makes blocks of all sealed tokens but an incomplete last block.
//! 3. A group that is pushed later waits with its keys. Each selection adds the attention weights of the waiting tokens
//!    ([`BlockLayer::record`]).
//! 4. When two more blocks are complete, [`LayerSummary::advance`] chooses the representatives of the older one.
//!
//! Invariants:
//! - Blocks follow each other without a gap from token 0 on. A cut inside a block makes it shorter.
//! - Tokens behind the last block are *loose*. Their keys are in memory.
//! - The blocks depend on the tokens, the cuts, the profile and the selections, not on how the tokens were cut into
//!   appends. Only the newest selection between two appends counts.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::add_row;
use crate::metrics::lock;
use crate::retrieval::clusters::ClusterLists;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::recorded_attention::{each_weights, weight_bytes};
use crate::retrieval::scaled_rows::ScaledRows;
use crate::retrieval::sealed_keys::{QueryProfile, SealedKeys};
use crate::retrieval::summary::{KeyGroup, LayerSummary, SummarySpec};
use crate::retrieval::top_k::{highest, score_order};
use std::ops::Range;
use std::sync::Mutex;

/// The representatives of a block (InfLLM, section 4.1).
const REPRESENTATIVES: usize = 4;

/// The specification of blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSpec {
    pub(super) block: usize,
}

impl SummarySpec for BlockSpec {
    fn id(&self) -> String {
        format!("infllm/{}", self.block)
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(BlockLayer::new(shape, self.block)))
    }
}

/// The blocks of a layer.
pub(super) struct BlockLayer {
    shape: KeyShape,
    block: usize,
    /// The mean of the profile's query heads for each KV head, `[kv_heads, key_dim]`. None until there is a profile.
    mean_query: Option<Vec<f32>>,
    /// The token behind each block.
    ends: Vec<u32>,
    /// The keys of the representatives of each block, `[kv_heads * key_dim]` each.
    keys: ScaledRows,
    /// The keys of the groups with loose tokens. Without a profile it has none, and begins at the next group.
    waiting: SealedKeys,
    /// The attention weight of each loose token, summed over the selections.
    weights: Vec<f32>,
    /// The weights of the loose tokens by the newest selection since the last append.
    recorded: Mutex<Option<Vec<f32>>>,
}

impl BlockLayer {
    fn new(shape: KeyShape, block: usize) -> Self {
        Self {
            shape,
            block,
            mean_query: None,
            ends: Vec::new(),
            keys: ScaledRows::new(shape.width()),
            waiting: SealedKeys::new(shape, 0),
            weights: Vec::new(),
            recorded: Mutex::default(),
        }
    }

    /// Returns the number of groups whose tokens are all in blocks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no profile.
    pub(super) fn covered(&self) -> Result<usize> {
        let text = "the layer has no representatives yet; call Sequence::profile with recorded queries first";
        match self.mean_query {
            Some(_) => Ok(self.block_tokens() / self.shape.group_tokens),
            None => Err(Error::new(ErrorKind::InvalidArgument, text)),
        }
    }

    /// Returns the keys of all representatives.
    pub(super) fn keys(&self) -> &ScaledRows {
        &self.keys
    }

    /// Returns the representatives of a block.
    pub(super) fn per_block(&self) -> usize {
        REPRESENTATIVES.min(self.block)
    }

    /// Returns the number of tokens in blocks.
    pub(super) fn block_tokens(&self) -> usize {
        self.ends.last().map_or(0, |end| *end as usize)
    }

    /// Returns the tokens of a block that exists.
    pub(super) fn block_range(&self, block: usize) -> Range<usize> {
        let start = if block == 0 { 0 } else { self.ends[block - 1] };
        start as usize..self.ends[block] as usize
    }

    /// Returns the keys of the loose tokens, of all heads.
    pub(super) fn loose_keys(&self) -> ScaledRows {
        self.waiting.scaled_rows(self.block_tokens()..self.waiting.tokens().end, None)
    }

    /// Takes note of the attention weights that a selection found for the loose tokens.
    pub(super) fn record(&self, mut weights: Vec<f32>) {
        weights.shrink_to_fit();
        *lock(&self.recorded) = Some(weights);
    }

    /// Adds the next block, of `weights.len()` tokens whose keys are `rows`.
    fn add_block(&mut self, weights: &[f32], rows: &[f32]) {
        let width = self.shape.width();
        let mut best = highest(weights, self.per_block(), |_| true);
        best.sort_unstable_by(|a, b| score_order(*a, *b));
        for (_, token) in best {
            self.keys.push(&rows[token as usize * width..][..width]);
        }
        self.ends.push((self.block_tokens() + weights.len()) as u32);
    }

    /// Returns `q . k` of the mean query and each key of `rows`.
    fn by_profile(&self, rows: &[f32]) -> Vec<f32> {
        let query = self.mean_query.as_deref().unwrap_or_default();
        let product = |row: &[f32]| -> f32 { row.iter().zip(query).map(|(k, q)| k * q).sum() };
        let finite = |x: f32| if x.is_finite() { x } else { 0.0 };
        rows.chunks_exact(self.shape.width()).map(|row| finite(product(row))).collect()
    }

    /// Returns the number of tokens behind the last block.
    pub(super) fn loose_tokens(&self) -> usize {
        self.groups() * self.shape.group_tokens - self.block_tokens()
    }
}

/// Returns the mean of the query heads of each KV head, over all queries.
fn mean_query(profile: &QueryProfile<'_>) -> Vec<f32> {
    let (heads, dim) = (profile.shape.kv_heads, profile.shape.key_dim);
    let mut mean = vec![0.0; heads * dim];
    for query in profile.queries {
        let share = 1.0 / (profile.queries.len() * query.len() / (heads * dim)).max(1) as f32;
        for (own, sum) in query.chunks(query.len() / heads).zip(mean.chunks_exact_mut(dim)) {
            own.chunks_exact(dim).for_each(|row| add_row(sum, row, share));
        }
    }
    mean
}

impl LayerSummary for BlockLayer {
    fn groups(&self) -> usize {
        self.waiting.groups().end
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        match self.mean_query {
            None => self.waiting.skip(),
            Some(_) => {
                self.waiting.push(group);
                self.weights.resize(self.weights.len() + self.shape.group_tokens, 0.0);
            }
        }
    }

    fn truncate(&mut self, groups: usize) {
        if groups >= self.groups() {
            return;
        }
        self.waiting.truncate(groups);
        if self.mean_query.is_none() {
            return;
        }
        let tokens = groups * self.shape.group_tokens;
        let blocks = self.ends.partition_point(|end| (*end as usize) < tokens);
        if let Some(last) = self.ends.get_mut(blocks) {
            *last = (*last).min(tokens as u32);
            self.ends.truncate(blocks + 1);
            self.keys.truncate((blocks + 1) * self.per_block());
        }
        if tokens == 0 {
            *self = Self::new(self.shape, self.block);
            return;
        }
        let loose = tokens - self.block_tokens();
        self.weights.truncate(loose);
        let recorded = self.recorded.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        recorded.iter_mut().for_each(|weights| weights.truncate(loose));
    }

    fn bytes(&self) -> usize {
        let recorded = lock(&self.recorded).as_ref().map_or(0, Vec::capacity);
        let mean = self.mean_query.as_ref().map_or(0, Vec::capacity);
        let elements = self.ends.capacity() + self.weights.capacity() + recorded + mean;
        self.waiting.bytes() + self.keys.bytes() + elements * size_of::<f32>()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        if self.mean_query.is_none() {
            return self.bytes();
        }
        let loose = self.loose_tokens() + groups * self.shape.group_tokens;
        let blocks = self.ends.len() + loose / self.block;
        let keys = self.keys.bytes_for((blocks * self.per_block()).saturating_sub(self.keys.len()));
        // A vector that grows takes at most twice what it holds, or four elements.
        let most = |needed: usize, capacity: usize| if needed > capacity { (2 * needed).max(4) } else { capacity };
        // A selection records one weight per loose token, without room to grow.
        let recorded = loose.max(lock(&self.recorded).as_ref().map_or(0, Vec::capacity));
        let elements =
            most(blocks, self.ends.capacity()) + most(loose, self.weights.capacity()) + recorded + self.shape.width();
        self.waiting.bytes_for(groups) + keys + elements * size_of::<f32>()
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn advance(&mut self) -> Result<Vec<u64>> {
        let recorded = lock(&self.recorded).take();
        if self.mean_query.is_none() {
            return Ok(Vec::new());
        }
        for (weight, more) in self.weights.iter_mut().zip(recorded.into_iter().flatten()) {
            *weight += more;
        }
        let (block, mut rows) = (self.block, Vec::new());
        while self.loose_tokens() >= 2 * block {
            let first = self.block_tokens();
            rows.clear();
            self.waiting.rows(first..first + block, None, &mut rows);
            let own: Vec<f32> = self.weights.drain(..block).collect();
            let was_attended = own.iter().any(|weight| *weight > 0.0);
            let own = if was_attended { own } else { self.by_profile(&rows) };
            self.add_block(&own, &rows);
        }
        self.waiting.forget_before(self.block_tokens() / self.shape.group_tokens);
        Ok(Vec::new())
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        let block = |at| self.block_range(at).map(|token| token as u32).collect::<Vec<u32>>();
        self.mean_query.iter().map(|_| ClusterLists::of_clusters((0..self.ends.len()).map(block))).collect()
    }

    fn profile_bytes(&self, _queries: usize) -> Option<usize> {
        let tokens = self.groups() * self.shape.group_tokens;
        let blocks = tokens / self.block;
        let rows = (self.block + blocks * self.per_block() + 1) * self.shape.width();
        let last = SealedKeys::group_bytes(&self.shape) * (self.block / self.shape.group_tokens + 2);
        Some(weight_bytes(tokens, &self.shape) + (rows + 3 * tokens + blocks) * size_of::<f32>() + last)
    }

    fn profile(&mut self, profile: &QueryProfile<'_>) -> Result<()> {
        let tokens = profile.keys.tokens().len();
        let mut weights = vec![0.0; tokens];
        each_weights(profile, &mut |own| {
            add_row(&mut weights, own, 1.0);
            Ok(())
        })?;
        let mut blocks = Self::new(self.shape, self.block);
        blocks.keys = ScaledRows::with_capacity(self.shape.width(), tokens / self.block * self.per_block());
        blocks.ends.reserve_exact(tokens / self.block);
        blocks.mean_query = Some(mean_query(profile));
        let mut rows = Vec::new();
        for own in weights.chunks_exact(self.block) {
            let first = blocks.block_tokens();
            rows.clear();
            profile.keys.rows(first..first + self.block, None, &mut rows);
            blocks.add_block(own, &rows);
        }
        blocks.weights = weights.split_off(blocks.block_tokens());
        blocks.waiting = profile.keys.tail(blocks.block_tokens() / self.shape.group_tokens);
        *self = blocks;
        Ok(())
    }
}
