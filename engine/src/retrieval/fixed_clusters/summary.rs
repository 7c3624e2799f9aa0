//! The fixed clusters of one layer.
//!
//! How the summary takes in groups:
//! 1. A pushed group waits with its keys ([`LayerSummary::push`]).
//! 2. [`LayerSummary::advance`] builds the first clusters as soon as there are enough keys, by k-means.
//! 3. It then adds later tokens as [`LaterTokens`] says, and drops the keys of the groups that are covered.
//!
//! Invariants:
//! - A list is the clusters of one KV head, or of all heads together.
//! - Each token is in one cluster of each list, or waits. The newest tokens wait, and each is chosen by itself.
//! - The clusters depend on the tokens, the cuts and the moment of attaching, not on how the tokens were cut into
//!   appends, nor on selections.

use super::list::FixedClusters;
use crate::error::Result;
use crate::retrieval::cluster_choice::{
    ClusterList, ClusterOptions, FIRST_ENTRIES, KeySpace, RecentTokens, WaitingKeys, cluster_keys, cluster_keys_bytes,
};
use crate::retrieval::clusters::ClusterLists;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};

/// The new tokens that are clustered together, before they are rounded up to whole groups.
const NEW_ENTRIES: usize = 320;
/// The seed of all random choices.
const SEED: u64 = 0x6669_7865_645f_6b76;

/// The treatment of tokens after the first clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaterTokens {
    /// Each joins the cluster with the nearest centroid.
    Join,
    /// [`NEW_ENTRIES`] at a time become new clusters of their own.
    NewClusters,
}

/// The specification of fixed clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct FixedClusterSpec {
    pub(super) later: LaterTokens,
    pub(super) options: ClusterOptions,
}

impl SummarySpec for FixedClusterSpec {
    fn id(&self) -> String {
        // The clusters do not depend on what is scored, so `:members` shares them.
        format!("clusters/{:?}/{}/{:?}", self.later, self.options.mean_size, self.options.sharing)
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(FixedLayer { shape, spec: *self, lists: Vec::new(), next: 0, waiting: WaitingKeys::new(shape) }))
    }
}

/// The clusters of a layer.
pub(super) struct FixedLayer {
    shape: KeyShape,
    spec: FixedClusterSpec,
    /// Without any until the first clusters are built.
    lists: Vec<FixedClusters>,
    /// The first token that is in no cluster. Outside of [`LayerSummary::advance`], it is the first waiting token.
    next: usize,
    /// The keys of groups that are not covered.
    waiting: WaitingKeys,
}

impl FixedLayer {
    /// Returns the lists, one per KV head or one for all.
    pub(super) fn lists(&self) -> &[FixedClusters] {
        &self.lists
    }

    /// Returns the number of groups that can be chosen from: all, once there are clusters.
    pub(super) fn covered(&self) -> usize {
        if self.lists.is_empty() { 0 } else { self.waiting.groups().end }
    }

    /// Returns the number of tokens that are in no cluster of a list, at most.
    pub(super) fn waiting_tokens(&self) -> usize {
        self.waiting.tokens_after(0)
    }

    /// Returns the tokens that are in no cluster of a list.
    pub(super) fn recent(&self, head: Option<usize>, with_keys: bool) -> RecentTokens<'_> {
        self.waiting.recent(self.next, head, with_keys)
    }

    /// Returns the tokens of a batch of new clusters.
    fn batch(&self) -> usize {
        NEW_ENTRIES.next_multiple_of(self.shape.group_tokens)
    }

    /// Makes the next tokens new clusters. Their keys are waiting.
    fn cluster(&mut self, tokens: usize) -> Result<()> {
        let (shape, options) = (&self.shape, &self.spec.options);
        let space = KeySpace::new(*shape, *options, None);
        let clustered = cluster_keys(self.waiting.keys(), self.next..self.next + tokens, &space, SEED)?;
        if self.lists.is_empty() {
            self.lists = clustered.iter().map(|_| FixedClusters::new(options.dim(shape))).collect();
        }
        for (list, clustered) in self.lists.iter_mut().zip(&clustered) {
            list.add(self.next, clustered);
        }
        self.next += tokens;
        Ok(())
    }

    /// Adds the waiting tokens but the recent ones to the clusters with the nearest centroids.
    fn join(&mut self) {
        let tokens = self.next..self.waiting.ready().end.max(self.next);
        let dim = self.spec.options.dim(&self.shape);
        let mut rows = Vec::new();
        for (list, head) in self.lists.iter_mut().zip(self.spec.options.heads(&self.shape)) {
            rows.clear();
            rows.reserve_exact(tokens.len() * dim);
            self.waiting.keys().rows(tokens.clone(), head, &mut rows);
            list.join(tokens.start, &rows);
        }
        self.next = tokens.end;
    }
}

impl LayerSummary for FixedLayer {
    fn groups(&self) -> usize {
        self.waiting.groups().end
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.waiting.push(group);
    }

    fn truncate(&mut self, groups: usize) {
        self.waiting.truncate(groups);
        let tokens = groups * self.shape.group_tokens;
        if tokens >= self.next {
            return;
        }
        self.next = tokens;
        if tokens == 0 {
            self.lists.clear();
        }
        self.lists.iter_mut().for_each(|list| list.truncate(tokens));
    }

    fn bytes(&self) -> usize {
        self.waiting.bytes() + self.lists.iter().map(FixedClusters::bytes).sum::<usize>()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        let waiting = self.waiting.tokens_after(groups);
        let dim = self.spec.options.dim(&self.shape);
        // The tokens that are clustered at once, the clusters of each list that open, and scratch.
        let (clustered, opened) = match (self.lists.is_empty(), self.spec.later) {
            (true, _) if waiting >= FIRST_ENTRIES => (waiting, waiting),
            (false, LaterTokens::NewClusters) if waiting >= self.batch() => (self.batch(), waiting),
            _ => (0, 0),
        };
        let joined = match self.spec.later {
            LaterTokens::Join => {
                let clusters = self.lists.iter().map(ClusterList::count).max().unwrap_or(waiting);
                waiting * dim * size_of::<f32>() + FixedClusters::new(dim).join_bytes(clusters)
            }
            LaterTokens::NewClusters => 0,
        };
        let space = KeySpace::new(self.shape, self.spec.options, None);
        let scratch = cluster_keys_bytes(clustered, &space).max(joined);
        let lists: usize = match self.lists.is_empty() {
            true => self.spec.options.heads(&self.shape).len() * FixedClusters::new(dim).bytes_for(opened, waiting),
            false => self.lists.iter().map(|list| list.bytes_for(opened, waiting)).sum(),
        };
        self.waiting.bytes_for(groups) + scratch + lists
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        let of = |list: &FixedClusters| ClusterLists::of_clusters((0..list.count()).map(|at| list.members(at)));
        self.lists.iter().map(of).collect()
    }

    fn attached(&mut self) {
        self.waiting.attached();
    }

    fn advance(&mut self) -> Result<Vec<u64>> {
        if self.lists.is_empty() {
            if let Some(entries) = self.waiting.first_entries() {
                self.cluster(entries)?;
            }
            self.waiting.built();
        }
        if self.lists.is_empty() {
            return Ok(Vec::new());
        }
        match self.spec.later {
            LaterTokens::Join => self.join(),
            LaterTokens::NewClusters => {
                let ready = self.waiting.ready().end;
                while ready.saturating_sub(self.next) >= self.batch() {
                    self.cluster(self.batch())?;
                }
            }
        }
        self.waiting.forget_before(self.next);
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::cluster_choice::{ChosenBy, HeadSharing};
    use crate::retrieval::clusters::SeededRandom;
    use crate::retrieval::sealed_keys::SealedKeys;
    use proptest::prelude::*;
    use std::any::Any;
    use stratakv_format::DType;

    fn layer(later: LaterTokens, sharing: HeadSharing, shape: KeyShape, mean_size: usize) -> Box<dyn LayerSummary> {
        let chosen_by = ChosenBy::Representative;
        let options = ClusterOptions { mean_size, chosen_by, sharing, whole_window: false, single: false };
        FixedClusterSpec { later, options }.layer(0, shape).unwrap()
    }

    /// Pushes groups from the layer's own end on. Elements of keys repeat every 97 tokens and depend on the seed.
    fn push(layer: &mut dyn LayerSummary, shape: KeyShape, end: usize, seed: u64) {
        let len = shape.group_tokens * shape.width();
        for index in layer.groups()..end {
            let mut random = SeededRandom::new(seed ^ (index as u64 % 97));
            let plane: Vec<u8> = (0..len).flat_map(|_| (random.unit() as f32 * 4.0).to_le_bytes()).collect();
            layer.push(&KeyGroup::new(shape, &plane, index as u64).unwrap());
        }
        layer.advance().unwrap();
    }

    /// Returns centroid and members of each cluster of each list.
    fn clusters(layer: &dyn LayerSummary) -> Vec<Vec<(Vec<f32>, Vec<u32>)>> {
        let layer = (layer as &dyn Any).downcast_ref::<FixedLayer>().unwrap();
        let of = |list: &FixedClusters| {
            let centroid = |at: usize| {
                let mut row = vec![0.0; list.centroids().dim()];
                list.centroids().read(at, &mut row);
                row
            };
            (0..list.count()).map(|at| (centroid(at), list.members(at).to_vec())).collect()
        };
        layer.lists().iter().map(of).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn each_covered_token_is_in_one_cluster_and_earlier_clusters_stay(
            (kv_heads, key_dim, group_tokens) in (1_usize..3, 1_usize..4, 1_usize..20),
            (first, more, cut) in (0_usize..600, 0_usize..900, 0_usize..1500),
            (mean_size, joins, joint, seed) in (1_usize..40, any::<bool>(), any::<bool>(), any::<u64>()),
        ) {
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype: DType::F32 };
            let later = if joins { LaterTokens::Join } else { LaterTokens::NewClusters };
            let sharing = if joint { HeadSharing::Joint } else { HeadSharing::PerHead };
            let mut layer = layer(later, sharing, shape, mean_size);
            layer.attached();
            push(layer.as_mut(), shape, first / group_tokens, seed);
            let before = clusters(layer.as_ref());
            let groups = (first + more) / group_tokens;
            let mut all = WaitingKeys::new(shape);
            let plane = vec![0; SealedKeys::group_bytes(&shape)];
            (0..groups).for_each(|at| all.push(&KeyGroup::new(shape, &plane, at as u64).unwrap()));
            push(layer.as_mut(), shape, groups, seed);
            let after = clusters(layer.as_ref());
            let cut = (cut / group_tokens).min(groups);
            layer.truncate(cut);
            let left = clusters(layer.as_ref());
            push(layer.as_mut(), shape, groups, seed ^ 1);
            for (found, end) in [(&after, groups), (&clusters(layer.as_ref()), groups)] {
                for list in found {
                    let mut members: Vec<u32> = list.iter().flat_map(|(_, members)| members).copied().collect();
                    members.sort_unstable();
                    // Every token is in one cluster, up to the newest ones and those that wait for a batch.
                    let waiting = end * group_tokens - members.len();
                    prop_assert!(members.iter().copied().eq(0..members.len() as u32));
                    let batch = NEW_ENTRIES.next_multiple_of(group_tokens);
                    let recent = groups * group_tokens - all.ready().end;
                    prop_assert!(if joins { waiting == recent } else { waiting < batch + recent }, "{waiting}");
                }
            }
            for (own, grown) in before.iter().zip(&after) {
                for (at, (centroid, members)) in own.iter().enumerate() {
                    prop_assert_eq!(centroid, &grown[at].0);
                    prop_assert!(grown[at].1.starts_with(members) && (joins || grown[at].1.len() == members.len()));
                }
            }
            for (list, cut_list) in after.iter().zip(&left) {
                let keep = |(centroid, members): &(Vec<f32>, Vec<u32>)| {
                    let kept = |token: &&u32| (**token as usize) < cut * group_tokens;
                    (centroid.clone(), members.iter().filter(kept).copied().collect::<Vec<u32>>())
                };
                let kept: Vec<_> = list.iter().map(keep).filter(|(_, members)| !members.is_empty()).collect();
                prop_assert_eq!(&kept, cut_list);
            }
        }
    }
}
