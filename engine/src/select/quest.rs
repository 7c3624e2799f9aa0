//! Quest-style pages: the upper bound of `q . k` over a group, per query head.

use super::bounds::{BoundQuery, summed_upper};
use super::selector::{Ask, ScoreForm, Selector, combine, summary_as};
use crate::error::Result;
use crate::summary::{Bounds, KeyBounds, KeySummary, SummaryKind};
use std::sync::Arc;

/// Selection by the upper bound of each group (Tang et al. 2024).
#[derive(Clone, Copy, Debug, Default)]
pub struct Quest;

impl Selector for Quest {
    fn name(&self) -> &str {
        "minmax"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>> {
        vec![Arc::new(KeyBounds { levels: 1 }) as _]
    }

    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()> {
        let bounds: &Bounds = summary_as(summaries)?;
        if ask.form == ScoreForm::Raw {
            summed_upper(bounds, ask, scores);
            return Ok(());
        }
        let heads = ask.query.len() / ask.shape.key_dim;
        let lanes = heads.next_multiple_of(8);
        let mut units = BoundQuery::new(ask).upper(bounds, 0, ask.groups.clone(), lanes);
        combine(&mut units, (heads, lanes), 1, ask.form, ask.scale, scores);
        Ok(())
    }
}
