//! Selection by clusters of co-activated entries.

use super::summary::{ProfiledClusters, SwarmLayer, SwarmSpec, Unactivated};
use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::{
    ChosenBy, ClusterList, ClusterOptions, HeadProducts, HeadSharing, ListChoice, Overlap, RecentTokens,
    RepresentativeRows, coded_bytes, coded_members, codes_in, member_codes, product_bytes, recent_bytes, take_bytes,
};
use crate::retrieval::clusters::ActivationRule;
use crate::retrieval::entry_selector::{ChosenEntries, ClusterChange, ClusterFacts, EntryRequest, EntrySelector};
use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::selector::{ScoreRequest, Selector, no_group_scores, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use crate::retrieval::transform_coded::summary::CodeSpec;
use std::sync::Arc;

/// The largest mean size of clusters.
const MAX_MEAN_SIZE: usize = 1 << 16;

/// Selection by clusters of entries that recorded queries activated together. It needs
/// [`Sequence::profile`](crate::Sequence::profile).
#[derive(Clone, Debug)]
pub struct Swarm {
    options: ClusterOptions,
    codes: Option<Arc<CodeSpec>>,
}

impl Swarm {
    /// Makes the selector. `adapter` has codebooks. It is needed if members are scored.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the adapter is missing, or clusters of each KV head are asked for. A mean size
    /// of more than 65,536. Both `members` and `single`.
    pub(crate) fn new(options: ClusterOptions, adapter: Option<Arc<Adapter>>) -> Result<Self> {
        if options.sharing == HeadSharing::PerHead {
            let text = "swarm:heads: an entry of this method has the keys of all KV heads; use swarm or swarm:joint";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if options.single && options.chosen_by == ChosenBy::Members {
            let text = "swarm:members:single: with members, an entry is in one cluster anyway; use swarm:members";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if options.mean_size > MAX_MEAN_SIZE {
            let text = format!("swarm:{}: the mean size is at most {MAX_MEAN_SIZE}", options.mean_size);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let codes = member_codes("swarm", &options, adapter)?;
        Ok(Self { options, codes })
    }
}

/// Returns the scores of the clusters by their medoids, and the entries that the query activates.
fn by_medoids(
    layer: &SwarmLayer,
    clusters: &ProfiledClusters,
    choice: &ListChoice<'_>,
    ask: &EntryRequest<'_>,
) -> (Vec<f32>, Option<Vec<u32>>) {
    let waiting = layer.waiting().recent(true);
    let products = |rows: Option<RepresentativeRows<'_>>| HeadProducts::of_all(rows.as_slice(), None, ask);
    let (medoids, waiting) = (products(clusters.representatives()), products(waiting.rows()));
    let q_heads = ask.query.len() / ask.shape.key_dim;
    let activated = ActivationRule::default().activated_by_scores(&medoids.rows_with(&waiting), q_heads, ask.scale);
    // Tokens of a window that is attended whole have no score.
    let products = if choice.len() > clusters.count() { medoids.followed_by(waiting) } else { medoids };
    (products.scores(ask, |cluster| choice.may_choose(cluster, ask)), activated.ok())
}

/// Returns the scores of the clusters by the codes of their members, and the entries that the query activates.
///
/// The softmax of a query head goes over the tokens that may be chosen and those that wait.
fn by_members(
    layer: &SwarmLayer,
    clusters: &ProfiledClusters,
    choice: &ListChoice<'_>,
    ask: &EntryRequest<'_>,
    summaries: &[&dyn LayerSummary],
) -> Result<(Vec<f32>, Option<Vec<u32>>)> {
    let waiting = layer.waiting().tokens();
    let all = EntryRequest {
        aggregation: HeadAggregation::Softmax,
        tokens: ask.tokens.start..waiting.end.max(ask.tokens.end),
        ..ask.clone()
    };
    let weights = coded_members(summaries, &all, true)?;
    let scores = match ask.aggregation {
        HeadAggregation::Sum => choice.scores(&coded_members(summaries, ask, true)?, 0, ask),
        HeadAggregation::Softmax | HeadAggregation::GroupSoftmax => choice.scores(&weights, 0, ask),
    };
    // A medoid that was cut has no weight.
    let medoids = clusters.members.medoids().iter().map(|medoid| *medoid as usize);
    let entries: Vec<f32> = medoids.chain(waiting).map(|token| weights.weight(0, token)).collect();
    Ok((scores, ActivationRule::default().activated(&entries).ok()))
}

impl Selector for Swarm {
    fn name(&self) -> &str {
        "swarm"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        let clusters: Arc<dyn SummarySpec> = Arc::new(SwarmSpec { options: self.options });
        let codes = self.codes.iter().map(|codes| Arc::clone(codes) as Arc<dyn SummarySpec>);
        std::iter::once(clusters).chain(codes).collect()
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, _: &mut [f32]) -> Result<()> {
        no_group_scores("swarm")
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for Swarm {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        let layer: &SwarmLayer = summary_as(summaries)?;
        layer.clusters()?;
        let waiting = layer.waiting().groups();
        Ok(if self.options.whole_window { waiting.start } else { waiting.end })
    }

    fn choose_bytes(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let layer: &SwarmLayer = summary_as(summaries)?;
        let (clusters, waiting) = (layer.clusters()?.count(), layer.waiting().tokens().len());
        let entries = clusters + waiting;
        let scoring = match self.options.chosen_by {
            // The softmax of what is activated goes over the window as well.
            ChosenBy::Members => {
                let tokens = ask.tokens.start..ask.tokens.end.max(layer.waiting().tokens().end);
                2 * coded_bytes(codes_in(summaries)?, &EntryRequest { tokens, ..ask.clone() }, 1)
            }
            ChosenBy::Representative => {
                let rows = 3 * entries * (ask.query.len() / ask.shape.key_dim) * size_of::<f32>();
                rows + product_bytes(entries, ask, true) + recent_bytes(waiting, ask, true)
            }
        };
        let activated = ActivationRule::default().bytes_for(entries) + 3 * entries * size_of::<f32>();
        Ok(scoring + activated + take_bytes(entries, ask) + waiting * size_of::<u32>())
    }

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let layer: &SwarmLayer = summary_as(summaries)?;
        let clusters = layer.clusters()?;
        let recent = match self.options.whole_window {
            true => RecentTokens::default(),
            false => layer.waiting().recent(false),
        };
        let choice = ListChoice::new(clusters, recent.tokens());
        let (scores, activated) = match self.options.chosen_by {
            ChosenBy::Members => by_members(layer, clusters, &choice, ask, summaries)?,
            ChosenBy::Representative => by_medoids(layer, clusters, &choice, ask),
        };
        if let Some(activated) = activated {
            layer.record(activated);
        }
        let taken = choice.take(&scores, std::iter::empty(), ask);
        Ok(ChosenEntries { runs: taken.runs(), heads: vec![taken.tokens], clusters: vec![taken.clusters] })
    }

    fn cluster<'a>(
        &self,
        summaries: &[&'a dyn LayerSummary],
        _list: usize,
        cluster: u32,
    ) -> Result<Option<ClusterFacts<'a>>> {
        let clusters = summary_as::<SwarmLayer>(summaries)?.clusters()?;
        let at = cluster as usize;
        let facts = || ClusterFacts { members: clusters.members.of(at), profiled: clusters.profiled_share(at) };
        Ok((at < clusters.members.len()).then(facts))
    }

    fn changes(&self, summaries: &[&dyn LayerSummary]) -> Result<Vec<ClusterChange>> {
        let clusters = summary_as::<SwarmLayer>(summaries)?.clusters()?;
        Ok(clusters.changes.of_list(0).collect())
    }
}

impl ClusterList for ProfiledClusters {
    fn count(&self) -> usize {
        self.members.len()
    }

    fn members(&self, cluster: usize) -> &[u32] {
        self.members.of(cluster)
    }

    fn overlap(&self) -> Overlap {
        Overlap::Some
    }

    fn representatives(&self) -> Option<RepresentativeRows<'_>> {
        match &self.unactivated {
            Unactivated::Key(keys) => Some(RepresentativeRows::Halves(keys.rows())),
            Unactivated::Age(_) => None,
        }
    }
}
