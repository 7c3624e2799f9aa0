//! After InfiniGen: every KV head ranks tokens by itself, by partial keys of its own. What it reads is whole groups, so a
//! group stands where the best of its tokens stands in the list of any head.

use super::selector::{Ask, Selector, low_rank, summary_as};
use crate::error::Result;
use crate::summary::{Adapter, KeySummary, Lanes, LowRank, LowRankKeys, SummaryKind};
use std::sync::Arc;

/// Per-token, per-head selection by an adapter whose columns each belong to one head.
#[derive(Clone, Debug)]
pub struct InfiniGen {
    keys: Arc<LowRankKeys>,
}

impl InfiniGen {
    /// With this adapter.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { keys: Arc::new(LowRankKeys::new(adapter)) }
    }
}

impl Selector for InfiniGen {
    fn name(&self) -> &str {
        "infinigen"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>> {
        vec![Arc::clone(&self.keys) as _]
    }

    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &LowRank = summary_as(summaries)?;
        let (kv_heads, group) = (ask.shape.kv_heads, ask.shape.group_tokens);
        let softmax = ask.form == super::ScoreForm::Softmax;
        let lanes = match softmax {
            true => Lanes::heads(ask.query, kv_heads, ask.shape.key_dim),
            false => Lanes::sums(ask.query, kv_heads, ask.shape.key_dim),
        };
        let padded = lanes.padded();
        let mut units = vec![0.0; ask.groups.len() * group * padded];
        low_rank(keys, &lanes, ask.groups.clone(), &mut units);
        let mut weights = vec![1.0; padded];
        if softmax {
            weights = super::selector::softmax(&mut units, lanes.count(), padded, ask.scale);
        }
        let ratio = lanes.count() / kv_heads;
        scores.fill(f32::NEG_INFINITY);
        for head in 0..kv_heads {
            let lanes = head * ratio..(head + 1) * ratio;
            let mut best: Vec<(f32, usize)> = Vec::with_capacity(ask.groups.len());
            for (index, tokens) in units.chunks_exact(padded * group).enumerate() {
                let token = |unit: &[f32]| lanes.clone().map(|lane| unit[lane] * weights[lane]).sum::<f32>();
                best.push((tokens.chunks_exact(padded).map(token).fold(f32::NEG_INFINITY, f32::max), index));
            }
            best.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for (rank, (_, index)) in best.into_iter().enumerate() {
                scores[index] = scores[index].max(-(rank as f32));
            }
        }
        Ok(())
    }
}
