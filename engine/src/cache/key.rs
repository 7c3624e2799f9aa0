//! What a resident block is called.

use std::hash::{BuildHasherDefault, Hasher};

/// A block, wherever it lies: the frame that first held it, by its random nonce and origin, and the place of its checksums
/// in the frame. `proof` is the checksum of its first plane, which is seeded with layer, token and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockKey {
    pub(crate) frame_nonce: u64,
    pub(crate) origin: u64,
    pub(crate) checksum: u32,
    pub(crate) layer: u32,
    pub(crate) proof: u64,
}

/// Mixes words; keys hold random nonces and checksums already. The same in every process.
#[derive(Clone, Copy, Default)]
pub(super) struct WordHasher(u64);

/// For maps by [`BlockKey`].
pub(super) type WordHash = BuildHasherDefault<WordHasher>;

impl WordHasher {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(29) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for WordHasher {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.add(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.add(word as u64);
    }
}
