//! The manifest: all copies of a generation, side by side. What is not equal must be a legal trace of a crash.

use crate::devices::{Device, Devices};
use crate::finding::{Code, Finding, Sink};
use crate::io::{self, StoreFile, WINDOW_BYTES};
use std::collections::BTreeSet;
use stratakv_format::error::FormatError;
use stratakv_format::manifest::{
    BATCH_PAGES_MAX, Batch, BatchHeader, BatchPlace, DIRECTORY, ManifestPage, file_name, parse_file_name,
};
use stratakv_format::page::SECTOR_BYTES;
use stratakv_format::superblock::STATE_CLOSED;
use stratakv_format::{PAGE_BYTES, Unverified};
use zerocopy::FromBytes;

const PAGE: u64 = PAGE_BYTES as u64;
/// How often what stands behind the end is read in search of batches, at most: they do not overlap unless somebody forged them.
const BEHIND_READ_MAX: u64 = 4;

/// A generation and the nonce that seeds its batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation {
    pub(crate) number: u64,
    pub(crate) nonce: u64,
}

/// A batch that counts, and the copy to read it from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchRef {
    pub(crate) offset: u64,
    pub(crate) pages: u32,
    pub(crate) sequence: u64,
    copy: usize,
}

/// A generation whose copies were compared.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) generation: Generation,
    pub(crate) copies: Vec<StoreFile>,
    /// The batches that take effect: complete runs only.
    pub(crate) batches: Vec<BatchRef>,
    /// Its header has the feature of copies.
    pub(crate) replicas: bool,
    /// It has the feature of codecs.
    pub(crate) codecs: bool,
    /// Nothing durable is missing.
    pub(crate) complete: bool,
    pub(crate) bytes: u64,
}

/// The generation that the newest slots name.
pub(crate) fn named(devices: &Devices, sink: &Sink) -> Generation {
    let mut named = Generation { number: 0, nonce: 0 };
    for device in &devices.devices {
        let (number, nonce) = (device.newest.manifest_generation.get(), device.newest.manifest_nonce.get());
        if number > named.number {
            named = Generation { number, nonce };
        } else if number == named.number && nonce != named.nonce {
            let text = format!("another nonce for manifest generation {number} than that of an earlier device");
            let finding = Finding::damage(Code::SuperblockMismatch, text).values(named.nonce, nonce);
            sink.push(finding.in_directory(Some(device.index), &device.path));
        }
    }
    named
}

/// A batch that one copy does not have as another has it.
struct Deviation {
    copy: usize,
    batch: BatchRef,
    torn: bool,
    error: Option<FormatError>,
}

/// Compares all copies of a generation from front to end. `None`: no copy is there.
pub(crate) fn walk(devices: &Devices, generation: Generation, previous: Option<u64>, sink: &Sink) -> Option<Manifest> {
    let (copies, batches) = (Vec::new(), Vec::new());
    let mut manifest =
        Manifest { generation, copies, batches, replicas: false, codecs: false, complete: false, bytes: 0 };
    let mut header: Option<ManifestPage> = None;
    for device in &devices.devices {
        for copy in 0..device.newest.manifest_copies {
            let name = file_name(generation.number, copy);
            let Some(file) = io::open(&device.directory, Some(device.index), &device.path, &name, sink) else {
                continue;
            };
            check_header(devices, device, copy, generation, previous, &file, &mut header, sink);
            manifest.bytes += PAGE;
            manifest.copies.push(file);
        }
    }
    if manifest.copies.is_empty() {
        let text = format!("no copy of manifest generation {} can be read", generation.number);
        sink.push(Finding::damage(Code::MissingFile, text));
        return None;
    }
    manifest.replicas = header.is_none_or(|page| page.features.has_replicas());
    manifest.codecs = header.is_none_or(|page| page.features.has_codecs());
    let first = match header {
        Some(page) => page.first_batch.get(),
        // Every header page is damaged: the batch behind it says its number itself.
        None => manifest.copies.iter().find_map(|file| first_sequence(file, generation, sink)).unwrap_or(1),
    };
    manifest.walk_batches(devices, first, sink);
    Some(manifest)
}

#[allow(clippy::too_many_arguments)]
fn check_header(
    devices: &Devices,
    device: &Device,
    copy: u8,
    generation: Generation,
    previous: Option<u64>,
    file: &StoreFile,
    first: &mut Option<ManifestPage>,
    sink: &Sink,
) {
    let mut bytes = vec![0; PAGE_BYTES];
    if !file.read(0, &mut bytes, sink).is_empty() {
        return;
    }
    let damage = |text: &str| sink.push(Finding::damage(Code::ManifestPage, text).at(&file.place, 0, PAGE));
    let page = match Unverified::<ManifestPage>::at_front(&bytes, "manifest page").and_then(|page| page.verify()) {
        Ok(page) => page.into_inner(),
        Err(error) => return sink.push(Finding::format(Code::ManifestPage, &error).at(&file.place, 0, PAGE)),
    };
    if page.store_id != devices.store_id {
        return damage("the manifest of another store");
    }
    if (page.generation.get(), page.nonce.get()) != (generation.number, generation.nonce) {
        return damage("the manifest of another generation");
    }
    if page.device.get() != device.index || page.copy != copy {
        damage("the manifest copy of another place");
    }
    if previous.is_some_and(|previous| page.previous_generation.get() != previous) {
        damage("this generation does not follow the one that names it");
    }
    if !page.features.writable() {
        sink.push(Finding::read_only_features(&file.place, 0));
    }
    match first {
        None => *first = Some(page),
        Some(other) => {
            let same = (other.previous_generation, other.first_batch, other.created_unix_s)
                == (page.previous_generation, page.first_batch, page.created_unix_s);
            if !same {
                damage("this header page contradicts that of the first copy");
            }
        }
    }
}

fn first_sequence(file: &StoreFile, generation: Generation, sink: &Sink) -> Option<u64> {
    valid_batch(file, PAGE, generation, sink).map(|(sequence, ..)| sequence)
}

/// What the batch that may begin with this page says of itself: sequence, `synced_through`, pages. Nothing is verified.
fn claim(page: &[u8]) -> Option<(u64, u64, u32)> {
    let pages = Batch::claimed_pages(page)?;
    let header = BatchHeader::ref_from_prefix(page).ok()?.0;
    Some((header.sequence.get(), header.synced_through.get(), pages))
}

/// The batch at `offset`, whatever its number: sequence, `synced_through`, pages.
fn valid_batch(file: &StoreFile, offset: u64, generation: Generation, sink: &Sink) -> Option<(u64, u64, u32)> {
    let mut front = vec![0; PAGE_BYTES];
    file.read(offset, &mut front, sink);
    let pages = Batch::claimed_pages(&front)?;
    if offset + u64::from(pages) * PAGE > file.bytes.next_multiple_of(PAGE) {
        return None;
    }
    let mut bytes = vec![0; pages as usize * PAGE_BYTES];
    file.read(offset, &mut bytes, sink);
    let sequence = BatchHeader::ref_from_prefix(&bytes).ok()?.0.sequence.get();
    let place = BatchPlace { generation: generation.number, nonce: generation.nonce, sequence };
    let batch = Batch::verify(&bytes, &place).ok()?;
    Some((sequence, batch.header().synced_through.get(), pages))
}

/// A copy's bytes at one place, and what they are.
struct Reading {
    bytes: Vec<u8>,
    unreadable: bool,
    error: Option<FormatError>,
}

impl Reading {
    /// Reads what may be the batch `place.sequence` at `offset`.
    fn of(file: &StoreFile, offset: u64, place: &BatchPlace, sink: &Sink) -> Self {
        let mut bytes = vec![0; PAGE_BYTES];
        let mut unreadable = !file.read(offset, &mut bytes, sink).is_empty();
        if let Some(pages) = Batch::claimed_pages(&bytes).filter(|&pages| pages > 1 && !unreadable) {
            let left = file.bytes.saturating_sub(offset).div_ceil(PAGE);
            bytes.resize(u64::from(pages).min(left).max(1) as usize * PAGE_BYTES, 0);
            unreadable |= !file.read(offset, &mut bytes, sink).is_empty();
        }
        let error = Batch::verify(&bytes, place).err();
        Self { bytes, unreadable, error }
    }

    fn is_valid(&self) -> bool {
        self.error.is_none()
    }

    /// Valid as to its checksum, yet not acceptable: no crash leaves that.
    fn is_wrong(&self) -> bool {
        self.error.is_some_and(|e| !Batch::may_be_torn(&e))
    }
}

impl Manifest {
    fn walk_batches(&mut self, devices: &Devices, first: u64, sink: &Sink) {
        let generation = self.generation;
        let naming = || {
            let slots = devices.devices.iter().flat_map(|device| &device.slots);
            slots.filter(|slot| slot.manifest_generation.get() == generation.number)
        };
        let mut synced = naming().map(|slot| slot.synced_through.get()).max().unwrap_or(0);
        let mut deviations = Vec::new();
        let (mut offset, mut sequence, mut effective, mut epoch) = (PAGE, first, 0, 0);
        let last = loop {
            let place = BatchPlace { generation: generation.number, nonce: generation.nonce, sequence };
            let readings: Vec<_> = self.copies.iter().map(|file| Reading::of(file, offset, &place, sink)).collect();
            let Some(copy) = readings.iter().position(Reading::is_valid) else { break readings };
            let Ok(batch) = Batch::verify(&readings[copy].bytes, &place) else { break readings };
            let header = batch.header();
            let here = BatchRef { offset, pages: header.pages.get(), sequence, copy };
            let bytes = u64::from(here.pages) * PAGE;
            synced = synced.max(header.synced_through.get());
            if header.epoch.get() < epoch || header.epoch.get() > devices.epoch {
                let finding = Finding::damage(Code::ManifestBatch, "the membership epoch of this batch does not fit");
                let finding = finding.values(devices.epoch, header.epoch.get());
                sink.push(finding.at(&self.copies[copy].place, offset, bytes));
            }
            epoch = header.epoch.get().max(epoch);
            for (other, reading) in readings.iter().enumerate().filter(|(other, _)| *other != copy) {
                if !reading.unreadable && reading.bytes != readings[copy].bytes {
                    let torn = self.is_torn(other, here, &readings[copy].bytes, sink);
                    deviations.push(Deviation { copy: other, batch: here, torn, error: reading.error });
                }
            }
            self.bytes += bytes * self.copies.len() as u64;
            let more = batch.has_more();
            self.batches.push(here);
            if !more {
                effective = self.batches.len();
            }
            offset += bytes;
            let Some(next) = sequence.checked_add(1) else { break readings };
            sequence = next;
        };
        let behind = self.find_behind(offset, sequence, &mut synced, sink);
        self.judge_end(offset, sequence, synced, behind, &last, sink);
        for deviation in deviations {
            self.judge_deviation(&deviation, synced, sink);
        }
        let closed = devices.devices.iter().all(|device| {
            let slot = &device.newest;
            slot.state == STATE_CLOSED && slot.manifest_generation.get() == generation.number
        });
        if closed && self.complete && naming().map(|slot| slot.synced_through.get()).max() < Some(sequence - 1) {
            let text = "the store was closed, yet batches stand behind the one it was closed with";
            let file = &self.copies[0].place;
            sink.push(
                Finding::damage(Code::ManifestBatch, text).at(file, PAGE, offset - PAGE).values(synced, sequence - 1),
            );
        }
        if let Some(cut) = self.batches.get(effective) {
            let text = "a commit of several batches is not complete: it is cut";
            let file = &self.copies[cut.copy].place;
            sink.push(Finding::note(Code::ManifestTail, text).at(file, cut.offset, offset - cut.offset));
        }
        self.batches.truncate(effective);
    }

    /// Whether each sector of the copy is that of the valid batch or was never written.
    fn is_torn(&self, copy: usize, batch: BatchRef, valid: &[u8], sink: &Sink) -> bool {
        let mut bytes = vec![0; valid.len()];
        self.copies[copy].read(batch.offset, &mut bytes, sink);
        bytes.chunks(SECTOR_BYTES).zip(valid.chunks(SECTOR_BYTES)).all(|(own, valid)| own == valid || io::is_zero(own))
    }

    fn judge_deviation(&self, deviation: &Deviation, synced: u64, sink: &Sink) {
        let Deviation { copy, batch, torn, error } = deviation;
        let file = &self.copies[*copy].place;
        let bytes = u64::from(batch.pages) * PAGE;
        if *torn && batch.sequence > synced {
            let text = format!("batch {} was torn by a crash in this copy", batch.sequence);
            return sink.push(Finding::note(Code::ManifestTail, text).at(file, batch.offset, bytes));
        }
        let text = match error {
            Some(error) => format!("batch {} is damaged in this copy: {error}", batch.sequence),
            None => format!("batch {} is not that of the other copy", batch.sequence),
        };
        let finding = Finding::damage(Code::ManifestBatch, text).at(file, batch.offset, bytes);
        sink.push(match error {
            Some(error) => finding.values(error.expected, error.found),
            None => finding,
        });
    }

    /// Looks for batches of this generation behind the end: where the first stands, and what they know to be durable. What takes
    /// more reading than whole files of batches could is no torn end.
    fn find_behind(&self, offset: u64, sequence: u64, synced: &mut u64, sink: &Sink) -> Option<u64> {
        let mut first = None;
        for file in &self.copies {
            let (mut at, mut window) = (offset, vec![0; WINDOW_BYTES]);
            // Those that say the missing batch was durable, and those that do not.
            let mut left = [file.bytes.saturating_mul(BEHIND_READ_MAX); 2];
            while at < file.bytes {
                let bytes = (file.bytes - at).next_multiple_of(PAGE).min(WINDOW_BYTES as u64) as usize;
                file.read(at, &mut window[..bytes], sink);
                for (index, page) in window[..bytes].chunks(PAGE_BYTES).enumerate() {
                    let Some((_, through, pages)) = claim(page).filter(|(later, ..)| *later > sequence) else {
                        continue;
                    };
                    let place = at + index as u64 * PAGE;
                    let durable = through >= sequence;
                    match left[usize::from(durable)].checked_sub(u64::from(pages) * PAGE) {
                        Some(rest) => left[usize::from(durable)] = rest,
                        None if durable => {
                            let text = "what looks like batches behind the end is more than a file can hold";
                            let size = file.bytes - offset;
                            sink.push(Finding::damage(Code::ManifestBatch, text).at(&file.place, offset, size));
                            return first.or(Some(place));
                        }
                        None => continue,
                    }
                    let Some((_, through, _)) = valid_batch(file, place, self.generation, sink) else { continue };
                    *synced = (*synced).max(through);
                    first = Some(first.map_or(place, |first: u64| first.min(place)));
                }
                at += bytes as u64;
            }
        }
        first
    }

    /// No copy has batch `sequence` at `offset`: the end, or a hole.
    fn judge_end(
        &mut self,
        offset: u64,
        sequence: u64,
        synced: u64,
        behind: Option<u64>,
        last: &[Reading],
        sink: &Sink,
    ) {
        self.complete = true;
        for (file, reading) in self.copies.iter().zip(last) {
            let claimed = u64::from(Batch::claimed_pages(&reading.bytes).unwrap_or(1).min(BATCH_PAGES_MAX)) * PAGE;
            let bytes = behind.filter(|&behind| behind > offset).map_or(claimed, |behind| behind - offset);
            let error = reading.error.map_or_else(String::new, |error| format!(": {error}"));
            if synced >= sequence {
                self.complete = false;
                let text = format!("batch {sequence} was durable (through {synced}) and is in no copy{error}");
                sink.push(Finding::damage(Code::ManifestBatch, text).at(&file.place, offset, bytes));
            } else if reading.is_wrong() {
                self.complete = false;
                let finding = reading.error.map_or_else(
                    || Finding::damage(Code::ManifestBatch, "a wrong batch"),
                    |error| Finding::format(Code::ManifestBatch, &error),
                );
                sink.push(finding.at(&file.place, offset, bytes));
            } else if !io::is_zero(&reading.bytes) {
                let text = format!("batch {sequence} was torn by a crash: it is cut");
                sink.push(Finding::note(Code::ManifestTail, text).at(&file.place, offset, bytes));
            }
        }
    }

    /// Reads a batch again to replay it.
    pub(crate) fn read(&self, batch: &BatchRef, sink: &Sink) -> (&StoreFile, Vec<u8>) {
        let file = &self.copies[batch.copy];
        let mut bytes = vec![0; batch.pages as usize * PAGE_BYTES];
        file.read(batch.offset, &mut bytes, sink);
        (file, bytes)
    }
}

/// Notes the files in the manifest directories that no generation in force owns.
pub(crate) fn leftovers(devices: &Devices, in_force: &BTreeSet<u64>, sink: &Sink) {
    for device in &devices.devices {
        let Ok(directory) = io::open_directory(&device.directory, DIRECTORY) else { continue };
        for name in io::names(&directory).unwrap_or_default() {
            let text = match parse_file_name(&name) {
                Some((generation, copy)) if in_force.contains(&generation) && copy < device.newest.manifest_copies => {
                    continue;
                }
                // Kept for the next generation, so that it finds room on a full device.
                Some((generation, copy))
                    if generation.checked_sub(1).is_some_and(|before| in_force.last() == Some(&before))
                        && copy < device.newest.manifest_copies =>
                {
                    match wrong_spare(devices, device, &name, (generation, copy), sink) {
                        Some(text) => text,
                        None => continue,
                    }
                }
                Some((generation, _)) if in_force.contains(&generation) => "a copy that this device does not hold",
                Some(_) => "a manifest generation that is not in force",
                None => "not a file of the store",
            };
            let place = crate::finding::FilePlace {
                device: Some(device.index),
                path: device.path.clone(),
                file: format!("{DIRECTORY}/{name}").into(),
            };
            sink.push(Finding::note(Code::Leftover, text).in_file(&place));
        }
    }
}

/// What a file that is kept for the next generation must not be. It holds zeros, an older generation of the same copy, or the
/// beginning of the one that it is named for; none of it counts.
fn wrong_spare(
    devices: &Devices,
    device: &Device,
    name: &str,
    (generation, copy): (u64, u8),
    sink: &Sink,
) -> Option<&'static str> {
    let path = format!("{DIRECTORY}/{name}");
    let file = io::open(&device.directory, Some(device.index), &device.path, &path, sink)?;
    if !file.bytes.is_multiple_of(PAGE) {
        return Some("a file kept for the next generation that is not of whole pages");
    }
    let mut bytes = vec![0; PAGE_BYTES];
    if !file.read(0, &mut bytes, sink).is_empty() {
        return None;
    }
    let page = Unverified::<ManifestPage>::at_front(&bytes, "manifest page").and_then(|page| page.verify()).ok()?;
    let own = page.store_id == devices.store_id && (page.device.get(), page.copy) == (device.index, copy);
    let foreign = !own || page.generation.get() > generation;
    foreign.then_some("a file kept for the next generation that holds the manifest of another place")
}
