//! The store: open, create, sequences, reads, close.

mod adapters;
mod create;
mod maintain;
mod members;
mod repair;
mod start;
mod status;
mod usage;

#[cfg(test)]
pub(crate) mod tests;

use create::{create, prepare, random_id, write_first_superblock};
use start::{MemberDevice, start_devices};

pub use adapters::AdapterInfo;
pub use maintain::{CleanReport, Health};
pub use status::{DeviceStatus, SequenceInfo, StoreStatus};
pub use usage::{DeviceUsage, NamespaceUsage, Usage};

use crate::catalog::{COPIES_MAX, Catalog, RecordBuffer, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::region::ReadRegion;
use crate::io::buffer::slab::{PageBacking, SLAB_BYTES};
use crate::io::file::directory::{Access, Directory};
use crate::io::planted;
use crate::layout::KvLayout;
use crate::log::{
    Background, Committer, Device, Devices, FRAMES_IN_FLIGHT, GenerationStart, IdAllocator, MaintenanceLocks,
    ManifestLog, NextIds, OpenHandles, SegmentAllocator, SequenceIdentity, SequenceLock, StoreActivity, StoreIdentity,
    StoreInner, Watermarks, WriteLimits, keep_spare, random_u64, unix_ms, with_heirs,
};
use crate::maintenance::{self, level_epochs, remove_leftovers, settle_generation};
use crate::metrics::lock;
use crate::options::{CreateOptions, Durability, StoreOptions, StoredSummary};
use crate::plan::ReadPriority;
use crate::plan::{Selection, SelectionInner};
use crate::read::{ReadBatch, ReadTicket};
use crate::recovery::{
    ProbeResult, ProbedDirectory, open_directories, read_devices, read_only_features, replay, stale_device,
};
use crate::sequence::{OpenSequence, Sequence, load};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stratakv_format::features::{INCOMPAT_CODECS, INCOMPAT_REPLICAS};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::superblock::{SLOTS, STATE_CLOSED, STATE_OPEN, Slot};
use stratakv_format::{DeviceIndex, LayoutId, PAGE_BYTES, SequenceId};
use zerocopy::little_endian::U64;

/// Frame and sequence ids that are passed over after a crash: those given out before it and not recorded stay unused.
const IDS_SKIPPED: u64 = 1 << 20;

/// An open store. Cheap to clone; all clones are one store, which is closed when the last is dropped.
#[derive(Clone)]
pub struct Store {
    inner: Arc<StoreInner>,
}

impl Store {
    /// Options, to be filled in and opened.
    #[must_use]
    pub fn options() -> StoreOptions {
        StoreOptions::default()
    }

    /// Opens or creates a store: [`StoreOptions::open`].
    ///
    /// # Errors
    /// As [`StoreOptions::open`].
    pub fn open(options: StoreOptions) -> Result<Self> {
        let memory = usize::try_from(options.memory_limit.bytes()).unwrap_or(usize::MAX);
        if memory < 2 * SLAB_BYTES {
            let text = format!(
                "memory_limit {} is below the {} bytes that buffers take",
                options.memory_limit,
                2 * SLAB_BYTES
            );
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let directories = open_directories(&options.devices, access)?;
        Self::open_in(options, directories)
    }

    /// Opens or creates a store in these directories.
    pub(crate) fn open_in(options: StoreOptions, directories: Vec<Arc<dyn Directory>>) -> Result<Self> {
        let memory = usize::try_from(options.memory_limit.bytes()).unwrap_or(usize::MAX);
        let (low, high) = (options.low_watermark, options.high_watermark);
        if !(low > 0.0 && low <= high && high <= 1.0) {
            let text = format!("watermarks {low} and {high} are not 0 < low <= high <= 1");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        if options.shard_threads == Some(0) {
            return Err(Error::new(ErrorKind::Configuration, "shard_threads 0: somebody has to serve the devices"));
        }
        match read_devices(directories, options.read_only, memory)? {
            ProbeResult::Store(found) => open_existing(&options, memory, found),
            ProbeResult::Empty(found) if options.create && !options.read_only => create(&options, memory, found),
            ProbeResult::Empty(found) => {
                let path = found.first().map(|f| f.directory.path().display().to_string()).unwrap_or_default();
                let text = format!("device directory {path}: holds no store, and creating one was not asked for");
                Err(Error::new(ErrorKind::Configuration, text))
            }
        }
    }

    pub(crate) fn inner(&self) -> &Arc<StoreInner> {
        &self.inner
    }

    /// Creates a sequence. It is stored with its first commit.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: the key is taken. [`ErrorKind::InvalidArgument`]: a key over 512 bytes.
    /// [`ErrorKind::MemoryLimit`]: no memory for its tails.
    pub fn create_sequence(&self, layout: &KvLayout, options: CreateOptions) -> Result<Sequence> {
        let inner = &self.inner;
        inner.committer.check_memory()?;
        let copies = options.replicas.max(1);
        if usize::from(copies) > COPIES_MAX {
            let text = format!("{copies} copies; from 1 to {COPIES_MAX}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let members = inner.devices.list.slots();
        if usize::from(copies) > members {
            let text = format!("{copies} copies take as many devices; the store has {members}");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let (id, claim) = inner.claim(&options.key)?;
        let mut records = RecordBuffer::default();
        if copies > 1 {
            records.require_replicas();
        }
        let layout_id = self.layout_id(layout);
        let summaries = options.summaries.iter().fold(0, |bits, summary| match summary {
            StoredSummary::MinMax => bits | 1 << (stratakv_format::frame::SUMMARY_MIN_MAX - 1),
        });
        let meta = SequenceMeta {
            key: options.key.clone(),
            layout: layout_id,
            summaries,
            created_unix_ms: unix_ms(),
            ttl_ms: options.ttl_ms,
            replicas: copies,
            evictable: options.evictable,
            parent: None,
            tokens: 0,
            token_ids: 0,
            state_frame: None,
            committed_unix_ms: 0,
            used_unix_ms: 0,
            adapter: None,
            refs: Vec::new(),
        };
        records.push(Kind::SequenceCreate, &meta.create_record(id), meta.key.as_bytes());
        let who = SequenceIdentity {
            sequence: id,
            parent: None,
            key: options.key.clone(),
            summaries,
            layout_id,
            layout: layout.clone(),
            ttl_ms: options.ttl_ms,
            evictable: options.evictable,
            copies: usize::from(copies),
        };
        lock(&inner.space).classify(id, class_of(&meta));
        Sequence::new(claim, who, records, options.residency)
    }

    /// The number of a layout, a new one where the store does not have it yet.
    fn layout_id(&self, layout: &KvLayout) -> LayoutId {
        let mut catalog = lock(&self.inner.catalog);
        catalog.find_layout(layout).unwrap_or_else(|| {
            let id = catalog.counters.layout;
            catalog.counters.layout += 1;
            LayoutId(id)
        })
    }

    /// Opens a sequence by its key, as its last commit left it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InUse`]: it is open already; [`ErrorKind::Corruption`]: its frames are damaged.
    pub fn open_sequence(&self, key: &str) -> Result<Sequence> {
        self.open_sequence_with(key, OpenSequence::default())
    }

    /// As [`Store::open_sequence`], with options.
    ///
    /// # Errors
    /// As there; [`ErrorKind::LayoutMismatch`] when it was written with another layout than it must have.
    pub fn open_sequence_with(&self, key: &str, options: OpenSequence) -> Result<Sequence> {
        self.inner.flush_others()?;
        let id = lock(&self.inner.catalog).keys.get(key).copied();
        let id = id.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no sequence has the key {key:?}")))?;
        self.open_sequence_id_with(id, options)
    }

    /// Opens a sequence by its id.
    ///
    /// # Errors
    /// As [`Store::open_sequence`].
    pub fn open_sequence_id(&self, id: SequenceId) -> Result<Sequence> {
        self.open_sequence_id_with(id, OpenSequence::default())
    }

    /// As [`Store::open_sequence_id`], with options.
    ///
    /// # Errors
    /// As there.
    pub fn open_sequence_id_with(&self, id: SequenceId, options: OpenSequence) -> Result<Sequence> {
        let claim = SequenceLock::new(&self.inner, id, "");
        // Whoever had it open let go of it with its last commit, or its deletion, queued at least.
        self.inner.flush_others()?;
        let meta = {
            let mut catalog = lock(&self.inner.catalog);
            let found = catalog.sequences.get_mut(&id).filter(|meta| meta.adapter.is_none());
            found.map(|meta| {
                meta.used_unix_ms = unix_ms();
                meta.clone()
            })
        };
        let meta = meta.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("sequence {id} does not exist")))?;
        let claim = claim.ok_or_else(|| Error::new(ErrorKind::InUse, format!("sequence {id} is open already")))?;
        lock(&self.inner.space).classify(id, class_of(&meta));
        let load = |claim| load(claim, id, &meta, options.summaries);
        let loaded = load(claim).or_else(|e| match (e.kind(), SequenceLock::new(&self.inner, id, "")) {
            // A bit may have gone wrong on the way and not on the medium: read once more.
            (ErrorKind::Corruption, Some(claim)) if !planted!(NotReadAgain) => load(claim),
            _ => Err(e),
        });
        let sequence = loaded.map_err(|e| e.during(format!("open sequence {id}")))?;
        match options.layout.filter(|layout| layout != sequence.layout()) {
            None => Ok(sequence),
            Some(layout) => {
                let what = layout.difference(sequence.layout().raw());
                let text = format!(
                    "sequence {:?} was written with another {what}: another model, dtype, group size or codec",
                    sequence.key()
                );
                Err(Error::new(ErrorKind::LayoutMismatch, text))
            }
        }
    }

    /// Deletes a sequence without opening it, also one that is too damaged to be opened. As [`Sequence::delete`].
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InUse`]: it is open; the commit of the deletion failed.
    pub fn delete_sequence_id(&self, id: SequenceId, durability: Durability) -> Result<()> {
        let claim = SequenceLock::new(&self.inner, id, "");
        self.inner.flush_others()?;
        if lock(&self.inner.catalog).sequences.get(&id).is_none_or(|meta| meta.adapter.is_some()) {
            return Err(Error::new(ErrorKind::NotFound, format!("sequence {id} does not exist")));
        }
        let _claim = claim.ok_or_else(|| Error::new(ErrorKind::InUse, format!("sequence {id} is open")))?;
        self.inner.delete_sequence(id, durability)
    }

    /// Opens the sequence with this key, which must have exactly this layout, fingerprint included.
    ///
    /// # Errors
    /// As [`Store::open_sequence`]; [`ErrorKind::LayoutMismatch`] when it was written with another layout.
    pub fn open_sequence_as(&self, key: &str, layout: &KvLayout) -> Result<Sequence> {
        self.open_sequence_with(key, OpenSequence::new().layout(layout))
    }

    /// Committed sequences, by id.
    #[must_use]
    pub fn sequences(&self) -> Vec<SequenceInfo> {
        let catalog = lock(&self.inner.catalog);
        let info = |(id, meta): (&SequenceId, &SequenceMeta)| SequenceInfo {
            id: id.0,
            key: meta.key.clone(),
            tokens: meta.tokens,
            disk_bytes: {
                let frames = meta.refs.iter().filter_map(|(frame, _)| catalog.frames.get(frame));
                frames.flat_map(|frame| frame.locations()).map(|location| location.bytes()).sum()
            },
            frames: meta.refs.len(),
            parent: meta.parent.map(|(parent, _)| parent.0),
            created_unix_ms: meta.created_unix_ms,
            committed_unix_ms: meta.committed_unix_ms,
            ttl_ms: meta.ttl_ms,
            evictable: meta.evictable,
        };
        catalog.sequences.iter().filter(|(_, meta)| meta.adapter.is_none()).map(info).collect()
    }

    /// Reads what views selected: many layers and many sequences in one call, submitted together. Returns at once; wait on
    /// the ticket.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: it can never fit in memory. [`ErrorKind::InvalidArgument`]: a view of another store.
    pub fn read(&self, views: &[&Selection]) -> Result<ReadTicket> {
        self.read_as(views, ReadPriority::Demand(None))
    }

    /// Reads views that may be needed soon: behind reads that somebody waits for, before writes. What a cache holds already is
    /// not counted as asked for.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_ahead(&self, views: &[&Selection]) -> Result<ReadTicket> {
        self.read_as(views, ReadPriority::Ahead)
    }

    pub(crate) fn read_as(&self, views: &[&Selection], urgency: ReadPriority<'_>) -> Result<ReadTicket> {
        ReadTicket::new(Arc::clone(&self.inner.devices), self.own_views(views)?, urgency)
    }

    /// Reads as [`Self::read`] does, into memory of the embedder: blocks that devices bring lie in `region` until the batch is
    /// dropped ([`ReadRegion::offset_of`] says where); tails and cached blocks stay in the store's own memory.
    ///
    /// # Errors
    /// As [`Self::read`]; [`ErrorKind::MemoryLimit`]: it can never fit in the region.
    pub fn read_into(&self, views: &[&Selection], region: &ReadRegion) -> Result<ReadTicket> {
        ReadTicket::read_into(Arc::clone(&self.inner.devices), self.own_views(views)?, region)
    }

    fn own_views(&self, views: &[&Selection]) -> Result<Vec<Arc<SelectionInner>>> {
        let own = self.inner.devices.identity.instance;
        if let Some(at) = views.iter().position(|view| view.inner.instance != own) {
            let text = format!("view {at} belongs to another store, or to an earlier opening of this one");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(views.iter().map(|view| Arc::clone(&view.inner)).collect())
    }

    /// Reads and checks the blocks of views, as [`Self::read`] and [`ReadTicket::wait`] together do, with the calling thread
    /// itself at the device: no other thread is woken, which counts for small batches. Nothing else happens on this thread
    /// meanwhile; use [`Self::read`] to compute while blocks arrive.
    ///
    /// # Errors
    /// As [`Self::read`] and [`ReadTicket::wait`].
    pub fn read_now(&self, views: &[&Selection]) -> Result<ReadBatch> {
        ReadTicket::read_now(Arc::clone(&self.inner.devices), self.own_views(views)?)
    }

    /// How the store runs: drivers, memory, bytes.
    #[must_use]
    pub fn status(&self) -> StoreStatus {
        let inner = &self.inner;
        let devices = &inner.devices;
        let device = |device: &Device| {
            let status = device.shard.status();
            DeviceStatus {
                index: device.index.0,
                path: device.directory.path().display().to_string(),
                driver: status.name.to_owned(),
                notes: status.notes,
                direct: device.directory.direct_io().is_direct(),
                available_bytes: device.directory.space().ok().map(|space| space.available),
                counters: device.counters.snapshot(),
                profile: device.profile.status(),
            }
        };
        let pages = devices.arena.usage().backing.map(|backing| {
            match backing {
                PageBacking::Explicit => "explicit",
                PageBacking::Transparent => "transparent",
                PageBacking::Plain => "plain",
            }
            .to_owned()
        });
        let (live_bytes, sequences) = {
            let catalog = lock(&inner.catalog);
            let live: u64 = catalog.segments.values().map(|s| s.live_pages * PAGE_BYTES as u64).sum();
            (live, catalog.sequences.len() - catalog.adapters.len())
        };
        // One lock at a time.
        let file_bytes = lock(&inner.space).file_bytes(devices);
        StoreStatus {
            devices: devices.list.iter().map(device).collect(),
            memory: devices.budget.usage(),
            pages,
            file_bytes,
            live_bytes,
            written_bytes: inner.activity.written_bytes(),
            sequences,
            cache: inner.cache.as_ref().map(|cache| cache.status()),
        }
    }

    /// Makes every lazy commit durable.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`], [`ErrorKind::Poisoned`]: a sync failed.
    pub fn flush(&self) -> Result<()> {
        self.inner.flush_commits()
    }
}

impl StoreOptions {
    /// Opens the store, or creates it.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: no device given, one missing, foreign, doubled or of another store, or with
    /// permissions that let others in. [`ErrorKind::StaleDevice`]: one that left the store. [`ErrorKind::InUse`]: another process has it. [`ErrorKind::Unsupported`]: written
    /// by another version. [`ErrorKind::Corruption`]: its metadata is damaged beyond the copies.
    pub fn open(self) -> Result<Store> {
        Store::open(self)
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("devices", &self.inner.devices.list.len()).finish_non_exhaustive()
    }
}

fn open_existing(options: &StoreOptions, memory: usize, found: Vec<ProbedDirectory>) -> Result<Store> {
    let slots: Vec<Slot> = found.iter().filter_map(|f| f.slot).collect();
    let Some(first) = slots.first() else {
        return Err(Error::new(ErrorKind::Configuration, "no device directory holds a store"));
    };
    let identity = StoreIdentity {
        store_id: first.store_id,
        checksum: first.checksum(),
        segment_pages: (first.segment_bytes.get() / PAGE_BYTES as u64) as u32,
        instance: random_u64()?,
    };
    let every_slot: Vec<Slot> = found.iter().flat_map(|f| f.slots.iter().copied()).collect();
    // Made good by writing both again.
    let rotten: Vec<u64> = found.iter().map(ProbedDirectory::damaged_slots).collect();
    let mut replayed = replay(&found, identity.store_id, memory)?;
    if !options.read_only && !replayed.writable {
        return Err(read_only_features(&format!("manifest generation {}", replayed.place.generation)));
    }
    let mut known = Vec::new();
    for (found, slot) in found.into_iter().zip(&slots) {
        match replayed.catalog.members.get(&DeviceIndex(slot.device_index.get())) {
            Some(member) if member.device_id == slot.device_id => {
                known.push(MemberDevice { directory: found.directory, slot: *slot, member: *member });
            }
            _ => {
                let path = found.directory.path().display().to_string();
                let text = format!("device directory {path}: is not the device the store knows");
                return Err(Error::new(ErrorKind::Configuration, text));
            }
        }
    }
    let active: Vec<_> = known.iter().map(|k| k.member).filter(|member| member.state == m::MEMBER_ACTIVE).collect();
    let changed = with_heirs(missing_members(options, &replayed.catalog, &known)?, &active);
    let recorded = replayed.catalog.members.values().map(|member| member.epoch.get());
    let epoch = slots.iter().map(|slot| slot.epoch.get()).chain(recorded).max().unwrap_or(1).max(replayed.epoch);
    for mut member in changed.iter().copied() {
        member.epoch = U64::new(epoch.saturating_add(1));
        replayed.catalog.members.insert(DeviceIndex(member.device.get()), member);
        known.iter_mut().filter(|k| k.member.device == member.device).for_each(|k| k.member = member);
    }
    let members = replayed.catalog.members.keys().map(|device| usize::from(device.0) + 1).max().unwrap_or(1);
    let unclean = replayed.dirty
        || rotten.iter().any(|slots| *slots > 0)
        || !changed.is_empty()
        || slots.iter().any(|slot| slot.state != STATE_CLOSED);
    let unclean = unclean && !planted!(GenerationNotBumped);
    let devices = start_devices(options, memory, identity, known, members)?;
    for (slot, rotten) in slots.iter().zip(rotten) {
        let index = DeviceIndex(slot.device_index.get());
        let copies = replayed.damaged.get(&index).copied().unwrap_or(0);
        devices.get(index)?.counters.damaged_metadata.add(rotten + copies);
    }
    let catalog = &replayed.catalog;
    let copies = catalog.frames.values().any(|frame| frame.copies() > 1)
        || catalog.sequences.values().any(|sequence| sequence.replicas > 1);
    let codecs = catalog.layouts.values().any(|layout| layout.raw().is_encoded());
    let features = [(copies, INCOMPAT_REPLICAS), (codecs, INCOMPAT_CODECS)];
    let features = features.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit);
    devices.incompat.fetch_or(features, Ordering::Relaxed);
    let account = replayed.catalog.memory_bytes();
    if options.read_only {
        check_account(account, memory)?;
        // What recovery would write stands in memory alone, and is found again each time.
        let manifest = ManifestLog::read_only(replayed.place, replayed.epoch);
        return start(options, devices, replayed.catalog, manifest);
    }
    let manifest = if unclean {
        let counters = &mut replayed.catalog.counters;
        counters.frame = counters.frame.saturating_add(IDS_SKIPPED);
        counters.sequence = counters.sequence.saturating_add(IDS_SKIPPED);
        counters.lsn = counters.lsn.saturating_add(IDS_SKIPPED);
        let place = replayed.place;
        level_epochs(&devices)?;
        settle_generation(&devices, &every_slot, (place.generation, place.nonce), &replayed.held)?;
        // A recovery that was cut left files of both sides: on a full device the new generation needs their room.
        for device in devices.list.iter() {
            remove_leftovers(&*device.directory, device.index, place.generation, &replayed.catalog)?;
        }
        // Numbers of batches that were cut are passed over too.
        let first_batch = place.next_batch.saturating_add(IDS_SKIPPED);
        let state = replayed.catalog.checkpoint();
        let generation = place.generation.saturating_add(1);
        let released = ManifestLog::bytes_at(&devices, &place)?;
        // Beside what there is but the files kept for this generation.
        let files = replayed.catalog.segments.len() as u64 * u64::from(identity.segment_pages) * PAGE_BYTES as u64
            + devices.list.len() as u64 * (SLOTS * PAGE_BYTES) as u64
            + released;
        let limit = options.capacity.map_or(u64::MAX, |capacity| capacity.bytes().saturating_sub(files));
        let start = GenerationStart {
            generation,
            previous: place.generation,
            first_batch,
            epoch,
            room: 0,
            limit,
            beyond: true,
            released,
            gone: BTreeSet::new(),
        };
        let mut next = ManifestLog::create(&devices, &start, &state)?;
        next.set_epoch(if changed.is_empty() { epoch } else { epoch.saturating_add(1) });
        next.name_in_superblocks(&devices, STATE_OPEN)?;
        next
    } else {
        let manifest = ManifestLog::resume(&devices, replayed.place, epoch)?;
        manifest.mark(&devices, STATE_OPEN)?;
        manifest
    };
    for device in devices.list.iter() {
        remove_leftovers(&*device.directory, device.index, manifest.place().generation, &replayed.catalog)?;
    }
    check_account(account, memory)?;
    start(options, devices, replayed.catalog, manifest)
}

/// Members that are not given, as the lost ones that they are from now on.
///
/// # Errors
/// [`ErrorKind::Configuration`]: one is missing and the options do not allow it. [`ErrorKind::StaleDevice`]: one that left is given.
fn missing_members(options: &StoreOptions, catalog: &Catalog, known: &[MemberDevice]) -> Result<Vec<m::Member>> {
    let left = |known: &&MemberDevice| matches!(known.member.state, m::MEMBER_LOST | m::MEMBER_REMOVED);
    if let Some(known) = known.iter().find(left) {
        let (device, from, epoch) = (known.member.device.get(), known.slot.epoch.get(), known.member.epoch.get());
        return Err(stale_device(known.directory.path(), device, from, epoch));
    }
    let is_there = |member: &m::Member| known.iter().any(|known| known.member.device == member.device);
    let needed = |member: &&m::Member| matches!(member.state, m::MEMBER_ACTIVE | m::MEMBER_DRAINING);
    let missing: Vec<_> = catalog.members.values().filter(needed).filter(|member| !is_there(member)).copied().collect();
    if let Some(first) = missing.first().filter(|_| !options.allow_degraded) {
        let given: Vec<_> = known.iter().map(|known| known.directory.path().display().to_string()).collect();
        let text = format!(
            "device {} of {} is missing; given are {}; allow_degraded opens the store without it",
            first.device.get(),
            catalog.members.len(),
            given.join(", ")
        );
        return Err(Error::new(ErrorKind::Configuration, text));
    }
    Ok(missing.into_iter().map(|member| m::Member { state: m::MEMBER_LOST, ..member }).collect())
}

fn check_account(bytes: usize, memory: usize) -> Result<()> {
    if bytes <= memory / 2 {
        return Ok(());
    }
    let text = format!("the tables of this store take {bytes} bytes, too much for memory_limit {memory}");
    Err(Error::new(ErrorKind::MemoryLimit, text))
}

fn start(options: &StoreOptions, devices: Devices, catalog: Catalog, manifest: ManifestLog) -> Result<Store> {
    let space = SegmentAllocator::new(&devices, &catalog, options.capacity.map(|c| c.bytes()))?;
    let limit = devices.budget.limit();
    let frame_bytes = usize::try_from(options.frame_bytes.bytes()).unwrap_or(usize::MAX).min(limit / 12).max(64 << 10);
    let counters = catalog.counters;
    let (devices, catalog, space) = (Arc::new(devices), Arc::new(Mutex::new(catalog)), Arc::new(Mutex::new(space)));
    let mut manifest = manifest;
    if !options.read_only {
        keep_spare(&devices, &space, &mut manifest)?;
    }
    let committer = Committer::new(Arc::clone(&devices), Arc::clone(&space), Arc::clone(&catalog), manifest)?;
    let committer = Arc::new(committer);
    let cache = options.cache.map(|cache| devices.block_cache(&cache)).transpose()?;
    // In a simulation lazy commits are due when the test flushes.
    let simulated = devices.list.iter().any(|device| device.directory.is_simulated());
    let lazy = (!simulated && !options.read_only).then(|| {
        let committer = Arc::clone(&committer);
        let commit_when_due = move || {
            while committer.wait_due() {
                // A failure stands in the committer and comes back with the next call.
                let _ = committer.flush();
            }
        };
        std::thread::Builder::new().name("stratakv-lazy".into()).spawn(commit_when_due)
    });
    let lazy = lazy.transpose().map_err(|e| Error::io("start the thread of lazy commits", e))?;
    let inner = StoreInner {
        committer,
        catalog,
        space,
        devices,
        cache,
        ids: IdAllocator::new(NextIds { frame: counters.frame, lsn: counters.lsn, sequence: counters.sequence }),
        handles: OpenHandles::default(),
        limits: WriteLimits {
            // Frames in flight, at least two, and groups that are collected leave most of the memory to reads and summaries.
            frame_bytes,
            flight_bytes: (frame_bytes.saturating_mul(FRAMES_IN_FLIGHT)).min(limit / 6),
            lazy_delay: Duration::from_millis(options.lazy_delay_ms),
            watermarks: Watermarks { high: options.high_watermark, low: options.low_watermark },
            make_space: maintenance::make_room,
        },
        background: Background::new(options.cleaning_rate.map(|rate| rate.bytes()), lazy),
        locks: MaintenanceLocks::default(),
        held_adapters: Mutex::default(),
        activity: StoreActivity::default(),
    };
    let inner = Arc::new(inner);
    if options.read_only {
        // Nothing changes.
    } else if simulated {
        maintenance::expire(&inner)?;
    } else {
        start_maintenance(&inner)?;
    }
    Ok(Store { inner })
}

/// Starts the maintenance thread. The thread holds the store only while it works.
fn start_maintenance(inner: &Arc<StoreInner>) -> Result<()> {
    if inner.devices.list.iter().any(|device| device.directory.is_simulated()) {
        return Ok(());
    }
    let (store, wake) = (Arc::downgrade(inner), Arc::clone(&inner.devices.tend));
    inner.background.start(|| {
        let builder = std::thread::Builder::new().name("stratakv-tend".into());
        let thread = builder.spawn(move || maintenance::run(&store, &wake));
        thread.map_err(|e| Error::io("open: starting the maintenance thread", e))
    })
}

/// Sequences that end in the same way share segments.
fn class_of(meta: &SequenceMeta) -> u8 {
    match (meta.ttl_ms, meta.evictable) {
        (0, 0) => 0,
        (_, 0) => 1,
        _ => 2,
    }
}
