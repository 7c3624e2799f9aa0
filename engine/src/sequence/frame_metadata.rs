//! The fronts of frames that an open reads: where their copies are stored, and which copy is undamaged.
//!
//! The front of a frame is its header, summary records and small pieces, in front of the groups.
//!
//! 1. [`references`] takes the frames from the manifest, each with its copies on devices that are present.
//! 2. [`Sequence::read_fronts`] reads the first copy of each front. Streamed min/max records are left out.
//! 3. [`Sequence::good_front`] checks a front that has other copies, and reads those if it is damaged.
//!
//! Invariants:
//! - `meta.location` of a reference always names its first copy.
//! - A damaged copy is counted on its device and listed for repair.
//! - Every small piece is checked before it is used ([`Sequence::piece`]), also if the frame has one copy.

use super::handle::Sequence;
use crate::catalog::{Catalog, FrameMeta, SegmentHandle, SequenceMeta};
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::planted;
use crate::io::planted::covered;
use crate::log::{CopyAt, StoreInner, copies_of};
use crate::metrics::lock;
use crate::read::{BlockReader, CopyFault, SegmentRange, first_good};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::{
    Descriptor, FramePlace, FrameView, KIND_ADAPTER, KIND_CALLER_STATE, KIND_CLUSTER_DELTA, KIND_GROUPS, KIND_SUMMARY,
    KIND_TAIL, KIND_TOKEN_IDS, SUMMARY_MIN_MAX, tail_plane_bytes,
};
use stratakv_format::{FrameId, PAGE_BYTES, PlaneIdentity, segment};

/// A frame of a sequence that is being opened.
pub(super) struct FrameReference {
    pub(super) id: FrameId,
    pub(super) meta: FrameMeta,
    /// The sequence has the tokens below this: committed, and not cut off.
    pub(super) clip: u64,
    /// The sequence has the tail tokens of the frame below this.
    pub(super) tail_clip: u64,
    /// The sequence was cut to this token after the frame was written. It may have token ids past its committed tokens.
    pub(super) token_end: u64,
    /// The sequence has the token ids below this.
    pub(super) ids_clip: usize,
    /// The copies on devices that are present. Reads use the first, which `meta.location` names.
    pub(super) copies: Vec<CopyAt>,
}

impl FrameReference {
    pub(super) fn segment(&self) -> &Arc<SegmentHandle> {
        &self.copies[0].at.segment
    }

    /// Returns a range of the first copy.
    fn range(&self, range: Range<usize>) -> SegmentRange<'_> {
        let offset = self.meta.location.offset() + range.start as u64;
        SegmentRange { segment: self.segment(), offset, bytes: range.len() }
    }

    /// Moves the first copy to the end.
    fn turn(&mut self) {
        self.copies.rotate_left(1);
        self.name_first();
    }

    fn name_first(&mut self) {
        if let Some(first) = self.copies.first() {
            (self.meta.location, self.meta.header_crc) = (first.location, first.at.header_crc);
        }
    }
}

/// A verified front of a frame, and the reference to it.
pub(super) struct OpenedFrame<'f> {
    pub(super) reference: &'f FrameReference,
    pub(super) view: &'f FrameView<'f>,
    pub(super) front: &'f [u8],
}

impl OpenedFrame<'_> {
    /// Returns whether the frame holds no groups.
    pub(super) fn is_small(&self) -> bool {
        !self.view.descriptors().iter().any(|d| d.kind.get() == KIND_GROUPS)
    }
}

/// Returns the bytes of a frame's front: header, summaries and small pieces.
pub(super) fn front_bytes(reference: &FrameReference) -> usize {
    reference.meta.front_pages as usize * PAGE_BYTES
}

/// Returns the frames of a sequence that hold tokens, in the order in which they were written. Derived frames are left
/// out.
///
/// # Errors
/// [`ErrorKind::Corruption`]: the manifest lacks a frame, or no device with a copy is present.
pub(super) fn references(store: &StoreInner, meta: &SequenceMeta) -> Result<Vec<FrameReference>> {
    let catalog: &Catalog = &lock(&store.catalog);
    let mut space = lock(&store.space);
    let mut references = Vec::with_capacity(meta.refs.len());
    for &(id, token_end) in &meta.refs {
        let lost = || Error::new(ErrorKind::Corruption, format!("open: frame {id} is not in the manifest"));
        let frame = catalog.frames.get(&id).ok_or_else(lost)?;
        if frame.derived && !planted!(DerivedFrameCounted) {
            continue;
        }
        let frame = frame.clone();
        let copies =
            copies_of(&store.devices, catalog, &mut space, &frame).map_err(|e| e.during(format!("frame {id}")))?;
        let clip = token_end.min(meta.tokens);
        let tail_clip = if planted!(StaleTail) { meta.tokens } else { clip };
        let ids_clip = usize::try_from(token_end.min(meta.token_ids)).unwrap_or(usize::MAX);
        let mut reference = FrameReference { id, meta: frame, clip, tail_clip, token_end, ids_clip, copies };
        reference.name_first();
        references.push(reference);
    }
    Ok(references)
}

impl Sequence {
    /// Reads the fronts of frames in one batch. Min/max records that are streamed are not read: their place is zero, or
    /// cut off if nothing follows them.
    ///
    /// # Errors
    /// As [`BlockReader::read_each`].
    pub(super) fn read_fronts(&self, references: &[FrameReference]) -> Result<Vec<Result<Vec<u8>>>> {
        let reader = BlockReader::demand(&self.store.devices);
        let first = |reference: &FrameReference| match self.streams.is_some() {
            true => 0..(reference.meta.header_pages as usize * PAGE_BYTES).min(front_bytes(reference)),
            false => 0..front_bytes(reference),
        };
        let mut fronts = reader.read_each(&references.iter().map(|r| r.range(first(r))).collect::<Vec<_>>())?;
        if self.streams.is_none() {
            return Ok(fronts);
        }
        let rests: Vec<(usize, Range<usize>)> = (references.iter().zip(&fronts).enumerate())
            .filter_map(|(at, (reference, head))| Some((at, self.behind_records(reference, head.as_ref().ok()?))))
            .filter(|(_, rest)| !rest.is_empty())
            .collect();
        let ranges: Vec<_> = rests.iter().map(|(at, rest)| references[*at].range(rest.clone())).collect();
        let read = reader.read_each(&ranges)?;
        for ((at, range), rest) in rests.into_iter().zip(read) {
            match (&mut fronts[at], rest) {
                (Ok(front), Ok(rest)) => {
                    front.resize(range.start, 0);
                    front.extend_from_slice(&rest);
                }
                (front, rest) => *front = rest,
            }
        }
        Ok(fronts)
    }

    /// Returns the part of a front that is read after its header if min/max records are streamed: all from the first
    /// other piece on. That is everything if the header is damaged.
    fn behind_records(&self, reference: &FrameReference, head: &[u8]) -> Range<usize> {
        let end = front_bytes(reference);
        let place = self.place_of(reference);
        let Ok(view) = FrameView::verify(head, &place) else { return head.len()..end };
        let small = view.descriptors().iter().filter(|d| d.kind.get() != KIND_GROUPS);
        let other = small.filter(|d| d.kind.get() != KIND_SUMMARY || d.summary.get() != SUMMARY_MIN_MAX);
        let first = other.map(|d| d.offset.get() as usize).min().unwrap_or(end);
        (first / PAGE_BYTES * PAGE_BYTES).clamp(head.len(), end.max(head.len()))..end
    }

    /// Returns the place that the header of a frame must name.
    pub(super) fn place_of(&self, reference: &FrameReference) -> FramePlace {
        FramePlace {
            store_id: self.store.devices.identity.store_id,
            location: reference.meta.location,
            segment_generation: reference.segment().generation,
            segment_nonce: reference.segment().nonce,
        }
    }

    /// Returns the front of a frame. If the one that was read is damaged, it reads the other copies, and the one that
    /// is used becomes the first. If every copy is damaged, a copy with damage only in the summaries of selectors will
    /// do, because those can be computed from the keys.
    ///
    /// # Errors
    /// The first error, if no copy will do.
    pub(super) fn good_front(&self, reference: &mut FrameReference, front: Result<Vec<u8>>) -> Result<Vec<u8>> {
        let devices = &self.store.devices;
        if reference.copies.len() < 2 {
            return front.inspect_err(|e| devices.count_damage(reference.meta.location.device, e));
        }
        let mut first_read = Some(front);
        let (mut second_best, mut failed) = (None, Vec::new());
        let good = first_good(0, 1..reference.copies.len(), |_, _| {
            let front = match first_read.take() {
                Some(front) => front,
                None => {
                    reference.turn();
                    let front = BlockReader::demand(devices).read_all(&[reference.range(0..front_bytes(reference))]);
                    front.map(|mut fronts| fronts.pop().unwrap_or_default())
                }
            };
            let good = front.and_then(|bytes| match self.check_front(reference, &bytes)? {
                Ok(()) => Ok(bytes),
                Err(e) => {
                    second_best.get_or_insert((reference.meta.location, bytes));
                    Err(e)
                }
            });
            good.map_err(|e| {
                let device = reference.meta.location.device;
                match CopyFault::counted(devices, device, e) {
                    CopyFault::Reread(e) | CopyFault::Next(e) => {
                        devices.suspects.add_at(reference.id, device);
                        failed.push(device);
                        CopyFault::Next(e)
                    }
                    stop => stop,
                }
            })
        });
        let e = match good {
            Err(e) => e,
            Ok(front) => {
                failed.into_iter().for_each(|device| devices.count_other_copy(device));
                return Ok(front);
            }
        };
        let Some((place, bytes)) = second_best else { return Err(e) };
        for _ in 0..reference.copies.len() {
            if reference.meta.location != place {
                reference.turn();
            }
        }
        Ok(bytes)
    }

    /// Checks the header and the small pieces of a front. The inner error is damage in the summaries of selectors
    /// alone, which the sequence can do without.
    fn check_front(&self, reference: &FrameReference, front: &[u8]) -> Result<Result<()>> {
        let place = self.place_of(reference);
        let damaged = |found| corrupt(reference, "frame-header", 0, front.len(), found);
        let view = FrameView::verify(front, &place).map_err(|e| damaged(e.to_string()))?;
        if view.header().crc.get() != reference.meta.header_crc {
            return Err(damaged("the header of another frame".into()));
        }
        // Streamed records are checked when a selection reads them.
        let streamed = |d: &Descriptor| {
            self.streams.is_some() && d.kind.get() == KIND_SUMMARY && d.summary.get() == SUMMARY_MIN_MAX
        };
        let small = view.descriptors().iter().filter(|d| d.kind.get() != KIND_GROUPS && !streamed(d));
        let frame = OpenedFrame { reference, view: &view, front };
        let mut caches = Ok(());
        for descriptor in small {
            let planes = match descriptor.kind.get() {
                KIND_TAIL => {
                    let layer = self.layer(usize::from(descriptor.layer.get()))?;
                    let tokens = descriptor.tokens.get() as usize;
                    let (key, value) = tail_plane_bytes(layer.geometry(), self.identity.layout.dtype(), tokens);
                    Some([key, value])
                }
                KIND_SUMMARY | KIND_TOKEN_IDS | KIND_CALLER_STATE | KIND_ADAPTER | KIND_CLUSTER_DELTA => None,
                _ => continue,
            };
            let count = planes.map_or(1, |[_, value]| if value == 0 { 1 } else { 2 });
            let is_cache = match descriptor.kind.get() {
                KIND_SUMMARY => descriptor.summary.get() != SUMMARY_MIN_MAX,
                kind => kind == KIND_CLUSTER_DELTA,
            };
            for plane in 0..count {
                match self.piece(&frame, descriptor, plane, planes) {
                    Err(e) if is_cache => caches = caches.and(Err(e)),
                    other => drop(other?),
                }
            }
        }
        Ok(caches)
    }

    /// Returns the bytes of one plane of a small piece, checked against its checksum. `planes` are the bytes of the K
    /// and V planes of a tail.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`].
    pub(super) fn piece<'f>(
        &self,
        frame: &OpenedFrame<'f>,
        descriptor: &Descriptor,
        plane: usize,
        planes: Option<[usize; 2]>,
    ) -> Result<&'f [u8]> {
        let start = descriptor.offset.get() as usize;
        let range = match planes {
            None => start..start + descriptor.bytes.get() as usize,
            Some([key, _]) if plane == 0 => start..start + key,
            Some([key, value]) => start + key..start + key + value,
        };
        let OpenedFrame { reference, view, front } = *frame;
        let (offset, len) = (range.start as u64, range.len());
        let damaged = |found| corrupt(reference, "payload-checksum", offset, len, found);
        // An empty piece may begin where a front ends whose last records are streamed, and those were not read.
        let bytes = if range.is_empty() { Some(&[][..]) } else { front.get(range) };
        let bytes = bytes.ok_or_else(|| damaged("a piece outside of the front of its frame".into()))?;
        let identity = PlaneIdentity::new(
            reference.meta.nonce,
            reference.meta.origin,
            descriptor.kind.get(),
            descriptor.layer.get(),
            descriptor.first_token.get(),
            descriptor.tokens.get(),
        )
        .with_plane(plane as u16);
        let computed = self.store.devices.identity.checksum.compute(&identity, covered(bytes));
        match view.checksums(descriptor).get(plane).map(|c| c.get()) {
            Some(stored) if stored == computed => Ok(bytes),
            stored => Err(damaged(format!("checksum {computed:#018x}, stored {:#018x}", stored.unwrap_or(0)))),
        }
    }
}

/// Returns the error for damage in a frame, `offset` bytes from its start.
pub(super) fn corrupt(reference: &FrameReference, code: &'static str, offset: u64, len: usize, found: String) -> Error {
    Error::corrupt(Corruption {
        code,
        device: reference.meta.location.device.0,
        file: segment::file_name(reference.meta.location.segment),
        offset: reference.meta.location.offset() + offset,
        len: len as u64,
        expected: format!("frame {} as it was written", reference.id),
        found,
    })
}
