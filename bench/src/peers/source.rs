//! The blocks that every peer stores, and the code with which every peer consumes them.
//!
//! A block is a stretch of one random buffer. Its first elements hold its number. All elements are finite in f16, so
//! that the engine takes them as keys and values. No compression is possible.

use anyhow::{Result, bail};
use zerocopy::IntoBytes;

/// Elements of a page.
const PAGE: usize = 2048;
/// Elements of the buffer: 4 MiB.
const ELEMENTS: usize = 2 << 20;
/// Bits of a block's number in one element. An f16 below 2 has no more that are free.
const STAMP_BITS: u32 = 14;

/// The source of blocks.
pub(super) struct BlockSource {
    elements: Vec<u16>,
    /// Sums of all words before each page.
    sums: Vec<u64>,
    /// Elements of a block.
    block: usize,
}

impl BlockSource {
    /// Returns a source of blocks of `block` bytes, a multiple of 4 KiB up to 512 KiB.
    pub(super) fn new(block: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(21);
        // The highest bit of the exponent is never set: every element is finite.
        let elements: Vec<u16> = (0..ELEMENTS).map(|_| random.u16(..) & 0xbfff).collect();
        let mut sums = vec![0_u64];
        for page in elements.chunks_exact(PAGE) {
            sums.push(sums.last().copied().unwrap_or_default().wrapping_add(sum(page.as_bytes())));
        }
        Self { elements, sums, block: block / 2 }
    }

    /// Returns the bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.block * 2
    }

    /// Returns the first page of a block.
    fn page(&self, number: u64) -> usize {
        let pages = (self.elements.len() - self.block) / PAGE + 1;
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % pages
    }

    /// Copies a block into two halves: its keys and its values. Either may be empty, if the other holds all of it.
    pub(super) fn fill(&self, number: u64, keys: &mut [u16], values: &mut [u16]) {
        let start = self.page(number) * PAGE;
        let middle = start + keys.len();
        keys.copy_from_slice(&self.elements[start..middle]);
        values.copy_from_slice(&self.elements[middle..middle + values.len()]);
        keys[..2].copy_from_slice(&stamp(number));
    }

    /// Copies whole blocks from `first` on into `out`, one behind the other.
    pub(super) fn fill_all(&self, first: u64, out: &mut [u16]) {
        for (number, block) in (first..).zip(out.chunks_exact_mut(self.block)) {
            self.fill(number, block, &mut []);
        }
    }

    /// Consumes a block that was read: adds up all of its words, in whatever order they come, and compares the sum.
    ///
    /// # Errors
    /// The planes are not those of block `number`.
    pub(super) fn consume(&self, number: u64, planes: &[&[u8]]) -> Result<u64> {
        let (bytes, found) = planes
            .iter()
            .fold((0, 0_u64), |(bytes, total), plane| (bytes + plane.len(), total.wrapping_add(sum(plane))));
        let page = self.page(number);
        let plain = self.sums[page + self.block / PAGE].wrapping_sub(self.sums[page]);
        let first = &self.elements[page * PAGE..page * PAGE + 4];
        let stamped = [&stamp(number)[..], &first[2..]].concat();
        let expected = plain.wrapping_sub(sum(first.as_bytes())).wrapping_add(sum(stamped.as_bytes()));
        if bytes != self.block_bytes() || found != expected {
            bail!("block {number}: {bytes} bytes with sum {found:#x} were read; {} with {expected:#x} were written", {
                self.block_bytes()
            });
        }
        Ok(bytes as u64)
    }
}

/// Returns the first elements of a block.
fn stamp(number: u64) -> [u16; 2] {
    let mask = (1 << STAMP_BITS) - 1;
    [(number & mask) as u16, (number >> STAMP_BITS & mask) as u16]
}

/// Returns the sum of the words of some bytes, modulo 2^64.
fn sum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(0, |sum: u64, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_accepted_in_any_order_of_rows_and_no_other_block_is() {
        let source = BlockSource::new(8192);
        let mut block = vec![0_u16; 4096];
        for number in [0, 1, 77, 20_000] {
            source.fill(number, &mut block, &mut []);
            let bytes = block.as_bytes();
            let (rows, rest) = bytes.split_at(256);
            assert_eq!(source.consume(number, &[rest, rows]).expect("its own bytes"), 8192);
            assert!(source.consume(number + 1, &[bytes]).is_err());
            assert!(source.consume(number, &[rest]).is_err());
            let mut other = bytes.to_vec();
            other[5000] ^= 1;
            assert!(source.consume(number, &[&other]).is_err());
        }
        let (mut keys, mut values) = (vec![0_u16; 2048], vec![0_u16; 2048]);
        source.fill(9, &mut keys, &mut values);
        source.fill(9, &mut block, &mut []);
        assert_eq!([keys, values].concat(), block);
    }
}
