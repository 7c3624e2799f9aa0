//! The space in segments: which segment takes the next frame, which segments are free, and what the manifest must
//! record of them.
//!
//! Invariants:
//! - A segment of a device is in exactly one state: open for a stream, partial (open, without a stream), sealed, free,
//!   set aside, being opened, or being removed.
//! - A segment is sealed before it is freed. A free segment is reused only after the manifest says durably that it is
//!   free.
//! - No segment is freed while a reader or an uncommitted frame pins it.
//! - Appends leave a reserve of free segments alone, so that cleaning always has a target.
//! - The lock of [`SegmentAllocator`] is never held over I/O.
//!
//! Lock order: the catalog, then this.

mod account;
mod allocate;

use super::device::Device;
use super::devices::Devices;
use crate::catalog::{
    Catalog, FrameBody, FrameSlot, Pin, PinWatch, RecordBuffer, SegmentHandle, SegmentKey, SegmentMeta, SegmentState,
    seal_record,
};
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::io::planted;
use crate::metrics::EventCount;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};
use stratakv_format::manifest::Kind;
use stratakv_format::segment::{KIND_LOG, KIND_POOL};
use stratakv_format::{DeviceIndex, FrameId, SegmentId, SequenceId};

pub(crate) use allocate::{Writer, allocate, open_ahead};

/// Partial segments per device, at most.
const PARTIAL_MAX: usize = 4;
/// Used segments per free segment that is kept, beside the reserve.
const FREE_SHARE: u64 = 4;
/// Free segments that are kept per device at least, beside the reserve.
const FREE_MIN: u64 = 2;
/// Sequences with segments of their own at a time, per device, at most.
const OWN_MAX: u64 = 16;

/// Frames that share segments because they are likely to die together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WriteStream {
    /// Sequences that are small so far, by what ends them: 0 nothing known, 1 a time to live, 2 eviction.
    Small(u8),
    /// One sequence that is large enough for segments of its own.
    Dedicated(SequenceId),
    /// Small frames, which are released when the groups of their tokens are written.
    ShortLived,
    /// Frames that cleaning moved here, because they outlived their segment.
    Relocated,
    /// Derived frames of all sequences. They have segments of a kind of their own.
    Pools,
}

impl WriteStream {
    /// Returns the kind of the segments of this stream.
    fn kind(self) -> u8 {
        if self == Self::Pools { KIND_POOL } else { KIND_LOG }
    }
}

/// A segment that takes frames.
struct OpenSegment {
    handle: Arc<SegmentHandle>,
    next_page: u32,
    /// The sequence that wrote everything in it so far, if it is one.
    only: Option<SequenceId>,
    /// The kind of the segment: for the log, or for pools.
    kind: u8,
}

impl OpenSegment {
    fn room(&self) -> u32 {
        self.handle.pages.saturating_sub(1).saturating_sub(self.next_page)
    }
}

/// The current generation of a segment, observed without keeping it.
struct SegmentLifetime {
    handle: Weak<SegmentHandle>,
    held: PinWatch,
}

impl SegmentLifetime {
    fn of(handle: &Arc<SegmentHandle>) -> Self {
        Self { handle: Arc::downgrade(handle), held: handle.pin.watch() }
    }

    fn handle(&self) -> Option<Arc<SegmentHandle>> {
        self.handle.upgrade()
    }
}

/// The segments of one device.
#[derive(Default)]
struct DeviceSpace {
    streams: BTreeMap<WriteStream, OpenSegment>,
    /// Open segments with free pages that no stream writes to, the fullest first.
    partial: Vec<OpenSegment>,
    sealed: BTreeSet<SegmentId>,
    /// Free segments with the generation that ended.
    free: Vec<(SegmentId, u64)>,
    /// Free segments whose file could not be opened or written. [`SegmentAllocator::retry`] frees them again.
    aside: Vec<(SegmentId, u64)>,
    /// How many segments are being opened.
    opening: u64,
    /// How many segments are being removed: taken out, with files that still exist.
    leaving: u64,
    next_segment: u32,
}

impl DeviceSpace {
    /// Returns how many segments are in use.
    fn used(&self) -> u64 {
        (self.streams.len() + self.partial.len() + self.sealed.len()) as u64 + self.opening
    }

    fn files(&self) -> u64 {
        self.used() + (self.free.len() + self.aside.len()) as u64 + self.leaving
    }

    /// Returns how many free segments are kept for reuse, because reuse is faster than creation.
    fn kept_free(&self) -> usize {
        let used = self.used();
        (reserve(used) + (used / FREE_SHARE).max(FREE_MIN)) as usize
    }

    /// Returns whether free segments exceed those kept by half, so that removing them is worth the records.
    fn has_surplus(&self) -> bool {
        self.free.len() > self.kept_free() + self.kept_free() / 2
    }

    /// Takes at most `most` free segments out. The last id stays, so that no id is given out twice. Segments that no
    /// commit knows stay as well.
    fn take_free(&mut self, device: DeviceIndex, most: usize) -> Vec<(SegmentKey, u64)> {
        let last = self.next_segment.saturating_sub(1);
        let mut left = most;
        let may_go = |(id, generation): &mut (SegmentId, u64)| {
            let goes = left > 0 && id.0 != last && *generation > 0;
            left -= usize::from(goes);
            goes
        };
        let taken: Vec<_> = self.free.extract_if(.., may_go).map(|(id, ended)| ((device, id), ended)).collect();
        self.leaving += taken.len() as u64;
        taken
    }
}

/// Returns whether a device takes new frames.
fn takes_frames(devices: &Devices, device: DeviceIndex) -> bool {
    devices.list.get(usize::from(device.0)).is_some_and(Device::takes_frames)
}

/// Returns how many free segments of a device appends leave to cleaning.
fn reserve(used: u64) -> u64 {
    match used {
        0 => 0,
        1..8 => 1,
        _ => 2,
    }
}

/// The writes of one sequence so far, while it is being written.
#[derive(Default)]
struct WriteHistory {
    class: u8,
    /// Pages that this handle wrote, by device.
    pages: BTreeMap<DeviceIndex, u64>,
}

/// The segments of all devices.
pub(crate) struct SegmentAllocator {
    devices: BTreeMap<DeviceIndex, DeviceSpace>,
    handles: HashMap<SegmentKey, SegmentLifetime>,
    frames: HashMap<FrameId, Weak<FrameSlot>>,
    /// Entries of `frames` from which on dead entries are dropped.
    frames_sweep: usize,
    growing: HashMap<SequenceId, WriteHistory>,
    /// Segment records for the next commit.
    pending: RecordBuffer,
    /// Segments that `pending` opens. Their headers are written, not synced.
    opened: Vec<Arc<SegmentHandle>>,
    capacity: Option<u64>,
    /// Bytes of manifest files.
    metadata_bytes: u64,
    /// Bytes of spare manifest files.
    spare_bytes: u64,
    segment_pages: u32,
    /// Segments that cannot be cleaned.
    stuck: BTreeSet<SegmentKey>,
    /// True if some file could not be preallocated.
    sparse: bool,
    /// The number of frames placed so far: see [`Self::next_frame`].
    pointer: usize,
    /// Sequences whose next frame may take from the reserve.
    lent: BTreeSet<SequenceId>,
    /// Notified when a segment was opened, or could not be.
    changed: Arc<EventCount>,
}

impl SegmentAllocator {
    /// Builds the allocator from the segments that the catalog knows.
    ///
    /// # Errors
    /// A segment on a device that is not given.
    pub(crate) fn new(devices: &Devices, catalog: &Catalog, capacity: Option<u64>) -> Result<Self> {
        let mut space = Self {
            devices: devices.list.iter().map(|d| (d.index, DeviceSpace::default())).collect(),
            handles: HashMap::new(),
            frames: HashMap::new(),
            frames_sweep: 64,
            growing: HashMap::new(),
            pending: RecordBuffer::default(),
            opened: Vec::new(),
            capacity,
            metadata_bytes: 0,
            spare_bytes: 0,
            segment_pages: devices.identity.segment_pages,
            stuck: BTreeSet::new(),
            sparse: false,
            pointer: 0,
            lent: BTreeSet::new(),
            changed: Arc::default(),
        };
        for (key, meta) in &catalog.segments {
            let Some(own) = space.devices.get_mut(&key.0) else { continue };
            own.next_segment = own.next_segment.max(key.1.0.saturating_add(1));
            match meta.state {
                SegmentState::Free => own.free.push((key.1, meta.generation)),
                SegmentState::Sealed => {
                    own.sealed.insert(key.1);
                }
                SegmentState::Open => {
                    let handle = space.handle(devices, *key, meta)?;
                    space
                        .retire(key.0, OpenSegment { handle, next_page: meta.used_pages, only: None, kind: meta.kind });
                }
            }
        }
        Ok(space)
    }

    /// Returns the handle of a segment that the catalog knows. No I/O.
    pub(crate) fn handle(
        &mut self,
        devices: &Devices,
        key: SegmentKey,
        meta: &SegmentMeta,
    ) -> Result<Arc<SegmentHandle>> {
        if let Some(handle) = self.handles.get(&key).and_then(SegmentLifetime::handle) {
            return Ok(handle);
        }
        let device = devices.get(key.0)?;
        let handle = Arc::new(SegmentHandle {
            key,
            generation: meta.generation,
            nonce: meta.nonce,
            pages: meta.pages,
            lazy: devices.segment_file(device, key.1, None),
            read_unit: device.directory.direct_io().read_unit() as u64,
            in_flight: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            synced: AtomicBool::new(false),
            pin: Pin::new(),
        });
        self.handles.insert(key, SegmentLifetime::of(&handle));
        Ok(handle)
    }

    /// Returns the slot of a frame: the existing one if another reader has it, else a new one with `body`.
    pub(crate) fn place_frame(&mut self, id: FrameId, body: FrameBody) -> Arc<FrameSlot> {
        if let Some(slot) = self.frames.get(&id).and_then(Weak::upgrade) {
            return slot;
        }
        if self.frames.len() >= self.frames_sweep {
            self.frames.retain(|_, slot| slot.strong_count() > 0);
            self.frames_sweep = (2 * self.frames.len()).max(64);
        }
        let slot = Arc::new(FrameSlot::new(body));
        self.frames.insert(id, Arc::downgrade(&slot));
        slot
    }

    /// Returns the slot of a frame, if a reader has it.
    pub(crate) fn frame_slot(&self, id: FrameId) -> Option<Arc<FrameSlot>> {
        self.frames.get(&id).and_then(Weak::upgrade)
    }

    /// Returns the number of the next frame. The search for its device starts there, so that frames spread over
    /// devices.
    pub(crate) fn next_frame(&mut self) -> usize {
        let pointer = self.pointer;
        self.pointer = pointer.wrapping_add(1);
        pointer
    }

    /// Sets what ends a sequence: see [`WriteStream::Small`].
    pub(crate) fn classify(&mut self, sequence: SequenceId, class: u8) {
        self.growing.entry(sequence).or_default().class = class;
    }

    /// Lets frames of a sequence take from the reserve, or stops that. A commit that gives space back needs some first.
    pub(crate) fn lend(&mut self, sequence: SequenceId, lent: bool) {
        match lent {
            true => self.lent.insert(sequence),
            false => self.lent.remove(&sequence),
        };
    }

    /// Ends the writing of a sequence. Its open segments become partial or sealed.
    pub(crate) fn settle(&mut self, sequence: SequenceId) {
        self.growing.remove(&sequence);
        let own = self.devices.iter_mut();
        let left: Vec<_> = own
            .filter_map(|(device, own)| {
                own.streams.remove(&WriteStream::Dedicated(sequence)).map(|active| (*device, active))
            })
            .collect();
        for (device, active) in left {
            self.retire(device, active);
        }
    }

    /// Makes an open segment partial if an eighth of it is free, else seals it. A segment for pools is always sealed,
    /// because any stream of the log may take a partial segment.
    fn retire(&mut self, device: DeviceIndex, active: OpenSegment) {
        let usable = self.segment_pages - 2;
        let Some(own) = self.devices.get_mut(&device) else { return };
        let full = if active.kind == KIND_LOG && active.room() >= (usable / 8).max(1) {
            own.partial.push(active);
            own.partial.sort_by_key(OpenSegment::room);
            (own.partial.len() > PARTIAL_MAX).then(|| own.partial.remove(0))
        } else {
            Some(active)
        };
        if let Some(full) = full {
            self.seal(full);
        }
    }

    /// Seals a segment: nothing is written to it any more, and the next commit records that.
    fn seal(&mut self, active: OpenSegment) {
        if active.handle.in_flight_pages() == 0 {
            active.handle.lazy.hold(false);
        }
        let (device, id) = active.handle.key;
        if let Some(own) = self.devices.get_mut(&device) {
            own.sealed.insert(id);
            self.pending.push(Kind::SegmentSeal, &seal_record(active.handle.key, active.next_page), &[]);
        }
    }

    /// Adds a device without segments.
    pub(crate) fn join(&mut self, device: DeviceIndex) {
        self.devices.entry(device).or_default();
    }

    /// Returns whether a device may be removed, as far as open handles are concerned.
    ///
    /// - No uncommitted frame is on it, neither of a sequence, nor of a fork, nor of a reader of deleted frames.
    /// - No reader holds a place on it. A `lost` device is an exception, because its readers have other copies or
    ///   nothing.
    pub(crate) fn is_unused(&self, device: DeviceIndex, lost: bool) -> bool {
        let here = |segment: &SegmentHandle| segment.key.0 == device;
        let own = self.devices.get(&device);
        let opening = own.is_some_and(|own| own.opening > 0);
        let written = own.into_iter().flat_map(|own| own.streams.values().chain(&own.partial)).map(|own| &own.handle);
        let written: Vec<&Arc<SegmentHandle>> = written.chain(&self.opened).collect();
        // The writers and this iteration hold references. A further reference is a reader's.
        let read = |handle: &Arc<SegmentHandle>| {
            let own = written.iter().filter(|other| Arc::ptr_eq(other, handle)).count();
            Arc::strong_count(handle) > own + 1
        };
        let mut handles = self.handles.iter().filter(|(key, _)| key.0 == device).filter_map(|(_, life)| life.handle());
        let mut frames = self.frames.values().filter_map(Weak::upgrade).map(|slot| slot.now());
        !opening
            && handles.all(|handle| handle.in_flight_pages() == 0 && (lost || !read(&handle)))
            && frames.all(|frame| (0..frame.copies()).all(|copy| !here(frame.copy(copy).0)))
    }

    /// Returns, for each frame that is open or not committed yet, the devices of its copies.
    pub(crate) fn open_frames(&self) -> Vec<Vec<DeviceIndex>> {
        let frames = self.frames.values().filter_map(Weak::upgrade).map(|slot| slot.now());
        frames.map(|frame| (0..frame.copies()).map(|copy| frame.copy(copy).0.key.0).collect()).collect()
    }

    /// Removes a device. No record names its segments any more.
    pub(crate) fn forget(&mut self, device: DeviceIndex) {
        self.devices.remove(&device);
        self.pending.forget_seals(device);
        self.stuck.retain(|key| key.0 != device);
    }

    /// Seals a segment after a failed write.
    pub(crate) fn abandon(&mut self, segment: &SegmentHandle) {
        let Some(own) = self.devices.get_mut(&segment.key.0) else { return };
        let stream = own.streams.iter().find(|(_, active)| active.handle.key == segment.key).map(|(stream, _)| *stream);
        let active = match stream {
            Some(stream) => own.streams.remove(&stream),
            None => {
                let at = own.partial.iter().position(|active| active.handle.key == segment.key);
                at.map(|at| own.partial.remove(at))
            }
        };
        if let Some(active) = active {
            self.seal(active);
        }
    }

    /// Marks a segment that cannot be cleaned because a frame in it is damaged in every copy.
    pub(crate) fn set_stuck(&mut self, key: SegmentKey) {
        if self.stuck.insert(key) {
            event!(
                warn,
                device = key.0,
                segment = key.1,
                "a segment cannot be emptied, because a frame in it is damaged"
            );
        }
    }

    pub(crate) fn stuck_segments(&self) -> u64 {
        self.stuck.len() as u64
    }

    pub(crate) fn is_stuck(&self, key: SegmentKey) -> bool {
        self.stuck.contains(&key)
    }

    /// Seals open segments with less than half of their written pages live, so that they can be cleaned. Returns
    /// whether there were any.
    pub(crate) fn seal_wasted(&mut self, catalog: &Catalog) -> bool {
        let wasted = |active: &OpenSegment| {
            let used = u64::from(active.next_page - 1);
            let live = catalog.segments.get(&active.handle.key).map_or(0, |meta| meta.live_pages);
            used > 0 && (live + active.handle.in_flight_pages()) * 2 < used
        };
        let mut sealed = Vec::new();
        for own in self.devices.values_mut() {
            sealed.extend(own.partial.extract_if(.., |active| wasted(active)));
            let streams: Vec<WriteStream> =
                own.streams.iter().filter(|(_, active)| wasted(active)).map(|(stream, _)| *stream).collect();
            sealed.extend(streams.iter().filter_map(|stream| own.streams.remove(stream)));
        }
        let any = !sealed.is_empty();
        sealed.into_iter().for_each(|active| self.seal(active));
        any
    }

    /// Seals partial segments without frames, so that their files can be removed. Returns whether there were any.
    ///
    /// The next commit records them. The commit after that frees them.
    pub(crate) fn seal_unused(&mut self) -> bool {
        let unused = |active: &mut OpenSegment| active.next_page == 1;
        let own = self.devices.values_mut();
        let sealed: Vec<OpenSegment> = own.flat_map(|own| own.partial.extract_if(.., unused)).collect();
        let any = !sealed.is_empty();
        sealed.into_iter().for_each(|active| self.seal(active));
        any
    }

    /// Makes segments that were set aside free again. They are used after all others.
    pub(crate) fn retry(&mut self) {
        for own in self.devices.values_mut() {
            own.free.splice(0..0, own.aside.drain(..));
        }
    }

    /// Takes free segments out, except for the reserve, until the files are within the capacity.
    ///
    /// Returns them with the generation that ended. Their files count until [`Self::left`].
    pub(crate) fn take_removable(&mut self, devices: &Devices) -> Vec<(SegmentKey, u64)> {
        let capacity = self.capacity.unwrap_or(u64::MAX);
        let mut over = self.file_bytes(devices).saturating_sub(capacity).div_ceil(self.segment_bytes()) as usize;
        let mut taken = Vec::new();
        for (device, own) in &mut self.devices {
            if devices.list.get(usize::from(device.0)).is_none_or(Device::is_lost) {
                continue;
            }
            let most = own.free.len().saturating_sub(reserve(own.used()) as usize).min(over);
            let more = own.take_free(*device, most);
            over -= more.len();
            taken.extend(more);
        }
        taken
    }

    /// Takes at most `most` free segments out of devices with a surplus.
    pub(crate) fn take_surplus(&mut self, devices: &Devices, mut most: usize) -> Vec<(SegmentKey, u64)> {
        let mut taken = Vec::new();
        for (device, own) in &mut self.devices {
            let there = devices.get(*device).is_ok_and(|device| !device.is_lost());
            if there && own.has_surplus() {
                let more = own.take_free(*device, most.min(own.free.len() - own.kept_free()));
                most -= more.len();
                taken.extend(more);
            }
        }
        taken
    }

    /// Makes a segment that was taken out free again, with its file.
    pub(crate) fn stays(&mut self, (device, id): SegmentKey, ended: u64) {
        self.left(device);
        if let Some(own) = self.devices.get_mut(&device) {
            own.free.push((id, ended));
        }
    }

    /// Notes that the file of a segment that was taken out is removed.
    pub(crate) fn left(&mut self, device: DeviceIndex) {
        if let Some(own) = self.devices.get_mut(&device) {
            own.leaving = own.leaving.saturating_sub(1);
        }
    }

    /// Returns how many segments appends may still open.
    pub(crate) fn free_segments(&self, devices: &Devices) -> u64 {
        let kept = |own: &DeviceSpace| (own.free.len() as u64).saturating_sub(reserve(own.used()));
        let open = self.devices.iter().filter(|(device, _)| takes_frames(devices, **device));
        let free: u64 = open.map(|(_, own)| kept(own)).sum();
        free + self.growth(devices)
    }

    /// Returns how many segments exist or may still be created.
    pub(crate) fn all_segments(&self, devices: &Devices) -> u64 {
        self.files() + self.growth(devices)
    }

    pub(crate) fn files(&self) -> u64 {
        self.devices.values().map(DeviceSpace::files).sum()
    }

    /// Returns how many segment files may still be created.
    fn growth(&self, devices: &Devices) -> u64 {
        let allowed = self.capacity.map(|_| self.allowance(devices).saturating_sub(self.owed_bytes()));
        let room = || {
            let open = devices.list.iter().filter(|device| device.takes_frames());
            let spaces = open.filter_map(|device| device.directory.space().ok());
            spaces.map(|space| space.available).max().unwrap_or(0)
        };
        allowed.unwrap_or_else(room) / self.segment_bytes()
    }

    /// Takes the segment records for the next commit, and the segments to sync before they are recorded.
    pub(crate) fn take_pending(&mut self) -> (RecordBuffer, Vec<Arc<SegmentHandle>>) {
        (std::mem::take(&mut self.pending), std::mem::take(&mut self.opened))
    }

    /// Puts back what [`Self::take_pending`] returned, if no commit recorded it.
    pub(crate) fn put_back(&mut self, mut records: RecordBuffer, opened: Vec<Arc<SegmentHandle>>) {
        records.append(&self.pending);
        self.pending = records;
        self.opened.splice(0..0, opened);
    }

    /// Returns whether a segment without live frames may be freed: it is sealed, and neither a reader nor an
    /// uncommitted frame pins it.
    pub(crate) fn reclaimable(&self, key: SegmentKey) -> bool {
        let pinned = self.handles.get(&key).is_some_and(|life| life.held.is_held());
        self.is_sealed(key) && (!pinned || planted!(PinsIgnored))
    }

    pub(crate) fn is_sealed(&self, key: SegmentKey) -> bool {
        self.devices.get(&key.0).is_some_and(|own| own.sealed.contains(&key.1))
    }

    /// Returns the pages of a segment that no commit names yet.
    pub(crate) fn in_flight(&self, key: SegmentKey) -> u64 {
        self.handles.get(&key).and_then(SegmentLifetime::handle).map_or(0, |handle| handle.in_flight_pages())
    }

    /// Makes a segment free after the manifest recorded that durably. Returns whether its device has a surplus of free
    /// segments.
    pub(crate) fn freed(&mut self, key: SegmentKey, generation: u64) -> bool {
        self.handles.remove(&key);
        self.stuck.remove(&key);
        if let Some(own) = self.devices.get_mut(&key.0)
            && own.sealed.remove(&key.1)
        {
            own.free.push((key.1, generation));
        }
        self.devices.get(&key.0).is_some_and(DeviceSpace::has_surplus)
    }

    pub(crate) fn set_metadata_bytes(&mut self, bytes: u64, spare: u64) {
        (self.metadata_bytes, self.spare_bytes) = (bytes, spare);
    }

    fn space_of(&mut self, device: DeviceIndex) -> Result<&mut DeviceSpace> {
        let own = self.devices.get_mut(&device);
        own.ok_or_else(|| {
            Error::new(ErrorKind::Corruption, format!("allocate: device {device} is not a member of the store"))
        })
    }
}
