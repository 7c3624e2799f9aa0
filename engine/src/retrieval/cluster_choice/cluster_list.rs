//! The choice among the clusters of one list, by centroids or by members.

use crate::retrieval::cluster_choice::member_codes::CodedMembers;
use crate::retrieval::cluster_choice::recent_tokens::RecentTokens;
use crate::retrieval::cluster_choice::representatives::Representatives;
use crate::retrieval::cluster_choice::take::{Taken, take_clusters};
use crate::retrieval::entry_selector::EntryRequest;

/// The clusters of one KV head, or of all heads together.
pub(crate) trait ClusterList {
    /// Returns the number of clusters.
    fn count(&self) -> usize;

    /// Returns the members of a cluster that exists. A cluster without a member is never chosen.
    fn members(&self, cluster: usize) -> &[u32];

    /// Returns the centroids `[clusters, dim]`.
    fn centroids(&self) -> &[f32];
}

/// Chooses clusters of list `at`, which holds the keys of `head`, or of all heads.
///
/// `codes` score the members. Without codes, the centroids are scored. The tokens of `first` are taken before any
/// cluster. Each token of `recent` is a cluster of its own. Their numbers follow the clusters of the list.
pub(crate) fn choose_clusters(
    list: &dyn ClusterList,
    (at, head): (usize, Option<usize>),
    codes: Option<&CodedMembers>,
    (first, recent): (impl Iterator<Item = u32>, &RecentTokens),
    ask: &EntryRequest<'_>,
) -> Taken {
    let clusters = list.count();
    let members = |cluster: usize| match cluster.checked_sub(clusters) {
        None => list.members(cluster),
        Some(recent_token) => &recent.tokens()[recent_token..=recent_token],
    };
    let scores = match codes {
        Some(codes) => {
            (0..clusters + recent.tokens().len()).map(|cluster| codes.score(at, members(cluster), ask)).collect()
        }
        None => {
            let products = |vectors| Representatives { vectors, head }.products(ask);
            let products = products(list.centroids()).followed_by(products(recent.keys()));
            products.scores(ask, |cluster| !members(cluster).is_empty())
        }
    };
    let mut taken = take_clusters(&scores, members, first, &ask.tokens, ask.budget);
    taken.clusters.retain(|cluster| (*cluster as usize) < clusters);
    taken
}
