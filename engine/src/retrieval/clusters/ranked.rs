//! [`RankedEntries`]: the activated entries by falling number of queries, and which of them are within a radius.
//!
//! Two entries have at most as many common queries as the one with fewer queries. Sorted by queries, the entries that
//! may be within a radius are a prefix, and all others are passed over.
//!
//! Density (SWARM, equation 4) is the number of other entries within the radius of an entry. It is computed by tiles:
//! each tile of entries stays in the cache while all rows are compared with it, by AND and population count.
//!
//! Invariants:
//! - Ranks are sorted by falling number of queries, ties by age. Each entry that some query activated has a rank.
//! - Rank `r` has the bits that entry `entries[r]` has in the profile.

use super::closeness::{ClusterRadius, Normalisation};
use super::coactivation::CoActivation;
use crate::kernels::{BLOCK_ENTRIES, common_counts, count_pairs_within, count_within, equal_counts, largest_counts};

/// Blocks of a tile: 16 KiB for 128 queries.
const TILE_BLOCKS: usize = 128;

/// The common queries of one rank with others, and the ranks found among them.
#[derive(Clone, Debug, Default)]
pub(super) struct NeighbourScan {
    row: Vec<u64>,
    /// The common queries with the first ranks. All others have fewer than the search asked for.
    common: Vec<u16>,
    /// The largest count of each run of them.
    most: Vec<u16>,
    level: Vec<u32>,
}

impl NeighbourScan {
    /// Calls `found` with each other rank that has `common` queries in common, in rising order.
    pub(super) fn for_each_with(&mut self, common: u16, mut found: impl FnMut(u32)) {
        self.level.clear();
        equal_counts(&self.common, &self.most, common, &mut self.level);
        self.level.iter().for_each(|rank| found(*rank));
    }
}

/// The activated entries of a profile, by falling number of queries.
#[derive(Clone, Debug)]
pub(super) struct RankedEntries {
    words: usize,
    entries: Vec<u32>,
    counts: Vec<u32>,
    blocks: Vec<u64>,
}

impl RankedEntries {
    /// Ranks the entries of a profile that some query activated.
    pub(super) fn new(profile: &CoActivation) -> Self {
        let words = profile.words();
        let mut entries: Vec<u32> = (0..profile.entries() as u32).filter(|entry| profile.count(*entry) > 0).collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(profile.count(*entry)));
        let counts = entries.iter().map(|entry| profile.count(*entry)).collect();
        let mut blocks = vec![0; entries.len().next_multiple_of(BLOCK_ENTRIES) * words];
        let mut row = vec![0; words];
        for (rank, entry) in entries.iter().enumerate() {
            profile.copy_words(*entry as usize, &mut row);
            for (word, bits) in row.iter().enumerate() {
                blocks[(rank / BLOCK_ENTRIES * words + word) * BLOCK_ENTRIES + rank % BLOCK_ENTRIES] = *bits;
            }
        }
        Self { words, entries, counts, blocks }
    }

    /// Returns the bytes for at most `entries` entries, the scratch of [`Self::densities`] included.
    pub(super) fn bytes_for(entries: usize, queries: usize) -> usize {
        CoActivation::bytes_for(entries, queries).saturating_add(entries.saturating_mul(4 + 2 * size_of::<u64>()))
    }

    /// Returns the number of ranks.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the words of a rank.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Returns the entry of a rank.
    pub(super) fn entry(&self, rank: usize) -> u32 {
        self.entries[rank]
    }

    /// Returns the number of queries that activated the entry of a rank.
    pub(super) fn count(&self, rank: usize) -> u32 {
        self.counts[rank]
    }

    /// Writes the words of a rank.
    pub(super) fn copy_words(&self, rank: usize, words: &mut [u64]) {
        let first = rank / BLOCK_ENTRIES * self.words * BLOCK_ENTRIES + rank % BLOCK_ENTRIES;
        words.iter_mut().enumerate().for_each(|(at, word)| *word = self.blocks[first + at * BLOCK_ENTRIES]);
    }

    /// Returns the number of ranks with at least `least` queries. They are the first ranks.
    fn with_at_least(&self, least: u64) -> usize {
        self.counts.partition_point(|count| u64::from(*count) >= least)
    }

    /// Returns whether every density is the same for both radii.
    pub(super) fn has_equal_densities(normalisation: Normalisation, a: ClusterRadius, b: ClusterRadius) -> bool {
        let least = |radius: ClusterRadius| normalisation.least_common(radius.threshold(), 1, 1);
        normalisation == Normalisation::Frequency && least(a) == least(b)
    }

    /// Returns the density of each rank: how many other entries are within the radius.
    pub(super) fn densities(&self, normalisation: Normalisation, radius: ClusterRadius) -> Vec<u64> {
        match normalisation {
            Normalisation::Frequency => self.densities_by_pairs(radius),
            Normalisation::Conditional => self.densities_by_count(normalisation, radius),
            Normalisation::Jaccard => self.densities_by_ratio(normalisation, radius),
        }
    }

    /// Returns the densities if the least common count is the same for all entries.
    fn densities_by_pairs(&self, radius: ClusterRadius) -> Vec<u64> {
        let least = Normalisation::Frequency.least_common(radius.threshold(), 1, 1);
        let entries = self.with_at_least(least).next_multiple_of(BLOCK_ENTRIES);
        let mut found = vec![0; entries];
        count_pairs_within(self.words, &self.blocks[..entries * self.words], least, &mut found);
        found.resize(self.len(), 0);
        found
    }

    /// Returns the densities if the least common count depends on the entry alone, not on its neighbour.
    fn densities_by_count(&self, normalisation: Normalisation, radius: ClusterRadius) -> Vec<u64> {
        let least = |count: &u32| normalisation.least_common(radius.threshold(), *count, *count);
        let least: Vec<u64> = self.counts.iter().map(least).collect();
        let mut found = vec![0; self.len()];
        // A rank with fewer queries than it needs is not within its own radius and has no neighbour.
        let is_dense = |rank: usize| u64::from(self.counts[rank]) >= least[rank];
        let rows = (0..self.len()).rposition(is_dense).map_or(0, |last| last + 1);
        let mut words = vec![0; rows * self.words];
        words.chunks_exact_mut(self.words).enumerate().for_each(|(rank, words)| self.copy_words(rank, words));
        let fewest = least[..rows].iter().copied().min().unwrap_or(u64::MAX);
        let others = self.with_at_least(fewest).next_multiple_of(BLOCK_ENTRIES) * self.words;
        for tile in self.blocks[..others].chunks(TILE_BLOCKS * self.words * BLOCK_ENTRIES) {
            count_within(&words, self.words, tile, &least[..rows], &mut found[..rows]);
        }
        (0..rows).for_each(|rank| found[rank] -= u64::from(is_dense(rank)));
        found
    }

    /// Returns the densities if the least common count depends on both entries.
    fn densities_by_ratio(&self, normalisation: Normalisation, radius: ClusterRadius) -> Vec<u64> {
        let mut scan = NeighbourScan::default();
        let density = |rank| {
            let mut density = 0;
            for common in self.scan(normalisation, radius, rank, &mut scan) {
                scan.for_each_with(common, |other| {
                    let closeness = self.closeness(normalisation, common, rank, other as usize);
                    density += u64::from(closeness > radius.threshold());
                });
            }
            density
        };
        (0..self.len()).map(density).collect()
    }

    /// Returns the closeness of rank `other` to rank `member`, which have `common` queries in common.
    pub(super) fn closeness(&self, normalisation: Normalisation, common: u16, member: usize, other: usize) -> u64 {
        normalisation.closeness(u32::from(common), self.counts[member], self.counts[other])
    }

    /// Counts the common queries of a rank with all others. Returns the common counts that neighbours may have.
    ///
    /// The rank itself has none. Every other rank within the radius has a common count of the range. For
    /// [`Normalisation::Jaccard`] the range is wider than the radius.
    pub(super) fn scan(
        &self,
        normalisation: Normalisation,
        radius: ClusterRadius,
        rank: usize,
        scan: &mut NeighbourScan,
    ) -> impl Iterator<Item = u16> + use<> {
        let (threshold, count) = (radius.threshold(), self.counts[rank]);
        let fewest = match normalisation {
            Normalisation::Frequency | Normalisation::Conditional => {
                normalisation.least_common(threshold, count, count)
            }
            // The least count is that with a neighbour of a single query.
            Normalisation::Jaccard => normalisation.least_common(threshold, count, 1),
        };
        let others = if fewest > u64::from(count) { 0 } else { self.with_at_least(fewest) };
        scan.row.resize(self.words, 0);
        self.copy_words(rank, &mut scan.row);
        scan.common.resize(others.next_multiple_of(BLOCK_ENTRIES), 0);
        common_counts(&scan.row, &self.blocks[..scan.common.len() * self.words], &mut scan.common);
        if let Some(own) = scan.common.get_mut(rank) {
            *own = 0;
        }
        let fewest = fewest.min(u64::from(u16::MAX)) as u16;
        largest_counts(&scan.common, &mut scan.most);
        (fewest..=scan.most.iter().copied().max().unwrap_or(0)).rev()
    }
}

/// Writes the number of queries that each entry of a profile has in common with one entry. Entries that fill the last
/// block follow.
pub(super) fn common_with_all(profile: &CoActivation, entry: u32, common: &mut Vec<u16>) {
    let mut row = vec![0; profile.words()];
    profile.copy_words(entry as usize, &mut row);
    common.resize(profile.entries().next_multiple_of(BLOCK_ENTRIES), 0);
    common_counts(&row, profile.blocks(), common);
}
