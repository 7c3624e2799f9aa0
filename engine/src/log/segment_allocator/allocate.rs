//! Taking pages for a frame: from the segment of its stream, from one with room that nobody uses, or from a new one.

use super::{DeviceSpace, OWN_MAX, OpenSegment, SegmentAllocator, SegmentLifetime, WriteStream, reserve};
use crate::catalog::{Flight, Pin, SegmentHandle, SegmentMeta, SegmentState, free_record, open_record};
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::Access;
use crate::io::planted;
use crate::log::devices::Devices;
use crate::log::{random_u64, unix_ms};
use crate::metrics::{OpKind, lock};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use stratakv_format::features::Features;
use stratakv_format::manifest::Kind;
use stratakv_format::segment::{self, KIND_LOG, POSITION_HEADER, POSITION_TRAILER, SegmentPage};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId, SequenceId};
use zerocopy::little_endian::{U16, U32, U64};

/// Free segments that one allocation passes over because they cannot be opened or written to, at most.
const SKIPS_MAX: usize = 16;
/// The last segments that there are or may be are not opened ahead: they are for those who need them.
const AHEAD_LEAVES: u64 = 2;

/// What an allocation does next.
enum AllocationStep {
    Took(Location, Flight),
    Open(Opening),
    /// Somebody else opens a segment; look again when this count has passed.
    Wait(u64),
}

/// A segment that is about to begin a life.
struct Opening {
    device: DeviceIndex,
    id: SegmentId,
    generation: u64,
    /// It has no file yet.
    fresh: bool,
    /// It stays free, for the reserve.
    spare: bool,
}

/// Whom pages are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A sequence, for what stays as long as it does.
    Sequence(SequenceId),
    /// A sequence, for a small frame.
    Brief(SequenceId),
    /// Cleaning, for a frame that is moved out of the way.
    Cleaning,
}

/// Takes `pages` on `device`.
///
/// # Errors
/// [`ErrorKind::NoSpace`]: the capacity or the device is full but for the reserve. Nothing changed.
pub(crate) fn allocate(
    devices: &Devices,
    space: &Mutex<SegmentAllocator>,
    device: DeviceIndex,
    writer: Writer,
    pages: u32,
) -> Result<(Location, Flight)> {
    let usable = devices.identity.segment_pages - 2;
    if pages > usable {
        let text = format!("a frame of {pages} pages does not fit in a segment of {usable}; use larger segments");
        return Err(Error::new(ErrorKind::Configuration, text));
    }
    let (mut full, mut skipped) = (None, 0);
    loop {
        let (stream, step, changed) = {
            let mut space = lock(space);
            if !devices.get(device)?.is_active() {
                // Under this lock: whoever finds the device unused knows that it stays so.
                return Err(Error::new(ErrorKind::NoSpace, format!("device {device} takes no more frames")));
            }
            let (stream, sequence) = match writer {
                Writer::Sequence(sequence) => (space.stream_of(devices, sequence, device), Some(sequence)),
                Writer::Brief(sequence) => (WriteStream::Brief, Some(sequence)),
                Writer::Cleaning => (WriteStream::Moved, None),
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
                    devices.tend.notify();
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
                    // There may be room elsewhere.
                    Err(e) if e.kind() == ErrorKind::NoSpace => full = Some(e),
                    Err(e) if e.kind() != ErrorKind::Poisoned && !opening.fresh && skipped < SKIPS_MAX => skipped += 1,
                    other => other?,
                }
            }
        }
    }
}

/// Opens a segment on every device where a sequence fills one after the other and none with room is left: making a file takes longer
/// than a device takes to write what is on its way to it.
pub(crate) fn open_ahead(devices: &Devices, space: &Mutex<SegmentAllocator>) {
    for device in devices.list.iter().filter(|device| device.takes_frames()) {
        let room = device.directory.space().map_or(0, |space| space.available);
        // Spares first, one at a time: others wait for what is being opened.
        loop {
            let Some(opening) = lock(space).ahead(devices, device.index, room) else { break };
            let opened = open_segment(devices, &opening);
            let outcome = lock(space).opened(devices, None, &opening, opened);
            lock(space).changed.notify();
            // Whoever needs one meets the same failure, and says so.
            if outcome.is_err() || !opening.spare {
                break;
            }
        }
    }
}

impl SegmentAllocator {
    /// What [`open_ahead`] is to open next on a device whose file system has so many bytes left.
    fn ahead(&mut self, devices: &Devices, device: DeviceIndex, room: u64) -> Option<Opening> {
        let (whole, segment) = (nearly_whole(self.segment_pages - 2), self.segment_bytes());
        if self.allowance(devices) == 0 {
            return None;
        }
        let allowed = self.allowance(devices).saturating_sub(self.owed_bytes());
        let may_grow = allowed.min(room) / segment > AHEAD_LEAVES;
        let own = self.devices.get_mut(&device)?;
        let grows = own.streams.keys().any(|stream| matches!(stream, WriteStream::Own(_)));
        let ready = own.opening > 0 || own.partial.iter().any(|active| active.room() >= whole);
        if !grows || ready {
            return None;
        }
        // What it adds needs its share of the reserve.
        let (kept, free) = (reserve(own.used() + 1), own.free.len() as u64);
        if free > kept + if may_grow { 0 } else { AHEAD_LEAVES } {
            return own.reopen(device);
        }
        may_grow.then(|| own.grow(device, free < kept))
    }

    /// Where frames of a sequence go on a device.
    pub(crate) fn stream_of(&mut self, devices: &Devices, sequence: SequenceId, device: DeviceIndex) -> WriteStream {
        let usable = u64::from(self.segment_pages - 2);
        let growth = self.growing.entry(sequence).or_default();
        let (class, written) = (growth.class, growth.pages.get(&device).copied().unwrap_or(0));
        let Some(own) = self.devices.get_mut(&device) else { return WriteStream::Shared(class) };
        let stream = WriteStream::Own(sequence);
        if own.streams.contains_key(&stream) {
            return stream;
        }
        let segment = u64::from(self.segment_pages) * PAGE_BYTES as u64;
        let most =
            self.capacity.map_or(OWN_MAX, |capacity| (capacity / segment / devices.list.len() as u64 / 8).min(OWN_MAX));
        let owned = own.streams.keys().filter(|stream| matches!(stream, WriteStream::Own(_))).count() as u64;
        if written * 4 < usable || owned >= most {
            return WriteStream::Shared(class);
        }
        // What it shared with nobody becomes its own.
        let shared = WriteStream::Shared(class);
        if own.streams.get(&shared).is_some_and(|active| active.only == Some(sequence))
            && let Some(active) = own.streams.remove(&shared)
        {
            own.streams.insert(stream, active);
        }
        stream
    }

    /// Notes pages written for a sequence.
    fn grew(&mut self, sequence: SequenceId, device: DeviceIndex, pages: u32) {
        *self.growing.entry(sequence).or_default().pages.entry(device).or_default() += u64::from(pages);
    }

    fn took(
        &mut self,
        device: DeviceIndex,
        stream: WriteStream,
        writer: Option<SequenceId>,
        pages: u32,
    ) -> Result<AllocationStep> {
        let active = self.space_of(device)?.streams.get_mut(&stream);
        let active = active
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, format!("device {device} has no segment to write to")))?;
        let location = Location { device, segment: active.handle.key.1, page: active.next_page, pages };
        active.only = if active.next_page == 1 { writer } else { active.only.filter(|only| Some(*only) == writer) };
        active.next_page += pages;
        active.handle.lazy.hold(true);
        Ok(AllocationStep::Took(location, Flight::new(&active.handle, pages)))
    }

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
        // One with room: the emptiest, and for a sequence of its own nearly a whole one.
        let wanted = if matches!(stream, WriteStream::Own(_)) { nearly_whole(usable) } else { pages };
        if let Some(at) = own.partial.iter().rposition(|active| active.room() >= wanted.max(pages)) {
            let active = own.partial.remove(at);
            return self.switch(device, (stream, writer), active, pages);
        }
        let kept = if stream == WriteStream::Moved || lent { 0 } else { reserve(own.used()) };
        if own.free.len() as u64 > kept
            && let Some(opening) = own.reopen(device)
        {
            return Ok(AllocationStep::Open(opening));
        }
        let spare = (own.free.len() as u64) < kept;
        // What is moved in the background comes again: where many files cannot be written to, no more of them are made.
        let in_vain = stream == WriteStream::Moved && own.aside.len() >= SKIPS_MAX;
        if full.is_none() && !in_vain && self.may_grow(devices) {
            return Ok(AllocationStep::Open(self.space_of(device)?.grow(device, spare)));
        }
        let own = self.space_of(device)?;
        if own.opening > 0 {
            return Ok(AllocationStep::Wait(self.changed.epoch()));
        }
        // Apart from its own kind, rather than not at all.
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

    /// From now on the stream writes to this segment.
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

    /// Whether the capacity allows one more segment file.
    fn may_grow(&self, devices: &Devices) -> bool {
        let bytes = u64::from(self.segment_pages) * PAGE_BYTES as u64;
        if planted!(CapacityIgnored) {
            return true;
        }
        self.capacity.is_none_or(|capacity| self.file_bytes(devices) + self.owed_bytes() + bytes <= capacity)
    }

    fn no_room(&self, devices: &Devices, device: DeviceIndex) -> Error {
        let bytes = u64::from(self.segment_pages) * PAGE_BYTES as u64;
        let (total, capacity) = (self.file_bytes(devices), self.capacity.unwrap_or(u64::MAX));
        let text = format!(
            "the capacity of {capacity} bytes does not allow another segment of {bytes} on device {device} beside the {total} there are"
        );
        Error::new(ErrorKind::NoSpace, text)
    }

    /// Takes note of a segment that was opened, or could not be; one that was opened for no `stream` yet is there for any.
    fn opened(
        &mut self,
        devices: &Devices,
        stream: Option<WriteStream>,
        opening: &Opening,
        outcome: std::result::Result<OpenedSegment, AllocateFailure>,
    ) -> Result<()> {
        let (device, id) = (opening.device, opening.id);
        let own = self.space_of(device)?;
        own.opening -= 1;
        let opened = match outcome {
            Ok(opened) => opened,
            Err(AllocateFailure { error, exists }) => {
                // Not tried again at once: others may be well.
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
            kind: KIND_LOG,
            state: SegmentState::Open,
            used_pages: 1,
            live_pages: 0,
            last_lsn: 0,
        };
        let key = (device, id);
        self.pending.push(Kind::SegmentOpen, &open_record(key, &meta), &[]);
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
            pin: Pin::new(),
        });
        self.opened.push(Arc::clone(&handle));
        self.handles.insert(key, SegmentLifetime::of(&handle));
        let active = OpenSegment { handle, next_page: 1, only: None };
        let before = match stream {
            Some(stream) => self.space_of(device)?.streams.insert(stream, active),
            None => Some(active),
        };
        before.into_iter().for_each(|before| self.retire(device, before));
        Ok(())
    }
}

impl DeviceSpace {
    /// A free segment begins another life.
    fn reopen(&mut self, device: DeviceIndex) -> Option<Opening> {
        let (id, ended) = self.free.pop()?;
        self.opening += 1;
        coverage!(SegmentRecycled);
        Some(Opening { device, id, generation: ended.saturating_add(1), fresh: false, spare: false })
    }

    /// A segment that is not there yet.
    fn grow(&mut self, device: DeviceIndex, spare: bool) -> Opening {
        self.opening += 1;
        let id = SegmentId(self.next_segment);
        self.next_segment += 1;
        Opening { device, id, generation: 1, fresh: true, spare }
    }
}

/// The room that makes a segment as good as a new one, of so many pages.
fn nearly_whole(usable: u32) -> u32 {
    usable - usable / 8
}

struct OpenedSegment {
    file: Arc<DeviceFile>,
    nonce: u64,
    /// The file was made now.
    made: bool,
}

struct AllocateFailure {
    error: Error,
    /// The segment stays one of the device.
    exists: bool,
}

/// Makes or opens the file of a segment, and writes its header and trailer unless it stays free. Not synced.
fn open_segment(devices: &Devices, opening: &Opening) -> std::result::Result<OpenedSegment, AllocateFailure> {
    let (device, id) = (opening.device, opening.id);
    let bytes = u64::from(devices.identity.segment_pages) * PAGE_BYTES as u64;
    let name = segment::file_name(id);
    let open = || -> Result<(Arc<DeviceFile>, u64, bool)> {
        let own = devices.get(device)?;
        let directory = &own.directory;
        let nonce = random_u64()?;
        if !opening.fresh {
            match directory.open_file(&name, Access::ReadWrite) {
                // Somebody removed it: there was nothing in it.
                Err(error) if error.kind() == ErrorKind::NotFound => own.counters.failed(OpKind::Names, false),
                other => return Ok((other?, nonce, false)),
            }
        }
        Ok((directory.create_file(&name, bytes)?, nonce, true))
    };
    let (file, nonce, made) = open().map_err(|error| AllocateFailure { error, exists: !opening.fresh })?;
    let failed = |error| AllocateFailure { error, exists: true };
    // In its first life also where that was begun before and failed: no sync may have covered the name yet.
    if (made || opening.generation == 1) && !planted!(SegmentNameNotSynced) {
        let synced = devices.get(device).and_then(|own| own.directory.sync_dir(segment::DIRECTORY));
        synced.map_err(failed)?;
    }
    if opening.spare {
        // Its length and its blocks are to be there after a crash as well.
        devices.sync_all([(device, &file)].into_iter()).map_err(failed)?;
        return Ok(OpenedSegment { file, nonce, made });
    }
    let created = U64::new(unix_ms() / 1000);
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
        kind: KIND_LOG,
        position,
        reserved: [0; 4],
    };
    let target = [(device, Arc::clone(&file))];
    let written = devices
        .write_all(&target, 0, &page(POSITION_HEADER).encode())
        .and_then(|()| devices.write_all(&target, bytes - PAGE_BYTES as u64, &page(POSITION_TRAILER).encode()));
    written.map_err(failed)?;
    Ok(OpenedSegment { file, nonce, made })
}
