//! Selection by a selector of entries: each KV head attends to tokens of its own.
//!
//! 1. Every head attends to the window. It holds the groups that the selector does not know yet, the newest groups as
//!    the options say, sinks, and the tail.
//! 2. The selector may choose the rest of the budget for each KV head. The memory of its choice is reserved first.
//! 3. The entries become masks of groups. A group of the window is attended whole.
//! 4. If the clusters of the method are stored, pages give entries instead of their groups.
//! 5. If the sequence has a cache that ranks clusters, the selection names the chosen clusters and their blocks.

use super::handle::Sequence;
use super::layer::LayerState;
use super::span::Span;
use super::suffix_summary::ScoredSummary;
use crate::cache::{ActivatedClusters, ClusterBlock, ClusterKey};
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{SelectOptions, Selection, entries_of_tokens};
use crate::retrieval::{ChosenEntries, ClusterChange, EntryRequest, EntrySelector, LayerSummary, SelectorId};
use std::sync::Arc;

impl Sequence {
    /// Selects what `selector` chooses for a query that was checked. `scored` returns its summaries.
    pub(super) fn choose_entries<'a>(
        &'a self,
        (id, selector): (SelectorId, &dyn EntrySelector),
        state: &LayerState,
        query: &[f32],
        options: &SelectOptions,
        scored: impl FnOnce(&Span) -> Result<Vec<ScoredSummary<'a>>>,
    ) -> Result<Selection> {
        let group_tokens = self.identity.layout.group_tokens();
        let span = Span::of(state, group_tokens);
        if span.count(options)? >= span.len() {
            let all: Vec<u64> = span.groups.clone().collect();
            return self.selection(state, &span, &all, options.planes);
        }
        let scored = scored(&span)?;
        let summaries: Vec<&dyn LayerSummary> = scored.iter().map(ScoredSummary::get).collect();
        let covered = (selector.covered_groups(&summaries)? as u64).clamp(span.groups.start, span.groups.end);
        let [sinks, recent] = span.forced(options);
        let sinks = sinks.end.max(span.groups.start);
        let choosable = sinks..recent.start.min(covered).max(sinks);
        let visible = (span.tokens - span.first_token) as usize;
        let first_token = span.first_token.max(choosable.start * group_tokens as u64);
        let tokens = first_token as usize..(choosable.end as usize * group_tokens).max(first_token as usize);
        let attended = visible - tokens.len();
        let shape = state.shape();
        let request = EntryRequest {
            query,
            shape,
            scale: options.scale.unwrap_or(1.0 / (shape.key_dim as f32).sqrt()),
            aggregation: options.aggregation,
            tokens,
            budget: options.budget.of(visible)?.saturating_sub(attended),
        };
        let chosen = match request.budget.min(request.tokens.len()) {
            0 => ChosenEntries { heads: vec![Vec::new()], ..ChosenEntries::default() },
            _ => {
                let _scratch = self.reserve_scratch(selector.choose_bytes(&summaries, &request)?)?;
                selector.choose(&summaries, &request)?
            }
        };
        check_chosen(&chosen, &request)?;
        let found = entries_of_tokens(&chosen.heads, choosable.clone(), group_tokens);
        let mut groups: Vec<u64> = (span.groups.start..choosable.start).collect();
        groups.extend(found.iter().map(|(group, _)| *group));
        groups.extend(choosable.end..span.groups.end);
        let mut selection = self.selection(state, &span, &groups, options.planes)?;
        let follows = self.cache.as_ref().is_some_and(|cache| cache.follows_clusters());
        let clusters = follows.then(|| named_clusters((id, selector), &summaries, &chosen, &selection)).transpose()?;
        // The selection is new, so nothing else refers to it.
        if let Some(inner) = Arc::get_mut(&mut selection.inner) {
            inner.cluster_runs = Some(chosen.runs);
            inner.clusters = clusters;
            let mut found = found.into_iter().peekable();
            for selected in &mut inner.groups {
                if let Some((_, entries)) = found.next_if(|(group, _)| *group == selected.index) {
                    selected.entries = entries;
                }
            }
            self.lay_pages(id, inner, &chosen.heads, choosable);
        }
        Ok(selection)
    }
}

/// Returns the chosen clusters, with the blocks of the selection that each of them needs, for a cache that ranks
/// clusters.
///
/// # Errors
/// The errors of the method.
fn named_clusters(
    (id, selector): (SelectorId, &dyn EntrySelector),
    summaries: &[&dyn LayerSummary],
    chosen: &ChosenEntries,
    selection: &Selection,
) -> Result<ActivatedClusters> {
    let inner = &selection.inner;
    let key = |list: usize, cluster: u32| ClusterKey {
        selector: id.number(),
        layer: inner.layer as u32,
        list: list as u32,
        cluster,
    };
    let mut named = ActivatedClusters::default();
    for ClusterChange { list, cluster, number } in selector.changes(summaries)? {
        named.change(key(list, cluster), number);
    }
    let Some(first) = inner.groups.first().map(|group| group.index) else { return Ok(named) };
    // The index of each group in the selection.
    let last = inner.groups.last().map_or(first, |group| group.index);
    let mut index_of = vec![None; (last - first + 1) as usize];
    for (index, group) in (0_u32..).zip(&inner.groups) {
        index_of[(group.index - first) as usize] = Some(index);
    }
    let mut groups: Vec<u64> = Vec::new();
    for (list, clusters) in chosen.clusters.iter().enumerate() {
        for &cluster in clusters {
            let Some(facts) = selector.cluster(summaries, list, cluster)? else { continue };
            groups.clear();
            groups.extend(facts.members.iter().map(|token| u64::from(*token) / inner.group_tokens() as u64));
            groups.sort_unstable();
            groups.dedup();
            let mut before = None;
            let blocks = groups.iter().filter_map(|group| {
                let index = index_of.get(group.checked_sub(first)? as usize).copied().flatten()?;
                let joins = before.replace(*group).is_some_and(|before: u64| before + 1 == *group);
                Some(ClusterBlock { index, joins })
            });
            named.push(key(list, cluster), facts.profiled, blocks);
        }
    }
    Ok(named)
}

/// Checks that a method chose tokens that it was asked about, for every KV head.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`].
fn check_chosen(chosen: &ChosenEntries, request: &EntryRequest<'_>) -> Result<()> {
    let lists = chosen.heads.len();
    let outside = chosen.heads.iter().flatten().find(|token| !request.tokens.contains(&(**token as usize)));
    if (lists != 1 && lists != request.shape.kv_heads) || outside.is_some() {
        let text = format!(
            "the method chose entries in {lists} lists for {} KV heads, of which token {outside:?} is not in {:?}",
            request.shape.kv_heads, request.tokens
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
