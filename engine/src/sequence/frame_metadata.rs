//! The fronts of frames, which opening a sequence reads: where their copies are, and which of them is what was written.

use super::Sequence;
use super::blocks::{read, read_each};
use super::open::corrupt;
use crate::catalog::{Catalog, FrameMeta, SegmentHandle, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted;
use crate::log::{CopyAt, StoreInner, copies_of};
use crate::metrics::lock;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::{
    Descriptor, FramePlace, FrameView, KIND_ADAPTER, KIND_CALLER_STATE, KIND_GROUPS, KIND_SUMMARY, KIND_TAIL,
    KIND_TOKEN_IDS, SUMMARY_MIN_MAX, tail_plane_bytes,
};
use stratakv_format::{FrameId, PAGE_BYTES};

/// A frame of a sequence that is being opened.
pub(super) struct FrameReference {
    pub(super) id: FrameId,
    pub(super) meta: FrameMeta,
    /// Committed tokens below this belong to the sequence.
    pub(super) clip: u64,
    /// The same of tokens by themselves.
    pub(super) tail_clip: u64,
    /// Where the sequence was cut after the frame was written. Token ids may go on behind the committed tokens.
    pub(super) token_end: u64,
    /// Token ids below this belong to it.
    pub(super) ids_clip: usize,
    /// Its copies on devices that are there; what is read comes from the first, as `meta.location` says.
    pub(super) copies: Vec<CopyAt>,
}

impl FrameReference {
    pub(super) fn segment(&self) -> &Arc<SegmentHandle> {
        &self.copies[0].at.segment
    }

    /// Prefers the copies behind the first.
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

pub(super) fn front_bytes(reference: &FrameReference) -> usize {
    reference.meta.front_pages as usize * PAGE_BYTES
}

pub(super) fn references(store: &StoreInner, meta: &SequenceMeta) -> Result<Vec<FrameReference>> {
    let catalog: &Catalog = &lock(&store.catalog);
    let mut space = lock(&store.space);
    let mut references = Vec::with_capacity(meta.refs.len());
    for &(id, token_end) in &meta.refs {
        let lost = || Error::new(ErrorKind::Corruption, format!("frame {id} is not in the manifest"));
        let frame = catalog.frames.get(&id).ok_or_else(lost)?.clone();
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
    /// The fronts of frames in one batch, without the min/max records where those are streamed: zeros stand there, or nothing where
    /// nothing is behind them.
    pub(super) fn read_fronts(&self, references: &[FrameReference]) -> Result<Vec<Result<Vec<u8>>>> {
        let devices = &self.store.devices;
        let place = |reference: &FrameReference, range: Range<usize>| {
            (Arc::clone(reference.segment()), reference.meta.location.offset() + range.start as u64, range.len())
        };
        let read = |places: &[(Arc<SegmentHandle>, u64, usize)]| {
            let places: Vec<_> =
                places.iter().map(|(segment, first, bytes)| (segment.as_ref(), *first, *bytes)).collect();
            read_each(devices, &places)
        };
        let first = |reference: &FrameReference| match self.streams.is_some() {
            true => 0..(reference.meta.header_pages as usize * PAGE_BYTES).min(front_bytes(reference)),
            false => 0..front_bytes(reference),
        };
        let mut fronts = read(&references.iter().map(|r| place(r, first(r))).collect::<Vec<_>>())?;
        if self.streams.is_none() {
            return Ok(fronts);
        }
        let rests: Vec<(usize, Range<usize>)> = (references.iter().zip(&fronts).enumerate())
            .filter_map(|(at, (reference, head))| Some((at, self.behind_records(reference, head.as_ref().ok()?))))
            .filter(|(_, rest)| !rest.is_empty())
            .collect();
        let read = read(&rests.iter().map(|(at, rest)| place(&references[*at], rest.clone())).collect::<Vec<_>>())?;
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

    /// What of a front is to be read behind its header where min/max records are streamed: everything from the first piece on that is
    /// something else; everything where the header is none.
    fn behind_records(&self, reference: &FrameReference, head: &[u8]) -> Range<usize> {
        let end = front_bytes(reference);
        let place = self.place_of(reference);
        let Ok(view) = FrameView::verify(head, &place) else { return head.len()..end };
        let small = view.descriptors().iter().filter(|d| d.kind.get() != KIND_GROUPS);
        let other = small.filter(|d| d.kind.get() != KIND_SUMMARY || d.summary.get() != SUMMARY_MIN_MAX);
        let first = other.map(|d| d.offset.get() as usize).min().unwrap_or(end);
        (first / PAGE_BYTES * PAGE_BYTES).clamp(head.len(), end.max(head.len()))..end
    }

    /// Where a frame says that it stands.
    pub(super) fn place_of(&self, reference: &FrameReference) -> FramePlace {
        FramePlace {
            store_id: self.store.devices.identity.store_id,
            location: reference.meta.location,
            segment_generation: reference.segment().generation,
            segment_nonce: reference.segment().nonce,
        }
    }

    /// The front of a frame as it was read, or, when that is not what was written, from another copy, which then comes first. Where
    /// none is whole, one will do in which nothing but the summaries of selectors is damaged: they are computed from the keys.
    pub(super) fn good_front(&self, reference: &mut FrameReference, front: Result<Vec<u8>>) -> Result<Vec<u8>> {
        let devices = &self.store.devices;
        if reference.copies.len() < 2 {
            return front.inspect_err(|e| devices.count_damage(reference.meta.location.device, e));
        }
        let mut front = front;
        let mut second_best = None;
        for turn in 0..reference.copies.len() {
            if turn > 0 {
                reference.turn();
                let place = (reference.segment().as_ref(), reference.meta.location.offset(), front_bytes(reference));
                let again = read(devices, &[place]).map(|mut fronts| fronts.pop().unwrap_or_default());
                // The first error is the one to tell.
                front = match (front, again) {
                    (Err(first), Err(_)) => Err(first),
                    (_, again) => again,
                };
            }
            let good = match &front {
                Ok(bytes) => self.check_front(reference, bytes).and_then(|caches| {
                    if let Err(e) = caches {
                        second_best.get_or_insert_with(|| (reference.meta.location, bytes.clone()));
                        return Err(e);
                    }
                    Ok(())
                }),
                Err(e) => Err(e.duplicate()),
            };
            match good {
                Ok(()) => return front,
                Err(e) => {
                    let device = reference.meta.location.device;
                    devices.count_damage(device, &e);
                    devices.suspects.add_at(reference.id, device);
                    if let Ok(device) = devices.get(device) {
                        device.counters.other_copies.add(1);
                    }
                    front = Err(e);
                }
            }
        }
        let Some((place, bytes)) = second_best else { return front };
        for _ in 0..reference.copies.len() {
            if reference.meta.location != place {
                reference.turn();
            }
        }
        Ok(bytes)
    }

    /// Whether the front of a frame is what was written: header and small pieces. What is wrong with summaries of selectors alone,
    /// which the sequence can do without, is told apart.
    fn check_front(&self, reference: &FrameReference, front: &[u8]) -> Result<Result<()>> {
        let place = self.place_of(reference);
        let damaged = |found| corrupt(reference, "frame-header", 0, front.len(), found);
        let view = FrameView::verify(front, &place).map_err(|e| damaged(e.to_string()))?;
        if view.header().crc.get() != reference.meta.header_crc {
            return Err(damaged("the header of another frame".into()));
        }
        // Records that are streamed are checked when they are.
        let streamed = |d: &Descriptor| {
            self.streams.is_some() && d.kind.get() == KIND_SUMMARY && d.summary.get() == SUMMARY_MIN_MAX
        };
        let small = view.descriptors().iter().filter(|d| d.kind.get() != KIND_GROUPS && !streamed(d));
        let mut caches = Ok(());
        for descriptor in small {
            let planes = match descriptor.kind.get() {
                KIND_TAIL => {
                    let layer = self.layer(usize::from(descriptor.layer.get()))?;
                    let tokens = descriptor.tokens.get() as usize;
                    let (key, value) = tail_plane_bytes(&layer.geometry, self.who.layout.dtype(), tokens);
                    Some([key, value])
                }
                KIND_SUMMARY | KIND_TOKEN_IDS | KIND_CALLER_STATE | KIND_ADAPTER => None,
                _ => continue,
            };
            let count = planes.map_or(1, |[_, value]| if value == 0 { 1 } else { 2 });
            let is_cache = descriptor.kind.get() == KIND_SUMMARY && descriptor.summary.get() != SUMMARY_MIN_MAX;
            for plane in 0..count {
                match self.piece(reference, &view, descriptor, front, plane, planes) {
                    Err(e) if is_cache => caches = caches.and(Err(e)),
                    other => drop(other?),
                }
            }
        }
        Ok(caches)
    }
}
