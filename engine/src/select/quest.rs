//! Quest-style pages: the upper bound of `q . k` over a group, per query head.

use super::selector::{Ask, Selector, combine, summary_as};
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
        let heads = ask.query.len() / ask.shape.key_dim;
        let lanes = heads.next_multiple_of(8);
        let mut units = vec![0.0; ask.groups.len() * lanes];
        let mut intervals = Vec::new();
        for (group, unit) in ask.groups.clone().zip(units.chunks_exact_mut(lanes)) {
            bounds.intervals(ask.query, 0, group, &mut intervals);
            unit.iter_mut().zip(&intervals).for_each(|(out, interval)| *out = interval.upper);
        }
        combine(&mut units, (heads, lanes), 1, ask.form, ask.scale, scores);
        Ok(())
    }
}
