//! The adaptive clusters of one layer.
//!
//! How the summary takes in groups:
//! 1. A pushed group waits with its keys ([`LayerSummary::push`]).
//! 2. [`LayerSummary::advance`] builds the first clusters as soon as there are enough keys, by k-means.
//! 3. It then adds the waiting tokens one by one to the clusters of each list. A split of a cluster needs the keys of
//!    its members. It asks for the keys of earlier groups.
//! 4. When every list has these tokens, their keys are dropped.
//! 5. The newest tokens keep waiting ([`RecentTokens`]). Each is chosen by itself.
//!
//! Invariants:
//! - A list is the clusters of one KV head, or of all heads together.
//! - Each token is in one cluster of each list, in one buffer, or waits.
//! - The clusters depend on the tokens, on the moment of attaching and on the selections, not on how the tokens were
//!   cut into appends. A sealed group is one step of the paper: the clusters of the newest selection before it are the
//!   retrieved ones.

use crate::error::Result;
use crate::metrics::lock;
use crate::retrieval::cluster_choice::{
    ClusterOptions, ClusteredKeys, RecentChanges, RecentTokens, WaitingKeys, cluster_keys, cluster_keys_bytes,
};
use crate::retrieval::clusters::{AdaptOptions, Adaptation, AdaptiveClusters, CentroidPrecision, ClusterLists};
use crate::retrieval::sealed_keys::SealedKeys;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
use std::sync::Mutex;

/// The quantile of the variances of a list's first clusters that is its threshold.
const THRESHOLD_QUANTILE: f64 = 0.9;
/// The keys that are compared with all clusters at once.
const EXPECTED_KEYS: usize = 16;
/// The seed of all random choices.
const SEED: u64 = 0x6479_6e61_6b76;

/// The specification of adaptive clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdaptiveSpec {
    pub(super) options: ClusterOptions,
}

impl SummarySpec for AdaptiveSpec {
    fn id(&self) -> String {
        let ClusterOptions { mean_size, chosen_by, sharing, .. } = self.options;
        // Selections decide what is split, so methods that choose differently have clusters of their own.
        format!("dynakv/{mean_size}/{chosen_by:?}/{sharing:?}")
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(AdaptiveLayer::new(shape, self.options)))
    }
}

/// One list of clusters.
pub(super) struct AdaptiveList {
    pub(super) clusters: AdaptiveClusters,
    /// The next token to add.
    next: usize,
    /// The group whose step has begun, plus one.
    begun: usize,
    /// The token behind those whose keys were compared with all clusters at once.
    expected: usize,
    /// The clusters that took in tokens or were split.
    pub(super) changes: RecentChanges,
}

/// The clusters of a layer.
pub(super) struct AdaptiveLayer {
    shape: KeyShape,
    options: ClusterOptions,
    /// Without any until the first clusters are built.
    lists: Vec<AdaptiveList>,
    /// The keys of groups that are not covered.
    waiting: WaitingKeys,
    /// The keys of earlier groups that were supplied for splits, at most one per entry of the largest split.
    supplied: Vec<SealedKeys>,
    /// The clusters of each list that the newest selection chose.
    retrieved: Mutex<Vec<Vec<u32>>>,
    /// The retrieved clusters of the step that [`LayerSummary::advance`] is in.
    step: Option<Vec<Vec<u32>>>,
}

impl AdaptiveLayer {
    fn new(shape: KeyShape, options: ClusterOptions) -> Self {
        Self {
            shape,
            options,
            lists: Vec::new(),
            waiting: WaitingKeys::new(shape),
            supplied: Vec::new(),
            retrieved: Mutex::default(),
            step: None,
        }
    }

    /// Returns the lists, one per KV head or one for all.
    pub(super) fn lists(&self) -> &[AdaptiveList] {
        &self.lists
    }

    /// Returns the number of groups whose tokens are in clusters.
    fn clustered(&self) -> usize {
        self.waiting.groups().start
    }

    /// Returns the number of groups that can be chosen from: all, once there are clusters.
    pub(super) fn covered(&self) -> usize {
        if self.lists.is_empty() { 0 } else { self.waiting.groups().end }
    }

    /// Returns the number of tokens that are in no cluster of a list.
    pub(super) fn waiting_tokens(&self) -> usize {
        self.waiting.tokens_after(0)
    }

    /// Returns the tokens that are in no cluster of a list.
    pub(super) fn recent(&self, head: Option<usize>, with_keys: bool) -> RecentTokens {
        self.waiting.recent(0, head, with_keys)
    }

    /// Takes note of the clusters of each list that a selection chose.
    pub(super) fn retrieve(&self, mut clusters: Vec<Vec<u32>>) {
        clusters.iter_mut().for_each(Vec::shrink_to_fit);
        *lock(&self.retrieved) = clusters;
    }

    /// Returns the elements of a key of a list.
    fn dim(&self) -> usize {
        self.options.dim(&self.shape)
    }

    /// Builds the first clusters, if there are enough keys.
    fn build(&mut self) -> Result<()> {
        let Some(entries) = self.waiting.first_entries() else { return Ok(()) };
        let (dim, max_size) = (self.dim(), self.options.max_size());
        let clustered = cluster_keys(self.waiting.keys(), 0..entries, (&self.shape, &self.options), SEED)?;
        let mut lists = Vec::with_capacity(clustered.len());
        for ClusteredKeys { rows, lists: initial } in clustered {
            let precision = CentroidPrecision::Half;
            let options = AdaptOptions { max_size, seed: SEED, precision, ..AdaptOptions::default() };
            let mut clusters = AdaptiveClusters::new(&rows, dim, &initial, options)?;
            clusters.set_threshold(clusters.quantile_of_variances(THRESHOLD_QUANTILE)?)?;
            lists.push(AdaptiveList { clusters, next: entries, begun: 0, expected: 0, changes: RecentChanges::new() });
        }
        self.lists = lists;
        Ok(())
    }

    /// Adds the waiting tokens to a list. Returns the groups whose keys a split needs.
    fn advance_list(&mut self, at: usize, head: Option<usize>) -> Result<Vec<u64>> {
        let end = self.waiting.ready().end;
        loop {
            if let Some(split) = self.lists[at].clusters.next_split() {
                let entries = self.lists[at].clusters.entries_to_split(split.cluster)?;
                let mut wanted = self.unknown_groups(&entries);
                if self.supplied.len() + wanted.len() > self.largest_split() {
                    self.supplied.clear();
                    wanted = self.unknown_groups(&entries);
                }
                if !wanted.is_empty() {
                    return Ok(wanted);
                }
                let mut keys = Vec::with_capacity(entries.len() * self.dim());
                entries.iter().for_each(|entry| self.key(*entry as usize, head, &mut keys));
                let list = &mut self.lists[at];
                list.clusters.split(split.cluster, &keys)?.into_iter().for_each(|part| list.changes.add(part));
                continue;
            }
            let next = self.lists[at].next;
            if next >= end {
                self.lists[at].clusters.forget_expected();
                self.lists[at].expected = 0;
                return Ok(Vec::new());
            }
            let group = next / self.shape.group_tokens;
            if self.lists[at].begun != group + 1 {
                self.lists[at].begun = group + 1;
                let first = group == self.waiting.groups().start;
                let step = self.step.as_ref().filter(|_| first).and_then(|step| step.get(at));
                let clusters = &mut self.lists[at].clusters;
                let known = |cluster: &&u32| (**cluster as usize) < clusters.len();
                let retrieved: Vec<u32> = step.into_iter().flatten().filter(known).copied().collect();
                clusters.begin_step(&retrieved)?;
                continue;
            }
            let mut key = Vec::with_capacity(self.dim());
            self.waiting.keys().rows(next..next + 1, head, &mut key);
            if next >= self.lists[at].expected {
                let expected = (next + EXPECTED_KEYS).min(end);
                let mut keys = Vec::with_capacity((expected - next) * self.dim());
                self.waiting.keys().rows(next..expected, head, &mut keys);
                self.lists[at].clusters.expect(&keys)?;
                self.lists[at].expected = expected;
            }
            let list = &mut self.lists[at];
            match list.clusters.append(next as u32, &key)? {
                Adaptation::Joined(cluster) | Adaptation::Buffered(cluster) => list.changes.add(cluster),
                // The split counts as the change.
                Adaptation::SplitDue(_) => {}
            }
            list.next += 1;
        }
    }

    /// Returns the groups of entries whose keys are neither waiting nor supplied.
    fn unknown_groups(&self, entries: &[u32]) -> Vec<u64> {
        let mut groups: Vec<usize> = entries.iter().map(|entry| *entry as usize / self.shape.group_tokens).collect();
        groups.sort_unstable();
        groups.dedup();
        let is_known = |group: &usize| {
            self.waiting.groups().contains(group) || self.supplied.iter().any(|keys| keys.groups().contains(group))
        };
        groups.into_iter().filter(|group| !is_known(group)).map(|group| group as u64).collect()
    }

    /// Appends the key of a token that is known.
    fn key(&self, token: usize, head: Option<usize>, out: &mut Vec<f32>) {
        let mut known = std::iter::once(self.waiting.keys()).chain(&self.supplied);
        if let Some(keys) = known.find(|keys| keys.tokens().contains(&token)) {
            keys.rows(token..token + 1, head, out);
        }
    }

    /// Returns the most entries that a split divides: the members of a cluster and its buffer.
    fn largest_split(&self) -> usize {
        self.options.max_size().saturating_add(AdaptOptions::default().buffer_limit)
    }

    /// Returns the most bytes of the first clusters of `entries` tokens. In the worst case each token is a cluster.
    fn first_bytes(&self, entries: usize) -> usize {
        let clusters = AdaptiveClusters::bytes_for(entries, self.dim(), entries, CentroidPrecision::Half);
        self.options.heads(&self.shape).len() * (clusters + size_of::<AdaptiveList>())
    }

    /// Returns the most bytes of the lists once `opened` clusters were opened and `new` tokens were added. The clusters
    /// that a selection chose are kept twice meanwhile.
    fn list_bytes(&self, opened: usize, new: usize) -> usize {
        let of_list = |list: &AdaptiveList| {
            let clusters = list.clusters.len() + opened;
            let retrieved = 2 * clusters * size_of::<u32>();
            list.clusters.bytes_once(clusters, new) + retrieved + size_of::<AdaptiveList>()
        };
        self.lists.iter().map(of_list).sum()
    }
}

impl LayerSummary for AdaptiveLayer {
    fn groups(&self) -> usize {
        self.waiting.groups().end
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.waiting.push(group);
    }

    fn truncate(&mut self, groups: usize) {
        let tokens = groups * self.shape.group_tokens;
        // If keys could not be read for a split, clusters hold tokens that still wait.
        let added = self.lists.iter().map(|list| list.next).max().unwrap_or(0);
        self.waiting.truncate(groups);
        self.supplied.clear();
        if tokens >= added {
            return;
        }
        self.step = None;
        if tokens == 0 {
            self.lists.clear();
            self.step = None;
            *lock(&self.retrieved) = Vec::new();
        }
        for list in &mut self.lists {
            list.clusters.truncate(tokens as u32);
            list.clusters.forget_expected();
            list.next = list.next.min(tokens);
            (list.begun, list.expected) = (0, 0);
        }
    }

    fn bytes(&self) -> usize {
        let supplied: usize = self.supplied.iter().map(SealedKeys::bytes).sum();
        let lists = |lists: &[Vec<u32>]| lists.iter().map(Vec::capacity).sum::<usize>() * size_of::<u32>();
        let retrieved = lists(lock(&self.retrieved).as_slice()) + self.step.as_deref().map_or(0, lists);
        let clusters = self.lists.iter().map(|list| list.clusters.bytes() + size_of::<AdaptiveList>());
        self.waiting.bytes() + supplied + retrieved + clusters.sum::<usize>()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        let waiting = self.waiting.tokens_after(groups);
        let entries = self.clustered() * self.shape.group_tokens + waiting;
        // The tokens that clusters may take in.
        let held = self.waiting.tokens().end - self.waiting.ready().end;
        let new = if self.lists.is_empty() { waiting } else { waiting - held.min(waiting) };
        let supplied: usize = self.supplied.iter().map(SealedKeys::bytes).sum();
        let held = self.waiting.bytes_for(groups) + supplied;
        if new == 0 {
            return held + self.list_bytes(0, 0);
        }
        if self.lists.is_empty() {
            return held + cluster_keys_bytes(entries, &self.shape, &self.options) + self.first_bytes(entries);
        }
        // Each new or buffered token may have one cluster split, into at most one cluster per member.
        let splits = new.saturating_add(AdaptOptions::default().buffer_limit);
        let opened = splits.saturating_mul(self.largest_split()).min(entries);
        // A split reads the keys of its entries, at most one group each.
        let split = self.largest_split().min(entries) * SealedKeys::group_bytes(&self.shape);
        let clusters = self.lists.iter().map(|list| list.clusters.len()).max().unwrap_or(0) + opened;
        let expected = AdaptiveClusters::expected_bytes(clusters, self.dim());
        held + split + expected + self.list_bytes(opened, new)
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn attached(&mut self) {
        self.waiting.attached();
    }

    fn advance(&mut self) -> Result<Vec<u64>> {
        if self.lists.is_empty() {
            self.build()?;
            self.waiting.built();
        }
        let ready = self.waiting.ready();
        if self.lists.is_empty() || ready.is_empty() {
            return Ok(Vec::new());
        }
        if self.step.is_none() {
            self.step = Some(std::mem::take(&mut *lock(&self.retrieved)));
        }
        for (at, head) in self.options.heads(&self.shape).into_iter().enumerate() {
            let wanted = self.advance_list(at, head)?;
            if !wanted.is_empty() {
                return Ok(wanted);
            }
        }
        self.waiting.forget_before(ready.end);
        self.supplied = Vec::new();
        self.step = None;
        Ok(Vec::new())
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        let of = |list: &AdaptiveList| {
            let members = |cluster| list.clusters.members(cluster as u32).unwrap_or_default();
            ClusterLists::of_clusters((0..list.clusters.len()).map(members))
        };
        self.lists.iter().map(of).collect()
    }

    fn supply(&mut self, group: &KeyGroup<'_>) {
        let mut keys = SealedKeys::new(self.shape, group.index() as usize);
        keys.push(group);
        self.supplied.push(keys);
    }
}
