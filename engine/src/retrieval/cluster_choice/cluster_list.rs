//! The choice among the clusters of one list, by centroids or by members.

use crate::kernels::prefetch;
use crate::retrieval::cluster_choice::member_codes::CodedMembers;
use crate::retrieval::cluster_choice::recent_tokens::RecentTokens;
use crate::retrieval::cluster_choice::representatives::{HeadProducts, RepresentativeRows};
use crate::retrieval::cluster_choice::take::{Overlap, Taken, take_clusters};
use crate::retrieval::entry_selector::{ChosenEntries, EntryRequest};

/// Clusters by which the prefetch of members is ahead.
const AHEAD: usize = 16;

/// The clusters of one KV head, or of all heads together.
pub(crate) trait ClusterList {
    /// Returns the number of clusters.
    fn count(&self) -> usize;

    /// Returns the members of a cluster that exists. A cluster without a member is never chosen.
    fn members(&self, cluster: usize) -> &[u32];

    /// Returns whether a cluster that exists has a member.
    fn has_members(&self, cluster: usize) -> bool {
        !self.members(cluster).is_empty()
    }

    /// Returns whether a token may be in several clusters, or in one and among the tokens that wait for one.
    fn overlap(&self) -> Overlap;

    /// Returns the vectors by which clusters are found: their centroids, or the keys of their medoids. A list whose
    /// members are scored may have none.
    fn representatives(&self) -> Option<RepresentativeRows<'_>>;
}

/// The choice from one list: its clusters, then the recent tokens, each run of them as a cluster of its own.
pub(crate) struct ListChoice<'a> {
    list: &'a dyn ClusterList,
    /// The clusters of the list.
    clusters: usize,
    recent: &'a [u32],
    /// The recent tokens that are chosen together.
    run: usize,
}

impl<'a> ListChoice<'a> {
    pub(crate) fn new(list: &'a dyn ClusterList, recent: &'a [u32]) -> Self {
        Self { list, clusters: list.count(), recent, run: 1 }
    }

    /// Returns the number of clusters, runs of recent tokens included.
    pub(crate) fn len(&self) -> usize {
        self.clusters + self.recent.len().div_ceil(self.run)
    }

    /// Returns the members of a cluster.
    pub(crate) fn members(&self, cluster: usize) -> &'a [u32] {
        match cluster.checked_sub(self.clusters) {
            None => self.list.members(cluster),
            Some(run) => &self.recent[run * self.run..self.recent.len().min((run + 1) * self.run)],
        }
    }

    /// Returns whether a member of a cluster may be chosen.
    pub(crate) fn may_choose(&self, cluster: usize, ask: &EntryRequest<'_>) -> bool {
        self.members(cluster).iter().any(|token| ask.tokens.contains(&(*token as usize)))
    }

    /// Returns the score of each cluster of list `at` by the codes of its members.
    pub(crate) fn scores(&self, codes: &CodedMembers, at: usize, ask: &EntryRequest<'_>) -> Vec<f32> {
        let score = |cluster| {
            // The lists of members are far apart in memory.
            if cluster + AHEAD < self.clusters
                && let Some(member) = self.list.members(cluster + AHEAD).first()
            {
                prefetch(member);
            }
            codes.score(at, self.members(cluster), ask)
        };
        (0..self.len()).map(score).collect()
    }

    /// Takes clusters by falling score, after the tokens of `first`. The result names no recent token as a cluster.
    pub(crate) fn take(&self, scores: &[f32], first: impl Iterator<Item = u32>, ask: &EntryRequest<'_>) -> Taken {
        let mut taken = take_clusters(
            scores,
            (|cluster| self.members(cluster), self.list.overlap()),
            first,
            &ask.tokens,
            ask.budget,
        );
        taken.clusters.retain(|cluster| (*cluster as usize) < self.clusters);
        taken
    }
}

/// Chooses clusters of list `at`, which holds the keys of `head`, or of all heads.
///
/// `codes` score the members. Without codes, the representatives are scored. The tokens of `first` are taken before any
/// cluster. Each run of `recent` is a cluster of its own.
pub(crate) fn choose_clusters(
    list: &dyn ClusterList,
    (at, head): (usize, Option<usize>),
    codes: Option<&CodedMembers>,
    (first, recent): (impl Iterator<Item = u32>, &RecentTokens<'_>),
    ask: &EntryRequest<'_>,
) -> Taken {
    let choice = ListChoice { run: recent.run(), ..ListChoice::new(list, recent.tokens()) };
    let scores = match codes {
        Some(codes) => choice.scores(codes, at, ask),
        None => {
            let rows: Vec<_> = list.representatives().into_iter().chain(recent.rows()).collect();
            let products = HeadProducts::of_all(&rows, head, ask);
            products.scores(ask, |cluster| cluster >= choice.clusters || list.has_members(cluster))
        }
    };
    choice.take(&scores, first, ask)
}

/// Chooses clusters of each list of a layer, in which `lists` names the KV head of each. `recent` returns the tokens of
/// a head that are in no cluster. Other arguments are as in [`choose_clusters`].
pub(crate) fn choose_from_lists<'a>(
    lists: impl Iterator<Item = (&'a dyn ClusterList, Option<usize>)>,
    codes: Option<&CodedMembers>,
    recent: impl Fn(Option<usize>) -> RecentTokens<'a>,
    ask: &EntryRequest<'_>,
) -> ChosenEntries {
    let mut chosen = ChosenEntries::default();
    for (at, (list, head)) in lists.enumerate() {
        let taken = choose_clusters(list, (at, head), codes, (std::iter::empty(), &recent(head)), ask);
        chosen.runs += taken.runs();
        chosen.heads.push(taken.tokens);
        chosen.clusters.push(taken.clusters);
    }
    chosen
}
