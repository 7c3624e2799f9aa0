//! Which sequences are listed: those that can be opened.
//!
//! A deletion takes effect with its commit, which may be later. Until then the sequence stays in the catalog, because a
//! crash may restore it. It cannot be opened any more, because every opening first commits what is queued.
//!
//! Invariant: [`Catalog::apply`] removes the mark of a deletion together with the sequence.

use super::Catalog;
use crate::catalog::meta::SequenceMeta;
use stratakv_format::SequenceId;

impl Catalog {
    /// Marks a sequence or an adapter whose deletion is being queued.
    pub(crate) fn queue_deletion(&mut self, id: SequenceId) {
        self.queued_deletions.insert(id);
    }

    /// Returns whether no deletion of this sequence or adapter is queued.
    pub(crate) fn is_listed(&self, id: SequenceId) -> bool {
        !self.queued_deletions.contains(&id)
    }

    /// Returns the sequences that can be opened, by id. Adapters are not among them.
    pub(crate) fn listed(&self) -> impl Iterator<Item = (SequenceId, &SequenceMeta)> {
        let all = self.sequences.iter().map(|(id, meta)| (*id, meta));
        all.filter(|(id, meta)| meta.adapter.is_none() && self.is_listed(*id))
    }
}
