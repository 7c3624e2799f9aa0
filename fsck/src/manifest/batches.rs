//! The batches of a generation, compared over all copies (SPEC.md chapter 13, steps 3 to 5).
//!
//! 1. At each place, the first copy with a valid batch of the expected sequence number counts. A copy with other bytes
//!    there is noted as a mismatch.
//! 2. The first place at which no copy has a valid batch is the end. The pages after it are searched for later batches.
//! 3. The end is legal if the missing batch was never known durable. It is damage if a superblock slot or another batch
//!    says that it was durable, or if its checksum is right and another field is wrong.
//! 4. A mismatch is legal if the batch was never known durable and each of its sectors is right or zero.
//! 5. A run of batches whose last batch is missing is cut.
//!
//! Invariant: `synced` is the greatest `synced_through` of the superblock slots that name this generation and of all
//! valid batches found so far. It is final when step 2 ends, so steps 3 and 4 come after it.

use super::generation::{BatchRef, Generation, Manifest};
use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::io::{self, StoreFile, WINDOW_BYTES};
use stratakv_format::PAGE_BYTES;
use stratakv_format::error::FormatError;
use stratakv_format::manifest::{BATCH_PAGES_MAX, Batch, BatchHeader, BatchPlace};
use stratakv_format::page::SECTOR_BYTES;
use stratakv_format::superblock::{STATE_CLOSED, Slot};
use zerocopy::FromBytes;

const PAGE: u64 = PAGE_BYTES as u64;
/// The search after the end reads batches of at most this many times the file's size. Real batches do not overlap, so
/// that only a forged file needs more.
const SEARCH_READ_MAX: u64 = 4;

/// Compares the batches of all copies, from sequence number `first` on, and fills in `batches`, `complete` and `bytes`.
pub(super) fn walk(manifest: &mut Manifest, devices: &Devices, first: u64, sink: &Sink) {
    let mut walk = BatchWalk { manifest, devices, sink, synced: 0, mismatches: Vec::new(), effective: 0 };
    walk.synced = walk.naming_slots().map(|slot| slot.synced_through.get()).max().unwrap_or(0);
    let end = walk.compare(first);
    let later = walk.find_later_batch(&end);
    walk.judge_end(&end, later);
    for mismatch in std::mem::take(&mut walk.mismatches) {
        walk.judge_mismatch(&mismatch);
    }
    walk.judge_close(&end);
    walk.cut_incomplete_run(&end);
}

/// Returns the sequence number of the valid batch right after the header page, if there is one.
pub(super) fn first_sequence(file: &StoreFile, generation: Generation, sink: &Sink) -> Option<u64> {
    valid_batch(file, PAGE, generation, sink).map(|claim| claim.sequence)
}

/// The claims of a batch header, before anything is verified.
#[derive(Clone, Copy, Debug)]
struct BatchClaim {
    sequence: u64,
    synced_through: u64,
    pages: u32,
}

/// Returns the claims of the batch that may begin with this page.
fn claim(page: &[u8]) -> Option<BatchClaim> {
    let pages = Batch::claimed_pages(page)?;
    let header = BatchHeader::ref_from_prefix(page).ok()?.0;
    Some(BatchClaim { sequence: header.sequence.get(), synced_through: header.synced_through.get(), pages })
}

/// Verifies the batch at `offset`, with the sequence number that it names itself.
fn valid_batch(file: &StoreFile, offset: u64, generation: Generation, sink: &Sink) -> Option<BatchClaim> {
    let mut front = vec![0; PAGE_BYTES];
    file.read(offset, &mut front, sink);
    let pages = Batch::claimed_pages(&front)?;
    if offset + u64::from(pages) * PAGE > file.bytes {
        return None;
    }
    let mut bytes = vec![0; pages as usize * PAGE_BYTES];
    file.read(offset, &mut bytes, sink);
    let sequence = BatchHeader::ref_from_prefix(&bytes).ok()?.0.sequence.get();
    let place = BatchPlace { generation: generation.number, nonce: generation.nonce, sequence };
    let batch = Batch::verify(&bytes, &place).ok()?;
    Some(BatchClaim { sequence, synced_through: batch.header().synced_through.get(), pages })
}

/// The bytes of one copy at one place, and whether they are the expected batch.
struct BatchReading {
    bytes: Vec<u8>,
    unreadable: bool,
    error: Option<FormatError>,
}

impl BatchReading {
    /// Reads and verifies what may be the batch `place.sequence` at `offset`.
    fn new(file: &StoreFile, offset: u64, place: &BatchPlace, sink: &Sink) -> Self {
        let mut bytes = vec![0; PAGE_BYTES];
        let mut unreadable = offset < file.bytes && !file.read(offset, &mut bytes, sink).is_empty();
        if let Some(pages) = Batch::claimed_pages(&bytes).filter(|&pages| pages > 1 && !unreadable) {
            let left = file.bytes.saturating_sub(offset) / PAGE;
            bytes.resize(u64::from(pages).min(left).max(1) as usize * PAGE_BYTES, 0);
            unreadable |= !file.read(offset, &mut bytes, sink).is_empty();
        }
        let error = Batch::verify(&bytes, place).err();
        Self { bytes, unreadable, error }
    }

    fn is_valid(&self) -> bool {
        self.error.is_none()
    }

    /// Returns whether the checksum is right and another field is wrong. No crash leaves such a batch.
    fn is_wrong(&self) -> bool {
        self.error.is_some_and(|e| !Batch::may_be_torn(&e))
    }
}

/// A place at which one copy differs from a valid batch of another copy.
struct CopyMismatch {
    copy: usize,
    batch: BatchRef,
    /// True if a torn write can explain the difference.
    torn: bool,
    error: Option<FormatError>,
}

/// The first place at which no copy has the expected batch.
struct LogEnd {
    offset: u64,
    /// The sequence number of the batch that is expected there.
    sequence: u64,
    /// The bytes that each copy has there.
    readings: Vec<BatchReading>,
}

/// The state of a walk over the batches of a generation.
struct BatchWalk<'a> {
    manifest: &'a mut Manifest,
    devices: &'a Devices,
    sink: &'a Sink,
    /// The highest sequence number of a batch that is known durable.
    synced: u64,
    mismatches: Vec<CopyMismatch>,
    /// The number of batches that belong to complete runs.
    effective: usize,
}

impl BatchWalk<'_> {
    /// Returns the superblock slots that name this generation.
    fn naming_slots(&self) -> impl Iterator<Item = &Slot> {
        let number = self.manifest.generation.number;
        let slots = self.devices.devices.iter().flat_map(|device| &device.slots);
        slots.filter(move |slot| slot.manifest_generation.get() == number)
    }

    /// Collects the valid batches in order, and the places at which copies differ. Returns the end.
    fn compare(&mut self, first: u64) -> LogEnd {
        let generation = self.manifest.generation;
        let (mut offset, mut sequence, mut epoch) = (PAGE, first, 0);
        let readings = loop {
            let place = BatchPlace { generation: generation.number, nonce: generation.nonce, sequence };
            let copies = &self.manifest.copies;
            let readings: Vec<_> =
                copies.iter().map(|file| BatchReading::new(file, offset, &place, self.sink)).collect();
            let Some(copy) = readings.iter().position(BatchReading::is_valid) else { break readings };
            let Ok(batch) = Batch::verify(&readings[copy].bytes, &place) else { break readings };
            let header = batch.header();
            let here = BatchRef { offset, pages: header.pages.get(), sequence, copy };
            let bytes = u64::from(here.pages) * PAGE;
            self.synced = self.synced.max(header.synced_through.get());
            if header.epoch.get() < epoch || header.epoch.get() > self.devices.epoch {
                let text = "the membership epoch of the batch is below the batch before it or above the superblocks";
                let finding = Finding::damage(Code::ManifestBatch, text).values(self.devices.epoch, header.epoch.get());
                self.sink.push(finding.at(&copies[copy].place, offset, bytes));
            }
            epoch = header.epoch.get().max(epoch);
            for (other, reading) in readings.iter().enumerate().filter(|(other, _)| *other != copy) {
                if !reading.unreadable && reading.bytes != readings[copy].bytes {
                    let torn = self.is_torn(other, here, &readings[copy].bytes);
                    self.mismatches.push(CopyMismatch { copy: other, batch: here, torn, error: reading.error });
                }
            }
            let more = batch.has_more();
            self.manifest.bytes += bytes * self.manifest.copies.len() as u64;
            self.manifest.batches.push(here);
            if !more {
                self.effective = self.manifest.batches.len();
            }
            offset += bytes;
            let Some(next) = sequence.checked_add(1) else { break readings };
            sequence = next;
        };
        LogEnd { offset, sequence, readings }
    }

    /// Returns whether every sector of the copy equals the valid batch or is zero.
    fn is_torn(&self, copy: usize, batch: BatchRef, valid: &[u8]) -> bool {
        let mut bytes = vec![0; valid.len()];
        self.manifest.copies[copy].read(batch.offset, &mut bytes, self.sink);
        bytes.chunks(SECTOR_BYTES).zip(valid.chunks(SECTOR_BYTES)).all(|(own, valid)| own == valid || io::is_zero(own))
    }

    fn judge_mismatch(&self, mismatch: &CopyMismatch) {
        let CopyMismatch { copy, batch, torn, error } = mismatch;
        let file = &self.manifest.copies[*copy].place;
        let bytes = u64::from(batch.pages) * PAGE;
        if *torn && batch.sequence > self.synced {
            let text = format!("a crash tore batch {} in this copy", batch.sequence);
            return self.sink.push(Finding::note(Code::ManifestTail, text).at(file, batch.offset, bytes));
        }
        let text = match error {
            Some(error) => format!("batch {} is damaged in this copy: {error}", batch.sequence),
            None => format!("batch {} differs from the other copy", batch.sequence),
        };
        let finding = Finding::damage(Code::ManifestBatch, text).at(file, batch.offset, bytes);
        self.sink.push(match error {
            Some(error) => finding.values(error.expected, error.found),
            None => finding,
        });
    }

    /// Searches the pages after the end for valid batches of this generation with a later sequence number.
    ///
    /// Returns the offset of the first one, and raises `synced` to the highest `synced_through` of them.
    ///
    /// Two budgets bound the bytes read: one for batches that call the missing batch durable, one for the others. A
    /// file that exceeds the first budget is damaged.
    fn find_later_batch(&mut self, end: &LogEnd) -> Option<u64> {
        let (offset, sequence) = (end.offset, end.sequence);
        let mut first = None;
        for file in &self.manifest.copies {
            let (mut at, mut window) = (offset, vec![0; WINDOW_BYTES]);
            let mut left = [file.bytes.saturating_mul(SEARCH_READ_MAX); 2];
            while at < file.bytes {
                let bytes = (file.bytes - at).min(WINDOW_BYTES as u64) as usize;
                file.read(at, &mut window[..bytes], self.sink);
                for (index, page) in window[..bytes].chunks(PAGE_BYTES).enumerate() {
                    let Some(claimed) = claim(page).filter(|claimed| claimed.sequence > sequence) else { continue };
                    let place = at + index as u64 * PAGE;
                    let durable = claimed.synced_through >= sequence;
                    match left[usize::from(durable)].checked_sub(u64::from(claimed.pages) * PAGE) {
                        Some(rest) => left[usize::from(durable)] = rest,
                        None if durable => {
                            let text = "the batches after the end are more than a file can hold";
                            let size = file.bytes - offset;
                            self.sink.push(Finding::damage(Code::ManifestBatch, text).at(&file.place, offset, size));
                            return first.or(Some(place));
                        }
                        None => continue,
                    }
                    let Some(valid) = valid_batch(file, place, self.manifest.generation, self.sink) else { continue };
                    self.synced = self.synced.max(valid.synced_through);
                    first = Some(first.map_or(place, |first: u64| first.min(place)));
                }
                at += bytes as u64;
            }
        }
        first
    }

    /// Decides whether the end is legal, torn or damaged. `later` is the offset of a valid batch after the end.
    fn judge_end(&mut self, end: &LogEnd, later: Option<u64>) {
        let LogEnd { offset, sequence, readings } = end;
        let (offset, sequence, synced) = (*offset, *sequence, self.synced);
        self.manifest.complete = true;
        for (file, reading) in self.manifest.copies.iter().zip(readings) {
            let claimed = u64::from(Batch::claimed_pages(&reading.bytes).unwrap_or(1).min(BATCH_PAGES_MAX)) * PAGE;
            let bytes = later.filter(|&later| later > offset).map_or(claimed, |later| later - offset);
            let error = reading.error.map_or_else(String::new, |error| format!(": {error}"));
            if synced >= sequence {
                self.manifest.complete = false;
                let text =
                    format!("no copy holds batch {sequence}, although batches up to {synced} are known durable{error}");
                self.sink.push(Finding::damage(Code::ManifestBatch, text).at(&file.place, offset, bytes));
            } else if reading.is_wrong() {
                self.manifest.complete = false;
                let finding = reading.error.map_or_else(
                    || Finding::damage(Code::ManifestBatch, "the batch is invalid"),
                    |error| Finding::format(Code::ManifestBatch, &error),
                );
                self.sink.push(finding.at(&file.place, offset, bytes));
            } else if !io::is_zero(&reading.bytes) {
                let text = format!("a crash tore batch {sequence}; recovery cuts it");
                self.sink.push(Finding::note(Code::ManifestTail, text).at(&file.place, offset, bytes));
            }
        }
    }

    /// Reports batches that a closed store has after the batch it was closed with.
    fn judge_close(&self, end: &LogEnd) {
        let number = self.manifest.generation.number;
        let closed = self.devices.devices.iter().all(|device| {
            let slot = &device.newest;
            slot.state == STATE_CLOSED && slot.manifest_generation.get() == number
        });
        let last = end.sequence.saturating_sub(1);
        let recorded = self.naming_slots().map(|slot| slot.synced_through.get()).max();
        if closed && self.manifest.complete && recorded < Some(last) {
            let text = "the store was closed, but batches follow the one it was closed with";
            let finding = Finding::damage(Code::ManifestBatch, text).values(self.synced, last);
            self.sink.push(finding.at(&self.manifest.copies[0].place, PAGE, end.offset - PAGE));
        }
    }

    /// Drops the batches at the end whose run has no last batch.
    fn cut_incomplete_run(&mut self, end: &LogEnd) {
        if let Some(cut) = self.manifest.batches.get(self.effective) {
            let text = "the last commit is incomplete: recovery cuts its batches";
            let file = &self.manifest.copies[cut.copy].place;
            self.sink.push(Finding::note(Code::ManifestTail, text).at(file, cut.offset, end.offset - cut.offset));
        }
        self.manifest.batches.truncate(self.effective);
    }
}
