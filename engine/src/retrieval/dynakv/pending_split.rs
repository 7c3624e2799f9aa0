//! [`PendingSplit`]: a split, and the keys of its entries as far as they are known.
//!
//! Only the keys of the entries are kept, not the groups that they come from.

use crate::error::Result;
use crate::retrieval::cluster_choice::{KeySpace, WaitingKeys};
use crate::retrieval::clusters::AdaptiveClusters;
use crate::retrieval::key_group::KeyGroup;

/// A split that is due, and the vectors of its entries.
pub(super) struct PendingSplit {
    /// The list's KV head, or none for all heads.
    head: Option<usize>,
    entries: Vec<u32>,
    /// True for entries whose keys are not known.
    is_missing: Vec<bool>,
    /// `[entries, dim]`.
    keys: Vec<f32>,
}

impl PendingSplit {
    /// Returns the split of a cluster, with the keys of the entries that wait.
    ///
    /// # Errors
    /// There is no such cluster.
    pub(super) fn new(
        cluster: u32,
        (clusters, head): (&AdaptiveClusters, Option<usize>),
        (waiting, space): (&WaitingKeys, &KeySpace),
    ) -> Result<Self> {
        let (entries, dim) = (clusters.entries_to_split(cluster)?, space.dim());
        let known = waiting.tokens();
        let is_missing = entries.iter().map(|entry| !known.contains(&(*entry as usize))).collect();
        let mut keys = Vec::with_capacity(entries.len() * dim);
        for (entry, end) in entries.iter().zip((dim..).step_by(dim)) {
            waiting.keys().rows(*entry as usize..*entry as usize + 1, head, &mut keys);
            keys.resize(end, 0.0);
        }
        Ok(Self { head, entries, is_missing, keys })
    }

    /// Returns the most bytes of a split of `entries` entries with keys of `dim` elements.
    pub(super) fn bytes_for(entries: usize, dim: usize) -> usize {
        entries.saturating_mul(dim.saturating_mul(size_of::<f32>()) + size_of::<u32>() + size_of::<bool>())
    }

    /// Returns the bytes that it takes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<u32>()
            + self.is_missing.capacity()
            + self.keys.capacity() * size_of::<f32>()
    }

    /// Returns the keys `[entries, dim]`, or none while some are missing.
    pub(super) fn keys(&self) -> Option<&[f32]> {
        (!self.is_missing.contains(&true)).then_some(&self.keys)
    }

    /// Returns the group of each entry whose key is missing.
    pub(super) fn wanted(&self, group_tokens: usize) -> impl Iterator<Item = u64> {
        let missing = self.entries.iter().zip(&self.is_missing).filter(|(_, is_missing)| **is_missing);
        missing.map(move |(entry, _)| (*entry as usize / group_tokens) as u64)
    }

    /// Takes the keys of its entries from a group.
    pub(super) fn supply(&mut self, group: &KeyGroup<'_>, space: &KeySpace) {
        let (group_tokens, dim) = (group.shape().group_tokens, space.dim());
        for (at, entry) in self.entries.iter().enumerate() {
            if *entry as usize / group_tokens == group.index() as usize {
                let token = *entry as usize % group_tokens;
                space.row(group, token, self.head, &mut self.keys[at * dim..][..dim]);
                self.is_missing[at] = false;
            }
        }
    }
}
