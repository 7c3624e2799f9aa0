//! Descriptors: what an extent of a frame's payload holds.
//!
//! A descriptor is checked in this order:
//!
//! 1. Kind and codec. They come first, because the meaning of the other fields depends on the kind.
//! 2. The fields that are reserved for encryption, and `record_bytes`.
//! 3. Tokens, layer and number of pieces. They give the bytes and checksums that the extent must have.
//! 4. Bytes, offset, alignment and checksums.
//!
//! The order of the extents of a frame is checked by the view of the frame.

use super::header::{CALLER_STATE_BYTES_MAX, DESCRIPTORS_MAX, TOTAL_PAGES_MAX};
use super::summary::{SUMMARY_LOW_RANK, SUMMARY_MIN_MAX, SUMMARY_RECORD_BYTES_MAX, SUMMARY_SIGNS, SummaryHeader};
use crate::codec::PlaneCodec;
use crate::dtype::DType;
use crate::error::FormatError;
use crate::layout::{BLOCK_BYTES_MAX, GROUP_TOKENS_MAX, LayerGeometry, Layout};
use crate::manifest::ADAPTER_BYTES_MAX;
use crate::page::PAGE_BYTES;
use crate::pool::CLUSTER_PIECE_BYTES_MAX;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Kind: whole groups of one layer.
pub const KIND_GROUPS: u16 = 1;
/// Kind: summaries of groups of one layer.
pub const KIND_SUMMARY: u16 = 2;
/// Kind: tokens of one layer outside groups.
pub const KIND_TAIL: u16 = 3;
/// Kind: token ids, 4 bytes each.
pub const KIND_TOKEN_IDS: u16 = 4;
/// Kind: caller state, opaque bytes.
pub const KIND_CALLER_STATE: u16 = 5;
/// Kind, reserved: low-rank basis.
pub const KIND_LOW_RANK_BASIS: u16 = 6;
/// Kind: changes of clusters, opaque bytes. A reader that does not use clusters passes over them.
pub const KIND_CLUSTER_DELTA: u16 = 7;
/// Kind: a piece of a directory of clusters of one layer, in a derived frame.
pub const KIND_CLUSTER_DIRECTORY: u16 = 8;
/// Kind, reserved: copy of an extent of another frame.
pub const KIND_REPLICA: u16 = 9;
/// Kind, reserved: keyed object.
pub const KIND_KEYED_OBJECT: u16 = 10;
/// Kind: bytes of an adapter of one layer, in a sequence that holds an adapter.
pub const KIND_ADAPTER: u16 = 11;
/// Kind: a pool of pages of one layer, in a derived frame. Its checksums are stored in directories.
pub const KIND_POOL: u16 = 12;

/// The greatest end of the tokens of a sequence.
pub const TOKENS_MAX: u64 = 1 << 48;

/// The `codec` field of extents without groups, and of groups whose planes are all raw.
pub const CODEC_RAW: u16 = 0;

/// A descriptor of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Descriptor {
    /// The kind.
    pub kind: U16,
    /// The layer, 0 for kinds without one.
    pub layer: U16,
    /// Groups: codec of the K planes in the lower byte, of the V planes in the upper byte. Else 0.
    pub codec: U16,
    /// The summary kind, else 0.
    pub summary: U16,
    /// The first token. Token ids: index of the first id. Caller state: committed length. Adapter: first byte.
    /// Directory: number of the piece in the frame. Pool: 0.
    pub first_token: U64,
    /// The number of valid tokens. Token ids: ids. Caller state, adapter and directory: bytes. Pool: pages that were
    /// written with the frame.
    pub tokens: U32,
    /// The number of groups, summary records or pages of a pool, else 1.
    pub pieces: U32,
    /// Byte offset from the start of the frame.
    pub offset: U64,
    /// Bytes, padding included.
    pub bytes: U64,
    /// The index of its first checksum in the table of the frame.
    pub checksum_first: U32,
    /// The number of its checksums. Groups: one per block and plane. Tail: one per plane. Pool: none. Else one.
    pub checksum_count: U32,
    /// The element type of a min/max summary ([`min_max_element`]), else 0.
    pub element: u8,
    /// Reserved for encryption: cipher, zero.
    pub cipher: u8,
    /// Reserved for encryption: key id, zero.
    pub key: U16,
    /// Bytes of a summary record of a kind above [`SUMMARY_MIN_MAX`], of a page of a pool, or of a delta. Else 0.
    pub record_bytes: U32,
}

const _: () = assert!(size_of::<Descriptor>() == 56);

/// The bytes and the number of checksums that an extent must have, derived from its descriptor and the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExtentGeometry {
    bytes: u64,
    checksums: u64,
}

/// Returns the element type of min/max summaries in a layout of `dtype`: f16 for f16, else bf16.
#[must_use]
pub const fn min_max_element(dtype: DType) -> DType {
    match dtype {
        DType::F16 => DType::F16,
        DType::Bf16 | DType::F32 => DType::Bf16,
    }
}

/// Returns the bytes of one min/max record: minima `[kv_heads, key_dim]`, then maxima, of 2 bytes per element.
#[must_use]
pub const fn min_max_record_bytes(layer: &LayerGeometry) -> usize {
    4 * layer.key_elements()
}

/// Returns the bytes of the K and V planes of `tokens` tail tokens: `[kv_heads, tokens, dim]` each.
#[must_use]
pub const fn tail_plane_bytes(layer: &LayerGeometry, dtype: DType, tokens: usize) -> (usize, usize) {
    (layer.key_elements() * tokens * dtype.bytes(), layer.value_elements() * tokens * dtype.bytes())
}

impl Descriptor {
    /// Returns the first group of a groups or summary extent.
    #[must_use]
    pub fn first_group(&self, layout: &Layout) -> u64 {
        self.first_token.get() / u64::from(layout.group_tokens)
    }

    /// Returns the end of the tokens, one past the last.
    #[must_use]
    pub fn end_token(&self) -> u64 {
        self.first_token.get().saturating_add(u64::from(self.tokens.get()))
    }

    /// Returns whether the extent is stored behind the front: groups and pools.
    #[must_use]
    pub fn is_behind_front(&self) -> bool {
        matches!(self.kind.get(), KIND_GROUPS | KIND_POOL)
    }

    /// Returns whether the extent belongs to a derived frame. Such a frame holds no other extents.
    #[must_use]
    pub fn is_derived(&self) -> bool {
        matches!(self.kind.get(), KIND_POOL | KIND_CLUSTER_DIRECTORY)
    }

    /// Checks everything that does not need the payload, against the layout and the frame's length.
    ///
    /// # Errors
    /// The first field that is out of range. `base` is the offset of the descriptor in the header.
    pub(crate) fn check(
        &self,
        layout: &Layout,
        frame_bytes: u64,
        checksums: u64,
        base: usize,
    ) -> Result<(), FormatError> {
        self.check_kind_and_codec(layout, base)?;
        if self.cipher != 0 || self.key.get() != 0 {
            return Err(FormatError::unsupported("cipher", base + 49, 0, u64::from(self.cipher)));
        }
        let is_sized = match self.kind.get() {
            KIND_SUMMARY => self.summary.get() != SUMMARY_MIN_MAX,
            kind => matches!(kind, KIND_POOL | KIND_CLUSTER_DELTA),
        };
        if !is_sized {
            crate::verify::check_zeros(self.record_bytes.as_bytes(), "descriptor", base + 52)?;
        }
        let geometry = self.geometry(layout, base)?;
        if self.bytes.get() != geometry.bytes {
            return Err(FormatError::range("extent bytes", base + 32, geometry.bytes, self.bytes.get()));
        }
        let end = self.offset.get().checked_add(self.bytes.get());
        if end.is_none_or(|end| end > frame_bytes) {
            return Err(FormatError::range("extent end", base + 24, frame_bytes, self.offset.get()));
        }
        let alignment = if self.is_behind_front() { PAGE_BYTES as u64 } else { 8 };
        if !self.offset.get().is_multiple_of(alignment) {
            return Err(FormatError::range("extent alignment", base + 24, alignment, self.offset.get()));
        }
        let count = u64::from(self.checksum_count.get());
        if count != geometry.checksums || u64::from(self.checksum_first.get()) + count > checksums {
            return Err(FormatError::range("extent checksums", base + 44, geometry.checksums, count));
        }
        Ok(())
    }

    fn check_kind_and_codec(&self, layout: &Layout, base: usize) -> Result<(), FormatError> {
        let kind = self.kind.get();
        let is_known = matches!(
            kind,
            KIND_GROUPS..=KIND_CALLER_STATE | KIND_CLUSTER_DELTA | KIND_CLUSTER_DIRECTORY | KIND_ADAPTER | KIND_POOL
        );
        if !is_known {
            return Err(FormatError::unsupported("descriptor kind", base, 0, u64::from(kind)));
        }
        let codec = self.codec.get();
        if codec.to_le_bytes().into_iter().any(|code| PlaneCodec::from_code(code).is_none()) {
            return Err(FormatError::unsupported("codec", base + 4, 0, u64::from(codec)));
        }
        let layer = layout.layers.get(usize::from(self.layer.get())).filter(|_| kind == KIND_GROUPS);
        let expected = layer.map_or(CODEC_RAW, LayerGeometry::codec_code);
        if codec != expected {
            return Err(FormatError::range("codec of the layout", base + 4, u64::from(expected), u64::from(codec)));
        }
        Ok(())
    }

    /// Checks tokens, layer and pieces. Returns the sizes that the extent must have.
    fn geometry(&self, layout: &Layout, base: usize) -> Result<ExtentGeometry, FormatError> {
        let kind = self.kind.get();
        if kind != KIND_SUMMARY && (self.summary.get() != 0 || self.element != 0) {
            return Err(FormatError::range("summary kind", base + 6, 0, u64::from(self.summary.get())));
        }
        if matches!(kind, KIND_TOKEN_IDS | KIND_CALLER_STATE) {
            return self.bytes_geometry(base);
        }
        let Some(layer) = layout.layers.get(usize::from(self.layer.get())).filter(|layer| layer.has_kv()) else {
            let (layers, found) = (layout.layers.len() as u64, u64::from(self.layer.get()));
            return Err(FormatError::range("layer", base + 2, layers, found));
        };
        match kind {
            KIND_ADAPTER => return self.adapter_geometry(base),
            KIND_POOL => return self.pool_geometry(base),
            KIND_CLUSTER_DIRECTORY => return self.directory_geometry(base),
            _ => {}
        }
        let tokens = u64::from(self.tokens.get());
        if self.first_token.get().checked_add(tokens).is_none_or(|end| end > TOKENS_MAX) || tokens == 0 {
            return Err(FormatError::range("tokens", base + 16, TOKENS_MAX, tokens));
        }
        match kind {
            KIND_GROUPS => {
                let groups = self.whole_groups(layout, base)?;
                let bytes = layout.block(layer).extent_bytes(groups as usize) as u64;
                Ok(ExtentGeometry { bytes, checksums: groups * layer.planes() as u64 })
            }
            KIND_SUMMARY => {
                let groups = self.whole_groups(layout, base)?;
                self.summary_geometry(layout, layer, groups, base)
            }
            KIND_CLUSTER_DELTA => self.delta_geometry(base),
            _ => self.tail_geometry(layout, layer, base),
        }
    }

    /// Returns the geometry of token ids or caller state.
    fn bytes_geometry(&self, base: usize) -> Result<ExtentGeometry, FormatError> {
        let (tokens, pieces) = (u64::from(self.tokens.get()), u64::from(self.pieces.get()));
        if pieces != 1 || self.layer.get() != 0 {
            return Err(FormatError::range("pieces", base + 20, 1, pieces));
        }
        if self.first_token.get() > TOKENS_MAX {
            return Err(FormatError::range("tokens", base + 8, TOKENS_MAX, self.first_token.get()));
        }
        if self.kind.get() == KIND_TOKEN_IDS {
            return Ok(ExtentGeometry { bytes: tokens * 4, checksums: 1 });
        }
        let bytes_max = CALLER_STATE_BYTES_MAX as u64;
        if tokens > bytes_max {
            return Err(FormatError::range("caller state bytes", base + 16, bytes_max, tokens));
        }
        Ok(ExtentGeometry { bytes: tokens, checksums: 1 })
    }

    fn adapter_geometry(&self, base: usize) -> Result<ExtentGeometry, FormatError> {
        let bytes = u64::from(self.tokens.get());
        let end = self.first_token.get().checked_add(bytes);
        if self.pieces.get() != 1 || bytes == 0 || end.is_none_or(|end| end > ADAPTER_BYTES_MAX) {
            return Err(FormatError::range("adapter bytes", base + 16, ADAPTER_BYTES_MAX, bytes));
        }
        Ok(ExtentGeometry { bytes, checksums: 1 })
    }

    fn pool_geometry(&self, base: usize) -> Result<ExtentGeometry, FormatError> {
        let (pages, page_bytes) = (u64::from(self.pieces.get()), u64::from(self.record_bytes.get()));
        if page_bytes == 0 || page_bytes > BLOCK_BYTES_MAX as u64 || !page_bytes.is_multiple_of(PAGE_BYTES as u64) {
            return Err(FormatError::range("page bytes", base + 52, PAGE_BYTES as u64, page_bytes));
        }
        if pages == 0 || pages > u64::from(TOTAL_PAGES_MAX) {
            return Err(FormatError::range("pool pages", base + 20, u64::from(TOTAL_PAGES_MAX), pages));
        }
        let written = u64::from(self.tokens.get());
        if written > pages {
            return Err(FormatError::range("pool pages written", base + 16, pages, written));
        }
        if self.first_token.get() != 0 {
            return Err(FormatError::range("tokens", base + 8, 0, self.first_token.get()));
        }
        Ok(ExtentGeometry { bytes: pages * page_bytes, checksums: 0 })
    }

    fn directory_geometry(&self, base: usize) -> Result<ExtentGeometry, FormatError> {
        let (bytes, number) = (u64::from(self.tokens.get()), self.first_token.get());
        let bytes_max = u64::from(CLUSTER_PIECE_BYTES_MAX);
        if self.pieces.get() != 1 || bytes == 0 || bytes > bytes_max || number >= u64::from(DESCRIPTORS_MAX) {
            return Err(FormatError::range("directory bytes", base + 16, bytes_max, bytes));
        }
        Ok(ExtentGeometry { bytes, checksums: 1 })
    }

    fn delta_geometry(&self, base: usize) -> Result<ExtentGeometry, FormatError> {
        let (bytes, bytes_max) = (u64::from(self.record_bytes.get()), u64::from(CLUSTER_PIECE_BYTES_MAX));
        if self.pieces.get() != 1 || bytes == 0 || bytes > bytes_max {
            return Err(FormatError::range("delta bytes", base + 52, bytes_max, bytes));
        }
        Ok(ExtentGeometry { bytes, checksums: 1 })
    }

    /// Returns the number of groups, if the tokens are whole groups.
    fn whole_groups(&self, layout: &Layout, base: usize) -> Result<u64, FormatError> {
        let (tokens, groups) = (u64::from(self.tokens.get()), u64::from(self.pieces.get()));
        let group_tokens = u64::from(layout.group_tokens);
        if groups.checked_mul(group_tokens) != Some(tokens) || !self.first_token.get().is_multiple_of(group_tokens) {
            return Err(FormatError::range("groups", base + 20, tokens / group_tokens, groups));
        }
        Ok(groups)
    }

    fn summary_geometry(
        &self,
        layout: &Layout,
        layer: &LayerGeometry,
        groups: u64,
        base: usize,
    ) -> Result<ExtentGeometry, FormatError> {
        let kind = self.summary.get();
        if (SUMMARY_LOW_RANK..=SUMMARY_SIGNS).contains(&kind) {
            let record = self.record_bytes.get();
            if self.element != 0 || record == 0 || record > SUMMARY_RECORD_BYTES_MAX {
                let (bound, found) = (u64::from(SUMMARY_RECORD_BYTES_MAX), u64::from(record));
                return Err(FormatError::range("summary record", base + 52, bound, found));
            }
            let bytes = size_of::<SummaryHeader>() as u64 + groups * u64::from(record);
            return Ok(ExtentGeometry { bytes, checksums: 1 });
        }
        if kind != SUMMARY_MIN_MAX {
            return Err(FormatError::unsupported("summary", base + 6, 1, u64::from(kind)));
        }
        let element = min_max_element(layout.dtype).code();
        if self.element != element {
            let (expected, found) = (u64::from(element), u64::from(self.element));
            return Err(FormatError::range("element type of a summary", base + 48, expected, found));
        }
        Ok(ExtentGeometry { bytes: groups * min_max_record_bytes(layer) as u64, checksums: 1 })
    }

    fn tail_geometry(
        &self,
        layout: &Layout,
        layer: &LayerGeometry,
        base: usize,
    ) -> Result<ExtentGeometry, FormatError> {
        let tokens = self.tokens.get();
        if self.pieces.get() != 1 || tokens > u32::from(GROUP_TOKENS_MAX) {
            let bound = u64::from(GROUP_TOKENS_MAX);
            return Err(FormatError::range("tail tokens", base + 16, bound, u64::from(tokens)));
        }
        let (key, value) = tail_plane_bytes(layer, layout.dtype, tokens as usize);
        Ok(ExtentGeometry { bytes: (key + value) as u64, checksums: layer.planes() as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::FormatErrorCode;
    use crate::layout::Layout;
    use zerocopy::FromZeros;

    /// The kind gives the other fields their meaning, so an unknown kind is not damage.
    #[test]
    fn an_unknown_kind_is_unsupported_whatever_the_other_fields_are() {
        let layout = Layout {
            dtype: DType::F16,
            group_tokens: 4,
            padded_planes: false,
            fingerprint: [0; 32],
            layers: alloc::vec![LayerGeometry {
                kv_heads: 1,
                key_dim: 16,
                value_dim: 16,
                window: None,
                rope: None,
                codecs: crate::layout::RAW_PLANES
            }],
        };
        for kind in [0, KIND_LOW_RANK_BASIS, KIND_REPLICA, KIND_KEYED_OBJECT, KIND_POOL + 1, u16::MAX] {
            let mut descriptor = Descriptor::new_zeroed();
            descriptor.kind = U16::new(kind);
            descriptor.record_bytes = U32::new(7);
            (descriptor.summary, descriptor.element) = (U16::new(3), 9);
            let error = descriptor.check(&layout, 1 << 20, 1, 256).expect_err("an unknown kind");
            assert_eq!((error.code, error.field, error.offset), (FormatErrorCode::Unsupported, "descriptor kind", 256));
        }
    }
}
