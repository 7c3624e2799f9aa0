//! Reading stored clusters: the directories when their method is attached, and pages in selections.
//!
//! 1. [`Sequence::load_clusters`] reads the directories of a method. What does not verify is dropped and counted.
//! 2. [`Sequence::lay_pages`] gives a selection the pages of its chosen entries. Groups give the others.
//!
//! Invariants:
//! - A loaded set holds no segment, so it keeps no device and no space. A selection pins the frames that it reads.
//! - A loaded set covers tokens of this handle alone. A cut below its end drops it.

use super::handle::Sequence;
use super::loaded_clusters::LoadedClusters;
use crate::catalog::{DerivedRef, FrameBody, FrameMeta, SegmentHandle};
use crate::error::Result;
use crate::events::event;
use crate::io::coverage;
use crate::metrics::lock;
use crate::plan::{AttendedEntries, DeviceLoads, PlaneSet, SelectedPage, SelectionInner, entries_of_tokens};
use crate::pools::{
    Covered, DirectoryFront, FrontPieces, PageDevice, PageSources, StoredLayer, StoredSet, find_pieces,
};
use crate::read::{BlockReader, SegmentRange};
use crate::retrieval::SelectorId;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::FramePlace;
use stratakv_format::{FrameId, PAGE_BYTES};

/// A derived frame of the sequence that can be read: its record, the end of its tokens, and its segment.
pub(super) struct DerivedPlace {
    pub(super) frame: FrameId,
    pub(super) meta: FrameMeta,
    pub(super) token_end: u64,
    pub(super) segment: Arc<SegmentHandle>,
}

impl Sequence {
    /// Reads the stored clusters of the methods of a selector, except those of `searched` kinds. Without memory for
    /// them, and without any, selections read groups.
    pub(super) fn load_clusters(&mut self, selector: SelectorId, searched: &[String]) {
        let methods = self.selectors.clustered_kinds(selector, &self.layers).unwrap_or_default();
        for method in methods.into_iter().filter(|method| !searched.contains(method)) {
            if !self.selectors.has_loaded(&method) {
                let loaded = self.stored_kind(&method).loaded;
                loaded.into_iter().for_each(|loaded| self.selectors.load(loaded));
            }
        }
    }

    /// Reads the directories of a method. What fails counts as missing.
    pub(super) fn read_clusters_or_none(
        &self,
        method: &str,
        fronts: &[(DerivedPlace, FrontPieces)],
    ) -> Option<LoadedClusters> {
        let derived: Vec<&DerivedPlace> =
            fronts.iter().filter(|(_, own)| matches!(own, FrontPieces::Directories)).map(|(place, _)| place).collect();
        self.read_clusters(method, &derived).unwrap_or_else(|e| {
            self.store.activity.counters.dropped_clusters.add(1);
            event!(warn, cause = e, "stored clusters cannot be read");
            None
        })
    }

    /// Returns the derived frames of the sequence without a pool, and what each holds.
    ///
    /// # Errors
    /// [`MemoryLimit`](crate::ErrorKind::MemoryLimit), [`Busy`](crate::ErrorKind::Busy): no buffers.
    pub(super) fn derived_fronts(&self) -> Result<Vec<(DerivedPlace, FrontPieces)>> {
        // Only a frame with directories or states has more in its front than its header.
        let mut derived = self.derived_places();
        derived.retain(|own| own.meta.front_pages > own.meta.header_pages);
        let bytes = |own: &DerivedPlace| (own.meta.header_pages as usize + 1) * PAGE_BYTES;
        let _memory = self.reserve_scratch(derived.iter().map(bytes).sum())?;
        let ranges: Vec<SegmentRange<'_>> = derived
            .iter()
            .map(|own| SegmentRange { segment: &own.segment, offset: own.meta.location.offset(), bytes: bytes(own) })
            .collect();
        let read = BlockReader::demand(&self.store.devices).read_each(&ranges)?;
        let read: Vec<Vec<u8>> = read.into_iter().map(Result::unwrap_or_default).collect();
        let held = |(own, bytes): (DerivedPlace, Vec<u8>)| {
            let pieces = FrontPieces::of((own.frame, &own.meta), &bytes, &self.frame_place(&own));
            (own, pieces)
        };
        Ok(derived.into_iter().zip(read).map(held).collect())
    }

    /// Returns where a derived frame is stored, as its header has to say.
    fn frame_place(&self, own: &DerivedPlace) -> FramePlace {
        FramePlace {
            store_id: self.store.devices.identity.store_id,
            location: own.meta.location,
            segment_generation: own.segment.generation,
            segment_nonce: own.segment.nonce,
        }
    }

    /// Reads the directories of a method from these frames.
    fn read_clusters(&self, method: &str, derived: &[&DerivedPlace]) -> Result<Option<LoadedClusters>> {
        if derived.is_empty() {
            return Ok(None);
        }
        let bytes = |own: &DerivedPlace| own.meta.front_pages as usize * PAGE_BYTES;
        let mut memory = self.reserve_scratch(derived.iter().map(|own| bytes(own)).sum())?;
        let ranges: Vec<SegmentRange<'_>> = derived
            .iter()
            .map(|own| SegmentRange { segment: &own.segment, offset: own.meta.location.offset(), bytes: bytes(own) })
            .collect();
        let read = BlockReader::demand(&self.store.devices).read_each(&ranges)?;
        let mut fronts = Vec::with_capacity(derived.len());
        let mut dropped = 0;
        for (own, bytes) in derived.iter().zip(read) {
            let (frame, meta, token_end) = (own.frame, own.meta.clone(), own.token_end);
            let bytes = bytes.unwrap_or_default();
            let mut front = DirectoryFront { frame, meta, token_end, bytes, pieces: Vec::new() };
            let place = self.frame_place(own);
            dropped += usize::from(!find_pieces(&mut front, &place, self.store.devices.identity.checksum));
            fronts.push(front);
        }
        let more = StoredSet::bytes_for(&fronts, &self.identity.layout);
        let tables = self.reserve_scratch(usize::try_from(more).unwrap_or(usize::MAX))?;
        let end = self.len() / self.identity.layout.group_tokens() as u64 * self.identity.layout.group_tokens() as u64;
        let all = self.derived_places();
        let known: HashMap<FrameId, (u32, u64)> =
            all.iter().map(|own| (own.frame, (own.meta.location.pages, own.token_end))).collect();
        let known = |frame| known.get(&frame).copied();
        let set = StoredSet::read(&fronts, method, (&self.identity.layout, end), &known);
        dropped += set.dropped;
        if dropped > 0 {
            self.store.activity.counters.dropped_clusters.add(dropped as u64);
            coverage!(ClustersDropped);
            event!(warn, directories = dropped, "stored clusters do not verify and are not used");
        }
        drop((fronts, tables));
        self.store.devices.resize(&mut memory, set.bytes());
        Ok((!set.is_empty()).then(|| LoadedClusters {
            method: method.to_owned(),
            set,
            state: None,
            state_tried: 0,
            _memory: memory,
        }))
    }

    /// Returns the derived frames of the sequence whose device is present.
    fn derived_places(&self) -> Vec<DerivedPlace> {
        let catalog = lock(&self.store.catalog);
        let mut space = lock(&self.store.space);
        let own = self.frames.share_derived(&catalog, self.identity.sequence, &self.commits);
        let place = |DerivedRef { frame, end: token_end, .. }: DerivedRef| {
            let meta = catalog.frames.get(&frame)?.clone();
            let key = (meta.location.device, meta.location.segment);
            let is_there = self.store.devices.get(key.0).is_ok_and(|device| !device.is_lost());
            let segment =
                space.handle(&self.store.devices, key, catalog.segments.get(&key)?).ok().filter(|_| is_there)?;
            Some(DerivedPlace { frame, meta, token_end, segment })
        };
        own.into_iter().filter_map(place).collect()
    }

    /// Gives a selection the pages of its chosen entries, if the clusters of its method are stored. `chosen` has the
    /// tokens of each head, or one list for all heads, in `groups`.
    pub(super) fn lay_pages(
        &self,
        selector: SelectorId,
        inner: &mut SelectionInner,
        chosen: &[Vec<u32>],
        groups: Range<u64>,
    ) {
        let Some(loaded) = self.selectors.loaded(selector) else { return };
        let Some(layer) = loaded.set.layer(inner.layer).filter(|_| inner.planes == PlaneSet::KeysAndValues) else {
            return;
        };
        let Ok(geometry) = inner.layout.kv_layer(inner.layer) else { return };
        let bodies = self.page_frames(layer);
        let sources = self.page_sources(&bodies);
        let Covered { pages, left } = layer.cover(chosen, usize::from(geometry.kv_heads), sources);
        if pages.is_empty() {
            return;
        }
        let selected = pages.into_iter().filter_map(|chosen| {
            let frame = Arc::clone(bodies.get(chosen.page.frame as usize)?.as_ref()?);
            Some(SelectedPage { frame, chosen })
        });
        inner.pages = selected.collect();
        let mut left = entries_of_tokens(&left, groups.clone(), inner.layout.group_tokens()).into_iter().peekable();
        for own in inner.groups.iter_mut().filter(|own| groups.contains(&own.index)) {
            let entries = left.next_if(|(group, _)| *group == own.index).map(|(_, entries)| entries);
            own.beside_pages = Some(entries.unwrap_or_else(|| AttendedEntries::PerHead(Box::default())));
        }
    }

    /// Returns the devices of a layer's pages with their speeds.
    fn page_sources(&self, bodies: &[Option<Arc<FrameBody>>]) -> PageSources {
        let loads = DeviceLoads::of(&self.store.devices);
        let device = |body: &Arc<FrameBody>| usize::from(body.segment.key.0.0);
        let frames = bodies.iter().map(|body| body.as_ref().map(device)).collect();
        let speeds = loads.by_device.iter().map(|own| PageDevice::new(own.request_s, own.byte_s, own.avoided));
        PageSources::new(frames, speeds.collect(), loads.policy)
    }

    /// Returns the frames of a layer's pages, as far as they exist on a device that is present. Each holds its segment.
    fn page_frames(&self, layer: &StoredLayer) -> Vec<Option<Arc<FrameBody>>> {
        let catalog = lock(&self.store.catalog);
        let mut space = lock(&self.store.space);
        let body = |id: &FrameId| {
            let frame = catalog.frames.get(id).filter(|frame| frame.derived)?;
            let key = (frame.location.device, frame.location.segment);
            self.store.devices.get(key.0).ok().filter(|device| !device.is_lost())?;
            let segment = space.handle(&self.store.devices, key, catalog.segments.get(&key)?).ok()?;
            Some(Arc::new(FrameBody {
                id: *id,
                origin: frame.origin,
                nonce: frame.nonce,
                segment,
                page: frame.location.page,
                header_crc: frame.header_crc,
                other_copies: Box::default(),
                checksums: Arc::default(),
                summaries: Arc::default(),
            }))
        };
        layer.frames.iter().map(body).collect()
    }
}
