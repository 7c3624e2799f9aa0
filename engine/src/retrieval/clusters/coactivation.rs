//! Co-activation without a matrix: one bit per recorded query and entry.
//!
//! Source: SWARM, section 5.1, step 1. The paper's adjacency matrix `A[i][j]` counts how often entries i and j were
//! activated together. At 32K entries the matrix takes 2 GiB per layer. Here `f(i, j)` is the number of common bits of
//! i and j, which is the same number for every pair. 128 queries take 512 KiB per layer at 32K entries.
//!
//! Equation 2 divides `f(i, j)` by the sum over all pairs `(i, j)`. A query that activates n entries adds `n * n` to
//! that sum, the pairs `(i, i)` included.
//!
//! Invariants:
//! - Entry `e` has bit `q` exactly if query `q` activated it. Queries are numbered in the order of their recording.
//! - `counts[e]` is the number of bits of entry `e`.
//! - The bits are stored in blocks of eight entries, as the kernels expect them. Entries that fill the last block have
//!   no bits.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::BLOCK_ENTRIES;

/// The most queries of a profile.
pub const MAX_PROFILE_QUERIES: usize = 1 << 15;
/// The most entries of a profile.
pub const MAX_PROFILE_ENTRIES: usize = 1 << 30;

/// Which entries each recorded query activated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoActivation {
    entries: usize,
    capacity: usize,
    recorded: usize,
    /// Words of an entry.
    words: usize,
    blocks: Vec<u64>,
    counts: Vec<u32>,
    total: u64,
}

impl CoActivation {
    /// Returns a profile of `entries` entries with room for `queries` queries.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no room for a query, or more than [`MAX_PROFILE_QUERIES`] or
    /// [`MAX_PROFILE_ENTRIES`].
    pub fn new(entries: usize, queries: usize) -> Result<Self> {
        if queries == 0 || queries > MAX_PROFILE_QUERIES || entries > MAX_PROFILE_ENTRIES {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "co-activation: {entries} entries and {queries} queries; a profile has 1 to {MAX_PROFILE_QUERIES} \
                     queries of at most {MAX_PROFILE_ENTRIES} entries"
                ),
            ));
        }
        let words = queries.div_ceil(64);
        let blocks = vec![0; entries.next_multiple_of(BLOCK_ENTRIES) * words];
        Ok(Self { entries, capacity: queries, recorded: 0, words, blocks, counts: vec![0; entries], total: 0 })
    }

    /// Returns the bytes of a profile.
    #[must_use]
    pub fn bytes_for(entries: usize, queries: usize) -> usize {
        let bits = entries.next_multiple_of(BLOCK_ENTRIES).saturating_mul(queries.div_ceil(64) * size_of::<u64>());
        bits.saturating_add(entries.saturating_mul(size_of::<u32>()))
    }

    /// Records the entries that the next query activated.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the profile is full, the entries do not rise, or an entry does not exist.
    /// Nothing changed.
    pub fn record(&mut self, activated: &[u32]) -> Result<()> {
        let refused = |what: String| Err(Error::new(ErrorKind::InvalidArgument, format!("co-activation: {what}")));
        if self.recorded == self.capacity {
            return refused(format!("the profile holds {} queries already, which is its size", self.recorded));
        }
        if !activated.is_sorted_by(|a, b| a < b) {
            return refused("the activated entries do not rise".into());
        }
        if let Some(last) = activated.last().filter(|last| **last as usize >= self.entries) {
            return refused(format!("entry {last} was activated, but there are {} entries", self.entries));
        }
        let (word, bit) = (self.recorded / 64, 1 << (self.recorded % 64));
        for entry in activated {
            let entry = *entry as usize;
            let at = self.word_index(entry, word);
            self.blocks[at] |= bit;
            self.counts[entry] += 1;
        }
        self.recorded += 1;
        self.total += (activated.len() as u64).pow(2);
        Ok(())
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Returns the number of recorded queries.
    #[must_use]
    pub fn queries(&self) -> usize {
        self.recorded
    }

    /// Returns how many queries activated `entry`. It is 0 for an entry that the profile does not have.
    #[must_use]
    pub fn count(&self, entry: u32) -> u32 {
        self.counts.get(entry as usize).copied().unwrap_or(0)
    }

    /// Returns `f(a, b)`: how many queries activated both entries. `f(a, a)` is the count of `a`.
    ///
    /// It is 0 for an entry that the profile does not have.
    #[must_use]
    pub fn common(&self, a: u32, b: u32) -> u32 {
        if a.max(b) as usize >= self.entries {
            return 0;
        }
        let word = |entry: u32, word| self.blocks[self.word_index(entry as usize, word)];
        (0..self.words).map(|at| (word(a, at) & word(b, at)).count_ones()).sum()
    }

    /// Returns the sum of `f(i, j)` over all pairs of entries, the divisor of SWARM's equation 2.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the words of an entry.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Returns the counts of all entries.
    pub(super) fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Returns the bits of all entries in blocks.
    pub(super) fn blocks(&self) -> &[u64] {
        &self.blocks
    }

    /// Writes the words of an entry.
    pub(super) fn copy_words(&self, entry: usize, words: &mut [u64]) {
        words.iter_mut().enumerate().for_each(|(at, word)| *word = self.blocks[self.word_index(entry, at)]);
    }

    fn word_index(&self, entry: usize, word: usize) -> usize {
        (entry / BLOCK_ENTRIES * self.words + word) * BLOCK_ENTRIES + entry % BLOCK_ENTRIES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn recorded(entries: usize, capacity: usize, queries: &[Vec<u32>]) -> CoActivation {
        let mut profile = CoActivation::new(entries, capacity).unwrap();
        for query in queries {
            profile.record(query).unwrap();
        }
        profile
    }

    fn queries(entries: u32) -> impl Strategy<Value = Vec<Vec<u32>>> {
        let query = prop::collection::btree_set(0..entries, 0..entries as usize);
        prop::collection::vec(query.prop_map(|set| set.into_iter().collect()), 0..150)
    }

    proptest! {
        #[test]
        fn common_counts_equal_the_dense_matrix(queries in queries(21)) {
            let profile = recorded(21, 150, &queries);
            let mut matrix = vec![[0_u32; 21]; 21];
            for query in &queries {
                for a in query {
                    query.iter().for_each(|b| matrix[*a as usize][*b as usize] += 1);
                }
            }
            for a in 0..21_u32 {
                prop_assert_eq!(profile.count(a), matrix[a as usize][a as usize]);
                for b in 0..21_u32 {
                    prop_assert_eq!(profile.common(a, b), matrix[a as usize][b as usize]);
                }
            }
            prop_assert_eq!(profile.total(), matrix.iter().flatten().map(|f| u64::from(*f)).sum::<u64>());
            prop_assert_eq!(profile.queries(), queries.len());
        }
    }

    #[test]
    fn wrong_input_is_refused_and_changes_nothing() {
        for (entries, queries) in [(8, 0), (8, MAX_PROFILE_QUERIES + 1), (MAX_PROFILE_ENTRIES + 1, 8)] {
            let error = CoActivation::new(entries, queries).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        let mut profile = recorded(5, 2, &[vec![0, 4]]);
        let before = profile.clone();
        for wrong in [&[5][..], &[3, 1], &[2, 2]] {
            assert_eq!(profile.record(wrong).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(profile, before);
        profile.record(&[]).unwrap();
        assert_eq!(profile.record(&[1]).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(CoActivation::new(0, 1).unwrap().entries(), 0);
    }

    #[test]
    fn bytes_are_known_before_a_profile_is_made() {
        let profile = CoActivation::new(1001, 130).unwrap();
        let found = profile.blocks.capacity() * 8 + profile.counts.capacity() * 4;
        assert_eq!(CoActivation::bytes_for(1001, 130), found);
        assert_eq!(CoActivation::bytes_for(32768, 128), (512 + 128) << 10);
    }
}
