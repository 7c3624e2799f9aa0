//! Quest: the upper bound of `q . k` over a group, per query head.

use crate::error::Result;
use crate::retrieval::bounds::query::BoundQuery;
use crate::retrieval::bounds::summary::{Bounds, BoundsSpec};
use crate::retrieval::score_tiles::score_tiles;
use crate::retrieval::selector::{HeadAggregation, ScoreRequest, Selector, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::ops::Range;
use std::sync::Arc;

/// Selection by the upper bound of each group (Tang et al. 2024).
#[derive(Clone, Copy, Debug, Default)]
pub struct Quest;

impl Selector for Quest {
    fn name(&self) -> &str {
        "minmax"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(BoundsSpec { levels: 1 }) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let bounds: &Bounds = summary_as(summaries)?;
        if ask.aggregation == HeadAggregation::Sum {
            BoundQuery::summed(ask).put_upper(bounds, 0, ask.groups.clone(), scores, 1);
            return Ok(());
        }
        let heads = ask.query.len() / ask.shape.key_dim;
        let lanes = heads.next_multiple_of(8);
        let mut query = BoundQuery::heads(ask);
        let fill = move |groups: Range<usize>, out: &mut [f32]| query.put_upper(bounds, 0, groups, out, lanes);
        score_tiles(ask, 1, (heads, lanes), fill, scores, |tile, scores| tile.best(1, scores));
        Ok(())
    }
}
