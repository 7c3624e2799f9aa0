//! The summaries of one layer: min/max records, summaries of selectors, and exact keys.
//!
//! Invariant: each covers the sealed groups of the layer. So an append, a cut and a roll-back change all of them.

use super::attached_summary::AttachedSummary;
use crate::error::Result;
use crate::metrics::Reservation;
use crate::retrieval::{KeptKeys, KeyGroup, KeyShape, MinMax};

/// The summaries and keys of sealed groups that a layer keeps in memory.
pub(super) struct LayerSummaries {
    /// Min/max records, or none if the sequence stores none, or streams them.
    min_max: Option<MinMax>,
    /// Summaries of the selectors of the sequence, by slot.
    attached: Vec<AttachedSummary>,
    /// Keys for selections that read values alone.
    exact_keys: Option<KeptKeys>,
}

impl LayerSummaries {
    pub(super) fn new(min_max: Option<MinMax>) -> Self {
        Self { min_max, attached: Vec::new(), exact_keys: None }
    }

    /// Returns the min/max records as they are now, without summaries of selectors.
    pub(super) fn snapshot(&self) -> Self {
        Self::new(self.min_max.clone())
    }

    pub(super) fn min_max(&self) -> Option<&MinMax> {
        self.min_max.as_ref()
    }

    /// Returns the summaries of the selectors, by slot.
    pub(super) fn attached(&self) -> &[AttachedSummary] {
        &self.attached
    }

    /// Returns the summary of a selector in a slot.
    pub(super) fn attached_mut(&mut self, slot: usize) -> Option<&mut AttachedSummary> {
        self.attached.get_mut(slot)
    }

    pub(super) fn exact_keys(&self) -> Option<&KeptKeys> {
        self.exact_keys.as_ref()
    }

    /// Returns whether there is any summary to which keys must be added.
    pub(super) fn need_keys(&self) -> bool {
        self.min_max.is_some() || !self.attached.is_empty() || self.exact_keys.is_some()
    }

    /// Adds a group by its decoded K plane.
    ///
    /// # Errors
    /// As [`KeyGroup::new`].
    pub(super) fn push(&mut self, shape: KeyShape, group: u64, keys: &[u8]) -> Result<()> {
        if let Some(min_max) = &mut self.min_max {
            min_max.push(keys, shape.kv_heads, shape.group_tokens, shape.dtype);
        }
        if !self.attached.is_empty() || self.exact_keys.is_some() {
            let group = KeyGroup::new(shape, keys, group)?;
            self.attached.iter_mut().for_each(|summary| summary.get_mut().push(&group));
            if let Some(exact) = &mut self.exact_keys {
                exact.push(group.index(), keys);
            }
        }
        Ok(())
    }

    /// Keeps the first `groups` groups.
    pub(super) fn truncate(&mut self, groups: u64) {
        if let Some(min_max) = &mut self.min_max {
            min_max.truncate(groups as usize);
        }
        for summary in &mut self.attached {
            summary.get_mut().truncate(groups as usize);
        }
        if let Some(keys) = &mut self.exact_keys {
            keys.truncate(groups);
        }
    }

    /// Takes the memory of min/max records for `groups` more groups. Returns `false` if there is none.
    pub(super) fn reserve_min_max(
        &mut self,
        groups: usize,
        reserve: &mut dyn FnMut(usize) -> Option<Reservation>,
    ) -> bool {
        self.min_max.as_mut().is_none_or(|min_max| min_max.room(groups, reserve))
    }

    /// Lays min/max records over the records of earlier frames, in an open. Returns `false` if there is no memory for
    /// them.
    pub(super) fn lay_min_max(
        &mut self,
        first: usize,
        records: &[u8],
        reserve: &mut dyn FnMut(usize) -> Option<Reservation>,
    ) -> bool {
        self.min_max.as_mut().is_none_or(|min_max| min_max.lay(first, records, reserve))
    }

    /// Adds a summary of a selector, in the next slot.
    pub(super) fn attach(&mut self, summary: AttachedSummary) {
        self.attached.push(summary);
    }

    /// Drops the summaries of selectors from slot `count` on.
    pub(super) fn detach_from(&mut self, count: usize) {
        self.attached.truncate(count);
    }

    /// Keeps the summaries of selectors whose slot is marked.
    pub(super) fn keep(&mut self, marks: &[bool]) {
        let mut marks = marks.iter();
        self.attached.retain(|_| marks.next().copied().unwrap_or(true));
    }

    /// Drops what a summary keeps of groups before `group`, whose records are on devices.
    ///
    /// # Errors
    /// As [`AttachedSummary::drop_stored`].
    pub(super) fn drop_stored(&mut self, slot: usize, group: usize) -> Result<()> {
        self.attached.get_mut(slot).map_or(Ok(()), |summary| summary.drop_stored(group))
    }

    /// Sets, or drops, the keys for selections that read values alone.
    pub(super) fn set_exact_keys(&mut self, keys: Option<KeptKeys>) {
        self.exact_keys = keys;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::{BoundsSpec, SummarySpec};
    use stratakv_format::DType;

    const SHAPE: KeyShape = KeyShape { kv_heads: 1, key_dim: 2, group_tokens: 1, dtype: DType::F32 };

    fn summaries() -> LayerSummaries {
        let mut summaries = LayerSummaries::new(None);
        for _ in 0..3 {
            let summary = BoundsSpec { levels: 1 }.layer(0, SHAPE).unwrap();
            summaries.attach(AttachedSummary::Whole(summary));
        }
        summaries
    }

    #[test]
    fn layer_summaries_cover_the_same_groups() {
        let mut summaries = summaries();
        for group in 0..4 {
            summaries.push(SHAPE, group, &[0; 8]).unwrap();
        }
        summaries.truncate(3);
        let groups: Vec<usize> = summaries.attached().iter().map(|summary| summary.get().groups()).collect();
        assert_eq!(groups, [3, 3, 3]);
        assert!(summaries.need_keys() && !summaries.snapshot().need_keys());
    }

    #[test]
    fn layer_summaries_keep_the_marked_slots() {
        let mut summaries = summaries();
        summaries.keep(&[true, false, true]);
        assert_eq!(summaries.attached().len(), 2);
        summaries.detach_from(1);
        assert_eq!(summaries.attached().len(), 1);
    }
}
