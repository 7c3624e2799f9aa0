//! Replay: reads the manifest from its copies and builds the catalog.
//!
//! 1. Read every copy of the generation that the newest superblock names (`manifest_copies`).
//! 2. Verify batch after batch. A batch counts if one copy has it.
//! 3. Apply batches to the catalog. A run of batches that continue each other is applied only as a whole.
//! 4. If no copy has a valid batch, decide by the table below between the end and damage.
//! 5. If the last record names a successor generation, replay that one in the same way.
//!
//! | copies with the batch | a superblock or later batch states it durable | meaning |
//! |---|---|---|
//! | at least one valid | - | apply it |
//! | none valid | yes (`synced_through`) | damage: refuse |
//! | none valid, one complete but not acceptable | no | damage or another version: refuse |
//! | none valid | no | the end: the bytes behind it are cut |
//!
//! Invariants:
//! - A batch that was reported durable is never cut.
//! - After a cut, or with a damaged copy, [`ManifestState::dirty`] makes the store start a new generation before it
//!   writes.

use super::ProbedDirectory;
use super::manifest_copies::{CopyName, ManifestCopy, ManifestDevice, is_zero, read_copies};
use crate::catalog::{Catalog, SegmentMeta};
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::planted;
use crate::log::ManifestPlace;
use std::collections::BTreeMap;
use std::sync::Arc;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, Batch, BatchHeader, BatchPlace, Record};
use stratakv_format::segment::KIND_POOL;
use stratakv_format::superblock::Slot;
use stratakv_format::{DeviceIndex, FormatError, PAGE_BYTES};
use zerocopy::FromBytes;

/// The search for later batches verifies at most this multiple of the bytes of a file.
const BEHIND_READ_MAX: usize = 4;

/// The state of a store according to its manifest.
pub(crate) struct ManifestState {
    pub(crate) catalog: Catalog,
    pub(crate) place: ManifestPlace,
    pub(crate) epoch: u64,
    /// True if a new generation must start: bytes were cut, a copy is damaged, or a checkpoint is unfinished.
    pub(crate) dirty: bool,
    /// True if this build knows every feature that a writer of this generation must know.
    pub(crate) writable: bool,
    /// The number of damaged copies of the manifest, by device.
    pub(crate) damaged: BTreeMap<DeviceIndex, u64>,
    /// The number of readable copies of the generation in force, by device.
    pub(crate) held: BTreeMap<DeviceIndex, u8>,
}

/// Replays the manifest that the newest slots name. `found` must be in order of device index.
///
/// # Errors
/// [`ErrorKind::Corruption`]: damage in every copy, or records that contradict each other.
/// [`ErrorKind::Unsupported`]: another version. [`ErrorKind::MemoryLimit`]: the manifest needs more than `memory`
/// bytes.
pub(crate) fn replay(found: &[ProbedDirectory], store_id: [u8; 16], memory: usize) -> Result<ManifestState> {
    let newest = found.iter().filter_map(|f| f.slot.as_ref()).max_by_key(|slot| slot.manifest_generation.get());
    let Some(newest) = newest else {
        return Err(Error::new(ErrorKind::Corruption, "open: no superblock names a manifest; see kvfsck check"));
    };
    let place = |f: &ProbedDirectory| {
        let slot = f.slot?;
        Some((DeviceIndex(slot.device_index.get()), Arc::clone(&f.directory), slot.manifest_copies))
    };
    let devices: Vec<_> = found.iter().filter_map(place).collect();
    let slots: Vec<Slot> = found.iter().flat_map(|f| f.slots.iter().copied()).collect();
    let (mut generation, mut nonce) = (newest.manifest_generation.get(), newest.manifest_nonce.get());
    let (mut followed, mut damaged) = (false, BTreeMap::new());
    loop {
        let mut replayed = replay_generation(&devices, &slots, store_id, (generation, nonce), memory)?;
        for (device, copies) in std::mem::take(&mut replayed.damaged) {
            *damaged.entry(device).or_default() += copies;
        }
        match replayed.catalog.superseded {
            None => {
                check_segments(&replayed.catalog, newest)?;
                replayed.dirty |= followed;
                return Ok(ManifestState { damaged, ..replayed });
            }
            Some((next, _)) if next <= generation => {
                let text = format!("open: manifest generation {generation} names the older {next} as its successor");
                return Err(Error::new(ErrorKind::Corruption, text));
            }
            // The new generation became durable, but a crash prevented the superblocks from naming it.
            Some(next) => {
                (generation, nonce) = next;
                followed = true;
            }
        }
    }
}

/// Checks that every segment has the store's segment size.
fn check_segments(catalog: &Catalog, slot: &Slot) -> Result<()> {
    let bytes = slot.segment_bytes.get();
    let wrong = |s: &SegmentMeta| u64::from(s.pages) * PAGE_BYTES as u64 != bytes;
    let Some((key, segment)) = catalog.segments.iter().find(|(_, segment)| wrong(segment)) else { return Ok(()) };
    let (device, id, pages) = (key.0, key.1, segment.pages);
    let text = format!("segment {id} of device {device}: {pages} pages, but segments of this store have {bytes} bytes");
    Err(Error::new(ErrorKind::Corruption, text).during("the manifest is damaged in every copy; see kvfsck check"))
}

/// Replays one generation from all its readable copies.
fn replay_generation(
    devices: &[ManifestDevice],
    slots: &[Slot],
    store_id: [u8; 16],
    (generation, nonce): (u64, u64),
    memory: usize,
) -> Result<ManifestState> {
    let wanted = (generation, nonce);
    let naming = || slots.iter().filter(|slot| (slot.manifest_generation.get(), slot.manifest_nonce.get()) == wanted);
    let (mut copies, first_batch, unread) = read_copies(devices, store_id, wanted, memory)?;
    // Copies count up to the last good one, because a reader that is told a smaller number ignores the others.
    let read = |device: DeviceIndex, there: u8| {
        (0..there).rfind(|copy| !unread.contains(&(device, *copy))).map_or(0, |last| last + 1)
    };
    let held = devices.iter().map(|(device, _, there)| (*device, read(*device, *there))).collect();
    // A copy that no superblock names may never have been written, so it is not damage.
    let is_there = |(device, copy): &CopyName| {
        naming().any(|slot| slot.device_index.get() == device.0 && slot.manifest_copies > *copy)
    };
    let mut damaged_copies: BTreeMap<DeviceIndex, u64> = BTreeMap::new();
    unread
        .iter()
        .filter(|copy| is_there(copy))
        .for_each(|(device, _)| *damaged_copies.entry(*device).or_default() += 1);
    if planted!(TornBatchAccepted) {
        copies.iter_mut().for_each(|copy| believe(copy, nonce));
    }
    let synced = naming().map(|slot| slot.synced_through.get()).max().unwrap_or(0);
    let mut replay = GenerationReplay::new(&copies, wanted, first_batch, synced);
    replay.dirty = !unread.is_empty();
    replay.run()?;
    let GenerationReplay { catalog, epoch, page, sequence, durable, first_bad, pending, mut dirty, .. } = replay;
    if !pending.is_empty() {
        coverage!(SplitCut);
    }
    dirty |= !pending.is_empty();
    // A file with no space left for a record that names its successor cannot be continued.
    dirty |= copies.iter().any(|copy| copy.len < (page + 2) * PAGE_BYTES);
    let place =
        ManifestPlace { generation, nonce, next_batch: sequence, synced_through: sequence - 1, next_page: page as u64 };
    let writable = copies.iter().all(|copy| copy.features.writable());
    // A copy without a batch that is known to be durable is damaged. One that lacks later batches was only cut short.
    for (copy, _) in copies.iter().zip(first_bad).filter(|(_, bad)| bad.is_some_and(|bad| bad <= durable)) {
        *damaged_copies.entry(copy.device).or_default() += 1;
    }
    Ok(ManifestState { catalog, place, epoch, dirty, writable, damaged: damaged_copies, held })
}

/// One batch as each copy holds it.
type CopiesOfBatch<'a> = [std::result::Result<Batch<'a>, FormatError>];

/// The state of replaying one generation.
struct GenerationReplay<'a> {
    copies: &'a [ManifestCopy],
    generation: u64,
    nonce: u64,
    /// The last batch that a superblock states to be durable.
    synced: u64,
    /// The last batch known to be durable so far.
    durable: u64,
    /// The first batch that each copy lacks.
    first_bad: Vec<Option<u64>>,
    catalog: Catalog,
    /// The page of the next batch.
    page: usize,
    /// The number of the next batch.
    sequence: u64,
    epoch: u64,
    /// The batches of a run that takes effect together, until its last one is read.
    pending: Vec<Batch<'a>>,
    checkpoint_done: bool,
    /// True if a new generation must start.
    dirty: bool,
}

impl<'a> GenerationReplay<'a> {
    fn new(copies: &'a [ManifestCopy], (generation, nonce): (u64, u64), first_batch: u64, synced: u64) -> Self {
        Self {
            copies,
            generation,
            nonce,
            synced,
            durable: synced,
            first_bad: vec![None; copies.len()],
            catalog: Catalog::default(),
            page: 1,
            sequence: first_batch,
            epoch: 0,
            pending: Vec::new(),
            checkpoint_done: false,
            dirty: false,
        }
    }

    /// Reads and applies batches up to the end of the manifest.
    fn run(&mut self) -> Result<()> {
        loop {
            let place = BatchPlace { generation: self.generation, nonce: self.nonce, sequence: self.sequence };
            let start = self.page * PAGE_BYTES;
            let verified: Vec<_> = self
                .copies
                .iter()
                .map(|copy| Batch::verify(copy.bytes.get(start..).unwrap_or_default(), &place))
                .collect();
            let Some(batch) = verified.iter().find_map(|batch| batch.as_ref().ok()).copied() else {
                self.check_end(&verified)?;
                break;
            };
            if planted!(TailBatchDropped) && !batch.is_checkpoint() && self.is_last() {
                break;
            }
            self.accept(batch, &verified)?;
        }
        if !self.checkpoint_done {
            return Err(damaged(self.copies, 1, "a checkpoint", "a manifest without one".into()));
        }
        Ok(())
    }

    /// Decides between end and damage where no copy has a valid batch (the table at the top of this file).
    fn check_end(&mut self, verified: &CopiesOfBatch<'_>) -> Result<()> {
        let (copies, page, sequence) = (self.copies, self.page, self.sequence);
        let word = durable_word(copies, page, (self.generation, self.nonce), sequence, self.synced);
        if let Some(word) = word.filter(|_| !planted!(SyncedThroughIgnored)) {
            let found =
                verified.iter().find_map(|batch| batch.as_ref().err()).map_or(String::new(), ToString::to_string);
            return Err(damaged(copies, page, &format!("batch {sequence}, durable according to {word}"), found));
        }
        // A batch with a valid checksum is not a torn end, so cutting it could lose a commit.
        if let Some(e) = verified.iter().filter_map(|batch| batch.as_ref().err()).find(|e| !Batch::may_be_torn(e)) {
            return Err(refused(copies, page, &format!("batch {sequence}"), e));
        }
        mark_cut(copies, page);
        // Bytes that are not zero are cut, so the generation cannot be continued.
        let has_bytes = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
        let range = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
        self.dirty |= copies.iter().any(|copy| copy.bytes.get(range.clone()).is_some_and(has_bytes));
        Ok(())
    }

    /// Returns whether no copy has another batch on the next page. Only a planted fault asks.
    fn is_last(&self) -> bool {
        let next = (self.page + 1) * PAGE_BYTES;
        self.copies.iter().all(|copy| copy.bytes.get(next..).is_none_or(|b| !b.starts_with(&m::BATCH_MAGIC)))
    }

    /// Adds a valid batch, and applies the run that it completes.
    fn accept(&mut self, batch: Batch<'a>, verified: &CopiesOfBatch<'_>) -> Result<()> {
        for (bad, _) in self.first_bad.iter_mut().zip(verified).filter(|(_, batch)| batch.is_err()) {
            self.dirty = true;
            bad.get_or_insert(self.sequence);
        }
        let known = if batch.is_checkpoint() { self.sequence } else { batch.header().synced_through.get() };
        self.durable = self.durable.max(known);
        self.page += batch.header().pages.get() as usize;
        self.sequence += 1;
        self.epoch = batch.header().epoch.get();
        self.pending.push(batch);
        if !batch.has_more() || planted!(SplitNotAtomic) {
            for batch in self.pending.drain(..) {
                apply(&mut self.catalog, &batch, self.copies, self.page)?;
                self.checkpoint_done |= batch.is_checkpoint();
            }
        }
        Ok(())
    }
}

/// Corrects the checksum of everything that starts like a batch: the planted fault of a reader that ignores checksums.
fn believe(copy: &mut ManifestCopy, nonce: u64) {
    let all = Arc::make_mut(&mut copy.bytes);
    for page in 1..all.len() / PAGE_BYTES {
        let bytes = &mut all[page * PAGE_BYTES..];
        let pages = Batch::claimed_pages(bytes).map_or(0, |pages| pages as usize);
        if pages > 0 && pages * PAGE_BYTES <= bytes.len() {
            let whole = &mut bytes[..pages * PAGE_BYTES];
            let crc = stratakv_format::checksum::crc_with_hole(&nonce.to_le_bytes(), whole, 4..8);
            whole[4..8].copy_from_slice(&crc.to_le_bytes());
        }
    }
}

/// Marks for the simulator what is stored after the last valid batch, which ends at `page`.
fn mark_cut(copies: &[ManifestCopy], page: usize) {
    let any = |is: &dyn Fn(&[u8]) -> bool| copies.iter().any(|c| c.bytes.get(page * PAGE_BYTES..).is_some_and(is));
    coverage!(ManifestCut, any(&|bytes| !is_zero(bytes)));
    coverage!(TornBatch, any(&|bytes| bytes.starts_with(&m::BATCH_MAGIC)));
}

/// Applies the records of a batch. Refuses records of features that the manifest's header does not name.
fn apply(catalog: &mut Catalog, batch: &Batch<'_>, copies: &[ManifestCopy], page: usize) -> Result<()> {
    for record in batch.records() {
        let record = record.map_err(|e| refused(copies, page, "records", &e))?;
        let may_have_copies = copies.iter().any(|copy| copy.features.has_copies());
        let encoded = copies.iter().any(|copy| copy.features.has_codecs());
        let pooled = copies.iter().any(|copy| copy.features.has_pools());
        let has_codecs = |bytes: &[u8]| Layout::decode(bytes).is_ok_and(|layout| layout.is_encoded());
        let applied = match &record {
            Record::Superseded(_) if batch.is_checkpoint() => Err("a checkpoint that names a successor".into()),
            Record::Layout(_, bytes) if !encoded && has_codecs(bytes) => {
                Err("a layout with codecs, but the manifest lacks the feature bit of codecs".into())
            }
            Record::Replica(_) if !may_have_copies => {
                Err("a copy, but the manifest lacks the feature bit of copies".into())
            }
            Record::SequenceCreate(create, _) if !may_have_copies && create.replicas > 1 => {
                Err("a sequence with several copies, but the manifest lacks the feature bit of copies".into())
            }
            Record::Frame(frame) if !pooled && frame.flags.get() & m::FLAG_DERIVED != 0 => {
                Err("a derived frame, but the manifest lacks the feature bit of pools".into())
            }
            Record::SegmentOpen(open) if !pooled && open.kind == KIND_POOL => {
                Err("a segment for pools, but the manifest lacks the feature bit of pools".into())
            }
            _ => catalog.apply(&record),
        };
        applied.map_err(|e| damaged(copies, page, "records that agree with each other", e))?;
    }
    Ok(())
}

/// Returns what states that batch `sequence`, which no copy has, was durable. Returns `None` at the end of the
/// manifest.
///
/// If more bytes look like batches than a manifest can hold, this is not a torn end, and these bytes are the answer.
fn durable_word(
    copies: &[ManifestCopy],
    page: usize,
    (generation, nonce): (u64, u64),
    sequence: u64,
    synced: u64,
) -> Option<String> {
    if synced >= sequence {
        return Some("a superblock".into());
    }
    for copy in copies {
        let mut left = copy.len.saturating_mul(BEHIND_READ_MAX);
        for at in page..copy.bytes.len() / PAGE_BYTES {
            let bytes = &copy.bytes[at * PAGE_BYTES..];
            let Ok((header, _)) = BatchHeader::ref_from_prefix(bytes) else { continue };
            let later = header.sequence.get();
            if header.magic != m::BATCH_MAGIC || later <= sequence || header.synced_through.get() < sequence {
                continue;
            }
            let Some(pages) = Batch::claimed_pages(bytes) else { continue };
            match left.checked_sub(pages as usize * PAGE_BYTES) {
                Some(rest) => left = rest,
                None => return Some(format!("what looks like batches in {}", copy.file)),
            }
            if Batch::verify(bytes, &BatchPlace { generation, nonce, sequence: later }).is_ok() {
                return Some(format!("batch {later} behind it"));
            }
        }
    }
    None
}

/// Returns the error for a complete batch that is not acceptable: another version, or damage.
fn refused(copies: &[ManifestCopy], page: usize, expected: &str, e: &FormatError) -> Error {
    if e.code == FormatErrorCode::Unsupported {
        let file = copies.first().map_or("the manifest", |copy| copy.file.as_str());
        return Error::new(ErrorKind::Unsupported, format!("{file}: written by another version: {e}"));
    }
    damaged(copies, page, expected, e.to_string())
}

fn damaged(copies: &[ManifestCopy], page: usize, expected: &str, found: String) -> Error {
    let (device, file) = copies.first().map_or((0, String::new()), |copy| (copy.device.0, copy.file.clone()));
    let place = Corruption {
        code: "manifest-batch",
        device,
        file,
        offset: (page * PAGE_BYTES) as u64,
        len: PAGE_BYTES as u64,
        expected: expected.into(),
        found,
    };
    Error::corrupt(place).during("the manifest is damaged in every copy; see kvfsck check")
}
