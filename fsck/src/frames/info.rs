//! The content of a frame, as its header describes it.

use stratakv_format::frame::{
    KIND_ADAPTER, KIND_CALLER_STATE, KIND_CLUSTER_DELTA, KIND_GROUPS, KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS,
};
use stratakv_format::{Location, PAGE_BYTES};

/// The meaning of the tokens of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtentContent {
    /// Full groups of a layer.
    Groups(u16),
    /// Single tokens of a layer.
    Tail(u16),
    /// Min/max summaries of groups of a layer.
    MinMax(u16),
    /// Token ids.
    TokenIds,
}

/// The content of a frame.
#[derive(Debug)]
pub(crate) struct FrameInfo {
    /// The location of the copy that was read.
    pub(crate) location: Location,
    /// The digest of the header without the fields that differ between copies.
    pub(crate) digest: u64,
    pub(crate) layout: u32,
    pub(crate) bytes: ExtentBytes,
    /// Content, first token, and one past the last token, in the order of the header.
    pub(crate) spans: Vec<(ExtentContent, u64, u64)>,
    pub(crate) has_state: bool,
    pub(crate) adapter: Vec<AdapterPiece>,
    pub(crate) directories: Vec<DirectoryExtent>,
    pub(crate) pools: Vec<PoolExtent>,
    pub(crate) rows: Vec<RowExtent>,
}

/// Bytes of extents by their kind, except directories and pools, which have lists.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExtentBytes {
    pub(crate) keys_values: u64,
    pub(crate) summaries: u64,
    pub(crate) token_ids: u64,
    pub(crate) caller_state: u64,
    pub(crate) adapters: u64,
    pub(crate) deltas: u64,
}

impl ExtentBytes {
    /// Adds the bytes of an extent.
    pub(super) fn add(&mut self, kind: u16, bytes: u64) {
        let own = match kind {
            KIND_GROUPS | KIND_TAIL => &mut self.keys_values,
            KIND_SUMMARY => &mut self.summaries,
            KIND_TOKEN_IDS => &mut self.token_ids,
            KIND_CALLER_STATE => &mut self.caller_state,
            KIND_ADAPTER => &mut self.adapters,
            KIND_CLUSTER_DELTA => &mut self.deltas,
            _ => return,
        };
        *own += bytes;
    }
}

/// Groups or a tail of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowExtent {
    pub(crate) layer: u16,
    /// False for a tail.
    pub(crate) is_groups: bool,
    pub(crate) first: u64,
    pub(crate) tokens: u32,
    /// The offset from the start of the frame.
    pub(crate) offset: u64,
}

/// A piece of a directory of clusters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectoryExtent {
    pub(crate) layer: u16,
    /// The offset in the segment file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// True if the piece matched its own checksum.
    pub(crate) good: bool,
    /// True if the piece is one of the state of a method.
    pub(crate) is_state: bool,
}

/// A pool of pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolExtent {
    pub(crate) layer: u16,
    /// Its first page, in pages of 4096 bytes from the start of the frame.
    pub(crate) first: u32,
    /// Its pages of `page_bytes`.
    pub(crate) pages: u32,
    /// The first of them, which were written with the frame. At most `pages`.
    pub(crate) written: u32,
    pub(crate) page_bytes: u32,
}

impl PoolExtent {
    /// Returns whether a page of this many bytes of a layer may start at `page` of the frame.
    pub(crate) fn has_page(&self, layer: u16, page: u32, page_bytes: usize) -> bool {
        let each = self.disk_pages();
        let nth = page.checked_sub(self.first).filter(|at| at.is_multiple_of(each)).map(|at| at / each);
        let fits = nth.is_some_and(|nth| nth < self.pages);
        layer == self.layer && page_bytes == self.page_bytes as usize && fits
    }

    /// Returns how many pages of 4096 bytes each of its pages takes.
    pub(crate) fn disk_pages(&self) -> u32 {
        self.page_bytes / PAGE_BYTES as u32
    }
}

/// A piece of an adapter and its place. Pieces order by layer and first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AdapterPiece {
    pub(crate) layer: u16,
    /// The first byte of the layer's adapter that the piece holds.
    pub(crate) first: u64,
    pub(crate) bytes: u64,
    pub(crate) device: u16,
    pub(crate) segment: u32,
    /// The offset in the segment file.
    pub(crate) offset: u64,
    /// True if the piece matched its own checksum.
    pub(crate) good: bool,
}
