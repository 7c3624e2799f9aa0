//! Manifest generations: appending to the current one, and starting the next one with a checkpoint.

use super::failure::CommitFailure;
use super::{Committer, Queued};
use crate::catalog::{Catalog, Counters, RecordBuffer};
use crate::error::{ErrorKind, Result};
use crate::log::devices::{Devices, Failures};
use crate::log::manifest::{ManifestLog, room_for};
use crate::log::segment_allocator::SegmentAllocator;
use crate::metrics::lock;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use stratakv_format::manifest::Kind;

/// How a new generation is made.
#[derive(Clone, Copy)]
pub(super) struct NewGeneration<'a> {
    /// Free pages behind its checkpoint.
    pub(super) room: u64,
    /// Records that its checkpoint already contains.
    pub(super) with: Option<&'a RecordBuffer>,
    /// True if it may take more than the capacity leaves.
    pub(super) beyond: bool,
}

impl NewGeneration<'_> {
    /// A checkpoint of the catalog as it is, with space for the next commits.
    pub(super) fn for_more() -> Self {
        Self { room: room_for(&RecordBuffer::default(), usize::MAX), with: None, beyond: false }
    }
}

/// Keeps files for the next manifest generation, as far as the capacity allows.
pub(crate) fn keep_spare(devices: &Devices, space: &Mutex<SegmentAllocator>, manifest: &mut ManifestLog) -> Result<()> {
    let allowed = {
        let mut space = lock(space);
        space.set_metadata_bytes(manifest.file_bytes(), 0);
        let allowed = space.allowance(devices);
        // Reserves the bytes, so that no segment takes them meanwhile.
        space.set_metadata_bytes(manifest.file_bytes(), manifest.file_bytes().min(allowed));
        allowed
    };
    let kept = manifest.keep_spare(devices, allowed);
    lock(space).set_metadata_bytes(manifest.file_bytes(), manifest.spare_bytes());
    kept
}

impl Committer {
    /// Applies records to the catalog and appends them to the manifest, in a new generation if this one is full.
    ///
    /// The catalog comes first, because records that contradict it must never reach the manifest: replay would fail on
    /// them. Returns the devices that failed. The other devices have the records.
    pub(super) fn append(
        &self,
        mut records: RecordBuffer,
        group: &mut [Queued],
        counted: bool,
    ) -> Result<Failures, CommitFailure> {
        let mut manifest = lock(&self.manifest);
        // The first records of copies or codecs start a generation that says so, so that an older reader stops before
        // them.
        let needed = records.features();
        let first = needed & !self.devices.incompat.fetch_or(needed, Ordering::Relaxed);
        let mut is_recorded = false;
        if first != 0 || !manifest.has_room(&records) {
            let started = self.start_generation(&mut manifest, &records);
            if started.is_err() {
                self.devices.incompat.fetch_and(!first, Ordering::Relaxed);
            }
            is_recorded = started?;
        }
        {
            let mut catalog = lock(&self.catalog);
            records.apply(&mut catalog)?;
            // Pages in flight become live under one lock, so that no reader counts them as neither.
            group.iter_mut().for_each(|queued| queued.request.flights.clear());
            lock(&self.memory).follow(&self.devices, &catalog);
            if counted {
                let counters = Counters { lifetime_bytes: self.lifetime_bytes(), ..catalog.counters };
                records.push(Kind::Counters, &Catalog::counters_record(&counters), &[]);
            }
        }
        if is_recorded {
            return Ok(Failures::default());
        }
        Ok(manifest.append(&self.devices, &records)?)
    }

    /// Starts a generation for records that the current one has no room for. Returns whether its checkpoint contains
    /// them.
    ///
    /// 1. A checkpoint of the catalog, with room for the records.
    /// 2. If the capacity leaves too little: a checkpoint of the catalog after the records. It is smaller when they
    ///    delete.
    /// 3. If that does not fit: the same beyond the capacity. That happens when the capacity was lowered, or when
    ///    commits were admitted too early.
    fn start_generation(&self, manifest: &mut ManifestLog, records: &RecordBuffer) -> Result<bool, CommitFailure> {
        let room = room_for(records, self.devices.environment.sizes().batch_bytes);
        match self.checkpoint(manifest, &NewGeneration { room, ..NewGeneration::for_more() }) {
            Err(CommitFailure::Stalled(_)) => {}
            other => return other.map(|()| false),
        }
        let with = NewGeneration { with: Some(records), ..NewGeneration::for_more() };
        match self.checkpoint(manifest, &with) {
            Err(CommitFailure::Stalled(_)) => self.checkpoint(manifest, &NewGeneration { beyond: true, ..with })?,
            other => other?,
        }
        Ok(true)
    }

    /// Writes a checkpoint as a new generation. Nothing changes until it is complete, so that a full device breaks
    /// nothing.
    pub(super) fn checkpoint(
        &self,
        manifest: &mut ManifestLog,
        wanted: &NewGeneration<'_>,
    ) -> Result<(), CommitFailure> {
        let state = {
            let mut catalog = lock(&self.catalog);
            catalog.counters.lifetime_bytes = self.lifetime_bytes();
            match wanted.with {
                None => catalog.checkpoint(),
                Some(records) => {
                    let mut after = catalog.clone();
                    records.clone().apply(&mut after)?;
                    after.checkpoint()
                }
            }
        };
        let limit = self.limit(manifest);
        let successor = match manifest.successor(&self.devices, &state, wanted.room, (limit, wanted.beyond)) {
            Ok(successor) => successor,
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                manifest.count_spare(&self.devices)?;
                lock(&self.space).set_metadata_bytes(manifest.file_bytes(), manifest.spare_bytes());
                return Err(CommitFailure::Stalled(e.during("checkpoint")));
            }
            // No file was written, because none could be opened.
            Err(e) if e.is_short_of_descriptors() => return Err(CommitFailure::Stalled(e.during("checkpoint"))),
            Err(e) => return Err(CommitFailure::Broken(e)),
        };
        manifest.give_way(&self.devices, successor)?;
        Ok(self.spare(manifest)?)
    }
}
