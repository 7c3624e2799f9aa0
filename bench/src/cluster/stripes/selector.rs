//! [`PlannedSelector`]: a method whose clusters and choices are given, so that only placement and schedule differ.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use stratakv::Result;
use stratakv::retrieval::clusters::ClusterLists;
use stratakv::retrieval::{
    ChosenEntries, EntryRequest, EntrySelector, KeyGroup, KeyShape, LayerSummary, ScoreRequest, Selector, SummarySpec,
};

/// A method that chooses the entries that it is told.
pub(super) struct PlannedSelector {
    /// A name of its own, because selectors of one name share summaries.
    name: String,
    clusters: Arc<ClusterLists>,
    chosen: Mutex<Vec<u32>>,
}

impl PlannedSelector {
    pub(super) fn new(name: String, clusters: &[Vec<u32>]) -> Self {
        let mut lists = ClusterLists::new();
        clusters.iter().for_each(|members| lists.push(members));
        Self { name, clusters: Arc::new(lists), chosen: Mutex::default() }
    }

    /// Sets the entries of the next choice.
    pub(super) fn choose_next(&self, entries: &[u32]) {
        *self.chosen.lock().unwrap_or_else(PoisonError::into_inner) = entries.to_vec();
    }
}

impl Selector for PlannedSelector {
    fn name(&self) -> &str {
        &self.name
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(PlannedSpec { name: self.name.clone(), clusters: Arc::clone(&self.clusters) })]
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        scores.fill(0.0);
        Ok(())
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for PlannedSelector {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        Ok(summaries.first().map_or(0, |summary| summary.groups()))
    }

    fn choose(&self, _: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let Range { start, end } = ask.tokens;
        let chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let heads = vec![chosen.iter().copied().filter(|token| (start..end).contains(&(*token as usize))).collect()];
        Ok(ChosenEntries { heads, ..ChosenEntries::default() })
    }
}

struct PlannedSpec {
    name: String,
    clusters: Arc<ClusterLists>,
}

impl SummarySpec for PlannedSpec {
    fn id(&self) -> String {
        self.name.clone()
    }

    fn layer(&self, _: usize, _: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(PlannedSummary { groups: 0, clusters: Arc::clone(&self.clusters) }))
    }
}

struct PlannedSummary {
    groups: usize,
    clusters: Arc<ClusterLists>,
}

impl LayerSummary for PlannedSummary {
    fn groups(&self) -> usize {
        self.groups
    }

    fn push(&mut self, _: &KeyGroup<'_>) {
        self.groups += 1;
    }

    fn truncate(&mut self, groups: usize) {
        self.groups = self.groups.min(groups);
    }

    fn bytes(&self) -> usize {
        0
    }

    fn bytes_for(&self, _: usize) -> usize {
        0
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        vec![(*self.clusters).clone()]
    }
}
