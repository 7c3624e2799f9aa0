//! Room in the manifest for what there is: a commit that adds to it is refused before the files of the next generation are too
//! small for a checkpoint, so that deletions always find room for their records.

use super::{CommitFailure, Committer, NewGeneration, keep_spare};
use crate::error::{Error, ErrorKind, Result};
use crate::io::seams;
use crate::log::manifest::ManifestLog;
use crate::metrics::lock;
use std::sync::atomic::Ordering;
use stratakv_format::PAGE_BYTES;

impl Committer {
    /// Takes note of how large the files of the manifest are.
    pub(super) fn measure(&self, manifest: &ManifestLog) {
        let (file, spare) = (manifest.shortest(), manifest.shortest_spare());
        // Where no files could be kept, half of one has always been enough.
        self.room.store(file.min(spare).max(file / 2), Ordering::Relaxed);
        self.admitted.store(0, Ordering::Relaxed);
        self.owed_copies.store(manifest.owed(&self.devices), Ordering::Relaxed);
    }

    /// Copies of the manifest that there should be and for which there was no room.
    pub(crate) fn owed_copies(&self) -> u64 {
        self.owed_copies.load(Ordering::Relaxed)
    }

    /// Makes the copies of the manifest that there was no room for, where there is by now.
    ///
    /// # Errors
    /// A write failed midway.
    pub(crate) fn complete_manifest(&self) -> Result<()> {
        if self.owed_copies() == 0 {
            return Ok(());
        }
        self.check()?;
        let mut manifest = lock(&self.manifest);
        if !manifest.may_complete(&self.devices, self.limit(&manifest)) {
            return Ok(());
        }
        match self.checkpoint(&mut manifest, &NewGeneration::for_more()) {
            Ok(()) | Err(CommitFailure::Stalled(_)) => Ok(()),
            Err(CommitFailure::Broken(e)) => {
                lock(&self.broken).get_or_insert_with(|| e.duplicate());
                Err(e)
            }
        }
    }

    /// Bytes that the capacity leaves to the next generation.
    pub(super) fn limit(&self, manifest: &ManifestLog) -> u64 {
        lock(&self.space).allowance(&self.devices).saturating_add(manifest.spare_bytes())
    }

    /// Bytes that a generation must take when `more` bytes of records are added.
    fn needed(&self, more: u64) -> u64 {
        let state = lock(&self.catalog).checkpoint_bytes(self.devices.has_replicas());
        let state = state + self.admitted.load(Ordering::Relaxed) + more;
        // With the padding of batches, as a checkpoint counts it, and room for those that follow.
        let batches = 1 + state / seams::sizes().batch_bytes as u64;
        state + state / 8 + (3 * batches + 4) * PAGE_BYTES as u64
    }

    /// Whether a commit that adds `bytes` of records may be made.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: the manifest has no room for more. Nothing changed.
    pub(crate) fn admit(&self, bytes: u64) -> Result<()> {
        let fits = || self.needed(bytes) <= self.room.load(Ordering::Relaxed);
        if !fits() && !self.enlarge(bytes)? {
            let text = "the manifest has no room for more frames and sequences; delete some or raise the capacity";
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        self.admitted.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Larger files for the manifest, where the capacity allows that. Whether `more` bytes of records fit now.
    fn enlarge(&self, more: u64) -> Result<bool> {
        let mut manifest = lock(&self.manifest);
        let fits = || self.needed(more) <= self.room.load(Ordering::Relaxed);
        // Most of what was admitted is in the catalog by now, or was never committed.
        self.measure(&manifest);
        if fits() {
            return Ok(true);
        }
        let there = manifest.file_bytes() + manifest.spare_bytes();
        let wanted = 2 * manifest.copies() * self.needed(more);
        if wanted.saturating_sub(there) > lock(&self.space).allowance(&self.devices) {
            return Ok(false);
        }
        match self.checkpoint(
            &mut manifest,
            &NewGeneration { room: self.needed(more) / PAGE_BYTES as u64, ..NewGeneration::for_more() },
        ) {
            Ok(()) => Ok(fits()),
            Err(CommitFailure::Stalled(_)) => Ok(false),
            Err(CommitFailure::Broken(e)) => {
                lock(&self.broken).get_or_insert_with(|| e.duplicate());
                Err(e)
            }
        }
    }

    /// Keeps files for the next generation, and measures what there is.
    pub(super) fn spare(&self, manifest: &mut ManifestLog) -> Result<()> {
        let kept = keep_spare(&self.devices, &self.space, manifest);
        self.measure(manifest);
        kept
    }
}
