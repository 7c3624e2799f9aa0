//! [`RecentSteps`]: which of the last steps activated an item, one bit per item and step.
//!
//! Invariants:
//! - Step `n` has bit `n % window` of every item. A new step takes the bits of the oldest one.
//! - The bits are stored in blocks of eight items, as the kernels expect them. Items that fill the last block have no
//!   bits.

use crate::kernels::{BLOCK_ENTRIES, common_counts};

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
