//! Reading the manifest: the first copy with a valid batch counts; what no copy has is the end or damage.
//!
//! | batch here in some copy | durable by a later word | meaning |
//! |---|---|---|
//! | valid | - | it counts |
//! | in none | yes (`synced_through` of a superblock or of a batch behind) | damage: refuse |
//! | in none, and one is whole but not acceptable | no | damage, or of another version: refuse |
//! | in none | no | the end: what stands behind is cut |

use super::ProbedDirectory;
use crate::catalog::{Catalog, SegmentMeta};
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory};
use crate::io::planted;
use crate::log::ManifestPlace;
use std::collections::BTreeMap;
use std::sync::Arc;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::features::Features;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, Batch, BatchHeader, BatchPlace, ManifestPage, Record};
use stratakv_format::segment::KIND_LOG;
use stratakv_format::superblock::Slot;
use stratakv_format::{DeviceIndex, FormatError, PAGE_BYTES, Unverified};
use zerocopy::FromBytes;

/// Bytes read at once.
const CHUNK_BYTES: usize = 4 << 20;
/// How often what stands behind the end is read in search of a batch, at most.
const BEHIND_READ_MAX: usize = 4;

/// The state of a store as its manifest has it.
pub(crate) struct Replayed {
    pub(crate) catalog: Catalog,
    pub(crate) place: ManifestPlace,
    pub(crate) epoch: u64,
    /// Something was cut, a copy is damaged, or a checkpoint was not finished: a new generation must start.
    pub(crate) dirty: bool,
    /// This build knows every feature that a writer of this generation must know.
    pub(crate) writable: bool,
    /// Copies of the manifest that are not what was written, by device.
    pub(crate) damaged: BTreeMap<DeviceIndex, u64>,
    /// Copies of the generation in force that can be read, by device.
    pub(crate) held: BTreeMap<DeviceIndex, u8>,
}

/// Device and number of a copy.
type CopyName = (DeviceIndex, u8);

struct ManifestCopy {
    device: DeviceIndex,
    file: String,
    /// What it holds, but for its header page and for zeros at its end. Copies that hold the same share it: what is replayed takes
    /// memory once.
    bytes: Arc<Vec<u8>>,
    /// Bytes of the file, in whole pages.
    len: usize,
    /// Of its header.
    features: Features,
}

/// Replays the manifest that the newest slots name, in at most `memory` bytes for what is read of it at a time. `found` is in the
/// order of the devices' indices.
///
/// # Errors
/// Damage that no copy makes good, a version this build does not know, or records that contradict each other.
/// [`ErrorKind::MemoryLimit`]: the manifest is larger than `memory`.
pub(crate) fn replay(found: &[ProbedDirectory], store_id: [u8; 16], memory: usize) -> Result<Replayed> {
    let newest = found.iter().filter_map(|f| f.slot.as_ref()).max_by_key(|slot| slot.manifest_generation.get());
    let Some(newest) = newest else {
        return Err(Error::new(ErrorKind::Corruption, "no superblock names a manifest"));
    };
    let place = |f: &ProbedDirectory| {
        let copies = f.slots.iter().map(|slot| slot.manifest_copies).max().unwrap_or(0);
        Some((DeviceIndex(f.slot?.device_index.get()), Arc::clone(&f.directory), copies))
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
                return Ok(Replayed { damaged, ..replayed });
            }
            Some((next, _)) if next <= generation => {
                let text = format!("manifest generation {generation} names {next} as its successor");
                return Err(Error::new(ErrorKind::Corruption, text));
            }
            // The superblocks were not flipped any more.
            Some(next) => {
                (generation, nonce) = next;
                followed = true;
            }
        }
    }
}

/// Segments are of the store's size, and of the kind that frames lie in.
fn check_segments(catalog: &Catalog, slot: &Slot) -> Result<()> {
    let bytes = slot.segment_bytes.get();
    let wrong = |s: &SegmentMeta| u64::from(s.pages) * PAGE_BYTES as u64 != bytes || s.kind != KIND_LOG;
    let Some((key, segment)) = catalog.segments.iter().find(|(_, segment)| wrong(segment)) else { return Ok(()) };
    let (device, id, pages, kind) = (key.0, key.1, segment.pages, segment.kind);
    let text = format!(
        "segment {id} of device {device}: {pages} pages of kind {kind} in a store of segments of {bytes} bytes"
    );
    Err(Error::new(ErrorKind::Corruption, text).during("the manifest is damaged in every copy; see kvfsck check"))
}

fn replay_generation(
    devices: &[(DeviceIndex, Arc<dyn Directory>, u8)],
    slots: &[Slot],
    store_id: [u8; 16],
    (generation, nonce): (u64, u64),
    memory: usize,
) -> Result<Replayed> {
    let wanted = (generation, nonce);
    let naming = || slots.iter().filter(|slot| (slot.manifest_generation.get(), slot.manifest_nonce.get()) == wanted);
    let (mut copies, first_batch, unread) = read_copies(devices, store_id, wanted, memory)?;
    let mut dirty = !unread.is_empty();
    // Up to the last that is good: whoever is told of fewer looks at no other.
    let read = |device: DeviceIndex, there: u8| {
        (0..there).rfind(|copy| !unread.contains(&(device, *copy))).map_or(0, |last| last + 1)
    };
    let held = devices.iter().map(|(device, _, there)| (*device, read(*device, *there))).collect();
    // Where no superblock says that a copy is there, it may never have been.
    let is_there = |(device, copy): &(DeviceIndex, u8)| {
        naming().any(|slot| slot.device_index.get() == device.0 && slot.manifest_copies > *copy)
    };
    let mut rotten: BTreeMap<DeviceIndex, u64> = BTreeMap::new();
    unread.iter().filter(|copy| is_there(copy)).for_each(|(device, _)| *rotten.entry(*device).or_default() += 1);
    if planted!(TornBatchAccepted) {
        copies.iter_mut().for_each(|copy| believe(copy, nonce));
    }
    let synced = naming().map(|slot| slot.synced_through.get()).max().unwrap_or(0);
    // The last batch that is known durable by now, and by copy the first that it does not have.
    let (mut durable, mut first_bad) = (synced, vec![None; copies.len()]);
    let mut catalog = Catalog::default();
    let (mut page, mut sequence, mut epoch) = (1_usize, first_batch, 0);
    // Start of a run of batches that take effect together and whose last one was not seen yet.
    let mut pending: Vec<Batch<'_>> = Vec::new();
    let mut checkpoint_done = false;
    loop {
        let place = BatchPlace { generation, nonce, sequence };
        let verified: Vec<_> = copies
            .iter()
            .map(|copy| Batch::verify(copy.bytes.get(page * PAGE_BYTES..).unwrap_or_default(), &place))
            .collect();
        let Some(batch) = verified.iter().find_map(|batch| batch.as_ref().ok()).copied() else {
            let word = durable_word(&copies, page, generation, nonce, sequence, synced);
            if let Some(word) = word.filter(|_| !planted!(SyncedThroughIgnored)) {
                let found = verified.into_iter().find_map(Result::err).map_or(String::new(), |e| e.to_string());
                return Err(damaged(&copies, page, &format!("batch {sequence}, durable by {word}"), found));
            }
            // With a good checksum it is no torn end: cutting it could cut a commit.
            if let Some(e) = verified.iter().filter_map(|batch| batch.as_ref().err()).find(|e| !Batch::may_be_torn(e)) {
                return Err(refused(&copies, page, &format!("batch {sequence}"), e));
            }
            mark_cut(&copies, page);
            // Something is cut.
            let there = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
            let range = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
            dirty |= copies.iter().any(|copy| copy.bytes.get(range.clone()).is_some_and(there));
            break;
        };
        let last = || {
            copies
                .iter()
                .all(|copy| copy.bytes.get((page + 1) * PAGE_BYTES..).is_none_or(|b| !b.starts_with(&m::BATCH_MAGIC)))
        };
        if planted!(TailBatchDropped) && !batch.is_checkpoint() && last() {
            break;
        }
        for (bad, _) in first_bad.iter_mut().zip(&verified).filter(|(_, batch)| batch.is_err()) {
            dirty = true;
            bad.get_or_insert(sequence);
        }
        let known = if batch.is_checkpoint() { sequence } else { batch.header().synced_through.get() };
        durable = durable.max(known);
        page += batch.header().pages.get() as usize;
        sequence += 1;
        epoch = batch.header().epoch.get();
        pending.push(batch);
        if !batch.has_more() || planted!(SplitNotAtomic) {
            for batch in pending.drain(..) {
                apply(&mut catalog, &batch, &copies, page)?;
                checkpoint_done |= batch.is_checkpoint();
            }
        }
    }
    if !checkpoint_done {
        return Err(damaged(&copies, 1, "a checkpoint", "a manifest without one".into()));
    }
    if !pending.is_empty() {
        coverage!(SplitCut);
    }
    dirty |= !pending.is_empty();
    // A file that is too short for even the word that it is superseded cannot be gone on with.
    dirty |= copies.iter().any(|copy| copy.len < (page + 2) * PAGE_BYTES);
    let place =
        ManifestPlace { generation, nonce, next_batch: sequence, synced_through: sequence - 1, next_page: page as u64 };
    let writable = copies.iter().all(|copy| copy.features.writable());
    // One that ends earlier than that was torn, or never got there.
    for (copy, _) in copies.iter().zip(first_bad).filter(|(_, bad)| bad.is_some_and(|bad| bad <= durable)) {
        *rotten.entry(copy.device).or_default() += 1;
    }
    Ok(Replayed { catalog, place, epoch, dirty, writable, damaged: rotten, held })
}

/// The fault of a reader that does not look at checksums: makes those of whatever starts like a batch right.
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

fn apply(catalog: &mut Catalog, batch: &Batch<'_>, copies: &[ManifestCopy], page: usize) -> Result<()> {
    for record in batch.records() {
        let record = record.map_err(|e| refused(copies, page, "records", &e))?;
        let replicated = copies.iter().any(|copy| copy.features.has_copies());
        let encoded = copies.iter().any(|copy| copy.features.has_codecs());
        let has_codecs = |bytes: &[u8]| Layout::decode(bytes).is_ok_and(|layout| layout.is_encoded());
        let applied = match &record {
            Record::Superseded(_) if batch.is_checkpoint() => Err("a checkpoint that is superseded".into()),
            Record::Layout(_, bytes) if !encoded && has_codecs(bytes) => {
                Err("a layout with codecs in a manifest without the feature of codecs".into())
            }
            Record::Replica(_) if !replicated => Err("a copy in a manifest without the feature of copies".into()),
            Record::SequenceCreate(create, _) if !replicated && create.replicas > 1 => {
                Err("a sequence of several copies in a manifest without the feature of copies".into())
            }
            _ => catalog.apply(&record),
        };
        applied.map_err(|e| damaged(copies, page, "records that fit together", e))?;
    }
    Ok(())
}

/// The copies that can be read, the number of the first batch, and the copies that cannot.
fn read_copies(
    devices: &[(DeviceIndex, Arc<dyn Directory>, u8)],
    store_id: [u8; 16],
    (generation, nonce): (u64, u64),
    mut memory: usize,
) -> Result<(Vec<ManifestCopy>, u64, Vec<CopyName>)> {
    let mut copies = Vec::new();
    let mut first_batch = None;
    let mut unread = Vec::new();
    let mut error = None;
    for (device, directory, copies_there) in devices {
        for copy in 0..*copies_there {
            let name = m::file_name(generation, copy);
            let wanted = (store_id, generation, nonce);
            let like = copies.first().map(|copy: &ManifestCopy| &copy.bytes);
            match read_copy(&**directory, (*device, copy), &name, wanted, like, memory) {
                Ok((read, first)) => {
                    if !like.is_some_and(|like| Arc::ptr_eq(like, &read.bytes)) {
                        memory = memory.saturating_sub(read.bytes.len());
                    }
                    first_batch = first_batch.or(Some(first));
                    copies.push(read);
                }
                // A copy that cannot be read is one that is damaged.
                Err(e) if matches!(e.kind(), ErrorKind::Corruption | ErrorKind::NotFound | ErrorKind::Io) => {
                    unread.push((*device, copy));
                    // One that is there and cannot be read tells more than one that is not.
                    if error.as_ref().is_none_or(|before: &Error| before.kind() != ErrorKind::Io) {
                        error = Some(e);
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }
    match (first_batch, error) {
        (Some(first), _) => Ok((copies, first, unread)),
        (None, Some(e)) => {
            let kind = if e.kind() == ErrorKind::Io { ErrorKind::Io } else { ErrorKind::Corruption };
            Err(e.with_kind(kind).during("every copy of the manifest is unusable"))
        }
        (None, None) => Err(Error::new(ErrorKind::Corruption, "no device holds a manifest")),
    }
}

fn read_copy(
    directory: &dyn Directory,
    (device, copy): (DeviceIndex, u8),
    name: &str,
    (store_id, generation, nonce): ([u8; 16], u64, u64),
    like: Option<&Arc<Vec<u8>>>,
    memory: usize,
) -> Result<(ManifestCopy, u64)> {
    let file = directory.open_file(name, Access::ReadOnly)?;
    let len = file.len()? / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if len > m::FILE_BYTES_MAX {
        return Err(Error::new(ErrorKind::Corruption, format!("{name} has {len} bytes")));
    }
    let header = directory.read_small(&file, 0, (len as usize).min(PAGE_BYTES))?;
    let corrupt = |expected: String, found: String| {
        Error::corrupt(Corruption {
            code: "manifest-page",
            device: device.0,
            file: name.into(),
            offset: 0,
            len: PAGE_BYTES as u64,
            expected,
            found,
        })
    };
    let page =
        Unverified::<ManifestPage>::at_front(&header, "manifest page").and_then(|page| page.verify()).map_err(|e| {
            match e.code {
                FormatErrorCode::Unsupported => {
                    Error::new(ErrorKind::Unsupported, format!("{name}: written by another version: {e}"))
                }
                _ => corrupt("a manifest header".into(), e.to_string()),
            }
        })?;
    let found = (page.store_id, page.generation.get(), page.nonce.get(), page.device.get(), page.copy);
    if found != (store_id, generation, nonce, device.0, copy) {
        let text = "that of another store, generation, device or copy";
        return Err(corrupt(format!("the header of generation {generation}"), text.into()));
    }
    let first = page.first_batch.get();
    if first == 0 {
        return Err(corrupt("a first batch from 1 on".into(), "0".into()));
    }
    let features = page.features;
    let (bytes, len) = read_pages(directory, &file, len as usize, like, memory)?;
    Ok((ManifestCopy { device, file: name.into(), bytes, len, features }, first))
}

/// What stands behind the header page of a file of `len` bytes, and how long it is. Where that is what is known already, that;
/// else at most `memory` bytes.
fn read_pages(
    directory: &dyn Directory,
    file: &DeviceFile,
    len: usize,
    like: Option<&Arc<Vec<u8>>>,
    memory: usize,
) -> Result<(Arc<Vec<u8>>, usize)> {
    let known = |from: usize, to: usize| like.and_then(|like| like.get(from.min(like.len())..to.min(like.len())));
    let (mut same, mut own, mut at) = (like.is_some(), Vec::new(), PAGE_BYTES.min(len));
    while at < len {
        let chunk = directory.read_small(file, at as u64, (len - at).min(CHUNK_BYTES))?;
        if chunk.is_empty() {
            break;
        }
        let end = at + chunk.len();
        if same {
            let (there, rest) = chunk.split_at(known(at, end).unwrap_or_default().len());
            same = known(at, end).is_some_and(|known| known == there) && is_zero(rest);
            if !same {
                own = known(0, at).unwrap_or_default().to_vec();
            }
        }
        let used = if same { 0 } else { used_bytes(&chunk) };
        if used > 0 {
            let needed = at + used;
            if needed > memory {
                let text =
                    format!("a manifest of {needed} bytes and more is read, and memory_limit has {memory} for that");
                return Err(Error::new(ErrorKind::MemoryLimit, text));
            }
            own.resize(at, 0);
            own.extend_from_slice(&chunk[..used]);
        }
        at = end;
    }
    match like {
        Some(like) if same && like.len() <= at => return Ok((Arc::clone(like), at)),
        Some(like) if same => own = like[..at].to_vec(),
        _ => {}
    }
    // A batch may end in zeros.
    let batch = m::BATCH_PAGES_MAX as usize * PAGE_BYTES;
    own.truncate(used_bytes(&own));
    own.resize((own.len().max(PAGE_BYTES) + batch).min(at), 0);
    own.shrink_to_fit();
    Ok((Arc::new(own), at))
}

/// Bytes up to the end of the last page that is not zero.
fn used_bytes(bytes: &[u8]) -> usize {
    let pages = bytes.chunks(PAGE_BYTES).rposition(|page| !is_zero(page)).map_or(0, |last| last + 1);
    (pages * PAGE_BYTES).min(bytes.len())
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(64).all(|chunk| chunk.iter().fold(0, |or, byte| or | byte) == 0)
}

/// Who says that batch `sequence`, valid in no copy, was durable; nobody when it is the end. Where more looks like batches than
/// a manifest can hold, that is no torn end.
fn durable_word(
    copies: &[ManifestCopy],
    page: usize,
    generation: u64,
    nonce: u64,
    sequence: u64,
    synced: u64,
) -> Option<String> {
    if synced >= sequence {
        return Some("a superblock".into());
    }
    for copy in copies {
        let mut left = copy.bytes.len().saturating_mul(BEHIND_READ_MAX);
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

/// What is whole and yet not acceptable: of another version, or damage.
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
