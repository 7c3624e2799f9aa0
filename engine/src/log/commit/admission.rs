//! Admission: whether the manifest has space for the records of a commit.
//!
//! A commit that adds records is refused before the files of the next generation are too small for a checkpoint.
//! Deletions therefore always find space for their records.

use super::Committer;
use super::failure::CommitFailure;
use super::generation::{NewGeneration, keep_spare};
use crate::error::{Error, ErrorKind, Result};
use crate::log::manifest::ManifestLog;
use crate::metrics::lock;
use std::sync::atomic::Ordering;
use stratakv_format::PAGE_BYTES;

impl Committer {
    /// Measures the files of the manifest and starts counting admitted bytes from zero.
    pub(super) fn measure(&self, manifest: &ManifestLog) {
        let (file, spare) = (manifest.shortest(), manifest.shortest_spare());
        // If no spare files could be kept, half of the current file is enough for a checkpoint.
        self.room.store(file.min(spare).max(file / 2), Ordering::Relaxed);
        self.admitted.store(0, Ordering::Relaxed);
        self.owed_copies.store(manifest.owed(&self.devices), Ordering::Relaxed);
    }

    /// Returns how many copies of the manifest are missing because there was no space for them.
    pub(crate) fn owed_copies(&self) -> u64 {
        self.owed_copies.load(Ordering::Relaxed)
    }

    /// Writes the missing copies of the manifest, if there is space by now.
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

    /// Returns the bytes that the capacity leaves to the next generation.
    pub(super) fn limit(&self, manifest: &ManifestLog) -> u64 {
        lock(&self.space).allowance(&self.devices).saturating_add(manifest.spare_bytes())
    }

    /// Returns the bytes of a generation that also holds `more` bytes of records.
    fn needed(&self, more: u64) -> u64 {
        let state = lock(&self.catalog).checkpoint_bytes(self.devices.has_copies());
        let state = state + self.admitted.load(Ordering::Relaxed) + more;
        // Includes the padding of batches, as a checkpoint counts it, and space for the batches that follow.
        let batches = 1 + state / self.devices.environment.sizes().batch_bytes as u64;
        state + state / 8 + (3 * batches + 4) * PAGE_BYTES as u64
    }

    /// Admits a commit that adds `bytes` of records.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: the manifest has no space for them. Nothing changed.
    pub(crate) fn admit(&self, bytes: u64) -> Result<()> {
        let fits = || self.needed(bytes) <= self.room.load(Ordering::Relaxed);
        if !fits() && !self.enlarge(bytes)? {
            let text = "commit: the manifest has no space for more frames and sequences; delete some or raise capacity";
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        self.admitted.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the files of the manifest larger, if the capacity allows it. Returns whether `more` bytes of records fit
    /// now.
    fn enlarge(&self, more: u64) -> Result<bool> {
        let mut manifest = lock(&self.manifest);
        let fits = || self.needed(more) <= self.room.load(Ordering::Relaxed);
        // Most of the admitted records are in the catalog by now, or were never committed.
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
            Err(CommitFailure::Stalled(e)) if e.kind() != ErrorKind::NoSpace => Err(e),
            Err(CommitFailure::Stalled(_)) => Ok(false),
            Err(CommitFailure::Broken(e)) => {
                lock(&self.broken).get_or_insert_with(|| e.duplicate());
                Err(e)
            }
        }
    }

    /// Keeps files for the next generation and measures the files.
    pub(super) fn spare(&self, manifest: &mut ManifestLog) -> Result<()> {
        let kept = keep_spare(&self.devices, &self.space, manifest);
        self.measure(manifest);
        kept
    }
}
