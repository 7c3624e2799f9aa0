//! A view: what one layer attends to, as of one moment.

use crate::attention::{HeadMask, TokenMask};
use crate::cache::{BlockCache, BlockKey};
use crate::index::{FrameBody, Run};
use crate::layout::KvLayout;
use std::sync::Arc;

/// Where a selected group is.
pub(crate) enum UnitSource {
    /// In a buffer that is being, or was just, written.
    Run { run: Arc<Run>, index: usize },
    /// Copied from a buffer that is still being filled.
    Copied(Box<[u8]>),
    /// On a device: byte offset in the segment file, first checksum in the frame's table.
    Disk { frame: Arc<FrameBody>, offset: u64, checksum: usize },
}

/// One selected group, with the KV heads and positions that take part.
pub(crate) struct Unit {
    pub(crate) group: u64,
    pub(crate) heads: HeadMask,
    pub(crate) positions: Option<TokenMask>,
    pub(crate) source: UnitSource,
}

impl UnitSource {
    /// The name of a block on a device among resident ones.
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
pub(crate) struct TailView {
    pub(crate) block: Arc<[u8]>,
    pub(crate) tokens: usize,
    pub(crate) positions: Option<TokenMask>,
}

pub(crate) struct ViewInner {
    pub(crate) layout: KvLayout,
    pub(crate) layer: usize,
    pub(crate) length: u64,
    pub(crate) units: Vec<Unit>,
    pub(crate) tail: Option<TailView>,
    /// The opening of a store that it belongs to.
    pub(crate) instance: u64,
    pub(crate) sequence: u64,
    /// Where its blocks may be resident.
    pub(crate) cache: Option<Arc<BlockCache>>,
}

impl ViewInner {
    pub(crate) fn group_tokens(&self) -> usize {
        self.layout.group_tokens()
    }
}

/// What one layer of a sequence attends to: selected groups and the tail, as of the moment of
/// [`Sequence::select`](crate::Sequence::select). Tokens appended later are not in it, and what it selected stays readable
/// until it is dropped, whatever happens to the sequence. Cheap to clone.
#[derive(Clone)]
pub struct View {
    pub(crate) inner: Arc<ViewInner>,
}

impl View {
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

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View")
            .field("layer", &self.inner.layer)
            .field("length", &self.inner.length)
            .field("groups", &self.inner.units.len())
            .finish_non_exhaustive()
    }
}
