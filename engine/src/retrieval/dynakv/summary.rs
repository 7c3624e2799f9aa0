//! The adaptive clusters of one layer.
//!
//! How the summary takes in groups:
//! 1. A pushed group waits with its keys, or with what the codebook makes of them ([`LayerSummary::push`]).
//! 2. [`LayerSummary::advance`] builds the first clusters as soon as there are enough keys, by k-means.
//! 3. It then adds the waiting tokens one by one to the clusters of each list. A split of a cluster needs the keys of
//!    its members. Each list goes on until a split needs keys of earlier groups, which are asked for together.
//! 4. When every list has these tokens, their keys are dropped.
//! 5. The newest tokens keep waiting ([`RecentTokens`]). Each is chosen by itself.
//! 6. Between appends, the cluster with the fullest buffer of all lists may be split
//!    ([`LayerSummary::request_split`]).
//!
//! Invariants:
//! - A list is the clusters of one KV head, or of all heads together.
//! - Each token is in one cluster of each list, in one buffer, or waits.
//! - The clusters depend on the tokens, on the moment of attaching, on the selections and on requested splits. They do
//!   not depend on how the tokens were cut into appends. A sealed group is one step of the paper: the clusters of the
//!   newest selection before it are the retrieved ones.

use super::pending_split::PendingSplit;
use crate::error::Result;
use crate::metrics::lock;
use crate::retrieval::cluster_choice::{
    ClusterOptions, ClusteredKeys, KeySpace, RecentChanges, RecentTokens, WaitingKeys, cluster_keys, cluster_keys_bytes,
};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter};
use crate::retrieval::clusters::{AdaptOptions, Adaptation, AdaptiveClusters, CentroidPrecision, ClusterLists};
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
use crate::retrieval::transform_coded::summary::CodeSpec;
use std::sync::{Arc, Mutex};

/// The quantile of the variances of a list's first clusters that is its threshold.
const THRESHOLD_QUANTILE: f64 = 0.9;
/// The keys that are compared with all clusters at once.
const EXPECTED_KEYS: usize = 16;
/// The seed of all random choices.
const SEED: u64 = 0x6479_6e61_6b76;

/// The specification of adaptive clusters.
#[derive(Clone, Debug)]
pub(super) struct AdaptiveSpec {
    pub(super) options: ClusterOptions,
    /// The codes that members are scored by.
    pub(super) codes: Option<Arc<CodeSpec>>,
}

impl SummarySpec for AdaptiveSpec {
    fn id(&self) -> String {
        let ClusterOptions { mean_size, chosen_by, sharing, .. } = self.options;
        // Selections decide what is split, so methods that choose differently have clusters of their own.
        let codes = self.codes.as_ref().map_or_else(String::new, |codes| codes.id());
        format!("dynakv/{mean_size}/{chosen_by:?}/{sharing:?}/{codes}")
    }

    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let book = self.codes.as_ref().map(|codes| codes.book(layer, &shape).map(Arc::clone)).transpose()?;
        Ok(Box::new(AdaptiveLayer::new(shape, KeySpace::new(shape, self.options, book))))
    }
}

/// One list of clusters.
pub(super) struct AdaptiveList {
    pub(super) clusters: AdaptiveClusters,
    /// The next token to add. All tokens before it are in the clusters and buffers.
    pub(super) next: usize,
    /// The group whose step has begun, plus one.
    begun: usize,
    /// The vectors of the next tokens, which were compared with all clusters at once, and the token behind them.
    ahead: (Vec<f32>, usize),
    /// The split that waits for keys of earlier groups.
    pub(super) pending: Option<PendingSplit>,
    /// The clusters that took in tokens or were split.
    pub(super) changes: RecentChanges,
}

impl AdaptiveList {
    /// Returns the list of these clusters. `next` is the first token that is not in them.
    pub(super) fn new(clusters: AdaptiveClusters, next: usize) -> Self {
        Self { clusters, next, begun: 0, ahead: (Vec::new(), 0), pending: None, changes: RecentChanges::new() }
    }

    /// Forgets the keys of the next tokens and of a split that waits.
    fn forget_keys(&mut self) {
        self.clusters.forget_expected();
        (self.ahead, self.pending) = ((Vec::new(), 0), None);
    }
}

/// The clusters of a layer.
pub(super) struct AdaptiveLayer {
    pub(super) shape: KeyShape,
    pub(super) space: KeySpace,
    /// Without any until the first clusters are built.
    pub(super) lists: Vec<AdaptiveList>,
    /// The vectors of groups that are not covered.
    pub(super) waiting: WaitingKeys,
    /// The clusters of each list that the newest selection chose.
    pub(super) retrieved: Mutex<Vec<Vec<u32>>>,
    /// The retrieved clusters of the step that [`LayerSummary::advance`] is in.
    pub(super) step: Option<Vec<Vec<u32>>>,
}

impl AdaptiveLayer {
    fn new(shape: KeyShape, space: KeySpace) -> Self {
        Self {
            shape,
            lists: Vec::new(),
            waiting: WaitingKeys::new(space.vector_shape()),
            space,
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
    pub(super) fn recent(&self, head: Option<usize>, with_keys: bool) -> RecentTokens<'_> {
        self.waiting.recent(0, head, with_keys)
    }

    /// Takes note of the clusters of each list that a selection chose.
    pub(super) fn retrieve(&self, mut clusters: Vec<Vec<u32>>) {
        clusters.iter_mut().for_each(Vec::shrink_to_fit);
        *lock(&self.retrieved) = clusters;
    }

    /// Returns the limits of clusters, without a threshold.
    pub(super) fn options(&self) -> AdaptOptions {
        let (max_size, precision) = (self.space.options().max_size(), CentroidPrecision::Byte);
        AdaptOptions { max_size, seed: SEED, precision, ..AdaptOptions::default() }
    }

    /// Builds the first clusters, if there are enough keys.
    fn build(&mut self) -> Result<()> {
        let Some(entries) = self.waiting.first_entries() else { return Ok(()) };
        let dim = self.space.dim();
        let clustered = cluster_keys(self.waiting.keys(), 0..entries, &self.space, SEED)?;
        let mut lists = Vec::with_capacity(clustered.len());
        for ClusteredKeys { rows, lists: initial } in clustered {
            let mut clusters = AdaptiveClusters::new(&rows, dim, &initial, self.options())?;
            clusters.set_threshold(clusters.quantile_of_variances(THRESHOLD_QUANTILE)?)?;
            lists.push(AdaptiveList::new(clusters, entries));
        }
        self.lists = lists;
        Ok(())
    }

    /// Adds the waiting tokens to a list, until a split needs keys that are not known. Returns whether one does.
    fn advance_list(&mut self, at: usize, head: Option<usize>) -> Result<bool> {
        let (end, dim) = (self.waiting.ready().end, self.space.dim());
        loop {
            let list = &mut self.lists[at];
            if let Some(split) = list.clusters.next_split() {
                let pending = match list.pending.take() {
                    Some(pending) => pending,
                    None => PendingSplit::new(split.cluster, (&list.clusters, head), (&self.waiting, &self.space))?,
                };
                let Some(keys) = pending.keys() else {
                    list.pending = Some(pending);
                    return Ok(true);
                };
                let parts = list.clusters.split(split.cluster, keys)?;
                parts.into_iter().for_each(|part| list.changes.add(part));
                continue;
            }
            let next = self.lists[at].next;
            if next >= end {
                self.lists[at].forget_keys();
                return Ok(false);
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
            let list = &mut self.lists[at];
            if next >= list.ahead.1 {
                let (ahead, last) = &mut list.ahead;
                *last = (next + EXPECTED_KEYS).min(end);
                ahead.clear();
                ahead.reserve_exact(EXPECTED_KEYS * dim);
                self.waiting.keys().rows(next..*last, head, ahead);
                list.clusters.expect(ahead)?;
            }
            let (ahead, last) = &list.ahead;
            let key = &ahead[ahead.len() - (last - next) * dim..][..dim];
            match list.clusters.append(next as u32, key)? {
                Adaptation::Joined(cluster) | Adaptation::Buffered(cluster) => list.changes.add(cluster),
                // The split counts as the change.
                Adaptation::SplitDue(_) => {}
            }
            list.next += 1;
        }
    }

    /// Returns whether a split of any list is due.
    fn is_split_due(&self) -> bool {
        self.lists.iter().any(|list| list.clusters.is_split_due())
    }

    /// Returns the bytes of the splits that wait.
    fn pending_bytes(&self) -> usize {
        self.lists.iter().filter_map(|list| list.pending.as_ref()).map(PendingSplit::bytes).sum()
    }

    /// Returns the most entries that a split divides: the members of a cluster and its buffer.
    fn largest_split(&self) -> usize {
        self.space.options().max_size().saturating_add(AdaptOptions::default().buffer_limit)
    }

    /// Returns the most bytes of the first clusters of `entries` tokens. In the worst case each token is a cluster.
    fn first_bytes(&self, entries: usize) -> usize {
        let clusters = AdaptiveClusters::bytes_for(entries, self.space.dim(), entries, CentroidPrecision::Byte);
        self.space.heads().len() * (clusters + size_of::<AdaptiveList>())
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
        self.waiting.push_vectors(group, &self.space);
    }

    fn truncate(&mut self, groups: usize) {
        let tokens = groups * self.shape.group_tokens;
        // If keys could not be read for a split, clusters hold tokens that still wait.
        let added = self.lists.iter().map(|list| list.next).max().unwrap_or(0);
        self.waiting.truncate(groups);
        // Other tokens may take the places of those whose keys were read ahead.
        self.lists.iter_mut().for_each(AdaptiveList::forget_keys);
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
            list.next = list.next.min(tokens);
            list.begun = 0;
        }
    }

    fn bytes(&self) -> usize {
        let lists = |lists: &[Vec<u32>]| lists.iter().map(Vec::capacity).sum::<usize>() * size_of::<u32>();
        let retrieved = lists(lock(&self.retrieved).as_slice()) + self.step.as_deref().map_or(0, lists);
        let clusters = self
            .lists
            .iter()
            .map(|list| list.clusters.bytes() + list.ahead.0.capacity() * size_of::<f32>() + size_of::<AdaptiveList>());
        self.waiting.bytes() + self.pending_bytes() + retrieved + clusters.sum::<usize>()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        let waiting = self.waiting.tokens_after(groups);
        let entries = self.clustered() * self.shape.group_tokens + waiting;
        // The tokens that clusters may take in.
        let held = self.waiting.tokens().end - self.waiting.ready().end;
        let new = if self.lists.is_empty() { waiting } else { waiting - held.min(waiting) };
        let held = self.waiting.bytes_for(groups) + self.pending_bytes();
        if new == 0 && !self.is_split_due() {
            return held + self.space.scratch_bytes() + self.list_bytes(0, 0);
        }
        if self.lists.is_empty() {
            return held + cluster_keys_bytes(entries, &self.space) + self.first_bytes(entries);
        }
        // Each new or buffered token may have one cluster split, into at most one cluster per member. Without new
        // tokens it is the one that was requested.
        let splits = if new == 0 { 1 } else { new.saturating_add(AdaptOptions::default().buffer_limit) };
        let opened = splits.saturating_mul(self.largest_split()).min(entries);
        // Each list may wait for the keys of a split.
        let split = PendingSplit::bytes_for(self.largest_split().min(entries), self.space.dim());
        let ahead = EXPECTED_KEYS * self.space.dim() * size_of::<f32>();
        let expected = |list: &AdaptiveList| {
            AdaptiveClusters::expected_bytes(list.clusters.len() + opened, self.space.dim()) + ahead
        };
        let scratch: usize = self.lists.iter().map(|list| split + expected(list)).sum();
        held + self.space.scratch_bytes() + scratch + self.list_bytes(opened, new)
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
        if self.lists.is_empty() || (ready.is_empty() && !self.is_split_due()) {
            return Ok(Vec::new());
        }
        // A requested split is no step. The clusters of the newest selection wait for the next group.
        if self.step.is_none() && !ready.is_empty() {
            self.step = Some(std::mem::take(&mut *lock(&self.retrieved)));
        }
        let mut wanted = Vec::new();
        for (at, head) in self.space.heads().into_iter().enumerate() {
            if self.advance_list(at, head)?
                && let Some(pending) = &self.lists[at].pending
            {
                wanted.extend(pending.wanted(self.shape.group_tokens));
            }
        }
        if !wanted.is_empty() {
            wanted.sort_unstable();
            wanted.dedup();
            return Ok(wanted);
        }
        self.waiting.forget_before(ready.end);
        self.step = None;
        Ok(Vec::new())
    }

    fn buffer_sizes(&self) -> Vec<usize> {
        self.lists.iter().flat_map(|list| list.clusters.buffer_sizes()).collect()
    }

    fn request_split(&mut self) -> bool {
        let largest = |list: &AdaptiveList| list.clusters.buffer_sizes().max().unwrap_or(0);
        // Of equal buffers, the one of the first list counts.
        let fullest = self.lists.iter_mut().rev().max_by_key(|list| largest(list));
        fullest.is_some_and(|list| list.clusters.request_split().is_some())
    }

    fn withdraw_split(&mut self) {
        for list in &mut self.lists {
            list.clusters.withdraw_split();
            list.forget_keys();
        }
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        let of = |list: &AdaptiveList| {
            let members = |cluster| list.clusters.members(cluster as u32).unwrap_or_default();
            ClusterLists::of_clusters((0..list.clusters.len()).map(members))
        };
        self.lists.iter().map(of).collect()
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

    fn supply(&mut self, group: &KeyGroup<'_>) {
        self.lists
            .iter_mut()
            .filter_map(|list| list.pending.as_mut())
            .for_each(|pending| pending.supply(group, &self.space));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::cluster_choice::{ChosenBy, HeadSharing};
    use crate::retrieval::sealed_keys::SealedKeys;
    use stratakv_format::DType;

    const SHAPE: KeyShape = KeyShape { kv_heads: 2, key_dim: 2, group_tokens: 8, dtype: DType::F32 };

    /// Pushes a group whose keys are near `centre`, or each far from all others without one.
    fn push(layer: &mut AdaptiveLayer, centre: Option<f32>) {
        let group = layer.groups();
        let key = |at: usize| centre.unwrap_or(100.0 * (group * 16 + at) as f32) + at as f32 / 1000.0;
        let plane: Vec<u8> = (0..16).flat_map(|at| [key(at), -key(at)]).flat_map(f32::to_le_bytes).collect();
        layer.push(&KeyGroup::new(SHAPE, &plane, group as u64).unwrap());
    }

    /// Returns the most that a list has taken in: its last token, plus one.
    fn added(list: &AdaptiveList) -> u32 {
        let members = (0..list.clusters.len() as u32).flat_map(|cluster| list.clusters.members(cluster).unwrap());
        members.copied().chain(list.clusters.buffered_entries()).max().map_or(0, |last| last + 1)
    }

    #[test]
    fn a_cut_while_a_split_waits_takes_the_cut_tokens_out_of_the_clusters() {
        let sharing = HeadSharing::PerHead;
        let options = ClusterOptions {
            mean_size: 4,
            chosen_by: ChosenBy::Representative,
            sharing,
            whole_window: false,
            single: false,
        };
        let mut layer = AdaptiveLayer::new(SHAPE, KeySpace::new(SHAPE, options, None));
        (0..50).for_each(|group| push(&mut layer, Some((group % 5) as f32)));
        layer.attached();
        assert_eq!(layer.advance().unwrap(), []);
        // Far keys fill the buffers, so that a split needs keys of earlier groups. They are not supplied.
        (0..20).for_each(|_| push(&mut layer, None));
        assert!(!layer.advance().unwrap().is_empty());
        let (waiting, most) = (layer.waiting.tokens().start as u32, layer.lists.iter().map(added).max().unwrap());
        let cut = (most as usize - 1) / SHAPE.group_tokens;
        assert!(layer.lists.iter().all(|list| list.pending.is_some()));
        assert!(waiting < cut as u32 * 8 && (cut as u32 * 8) < most, "{waiting} {cut} {most}");
        layer.truncate(cut);
        for list in &layer.lists {
            assert!(added(list) <= cut as u32 * 8 && list.next <= cut * 8);
            assert!(list.pending.is_none() && (list.ahead.1, list.begun) == (0, 0));
        }
        // Other tokens take the places of those that were cut.
        (0..20).for_each(|group| push(&mut layer, Some((group % 5) as f32)));
        let mut wanted = layer.advance().unwrap();
        while let [group, ..] = wanted[..] {
            assert!(group < layer.groups() as u64);
            let plane = vec![0; SealedKeys::group_bytes(&SHAPE)];
            wanted.iter().for_each(|group| layer.supply(&KeyGroup::new(SHAPE, &plane, *group).unwrap()));
            wanted = layer.advance().unwrap();
        }
        for list in &layer.lists {
            let clusters = 0..list.clusters.len() as u32;
            let members = clusters.flat_map(|cluster| list.clusters.members(cluster).unwrap()).copied();
            let mut entries: Vec<u32> = members.chain(list.clusters.buffered_entries()).collect();
            entries.sort_unstable();
            assert!(entries.into_iter().eq(0..layer.waiting.tokens().start as u32));
        }
    }

    /// Returns the key plane of a group: keys near one of five centres, some of them far from it.
    fn plane(group: u64) -> Vec<u8> {
        let key = |at: u64| (group % 5) as f32 * 10.0 + ((group * 16 + at) * 7 % 13) as f32 * (group / 50) as f32;
        (0..16).flat_map(|at| [key(at), -key(at)]).flat_map(f32::to_le_bytes).collect()
    }

    /// Supplies the groups that are asked for, until there are none.
    fn supply(layer: &mut AdaptiveLayer, mut wanted: Vec<u64>) {
        while !wanted.is_empty() {
            wanted.iter().for_each(|at| layer.supply(&KeyGroup::new(SHAPE, &plane(*at), *at).unwrap()));
            wanted = layer.advance().unwrap();
        }
    }

    #[test]
    fn requested_splits_empty_the_buffers_and_a_withdrawn_one_changes_nothing() {
        let (chosen_by, sharing) = (ChosenBy::Representative, HeadSharing::PerHead);
        let options = ClusterOptions { mean_size: 4, chosen_by, sharing, whole_window: false, single: false };
        let mut layer = AdaptiveLayer::new(SHAPE, KeySpace::new(SHAPE, options, None));
        for groups in [0..50, 50..70] {
            groups.for_each(|at| layer.push(&KeyGroup::new(SHAPE, &plane(at), at).unwrap()));
            layer.attached();
            let wanted = layer.advance().unwrap();
            supply(&mut layer, wanted);
        }
        layer.retrieve(vec![vec![0], vec![1]]);
        let state = |layer: &AdaptiveLayer| {
            let mut out = StateWriter::new();
            assert!(layer.put_state(&mut out));
            out.into_bytes()
        };
        let (before, sizes) = (state(&layer), layer.buffer_sizes());
        assert!(sizes.len() > 2, "{sizes:?}");
        // Nothing is due, so nothing is read.
        assert_eq!(layer.advance().unwrap(), []);
        assert!(layer.request_split());
        assert!(!layer.advance().unwrap().is_empty() && layer.lists.iter().any(|list| list.pending.is_some()));
        layer.withdraw_split();
        assert_eq!((state(&layer), layer.buffer_sizes()), (before, sizes.clone()));
        for done in 0..sizes.len() {
            assert_eq!(layer.buffer_sizes().len(), sizes.len() - done);
            let largest = layer.buffer_sizes().into_iter().max().unwrap();
            let waiting: usize = layer.buffer_sizes().iter().sum();
            assert!(layer.request_split());
            let most = layer.bytes_for(0);
            let wanted = layer.advance().unwrap();
            supply(&mut layer, wanted);
            assert!(layer.bytes() <= most, "{} of {most}", layer.bytes());
            assert_eq!(layer.buffer_sizes().iter().sum::<usize>(), waiting - largest);
        }
        assert!(!layer.request_split());
        // The next group still begins with the clusters that the newest selection chose.
        assert_eq!((layer.step.is_none(), lock(&layer.retrieved).clone()), (true, vec![vec![0], vec![1]]));
        for list in &layer.lists {
            let members = (0..list.clusters.len()).flat_map(|cluster| list.clusters.members_of(cluster));
            let mut entries: Vec<u32> = members.copied().collect();
            entries.sort_unstable();
            assert!(entries.into_iter().eq(0..layer.waiting.tokens().start as u32));
        }
    }
}
