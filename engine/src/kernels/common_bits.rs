//! Counts of common bits of bit sets, for co-activation: an entry has one bit per recorded query.
//!
//! Bit sets are stored in blocks of eight entries: word `w` of entry `e` is at `(e / 8 * words + w) * 8 + e % 8`. A
//! register then holds one word of eight entries. Entries that fill the last block have no bits.
//!
//! A loop ANDs the words of one entry with the words of a block, and adds the population counts. The instance for
//! AVX-512 with VPOPCNTDQ counts eight words with one instruction.

use super::dispatch::multiversion;

/// Entries of a block.
pub(crate) const BLOCK_ENTRIES: usize = 8;

/// Rows that are compared with a block at once.
const ROWS: usize = 4;

/// Adds to `found[row]` the entries of `blocks` that have at least `least[row]` bits in common with the row.
///
/// `rows` is `[found.len(), words]`. `blocks` holds whole blocks.
pub(crate) fn count_within(rows: &[u64], words: usize, blocks: &[u64], least: &[u64], found: &mut [u64]) {
    assert!(words > 0 && rows.len() == words * found.len() && least.len() == found.len(), "shapes of bit sets");
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { x86::count_within(rows, words, blocks, least, found) };
    }
    count_within_widest(rows, words, blocks, least, found);
}

/// Adds to `found[entry]` the other entries of `blocks` that have at least `least` bits in common with the entry.
///
/// Each pair is compared once. `blocks` holds whole blocks, with one element of `found` per entry. `least` is not 0.
pub(crate) fn count_pairs_within(words: usize, blocks: &[u64], least: u64, found: &mut [u64]) {
    assert!(words > 0 && blocks.len() == words * found.len(), "shapes of bit sets");
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { x86::count_pairs_within(words, blocks, least, found) };
    }
    count_pairs_within_widest(words, blocks, least, found);
}

/// Writes the number of common bits of `row` and of each entry of `blocks`.
///
/// `row` has the words of one entry, at most 1023. `common` has one element per entry of the blocks.
pub(crate) fn common_counts(row: &[u64], blocks: &[u64], common: &mut [u16]) {
    assert!(common.len() * row.len() == blocks.len(), "shapes of bit sets");
    assert!((1..1024).contains(&row.len()), "counts fit 16 bits");
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { x86::common_counts(row, blocks, common) };
    }
    common_counts_widest(row, blocks, common);
}

/// Counts of a run.
const RUN: usize = 32;

multiversion! {
    /// Replaces `most` by the largest count of each run of [`RUN`] counts.
    pub(crate) fn largest_counts(common: &[u16], most: &mut Vec<u16>) = largest_of_runs;
}

#[inline(always)]
fn largest_of_runs(common: &[u16], most: &mut Vec<u16>) {
    let (runs, rest) = common.as_chunks::<RUN>();
    most.clear();
    most.extend(runs.iter().map(|run| largest_of_counts(run)));
    if !rest.is_empty() {
        most.push(largest_of_counts(rest));
    }
}

#[inline(always)]
fn largest_of_counts(common: &[u16]) -> u16 {
    common.iter().fold(0, |most, common| if *common > most { *common } else { most })
}

multiversion! {
    /// Adds the index of each element that equals `level` to `found`, in rising order. `most` has the largest count of
    /// each run. Runs without such an element are passed over.
    pub(crate) fn equal_counts(common: &[u16], most: &[u16], level: u16, found: &mut Vec<u32>) = find_equal_counts;
}

#[inline(always)]
fn find_equal_counts(common: &[u16], most: &[u16], level: u16, found: &mut Vec<u32>) {
    for (most, group) in most.chunks(RUN).zip(0..) {
        let mut runs = mask_of(most, |most| most >= level);
        while runs != 0 {
            let first = (group * RUN + runs.trailing_zeros() as usize) * RUN;
            let mut mask = mask_of(&common[first..common.len().min(first + RUN)], |common| common == level);
            while mask != 0 {
                found.push(first as u32 + mask.trailing_zeros());
                mask &= mask - 1;
            }
            runs &= runs - 1;
        }
    }
}

/// Returns a mask of the counts of a run for which `is_set` holds.
#[inline(always)]
fn mask_of(counts: &[u16], is_set: impl Fn(u16) -> bool) -> u32 {
    let mut mask = 0;
    match counts.first_chunk::<RUN>() {
        Some(whole) => (0..RUN).for_each(|i| mask |= u32::from(is_set(whole[i])) << i),
        None => counts.iter().enumerate().for_each(|(i, count)| mask |= u32::from(is_set(*count)) << i),
    }
    mask
}

multiversion! {
    /// [`count_within`] without the instruction for population counts.
    fn count_within_widest(rows: &[u64], words: usize, blocks: &[u64], least: &[u64], found: &mut [u64])
        = count_rows_within;
}

multiversion! {
    /// [`count_pairs_within`] without the instruction for population counts.
    fn count_pairs_within_widest(words: usize, blocks: &[u64], least: u64, found: &mut [u64]) = count_pairs;
}

multiversion! {
    /// [`common_counts`] without the instruction for population counts.
    fn common_counts_widest(row: &[u64], blocks: &[u64], common: &mut [u16]) = common_counts_of_row;
}

#[inline(always)]
fn count_rows_within(rows: &[u64], words: usize, blocks: &[u64], least: &[u64], found: &mut [u64]) {
    match words {
        1 => count_words_within::<1>(rows, blocks, least, found),
        2 => count_words_within::<2>(rows, blocks, least, found),
        4 => count_words_within::<4>(rows, blocks, least, found),
        _ => count_any_within(rows, words, blocks, least, found),
    }
}

/// [`count_within`] for `W` words. Four rows share the loads of a block.
#[inline(always)]
fn count_words_within<const W: usize>(rows: &[u64], blocks: &[u64], least: &[u64], found: &mut [u64]) {
    let (rows, blocks) = (rows.as_chunks::<W>().0, blocks.as_chunks::<BLOCK_ENTRIES>().0.as_chunks::<W>().0);
    let (quads, rest) = rows.as_chunks::<ROWS>();
    let (quads_least, rest_least) = least.as_chunks::<ROWS>();
    let (quads_found, rest_found) = found.as_chunks_mut::<ROWS>();
    for ((rows, least), found) in quads.iter().zip(quads_least).zip(quads_found) {
        let mut hits = [[0_u64; BLOCK_ENTRIES]; ROWS];
        for block in blocks {
            for r in 0..ROWS {
                let common = common_of_block(&rows[r], block);
                for i in 0..BLOCK_ENTRIES {
                    hits[r][i] += u64::from(common[i] >= least[r]);
                }
            }
        }
        for r in 0..ROWS {
            found[r] += hits[r].iter().sum::<u64>();
        }
    }
    for ((row, least), found) in rest.iter().zip(rest_least).zip(rest_found) {
        let mut hits = [0_u64; BLOCK_ENTRIES];
        for block in blocks {
            let common = common_of_block(row, block);
            for i in 0..BLOCK_ENTRIES {
                hits[i] += u64::from(common[i] >= *least);
            }
        }
        *found += hits.iter().sum::<u64>();
    }
}

#[inline(always)]
fn count_pairs(words: usize, blocks: &[u64], least: u64, found: &mut [u64]) {
    let (blocks, found) = (blocks.as_chunks::<BLOCK_ENTRIES>().0, found.as_chunks_mut::<BLOCK_ENTRIES>().0);
    match words {
        1 => count_word_pairs::<1>(blocks.as_chunks().0, least, found),
        2 => count_word_pairs::<2>(blocks.as_chunks().0, least, found),
        4 => count_word_pairs::<4>(blocks.as_chunks().0, least, found),
        _ => count_any_pairs(words, blocks, least, found),
    }
}

/// [`count_pairs_within`] for `W` words. The rows of a block share the loads of the blocks behind it.
#[inline(always)]
fn count_word_pairs<const W: usize>(
    blocks: &[[[u64; BLOCK_ENTRIES]; W]],
    least: u64,
    found: &mut [[u64; BLOCK_ENTRIES]],
) {
    for (at, own) in blocks.iter().enumerate() {
        let rows: [[u64; W]; BLOCK_ENTRIES] = std::array::from_fn(|r| std::array::from_fn(|w| own[w][r]));
        let mut hits = [[0_u64; BLOCK_ENTRIES]; BLOCK_ENTRIES];
        for r in 0..BLOCK_ENTRIES {
            let common = common_of_block(&rows[r], own);
            for i in 0..BLOCK_ENTRIES {
                hits[r][i] = u64::from(common[i] >= least && i != r);
            }
        }
        for (block, found) in blocks[at + 1..].iter().zip(&mut found[at + 1..]) {
            let mut of_block = [0_u64; BLOCK_ENTRIES];
            for r in 0..BLOCK_ENTRIES {
                let common = common_of_block(&rows[r], block);
                for i in 0..BLOCK_ENTRIES {
                    let hit = u64::from(common[i] >= least);
                    hits[r][i] += hit;
                    of_block[i] += hit;
                }
            }
            for i in 0..BLOCK_ENTRIES {
                found[i] += of_block[i];
            }
        }
        found[at].iter_mut().zip(hits).for_each(|(found, hits)| *found += hits.iter().sum::<u64>());
    }
}

#[inline(always)]
fn count_any_pairs(words: usize, blocks: &[[u64; BLOCK_ENTRIES]], least: u64, found: &mut [[u64; BLOCK_ENTRIES]]) {
    let mut row = vec![0; words];
    for (at, own) in blocks.chunks_exact(words).enumerate() {
        for r in 0..BLOCK_ENTRIES {
            row.iter_mut().zip(own).for_each(|(row, word)| *row = word[r]);
            let mut hits = 0;
            for (later, block) in blocks[at * words..].chunks_exact(words).enumerate() {
                let common = common_of_words(&row, block);
                for i in 0..BLOCK_ENTRIES {
                    let hit = u64::from(common[i] >= least && (later > 0 || i != r));
                    hits += hit;
                    found[at + later][i] += if later > 0 { hit } else { 0 };
                }
            }
            found[at][r] += hits;
        }
    }
}

#[inline(always)]
fn count_any_within(rows: &[u64], words: usize, blocks: &[u64], least: &[u64], found: &mut [u64]) {
    let each = blocks.as_chunks::<BLOCK_ENTRIES>().0;
    for ((row, least), found) in rows.chunks_exact(words).zip(least).zip(found) {
        let mut hits = [0_u64; BLOCK_ENTRIES];
        for block in each.chunks_exact(words) {
            let common = common_of_words(row, block);
            for i in 0..BLOCK_ENTRIES {
                hits[i] += u64::from(common[i] >= *least);
            }
        }
        *found += hits.iter().sum::<u64>();
    }
}

#[inline(always)]
fn common_counts_of_row(row: &[u64], blocks: &[u64], common: &mut [u16]) {
    let blocks = blocks.as_chunks::<BLOCK_ENTRIES>().0;
    let common = common.as_chunks_mut::<BLOCK_ENTRIES>().0;
    match row {
        [a] => blocks
            .iter()
            .zip(common)
            .for_each(|(block, out)| *out = common_of_block(&[*a], &[*block]).map(|x| x as u16)),
        [a, b] => {
            let each = blocks.as_chunks::<2>().0.iter().zip(common);
            each.for_each(|(block, out)| *out = common_of_block(&[*a, *b], block).map(|x| x as u16));
        }
        _ => {
            let each = blocks.chunks_exact(row.len()).zip(common);
            each.for_each(|(block, out)| *out = common_of_words(row, block).map(|x| x as u16));
        }
    }
}

#[inline(always)]
fn common_of_block<const W: usize>(row: &[u64; W], block: &[[u64; BLOCK_ENTRIES]; W]) -> [u64; BLOCK_ENTRIES] {
    let mut common = [0_u64; BLOCK_ENTRIES];
    for w in 0..W {
        for i in 0..BLOCK_ENTRIES {
            common[i] += u64::from((row[w] & block[w][i]).count_ones());
        }
    }
    common
}

#[inline(always)]
fn common_of_words(row: &[u64], block: &[[u64; BLOCK_ENTRIES]]) -> [u64; BLOCK_ENTRIES] {
    let mut common = [0_u64; BLOCK_ENTRIES];
    for (row, block) in row.iter().zip(block) {
        for i in 0..BLOCK_ENTRIES {
            common[i] += u64::from((row & block[i]).count_ones());
        }
    }
    common
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::kernels::dispatch::{FeatureSet, has};

    /// Returns whether the processor has the instructions of this module.
    pub(super) fn available() -> bool {
        has(FeatureSet::Avx512Popcount)
    }

    #[target_feature(enable = "avx512f,avx512vpopcntdq")]
    pub(super) fn count_within(rows: &[u64], words: usize, blocks: &[u64], least: &[u64], found: &mut [u64]) {
        super::count_rows_within(rows, words, blocks, least, found);
    }

    #[target_feature(enable = "avx512f,avx512vpopcntdq")]
    pub(super) fn count_pairs_within(words: usize, blocks: &[u64], least: u64, found: &mut [u64]) {
        super::count_pairs(words, blocks, least, found);
    }

    #[target_feature(enable = "avx512f,avx512vpopcntdq")]
    pub(super) fn common_counts(row: &[u64], blocks: &[u64], common: &mut [u16]) {
        super::common_counts_of_row(row, blocks, common);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_instance_agrees_with_counts_bit_by_bit(
            words in 1_usize..6, blocks in 0_usize..9, rows in 0_usize..10, seed in any::<u64>(), least in 0_u64..40,
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let bits: Vec<u64> = (0..blocks * BLOCK_ENTRIES * words).map(|_| random.u64(..)).collect();
            let rows: Vec<u64> = (0..rows * words).map(|_| random.u64(..)).collect();
            let bit = |e: usize, w: usize| bits[(e / BLOCK_ENTRIES * words + w) * BLOCK_ENTRIES + e % BLOCK_ENTRIES];
            let least = vec![least; rows.len() / words];
            let (mut found, mut plain) = (vec![1; least.len()], vec![1; least.len()]);
            count_within(&rows, words, &bits, &least, &mut found);
            count_within_widest(&rows, words, &bits, &least, &mut plain);
            prop_assert_eq!(&found, &plain);
            let row = |e: usize| (0..words).map(|w| bit(e, w)).collect::<Vec<u64>>();
            let entries = blocks * BLOCK_ENTRIES;
            let (mut pairs, mut plain) = (vec![0; entries], vec![0; entries]);
            let fewest = least.first().copied().unwrap_or(20 * words as u64).max(1);
            count_pairs_within(words, &bits, fewest, &mut pairs);
            count_pairs_within_widest(words, &bits, fewest, &mut plain);
            prop_assert_eq!(&pairs, &plain);
            for (e, pairs) in pairs.into_iter().enumerate() {
                let common = |o: usize| row(e).iter().zip(row(o)).map(|(a, b)| u64::from((a & b).count_ones())).sum();
                let others = (0..entries).filter(|o| *o != e).map(common);
                prop_assert_eq!(pairs, others.filter(|common: &u64| *common >= fewest).count() as u64);
            }
            for (r, row) in rows.chunks_exact(words).enumerate() {
                let common = |e| (0..words).map(|w| u64::from((row[w] & bit(e, w)).count_ones())).sum::<u64>();
                let expected: Vec<u64> = (0..blocks * BLOCK_ENTRIES).map(common).collect();
                let (mut counts, mut plain) = (vec![9; expected.len()], vec![9; expected.len()]);
                common_counts(row, &bits, &mut counts);
                common_counts_widest(row, &bits, &mut plain);
                prop_assert!(counts.iter().map(|c| u64::from(*c)).eq(expected.iter().copied()));
                prop_assert_eq!(&counts, &plain);
                let mut most = vec![3];
                largest_counts(&counts, &mut most);
                prop_assert!(counts.chunks(RUN).map(|run| *run.iter().max().unwrap()).eq(most.iter().copied()));
                let mut equal = vec![7];
                equal_counts(&counts, &most, 9, &mut equal);
                let nines = (0..).zip(&expected).filter(|(_, common)| **common == 9).map(|(at, _)| at);
                prop_assert!(equal.into_iter().eq(std::iter::once(7).chain(nines)));
                prop_assert_eq!(found[r], 1 + expected.iter().filter(|c| **c >= least[r]).count() as u64);
            }
        }
    }

    #[test]
    fn equal_counts_are_found_in_any_run() {
        // More than RUN runs, and a part of a run at the end.
        let counts: Vec<u16> = (0..RUN * RUN + 77).map(|at| if at % 41 == 7 { 9 } else { (at % 8) as u16 }).collect();
        for len in [0, 5, RUN, 3 * RUN + 1, RUN * RUN, counts.len()] {
            let (mut most, mut found) = (Vec::new(), Vec::new());
            largest_counts(&counts[..len], &mut most);
            for level in [9, 7, 10] {
                found.clear();
                equal_counts(&counts[..len], &most, level, &mut found);
                let expected = (0..).zip(&counts[..len]).filter(|(_, count)| **count == level).map(|(at, _)| at);
                assert!(found.iter().copied().eq(expected), "{len} counts, level {level}");
            }
        }
    }
}
