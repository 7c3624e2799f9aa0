//! Selection by adaptive clusters.

use super::summary::{AdaptiveLayer, AdaptiveSpec};
use crate::error::Result;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::{
    ClusterList, ClusterOptions, HeadSharing, Overlap, RepresentativeRows, Taken, choose_clusters, coded_members,
    codes_in, list_choice_bytes, member_codes,
};
use crate::retrieval::clusters::AdaptiveClusters;
use crate::retrieval::entry_selector::{ChosenEntries, ClusterChange, ClusterFacts, EntryRequest, EntrySelector};
use crate::retrieval::selector::{ScoreRequest, Selector, no_group_scores, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use crate::retrieval::transform_coded::summary::CodeSpec;
use std::sync::Arc;

/// Selection by clusters of similar keys that adapt while the context grows.
#[derive(Clone, Debug)]
pub struct DynaKv {
    options: ClusterOptions,
    codes: Option<Arc<CodeSpec>>,
}

impl DynaKv {
    /// Makes the selector. `adapter` has codebooks. It is needed if members are scored.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the adapter is missing.
    pub(crate) fn new(options: ClusterOptions, adapter: Option<Arc<Adapter>>) -> Result<Self> {
        let codes = member_codes("dynakv", &options, adapter)?;
        Ok(Self { options, codes })
    }
}

impl Selector for DynaKv {
    fn name(&self) -> &str {
        "dynakv"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        let clusters: Arc<dyn SummarySpec> =
            Arc::new(AdaptiveSpec { options: self.options, codes: self.codes.clone() });
        let codes = self.codes.iter().map(|codes| Arc::clone(codes) as Arc<dyn SummarySpec>);
        std::iter::once(clusters).chain(codes).collect()
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, _: &mut [f32]) -> Result<()> {
        no_group_scores("dynakv")
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for DynaKv {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        summary_as::<AdaptiveLayer>(summaries).map(AdaptiveLayer::covered)
    }

    fn choose_bytes(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let layer: &AdaptiveLayer = summary_as(summaries)?;
        let codes = self.codes.as_ref().map(|_| codes_in(summaries)).transpose()?;
        let clusters: Vec<usize> = layer.lists().iter().map(|list| list.clusters.len()).collect();
        Ok(list_choice_bytes(&clusters, layer.waiting_tokens(), codes, ask))
    }

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let layer: &AdaptiveLayer = summary_as(summaries)?;
        let is_joint = self.options.sharing == HeadSharing::Joint;
        let codes = self.codes.as_ref().map(|_| coded_members(summaries, ask, is_joint)).transpose()?;
        let mut taken = Vec::with_capacity(layer.lists().len());
        for (at, head) in self.options.heads(&ask.shape).into_iter().enumerate().take(layer.lists().len()) {
            let clusters = &layer.lists()[at].clusters;
            let buffered = clusters.buffered_entries();
            let recent = layer.recent(head, codes.is_none());
            taken.push(choose_clusters(clusters, (at, head), codes.as_ref(), (buffered, &recent), ask));
        }
        let runs = taken.iter().map(Taken::runs).sum();
        let (heads, clusters): (_, Vec<_>) = taken.into_iter().map(|taken| (taken.tokens, taken.clusters)).unzip();
        layer.retrieve(clusters.clone());
        Ok(ChosenEntries { heads, runs, clusters })
    }

    fn cluster<'a>(
        &self,
        summaries: &[&'a dyn LayerSummary],
        list: usize,
        cluster: u32,
    ) -> Result<Option<ClusterFacts<'a>>> {
        let layer: &AdaptiveLayer = summary_as(summaries)?;
        let members = layer.lists().get(list).and_then(|list| list.clusters.members(cluster).ok());
        Ok(members.map(|members| ClusterFacts { members, profiled: 0.0 }))
    }

    fn changes(&self, summaries: &[&dyn LayerSummary]) -> Result<Vec<ClusterChange>> {
        let layer: &AdaptiveLayer = summary_as(summaries)?;
        Ok(layer.lists().iter().enumerate().flat_map(|(at, list)| list.changes.of_list(at)).collect())
    }
}

impl ClusterList for AdaptiveClusters {
    fn count(&self) -> usize {
        self.len()
    }

    fn members(&self, cluster: usize) -> &[u32] {
        self.members_of(cluster)
    }

    fn has_members(&self, cluster: usize) -> bool {
        self.has_members(cluster)
    }

    fn overlap(&self) -> Overlap {
        Overlap::None
    }

    fn representatives(&self) -> Option<RepresentativeRows<'_>> {
        self.byte_centroids().map(RepresentativeRows::Bytes)
    }
}
