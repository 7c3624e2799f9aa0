//! Allocation: it takes pages for a frame from the first of these places that has them:
//!
//! 1. The open segment of the frame's stream.
//! 2. A partial segment with enough free pages.
//! 3. A free segment beyond the reserve.
//! 4. A new segment, if the capacity allows it.
//! 5. The segment that another thread is opening, after waiting for it.
//! 6. Any open segment with enough free pages.
//!
//! Derived frames are stored in segments for pools, so they skip 2 and 6, and no other frame takes their segments.
//!
//! Lock order: files are created and written without the allocator's lock.

use super::{DeviceSpace, OWN_MAX, OpenSegment, SegmentAllocator, SegmentLifetime, WriteStream, reserve};
use crate::catalog::{Flight, Pin, SegmentHandle, SegmentMeta, SegmentState, free_record, open_record};
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::Access;
use crate::io::planted;
use crate::log::devices::Devices;
use crate::metrics::{OpKind, lock};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use stratakv_format::features::Features;
use stratakv_format::manifest::Kind;
use stratakv_format::segment::{self, KIND_LOG, KIND_POOL, POSITION_HEADER, POSITION_TRAILER, SegmentPage};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId, SequenceId};
use zerocopy::little_endian::{U16, U32, U64};

/// Free segments that one allocation passes over because they cannot be opened or written, at most.
const SKIPS_MAX: usize = 16;
/// Free segments that [`open_ahead`] leaves to the writers that need them.
const AHEAD_LEAVES: u64 = 2;

/// The next step of an allocation.
enum AllocationStep {
    /// It has its pages.
    Took(Location, Flight),
    /// It opens a segment.
    Open(NextSegment),
    /// Another thread opens a segment. It looks again after this epoch.
    Wait(u64),
}

/// A segment that is about to begin a generation.
struct NextSegment {
    device: DeviceIndex,
    id: SegmentId,
    generation: u64,
    /// True if it has no file yet.
    fresh: bool,
    /// True if it stays free, for the reserve.
    spare: bool,
    /// The kind of the frames that it will store.
    kind: u8,
}

/// The writer of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A sequence, for a frame that lives as long as the sequence.
    Sequence(SequenceId),
    /// A sequence, for a small frame that groups will replace.
    ShortLived(SequenceId),
    /// Cleaning, for a frame that it moves.
    Cleaning,
    /// Any sequence, for a derived frame.
    Pools,
}

/// Takes `pages` on `device`.
///
/// # Errors
/// [`ErrorKind::NoSpace`]: the capacity or the device is full except for the reserve. Nothing changed.
/// [`ErrorKind::Configuration`]: the frame is larger than a segment.
pub(crate) fn allocate(
    devices: &Devices,
    space: &Mutex<SegmentAllocator>,
    device: DeviceIndex,
    writer: Writer,
    pages: u32,
) -> Result<(Location, Flight)> {
    let usable = devices.identity.segment_pages - 2;
    if pages > usable {
        let text =
            format!("allocate: a frame of {pages} pages does not fit in a segment of {usable}; use larger segments");
        return Err(Error::new(ErrorKind::Configuration, text));
    }
    let (mut full, mut skipped) = (None, 0);
    loop {
        let (stream, step, changed) = {
            let mut space = lock(space);
            if !devices.get(device)?.is_active() {
                // Checked under this lock, so that a device found unused stays unused.
                return Err(Error::new(ErrorKind::NoSpace, format!("allocate: device {device} takes no more frames")));
            }
            let (stream, sequence) = match writer {
                Writer::Sequence(sequence) => (space.stream_of(devices, sequence, device), Some(sequence)),
                Writer::ShortLived(sequence) => (WriteStream::ShortLived, Some(sequence)),
                Writer::Cleaning => (WriteStream::Relocated, None),
                Writer::Pools => (WriteStream::Pools, None),
            };
            let step = space.step(devices, device, (stream, sequence), pages, full.as_ref())?;
            (stream, step, Arc::clone(&space.changed))
        };
        match step {
            AllocationStep::Took(location, flight) => {
                if let Writer::Sequence(sequence) = writer {
                    lock(space).grew(sequence, device, pages);
                }
                if location.page == 1 {
                    devices.maintenance_wake.notify();
                }
                return Ok((location, flight));
            }
            AllocationStep::Wait(seen) => {
                changed.wait_past(seen, None);
            }
            AllocationStep::Open(opening) => {
                let opened = open_segment(devices, &opening);
                let outcome = lock(space).opened(devices, Some(stream), &opening, opened);
                changed.notify();
                match outcome {
                    // Segments with frames that no commit has named stay open.
                    Err(e) if e.is_short_of_descriptors() => {
                        let text = "too many files are open; commit, or raise the limit of open files (ulimit -n)";
                        return Err(e.during(text));
                    }
                    // Another segment may have free pages.
                    Err(e) if e.kind() == ErrorKind::NoSpace => full = Some(e),
                    Err(e) if e.kind() != ErrorKind::Poisoned && !opening.fresh && skipped < SKIPS_MAX => skipped += 1,
                    other => other?,
                }
            }
        }
    }
}

/// Opens a segment in advance on every device where a sequence fills segment after segment.
///
/// Creating a file takes longer than writing the frames that are in flight.
pub(crate) fn open_ahead(devices: &Devices, space: &Mutex<SegmentAllocator>) {
    for device in devices.list.iter().filter(|device| device.takes_frames()) {
        let room = device.directory.space().map_or(0, |space| space.available);
        // Spare segments come first, one at a time, because writers wait for a segment that is being opened.
        loop {
            let Some(opening) = lock(space).ahead(devices, device.index, room) else { break };
            let opened = open_segment(devices, &opening);
            let outcome = lock(space).opened(devices, None, &opening, opened);
            lock(space).changed.notify();
            // A writer that needs a segment gets the same failure and reports it.
            if outcome.is_err() || !opening.spare {
                break;
            }
        }
    }
}

impl SegmentAllocator {
    /// Returns the segment that [`open_ahead`] opens next on a device. `room` is the free bytes of its file system.
    fn ahead(&mut self, devices: &Devices, device: DeviceIndex, room: u64) -> Option<NextSegment> {
        let (whole, segment) = (nearly_whole(self.segment_pages - 2), self.segment_bytes());
        if self.allowance(devices) == 0 {
            return None;
        }
        let allowed = self.allowance(devices).saturating_sub(self.owed_bytes());
        let may_grow = allowed.min(room) / segment > AHEAD_LEAVES;
        let own = self.devices.get_mut(&device)?;
        let grows = own.streams.keys().any(|stream| matches!(stream, WriteStream::Dedicated(_)));
        let ready = own.opening > 0 || own.partial.iter().any(|active| active.room() >= whole);
        if !grows || ready {
            return None;
        }
        // One more used segment may need a larger reserve.
        let (kept, free) = (reserve(own.used() + 1), own.free.len() as u64);
        if free > kept + if may_grow { 0 } else { AHEAD_LEAVES } {
            return own.reopen(device, KIND_LOG);
        }
        may_grow.then(|| own.grow(device, free < kept, KIND_LOG))
    }

    /// Returns the stream that frames of a sequence belong to on a device.
    ///
    /// A sequence gets segments of its own once it has filled a quarter of a segment, while few sequences have them.
    pub(crate) fn stream_of(&mut self, devices: &Devices, sequence: SequenceId, device: DeviceIndex) -> WriteStream {
        let usable = u64::from(self.segment_pages - 2);
        let growth = self.growing.entry(sequence).or_default();
        let (class, written) = (growth.class, growth.pages.get(&device).copied().unwrap_or(0));
        let Some(own) = self.devices.get_mut(&device) else { return WriteStream::Small(class) };
        let stream = WriteStream::Dedicated(sequence);
        if own.streams.contains_key(&stream) {
            return stream;
        }
        let segment = u64::from(self.segment_pages) * PAGE_BYTES as u64;
        let most =
            self.capacity.map_or(OWN_MAX, |capacity| (capacity / segment / devices.list.len() as u64 / 8).min(OWN_MAX));
        let owned = own.streams.keys().filter(|stream| matches!(stream, WriteStream::Dedicated(_))).count() as u64;
        if written * 4 < usable || owned >= most {
            return WriteStream::Small(class);
        }
        // A small segment that it alone wrote to becomes its own.
        let shared = WriteStream::Small(class);
        if own.streams.get(&shared).is_some_and(|active| active.only == Some(sequence))
            && let Some(active) = own.streams.remove(&shared)
        {
            own.streams.insert(stream, active);
        }
        stream
    }

    /// Counts pages written for a sequence.
    fn grew(&mut self, sequence: SequenceId, device: DeviceIndex, pages: u32) {
        *self.growing.entry(sequence).or_default().pages.entry(device).or_default() += u64::from(pages);
    }

    /// Takes pages from the open segment of a stream.
    fn took(
        &mut self,
        device: DeviceIndex,
        stream: WriteStream,
        writer: Option<SequenceId>,
        pages: u32,
    ) -> Result<AllocationStep> {
        let active = self.space_of(device)?.streams.get_mut(&stream);
        let active = active
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, format!("allocate: device {device} has no open segment")))?;
        let location = Location { device, segment: active.handle.key.1, page: active.next_page, pages };
        active.only = if active.next_page == 1 { writer } else { active.only.filter(|only| Some(*only) == writer) };
        active.next_page += pages;
        active.handle.lazy.hold(true);
        Ok(AllocationStep::Took(location, Flight::new(&active.handle, pages)))
    }

    /// Decides what an allocation does next: see the list at the top of this file.
    fn step(
        &mut self,
        devices: &Devices,
        device: DeviceIndex,
        (stream, writer): (WriteStream, Option<SequenceId>),
        pages: u32,
        full: Option<&Error>,
    ) -> Result<AllocationStep> {
        let fits = |active: &OpenSegment| active.room() >= pages;
        let usable = self.segment_pages - 2;
        let lent = writer.is_some_and(|writer| self.lent.contains(&writer));
        let own = self.space_of(device)?;
        if own.streams.get(&stream).is_some_and(fits) {
            return self.took(device, stream, writer, pages);
        }
        let kind = stream.kind();
        // The emptiest partial segment. A sequence with segments of its own takes only one that is nearly empty.
        let wanted = if matches!(stream, WriteStream::Dedicated(_)) { nearly_whole(usable) } else { pages };
        let has_room = |active: &OpenSegment| active.kind == kind && active.room() >= wanted.max(pages);
        if let Some(at) = own.partial.iter().rposition(has_room) {
            let active = own.partial.remove(at);
            return self.switch(device, (stream, writer), active, pages);
        }
        let kept = if stream == WriteStream::Relocated || lent { 0 } else { reserve(own.used()) };
        if own.free.len() as u64 > kept
            && let Some(opening) = own.reopen(device, kind)
        {
            return Ok(AllocationStep::Open(opening));
        }
        let spare = (own.free.len() as u64) < kept;
        // Cleaning tries again later. If many files cannot be written, it creates no more of them.
        let is_futile = stream == WriteStream::Relocated && own.aside.len() >= SKIPS_MAX;
        if full.is_none() && !is_futile && self.may_grow(devices) {
            return Ok(AllocationStep::Open(self.space_of(device)?.grow(device, spare, kind)));
        }
        let own = self.space_of(device)?;
        if own.opening > 0 {
            return Ok(AllocationStep::Wait(self.changed.epoch()));
        }
        // Better beside other frames of its kind than nowhere.
        let fits = |active: &OpenSegment| active.kind == kind && fits(active);
        if let Some(at) = own.partial.iter().rposition(fits) {
            let active = own.partial.remove(at);
            return self.switch(device, (stream, writer), active, pages);
        }
        let other = own.streams.iter().filter(|(_, active)| fits(active)).map(|(other, _)| *other).next();
        if let Some(other) = other {
            return self.took(device, other, writer, pages);
        }
        Err(full.map_or_else(|| self.no_room(devices, device), Error::duplicate))
    }

    /// Makes a segment the open one of a stream, and takes pages from it.
    fn switch(
        &mut self,
        device: DeviceIndex,
        (stream, writer): (WriteStream, Option<SequenceId>),
        active: OpenSegment,
        pages: u32,
    ) -> Result<AllocationStep> {
        let before = self.space_of(device)?.streams.insert(stream, active);
        if let Some(before) = before {
            self.retire(device, before);
        }
        self.took(device, stream, writer, pages)
    }

    /// Returns whether the capacity allows one more segment file.
    fn may_grow(&self, devices: &Devices) -> bool {
        let bytes = u64::from(self.segment_pages) * PAGE_BYTES as u64;
        if planted!(CapacityIgnored) {
            return true;
        }
        self.capacity.is_none_or(|capacity| self.file_bytes(devices) + self.owed_bytes() + bytes <= capacity)
    }

    /// Returns the error of an allocation that the capacity refuses.
    fn no_room(&self, devices: &Devices, device: DeviceIndex) -> Error {
        let bytes = u64::from(self.segment_pages) * PAGE_BYTES as u64;
        let (total, capacity) = (self.file_bytes(devices), self.capacity.unwrap_or(u64::MAX));
        let text = format!(
            "allocate: capacity is {capacity} bytes and files take {total}; no space for a segment of {bytes} on \
             device {device}"
        );
        Error::new(ErrorKind::NoSpace, text)
    }

    /// Registers a segment that was opened, or that could not be. Without a `stream` it becomes partial.
    fn opened(
        &mut self,
        devices: &Devices,
        stream: Option<WriteStream>,
        opening: &NextSegment,
        outcome: std::result::Result<OpenedSegment, AllocateFailure>,
    ) -> Result<()> {
        let (device, id) = (opening.device, opening.id);
        let own = self.space_of(device)?;
        own.opening -= 1;
        let opened = match outcome {
            Ok(opened) => opened,
            Err(AllocateFailure { error, exists }) => {
                // Set aside, because other files may work.
                if exists {
                    own.aside.push((id, opening.generation - 1));
                }
                return Err(error.during("open a segment"));
            }
        };
        self.sparse |= opened.made && !opened.file.is_preallocated();
        let pages = self.segment_pages;
        let meta = SegmentMeta {
            generation: opening.generation,
            nonce: opened.nonce,
            pages,
            kind: opening.kind,
            state: SegmentState::Open,
            used_pages: 1,
            live_pages: 0,
            last_lsn: 0,
        };
        let key = (device, id);
        self.pending.push(Kind::SegmentOpen, &open_record(key, &meta), &[]);
        if opening.kind == KIND_POOL {
            self.pending.require_pools();
        }
        if opening.spare {
            self.pending.push(Kind::SegmentFree, &free_record(key, opening.generation, false), &[]);
            self.space_of(device)?.free.push((id, opening.generation));
            return Ok(());
        }
        let own = devices.get(device)?;
        let handle = Arc::new(SegmentHandle {
            key,
            generation: opening.generation,
            nonce: opened.nonce,
            pages,
            lazy: devices.segment_file(own, id, Some(opened.file)),
            read_unit: own.directory.direct_io().read_unit() as u64,
            in_flight: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            synced: AtomicBool::new(false),
            pin: Pin::new(),
        });
        // The header of a segment for pools is synced already, so that no commit syncs one.
        if opening.kind == KIND_LOG {
            self.opened.push(Arc::clone(&handle));
        }
        self.handles.insert(key, SegmentLifetime::of(&handle));
        let active = OpenSegment { handle, next_page: 1, only: None, kind: opening.kind };
        let before = match stream {
            Some(stream) => self.space_of(device)?.streams.insert(stream, active),
            None => Some(active),
        };
        before.into_iter().for_each(|before| self.retire(device, before));
        Ok(())
    }
}

impl DeviceSpace {
    /// Takes a free segment for its next generation.
    fn reopen(&mut self, device: DeviceIndex, kind: u8) -> Option<NextSegment> {
        let (id, ended) = self.free.pop()?;
        self.opening += 1;
        coverage!(SegmentRecycled);
        Some(NextSegment { device, id, generation: ended.saturating_add(1), fresh: false, spare: false, kind })
    }

    /// Takes the id of a segment without a file. A spare one stays free, so its kind is decided when it is reused.
    fn grow(&mut self, device: DeviceIndex, spare: bool, kind: u8) -> NextSegment {
        self.opening += 1;
        let id = SegmentId(self.next_segment);
        self.next_segment += 1;
        NextSegment { device, id, generation: 1, fresh: true, spare, kind: if spare { KIND_LOG } else { kind } }
    }
}

/// Returns the free pages from which on a segment is as good as a new one.
fn nearly_whole(usable: u32) -> u32 {
    usable - usable / 8
}

/// A segment whose file is ready.
struct OpenedSegment {
    file: Arc<DeviceFile>,
    nonce: u64,
    /// True if the file was created now.
    made: bool,
}

/// Why a segment could not be opened.
struct AllocateFailure {
    error: Error,
    /// True if the segment exists and stays one of the device.
    exists: bool,
}

/// Creates or opens the file of a segment, and writes its header and trailer unless it stays free. The pages of a
/// segment for pools are synced. The commit that records another segment syncs its pages.
fn open_segment(devices: &Devices, opening: &NextSegment) -> std::result::Result<OpenedSegment, AllocateFailure> {
    let (device, id) = (opening.device, opening.id);
    let bytes = u64::from(devices.identity.segment_pages) * PAGE_BYTES as u64;
    let name = segment::file_name(id);
    let open = || -> Result<(Arc<DeviceFile>, u64, bool)> {
        let own = devices.get(device)?;
        let directory = &own.directory;
        let nonce = devices.environment.random_u64()?;
        if !opening.fresh {
            match directory.open_file(&name, Access::ReadWrite) {
                // The file was removed behind the store's back. It held nothing.
                Err(error) if error.kind() == ErrorKind::NotFound => own.counters.failed(OpKind::Names, false),
                other => return Ok((other?, nonce, false)),
            }
        }
        Ok((directory.create_file(&name, bytes)?, nonce, true))
    };
    let (file, nonce, made) = open().map_err(|error| AllocateFailure { error, exists: !opening.fresh })?;
    let failed = |error| AllocateFailure { error, exists: true };
    // Also for a first generation that failed before: no sync may have covered its name.
    if (made || opening.generation == 1) && !planted!(SegmentNameNotSynced) {
        let synced = devices.get(device).and_then(|own| own.directory.sync_dir(segment::DIRECTORY));
        synced.map_err(failed)?;
    }
    if opening.spare {
        // A spare keeps its length and its blocks after a crash.
        devices.sync_all([(device, &file)].into_iter()).map_err(failed)?;
        return Ok(OpenedSegment { file, nonce, made });
    }
    let created = U64::new(devices.environment.unix_ms() / 1000);
    let page = |position| SegmentPage {
        magic: segment::MAGIC,
        features: Features::current(),
        store_id: devices.identity.store_id,
        generation: U64::new(opening.generation),
        nonce: U64::new(nonce),
        created_unix_s: created,
        segment: U32::new(id.0),
        pages: U32::new(devices.identity.segment_pages),
        device: U16::new(device.0),
        kind: opening.kind,
        position,
        reserved: [0; 4],
    };
    let target = [(device, Arc::clone(&file))];
    let written = devices
        .write_all(&target, 0, &page(POSITION_HEADER).encode())
        .and_then(|()| devices.write_all(&target, bytes - PAGE_BYTES as u64, &page(POSITION_TRAILER).encode()));
    written.map_err(failed)?;
    if opening.kind == KIND_POOL {
        devices.sync_all([(device, &file)].into_iter()).map_err(failed)?;
    }
    Ok(OpenedSegment { file, nonce, made })
}
