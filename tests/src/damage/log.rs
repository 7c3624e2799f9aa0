//! Edits of a store's manifest that keep every checksum valid.

use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::crc_with_hole;
use stratakv_format::manifest::{self as m, Batch, BatchPlace, ManifestPage, Record, encode_batch};
use stratakv_format::superblock::Slot;
use stratakv_format::{PAGE_BYTES, Unverified};

/// The manifest that the superblock names.
pub struct ManifestLog {
    /// The files of its copies.
    pub files: Vec<PathBuf>,
    /// The nonce of the generation.
    pub nonce: u64,
    /// The number of the generation.
    pub generation: u64,
    /// The page and the number of each batch.
    pub batches: Vec<(usize, u64)>,
    /// The first page after the batches.
    pub next_page: usize,
}

impl ManifestLog {
    /// Reads the manifest of a store of one device.
    ///
    /// # Panics
    /// The store has no valid manifest.
    #[must_use]
    pub fn of(dir: &Path) -> Self {
        let superblock = fs::read(dir.join("superblock")).unwrap();
        let slot = Unverified::<Slot>::at_front(&superblock[..PAGE_BYTES], "slot").and_then(|slot| slot.verify(0));
        let slot = slot.unwrap().into_inner();
        let (generation, nonce) = (slot.manifest_generation.get(), slot.manifest_nonce.get());
        let files: Vec<_> = (0..2).map(|copy| dir.join(m::file_name(generation, copy))).collect();
        let bytes = fs::read(&files[0]).unwrap();
        let page = Unverified::<ManifestPage>::at_front(&bytes[..PAGE_BYTES], "page").and_then(|page| page.verify());
        let mut sequence = page.unwrap().into_inner().first_batch.get();
        let (mut batches, mut next_page) = (Vec::new(), 1);
        while let Ok(batch) =
            Batch::verify(&bytes[next_page * PAGE_BYTES..], &BatchPlace { generation, nonce, sequence })
        {
            batches.push((next_page, sequence));
            next_page += batch.header().pages.get() as usize;
            sequence += 1;
        }
        Self { files, nonce, generation, batches, next_page }
    }

    /// Changes every copy.
    ///
    /// # Panics
    /// A copy cannot be read or written.
    pub fn edit(&self, edit: impl Fn(&mut Vec<u8>)) {
        for path in &self.files {
            let mut bytes = fs::read(path).unwrap();
            edit(&mut bytes);
            fs::write(path, bytes).unwrap();
        }
    }

    /// Changes the last batch, which no later batch or superblock calls durable, and updates its checksum.
    ///
    /// # Panics
    /// The manifest has no batch.
    pub fn change_last(&self, change: impl Fn(&mut [u8])) {
        let (page, _) = self.batches[self.batches.len() - 1];
        self.edit(|bytes| {
            let batch = &mut bytes[page * PAGE_BYTES..self.next_page * PAGE_BYTES];
            change(batch);
            let crc = crc_with_hole(&self.nonce.to_le_bytes(), batch, 4..8);
            batch[4..8].copy_from_slice(&crc.to_le_bytes());
        });
    }

    /// Appends a batch to every copy.
    ///
    /// # Panics
    /// The batch is too large.
    pub fn append(&self, records: &[u8], count: u32) {
        let (_, last) = self.batches[self.batches.len() - 1];
        let place = BatchPlace { generation: self.generation, nonce: self.nonce, sequence: last + 1 };
        let batch = encode_batch(&place, last, 1, 0, records, count).unwrap();
        self.edit(|bytes| bytes[self.next_page * PAGE_BYTES..][..batch.len()].copy_from_slice(&batch));
    }

    /// Calls `each` with every record.
    ///
    /// # Panics
    /// A record is damaged.
    pub fn records(&self, each: &mut dyn FnMut(&Record<'_>)) {
        let bytes = fs::read(&self.files[0]).unwrap();
        for &(page, sequence) in &self.batches {
            let place = BatchPlace { generation: self.generation, nonce: self.nonce, sequence };
            let batch = Batch::verify(&bytes[page * PAGE_BYTES..], &place).unwrap();
            batch.records().for_each(|record| each(&record.unwrap()));
        }
    }
}
