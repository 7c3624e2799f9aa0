//! The state of the adaptive clusters of a layer: its lists, and the clusters that the newest selection chose.
//!
//! The keys of waiting tokens are not part of it. The engine pushes their groups again.

use super::summary::{AdaptiveLayer, AdaptiveList};
use crate::metrics::lock;
use crate::retrieval::cluster_choice::WaitingKeys;
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::clusters::AdaptiveClusters;

impl AdaptiveLayer {
    /// The version of the encoding. Whatever changes the meaning of a state changes it.
    pub(super) const STATE_ENCODING: u32 = 1;

    /// Returns the most bytes of the state.
    pub(super) fn bytes_of_state(&self) -> usize {
        let lists = self.lists.iter().map(|list| {
            // At most every cluster was retrieved.
            list.clusters.state_bytes() + (list.clusters.len() + 4) * size_of::<u32>()
        });
        lists.sum::<usize>() + 4 * size_of::<u64>()
    }

    /// Appends the state, if there are clusters and all groups were taken in.
    pub(super) fn write_state(&self, out: &mut StateWriter) -> bool {
        let start = self.waiting.groups().start;
        let is_whole = |list: &AdaptiveList| list.next == start * self.shape.group_tokens && list.pending.is_none();
        if self.lists.is_empty() || self.step.is_some() || !self.lists.iter().all(is_whole) {
            return false;
        }
        out.put_u64(start as u64);
        out.put_u64(self.lists.len() as u64);
        let retrieved = lock(&self.retrieved);
        for (at, list) in self.lists.iter().enumerate() {
            let own = retrieved.get(at).map_or(&[][..], Vec::as_slice);
            let known = own.iter().copied().filter(|cluster| (*cluster as usize) < list.clusters.len());
            out.put_u32s(&known.collect::<Vec<u32>>());
            if !list.clusters.put_state(out) {
                return false;
            }
        }
        true
    }

    /// Takes the state of the first `groups` groups.
    pub(super) fn read_state(&mut self, state: &mut StateReader<'_>, groups: usize) -> Result<(), StateError> {
        let start = state.count("groups in clusters", groups)?;
        let (dim, heads) = (self.space.dim(), self.space.heads().len());
        let lists = state.count("lists", heads)?;
        require(lists == heads && start > 0, || format!("{lists} lists of {start} groups, not {heads}"))?;
        let entries = start.saturating_mul(self.shape.group_tokens);
        let (mut own, mut retrieved) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for _ in 0..lists {
            let chosen = state.u32s("retrieved clusters", u32::MAX as usize)?;
            let clusters = AdaptiveClusters::from_state(state, (dim, entries), self.options())?;
            let is_known = chosen.iter().all(|cluster| (*cluster as usize) < clusters.len());
            require(is_known && chosen.len() <= clusters.len(), || {
                format!("{} retrieved clusters are not among {}", chosen.len(), clusters.len())
            })?;
            retrieved.push(chosen);
            own.push(AdaptiveList::new(clusters, entries));
        }
        state.end()?;
        self.lists = own;
        self.waiting = WaitingKeys::starting_at(self.space.vector_shape(), start);
        *lock(&self.retrieved) = retrieved;
        Ok(())
    }
}
