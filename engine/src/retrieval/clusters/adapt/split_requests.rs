//! Which cluster is split next, and splits that are requested before they are needed.
//!
//! A requested split is due like any other one. It makes the entries of the buffer members, and no entry is lost if it
//! is withdrawn.

use super::{AdaptiveClusters, SplitRequest};
use std::cmp::Reverse;

impl AdaptiveClusters {
    /// Returns the next cluster to split, or none. Ask until there is none, after each entry or at the end of a step.
    ///
    /// The order is: the split that is due, retrieved clusters that are flagged, then the cluster with the most
    /// buffered entries while the buffers are full.
    pub fn next_split(&mut self) -> Option<SplitRequest> {
        if self.due.is_none() {
            while let Some(cluster) = self.retrieved.pop() {
                if self.buffers.contains_key(&cluster) {
                    self.due = Some(cluster);
                    break;
                }
            }
        }
        let buffered = self.buffered();
        if self.due.is_none() && buffered > 0 && buffered >= self.options.buffer_limit {
            self.due = self.fullest_buffer();
        }
        self.due.map(|cluster| SplitRequest { cluster, must_load: !self.in_memory[cluster as usize] })
    }

    /// Makes the cluster with the most buffered entries due, so that [`Self::next_split`] returns it. Of equal buffers,
    /// the one of the older cluster counts. A split that is due already stays.
    ///
    /// Returns the cluster, or none if the buffers are empty.
    pub fn request_split(&mut self) -> Option<u32> {
        self.due = self.due.or_else(|| self.fullest_buffer());
        self.due
    }

    /// Withdraws the split that is due, because its keys cannot be read. The cluster stays flagged.
    pub fn withdraw_split(&mut self) {
        self.due = None;
    }

    /// Returns whether a split is due.
    #[must_use]
    pub fn is_split_due(&self) -> bool {
        self.due.is_some()
    }

    /// Returns the number of entries in each buffer that has one, by rising cluster.
    pub fn buffer_sizes(&self) -> impl Iterator<Item = usize> {
        self.buffers.values().map(Vec::len)
    }

    /// Returns the cluster with the most buffered entries, the older one of equal ones.
    fn fullest_buffer(&self) -> Option<u32> {
        let fullest = self.buffers.iter().max_by_key(|(cluster, own)| (own.len(), Reverse(**cluster)));
        fullest.map(|(cluster, _)| *cluster)
    }
}
