//! [`RecentSteps`]: which of the last steps activated an item, one bit per item and step.
//!
//! Invariants:
//! - Step `n` has bit `n % window` of every item. A new step takes the bits of the oldest one.
//! - The bits are stored in blocks of eight items, as the kernels expect them. Items that fill the last block have no
//!   bits.

use crate::kernels::{BLOCK_ENTRIES, common_counts};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};

/// The last steps that activated each item.
#[derive(Clone, Debug)]
pub(super) struct RecentSteps {
    items: usize,
    window: usize,
    /// Words of an item.
    words: usize,
    blocks: Vec<u64>,
}

impl RecentSteps {
    /// Returns items that no step activated. The window is not 0.
    pub(super) fn new(items: usize, window: usize) -> Self {
        let words = window.div_ceil(64);
        Self { items, window, words, blocks: vec![0; items.next_multiple_of(BLOCK_ENTRIES) * words] }
    }

    /// Returns the bytes of the bits.
    pub(super) fn bytes_for(items: usize, window: usize) -> usize {
        items.next_multiple_of(BLOCK_ENTRIES).saturating_mul(window.div_ceil(64) * size_of::<u64>())
    }

    /// Appends the steps of all items.
    pub(super) fn put_state(&self, out: &mut StateWriter) {
        out.put_u64(self.items as u64);
        out.put_u64s(&self.blocks);
    }

    /// Returns the steps of a state of at most `most` items.
    ///
    /// # Errors
    /// There are more items, or an item has no steps.
    pub(super) fn from_state(state: &mut StateReader<'_>, most: usize, window: usize) -> Result<Self, StateError> {
        let (items, words) = (state.count("items", most)?, window.div_ceil(64));
        let count = items.next_multiple_of(BLOCK_ENTRIES) * words;
        let blocks = state.u64s("words of steps", count)?;
        require(blocks.len() == count, || format!("{items} items have {} words of steps", blocks.len()))?;
        let mut own = Self { items, window, words, blocks };
        // Items that fill the last block have no bits.
        let last = items.next_multiple_of(BLOCK_ENTRIES);
        require((items..last).all(|item| own.row(item).iter().all(|word| *word == 0)), || {
            "an item that does not exist has steps".into()
        })?;
        own.resize(items);
        Ok(own)
    }

    /// Returns the number of items.
    pub(super) fn items(&self) -> usize {
        self.items
    }

    /// Records step `step`, which activated these items. All of them exist.
    pub(super) fn record(&mut self, step: u64, activated: &[u32]) {
        let at = (step % self.window as u64) as usize;
        let (word, bit) = (at / 64, 1 << (at % 64));
        for block in self.blocks.chunks_exact_mut(self.words * BLOCK_ENTRIES) {
            block[word * BLOCK_ENTRIES..][..BLOCK_ENTRIES].iter_mut().for_each(|word| *word &= !bit);
        }
        for item in activated {
            let at = self.word_index(*item as usize, word);
            self.blocks[at] |= bit;
        }
    }

    /// Forgets all steps of an item.
    pub(super) fn clear(&mut self, item: usize) {
        for word in 0..self.words {
            let at = self.word_index(item, word);
            self.blocks[at] = 0;
        }
    }

    /// Keeps the first `items` items, or adds items that no step activated.
    pub(super) fn resize(&mut self, items: usize) {
        (items..self.items.min(items.next_multiple_of(BLOCK_ENTRIES))).for_each(|item| self.clear(item));
        self.blocks.resize(items.next_multiple_of(BLOCK_ENTRIES) * self.words, 0);
        self.items = items;
    }

    /// Adds an item with the steps of `row`, which has the same window.
    pub(super) fn add(&mut self, row: &[u64]) {
        let item = self.items;
        self.resize(item + 1);
        for (word, bits) in row.iter().enumerate().take(self.words) {
            let at = self.word_index(item, word);
            self.blocks[at] = *bits;
        }
    }

    /// Keeps the items for which `keep` holds, in their order.
    pub(super) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        let kept: Vec<usize> = (0..self.items).filter(|item| keep(*item)).collect();
        let mut left = Self::new(kept.len(), self.window);
        for (to, item) in kept.into_iter().enumerate() {
            for word in 0..self.words {
                let at = left.word_index(to, word);
                left.blocks[at] = self.blocks[self.word_index(item, word)];
            }
        }
        *self = left;
    }

    /// Returns the most bytes once it has grown to `items` items.
    pub(super) fn bytes_once(&self, items: usize) -> usize {
        let (needed, held) = (Self::bytes_for(items, self.window), self.blocks.capacity() * size_of::<u64>());
        // A vector that grows takes at most twice what it holds.
        if needed > held { needed.saturating_mul(2) } else { held }
    }

    /// Returns the words of an item.
    pub(super) fn row(&self, item: usize) -> Vec<u64> {
        (0..self.words).map(|word| self.blocks[self.word_index(item, word)]).collect()
    }

    /// Returns the number of steps that each item has in common with `row`.
    pub(super) fn common(&self, row: &[u64]) -> Vec<u16> {
        let mut common = vec![0; self.items.next_multiple_of(BLOCK_ENTRIES)];
        common_counts(row, &self.blocks, &mut common);
        common.truncate(self.items);
        common
    }

    fn word_index(&self, item: usize, word: usize) -> usize {
        (item / BLOCK_ENTRIES * self.words + word) * BLOCK_ENTRIES + item % BLOCK_ENTRIES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[derive(Clone, Debug)]
    enum Change {
        Record(Vec<u32>),
        Resize(usize),
        Copy(usize),
        Retain(u8),
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            6 => prop::collection::vec(0_u32..30, 0..12).prop_map(Change::Record),
            2 => (0_usize..30).prop_map(Change::Resize),
            1 => (0_usize..30).prop_map(Change::Copy),
            1 => any::<u8>().prop_map(Change::Retain),
        ]
    }

    proptest! {
        #[test]
        fn items_that_grow_and_go_keep_the_steps_of_the_window(
            changes in prop::collection::vec(change(), 0..300), window in 1_usize..140,
        ) {
            let mut found = RecentSteps::new(0, window);
            // The newest steps of each item, from the newest on.
            let mut expected: Vec<VecDeque<bool>> = Vec::new();
            let mut step = 0;
            for change in changes {
                match change {
                    Change::Record(items) => {
                        let is_known = |item: &u32| (*item as usize) < found.items();
                        let known: Vec<u32> = items.into_iter().filter(is_known).collect();
                        found.record(step, &known);
                        step += 1;
                        for (item, steps) in (0..).zip(&mut expected) {
                            steps.push_front(known.contains(&item));
                            steps.truncate(window);
                        }
                    }
                    Change::Resize(items) => {
                        let bytes = found.bytes_once(items);
                        found.resize(items);
                        expected.resize(items, VecDeque::new());
                        prop_assert!(found.bytes_once(found.items()) <= bytes);
                    }
                    Change::Copy(item) if item < found.items() => {
                        found.add(&found.row(item));
                        expected.push(expected[item].clone());
                    }
                    Change::Copy(_) => {}
                    Change::Retain(bits) => {
                        let keep = |item: usize| bits >> (item % 8) & 1 != 0;
                        found.retain(keep);
                        let mut item = 0..;
                        expected.retain(|_| keep(item.next().unwrap()));
                    }
                }
                prop_assert_eq!(found.items(), expected.len());
            }
            for (item, steps) in expected.iter().enumerate() {
                let count = |a: &VecDeque<bool>| a.iter().zip(steps).filter(|(a, b)| **a && **b).count() as u16;
                prop_assert_eq!(found.common(&found.row(item)), expected.iter().map(count).collect::<Vec<u16>>());
            }
        }
    }
}
