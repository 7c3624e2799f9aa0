//! Writes the clusters of a sequence as derived frames.
//!
//! 1. [`PoolWriter::layer`] plans which pages of an earlier set stay, if there is one ([`growth_plan`]).
//! 2. It fills stretches of the other pages in memory and writes each as one frame with a pool
//!    per device.
//! 3. It encodes the directories of the layer, with both kinds of pages. Enough of them fill a frame.
//! 4. [`PoolWriter::commit`] syncs the segments of all frames, and names the frames in one commit. It releases the
//!    frames of the earlier set that no directory names any more.
//!
//! Invariants:
//! - Until the commit, no record names a frame. Frames of a writer that failed are dead pages.
//! - The commit names a directory only after its pages are synced.
//! - A full store gives up clusters of closed sequences, and never evicts a sequence for clusters.

use super::directory_pieces::{self, PagePlace};
use super::earlier::EarlierLayer;
use super::frame_write::write_once;
use super::growth_plan;
use super::layer_clusters::{HeadClusters, LayerClusters};
use super::page_plan::{PlannedPage, Stripes};
use super::page_rows::{self, ENTRY_BYTES, GroupPlanes};
use super::report::StoredClusters;
use super::state_pieces::WrittenStates;
use crate::catalog::ref_record;
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted::{covered, page_place};
use crate::io::{coverage, planted};
use crate::layout::PlacedBytes;
use crate::log::{
    CommitRequest, DerivedDraft, DerivedFrame, DerivedRelease, DirectoryBytes, SequenceIdentity, StoreInner,
    front_limit,
};
use crate::metrics::{Category, Reservation, lock};
use crate::options::{ClusterStripe, StoreClusterOptions};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use stratakv_format::frame::Descriptor;
use stratakv_format::manifest::{Frame, FrameRef, Kind};
use stratakv_format::pool::{DirectoryFields, METHOD_BYTES_MAX, REPRESENTATIVE_NONE};
use stratakv_format::{DeviceIndex, FrameId, PAGE_BYTES, PlaneIdentity};

/// The most bytes of a frame with directories, unless one directory is larger.
const DIRECTORY_FRAME_BYTES: usize = 4 << 20;
/// The most pieces of such a frame, so that its header stays small.
const DIRECTORY_FRAME_PIECES: usize = 1024;
/// How often space is freed for one frame, at most.
const ROOM_TRIES: usize = 4;
/// Pages in memory take at most this share of the memory limit.
const MEMORY_SHARE: usize = 4;
/// The approximate bytes of the records of a frame and of a reference to it.
const RECORD_BYTES: usize = size_of::<Frame>() + size_of::<FrameRef>() + 16;

/// The writer of the clusters of one sequence.
pub(crate) struct PoolWriter<'a> {
    store: &'a Arc<StoreInner>,
    identity: &'a SequenceIdentity,
    method: &'a str,
    /// The bytes of each layer on each device, so that frames spread.
    placed: PlacedBytes,
    options: StoreClusterOptions,
    stripes: Stripes,
    frames: Vec<DerivedFrame>,
    /// The most bytes of the pool or the directories of a frame.
    limit: usize,
    /// Pieces of directories that are in no frame yet.
    pieces: Vec<DirectoryBytes>,
    /// The number and the generation of the set, if pages of an earlier one may stay. Otherwise the set is new.
    follows: Option<(u64, u64)>,
    /// The frames of the earlier set that directories name.
    kept: BTreeSet<FrameId>,
    report: StoredClusters,
    started: Instant,
}

impl<'a> PoolWriter<'a> {
    /// Returns a writer for clusters of the first `tokens` tokens. `method` describes the method with its parameters.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the description is empty or too long. [`ErrorKind::Configuration`]: segments too
    /// small for the layout.
    pub(crate) fn new(
        store: &'a Arc<StoreInner>,
        identity: &'a SequenceIdentity,
        method: &'a str,
        (tokens, options): (u64, StoreClusterOptions),
    ) -> Result<Self> {
        if method.is_empty() || method.len() > METHOD_BYTES_MAX {
            let bytes = method.len();
            let text = format!("store clusters: the id of the summary has {bytes} bytes; 1 to {METHOD_BYTES_MAX} fit");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // The descriptor of a pool may need one more page of header.
        let limit = front_limit(&store.devices, identity)? / PAGE_BYTES * PAGE_BYTES - PAGE_BYTES;
        let first = lock(&store.space).next_frame();
        Ok(Self {
            store,
            identity,
            method,
            placed: PlacedBytes::new(identity.layout.layers(), store.devices.list.slots()),
            options,
            stripes: Stripes::new(options.stripe, first),
            frames: Vec::new(),
            limit,
            pieces: Vec::new(),
            follows: None,
            kept: BTreeSet::new(),
            report: StoredClusters { tokens, ..StoredClusters::default() },
            started: Instant::now(),
        })
    }

    /// Lets pages of an earlier set stay. `next` has the number and the generation of the set that follows it.
    pub(crate) fn growing(self, next: (u64, u64)) -> Self {
        Self { follows: Some(next), ..self }
    }

    /// Writes the pages of a layer, and keeps its directories for a frame. Pages of `earlier` may stay.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]; [`ErrorKind::MemoryLimit`]: not even one page fits. Errors of reads and writes.
    pub(crate) fn layer(
        &mut self,
        layer: usize,
        clusters: LayerClusters,
        earlier: Option<&EarlierLayer>,
        source: &dyn GroupPlanes,
    ) -> Result<()> {
        let Some(earlier) = earlier else {
            let mut clusters = clusters.packed();
            let places = self.pages(layer, &mut clusters, source)?;
            return self.directories(layer, &clusters, &places);
        };
        let mut plan = growth_plan::plan(&clusters, earlier, self.lanes().len());
        let mut fresh = clusters.replaced(plan.iter().map(|list| list.fresh.clone()));
        let written = self.pages(layer, &mut fresh, source)?;
        // The members are in the order of their pages now.
        plan.iter_mut().zip(fresh.lists).for_each(|(own, list)| own.fresh = list.clusters);
        let mut left = &written[..];
        let (mut lists, mut places) = (Vec::new(), Vec::new());
        for (list, own) in clusters.lists.iter().zip(&plan) {
            let (stored, kept) = growth_plan::joined(list.heads, own, clusters.tokens, &clusters.geometry);
            let (pages, rest) =
                left.split_at(own.fresh.iter().map(|m| m.len().div_ceil(clusters.geometry.entries)).sum());
            left = rest;
            self.kept.extend(kept.iter().map(|place| place.frame));
            self.report.kept_pages += kept.len() as u64;
            places.extend(kept.iter().chain(pages).copied());
            lists.push(stored);
        }
        self.directories(layer, &LayerClusters { lists, ..clusters }, &places)
    }

    /// Writes the pages of clusters. Returns their places. Rearranges the members of clusters in the order of pages.
    fn pages(
        &mut self,
        layer: usize,
        clusters: &mut LayerClusters,
        source: &dyn GroupPlanes,
    ) -> Result<Vec<PagePlace>> {
        let count = clusters.pages();
        let entry_bytes = clusters.entries() * size_of::<u32>() * 2;
        let page_tables = count * (2 * size_of::<PlannedPage>() + size_of::<usize>() + size_of::<PagePlace>());
        let _tables = self.reserve(entry_bytes + page_tables)?;
        let lanes = self.lanes();
        let pages = self.stripes.deal(clusters, lanes.len());
        let clusters = &*clusters;
        let (per_stretch, _memory) = self.stretch(clusters, count, lanes.len())?;
        let mut places = Vec::with_capacity(count);
        for stretch in pages.chunks(per_stretch) {
            self.write_stretch((layer, &lanes), clusters, stretch, source, &mut places)?;
        }
        self.report.page_bytes += (pages.len() * clusters.geometry.page_bytes) as u64;
        Ok(places)
    }

    /// Encodes the directories of a layer. `places` has the pages of all lists.
    fn directories(&mut self, layer: usize, clusters: &LayerClusters, places: &[PagePlace]) -> Result<()> {
        self.report.layers += 1;
        self.report.clusters += clusters.clusters() as u64;
        self.report.entries += clusters.entries() as u64;
        self.report.pages += places.len() as u64;
        let mut rest = places;
        for list in &clusters.lists {
            let own: usize =
                list.clusters.iter().map(|members| members.len().div_ceil(clusters.geometry.entries)).sum();
            let (own, others) = rest.split_at(own);
            rest = others;
            self.directory(layer, clusters, list, own)?;
        }
        Ok(())
    }

    /// Fills a stretch of pages in memory, writes the pages of each lane as a frame, and notes where each page is.
    fn write_stretch(
        &mut self,
        (layer, lanes): (usize, &[Option<DeviceIndex>]),
        clusters: &LayerClusters,
        stretch: &[PlannedPage],
        source: &dyn GroupPlanes,
        places: &mut Vec<PagePlace>,
    ) -> Result<()> {
        let mut order: Vec<usize> = (0..stretch.len()).collect();
        order.sort_by_key(|at| stretch[*at].lane);
        let by_lane: Vec<PlannedPage> = order.iter().map(|at| stretch[*at]).collect();
        let bytes = page_rows::fill(clusters, &by_lane, self.identity.layout.group_tokens(), source)?;
        let page_bytes = clusters.geometry.page_bytes;
        let mut left = &bytes[..];
        let mut written = Vec::with_capacity(stretch.len());
        for own in by_lane.chunk_by(|one, other| one.lane == other.lane) {
            for own in own.chunks((self.limit / page_bytes).max(1)) {
                let (bytes, rest) = left.split_at(own.len() * page_bytes);
                left = rest;
                let device = lanes.get(usize::from(own[0].lane)).copied().flatten();
                self.write_pool((layer, device), clusters, own, bytes, &mut written)?;
            }
        }
        let mut of_stretch: Vec<(usize, PagePlace)> = order.into_iter().zip(written).collect();
        of_stretch.sort_unstable_by_key(|(at, _)| *at);
        places.extend(of_stretch.into_iter().map(|(_, place)| place));
        Ok(())
    }

    /// Returns the devices that the pages of a layer are dealt to: those that take frames now. With one lane, each
    /// stretch goes to the device that has least.
    fn lanes(&self) -> Vec<Option<DeviceIndex>> {
        let list = &self.store.devices.list;
        let takes = |index: &usize| list.get(*index).is_some_and(|device| device.takes_frames());
        let lanes: Vec<_> = (0..list.slots()).filter(takes).map(|index| Some(DeviceIndex(index as u16))).collect();
        if lanes.len() < 2 || self.options.stripe == ClusterStripe::Stretch { vec![None] } else { lanes }
    }

    /// Returns how many pages are filled at once, with the memory for them: those of one frame per lane.
    fn stretch(&self, clusters: &LayerClusters, pages: usize, lanes: usize) -> Result<(usize, Reservation)> {
        let page = clusters.geometry.page_bytes;
        let with_entries = page + clusters.geometry.entries * ENTRY_BYTES;
        let share = self.store.devices.budget.usage().limit_bytes / MEMORY_SHARE;
        let mut count = (self.limit / page * lanes).min(share / with_entries).min(pages).max(1);
        if page > self.limit {
            let text = format!("store clusters: a page of {page} bytes does not fit in a segment; use larger segments");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        loop {
            match self.reserve(count * with_entries) {
                Ok(memory) => return Ok((count, memory)),
                Err(e) if count == 1 => return Err(e),
                Err(_) => count /= 2,
            }
        }
    }

    fn reserve(&self, bytes: usize) -> Result<Reservation> {
        self.store.devices.reserve(bytes, Category::Other).ok_or_else(|| {
            let text = format!("store clusters: {bytes} bytes do not fit into memory_limit; raise it");
            Error::new(ErrorKind::MemoryLimit, text)
        })
    }

    /// Writes pages as a frame, to a device if it has space, and notes where each page is.
    fn write_pool(
        &mut self,
        (layer, device): (usize, Option<DeviceIndex>),
        clusters: &LayerClusters,
        pages: &[PlannedPage],
        bytes: &[u8],
        places: &mut Vec<PagePlace>,
    ) -> Result<()> {
        let page_bytes = clusters.geometry.page_bytes;
        let draft = DerivedDraft::Pool { layer, page_bytes, pages: bytes };
        let frame = self.write(&draft, &[(layer, bytes.len() as u64)], device)?;
        let checksum = self.store.devices.identity.checksum;
        for (nth, page) in pages.iter().enumerate() {
            let nth = PlannedPage::place(pages, nth);
            let bytes = &bytes[nth * page_bytes..][..page_bytes];
            let number = frame.first_page + nth as u32 * clusters.geometry.disk_pages();
            let heads = clusters.lists[usize::from(page.list)].heads;
            let (nonce, origin) = (frame.meta.nonce, frame.meta.origin);
            let (place, valid) = page_place(number, page.valid);
            let identity = PlaneIdentity::of_page(nonce, origin, layer as u16, heads, place, valid);
            let checksum = checksum.compute(&identity, covered(bytes));
            places.push(PagePlace { frame: frame.id, page: number, valid: page.valid, checksum });
        }
        self.frames.push(frame);
        Ok(())
    }

    /// Encodes the directory of a list. Directories that fill a frame are written.
    fn directory(
        &mut self,
        layer: usize,
        clusters: &LayerClusters,
        list: &HeadClusters,
        pages: &[PagePlace],
    ) -> Result<()> {
        let (set, generation) = self.version();
        let fields = DirectoryFields {
            set,
            generation,
            heads: list.heads,
            method: self.method,
            method_version: 1,
            seed: 0,
            tokens: clusters.tokens,
            entries: list.clusters.stored() as u64,
            clusters: list.clusters.len() as u32,
            memberships: list.memberships,
            representative: (REPRESENTATIVE_NONE, 0),
        };
        let mut pages = Cow::Borrowed(pages);
        if planted!(PagesExchanged) {
            pages.to_mut().reverse();
        }
        let own = directory_pieces::encode(&fields, list, &pages, &clusters.geometry)?;
        let bytes = own.iter().map(|piece| piece_bytes(piece)).sum::<usize>();
        self.report.directory_bytes += own.iter().map(|piece| piece.len() as u64).sum::<u64>();
        if bytes > self.limit {
            let text = format!("store clusters: a directory of {bytes} bytes needs larger segments");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let held: usize = self.pieces.iter().map(|piece| piece_bytes(&piece.bytes)).sum();
        let is_full = held + bytes > self.limit.min(DIRECTORY_FRAME_BYTES)
            || self.pieces.len() + own.len() > DIRECTORY_FRAME_PIECES;
        if is_full {
            self.write_directories()?;
        }
        self.pieces.extend(own.into_iter().map(|bytes| DirectoryBytes { layer, bytes }));
        Ok(())
    }

    /// Writes the directories that are in no frame yet.
    ///
    /// # Errors
    /// As [`Self::layer`].
    pub(crate) fn write_directories(&mut self) -> Result<()> {
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.is_empty() {
            return Ok(());
        }
        let parts: Vec<(usize, u64)> = pieces.iter().map(|piece| (piece.layer, piece.bytes.len() as u64)).collect();
        let frame = self.write(&DerivedDraft::Directories(&pieces), &parts, None)?;
        self.frames.push(frame);
        Ok(())
    }

    /// Writes a frame to `first`, otherwise to the device that has least of its layers. Frees space for it if there is
    /// none.
    fn write(
        &mut self,
        draft: &DerivedDraft<'_>,
        parts: &[(usize, u64)],
        first: Option<DeviceIndex>,
    ) -> Result<DerivedFrame> {
        let store = self.store;
        let mut tries = 0;
        loop {
            match write_once((store, self.identity), &mut self.placed, (draft, parts), first) {
                Err(e) if e.kind() == ErrorKind::NoSpace && tries < ROOM_TRIES => {
                    tries += 1;
                    if !(store.limits.release_clusters)(store)? {
                        return Err(e.during("store clusters"));
                    }
                }
                Err(e) => return Err(e.during("store clusters")),
                Ok(frame) => {
                    self.report.device_bytes += frame.meta.location.bytes();
                    return Ok(frame);
                }
            }
        }
    }

    /// Returns the number and the generation of the set that is written. Pages of a layer were written.
    pub(crate) fn version(&self) -> (u64, u64) {
        // Ids of frames are never used again, so no two sets have the same number.
        let first = || self.frames.first().map_or(1, |frame| frame.id.0);
        self.follows.unwrap_or_else(|| (first(), 1))
    }

    /// Keeps frames of the sequence that hold states.
    pub(crate) fn keep(&mut self, frames: impl Iterator<Item = FrameId>) {
        self.kept.extend(frames);
    }

    /// Syncs all frames and names them in one commit. It releases those of the `earlier` frames of the sequence that no
    /// directory names.
    ///
    /// # Errors
    /// A sync failed, or the errors of a commit. The sequence has its earlier clusters then, or after
    /// [`ErrorKind::Indeterminate`] either.
    pub(crate) fn commit(mut self, earlier: Vec<FrameId>, states: Option<WrittenStates>) -> Result<StoredClusters> {
        self.write_directories()?;
        let states = states.unwrap_or_default();
        self.report.state_bytes = states.bytes;
        self.report.device_bytes += states.bytes;
        let tokens = self.report.tokens;
        let own = self.frames.into_iter().map(|frame| (frame, tokens));
        let frames: Vec<_> = own.chain(states.frames.into_iter().map(|frame| (frame, states.tokens))).collect();
        let replaced = earlier.into_iter().filter(|frame| !self.kept.contains(frame));
        let released = replaced.map(|frame| DerivedRelease::Reference(self.identity.sequence, frame)).collect();
        commit_derived(self.store, self.identity, frames, released)?;
        if self.report.kept_pages > 0 {
            coverage!(ClustersGrown);
        }
        Ok(StoredClusters { time: self.started.elapsed(), ..self.report })
    }
}

/// Syncs derived frames, and names them in one commit, each with the end of its tokens. Releases other ones with it.
///
/// # Errors
/// As [`PoolWriter::commit`].
pub(crate) fn commit_derived(
    store: &Arc<StoreInner>,
    identity: &SequenceIdentity,
    frames: Vec<(DerivedFrame, u64)>,
    released: Vec<DerivedRelease>,
) -> Result<()> {
    store.committer.admit((frames.len() * RECORD_BYTES) as u64)?;
    DerivedFrame::sync_all(&store.devices, frames.iter().map(|(frame, _)| frame))
        .map_err(|e| e.during("store clusters"))?;
    let mut request = CommitRequest { derived: released, ..CommitRequest::default() };
    for (DerivedFrame { id, meta, flight, .. }, end) in frames {
        meta.announce(id, &mut request.records);
        request.records.push(Kind::FrameRef, &ref_record(identity.sequence, id, end), &[]);
        request.pins.push(Arc::clone(flight.segment()));
        request.flights.push(flight);
    }
    store.commit(request)
}

/// Returns the bytes that a piece takes in a frame.
fn piece_bytes(piece: &[u8]) -> usize {
    piece.len().next_multiple_of(8) + size_of::<Descriptor>() + size_of::<u64>()
}
