//! Writing the manifest: batches on all copies, and checkpoints.

use super::devices::Devices;
use super::random_u64;
use super::unix_ms;
use crate::device::directory::Access;
use crate::device::environment::{self, Event, Mutant, mutated};
use crate::device::file::DeviceFile;
use crate::error::{Error, ErrorKind, Result};
use crate::index::RecordBuffer;
use std::sync::Arc;
use stratakv_format::features::Features;
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, Kind, ManifestPage};
use stratakv_format::superblock::{SLOTS, STATE_OPEN};
use stratakv_format::{DeviceIndex, PAGE_BYTES};
use zerocopy::little_endian::{U16, U64};

/// The most bytes of a manifest, and so of what an open has to replay behind the checkpoint.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Copies of the manifest that the device of this index holds in a store of `devices`.
pub(crate) fn copies_for(index: DeviceIndex, devices: usize) -> u8 {
    match (devices, index.0) {
        (1, _) => 2,
        (_, 0..=2) => 1,
        _ => 0,
    }
}

/// Where a manifest ends, for one that goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ManifestPlace {
    pub(crate) generation: u64,
    pub(crate) nonce: u64,
    /// Sequence number of the next batch.
    pub(crate) next_batch: u64,
    /// The last batch known durable.
    pub(crate) synced_through: u64,
    /// Page of the next batch.
    pub(crate) next_page: u64,
}

/// The manifest in force, open for appending.
pub(crate) struct ManifestLog {
    place: ManifestPlace,
    epoch: u64,
    files: Vec<(DeviceIndex, Arc<DeviceFile>)>,
    file_pages: u64,
}

fn copies(devices: &Devices) -> Vec<(DeviceIndex, u8)> {
    let count = devices.list.len();
    let per_device = |index: DeviceIndex| (0..copies_for(index, count)).map(move |copy| (index, copy));
    devices.list.iter().flat_map(|device| per_device(device.index)).collect()
}

/// Pages that records take at most.
fn pages_of(records: &RecordBuffer) -> u64 {
    records.batches().iter().map(|(bytes, _)| bytes.len() as u64 / PAGE_BYTES as u64 + 2).sum()
}

impl ManifestLog {
    /// Goes on with a manifest that was read to `place`.
    pub(crate) fn resume(devices: &Devices, place: ManifestPlace, epoch: u64) -> Result<Self> {
        let mut files = Vec::new();
        let mut file_pages = u64::MAX;
        for (device, copy) in copies(devices) {
            let name = m::file_name(place.generation, copy);
            let file = devices.get(device)?.directory.open_file(&name, Access::ReadWrite)?;
            file_pages = file_pages.min(file.len()? / PAGE_BYTES as u64);
            files.push((device, file));
        }
        Ok(Self { place, epoch, files, file_pages })
    }

    /// A manifest that was read to `place` and that nothing is appended to.
    pub(crate) fn read_only(place: ManifestPlace, epoch: u64) -> Self {
        Self { place, epoch, files: Vec::new(), file_pages: 0 }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.files.is_empty()
    }

    /// Writes `state` as the first batches of a new generation and makes everything durable, directories too. The
    /// superblocks do not name it yet. `room`: pages that must be left behind the state.
    pub(crate) fn create(
        devices: &Devices,
        generation: u64,
        previous: u64,
        first_batch: u64,
        epoch: u64,
        state: &RecordBuffer,
        room: u64,
    ) -> Result<Self> {
        // One moment for all copies: their headers differ in nothing but the place.
        let (nonce, created) = (random_u64()?, U64::new(unix_ms() / 1000));
        let batches = state.batches();
        let state_bytes: u64 = batches.iter().map(|(bytes, _)| bytes.len() as u64 + 2 * PAGE_BYTES as u64).sum();
        let sizes = environment::sizes();
        let bytes = sizes.manifest_bytes + 2 * state_bytes + room * PAGE_BYTES as u64;
        let bytes = bytes.next_multiple_of(sizes.zero_bytes as u64);
        let mut files = Vec::new();
        for (device, copy) in copies(devices) {
            let directory = &devices.get(device)?.directory;
            let name = m::file_name(generation, copy);
            // What a checkpoint that was cut short left behind.
            match directory.remove_file(&name) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let file = directory.create_file(&name, bytes)?;
            let page = ManifestPage {
                magic: m::MAGIC,
                features: Features::current(),
                store_id: devices.identity.store_id,
                generation: U64::new(generation),
                nonce: U64::new(nonce),
                previous_generation: U64::new(previous),
                first_batch: U64::new(first_batch),
                created_unix_s: created,
                device: U16::new(device.0),
                copy,
                reserved: [0; 5],
            };
            devices.write_all(&[(device, Arc::clone(&file))], 0, &page.encode())?;
            files.push((device, file));
        }
        let zeros = vec![0; sizes.zero_bytes];
        for start in (0..bytes).step_by(sizes.zero_bytes) {
            let skip = if start == 0 { PAGE_BYTES } else { 0 };
            devices.write_all(&files, start + skip as u64, &zeros[skip..])?;
        }
        let place = ManifestPlace {
            generation,
            nonce,
            next_batch: first_batch,
            synced_through: first_batch.saturating_sub(1),
            next_page: 1,
        };
        let mut log = Self { place, epoch, files, file_pages: bytes / PAGE_BYTES as u64 };
        log.write(devices, state, FLAG_CHECKPOINT)?;
        if !mutated(Mutant::CheckpointNotSynced) {
            // New files have extents of their own to be made durable.
            devices.sync_all(log.files.iter().map(|(device, file)| (*device, file)))?;
            log.place.synced_through = log.place.next_batch - 1;
        }
        for device in &devices.list {
            device.directory.sync_dir(m::DIRECTORY)?;
        }
        Ok(log)
    }

    pub(crate) fn place(&self) -> &ManifestPlace {
        &self.place
    }

    /// Bytes of its files.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.files.len() as u64 * self.file_pages * PAGE_BYTES as u64
    }

    /// Whether these records and the end of the generation still fit.
    pub(crate) fn has_room(&self, records: &RecordBuffer) -> bool {
        let pages = pages_of(records);
        let limit = self.file_pages.min(FILE_BYTES_MAX / PAGE_BYTES as u64 + self.file_pages / 2);
        self.place.next_page + pages + 2 <= limit
    }

    /// Appends records, which take effect together, and makes them durable.
    pub(crate) fn append(&mut self, devices: &Devices, records: &RecordBuffer) -> Result<()> {
        self.write(devices, records, 0)?;
        if mutated(Mutant::ManifestSyncSkipped) {
            return Ok(());
        }
        self.sync(devices)
    }

    fn write(&mut self, devices: &Devices, records: &RecordBuffer, flags: u16) -> Result<()> {
        let batches = records.batches();
        let last = batches.len() - 1;
        if last > 0 {
            environment::note(Event::SplitBatches);
        }
        for (index, (records, count)) in batches.into_iter().enumerate() {
            let more = if index < last { FLAG_MORE } else { 0 };
            let place = BatchPlace {
                generation: self.place.generation,
                nonce: self.place.nonce,
                sequence: self.place.next_batch,
            };
            let bytes = m::encode_batch(&place, self.place.synced_through, self.epoch, flags | more, records, count)
                .map_err(|e| Error::new(ErrorKind::Corruption, e.to_string()))?;
            let pages = (bytes.len() / PAGE_BYTES) as u64;
            if self.place.next_page + pages > self.file_pages {
                return Err(Error::new(ErrorKind::NoSpace, "the manifest is full"));
            }
            devices.write_all(&self.files, self.place.next_page * PAGE_BYTES as u64, &bytes)?;
            self.place.next_page += pages;
            self.place.next_batch += 1;
        }
        Ok(())
    }

    fn sync(&mut self, devices: &Devices) -> Result<()> {
        // Both copies of a device were written when the sync begins; where the file system has nothing of its own to write
        // for them, the sync of one flushes the device for both.
        let mut synced: Vec<(DeviceIndex, &Arc<DeviceFile>)> = Vec::new();
        for (device, file) in &self.files {
            let covered = synced.iter().any(|(known, _)| known == device);
            if !covered || !devices.get(*device)?.directory.sync_covers_overwrites() {
                synced.push((*device, file));
            }
        }
        devices.sync_all(synced.into_iter())?;
        self.place.synced_through = self.place.next_batch - 1;
        Ok(())
    }

    /// Ends this generation in favour of a new one that starts with `state`: the new one whole, then the word that it
    /// follows, then the superblocks, then the old files go. The new one has room for `next`.
    pub(crate) fn checkpoint(&mut self, devices: &Devices, state: &RecordBuffer, next: &RecordBuffer) -> Result<()> {
        let room = pages_of(next) + 2;
        environment::note(Event::Checkpoint);
        let old = self.place;
        // One batch is kept for the last record of the old generation.
        let next =
            Self::create(devices, old.generation + 1, old.generation, old.next_batch + 1, self.epoch, state, room)?;
        let mut last = RecordBuffer::default();
        let superseded =
            m::Superseded { generation: U64::new(next.place.generation), nonce: U64::new(next.place.nonce) };
        last.push(Kind::Superseded, &superseded, &[]);
        self.append(devices, &last)?;
        next.name_in_superblocks(devices, STATE_OPEN)?;
        self.files.clear();
        for (device, copy) in copies(devices) {
            let directory = &devices.get(device)?.directory;
            match directory.remove_file(&m::file_name(old.generation, copy)) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        *self = next;
        Ok(())
    }

    /// Names this generation in both slots of every superblock.
    pub(crate) fn name_in_superblocks(&self, devices: &Devices, state: u8) -> Result<()> {
        for _ in 0..SLOTS {
            self.mark(devices, state)?;
        }
        Ok(())
    }

    /// Writes one slot of every superblock.
    pub(crate) fn mark(&self, devices: &Devices, state: u8) -> Result<()> {
        for device in &devices.list {
            device.write_superblock(|slot| {
                slot.epoch = U64::new(self.epoch);
                slot.manifest_generation = U64::new(self.place.generation);
                slot.manifest_nonce = U64::new(self.place.nonce);
                slot.synced_through = U64::new(self.place.synced_through);
                slot.state = state;
            })?;
        }
        Ok(())
    }
}
