//! Selection by adaptive clusters.

use super::summary::{AdaptiveLayer, AdaptiveList, AdaptiveSpec};
use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::{
    ChosenBy, ClusterOptions, CodedMembers, HeadSharing, Representatives, Taken, coded_members, take_clusters,
};
use crate::retrieval::entry_selector::{ChosenEntries, EntryRequest, EntrySelector};
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
        let codes = match options.chosen_by {
            ChosenBy::Representative => None,
            ChosenBy::Members => {
                let none = || Error::new(ErrorKind::InvalidArgument, "dynakv:members: an adapter with codes is needed");
                Some(Arc::new(CodeSpec::new(adapter.ok_or_else(none)?)))
            }
        };
        Ok(Self { options, codes })
    }

    /// Returns what a list chooses.
    fn choose_of_list(
        &self,
        (at, list): (usize, &AdaptiveList),
        codes: Option<&CodedMembers>,
        ask: &EntryRequest<'_>,
    ) -> Result<Taken> {
        let clusters = &list.clusters;
        let members = |cluster: usize| clusters.members(cluster as u32).unwrap_or_default();
        let head = (self.options.sharing == HeadSharing::PerHead).then_some(at);
        let scores = match codes {
            Some(codes) => (0..clusters.len()).map(|cluster| codes.score(at, members(cluster), ask)).collect(),
            None => {
                let has_members = |cluster: usize| clusters.stats()[cluster].size() > 0;
                Representatives { vectors: clusters.centroids(), head }.scores(ask, has_members)
            }
        };
        let mut buffered = Vec::with_capacity(clusters.buffered());
        for cluster in 0..clusters.len() as u32 {
            buffered.extend_from_slice(clusters.buffer(cluster)?);
        }
        Ok(take_clusters(&scores, members, buffered.into_iter(), &ask.tokens, ask.budget))
    }
}

impl Selector for DynaKv {
    fn name(&self) -> &str {
        "dynakv"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        let clusters: Arc<dyn SummarySpec> = Arc::new(AdaptiveSpec { options: self.options });
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

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let layer: &AdaptiveLayer = summary_as(summaries)?;
        let is_joint = self.options.sharing == HeadSharing::Joint;
        let codes = self.codes.as_ref().map(|_| coded_members(summaries, ask, is_joint)).transpose()?;
        let lists = layer.lists().iter().enumerate();
        let taken = lists.map(|list| self.choose_of_list(list, codes.as_ref(), ask)).collect::<Result<Vec<_>>>()?;
        let clusters = taken.iter().map(|taken| taken.clusters.len()).sum();
        let (heads, retrieved) = taken.into_iter().map(|taken| (taken.tokens, taken.clusters)).unzip();
        layer.retrieve(retrieved);
        Ok(ChosenEntries { heads, clusters })
    }
}
