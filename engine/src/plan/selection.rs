//! A selection: what one layer attends to, as of one moment, and where its blocks are.
//!
//! How a selection is used:
//! 1. `Sequence::select` scores the summaries, chooses groups as its request says, and takes the tail.
//! 2. It finds a [`GroupSource`] for each group: a buffer in memory, or a place on a device.
//! 3. A read plans the groups on devices and reads their blocks.
//! 4. Attention takes the groups, with the [`AttendedEntries`] of each, and the tail.
//!
//! Invariants:
//! - The groups are in rising order.
//! - A selection never changes. Tokens that are appended later are not in it.
//! - Its blocks stay readable until it is dropped, because a source refers to the buffer or the frame.

use super::entries::AttendedEntries;
use super::select_request::PlaneSet;
use crate::attention::TokenMask;
use crate::cache::{ActivatedClusters, BlockCache, BlockKey};
use crate::catalog::{FrameBody, GroupBuffer};
use crate::layout::KvLayout;
use crate::pools::ChosenPage;
use crate::retrieval::ReconstructedKeys;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::PAGE_BYTES;
use stratakv_format::layout::BlockGeometry;

/// The place of a selected group's block.
#[derive(Clone)]
pub(crate) enum GroupSource {
    /// In a buffer whose write is in flight or done.
    Run { run: Arc<GroupBuffer>, index: usize },
    /// In memory: a copy of a group that is being filled, or an exact outlier.
    Copied(Arc<[u8]>),
    /// On a device: the byte offset in the segment file, and the first checksum in the frame's table.
    Disk { frame: Arc<FrameBody>, offset: u64, checksum: usize },
}

/// Where the keys of a selected group come from.
pub(crate) enum KeySource {
    /// From the block, with the values.
    Stored,
    /// From the caller.
    Absent,
    /// From this K plane in memory.
    Kept(Arc<[u8]>),
    /// Reconstructed from the low-rank keys of the selection.
    Rebuilt,
}

/// One selected group, with the entries that take part.
pub(crate) struct SelectedGroup {
    /// Its number in the layer.
    pub(crate) index: u64,
    pub(crate) entries: AttendedEntries,
    /// The block, or its V plane if the keys are not read.
    pub(crate) source: GroupSource,
    pub(crate) keys: KeySource,
    /// The entries that no page of the selection gives; none if the group gives all of its entries.
    pub(crate) beside_pages: Option<AttendedEntries>,
}

impl SelectedGroup {
    /// Returns the entries that are attended from the block of the group.
    pub(crate) fn own_entries(&self) -> &AttendedEntries {
        self.beside_pages.as_ref().unwrap_or(&self.entries)
    }

    /// Returns whether its block is needed. Pages may give all entries.
    pub(crate) fn is_needed(&self) -> bool {
        !self.beside_pages.as_ref().is_some_and(AttendedEntries::is_empty)
    }

    /// Makes the group read its values only. `geometry` has a V plane.
    pub(crate) fn leave_keys(&mut self, geometry: &BlockGeometry, keys: KeySource) {
        let was_read = self.reads_keys();
        if let GroupSource::Disk { offset, checksum, .. } = &mut self.source
            && was_read
        {
            *offset += geometry.value_offset as u64;
            *checksum += 1;
        }
        self.keys = keys;
    }

    /// Returns whether keys are read with the values.
    pub(crate) fn reads_keys(&self) -> bool {
        matches!(self.keys, KeySource::Stored)
    }

    /// Returns the bytes that are read from a device, from the offset of its source on.
    pub(crate) fn bytes(&self, geometry: &BlockGeometry) -> usize {
        if self.reads_keys() { geometry.block_bytes } else { geometry.value_bytes }
    }

    /// Returns the planes in these bytes, each with its range: 0 is K, 1 is V.
    pub(crate) fn planes(&self, geometry: &BlockGeometry) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let planes = if self.reads_keys() { 0..2 } else { 1..2 };
        let (geometry, base) = (*geometry, if self.reads_keys() { 0 } else { geometry.value_offset });
        planes.filter_map(move |plane| {
            let (start, len) = geometry.plane(plane);
            (len > 0).then(|| (plane, start - base..start - base + len))
        })
    }
}

impl GroupSource {
    /// Returns the cache key of the bytes that are read of a block on a device.
    pub(crate) fn key(&self, layer: usize) -> Option<BlockKey> {
        let Self::Disk { frame, checksum, .. } = self else { return None };
        Some(BlockKey {
            frame_nonce: frame.nonce,
            origin: frame.origin.0,
            checksum: u32::try_from(*checksum).ok()?,
            layer: layer as u32,
            proof: *frame.checksums.get(*checksum)?,
        })
    }
}

/// A page of stored clusters that gives entries of a selection.
pub(crate) struct SelectedPage {
    pub(crate) frame: Arc<FrameBody>,
    pub(crate) chosen: ChosenPage,
}

impl SelectedPage {
    /// Returns its offset in the segment file.
    pub(crate) fn offset(&self) -> u64 {
        (u64::from(self.frame.page) + u64::from(self.chosen.page.page)) * PAGE_BYTES as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.chosen.geometry.page_bytes
    }

    /// Returns the cache key. No block of the frame has the same, because a derived frame has no blocks.
    pub(crate) fn key(&self, layer: usize) -> BlockKey {
        BlockKey {
            frame_nonce: self.frame.nonce,
            origin: self.frame.origin.0,
            checksum: self.chosen.page.page,
            layer: layer as u32,
            proof: self.chosen.page.checksum,
        }
    }
}

/// The tail at the moment of the selection.
pub(crate) struct SelectedTail {
    pub(crate) block: Arc<[u8]>,
    pub(crate) tokens: usize,
    pub(crate) positions: Option<TokenMask>,
}

pub(crate) struct SelectionInner {
    pub(crate) layout: KvLayout,
    pub(crate) layer: usize,
    pub(crate) length: u64,
    pub(crate) groups: Vec<SelectedGroup>,
    /// Pages of stored clusters, in the order of storage. They give entries of the groups, which are not read for
    /// these.
    pub(crate) pages: Vec<SelectedPage>,
    pub(crate) tail: Option<SelectedTail>,
    /// Low-rank keys, if groups need them.
    pub(crate) rebuilt: Option<Arc<ReconstructedKeys>>,
    /// The opening of the store that it belongs to.
    pub(crate) instance: u64,
    /// The handle that selected it: a sequence or a reader.
    pub(crate) handle: u64,
    /// The planes that it reads.
    pub(crate) planes: PlaneSet,
    /// The cache of its blocks.
    pub(crate) cache: Option<Arc<BlockCache>>,
    /// The runs of neighbouring clusters that a selector of entries chose.
    pub(crate) cluster_runs: Option<usize>,
    /// The clusters that a selector of entries chose, if the cache ranks clusters.
    pub(crate) clusters: Option<ActivatedClusters>,
}

impl SelectionInner {
    pub(crate) fn group_tokens(&self) -> usize {
        self.layout.group_tokens()
    }
}

/// The selected groups and the tail that one layer of a sequence attends to, as of
/// [`Sequence::select`](crate::Sequence::select).
///
/// Tokens appended later are not in it. Its groups stay readable until it is dropped, also if the sequence is cut or
/// deleted. Clones are cheap.
#[derive(Clone)]
pub struct Selection {
    pub(crate) inner: Arc<SelectionInner>,
}

impl Selection {
    /// Returns the layer.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.inner.layer
    }

    /// Returns the tokens of the layer at the moment of the selection.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.inner.length
    }

    /// Returns the tokens attended, with the tail. Each counts once, whichever heads attend to it.
    #[must_use]
    pub fn tokens(&self) -> usize {
        let group_tokens = self.inner.group_tokens();
        let groups = self.inner.groups.iter().map(|group| group.entries.tokens(group_tokens).len());
        let tail = self.inner.tail.as_ref().map_or(0, |tail| tail.positions.map_or(tail.tokens, TokenMask::len));
        groups.sum::<usize>() + tail
    }

    /// Returns the positions that at least one KV head attends to, in rising order.
    pub fn positions(&self) -> impl Iterator<Item = u64> + '_ {
        self.masks(AttendedEntries::tokens)
    }

    /// Returns the positions that one KV head attends to, in rising order.
    pub fn entries(&self, kv_head: usize) -> impl Iterator<Item = u64> + '_ {
        self.masks(move |entries, tokens| entries.tokens_of(kv_head, tokens))
    }

    /// Returns the runs of neighbours among the chosen clusters, if the selector chooses entries: the requests of a
    /// store that keeps clusters in the method's own order. Clusters per KV head count for each head.
    #[must_use]
    pub fn cluster_runs(&self) -> Option<usize> {
        self.inner.cluster_runs
    }

    /// Returns the pages of [stored clusters](crate::Sequence::store_clusters) that it reads instead of groups.
    #[must_use]
    pub fn stored_pages(&self) -> usize {
        self.inner.pages.len()
    }

    /// Returns the positions in the mask of each group and of the tail. All heads attend to the tail.
    fn masks(&self, of: impl Fn(&AttendedEntries, usize) -> TokenMask) -> impl Iterator<Item = u64> {
        let group_tokens = self.inner.group_tokens();
        let mask = move |group: &SelectedGroup| (group.index * group_tokens as u64, of(&group.entries, group_tokens));
        let groups = self.inner.groups.iter().map(mask);
        let sealed = self.inner.length / group_tokens as u64 * group_tokens as u64;
        let tail = self.inner.tail.iter();
        let tail = tail.map(move |tail| (sealed, tail.positions.unwrap_or(TokenMask::all(tail.tokens))));
        groups.chain(tail).flat_map(|(first, mask)| mask.iter().map(move |at| first + at as u64))
    }

    /// Returns the selected groups, in rising order.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.inner.groups.iter().map(|group| group.index)
    }
}

impl std::fmt::Debug for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selection")
            .field("layer", &self.inner.layer)
            .field("length", &self.inner.length)
            .field("groups", &self.inner.groups.len())
            .finish_non_exhaustive()
    }
}
