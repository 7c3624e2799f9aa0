//! The choice among the clusters of one list, by centroids or by members.

use crate::retrieval::cluster_choice::member_codes::CodedMembers;
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
/// cluster.
pub(crate) fn choose_clusters(
    list: &dyn ClusterList,
    (at, head): (usize, Option<usize>),
    codes: Option<&CodedMembers>,
    first: impl Iterator<Item = u32>,
    ask: &EntryRequest<'_>,
) -> Taken {
    let members = |cluster: usize| list.members(cluster);
    let scores = match codes {
        Some(codes) => (0..list.count()).map(|cluster| codes.score(at, members(cluster), ask)).collect(),
        None => Representatives { vectors: list.centroids(), head }.scores(ask, |cluster| !members(cluster).is_empty()),
    };
    take_clusters(&scores, members, first, &ask.tokens, ask.budget)
}
