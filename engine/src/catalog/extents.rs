//! The location of every group of one layer of an open sequence.
//!
//! An [`ExtentTable`] is a sorted list of extents. An extent is a run of consecutive groups in one frame on disk, or in
//! one buffer in memory. A [`FrameSlot`] is shared by all extents of a frame, so that cleaning moves the frame for all
//! of them.
//!
//! Invariants:
//! - The extents of a table cover the groups from 0 on without gaps and without overlap.
//! - A [`SegmentHandle`] keeps its segment from being reused: its pin is released when the last handle drops.
//! - A loaded [`FrameBody`] stays readable after the frame moved, because it holds its segment.
//! - A [`Flight`] counts pages that no commit has named yet, so cleaning and removal leave the segment alone.

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::io::file::cached_file::CachedFile;
use crate::io::file::device_file::DeviceFile;
use crate::kernels::prefetch;
use crate::metrics::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use stratakv_format::frame::{SUMMARY_MIN_MAX, SummaryHeader, SummaryRecords};
use stratakv_format::layout::BlockGeometry;
use stratakv_format::{FrameId, PAGE_BYTES, SequenceId};

use super::meta::SegmentKey;
use super::pin::{Pin, Versioned};

/// One generation of a segment. Every reader of the segment holds a reference. Its space is reused after the last drop.
pub(crate) struct SegmentHandle {
    pub(crate) key: SegmentKey,
    pub(crate) generation: u64,
    pub(crate) nonce: u64,
    pub(crate) pages: u32,
    pub(crate) lazy: Arc<CachedFile>,
    /// The alignment of reads in bytes, a divisor of the page size.
    pub(crate) read_unit: u64,
    /// The number of pages of frames that no commit has named yet.
    pub(crate) in_flight: AtomicU64,
    /// The number of those pages whose write is not known to be complete.
    pub(crate) unwritten: AtomicU64,
    /// True if the segment was sealed and then synced with all of its frames. No commit needs to sync it.
    pub(crate) synced: AtomicBool,
    /// Released when the last reference to this handle drops.
    pub(crate) pin: Pin,
}

/// The pages of a frame that no commit has named yet. Once it drops, the pages are either live or dead.
pub(crate) struct Flight {
    segment: Arc<SegmentHandle>,
    pages: u64,
    /// True once the write is complete.
    written: bool,
}

impl Flight {
    pub(crate) fn new(segment: &Arc<SegmentHandle>, pages: u32) -> Self {
        segment.in_flight.fetch_add(u64::from(pages), Ordering::Relaxed);
        segment.unwritten.fetch_add(u64::from(pages), Ordering::AcqRel);
        Self { segment: Arc::clone(segment), pages: u64::from(pages), written: false }
    }

    /// Takes note that the write is complete.
    fn complete(&mut self) {
        if !std::mem::replace(&mut self.written, true) {
            self.segment.unwritten.fetch_sub(self.pages, Ordering::AcqRel);
        }
    }

    pub(crate) fn segment(&self) -> &Arc<SegmentHandle> {
        &self.segment
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.complete();
        self.segment.in_flight.fetch_sub(self.pages, Ordering::Relaxed);
    }
}

impl SegmentHandle {
    /// Returns the segment file. Opens it if necessary.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn file(&self) -> Result<Arc<DeviceFile>> {
        self.lazy.get()
    }

    pub(crate) fn in_flight_pages(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns whether the writes of all its frames are complete.
    pub(crate) fn is_written(&self) -> bool {
        self.unwritten.load(Ordering::Acquire) == 0
    }

    /// Returns whether a sync covers everything in it, for good.
    pub(crate) fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    /// Takes note that a sync covers everything in it. The segment must be sealed, and [written](Self::is_written)
    /// before the sync began. Its file may be closed from now on.
    pub(crate) fn set_synced(&self) {
        self.synced.store(true, Ordering::Release);
        self.lazy.hold(false);
    }
}

/// The data needed to read and verify the groups of a frame at its present location.
pub(crate) struct FrameBody {
    pub(crate) id: FrameId,
    pub(crate) origin: SequenceId,
    pub(crate) nonce: u64,
    pub(crate) segment: Arc<SegmentHandle>,
    /// The first page of the frame in its segment.
    pub(crate) page: u32,
    /// The CRC of the header of this copy.
    pub(crate) header_crc: u32,
    /// The other copies.
    pub(crate) other_copies: Box<[FrameCopy]>,
    /// The checksums of the groups, per block and plane, extent after extent.
    pub(crate) checksums: Arc<[u64]>,
    /// The places of summaries that are read on demand.
    pub(crate) summaries: Arc<[SummaryPlace]>,
}

/// The place of the summaries of consecutive groups of a layer, in the front of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SummaryPlace {
    pub(crate) layer: u16,
    pub(crate) stored: SummaryRecords,
    pub(crate) first_group: u64,
    pub(crate) groups: u32,
    /// The offset from the start of the frame, in bytes.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) checksum: u64,
}

/// Returns the identity of min/max records. They have no header and no adapter.
pub(crate) fn min_max_records(record_bytes: u32) -> SummaryRecords {
    SummaryRecords { kind: SUMMARY_MIN_MAX, parameter: 0, adapter_checksum: 0, record_bytes }
}

impl SummaryPlace {
    /// Returns the bytes before the records: a header, except for min/max records.
    pub(crate) fn header_bytes(&self) -> usize {
        if self.stored.kind == SUMMARY_MIN_MAX { 0 } else { size_of::<SummaryHeader>() }
    }

    /// Returns whether this place holds the record of a group.
    fn holds(&self, layer: usize, stored: &SummaryRecords, group: u64) -> bool {
        let groups = self.first_group..self.first_group + u64::from(self.groups);
        usize::from(self.layer) == layer && self.stored == *stored && groups.contains(&group)
    }
}

/// A copy of a frame. Copies have the same bytes except for the header.
#[derive(Clone)]
pub(crate) struct FrameCopy {
    pub(crate) segment: Arc<SegmentHandle>,
    /// The first page of the frame in that segment.
    pub(crate) page: u32,
    /// The CRC of the header of this copy.
    pub(crate) header_crc: u32,
}

impl FrameBody {
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.other_copies.len() * size_of::<FrameCopy>()
            + self.checksums.len() * 8
            + self.summaries.len() * size_of::<SummaryPlace>()
    }

    /// Returns the place that holds a group's record of this kind of summary.
    pub(crate) fn summary(&self, layer: usize, stored: &SummaryRecords, group: u64) -> Option<&SummaryPlace> {
        self.summaries.iter().rev().find(|place| place.holds(layer, stored, group))
    }

    /// Returns the number of copies, this one included.
    pub(crate) fn copies(&self) -> usize {
        1 + self.other_copies.len()
    }

    /// Returns the segment, first page and header CRC of a copy. Copy 0 is the frame itself.
    pub(crate) fn copy(&self, copy: usize) -> (&Arc<SegmentHandle>, u32, u32) {
        match copy.checked_sub(1).and_then(|at| self.other_copies.get(at)) {
            Some(copy) => (&copy.segment, copy.page, copy.header_crc),
            None => (&self.segment, self.page, self.header_crc),
        }
    }

    /// Converts a file offset in copy 0 to the file offset of the same byte in another copy.
    pub(crate) fn offset_in(&self, copy: usize, offset: u64) -> u64 {
        let page = self.copy(copy).1;
        offset - u64::from(self.page) * PAGE_BYTES as u64 + u64::from(page) * PAGE_BYTES as u64
    }

    /// Returns the smallest byte range around `bytes` at `offset` of copy 0 that every copy's device can read.
    pub(crate) fn readable(&self, offset: u64, bytes: usize) -> std::ops::Range<u64> {
        let units = (0..self.copies()).map(|copy| self.copy(copy).0.read_unit);
        let unit = units.max().unwrap_or(PAGE_BYTES as u64);
        offset / unit * unit..(offset + bytes as u64).next_multiple_of(unit)
    }
}

/// A frame as its sequences share it. Cleaning and repair replace its location.
pub(crate) struct FrameSlot {
    body: Versioned<Arc<FrameBody>>,
    /// The frame's uncommitted pages. The first commit that names the frame takes them.
    flights: Mutex<Vec<Flight>>,
}

impl FrameSlot {
    pub(crate) fn new(body: FrameBody) -> Self {
        Self { body: Versioned::new(Arc::new(body)), flights: Mutex::default() }
    }

    /// Returns the frame at its present location. The holder may read there even after a move.
    pub(crate) fn now(&self) -> Arc<FrameBody> {
        self.body.load()
    }

    /// Returns the memory of the slot and its body, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.now().memory_bytes()
    }

    pub(crate) fn set_flights(&self, flights: Vec<Flight>) {
        *lock(&self.flights) = flights;
    }

    /// Takes note that the writes of all copies are complete.
    pub(crate) fn complete_flights(&self) {
        lock(&self.flights).iter_mut().for_each(Flight::complete);
    }

    /// Drops the flights of copies that were not written.
    pub(crate) fn keep_flights(&self, written: impl Fn(&Arc<SegmentHandle>) -> bool) {
        lock(&self.flights).retain(|flight| written(&flight.segment));
    }

    pub(crate) fn take_flights(&self) -> Vec<Flight> {
        std::mem::take(&mut lock(&self.flights))
    }

    /// Replaces the location of every copy.
    pub(crate) fn set_location(&self, first: FrameCopy, other_copies: Box<[FrameCopy]>) {
        let FrameCopy { segment, page, header_crc } = first;
        self.body.replace(|body| {
            let (checksums, summaries) = (Arc::clone(&body.checksums), Arc::clone(&body.summaries));
            let (id, origin, nonce) = (body.id, body.origin, body.nonce);
            Arc::new(FrameBody { id, origin, nonce, segment, page, header_crc, other_copies, checksums, summaries })
        });
    }
}

/// Consecutive groups of one layer in one buffer, in the form that is written to disk.
pub(crate) struct GroupBuffer {
    pub(crate) layer: usize,
    pub(crate) first_group: u64,
    pub(crate) groups: usize,
    pub(crate) geometry: BlockGeometry,
    pub(crate) buffer: Arc<Lease>,
    /// True if the buffer holds later groups that must not be written.
    pub(crate) cut: bool,
}

impl GroupBuffer {
    /// Returns the first `groups` of the run, in the same buffer.
    pub(crate) fn first(&self, groups: usize) -> Arc<Self> {
        Arc::new(Self { groups: groups.min(self.groups), buffer: Arc::clone(&self.buffer), cut: true, ..*self })
    }

    /// Returns the bytes of block `index` of the run.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: a read fills the buffer. This does not happen, because buffers of groups are never read
    /// into.
    pub(crate) fn block(&self, index: usize) -> Result<&[u8]> {
        let start = self.geometry.block_offset(index);
        self.buffer.bytes().and_then(|bytes| bytes.get(start..start + self.geometry.block_bytes)).ok_or_else(|| {
            let (group, layer) = (self.first_group + index as u64, self.layer);
            Error::new(ErrorKind::Busy, format!("group {group} of layer {layer}: its buffer is in use by a read"))
        })
    }

    /// Returns the bytes of the run on disk.
    pub(crate) fn disk_bytes(&self) -> usize {
        self.geometry.extent_bytes(self.groups)
    }

    /// Returns whether groups written directly after this run continue its pages without a gap.
    pub(crate) fn ends_on_page(&self) -> bool {
        self.geometry.blocks_per_page == 0 || self.groups.is_multiple_of(self.geometry.blocks_per_page)
    }
}

/// The location of an extent's bytes.
#[derive(Clone)]
pub(crate) enum Source {
    /// A buffer in memory. Its groups are not known to be on disk.
    Memory(Arc<GroupBuffer>),
    /// A frame. The extent starts `page` pages from the frame's start and at index `checksum` of its checksums.
    Disk { frame: Arc<FrameSlot>, page: u32, checksum: usize },
}

/// Consecutive groups of a layer.
#[derive(Clone)]
pub(crate) struct Extent {
    pub(crate) first_group: u64,
    pub(crate) groups: usize,
    /// The index of `first_group` among the groups of the source.
    pub(crate) skip: usize,
    pub(crate) source: Source,
}

/// The place of one block on a device.
pub(crate) struct BlockPlace {
    pub(crate) frame: Arc<FrameBody>,
    /// The offset in the segment file, in bytes.
    pub(crate) offset: u64,
    /// The index of the block's first checksum in the frame's table.
    pub(crate) checksum: usize,
}

impl Extent {
    /// Returns whether `next` holds the next groups, directly after these in the same frame.
    fn continues_in(&self, next: &Self, geometry: &BlockGeometry, planes: usize) -> bool {
        let place = |extent: &Self, groups: usize| match &extent.source {
            Source::Disk { frame, page, checksum } => {
                let index = extent.skip + groups;
                let byte = *page as usize * PAGE_BYTES + geometry.block_offset(index);
                Some((Arc::as_ptr(frame), byte, checksum + index * planes))
            }
            Source::Memory(_) => None,
        };
        let end = place(self, self.groups);
        self.first_group + self.groups as u64 == next.first_group && end.is_some() && end == place(next, 0)
    }

    /// Returns the place of the block of `group`, or `None` if the extent is in memory.
    pub(crate) fn place(&self, group: u64, geometry: &BlockGeometry, planes: usize) -> Option<BlockPlace> {
        let Source::Disk { frame, page, checksum } = &self.source else { return None };
        let index = (group - self.first_group) as usize + self.skip;
        let frame = frame.now();
        let start = (u64::from(frame.page) + u64::from(*page)) * PAGE_BYTES as u64;
        Some(BlockPlace {
            offset: start + geometry.block_offset(index) as u64,
            checksum: checksum + index * planes,
            frame,
        })
    }
}

/// The extents of one layer. A clone is cheap, because clones share the table until one of them changes.
#[derive(Clone, Default)]
pub(crate) struct ExtentTable {
    extents: Arc<Vec<Extent>>,
}

impl ExtentTable {
    /// Returns the number of groups covered.
    pub(crate) fn groups(&self) -> u64 {
        self.extents.last().map_or(0, |last| last.first_group + last.groups as u64)
    }

    /// Returns the extent that holds `group`.
    pub(crate) fn find(&self, group: u64) -> Option<&Extent> {
        let at = self.extents.partition_point(|e| e.first_group + e.groups as u64 <= group);
        self.extents.get(at).filter(|e| e.first_group <= group)
    }

    /// Returns the extents that hold `groups`, which must be in rising order.
    ///
    /// Prefetches the frames of all of them before the caller uses any, so that their cache misses overlap.
    pub(crate) fn find_all(&self, groups: &[u64]) -> Vec<Option<&Extent>> {
        let mut from = 0;
        let found: Vec<Option<&Extent>> = groups
            .iter()
            .map(|&group| {
                let left = &self.extents[from.min(self.extents.len())..];
                // The search doubles its reach, because the next extent is close if the groups are dense.
                let mut reach = 1;
                while left.get(reach).is_some_and(|extent| extent.first_group <= group) {
                    reach *= 2;
                }
                let before = reach / 2;
                let left = &left[before.min(left.len())..reach.min(left.len())];
                from += before + left.partition_point(|e| e.first_group + e.groups as u64 <= group);
                self.extents.get(from).filter(|e| e.first_group <= group)
            })
            .collect();
        let frames = found.iter().flatten().filter_map(|extent| match &extent.source {
            Source::Disk { frame, .. } => Some(&**frame),
            Source::Memory(_) => None,
        });
        frames.clone().for_each(prefetch);
        frames.for_each(|frame| frame.body.peek(|body| prefetch(&**body)));
        found
    }

    /// Replaces the groups that `extent` covers, and extends the table if it ends after the last group.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: the extent would leave a gap after the last group.
    pub(crate) fn lay(&mut self, extent: Extent) -> Result<()> {
        if extent.first_group > self.groups() {
            let text = format!("sequence: groups {} to {} are in no frame", self.groups(), extent.first_group - 1);
            return Err(Error::new(ErrorKind::Corruption, text));
        }
        let end = extent.first_group + extent.groups as u64;
        let from = self.extents.partition_point(|e| e.first_group + (e.groups as u64) <= extent.first_group);
        let to = self.extents.partition_point(|e| e.first_group < end);
        let mut pieces = Vec::with_capacity(3);
        if let Some(first) = self.extents.get(from..to).and_then(|covered| covered.first())
            && first.first_group < extent.first_group
        {
            let kept = (extent.first_group - first.first_group) as usize;
            pieces.push(Extent { groups: kept, ..first.clone() });
        }
        let behind = self.extents.get(from..to).and_then(|covered| covered.last()).and_then(|last| {
            let last_end = last.first_group + last.groups as u64;
            (last_end > end).then(|| {
                let cut = (end - last.first_group) as usize;
                Extent { first_group: end, groups: last.groups - cut, skip: last.skip + cut, ..last.clone() }
            })
        });
        pieces.push(extent);
        pieces.extend(behind);
        Arc::make_mut(&mut self.extents).splice(from..to, pieces);
        Ok(())
    }

    /// Keeps the first `groups`.
    pub(crate) fn truncate(&mut self, groups: u64) {
        if groups >= self.groups() {
            return;
        }
        let extents = Arc::make_mut(&mut self.extents);
        extents.truncate(extents.partition_point(|e| e.first_group < groups));
        if let Some(last) = extents.last_mut() {
            last.groups = last.groups.min((groups - last.first_group) as usize);
        }
    }

    /// Returns how many groups this table takes from `run`. Later groups may have been truncated or replaced.
    pub(crate) fn groups_of(&self, run: &Arc<GroupBuffer>) -> usize {
        let backed = |e: &Extent| matches!(&e.source, Source::Memory(r) if Arc::ptr_eq(r, run)).then_some(e.groups);
        self.extents.iter().filter_map(backed).sum()
    }

    /// Replaces the buffer `old` by `new`, which starts with the same groups.
    pub(crate) fn replace(&mut self, old: &Arc<GroupBuffer>, new: &Arc<GroupBuffer>) {
        for extent in Arc::make_mut(&mut self.extents) {
            if matches!(&extent.source, Source::Memory(r) if Arc::ptr_eq(r, old)) {
                extent.source = Source::Memory(Arc::clone(new));
            }
        }
    }

    /// Switches the extents of `run` from memory to their place on disk, and merges them with the extents they
    /// continue.
    pub(crate) fn landed(
        &mut self,
        run: &Arc<GroupBuffer>,
        frame: &Arc<FrameSlot>,
        page: u32,
        checksum: usize,
        planes: usize,
    ) {
        let end = run.first_group + run.groups as u64;
        let mut at = self.extents.partition_point(|e| e.first_group + (e.groups as u64) <= run.first_group);
        let extents = Arc::make_mut(&mut self.extents);
        while let Some(extent) = extents.get_mut(at).filter(|extent| extent.first_group < end) {
            if matches!(&extent.source, Source::Memory(r) if Arc::ptr_eq(r, run)) {
                extent.source = Source::Disk { frame: Arc::clone(frame), page, checksum };
            }
            let (front, behind) = extents.split_at_mut(at);
            match (front.last_mut(), behind.first()) {
                (Some(before), Some(this)) if before.continues_in(this, &run.geometry, planes) => {
                    before.groups += this.groups;
                    extents.remove(at);
                }
                _ => at += 1,
            }
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.extents.capacity() * size_of::<Extent>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stratakv_format::DeviceIndex;
    use stratakv_format::SegmentId;

    fn body(id: u64, file: &Arc<CachedFile>) -> Arc<FrameSlot> {
        let segment = SegmentHandle {
            key: (DeviceIndex(0), SegmentId(0)),
            generation: 1,
            nonce: 0,
            pages: 8,
            lazy: Arc::clone(file),
            read_unit: PAGE_BYTES as u64,
            in_flight: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            synced: AtomicBool::new(false),
            pin: Pin::new(),
        };
        let (origin, segment) = (SequenceId(id), Arc::new(segment));
        let (other_copies, checksums, summaries) = (Box::default(), Arc::default(), Arc::default());
        let (id, page, header_crc) = (FrameId(id), 1, 0);
        Arc::new(FrameSlot::new(FrameBody {
            id,
            origin,
            nonce: 0,
            segment,
            page,
            header_crc,
            other_copies,
            checksums,
            summaries,
        }))
    }

    fn any_file() -> Arc<CachedFile> {
        use crate::io::file::directory::Access;
        use crate::io::file::os_directory::{OsDirectory, OsDirectoryOptions};
        let dir = tempfile::tempdir().unwrap();
        let options =
            OsDirectoryOptions { access: Access::ReadWrite, create: false, lock_wait: std::time::Duration::ZERO };
        let directory: Arc<dyn crate::io::file::directory::Directory> = OsDirectory::open(dir.path(), options).unwrap();
        CachedFile::new(&directory, "x".into(), &crate::io::file::cached_file::FdCache::new(None))
    }

    proptest! {
        #[test]
        fn a_group_is_found_in_the_last_extent_that_covered_it(
            steps in prop::collection::vec((0_u64..40, 1_usize..12, any::<bool>()), 1..40),
        ) {
            let file = any_file();
            let mut table = ExtentTable::default();
            // The frame and the index in it, by group.
            let mut model: Vec<(u64, usize)> = Vec::new();
            for (id, (first, groups, cut)) in steps.into_iter().enumerate() {
                if cut {
                    table.truncate(first);
                    model.truncate(first as usize);
                    continue;
                }
                let source = Source::Disk { frame: body(id as u64, &file), page: 0, checksum: 0 };
                let outcome = table.lay(Extent { first_group: first, groups, skip: 0, source });
                prop_assert_eq!(outcome.is_ok(), first as usize <= model.len());
                if outcome.is_ok() {
                    model.resize(model.len().max(first as usize + groups), (0, 0));
                    for index in 0..groups {
                        model[first as usize + index] = (id as u64, index);
                    }
                }
            }
            prop_assert_eq!(table.groups(), model.len() as u64);
            prop_assert!(table.find(model.len() as u64).is_none());
            for (group, (id, index)) in model.iter().enumerate() {
                let extent = table.find(group as u64).unwrap();
                let Source::Disk { frame, .. } = &extent.source else { panic!("memory") };
                prop_assert_eq!(frame.now().origin, SequenceId(*id));
                prop_assert_eq!((group as u64 - extent.first_group) as usize + extent.skip, *index);
            }
        }
    }
}
