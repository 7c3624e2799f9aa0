//! One manifest generation: its copies, and the batches of it that take effect.

use crate::finding::Sink;
use crate::io::StoreFile;
use stratakv_format::PAGE_BYTES;

/// The number of a generation, and the nonce that seeds the checksums of its batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation {
    pub(crate) number: u64,
    pub(crate) nonce: u64,
}

/// A valid batch, and the copy to read it from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchRef {
    pub(crate) offset: u64,
    pub(crate) pages: u32,
    pub(crate) sequence: u64,
    /// The index in [`Manifest::copies`].
    pub(super) copy: usize,
}

/// A generation whose copies were compared.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) generation: Generation,
    pub(crate) copies: Vec<StoreFile>,
    /// The batches that take effect: complete runs only.
    pub(crate) batches: Vec<BatchRef>,
    /// True if the header has the feature of frame copies.
    pub(crate) replicas: bool,
    /// True if the header has the feature of codecs.
    pub(crate) codecs: bool,
    /// True if the header has the feature of pools.
    pub(crate) pools: bool,
    /// True if every batch that was known durable is present.
    pub(crate) complete: bool,
    /// The bytes of all copies that were compared.
    pub(crate) bytes: u64,
}

impl Manifest {
    /// Reads a batch again. Returns its file and its bytes.
    pub(crate) fn read(&self, batch: &BatchRef, sink: &Sink) -> (&StoreFile, Vec<u8>) {
        let file = &self.copies[batch.copy];
        let mut bytes = vec![0; batch.pages as usize * PAGE_BYTES];
        file.read(batch.offset, &mut bytes, sink);
        (file, bytes)
    }
}
