//! Frames, their copies, and the segments that hold them.
//!
//! Invariants:
//! - `references` is the number of references from sequences to frames, and [`Frame::is_referenced`] follows from it.
//! - `live` of a segment is the number of frames and copies in it that are part of the state.
//! - The copies of a frame are on distinct devices. A derived frame has one.

use super::record::{RecordResult, StoreLimits, require, reserved_byte};
use std::collections::{BTreeMap, HashMap};
use stratakv_format::Location;
use stratakv_format::frame::TOTAL_PAGES_MAX;
use stratakv_format::manifest::{self as m, FLAG_DERIVED};
use stratakv_format::segment::{KIND_LOG, KIND_POOL};

/// The largest number of references that a check holds in memory.
const REFERENCES_MAX: u64 = 1 << 26;
/// The largest number of copies of a frame, the first one included.
const COPIES_MAX: usize = 3;

/// A frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) record: m::Frame,
    /// The location of the first copy.
    pub(crate) location: Location,
    pub(crate) header_crc: u32,
    /// The copies other than the first.
    others: Vec<FrameCopy>,
    refs: u64,
}

impl Frame {
    /// Returns whether the frame is derived: it only repeats tokens of other frames.
    pub(crate) fn is_derived(&self) -> bool {
        self.record.flags.get() & FLAG_DERIVED != 0
    }

    /// Returns whether a sequence refers to the frame.
    pub(crate) fn is_referenced(&self) -> bool {
        self.refs > 0
    }

    /// Returns the locations of the copies, the first copy in front.
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        std::iter::once(self.location).chain(self.others.iter().map(|copy| copy.location))
    }

    /// Returns the frame once per copy, each time with the location and header CRC of that copy.
    pub(crate) fn copies(&self) -> impl Iterator<Item = Self> + '_ {
        let at = |copy: &FrameCopy| Self {
            location: copy.location,
            header_crc: copy.header_crc,
            others: Vec::new(),
            ..self.clone()
        };
        std::iter::once(self.clone()).chain(self.others.iter().map(at))
    }
}

/// A copy of a frame on another device than the first copy.
#[derive(Clone, Copy, Debug)]
struct FrameCopy {
    generation: u64,
    location: Location,
    header_crc: u32,
}

/// A segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) generation: u64,
    pub(crate) nonce: u64,
    pub(crate) pages: u32,
    pub(crate) kind: u8,
    pub(crate) free: bool,
    /// True if the segment is free and its file was removed.
    pub(crate) removed: bool,
    /// The pages in use, if the segment is sealed.
    pub(crate) sealed: Option<u32>,
    live: u64,
}

/// All frames and segments of the store.
#[derive(Debug, Default)]
pub(super) struct FrameTable {
    frames: HashMap<u64, Frame>,
    segments: BTreeMap<(u16, u32), Segment>,
    references: u64,
}

impl FrameTable {
    pub(super) fn frames(&self) -> &HashMap<u64, Frame> {
        &self.frames
    }

    pub(super) fn segments(&self) -> &BTreeMap<(u16, u32), Segment> {
        &self.segments
    }

    fn segment(&mut self, device: u16, segment: u32) -> Result<&mut Segment, String> {
        let found = self.segments.get_mut(&(device, segment));
        found.ok_or_else(|| format!("segment {segment:08x} of device {device} does not exist"))
    }

    fn frame(&self, id: u64) -> Result<&Frame, String> {
        self.frames.get(&id).ok_or_else(|| format!("frame {id} does not exist"))
    }

    /// Returns the segment of a location, if the location is inside a segment in use whose kind is right for the frame.
    fn segment_at(&mut self, location: &Location, derived: bool) -> Result<&mut Segment, String> {
        let segment = self.segment(location.device.0, location.segment.0)?;
        let end = u64::from(location.page) + u64::from(location.pages);
        let inside = location.page >= 1 && location.pages >= 1 && end < u64::from(segment.pages);
        require(inside, || format!("{location} is outside the pages of its segment"))?;
        require(location.pages <= TOTAL_PAGES_MAX, || {
            format!("a frame of {} pages is larger than the limit of {TOTAL_PAGES_MAX}", location.pages)
        })?;
        require(!segment.free, || format!("{location} is in a free segment"))?;
        require(derived == (segment.kind == KIND_POOL), || {
            format!("{location} is in a segment of kind {}, which holds other frames", segment.kind)
        })?;
        Ok(segment)
    }

    /// Counts a new frame in its segment. [`insert`](Self::insert) adds the frame itself.
    pub(super) fn occupy(&mut self, frame: &m::Frame, pools: bool) -> RecordResult {
        let (id, derived) = (frame.frame.get(), frame.flags.get() & FLAG_DERIVED != 0);
        require(id != 0, || "a frame has the id 0".into())?;
        require(frame.location.reserved.get() == 0, reserved_byte)?;
        require(pools || !derived, || format!("frame {id} is derived in a store without the feature of pools"))?;
        self.segment_at(&Location::from_raw(&frame.location), derived)?.live += 1;
        Ok(())
    }

    /// Adds a frame that [`occupy`](Self::occupy) has accepted.
    pub(super) fn insert(&mut self, frame: &m::Frame) -> RecordResult {
        let id = frame.frame.get();
        let (header, front) = (frame.header_pages.get(), frame.front_pages.get());
        let location = Location::from_raw(&frame.location);
        let new = Frame { record: *frame, location, header_crc: frame.header_crc.get(), others: Vec::new(), refs: 0 };
        let other = self.frames.insert(id, new);
        require(other.is_none(), || format!("frame {id} already exists"))?;
        require((1..=front).contains(&header) && front <= location.pages, || {
            format!("frame {id} of {} pages has {header} header pages and {front} front pages", location.pages)
        })
    }

    /// Returns an error if a sequence cannot get a reference to this frame.
    pub(super) fn require_referable(&self, id: u64) -> RecordResult {
        require(self.references < REFERENCES_MAX, too_many_references)?;
        self.frame(id).map(drop)
    }

    /// Returns an error if `count` more references are more than a check holds.
    pub(super) fn require_references_fit(&self, count: u64) -> RecordResult {
        require(self.references.saturating_add(count) <= REFERENCES_MAX, too_many_references)
    }

    /// Adds a reference to a frame.
    pub(super) fn retain(&mut self, id: u64) {
        if let Some(frame) = self.frames.get_mut(&id) {
            frame.refs += 1;
            self.references += 1;
        }
    }

    /// Removes a reference to a frame. The frame is removed with its last reference.
    pub(super) fn release(&mut self, id: u64) {
        self.references = self.references.saturating_sub(1);
        let Some(frame) = self.frames.get_mut(&id) else { return };
        frame.refs = frame.refs.saturating_sub(1);
        if frame.refs == 0
            && let Some(frame) = self.frames.remove(&id)
        {
            self.vacate(&frame.location);
            frame.others.iter().for_each(|copy| self.vacate(&copy.location));
        }
    }

    /// Counts one frame or copy less in the segment of this location.
    fn vacate(&mut self, location: &Location) {
        if let Ok(segment) = self.segment(location.device.0, location.segment.0) {
            segment.live = segment.live.saturating_sub(1);
        }
    }

    /// Adds a copy of a frame, or replaces the copy on the same device.
    pub(super) fn add_copy(&mut self, replica: &m::Replica, allowed: bool) -> RecordResult {
        let id = replica.frame.get();
        let location = Location::from_raw(&replica.location);
        require(allowed, || format!("frame {id} has a copy in a store without the feature of copies"))?;
        require(replica.reserved.get() == 0 && replica.location.reserved.get() == 0, reserved_byte)?;
        let frame = self.frame(id)?;
        require(!frame.is_derived(), || format!("frame {id} is derived and has a second copy"))?;
        let (first, pages) = (frame.location.device, frame.location.pages);
        require(first != location.device, || {
            format!("a copy of frame {id} is on device {}, like the first copy", location.device.0)
        })?;
        require(pages == location.pages, || format!("frame {id} has {pages} pages, its copy {}", location.pages))?;
        let old = frame.others.iter().position(|old| old.location.device == location.device);
        let new = FrameCopy { generation: replica.generation.get(), location, header_crc: replica.header_crc.get() };
        match old {
            Some(at) => require(frame.others[at].generation < new.generation, || {
                format!("a copy of frame {id} repeats its generation {}", new.generation)
            })?,
            None => require(frame.others.len() + 1 < COPIES_MAX, || {
                format!("frame {id} has more than {COPIES_MAX} copies")
            })?,
        }
        self.segment_at(&location, false)?.live += 1;
        let others = self.frames.get_mut(&id).map(|frame| &mut frame.others);
        let replaced = others.and_then(|others| {
            let replaced = old.map(|at| others.remove(at).location);
            others.push(new);
            replaced
        });
        if let Some(replaced) = replaced {
            self.vacate(&replaced);
        }
        Ok(())
    }

    /// Moves the first copy of a frame. If it moves to the place of another copy, that copy becomes the first.
    pub(super) fn move_frame(&mut self, moved: &m::FrameMoved) -> RecordResult {
        let id = moved.frame.get();
        let to = Location::from_raw(&moved.location);
        require(moved.reserved.get() == 0 && moved.location.reserved.get() == 0, reserved_byte)?;
        let frame = self.frame(id)?;
        require(!frame.is_derived(), || format!("frame {id} is derived and is moved"))?;
        let (from, others) = (frame.location, &frame.others);
        require(from.pages == to.pages, || {
            format!("frame {id} of {} pages is moved to {} pages", from.pages, to.pages)
        })?;
        let promoted = others.iter().position(|copy| copy.location == to);
        let shares_device = others.iter().any(|copy| copy.location.device == to.device);
        require(promoted.is_some() || !shares_device, || {
            format!("frame {id} is moved to device {}, which holds another copy of it", to.device.0)
        })?;
        if promoted.is_none() {
            self.segment_at(&to, false)?.live += 1;
        }
        if let Some(frame) = self.frames.get_mut(&id) {
            frame.location = to;
            frame.header_crc = moved.header_crc.get();
            promoted.map(|at| frame.others.remove(at));
        }
        self.vacate(&from);
        Ok(())
    }

    /// Removes the segments of a device, and the copies in them. A first copy on the device is an error.
    pub(super) fn remove_device(&mut self, device: u16) -> RecordResult {
        let left = self.frames.iter().find(|(_, frame)| frame.location.device.0 == device);
        require(left.is_none(), || format!("device {device} is removed although it holds frames"))?;
        for frame in self.frames.values_mut() {
            frame.others.retain(|copy| copy.location.device.0 != device);
        }
        self.segments.retain(|(own, _), _| *own != device);
        Ok(())
    }

    /// Starts a new life of a segment.
    pub(super) fn open_segment(&mut self, open: &m::SegmentOpen, limits: &StoreLimits) -> RecordResult {
        let (device, id, pages) = (open.device.get(), open.segment.get(), open.pages.get());
        require(open.reserved == [0; 5], reserved_byte)?;
        require(device < limits.devices, || format!("device {device} in a store of {} devices", limits.devices))?;
        require(u64::from(pages) == limits.segment_pages, || {
            format!("segment {id:08x} has {pages} pages, the segments of this store have {}", limits.segment_pages)
        })?;
        let known = open.kind == KIND_LOG || open.kind == KIND_POOL && limits.pools;
        require(known, || {
            let name = if open.kind == KIND_POOL { "pool, a feature that the store does not have" } else { "unknown" };
            format!("segment {id:08x} is of kind {}: {name}", open.kind)
        })?;
        if let Some(old) = self.segments.get(&(device, id)) {
            require(old.free, || format!("segment {id:08x} of device {device} is already in use"))?;
            require(old.generation < open.generation.get(), || {
                format!(
                    "segment {id:08x} of device {device} goes from generation {} to {}",
                    old.generation, open.generation
                )
            })?;
        }
        let segment = Segment {
            generation: open.generation.get(),
            nonce: open.nonce.get(),
            pages,
            kind: open.kind,
            free: false,
            removed: false,
            sealed: None,
            live: 0,
        };
        self.segments.insert((device, id), segment);
        Ok(())
    }

    /// Records how many pages of a segment are in use. It takes no more frames.
    pub(super) fn seal_segment(&mut self, seal: &m::SegmentSeal) -> RecordResult {
        let (device, id, used) = (seal.device.get(), seal.segment.get(), seal.used_pages.get());
        let segment = self.segment(device, id)?;
        require(seal.reserved == [0; 6], reserved_byte)?;
        require(!segment.free, || format!("segment {id:08x} of device {device} is sealed although it is free"))?;
        require((1..segment.pages).contains(&used), || {
            format!("segment {id:08x} of {} pages is sealed with {used} pages in use", segment.pages)
        })?;
        segment.sealed = Some(used);
        Ok(())
    }

    /// Ends the life of a segment. A live frame in it is an error.
    pub(super) fn free_segment(&mut self, free: &m::SegmentFree) -> RecordResult {
        let (device, id) = (free.device.get(), free.segment.get());
        require(free.reserved == 0, reserved_byte)?;
        require(free.removed <= 1, || format!("`removed` of segment {id:08x} is {}, not 0 or 1", free.removed))?;
        let segment = self.segment(device, id)?;
        // The writer may free a segment and remove its file later, which are two records. After that there is no file.
        require(!segment.removed, || format!("segment {id:08x} of device {device} is freed although it was removed"))?;
        require(segment.generation == free.generation.get(), || {
            format!("segment {id:08x} has generation {}, but {} is freed", segment.generation, free.generation)
        })?;
        require(segment.live == 0, || {
            format!("segment {id:08x} of device {device} is freed with {} live frames", segment.live)
        })?;
        segment.free = true;
        segment.removed = free.removed == 1;
        Ok(())
    }
}

fn too_many_references() -> String {
    format!("the store has more than {REFERENCES_MAX} references to frames, the limit of this program")
}
