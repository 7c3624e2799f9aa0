//! The tokens and groups that a layer can attend to, and how a budget divides them.

use super::layer::LayerState;
use crate::attention::TokenMask;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::SelectOptions;
use std::ops::Range;

/// The tokens and groups that a layer can attend to: all, or those in its window.
pub(super) struct Span {
    pub(super) first_token: u64,
    pub(super) tokens: u64,
    group: u64,
    /// The sealed groups with a visible token.
    pub(super) groups: Range<u64>,
}

impl Span {
    /// Returns the span of a layer whose groups have `group` tokens.
    pub(super) fn of(state: &LayerState, group: usize) -> Self {
        let (tokens, group) = (state.tokens(), group as u64);
        let first_token = state.geometry().window.map_or(0, |window| tokens.saturating_sub(u64::from(window)));
        let sealed = tokens / group;
        Self { first_token, tokens, group, groups: (first_token / group).min(sealed)..sealed }
    }

    /// Returns the span of the first `tokens` tokens, whatever the layer's window is.
    pub(super) fn all(tokens: u64, group: usize) -> Self {
        let group = group as u64;
        Self { first_token: 0, tokens, group, groups: 0..tokens / group }
    }

    /// Returns the number of groups.
    pub(super) fn len(&self) -> usize {
        (self.groups.end - self.groups.start) as usize
    }

    /// Returns the visible tokens of a group; none if all are visible. The tail counts as the group after the last.
    pub(super) fn positions(&self, group: u64) -> Option<TokenMask> {
        let start = group * self.group;
        if start >= self.first_token {
            return None;
        }
        let valid = (self.tokens - start).min(self.group) as usize;
        let hidden = (self.first_token - start).min(self.group) as usize;
        Some(TokenMask::all(valid).difference(TokenMask::all(hidden)))
    }

    /// Returns the number of whole groups that a budget in tokens allows beside the tail. Without a tail it is at least
    /// one, for the newest group.
    fn group_count(&self, budget: usize) -> usize {
        let visible = (self.tokens - self.first_token) as usize;
        if budget >= visible {
            return self.len();
        }
        let tail = (self.tokens - self.groups.end * self.group).min(visible as u64) as usize;
        let count = budget.saturating_sub(tail) / self.group as usize;
        if tail == 0 { count.max(1) } else { count }
    }

    /// Returns the groups that every selection includes: sinks, then the newest.
    pub(super) fn forced(&self, options: &SelectOptions) -> [Range<u64>; 2] {
        let Range { start, end } = self.groups;
        let sinks = if self.first_token == 0 { (options.sink_tokens as u64).div_ceil(self.group) } else { 0 };
        let tail = self.tokens - end * self.group;
        let recent = (options.recent_tokens as u64).saturating_sub(tail).div_ceil(self.group);
        let recent = if tail == 0 { recent.max(1) } else { recent };
        [start..(start + sinks).min(end), end.saturating_sub(recent).max(start)..end]
    }

    /// Returns whether `count` groups leave any to choose beside the forced ones.
    pub(super) fn needs_scores(&self, count: usize, forced: &[Range<u64>; 2]) -> bool {
        count > self.forced_count(forced)
    }

    /// Returns the number of forced groups, counting each once.
    pub(super) fn forced_count(&self, forced: &[Range<u64>; 2]) -> usize {
        let overlap = forced[0].end.saturating_sub(forced[1].start.max(forced[0].start));
        (forced.iter().map(|r| r.end - r.start).sum::<u64>() - overlap) as usize
    }

    /// Returns the number of groups that a budget allows.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a budget of zero, or a scale that is not finite and above 0.
    pub(super) fn count(&self, options: &SelectOptions) -> Result<usize> {
        if let Some(scale) = options.scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
            let text = format!("scale {scale} must be finite and above 0");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let visible = (self.tokens - self.first_token) as usize;
        Ok(self.group_count(options.budget.of(visible)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_without_a_tail_always_includes_the_newest_group() {
        let span = Span::all(16, 4);
        assert_eq!((span.len(), span.group_count(1), span.group_count(9), span.group_count(16)), (4, 1, 2, 4));
    }

    #[test]
    fn span_counts_the_tail_against_the_budget() {
        let span = Span::all(18, 4);
        assert_eq!((span.len(), span.group_count(1), span.group_count(6), span.group_count(17)), (4, 0, 1, 3));
    }

    #[test]
    fn span_counts_overlapping_forced_groups_once() {
        let span = Span::all(16, 4);
        assert_eq!(span.forced_count(&[0..2, 1..4]), 4);
        assert!(span.needs_scores(5, &[0..2, 1..4]) && !span.needs_scores(4, &[0..2, 1..4]));
    }
}
