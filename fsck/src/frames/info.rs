//! The content of a frame, as its header describes it.

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
    pub(crate) layout: u32,
    /// Content, first token, and one past the last token, in the order of the header.
    pub(crate) spans: Vec<(ExtentContent, u64, u64)>,
    pub(crate) has_state: bool,
    pub(crate) adapter: Vec<AdapterPiece>,
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
