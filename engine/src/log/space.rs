//! Space in segments: where the next frame goes, which segments are free, and what the manifest must be told of them.

use super::devices::Devices;
use super::random_u64;
use crate::device::directory::Access;
use crate::device::environment::{self, Event, Mutant, mutated};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{
    Catalog, RecordBuffer, SegmentHandle, SegmentKey, SegmentMeta, SegmentState, open_record, seal_record,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use stratakv_format::features::Features;
use stratakv_format::manifest::Kind;
use stratakv_format::segment::{self, KIND_LOG, POSITION_HEADER, POSITION_TRAILER, SegmentPage};
use stratakv_format::superblock::SLOTS;
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

/// A segment that takes frames.
struct Active {
    handle: Arc<SegmentHandle>,
    next_page: u32,
}

#[derive(Default)]
struct DeviceSpace {
    active: Option<Active>,
    /// Free segments with the generation that ended.
    free: Vec<(SegmentId, u64)>,
    next_segment: u32,
    segments: u64,
}

/// Space of all devices.
pub(crate) struct Space {
    devices: BTreeMap<DeviceIndex, DeviceSpace>,
    handles: HashMap<SegmentKey, Arc<SegmentHandle>>,
    /// Segment records that go into the next commit.
    pending: RecordBuffer,
    /// Segments that `pending` opens: their headers are written, not synced.
    opened: Vec<Arc<SegmentHandle>>,
    capacity: Option<u64>,
    /// Bytes of manifest files.
    metadata_bytes: u64,
    next_device: usize,
}

impl Space {
    /// The space that `catalog` leaves.
    pub(crate) fn new(devices: &Devices, catalog: &Catalog, capacity: Option<u64>) -> Result<Self> {
        let mut space = Self {
            devices: devices.list.iter().map(|d| (d.index, DeviceSpace::default())).collect(),
            handles: HashMap::new(),
            pending: RecordBuffer::default(),
            opened: Vec::new(),
            capacity,
            metadata_bytes: 0,
            next_device: 0,
        };
        for (key, meta) in &catalog.segments {
            let Some(own) = space.devices.get_mut(&key.0) else { continue };
            own.next_segment = own.next_segment.max(key.1.0.saturating_add(1));
            own.segments += 1;
            match meta.state {
                SegmentState::Free => own.free.push((key.1, meta.generation)),
                SegmentState::Open if own.active.is_none() => {
                    let handle = space.open_handle(devices, *key, meta)?;
                    if let Some(own) = space.devices.get_mut(&key.0) {
                        own.active = Some(Active { handle, next_page: meta.used_pages });
                    }
                }
                SegmentState::Open | SegmentState::Sealed => {}
            }
        }
        Ok(space)
    }

    /// The handle of a segment that the catalog knows.
    pub(crate) fn open_handle(
        &mut self,
        devices: &Devices,
        key: SegmentKey,
        meta: &SegmentMeta,
    ) -> Result<Arc<SegmentHandle>> {
        if let Some(handle) = self.handles.get(&key) {
            return Ok(Arc::clone(handle));
        }
        let directory = &devices.get(key.0)?.directory;
        let file = directory.open_file(&segment::file_name(key.1), directory.access())?;
        let handle = Arc::new(SegmentHandle {
            key,
            generation: meta.generation,
            nonce: meta.nonce,
            pages: meta.pages,
            file,
            read_unit: devices.get(key.0)?.directory.direct_io().read_unit() as u64,
        });
        self.handles.insert(key, Arc::clone(&handle));
        Ok(handle)
    }

    /// The device for the next frame: one after the other.
    pub(crate) fn next_device(&mut self, devices: &Devices) -> DeviceIndex {
        let index = self.next_device % devices.list.len();
        self.next_device = index + 1;
        devices.list[index].index
    }

    /// Takes `pages` on `device`, in a new segment when the one in use has too few left.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: the capacity or the device is full. Nothing changed.
    pub(crate) fn allocate(
        &mut self,
        devices: &Devices,
        device: DeviceIndex,
        pages: u32,
    ) -> Result<(Location, Arc<SegmentHandle>)> {
        let usable = devices.identity.segment_pages - 2;
        if pages > usable {
            let text = format!("a frame of {pages} pages does not fit in a segment of {usable}; use larger segments");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let own = self.space_of(device)?;
        let fits = |active: &Active| active.next_page + pages < active.handle.pages;
        if !own.active.as_ref().is_some_and(fits) {
            let fresh = self.open_segment(devices, device)?;
            let own = self.space_of(device)?;
            if let Some(full) = own.active.replace(fresh) {
                self.pending.push(Kind::SegmentSeal, &seal_record(full.handle.key, full.next_page), &[]);
            }
        }
        let Some(active) = self.space_of(device)?.active.as_mut() else {
            return Err(Error::new(ErrorKind::NoSpace, format!("device {device} has no segment to write to")));
        };
        let location = Location { device, segment: active.handle.key.1, page: active.next_page, pages };
        active.next_page += pages;
        Ok((location, Arc::clone(&active.handle)))
    }

    /// After a failed write: nothing more goes into this segment.
    pub(crate) fn abandon(&mut self, segment: &SegmentHandle) {
        if let Some(own) = self.devices.get_mut(&segment.key.0)
            && let Some(active) = own.active.take_if(|active| active.handle.key == segment.key)
        {
            self.pending.push(Kind::SegmentSeal, &seal_record(segment.key, active.next_page), &[]);
        }
    }

    /// Segment records for the next commit, and the segments to sync before they are recorded.
    pub(crate) fn take_pending(&mut self) -> (RecordBuffer, Vec<Arc<SegmentHandle>>) {
        (std::mem::take(&mut self.pending), std::mem::take(&mut self.opened))
    }

    /// Bytes of all files: segments, manifest, superblocks.
    pub(crate) fn file_bytes(&self, devices: &Devices) -> u64 {
        let segments: u64 = self.devices.values().map(|own| own.segments).sum();
        let superblocks = (devices.list.len() * SLOTS * PAGE_BYTES) as u64;
        segments * u64::from(devices.identity.segment_pages) * PAGE_BYTES as u64 + self.metadata_bytes + superblocks
    }

    pub(crate) fn set_metadata_bytes(&mut self, bytes: u64) {
        self.metadata_bytes = bytes;
    }

    /// Whether a segment with nothing live may be freed: sealed, and neither a reader nor an uncommitted frame holds it.
    pub(crate) fn reclaimable(&self, key: SegmentKey) -> bool {
        let active = self.devices.get(&key.0).and_then(|own| own.active.as_ref());
        let in_use = active.is_some_and(|active| active.handle.key == key);
        !in_use && self.handles.get(&key).is_none_or(|handle| Arc::strong_count(handle) == 1)
    }

    /// The manifest says durably that this segment is free: its file may live again.
    pub(crate) fn freed(&mut self, key: SegmentKey, generation: u64) {
        self.handles.remove(&key);
        if let Some(own) = self.devices.get_mut(&key.0) {
            own.free.push((key.1, generation));
        }
    }

    fn space_of(&mut self, device: DeviceIndex) -> Result<&mut DeviceSpace> {
        let own = self.devices.get_mut(&device);
        own.ok_or_else(|| Error::new(ErrorKind::Corruption, format!("device {device} is not part of the store")))
    }

    fn open_segment(&mut self, devices: &Devices, device: DeviceIndex) -> Result<Active> {
        let pages = devices.identity.segment_pages;
        let bytes = u64::from(pages) * PAGE_BYTES as u64;
        let total = self.file_bytes(devices);
        let capacity = self.capacity;
        let own = self.space_of(device)?;
        let directory = &devices.get(device)?.directory;
        let (id, generation, file) = match own.free.last() {
            Some(&(id, ended)) => {
                let file = directory.open_file(&segment::file_name(id), Access::ReadWrite)?;
                environment::note(Event::SegmentRecycled);
                (id, ended.saturating_add(1), file)
            }
            None => {
                if capacity.is_some_and(|capacity| total + bytes > capacity) {
                    let text = format!(
                        "the capacity does not allow another segment of {bytes} bytes beside the {total} there are"
                    );
                    return Err(Error::new(ErrorKind::NoSpace, text));
                }
                let id = SegmentId(own.next_segment);
                let file = directory.create_file(&segment::file_name(id), bytes)?;
                if !mutated(Mutant::SegmentNameNotSynced) {
                    directory.sync_dir(segment::DIRECTORY)?;
                }
                own.next_segment += 1;
                own.segments += 1;
                (id, 1, file)
            }
        };
        let handle = Arc::new(SegmentHandle {
            key: (device, id),
            generation,
            nonce: random_u64()?,
            pages,
            file,
            read_unit: directory.direct_io().read_unit() as u64,
        });
        let created = U64::new(super::unix_ms() / 1000);
        let page = |position| SegmentPage {
            magic: segment::MAGIC,
            features: Features::current(),
            store_id: devices.identity.store_id,
            generation: U64::new(generation),
            nonce: U64::new(handle.nonce),
            created_unix_s: created,
            segment: U32::new(id.0),
            pages: U32::new(pages),
            device: U16::new(device.0),
            kind: KIND_LOG,
            position,
            reserved: [0; 4],
        };
        let target = [(device, Arc::clone(&handle.file))];
        let written = devices
            .write_all(&target, 0, &page(POSITION_HEADER).encode())
            .and_then(|()| devices.write_all(&target, bytes - PAGE_BYTES as u64, &page(POSITION_TRAILER).encode()));
        let own = self.space_of(device)?;
        if let Err(e) = written {
            // A fresh file is kept for the next attempt; a recycled one still stands in the list.
            if own.free.last().is_none_or(|(free, _)| *free != id) {
                own.free.push((id, 0));
            }
            return Err(e.during("open a segment"));
        }
        if own.free.last().is_some_and(|(free, _)| *free == id) {
            own.free.pop();
        }
        let meta = SegmentMeta {
            generation,
            nonce: handle.nonce,
            pages,
            kind: KIND_LOG,
            state: SegmentState::Open,
            used_pages: 1,
            live_pages: 0,
        };
        self.pending.push(Kind::SegmentOpen, &open_record(handle.key, &meta), &[]);
        self.opened.push(Arc::clone(&handle));
        self.handles.insert(handle.key, Arc::clone(&handle));
        Ok(Active { handle, next_page: 1 })
    }
}
