//! Writing the manifest: batches on all copies, and checkpoints.
//!
//! A generation is a set of equal files, one per copy. It begins with a checkpoint and takes batches until it is full:
//!
//! 1. [`ManifestLog::append`] writes a batch to every copy and syncs them.
//! 2. [`ManifestLog::successor`] writes the next generation beside this one.
//! 3. [`ManifestLog::give_way`] records that this generation is superseded, names the next one in every superblock, and
//!    keeps the old files for the generation after it.
//!
//! Invariants:
//! - All copies hold the same bytes except for the device and copy number in their first page.
//! - A device that failed takes nothing more. The others go on without it.
//! - Until `give_way`, a new generation changes nothing: a full device breaks nothing.
//! - Spare files are kept, so that a checkpoint finds space on a full device.
//! - Superblocks get a new membership epoch only if every member gets it.
//!
//! The committer holds the manifest's lock around every call.

mod files;

pub(crate) use files::{GenerationStart, bytes_without_data, copies_for};

use super::device::Device;
use super::devices::{Devices, Failures};
use crate::catalog::RecordBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::Access;
use crate::io::planted;
use files::{affordable, copies, half, kept_bytes, pages_of, room_for_copy, sizes_of_copies, take_file, take_spare};
use std::collections::BTreeSet;
use std::sync::Arc;
use stratakv_format::error::FormatError;
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, Kind, ManifestPage};
use stratakv_format::superblock::{SLOTS, STATE_OPEN};
use stratakv_format::{DeviceIndex, PAGE_BYTES};
use zerocopy::little_endian::{U16, U64};

/// Bytes of a manifest file from which on a new generation starts. It limits what an open must replay.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Where a manifest ends, so that appending can continue there.
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

/// The current manifest, open for appending.
pub(crate) struct ManifestLog {
    place: ManifestPlace,
    epoch: u64,
    /// The membership epoch that superblocks get with the next generation.
    next_epoch: u64,
    /// Bytes of records of one batch, at most.
    batch_bytes: usize,
    files: Vec<(DeviceIndex, Arc<DeviceFile>)>,
    /// The copies that these files are.
    held: Vec<(DeviceIndex, u8)>,
    /// Devices that failed or leave, although the members still have them. Nothing is written to them.
    gone: BTreeSet<DeviceIndex>,
    /// Pages of the shortest file.
    file_pages: u64,
    /// Bytes of all files.
    bytes: u64,
    /// Bytes of the files kept for the next generation, under its name.
    spare_bytes: u64,
    /// Bytes of the shortest spare file, or 0 if a copy has none.
    shortest_spare: u64,
}

/// The file of a copy of a new generation.
type CopyFile = (DeviceIndex, u8, Arc<DeviceFile>);

/// Fills files of `bytes` bytes with zeros behind their first page, so that a torn batch is followed by zeros.
fn write_zeros(devices: &Devices, files: &[(DeviceIndex, Arc<DeviceFile>)], bytes: u64) -> Result<()> {
    let zeros = vec![0; devices.environment.sizes().zero_bytes];
    for start in (0..bytes).step_by(zeros.len()) {
        let skip = if start == 0 { PAGE_BYTES } else { 0 };
        let end = zeros.len().min((bytes - start) as usize);
        if skip < end {
            devices.write_all(files, start + skip as u64, &zeros[skip..end])?;
        }
    }
    Ok(())
}

/// Returns the error for records that no reader would accept.
fn unwritable(e: FormatError) -> Error {
    Error::new(ErrorKind::Corruption, format!("append to the manifest: {e}"))
}

/// Returns the first failure as an error.
fn all_well(failures: Failures) -> Result<()> {
    failures.into_values().next().map_or(Ok(()), Err)
}

/// Returns the pages that must be free to append `records`: with one for the counters and one for the generation's last
/// record.
pub(super) fn room_for(records: &RecordBuffer, batch_bytes: usize) -> u64 {
    pages_of(records, batch_bytes) + 2
}

impl ManifestLog {
    /// Opens a manifest that was replayed up to `place` for appending.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: no device has a file of it. Or a file cannot be opened.
    pub(crate) fn resume(devices: &Devices, place: ManifestPlace, epoch: u64) -> Result<Self> {
        let mut log = Self::read_only(place, epoch, devices.environment.sizes().batch_bytes);
        log.file_pages = u64::MAX;
        for (device, copy) in copies(devices, &log.gone) {
            let name = m::file_name(place.generation, copy);
            let file = match devices.get(device)?.directory.open_file(&name, Access::ReadWrite) {
                // There was no space for this copy. No superblock counts on it, because the manifest would not be
                // resumed then.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                other => other?,
            };
            let len = file.len()?;
            log.file_pages = log.file_pages.min(len / PAGE_BYTES as u64);
            log.bytes += len;
            log.files.push((device, file));
            log.held.push((device, copy));
        }
        if log.files.is_empty() {
            return Err(Error::new(
                ErrorKind::Corruption,
                "open: no device holds a file of the manifest that was replayed",
            ));
        }
        Ok(log)
    }

    /// Returns a manifest that was replayed up to `place` and that nothing is appended to.
    pub(crate) fn read_only(place: ManifestPlace, epoch: u64, batch_bytes: usize) -> Self {
        Self {
            batch_bytes,
            place,
            epoch,
            next_epoch: epoch,
            files: Vec::new(),
            held: Vec::new(),
            gone: BTreeSet::new(),
            file_pages: 0,
            bytes: 0,
            spare_bytes: 0,
            shortest_spare: 0,
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.files.is_empty()
    }

    /// Writes `state` as the checkpoint of a new generation and makes it durable, with its directories.
    ///
    /// The superblocks do not name it yet. Copies that the previous generation does not have are made only if there is
    /// space.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: the devices or the capacity have too little space. Or a write fails.
    pub(crate) fn create(devices: &Devices, start: &GenerationStart, state: &RecordBuffer) -> Result<Self> {
        let all = copies(devices, &start.gone);
        let (_, least) = start.sizes(state, &devices.environment.sizes());
        let possible = affordable(devices, &all, start.previous, Some((least, start.half())))?;
        let made = Self::create_copies(devices, start, state, &possible);
        let least = affordable(devices, &all, start.previous, None)?;
        if least.len() == possible.len() || !made.as_ref().is_err_and(|e| e.kind() == ErrorKind::NoSpace) {
            return made;
        }
        for (device, copy) in possible.iter().filter(|copy| !least.contains(copy)) {
            match devices.get(*device)?.directory.remove_file(&m::file_name(start.generation, *copy)) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Self::create_copies(devices, start, state, &least)
    }

    fn create_copies(
        devices: &Devices,
        start: &GenerationStart,
        state: &RecordBuffer,
        copies: &[(DeviceIndex, u8)],
    ) -> Result<Self> {
        let &GenerationStart { generation, first_batch, epoch, .. } = start;
        // One nonce and time for all copies, because their headers differ only in device and copy number.
        let (nonce, created_unix_s) = (devices.environment.random_u64()?, devices.environment.unix_ms() / 1000);
        let (wanted, least) = Self::file_sizes(devices, start, state, copies)?;
        let (files, bytes, all_bytes) = Self::take_files(devices, generation, copies, (wanted, least))?;
        Self::write_first_pages(devices, start, (nonce, created_unix_s), &files)?;
        let files: Vec<_> = files.into_iter().map(|(device, _, file)| (device, file)).collect();
        write_zeros(devices, &files, bytes)?;
        let place = ManifestPlace {
            generation,
            nonce,
            next_batch: first_batch,
            synced_through: first_batch.saturating_sub(1),
            next_page: 1,
        };
        let file_pages = bytes / PAGE_BYTES as u64;
        let (held, gone) = (copies.to_vec(), start.gone.clone());
        let mut log = Self {
            files,
            held,
            gone,
            file_pages,
            bytes: all_bytes,
            ..Self::read_only(place, epoch, devices.environment.sizes().batch_bytes)
        };
        all_well(log.write(devices, state, FLAG_CHECKPOINT)?)?;
        if !planted!(CheckpointNotSynced) {
            // Every file is synced, because new files have extents of their own to make durable.
            devices.sync_all(log.files.iter().map(|(device, file)| (*device, file)))?;
            log.place.synced_through = log.place.next_batch - 1;
        }
        for device in log.written(devices) {
            device.directory.sync_dir(m::DIRECTORY)?;
        }
        Ok(log)
    }

    /// Returns the bytes that each file should have, and must have at least.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: the checkpoint is larger than a manifest may be, or larger than the capacity allows.
    fn file_sizes(
        devices: &Devices,
        start: &GenerationStart,
        state: &RecordBuffer,
        copies: &[(DeviceIndex, u8)],
    ) -> Result<(u64, u64)> {
        let &GenerationStart { generation, previous, limit, beyond, .. } = start;
        let (mut wanted, least) = start.sizes(state, &devices.environment.sizes());
        for &(device, copy) in copies {
            let directory = &*devices.get(device)?.directory;
            if previous > 0 && kept_bytes(directory, &m::file_name(previous, copy))? == 0 {
                wanted = wanted.min(room_for_copy(directory, generation, copy)?).max(least);
            }
        }
        if least > m::FILE_BYTES_MAX {
            let text = format!("checkpoint: it takes {least} bytes of {} at most; delete sequences", m::FILE_BYTES_MAX);
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        let (wanted, too_much) =
            sizes_of_copies(devices, (copies, generation), (wanted, least), (limit, start.half()))?;
        if too_much && !beyond {
            let text = format!(
                "checkpoint: capacity leaves {limit} bytes for a manifest of {least} bytes per copy; raise capacity"
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        if too_much {
            // Without it no deletion could be recorded, and the store could not be opened.
            coverage!(CapacityExceeded);
        }
        Ok((wanted, least))
    }

    /// Takes a file for each copy, of `wanted` bytes or at least `least`. Returns them, the bytes of the shortest in
    /// whole pages, and the bytes of all.
    ///
    /// The first copies may take the space of the last one on a full device. Then all files get `least` bytes, after
    /// larger spare files were removed.
    fn take_files(
        devices: &Devices,
        generation: u64,
        copies: &[(DeviceIndex, u8)],
        (wanted, least): (u64, u64),
    ) -> Result<(Vec<CopyFile>, u64, u64)> {
        match Self::take_files_of(devices, generation, copies, (wanted, least)) {
            Err(e) if e.kind() == ErrorKind::NoSpace && least < wanted => {}
            taken => return taken,
        }
        for (device, copy) in copies {
            let (directory, name) = (&*devices.get(*device)?.directory, m::file_name(generation, *copy));
            if kept_bytes(directory, &name)? > least {
                directory.remove_file(&name)?;
            }
        }
        Self::take_files_of(devices, generation, copies, (least, least))
    }

    fn take_files_of(
        devices: &Devices,
        generation: u64,
        copies: &[(DeviceIndex, u8)],
        (wanted, least): (u64, u64),
    ) -> Result<(Vec<CopyFile>, u64, u64)> {
        let mut files = Vec::new();
        let (mut bytes, mut all_bytes) = (u64::MAX, 0);
        for &(device, copy) in copies {
            let directory = &devices.get(device)?.directory;
            let (file, len) = take_file(&**directory, &m::file_name(generation, copy), wanted, least)?;
            bytes = bytes.min(len / PAGE_BYTES as u64 * PAGE_BYTES as u64);
            all_bytes += len;
            files.push((device, copy, file));
        }
        Ok((files, bytes, all_bytes))
    }

    /// Writes the first page of each file.
    fn write_first_pages(
        devices: &Devices,
        start: &GenerationStart,
        (nonce, created_unix_s): (u64, u64),
        files: &[CopyFile],
    ) -> Result<()> {
        for (device, copy, file) in files {
            let page = ManifestPage {
                magic: m::MAGIC,
                features: devices.features(),
                store_id: devices.identity.store_id,
                generation: U64::new(start.generation),
                nonce: U64::new(nonce),
                previous_generation: U64::new(start.previous),
                first_batch: U64::new(start.first_batch),
                created_unix_s: U64::new(created_unix_s),
                device: U16::new(device.0),
                copy: *copy,
                reserved: [0; 5],
            };
            devices.write_all(&[(*device, Arc::clone(file))], 0, &page.encode())?;
        }
        Ok(())
    }

    /// Returns where it ends.
    pub(crate) fn place(&self) -> &ManifestPlace {
        &self.place
    }

    /// Returns the devices that are written to.
    fn written<'a>(&'a self, devices: &'a Devices) -> impl Iterator<Item = &'a Device> {
        devices.list.iter().filter(|device| !device.is_lost() && !self.gone.contains(&device.index))
    }

    /// Returns how many copies exist.
    pub(crate) fn copies(&self) -> u64 {
        self.held.len() as u64
    }

    /// Returns how many copies are missing because there was no space for them.
    pub(crate) fn owed(&self, devices: &Devices) -> u64 {
        if self.is_read_only() {
            return 0;
        }
        let missing = |copy: &(DeviceIndex, u8)| !self.held.contains(copy);
        copies(devices, &self.gone).iter().filter(|copy| missing(copy)).count() as u64
    }

    /// Returns whether a missing copy and its successor would find space. `limit` is what the capacity leaves to the
    /// next generation, in bytes.
    pub(crate) fn may_complete(&self, devices: &Devices, limit: u64) -> bool {
        let (all, place) = (copies(devices, &self.gone), self.place.generation);
        let bytes = self.shortest();
        affordable(devices, &all, place, Some((bytes, half(limit, self.bytes))))
            .is_ok_and(|possible| possible.len() > self.held.len())
    }

    /// Returns the bytes of its shortest file.
    pub(crate) fn shortest(&self) -> u64 {
        self.file_pages * PAGE_BYTES as u64
    }

    /// Returns the bytes of the shortest spare file, or 0 if a copy has none.
    pub(crate) fn shortest_spare(&self) -> u64 {
        self.shortest_spare
    }

    /// Returns the bytes of its files.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of the spare files.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.spare_bytes
    }

    /// Keeps spare files for the next generation, as large as the files of this one, within `allowed` bytes.
    ///
    /// A device that is too full gives what it has.
    pub(crate) fn keep_spare(&mut self, devices: &Devices, allowed: u64) -> Result<()> {
        let len = self.shortest();
        let mut files = Vec::new();
        for &(device, copy) in &self.held {
            let (directory, name) = (&*devices.get(device)?.directory, m::file_name(self.place.generation + 1, copy));
            files.push((directory, kept_bytes(directory, &name)?, name));
        }
        let mut more = allowed.saturating_sub(files.iter().map(|(_, there, _)| there).sum());
        let mut kept = Vec::new();
        for (directory, there, name) in files {
            let grows = len.saturating_sub(there);
            let wanted = if grows <= more { there.max(len) } else { there };
            more -= if grows <= more { grows } else { 0 };
            if wanted == 0 {
                kept.push(0);
                continue;
            }
            let taken = take_spare(directory, &name, wanted)?;
            if let Some((file, _)) = taken.as_ref().filter(|(_, len)| *len != there) {
                directory.sync_small(file)?;
            }
            kept.push(taken.map_or(there, |(_, len)| len));
            directory.sync_dir(m::DIRECTORY)?;
        }
        self.set_spare(&kept);
        Ok(())
    }

    /// Counts the spare files again, after a failed successor may have created or grown them.
    pub(crate) fn count_spare(&mut self, devices: &Devices) -> Result<()> {
        let mut kept = Vec::new();
        for &(device, copy) in &self.held {
            let name = m::file_name(self.place.generation + 1, copy);
            kept.push(kept_bytes(&*devices.get(device)?.directory, &name)?);
        }
        self.set_spare(&kept);
        Ok(())
    }

    fn set_spare(&mut self, kept: &[u64]) {
        (self.spare_bytes, self.shortest_spare) = (kept.iter().sum(), kept.iter().copied().min().unwrap_or(0));
    }

    /// Returns whether these records and the generation's last record still fit.
    pub(crate) fn has_room(&self, records: &RecordBuffer) -> bool {
        let limit = self.file_pages.min(FILE_BYTES_MAX / PAGE_BYTES as u64 + self.file_pages / 2);
        self.place.next_page + room_for(records, self.batch_bytes) <= limit
    }

    /// Appends records, which take effect together, and makes them durable.
    ///
    /// Returns the devices that failed. Later records go to the other devices alone.
    ///
    /// # Errors
    /// No copy has the records.
    pub(crate) fn append(&mut self, devices: &Devices, records: &RecordBuffer) -> Result<Failures> {
        let mut failures = self.write(devices, records, 0)?;
        if !planted!(ManifestSyncSkipped) && !self.files.is_empty() {
            failures.extend(self.sync(devices)?);
        }
        match self.files.is_empty() {
            false => Ok(failures),
            true => Err(failures
                .into_values()
                .next()
                .unwrap_or_else(|| Error::new(ErrorKind::Io, "append to the manifest: no copy is left"))),
        }
    }

    /// Stops writing to the copies on these devices.
    fn drop_failed(&mut self, failures: &Failures) {
        self.gone.extend(failures.keys());
        self.drop_gone();
    }

    fn drop_gone(&mut self) {
        self.files.retain(|(device, _)| !self.gone.contains(device));
        self.held.retain(|(device, _)| !self.gone.contains(device));
    }

    /// Writes records as batches of equal effect: all of them count, or none.
    fn write(&mut self, devices: &Devices, records: &RecordBuffer, flags: u16) -> Result<Failures> {
        let mut failures = Failures::new();
        let batches = records.batches(self.batch_bytes);
        let last = batches.len() - 1;
        if last > 0 {
            coverage!(SplitBatches);
        }
        for (index, (records, count)) in batches.into_iter().enumerate() {
            let more = if index < last { FLAG_MORE } else { 0 };
            let place = BatchPlace {
                generation: self.place.generation,
                nonce: self.place.nonce,
                sequence: self.place.next_batch,
            };
            let bytes = m::encode_batch(&place, self.place.synced_through, self.epoch, flags | more, records, count)
                .map_err(unwritable)?;
            // A number that has reached its limit is not written, because no reader accepts it.
            m::Records::new(records, count).find_map(Result::err).map_or(Ok(()), |e| Err(unwritable(e)))?;
            let pages = (bytes.len() / PAGE_BYTES) as u64;
            if self.place.next_page + pages > self.file_pages {
                return Err(Error::new(ErrorKind::NoSpace, "append to the manifest: it is full"));
            }
            let failed = devices.write_each(&self.files, self.place.next_page * PAGE_BYTES as u64, &bytes)?;
            self.drop_failed(&failed);
            failures.extend(failed);
            self.place.next_page += pages;
            self.place.next_batch += 1;
        }
        Ok(failures)
    }

    /// Syncs every copy. Returns the devices that failed.
    fn sync(&mut self, devices: &Devices) -> Result<Failures> {
        // Both copies of a device are written before the sync. If the file system has no metadata of its own to write
        // for them, the sync of one file flushes the device for both.
        let mut synced: Vec<(DeviceIndex, &Arc<DeviceFile>)> = Vec::new();
        for (device, file) in &self.files {
            let covered = synced.iter().any(|(known, _)| known == device);
            if !covered || !devices.get(*device)?.directory.sync_covers_overwrites() {
                synced.push((*device, file));
            }
        }
        let failures = devices.sync_each(synced.into_iter());
        self.drop_failed(&failures);
        self.place.synced_through = self.place.next_batch - 1;
        Ok(failures)
    }

    /// Writes the next generation: `state` as its checkpoint, and `room` free pages. [`Self::give_way`] puts it in
    /// force.
    ///
    /// # Errors
    /// As [`Self::create`]. Nothing changed then.
    pub(crate) fn successor(
        &self,
        devices: &Devices,
        state: &RecordBuffer,
        room: u64,
        (limit, beyond): (u64, bool),
    ) -> Result<Self> {
        coverage!(Checkpoint);
        let start = GenerationStart {
            generation: self.place.generation + 1,
            previous: self.place.generation,
            // The batch between is the last one of this generation.
            first_batch: self.place.next_batch + 1,
            epoch: self.epoch,
            room,
            limit,
            beyond,
            released: self.bytes,
            gone: self.gone.clone(),
        };
        Self::create(devices, &start, state)
    }

    /// Ends this generation in favour of `next`, which is complete.
    ///
    /// 1. A last record says that `next` follows.
    /// 2. Every superblock names `next`.
    /// 3. The old files are kept for the generation after it.
    pub(crate) fn give_way(&mut self, devices: &Devices, mut next: Self) -> Result<()> {
        let mut last = RecordBuffer::default();
        let superseded =
            m::Superseded { generation: U64::new(next.place.generation), nonce: U64::new(next.place.nonce) };
        last.push(Kind::Superseded, &superseded, &[]);
        all_well(self.append(devices, &last)?)?;
        // A device that is gone is still a member of `next`. If all other slots had a newer epoch, an open with the
        // device would refuse it as stale, and one without it would miss it.
        if self.gone.is_empty() {
            next.set_epoch(self.next_epoch);
        } else {
            next.set_next_epoch(self.next_epoch);
        }
        next.name_in_superblocks(devices, STATE_OPEN)?;
        self.files.clear();
        next.keep_files_of(devices, self.place.generation)?;
        next.spare_bytes = self.bytes;
        *self = next;
        Ok(())
    }

    /// Keeps the files of a generation that this one replaced, for the next one. Every superblock must name this one.
    pub(crate) fn keep_files_of(&self, devices: &Devices, generation: u64) -> Result<()> {
        for (device, copy) in &self.held {
            let directory = &devices.get(*device)?.directory;
            let old = m::file_name(generation, *copy);
            match directory.rename(&old, &m::file_name(self.place.generation + 1, *copy)) {
                // The device holds a copy from this generation on only.
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Stops writing to the copies on a device.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: no other device has a copy.
    pub(crate) fn forget(&mut self, device: DeviceIndex) -> Result<()> {
        if !self.survives(device) {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("remove device: only device {device} has the manifest"),
            ));
        }
        self.gone.insert(device);
        self.drop_gone();
        Ok(())
    }

    /// Returns whether a device other than this one has a copy.
    pub(crate) fn survives(&self, device: DeviceIndex) -> bool {
        self.files.iter().any(|(own, _)| *own != device)
    }

    /// Forgets which devices are gone, because the members say so by now.
    pub(crate) fn members_changed(&mut self) {
        self.gone.clear();
    }

    /// Sets the membership epoch. Superblocks must have it before a batch does.
    pub(crate) fn set_epoch(&mut self, epoch: u64) {
        (self.epoch, self.next_epoch) = (epoch, epoch);
    }

    /// Sets the membership epoch from the next generation on that is written to every member.
    pub(crate) fn set_next_epoch(&mut self, epoch: u64) {
        self.next_epoch = epoch;
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the epoch that the next generation gets.
    pub(crate) fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    /// Returns the bytes of the files of the manifest at this place.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub(crate) fn bytes_at(devices: &Devices, place: &ManifestPlace) -> Result<u64> {
        let mut bytes = 0;
        for (device, copy) in copies(devices, &BTreeSet::new()) {
            bytes += kept_bytes(&*devices.get(device)?.directory, &m::file_name(place.generation, copy))?;
        }
        Ok(bytes)
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
        for device in self.written(devices) {
            let held = self.held.iter().filter(|(own, _)| *own == device.index).count();
            device.write_superblock(|slot| {
                slot.epoch = U64::new(self.epoch);
                slot.manifest_generation = U64::new(self.place.generation);
                slot.manifest_nonce = U64::new(self.place.nonce);
                slot.synced_through = U64::new(self.place.synced_through);
                slot.state = state;
                slot.features = devices.features();
                slot.manifest_copies = held as u8;
                slot.device_count = U16::new(devices.list.slots() as u16);
            })?;
        }
        Ok(())
    }
}
