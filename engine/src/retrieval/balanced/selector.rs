//! Selection by clusters of equal size.

use super::list::BalancedList;
use super::summary::{BalancedLayer, BalancedSpec};
use crate::error::Result;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::{
    ClusterList, ClusterOptions, HeadSharing, choose_from_lists, coded_members, codes_in, list_choice_bytes,
    member_codes,
};
use crate::retrieval::entry_selector::{ChosenEntries, ClusterFacts, EntryRequest, EntrySelector};
use crate::retrieval::selector::{ScoreRequest, Selector, no_group_scores, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use crate::retrieval::transform_coded::summary::CodeSpec;
use std::sync::Arc;

/// Selection by clusters of similar keys that all have the same size.
#[derive(Clone, Debug)]
pub(super) struct BalancedSelector {
    options: ClusterOptions,
    codes: Option<Arc<CodeSpec>>,
}

impl BalancedSelector {
    /// Makes the selector. `adapter` has codebooks. It is needed if members are scored.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument): the adapter is missing.
    pub(super) fn new(options: ClusterOptions, adapter: Option<Arc<Adapter>>) -> Result<Self> {
        let codes = member_codes("balanced", &options, adapter)?;
        Ok(Self { options, codes })
    }
}

impl Selector for BalancedSelector {
    fn name(&self) -> &str {
        "balanced"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        let spec = BalancedSpec { options: self.options, codes: self.codes.clone() };
        let codes = self.codes.iter().map(|codes| Arc::clone(codes) as Arc<dyn SummarySpec>);
        std::iter::once(Arc::new(spec) as Arc<dyn SummarySpec>).chain(codes).collect()
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, _: &mut [f32]) -> Result<()> {
        no_group_scores("balanced")
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for BalancedSelector {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        summary_as::<BalancedLayer>(summaries).map(BalancedLayer::covered)
    }

    fn choose_bytes(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let layer: &BalancedLayer = summary_as(summaries)?;
        let codes = self.codes.as_ref().map(|_| codes_in(summaries)).transpose()?;
        let clusters: Vec<usize> = layer.lists().iter().map(BalancedList::count).collect();
        Ok(list_choice_bytes(&clusters, layer.waiting_tokens(), codes, ask))
    }

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let layer: &BalancedLayer = summary_as(summaries)?;
        let is_joint = self.options.sharing == HeadSharing::Joint;
        let codes = self.codes.as_ref().map(|_| coded_members(summaries, ask, is_joint)).transpose()?;
        let lists = layer.lists().iter().map(|list| list as &dyn ClusterList).zip(self.options.heads(&ask.shape));
        Ok(choose_from_lists(lists, codes.as_ref(), |head| layer.recent(head, self.codes.is_none()), ask))
    }

    fn cluster<'a>(
        &self,
        summaries: &[&'a dyn LayerSummary],
        list: usize,
        cluster: u32,
    ) -> Result<Option<ClusterFacts<'a>>> {
        let layer: &BalancedLayer = summary_as(summaries)?;
        let list = layer.lists().get(list).filter(|list| (cluster as usize) < list.count());
        Ok(list.map(|list| ClusterFacts { members: list.members(cluster as usize), profiled: 0.0 }))
    }
}
