//! The clusters of equal size of one layer.
//!
//! How the summary takes in groups:
//! 1. A pushed group waits with its keys, or with what the codebook makes of them ([`LayerSummary::push`]).
//! 2. [`LayerSummary::advance`] bisects the first keys as soon as there are enough.
//! 3. It then makes [`NEW_ENTRIES`] tokens at a time clusters of their own, and drops their keys.
//!
//! Invariants:
//! - A list is the clusters of one KV head, or of all heads together.
//! - Each token is in one cluster of each list, or waits. The newest tokens wait, and are chosen in runs.
//! - The clusters depend on the tokens, the cuts and the moment of attaching, not on how the tokens were cut into
//!   appends, nor on selections.

use super::list::BalancedList;
use crate::error::Result;
use crate::retrieval::cluster_choice::{ChosenBy, ClusterList, ClusterOptions, KeySpace, RecentTokens, WaitingKeys};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter};
use crate::retrieval::clusters::{ClusterLists, bisect, bisect_bytes_for};
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
use crate::retrieval::transform_coded::summary::CodeSpec;
use std::sync::Arc;

/// The new tokens that are clustered together, before they are rounded up to whole groups.
const NEW_ENTRIES: usize = 320;
/// The seed of all random choices.
const SEED: u64 = 0x6261_6c61_6e63_6564;

/// The specification of clusters of equal size.
#[derive(Clone, Debug)]
pub(super) struct BalancedSpec {
    pub(super) options: ClusterOptions,
    /// The codes that members are scored by.
    pub(super) codes: Option<Arc<CodeSpec>>,
}

impl SummarySpec for BalancedSpec {
    fn id(&self) -> String {
        let ClusterOptions { mean_size, sharing, .. } = self.options;
        let codes = self.codes.as_ref().map_or_else(String::new, |codes| codes.id());
        format!("balanced/{mean_size}/{sharing:?}/{codes}")
    }

    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let book = self.codes.as_ref().map(|codes| codes.book(layer, &shape).map(Arc::clone)).transpose()?;
        Ok(Box::new(BalancedLayer::new(shape, KeySpace::new(shape, self.options, book))))
    }
}

/// The clusters of a layer.
pub(super) struct BalancedLayer {
    pub(super) shape: KeyShape,
    pub(super) space: KeySpace,
    /// Without any until the first clusters are built.
    pub(super) lists: Vec<BalancedList>,
    /// The first token that is in no cluster. Outside of [`LayerSummary::advance`], it is the first waiting token.
    pub(super) next: usize,
    /// The vectors of groups that are not covered.
    pub(super) waiting: WaitingKeys,
}

impl BalancedLayer {
    fn new(shape: KeyShape, space: KeySpace) -> Self {
        Self { shape, lists: Vec::new(), next: 0, waiting: WaitingKeys::new(space.vector_shape()), space }
    }

    /// Returns the lists, one per KV head or one for all.
    pub(super) fn lists(&self) -> &[BalancedList] {
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

    /// Returns the tokens that are in no cluster of a list. Without keys, they are chosen in runs within groups.
    pub(super) fn recent(&self, head: Option<usize>, with_keys: bool) -> RecentTokens<'_> {
        let run = if with_keys { 1 } else { self.size().min(self.shape.group_tokens) };
        self.waiting.recent(self.next, head, with_keys).in_runs(run)
    }

    /// Returns the entries of a cluster.
    pub(super) fn size(&self) -> usize {
        self.space.options().mean_size
    }

    /// Returns whether lists have centroids.
    pub(super) fn has_centroids(&self) -> bool {
        self.space.options().chosen_by == ChosenBy::Representative
    }

    /// Returns a list without clusters.
    fn empty_list(&self) -> BalancedList {
        BalancedList::new(self.space.dim(), self.has_centroids())
    }

    /// Returns the tokens of a batch of new clusters.
    fn batch(&self) -> usize {
        NEW_ENTRIES.max(self.size().min(u32::MAX as usize)).next_multiple_of(self.shape.group_tokens)
    }

    /// Makes the next tokens new clusters. Their vectors are waiting.
    fn cluster(&mut self, tokens: usize) -> Result<()> {
        let (dim, size) = (self.space.dim(), self.size());
        let mut rows = Vec::new();
        let mut found = Vec::new();
        for head in self.space.heads() {
            rows.clear();
            rows.reserve_exact(tokens * dim);
            self.waiting.keys().rows(self.next..self.next + tokens, head, &mut rows);
            let clusters = bisect(&rows, dim, size, SEED)?;
            found.push((clusters, if self.has_centroids() { rows.clone() } else { Vec::new() }));
        }
        if self.lists.is_empty() {
            self.lists = found.iter().map(|_| self.empty_list()).collect();
        }
        for (list, (clusters, keys)) in self.lists.iter_mut().zip(&found) {
            list.add(self.next, clusters, keys);
        }
        self.next += tokens;
        Ok(())
    }

    /// Returns the most bytes that [`Self::cluster`] takes beside the lists.
    fn cluster_bytes(&self, tokens: usize) -> usize {
        if tokens == 0 {
            return 0;
        }
        let rows = tokens.saturating_mul(self.space.dim()).saturating_mul(size_of::<f32>());
        let kept = ClusterLists::bytes_for(tokens, tokens) + if self.has_centroids() { rows } else { 0 };
        let own = bisect_bytes_for(tokens, self.space.dim(), self.size()).saturating_add(rows);
        self.space.heads().len().saturating_mul(kept).saturating_add(own)
    }
}

impl LayerSummary for BalancedLayer {
    fn groups(&self) -> usize {
        self.waiting.groups().end
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.waiting.push_vectors(group, &self.space);
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
        self.waiting.bytes() + self.lists.iter().map(BalancedList::bytes).sum::<usize>()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        let waiting = self.waiting.tokens_after(groups);
        // The tokens that are clustered at once, and those that clusters take in. A batch may leave a smaller cluster.
        let (clustered, taken) = match self.lists.is_empty() {
            true => (waiting, waiting),
            false if waiting >= self.batch() => (self.batch(), waiting),
            false => (0, 0),
        };
        let opened = if taken == 0 { 0 } else { taken.div_ceil(self.size()) + taken / self.batch() + 1 };
        let lists: usize = match self.lists.is_empty() {
            true => self.space.heads().len() * self.empty_list().bytes_for(opened, taken),
            false => self.lists.iter().map(|list| list.bytes_for(opened, taken)).sum(),
        };
        self.waiting.bytes_for(groups) + self.space.scratch_bytes() + self.cluster_bytes(clustered) + lists
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        let of = |list: &BalancedList| ClusterLists::of_clusters((0..list.count()).map(|at| list.members(at)));
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
        if !self.lists.is_empty() {
            let ready = self.waiting.ready().end;
            while ready.saturating_sub(self.next) >= self.batch() {
                self.cluster(self.batch())?;
            }
            self.waiting.forget_before(self.next);
        }
        Ok(Vec::new())
    }

    fn state_encoding(&self) -> Option<u32> {
        Some(Self::STATE_ENCODING)
    }

    fn state_bytes(&self) -> usize {
        self.bytes_of_state()
    }

    fn put_state(&self, out: &mut StateWriter) -> bool {
        self.write_state(out)
    }

    fn take_state(&mut self, state: &mut StateReader<'_>, groups: usize) -> std::result::Result<(), StateError> {
        self.read_state(state, groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::cluster_choice::HeadSharing;
    use crate::retrieval::clusters::SeededRandom;
    use proptest::prelude::*;
    use stratakv_format::DType;

    fn layer(sharing: HeadSharing, shape: KeyShape, mean_size: usize) -> BalancedLayer {
        let chosen_by = ChosenBy::Representative;
        let options = ClusterOptions { mean_size, chosen_by, sharing, whole_window: false, single: false };
        BalancedLayer::new(shape, KeySpace::new(shape, options, None))
    }

    /// Pushes groups from the layer's own end on, within the bytes that it said before.
    fn push(layer: &mut BalancedLayer, end: usize, seed: u64) {
        let shape = layer.shape;
        let most = layer.bytes_for(end.saturating_sub(layer.groups()));
        for index in layer.groups()..end {
            let mut random = SeededRandom::new(seed ^ (index as u64 % 97));
            let elements = shape.group_tokens * shape.width();
            let plane: Vec<u8> = (0..elements).flat_map(|_| (random.unit() as f32 * 4.0).to_le_bytes()).collect();
            layer.push(&KeyGroup::new(shape, &plane, index as u64).unwrap());
        }
        assert_eq!(layer.advance().unwrap(), []);
        assert!(layer.bytes() <= most, "{} {most}", layer.bytes());
    }

    fn clusters(layer: &BalancedLayer) -> Vec<Vec<Vec<u32>>> {
        layer.cluster_lists().iter().map(|list| list.iter().map(<[u32]>::to_vec).collect()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn each_covered_token_is_in_one_cluster_and_a_state_goes_on_alike(
            (kv_heads, key_dim, group_tokens) in (1_usize..3, 1_usize..4, 1_usize..20),
            (first, more, cut) in (0_usize..600, 0_usize..900, 0_usize..1500),
            (size, joint, seed) in (1_usize..40, any::<bool>(), any::<u64>()),
        ) {
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype: DType::F32 };
            let sharing = if joint { HeadSharing::Joint } else { HeadSharing::PerHead };
            let mut own = layer(sharing, shape, size);
            own.attached();
            push(&mut own, first / group_tokens, seed);
            let before = clusters(&own);
            let groups = (first + more) / group_tokens;
            push(&mut own, groups, seed);
            let after = clusters(&own);
            for (list, grown) in before.iter().zip(&after) {
                prop_assert!(grown.starts_with(list));
            }
            let cut = (cut / group_tokens).min(groups);
            own.truncate(cut);
            let kept = |list: &Vec<Vec<u32>>| -> Vec<Vec<u32>> {
                let kept = |token: &u32| (*token as usize) < cut * group_tokens;
                let own = |members: &Vec<u32>| members.iter().copied().filter(kept).collect::<Vec<u32>>();
                list.iter().map(own).filter(|members| !members.is_empty()).collect()
            };
            let expected: Vec<_> = if cut == 0 { Vec::new() } else { after.iter().map(kept).collect() };
            prop_assert_eq!(clusters(&own), expected);
            push(&mut own, groups, seed ^ 1);
            for list in clusters(&own) {
                let mut members: Vec<u32> = list.iter().flatten().copied().collect();
                members.sort_unstable();
                prop_assert!(members.iter().copied().eq(0..own.next as u32));
                prop_assert!(list.iter().all(|cluster| cluster.len() <= size));
            }
            prop_assert!(own.lists.is_empty() || groups * group_tokens - own.next < own.batch() + 64 + group_tokens);

            let mut out = StateWriter::new();
            prop_assert_eq!(own.put_state(&mut out), !own.lists.is_empty());
            let bytes = out.into_bytes();
            if !bytes.is_empty() {
                prop_assert!(bytes.len() <= own.state_bytes());
                let mut taken = layer(sharing, shape, size);
                let mut reader = StateReader::new(&bytes);
                taken.take_state(&mut reader, groups).unwrap();
                prop_assert_eq!(clusters(&taken), clusters(&own));
                prop_assert!(taken.take_state(&mut StateReader::new(&bytes[..bytes.len() - 1]), groups).is_err());
                // It goes on from the groups behind its clusters.
                for _ in taken.groups()..groups {
                    let plane = vec![0; shape.group_tokens * shape.width() * 4];
                    taken.push(&KeyGroup::new(shape, &plane, taken.groups() as u64).unwrap());
                }
                prop_assert_eq!(taken.waiting.groups(), own.waiting.groups());
                prop_assert_eq!((taken.next, taken.covered()), (own.next, own.covered()));
            }
        }
    }
}
