//! Splits of clusters between appends, while the device is idle.
//!
//! An append splits a cluster when it has to: when the cluster was chosen, or when too many entries wait. Here the
//! embedder has clusters split earlier. The summary does the work as in its upkeep after an append.
//!
//! Invariants:
//! - A split that fails leaves its cluster and the waiting entries as they were.
//! - A stored state of the method stays valid. It has the same tokens in clusters that are split later.

use super::handle::Sequence;
use crate::error::Result;
use crate::retrieval::SelectorId;
use std::cmp::Reverse;
use std::sync::Arc;

impl Sequence {
    /// Splits at most `limit` clusters of an attached method, and returns how many it split. Call it while the device
    /// is idle: while the model computes, or between two answers.
    ///
    /// DynaKV (`dynakv`) delays the split of a cluster whose keys are not in memory. New entries of the cluster then
    /// wait in a buffer. An append splits the cluster once it was selected, or once 16 entries wait in a list. This
    /// call does not wait for that. It takes the clusters with the most waiting entries first, over all layers and KV
    /// heads. Each split reads the keys of the members of its cluster. A later append then finds fewer splits to do.
    ///
    /// Other methods delay no split, so the call returns 0. Nothing is written. A [stored
    /// state](Self::store_clusters) stays valid: a handle that takes it has the clusters from before the split.
    ///
    /// ```
    /// use stratakv::retrieval::MethodSpec;
    /// use stratakv::{ByteSize, CreateOptions, KvLayout, Store, TensorView};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(16).build()?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
    /// let rows: Vec<f32> = (0..400 * 8).map(|i| (i % 31) as f32 / 31.0).collect();
    /// let tensor = TensorView::token_major(&rows, 400, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    /// let dynakv = sequence.attach("dynakv:8".parse::<MethodSpec>()?.selector(None)?)?;
    ///
    /// sequence.append(0, tensor, tensor)?;
    /// let split = sequence.split_clusters(dynakv, 4)?;
    /// assert!(split <= 4);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument): a selector of another sequence.
    /// [`ErrorKind::MemoryLimit`](crate::ErrorKind::MemoryLimit): no memory for a split. Errors of reading the keys.
    /// Splits before the one that failed stay. Its cluster and the entries are as before.
    pub fn split_clusters(&mut self, selector: SelectorId, limit: usize) -> Result<usize> {
        let slots = self.selectors.get(selector)?.slots().to_vec();
        let outcome = self.split_fullest(&slots, limit).map_err(|e| e.during("split of clusters"));
        self.account_summaries();
        outcome
    }

    fn split_fullest(&mut self, slots: &[usize], limit: usize) -> Result<usize> {
        // Groups may wait that an earlier append could not take in.
        let places: Vec<(usize, usize)> = self.buffers(slots).map(|(_, Reverse(place))| place).collect();
        if limit > 0 {
            places.into_iter().try_for_each(|(layer, slot)| self.advance_slot(layer, slot).map(drop))?;
        }
        for done in 0..limit {
            let fullest = self.buffers(slots).max();
            let Some((_, Reverse((layer, slot)))) = fullest else { return Ok(done) };
            if !self.split_in(layer, slot)? {
                return Ok(done);
            }
        }
        Ok(limit)
    }

    /// Returns the fullest buffer of each summary, with its layer and its slot. Of equal buffers, the first is largest.
    fn buffers(&self, slots: &[usize]) -> impl Iterator<Item = (usize, Reverse<(usize, usize)>)> {
        let each = self.layers.iter().flat_map(move |layer| slots.iter().map(move |slot| (layer, *slot)));
        each.filter_map(|(layer, slot)| {
            let largest = layer.summaries().attached().get(slot)?.get().buffer_sizes().into_iter().max()?;
            Some((largest, Reverse((layer.index(), slot))))
        })
    }

    /// Splits the cluster with the fullest buffer of one summary. Returns whether there was one.
    fn split_in(&mut self, layer: usize, slot: usize) -> Result<bool> {
        let Some(own) = self.layer_mut(layer)?.summaries_mut().attached_mut(slot) else { return Ok(false) };
        if !own.get_mut().request_split() {
            return Ok(false);
        }
        let devices = Arc::clone(&self.store.devices);
        let reserved = self.selectors.reserve(&devices, &self.layers, (layer, 0), 0);
        let outcome = reserved.and_then(|()| self.advance_slot(layer, slot));
        if outcome.is_err()
            && let Some(own) = self.layer_mut(layer)?.summaries_mut().attached_mut(slot)
        {
            own.get_mut().withdraw_split();
        }
        outcome
    }
}
