//! Selection by blocks with representative tokens.

use super::summary::{BlockLayer, BlockSpec};
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::add_softmax;
use crate::retrieval::cluster_choice::{
    HeadProducts, Overlap, RepresentativeRows, product_bytes, recent_bytes, take_bytes, take_clusters,
};
use crate::retrieval::entry_selector::{ChosenEntries, EntryRequest, EntrySelector};
use crate::retrieval::selector::{ScoreRequest, Selector, no_group_scores, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::sync::Arc;

/// The most tokens of a block.
const MAX_BLOCK: usize = 1 << 16;

/// Selection by blocks of consecutive tokens, each found by its most attended tokens. It needs
/// [`Sequence::profile`](crate::Sequence::profile).
#[derive(Clone, Debug)]
pub struct InfLlm {
    /// The tokens of a block.
    block: usize,
}

impl InfLlm {
    /// Makes the selector for blocks of `block` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a block without a token, or of more than 65,536.
    pub fn new(block: usize) -> Result<Self> {
        if block == 0 || block > MAX_BLOCK {
            let text = format!("infllm: a block of {block} tokens; it has 1 to {MAX_BLOCK}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(Self { block })
    }
}

/// Returns the score of each block, and the attention weight of each token that waits.
fn scores(layer: &BlockLayer, ask: &EntryRequest<'_>) -> (Vec<f32>, Vec<f32>) {
    let products = HeadProducts::new(RepresentativeRows::Halves(layer.keys()), None, ask);
    let loose = layer.loose_keys();
    let rows = products.rows_with(&HeadProducts::new(RepresentativeRows::Halves(&loose), None, ask));
    let tokens = rows.len() / (ask.query.len() / ask.shape.key_dim);
    let mut weights = vec![0.0; tokens];
    if rows.iter().all(|x| (x * ask.scale).is_finite()) {
        let mut powers = vec![0.0; tokens];
        rows.chunks(tokens.max(1)).for_each(|row| add_softmax(row, ask.scale, &mut powers, &mut weights));
    }
    let representatives = layer.keys().len();
    // A representative counts even if its token cannot be chosen, because it stands for the whole block.
    let single = products.scores(ask, |_| true);
    let blocks = single.chunks(layer.per_block()).map(|own| own.iter().sum()).collect();
    (blocks, weights.split_off(representatives.min(tokens)))
}

impl Selector for InfLlm {
    fn name(&self) -> &str {
        "infllm"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(BlockSpec { block: self.block })]
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, _: &mut [f32]) -> Result<()> {
        no_group_scores("infllm")
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for InfLlm {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        summary_as::<BlockLayer>(summaries)?.covered()
    }

    fn choose_bytes(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let layer: &BlockLayer = summary_as(summaries)?;
        let (keys, loose) = (layer.keys().len(), layer.loose_tokens());
        let rows = (keys + loose) * (3 * ask.query.len() / ask.shape.key_dim + 4) * size_of::<f32>();
        let tokens = layer.block_tokens() * size_of::<u32>();
        let products = product_bytes(keys + loose, ask, true) + recent_bytes(loose, ask, true);
        Ok(products + rows + tokens + take_bytes(keys, ask))
    }

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let layer: &BlockLayer = summary_as(summaries)?;
        let (scores, weights) = scores(layer, ask);
        layer.record(weights);
        let tokens: Vec<u32> = (0..layer.block_tokens() as u32).collect();
        let members = |block: usize| &tokens[layer.block_range(block)];
        let taken = take_clusters(&scores, (members, Overlap::None), std::iter::empty(), &ask.tokens, ask.budget);
        Ok(ChosenEntries { runs: taken.runs(), heads: vec![taken.tokens], clusters: Vec::new() })
    }
}
