//! The state of the clusters of equal size of a layer: its lists.
//!
//! The keys of waiting tokens are not part of it. The engine pushes their groups again.

use super::list::BalancedList;
use super::summary::BalancedLayer;
use crate::retrieval::cluster_choice::WaitingKeys;
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};

impl BalancedLayer {
    /// The version of the encoding. Whatever changes the meaning of a state changes it.
    pub(super) const STATE_ENCODING: u32 = 1;

    /// Returns the most bytes of the state.
    pub(super) fn bytes_of_state(&self) -> usize {
        2 * size_of::<u64>() + self.lists.iter().map(BalancedList::state_bytes).sum::<usize>()
    }

    /// Appends the state, if there are clusters.
    pub(super) fn write_state(&self, out: &mut StateWriter) -> bool {
        let start = self.waiting.groups().start;
        if self.lists.is_empty() || self.next != start * self.shape.group_tokens {
            return false;
        }
        out.put_u64(start as u64);
        out.put_u64(self.lists.len() as u64);
        self.lists.iter().for_each(|list| list.put_state(out));
        true
    }

    /// Takes the state of the first `groups` groups.
    pub(super) fn read_state(&mut self, state: &mut StateReader<'_>, groups: usize) -> Result<(), StateError> {
        let start = state.count("groups in clusters", groups)?;
        let heads = self.space.heads().len();
        let count = state.count("lists", heads)?;
        require(count == heads && start > 0, || format!("{count} lists of {start} groups, not {heads}"))?;
        let tokens = start.saturating_mul(self.shape.group_tokens);
        let space = (self.space.dim(), self.has_centroids());
        let mut lists = Vec::with_capacity(heads);
        for _ in 0..heads {
            lists.push(BalancedList::from_state(state, space, (tokens, self.size()))?);
        }
        state.end()?;
        (self.lists, self.next) = (lists, tokens);
        self.waiting = WaitingKeys::starting_at(self.space.vector_shape(), start);
        Ok(())
    }
}
