//! A view: what one layer attends to, as of one moment.

use crate::attention::{HeadMask, TokenMask};
use crate::cache::{BlockCache, BlockKey};
use crate::catalog::{FrameBody, GroupBuffer};
use crate::layout::KvLayout;
use crate::options::Budget;
use crate::retrieval::{HeadAggregation, ReconstructedKeys};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::layout::BlockGeometry;

/// What a selection takes besides the best groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectOptions {
    /// Tokens of a layer that a step attends to, everything included.
    pub budget: Budget,
    /// The newest tokens, which are always attended: the tail, and whole groups before it until at least this many. The
    /// newest group is always among them when the tail is empty, so that a token attends to itself.
    pub recent_tokens: usize,
    /// The first tokens of the sequence (attention sinks), which are always attended, in whole groups.
    pub sink_tokens: usize,
    /// How a [selector](crate::retrieval::Selector) adds up query heads; selection by the sequence's own min/max records is
    /// always raw.
    pub aggregation: HeadAggregation,
    /// Factor of `q . k` in a softmax aggregation; `None`: `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// What of the selected groups is read.
    pub planes: PlaneSet,
}

impl SelectOptions {
    /// This budget, nothing forced but the tail (or the newest group while there is none).
    #[must_use]
    pub const fn new(budget: Budget) -> Self {
        Self {
            budget,
            recent_tokens: 1,
            sink_tokens: 0,
            aggregation: HeadAggregation::Sum,
            scale: None,
            planes: PlaneSet::KeysAndValues,
        }
    }

    /// At least the newest `tokens` tokens.
    #[must_use]
    pub const fn recent(mut self, tokens: usize) -> Self {
        self.recent_tokens = tokens;
        self
    }

    /// The first `tokens` tokens.
    #[must_use]
    pub const fn sinks(mut self, tokens: usize) -> Self {
        self.sink_tokens = tokens;
        self
    }

    /// With this score.
    #[must_use]
    pub const fn aggregation(mut self, aggregation: HeadAggregation) -> Self {
        self.aggregation = aggregation;
        self
    }

    /// With this factor of `q . k` in a softmax.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// With these planes of the selected groups.
    #[must_use]
    pub const fn planes(mut self, planes: PlaneSet) -> Self {
        self.planes = planes;
        self
    }
}

impl From<Budget> for SelectOptions {
    fn from(budget: Budget) -> Self {
        Self::new(budget)
    }
}

/// Where a selected group is.
pub(crate) enum GroupSource {
    /// In a buffer that is being, or was just, written.
    Run { run: Arc<GroupBuffer>, index: usize },
    /// A copy: of a buffer that is still being filled, or one that is kept in memory.
    Copied(Arc<[u8]>),
    /// On a device: byte offset in the segment file, first checksum in the frame's table.
    Disk { frame: Arc<FrameBody>, offset: u64, checksum: usize },
}

/// What of the selected groups is read from devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PlaneSet {
    /// Keys and values.
    #[default]
    KeysAndValues,
    /// Values alone: the caller has keys of its own. [`attend`](crate::attend) refuses such a view.
    ValuesOnly,
    /// Values alone where [`Sequence::reconstruct_keys`](crate::Sequence::rebuild_keys) keeps the keys, which attention rebuilds
    /// while the values are on their way; nothing of outliers; elsewhere both.
    ReconstructedKeys,
}

/// Where the keys of a unit come from.
pub(crate) enum KeySource {
    /// They are read with the values, or are in memory with them.
    Stored,
    /// Not from here.
    Absent,
    /// The K plane, in memory.
    Kept(Arc<[u8]>),
    /// Rebuilt from those of the view.
    Rebuilt,
}

/// One selected group, with the KV heads and positions that take part.
pub(crate) struct SelectedGroup {
    pub(crate) group: u64,
    pub(crate) heads: HeadMask,
    pub(crate) positions: Option<TokenMask>,
    /// On a device: of the V plane where the keys are not read.
    pub(crate) source: GroupSource,
    pub(crate) keys: KeySource,
}

impl SelectedGroup {
    /// Leaves the keys where they are: only values are read. `geometry` has a V plane.
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

    /// Whether keys are read with the values.
    pub(crate) fn reads_keys(&self) -> bool {
        matches!(self.keys, KeySource::Stored)
    }

    /// Bytes that are read from a device, from the offset of its source on.
    pub(crate) fn bytes(&self, geometry: &BlockGeometry) -> usize {
        if self.reads_keys() { geometry.block_bytes } else { geometry.value_bytes }
    }

    /// The planes in these bytes: 0 = K, 1 = V, each with its place in them.
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
    /// The name of what is read of a block on a device, among resident ones.
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

/// The tail as it was.
pub(crate) struct SelectedTail {
    pub(crate) block: Arc<[u8]>,
    pub(crate) tokens: usize,
    pub(crate) positions: Option<TokenMask>,
}

pub(crate) struct SelectionInner {
    pub(crate) layout: KvLayout,
    pub(crate) layer: usize,
    pub(crate) length: u64,
    pub(crate) units: Vec<SelectedGroup>,
    pub(crate) tail: Option<SelectedTail>,
    /// Keys at a low rank, where units need them.
    pub(crate) rebuilt: Option<Arc<ReconstructedKeys>>,
    /// The opening of a store that it belongs to.
    pub(crate) instance: u64,
    /// Which handle selected it: a sequence, or a reader of it.
    pub(crate) handle: u64,
    /// What it was to read of its groups.
    pub(crate) planes: PlaneSet,
    /// Where its blocks may be resident.
    pub(crate) cache: Option<Arc<BlockCache>>,
}

impl SelectionInner {
    pub(crate) fn group_tokens(&self) -> usize {
        self.layout.group_tokens()
    }
}

/// What one layer of a sequence attends to: selected groups and the tail, as of the moment of
/// [`Sequence::select`](crate::Sequence::select). Tokens appended later are not in it, and what it selected stays readable
/// until it is dropped, whatever happens to the sequence. Cheap to clone.
#[derive(Clone)]
pub struct Selection {
    pub(crate) inner: Arc<SelectionInner>,
}

impl Selection {
    /// The layer.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.inner.layer
    }

    /// Tokens of the layer at the moment of the selection.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.inner.length
    }

    /// Tokens attended, the tail included, counted once whichever heads take part.
    #[must_use]
    pub fn tokens(&self) -> usize {
        let group = self.inner.group_tokens();
        let units = self.inner.units.iter().map(|unit| unit.positions.map_or(group, TokenMask::len));
        let tail = self.inner.tail.as_ref().map_or(0, |tail| tail.positions.map_or(tail.tokens, TokenMask::len));
        units.sum::<usize>() + tail
    }

    /// Positions attended, in rising order.
    pub fn positions(&self) -> impl Iterator<Item = u64> + '_ {
        let group = self.inner.group_tokens() as u64;
        let units = self.inner.units.iter().map(move |unit| (unit.group * group, unit.positions, group as usize));
        let sealed = self.inner.length / group * group;
        let tail = self.inner.tail.iter().map(move |tail| (sealed, tail.positions, tail.tokens));
        units.chain(tail).flat_map(|(first, positions, tokens)| {
            positions.unwrap_or(TokenMask::all(tokens)).iter().map(move |at| first + at as u64)
        })
    }

    /// Selected groups, in rising order.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.inner.units.iter().map(|unit| unit.group)
    }
}

impl std::fmt::Debug for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View")
            .field("layer", &self.inner.layer)
            .field("length", &self.inner.length)
            .field("groups", &self.inner.units.len())
            .finish_non_exhaustive()
    }
}
