//! The keys of resident blocks and of clusters, and their hasher.

use std::hash::{BuildHasherDefault, Hasher};

/// The identity of a block, independent of where its frame is stored now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockKey {
    /// The random nonce of the frame that first held the block.
    pub(crate) frame_nonce: u64,
    /// The sequence that wrote the frame.
    pub(crate) origin: u64,
    /// The index of the block's first checksum in the frame.
    pub(crate) checksum: u32,
    pub(crate) layer: u32,
    /// The checksum of the block's first plane. Its seed covers layer, token and length.
    pub(crate) proof: u64,
}

/// The identity of a cluster, while the handle that its selector is attached to is open.
///
/// A cut may renumber the clusters of a selector. A policy then takes a cluster for another one until its next uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClusterKey {
    /// The number of the selector, unique in this process.
    pub(crate) selector: u64,
    pub(crate) layer: u32,
    /// The KV head, or 0 for clusters of all heads.
    pub(crate) list: u32,
    pub(crate) cluster: u32,
}

/// A hasher that mixes words. It is the same in every process, because keys already hold random nonces and checksums.
#[derive(Clone, Copy, Default)]
pub(super) struct WordHasher(u64);

/// The hasher of maps by [`BlockKey`].
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
