//! The selectors of a sequence, and the kinds of summaries that its layers keep for them.
//!
//! Invariants:
//! - A *slot* is the index of a kind. Layers keep their summaries in the same order.
//! - Every kind is needed by at least one selector, except while a selector is being attached.
//! - `memory` covers the summaries of all layers and the keys of `Sequence::reconstruct_keys`.

use super::attached_summary::AttachedSummary;
use super::layer::LayerState;
use super::layer_set::LayerSet;
use super::loaded_clusters::LoadedClusters;
use crate::error::{Error, ErrorKind, Result};
use crate::log::Devices;
use crate::metrics::Reservation;
use crate::retrieval::{LayerSummary, Selector, SelectorId};
use std::sync::Arc;

/// Selectors, kinds, and the memory of their summaries.
pub(super) struct SelectorSet {
    /// In the order of their ids.
    selectors: Vec<(SelectorId, AttachedSelector)>,
    /// By slot.
    kinds: Vec<SummaryKind>,
    /// Stored clusters, each of a kind that is attached.
    loaded: Vec<LoadedClusters>,
    memory: Reservation,
}

/// A kind of summary that layers keep.
struct SummaryKind {
    id: String,
    /// The id of its adapter (0 if the store has none) if records are written with the groups.
    stored: Option<u64>,
    /// The memory of its adapter.
    _adapter: Option<Arc<Reservation>>,
}

/// A selector with the slots of the summaries that it needs.
pub(super) struct AttachedSelector {
    selector: Arc<dyn Selector>,
    slots: Vec<usize>,
    /// The memory of its adapters. They may be copies of the adapters of its kinds.
    _adapters: Vec<Arc<Reservation>>,
}

/// A state that [`SelectorSet::roll_back`] restores.
#[derive(Clone, Copy)]
pub(super) struct SelectorMark {
    kinds: usize,
    bytes: usize,
}

impl AttachedSelector {
    pub(super) fn new(selector: Arc<dyn Selector>, slots: Vec<usize>, adapters: Vec<Arc<Reservation>>) -> Self {
        Self { selector, slots, _adapters: adapters }
    }

    pub(super) fn selector(&self) -> &dyn Selector {
        self.selector.as_ref()
    }

    /// Returns the slots of its summaries.
    pub(super) fn slots(&self) -> &[usize] {
        &self.slots
    }

    /// Returns the summaries of a layer that the selector scores by.
    pub(super) fn summaries<'a>(
        &'a self,
        layer: &'a LayerState,
    ) -> impl Iterator<Item = &'a AttachedSummary> + use<'a> {
        self.slots.iter().filter_map(|slot| layer.summaries().attached().get(*slot))
    }
}

impl SelectorSet {
    pub(super) fn new(memory: Reservation) -> Self {
        Self { selectors: Vec::new(), kinds: Vec::new(), loaded: Vec::new(), memory }
    }

    /// Returns an attached selector.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the id is of another sequence, or the selector was detached.
    pub(super) fn get(&self, id: SelectorId) -> Result<&AttachedSelector> {
        let found = self.selectors.iter().find(|(known, _)| *known == id);
        let unknown = || Error::new(ErrorKind::InvalidArgument, "a selector of another sequence, or a detached one");
        found.map(|(_, attached)| attached).ok_or_else(unknown)
    }

    /// Returns the slot of a selector's first summary with clusters, and the id of its kind; none if no layer has
    /// clusters.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn clustered(&self, id: SelectorId, layers: &LayerSet) -> Result<Option<(usize, String)>> {
        let has_clusters = |slot: &&usize| {
            let mut summaries = layers.iter().filter_map(|layer| layer.summaries().attached().get(**slot));
            summaries.any(|summary| !summary.get().cluster_lists().is_empty())
        };
        let slot = self.get(id)?.slots.iter().find(has_clusters);
        Ok(slot.map(|slot| (*slot, self.kinds[*slot].id.clone())))
    }

    /// Returns the ids of the kinds of a selector that keep clusters.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn clustered_kinds(&self, id: SelectorId, layers: &LayerSet) -> Result<Vec<String>> {
        let keeps_clusters = |slot: &&usize| {
            let mut summaries = layers.iter().filter_map(|layer| layer.summaries().attached().get(**slot));
            summaries.any(|summary| summary.get().has_clusters())
        };
        let slots = self.get(id)?.slots.iter().filter(keeps_clusters);
        Ok(slots.map(|slot| self.kinds[*slot].id.clone()).collect())
    }

    /// Returns whether the stored clusters of a kind are loaded.
    pub(super) fn has_loaded(&self, method: &str) -> bool {
        self.loaded_of(method).is_some()
    }

    /// Adds stored clusters.
    pub(super) fn load(&mut self, loaded: LoadedClusters) {
        self.loaded.push(loaded);
    }

    /// Returns the stored clusters that a selector chooses by, if they are loaded.
    pub(super) fn loaded(&self, id: SelectorId) -> Option<&LoadedClusters> {
        if self.loaded.is_empty() {
            return None;
        }
        let slots = &self.get(id).ok()?.slots;
        self.loaded.iter().find(|loaded| slots.iter().any(|slot| self.kinds[*slot].id == loaded.method))
    }

    /// Drops stored clusters that reach beyond `tokens`, because other tokens may follow there.
    pub(super) fn cut_loaded(&mut self, tokens: u64) {
        self.loaded.retain(|loaded| loaded.set.tokens <= tokens);
        for loaded in &mut self.loaded {
            loaded.state = loaded.state.take().filter(|state| state.tokens <= tokens);
            loaded.state_tried = loaded.state_tried.min(tokens);
        }
    }

    /// Records that a kind has built new clusters, so that the stored state is not that of the method.
    pub(super) fn outdate_state(&mut self, slot: usize) {
        let Some(kind) = self.kinds.get(slot) else { return };
        let loaded = self.loaded.iter_mut().filter(|loaded| loaded.method == kind.id);
        loaded.filter_map(|loaded| loaded.state.as_mut()).for_each(|state| state.is_outdated = true);
    }

    /// Returns the slot and the id of each kind whose stored clusters are loaded.
    pub(super) fn loaded_slots(&self) -> impl Iterator<Item = (usize, String)> + '_ {
        self.loaded.iter().filter_map(|loaded| Some((self.slot_of(&loaded.method)?, loaded.method.clone())))
    }

    /// Returns the stored clusters of a kind, if they are loaded.
    pub(super) fn loaded_of(&self, method: &str) -> Option<&LoadedClusters> {
        self.loaded.iter().find(|loaded| loaded.method == method)
    }

    /// Returns the stored clusters of a kind, if they are loaded.
    pub(super) fn loaded_of_mut(&mut self, method: &str) -> Option<&mut LoadedClusters> {
        self.loaded.iter_mut().find(|loaded| loaded.method == method)
    }

    /// Returns the slot of a kind by its id.
    pub(super) fn slot_of(&self, kind: &str) -> Option<usize> {
        self.kinds.iter().position(|known| known.id == kind)
    }

    /// Adds a kind and returns its slot. Every layer has its summary.
    pub(super) fn add_kind(&mut self, id: String, adapter: Option<Arc<Reservation>>) -> usize {
        self.kinds.push(SummaryKind { id, stored: None, _adapter: adapter });
        self.kinds.len() - 1
    }

    /// Adds a selector and returns its id.
    pub(super) fn add(&mut self, selector: AttachedSelector) -> SelectorId {
        let id = SelectorId::next();
        self.selectors.push((id, selector));
        id
    }

    /// Removes a selector and the kinds that no other one needs. Returns, by old slot, which kinds are left.
    pub(super) fn remove(&mut self, id: SelectorId) -> Vec<bool> {
        self.selectors.retain(|(known, _)| *known != id);
        let used: Vec<bool> = (0..self.kinds.len())
            .map(|slot| self.selectors.iter().any(|(_, attached)| attached.slots.contains(&slot)))
            .collect();
        for (_, attached) in &mut self.selectors {
            attached.slots.iter_mut().for_each(|slot| *slot = used[..*slot].iter().filter(|used| **used).count());
        }
        let mut marks = used.iter();
        self.kinds.retain(|_| marks.next().copied().unwrap_or(true));
        let kinds = &self.kinds;
        self.loaded.retain(|loaded| kinds.iter().any(|kind| kind.id == loaded.method));
        used
    }

    /// Returns the present state, before a selector is attached.
    pub(super) fn mark(&self) -> SelectorMark {
        SelectorMark { kinds: self.kinds.len(), bytes: self.memory.bytes() }
    }

    /// Goes back to `mark` after a selector could not be attached. Returns the number of slots that are left.
    pub(super) fn roll_back(&mut self, devices: &Devices, mark: SelectorMark) -> usize {
        self.kinds.truncate(mark.kinds);
        let kinds = &self.kinds;
        self.loaded.retain(|loaded| kinds.iter().any(|kind| kind.id == loaded.method));
        // Shrinking always succeeds. The attachment may have given back more than it took.
        let bytes = mark.bytes.min(self.memory.bytes());
        devices.resize(&mut self.memory, bytes);
        mark.kinds
    }

    /// Has records of a kind written with the groups from now on. `adapter` is the id of its adapter, 0 if it has none.
    pub(super) fn store(&mut self, slot: usize, adapter: u64) {
        self.kinds[slot].stored = Some(adapter);
    }

    /// Returns the summaries of a layer whose records are written with its groups, with their adapters.
    pub(super) fn stored<'a>(&'a self, layer: &'a LayerState) -> impl Iterator<Item = (&'a dyn LayerSummary, u64)> {
        let kinds = layer.summaries().attached().iter().zip(&self.kinds);
        kinds.filter_map(|(summary, kind)| kind.stored.map(|adapter| (summary.get(), adapter)))
    }

    /// Reserves memory for all summaries after `groups` more groups in `layer`, and for `more` bytes beside them.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub(super) fn reserve(
        &mut self,
        devices: &Devices,
        layers: &LayerSet,
        (layer, groups): (usize, usize),
        more: usize,
    ) -> Result<()> {
        let held = summary_bytes(layers, layer, groups) + more;
        if held > self.memory.bytes() && !devices.resize(&mut self.memory, held) {
            let text = format!("summaries of {held} bytes do not fit into memory_limit; detach selectors or raise it");
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        Ok(())
    }

    /// Reserves memory as [`Self::reserve`], if it is free at once. Returns whether it is. No buffer is freed for it.
    pub(super) fn try_reserve(&mut self, layers: &LayerSet, more: usize) -> bool {
        let held = summary_bytes(layers, 0, 0) + more;
        held <= self.memory.bytes() || self.memory.resize(held)
    }

    /// Returns memory to the budget that summaries, and `more` bytes beside them, do not need.
    pub(super) fn give_back(&mut self, devices: &Devices, layers: &LayerSet, more: usize) {
        let held = summary_bytes(layers, 0, 0) + more;
        if held < self.memory.bytes() {
            // Shrinking always succeeds.
            devices.resize(&mut self.memory, held);
        }
    }

    /// Returns memory that summaries and exact keys no longer hold to the budget.
    pub(super) fn account(&mut self, devices: &Devices, layers: &LayerSet) {
        // Shrinking always succeeds.
        devices.resize(&mut self.memory, summary_bytes(layers, 0, 0));
    }
}

/// Returns the bytes of the summaries of selectors, and of exact keys, once `layer` has `groups` more.
fn summary_bytes(layers: &LayerSet, layer: usize, groups: usize) -> usize {
    let bytes = |own: &LayerState| -> usize {
        let groups = if own.index() == layer { groups } else { 0 };
        let keys = own.summaries().exact_keys().map_or(0, |keys| keys.bytes_for(groups));
        own.summaries().attached().iter().map(|summary| summary.get().bytes_for(groups)).sum::<usize>() + keys
    };
    layers.iter().map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Category, MemoryBudget};
    use crate::retrieval::Quest;

    fn set() -> SelectorSet {
        SelectorSet::new(MemoryBudget::new(0).try_reserve(0, Category::Summaries).unwrap())
    }

    fn attach(set: &mut SelectorSet, slots: &[usize]) -> SelectorId {
        set.add(AttachedSelector::new(Arc::new(Quest), slots.to_vec(), Vec::new()))
    }

    #[test]
    fn selector_set_drops_kinds_that_no_selector_needs() {
        let mut set = set();
        let slots: Vec<usize> = ["a", "b", "c"].map(|kind| set.add_kind(kind.to_owned(), None)).to_vec();
        assert_eq!(slots, [0, 1, 2]);
        let one = attach(&mut set, &[0, 1]);
        let other = attach(&mut set, &[1, 2]);
        assert_eq!(set.remove(one), [false, true, true]);
        assert_eq!((set.slot_of("a"), set.slot_of("b"), set.slot_of("c")), (None, Some(0), Some(1)));
        assert_eq!(set.get(other).unwrap().slots, [0, 1]);
        assert!(set.get(one).is_err());
    }
}
