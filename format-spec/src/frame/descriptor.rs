//! Descriptors: what an extent of a frame's payload holds.

use super::header::CALLER_STATE_BYTES_MAX;
use super::summary::{SUMMARY_LOW_RANK, SUMMARY_MIN_MAX, SUMMARY_RECORD_BYTES_MAX, SUMMARY_SIGNS, SummaryHeader};
use crate::codec::PlaneCodec;
use crate::dtype::DType;
use crate::error::{FormatError, FormatErrorCode};
use crate::layout::{LayerGeometry, Layout};
use crate::manifest::ADAPTER_BYTES_MAX;
use crate::page::PAGE_BYTES;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Whole groups of one layer.
pub const KIND_GROUPS: u16 = 1;
/// Summaries of groups of one layer.
pub const KIND_SUMMARY: u16 = 2;
/// Tokens of one layer that do not fill a group.
pub const KIND_TAIL: u16 = 3;
/// Token ids, 4 bytes each.
pub const KIND_TOKEN_IDS: u16 = 4;
/// The caller's state, opaque bytes.
pub const KIND_CALLER_STATE: u16 = 5;
/// Room kept: low-rank basis.
pub const KIND_LOW_RANK_BASIS: u16 = 6;
/// Room kept: changes of clusters.
pub const KIND_CLUSTER_DELTA: u16 = 7;
/// Room kept: directory of clusters.
pub const KIND_CLUSTER_DIRECTORY: u16 = 8;
/// Room kept: copy of an extent of another frame.
pub const KIND_REPLICA: u16 = 9;
/// Room kept: keyed object.
pub const KIND_KEYED_OBJECT: u16 = 10;
/// Bytes of an adapter of one layer, in a sequence that holds one.
pub const KIND_ADAPTER: u16 = 11;

/// Tokens of a sequence end below this one or at it.
pub const TOKENS_MAX: u64 = 1 << 48;

/// Codec of extents other than groups, and of groups whose planes are as they are.
pub const CODEC_RAW: u16 = 0;

/// A descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Descriptor {
    /// Kind.
    pub kind: U16,
    /// Layer, 0 where there is none.
    pub layer: U16,
    /// Groups: codec of the K planes in the lower byte, of the V planes in the upper one, as in the layout. Else 0.
    pub codec: U16,
    /// Kind of summary, else 0.
    pub summary: U16,
    /// First token (token ids: index of the first id; caller state: committed tokens; adapter: first byte).
    pub first_token: U64,
    /// Valid tokens (token ids: ids; caller state, adapter: bytes).
    pub tokens: U32,
    /// Pieces: groups, summary records, else 1.
    pub pieces: U32,
    /// Byte offset from the start of the frame.
    pub offset: U64,
    /// Bytes, padding included.
    pub bytes: U64,
    /// First of its checksums in the table of the frame.
    pub checksum_first: U32,
    /// Its checksums: one per piece and plane for groups, one per plane of a tail, else one.
    pub checksum_count: U32,
    /// Element type of a summary ([`DType`]), else 0.
    pub element: u8,
    /// Room kept for encryption: cipher, zero.
    pub cipher: u8,
    /// Room kept for encryption: key id, zero.
    pub key: U16,
    /// Bytes of the record of a group, of a summary kind above [`SUMMARY_MIN_MAX`]; else 0.
    pub record_bytes: U32,
}

const _: () = assert!(size_of::<Descriptor>() == 56);

/// Sizes of the pieces of an extent, derived from its descriptor and the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceGeometry {
    /// Bytes the extent must have.
    pub bytes: u64,
    /// Checksums the extent must have.
    pub checksums: u64,
}

/// Bytes of one min/max record: minima `[kv_heads, key_dim]`, then maxima.
#[must_use]
pub const fn summary_record_bytes(layer: &LayerGeometry, element: DType) -> usize {
    2 * layer.key_elements() * element.bytes()
}

/// Bytes of the K and V planes of `tokens` tail tokens: `[kv_heads, tokens, dim]` each.
#[must_use]
pub const fn tail_plane_bytes(layer: &LayerGeometry, dtype: DType, tokens: usize) -> (usize, usize) {
    (layer.key_elements() * tokens * dtype.bytes(), layer.value_elements() * tokens * dtype.bytes())
}

impl Descriptor {
    /// First group of a groups or summary extent.
    #[must_use]
    pub fn first_group(&self, layout: &Layout) -> u64 {
        self.first_token.get() / u64::from(layout.group_tokens)
    }

    /// One past the last token.
    #[must_use]
    pub fn end_token(&self) -> u64 {
        self.first_token.get().saturating_add(u64::from(self.tokens.get()))
    }

    /// Checks everything that can be checked without the payload, against the layout and the frame's length.
    ///
    /// # Errors
    /// The first field that is out of range; `base` is the offset of the descriptor in the header.
    pub(crate) fn check(
        &self,
        layout: &Layout,
        frame_bytes: u64,
        checksums: u64,
        base: usize,
    ) -> Result<(), FormatError> {
        let unsupported = |field, offset, found: u64| {
            Err(FormatError::new(FormatErrorCode::Unsupported, field, base + offset, 0, found))
        };
        // First: what the other fields mean follows from it.
        let kind = self.kind.get();
        if !(KIND_GROUPS..=KIND_CALLER_STATE).contains(&kind) && kind != KIND_ADAPTER {
            return unsupported("descriptor kind", 0, u64::from(kind));
        }
        let codec = self.codec.get();
        if codec.to_le_bytes().into_iter().any(|code| PlaneCodec::from_code(code).is_none()) {
            return unsupported("codec", 4, u64::from(codec));
        }
        let layer = layout.layers.get(usize::from(self.layer.get())).filter(|_| kind == KIND_GROUPS);
        let due = layer.map_or(CODEC_RAW, LayerGeometry::codec_code);
        if codec != due {
            return Err(FormatError::range("codec of the layout", base + 4, u64::from(due), u64::from(codec)));
        }
        if self.cipher != 0 || self.key.get() != 0 {
            return unsupported("cipher", 49, u64::from(self.cipher));
        }
        if self.kind.get() != KIND_SUMMARY || self.summary.get() == SUMMARY_MIN_MAX {
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
        let alignment = if self.kind.get() == KIND_GROUPS { PAGE_BYTES as u64 } else { 8 };
        if !self.offset.get().is_multiple_of(alignment) {
            return Err(FormatError::range("extent alignment", base + 24, alignment, self.offset.get()));
        }
        let count = u64::from(self.checksum_count.get());
        if count != geometry.checksums || u64::from(self.checksum_first.get()) + count > checksums {
            return Err(FormatError::range("extent checksums", base + 44, geometry.checksums, count));
        }
        Ok(())
    }

    fn geometry(&self, layout: &Layout, base: usize) -> Result<PieceGeometry, FormatError> {
        let range = |field, offset, bound, found| Err(FormatError::range(field, base + offset, bound, found));
        let kind = self.kind.get();
        let (tokens, pieces) = (u64::from(self.tokens.get()), u64::from(self.pieces.get()));
        let first = self.first_token.get();
        if kind != KIND_SUMMARY && (self.summary.get() != 0 || self.element != 0) {
            return range("summary kind", 6, 0, u64::from(self.summary.get()));
        }
        if matches!(kind, KIND_TOKEN_IDS | KIND_CALLER_STATE) {
            if pieces != 1 || self.layer.get() != 0 {
                return range("pieces", 20, 1, pieces);
            }
            if first > TOKENS_MAX {
                return range("tokens", 8, TOKENS_MAX, first);
            }
            if kind == KIND_CALLER_STATE && tokens > CALLER_STATE_BYTES_MAX as u64 {
                return range("caller state bytes", 16, CALLER_STATE_BYTES_MAX as u64, tokens);
            }
            let bytes = if kind == KIND_TOKEN_IDS { tokens * 4 } else { tokens };
            return Ok(PieceGeometry { bytes, checksums: 1 });
        }
        let Some(layer) = layout.layers.get(usize::from(self.layer.get())).filter(|l| l.has_kv()) else {
            return range("layer", 2, layout.layers.len() as u64, u64::from(self.layer.get()));
        };
        if kind == KIND_ADAPTER {
            if pieces != 1 || tokens == 0 || first.checked_add(tokens).is_none_or(|end| end > ADAPTER_BYTES_MAX) {
                return range("adapter bytes", 16, ADAPTER_BYTES_MAX, tokens);
            }
            return Ok(PieceGeometry { bytes: tokens, checksums: 1 });
        }
        let group = u64::from(layout.group_tokens);
        if first.checked_add(tokens).is_none_or(|end| end > TOKENS_MAX) || tokens == 0 {
            return range("tokens", 16, TOKENS_MAX, tokens);
        }
        match kind {
            KIND_GROUPS | KIND_SUMMARY => {
                if pieces.checked_mul(group) != Some(tokens) || !first.is_multiple_of(group) {
                    return range("groups", 20, tokens / group, pieces);
                }
                if kind == KIND_SUMMARY && (SUMMARY_LOW_RANK..=SUMMARY_SIGNS).contains(&self.summary.get()) {
                    let record = self.record_bytes.get();
                    if self.element != 0 || record == 0 || record > SUMMARY_RECORD_BYTES_MAX {
                        return range("summary record", 52, u64::from(SUMMARY_RECORD_BYTES_MAX), u64::from(record));
                    }
                    let bytes = size_of::<SummaryHeader>() as u64 + pieces * u64::from(record);
                    return Ok(PieceGeometry { bytes, checksums: 1 });
                }
                if kind == KIND_SUMMARY {
                    let element = DType::from_code(self.element);
                    let (Some(element), SUMMARY_MIN_MAX) = (element, self.summary.get()) else {
                        return Err(FormatError::new(
                            FormatErrorCode::Unsupported,
                            "summary",
                            base + 6,
                            1,
                            u64::from(self.summary.get()),
                        ));
                    };
                    let bytes = pieces * summary_record_bytes(layer, element) as u64;
                    return Ok(PieceGeometry { bytes, checksums: 1 });
                }
                let bytes = layout.block(layer).extent_bytes(pieces as usize) as u64;
                Ok(PieceGeometry { bytes, checksums: pieces * layer.planes() as u64 })
            }
            _ => {
                if pieces != 1 || tokens > u64::from(crate::layout::GROUP_TOKENS_MAX) {
                    return range("tail tokens", 16, u64::from(crate::layout::GROUP_TOKENS_MAX), tokens);
                }
                let (key, value) = tail_plane_bytes(layer, layout.dtype, tokens as usize);
                Ok(PieceGeometry { bytes: (key + value) as u64, checksums: layer.planes() as u64 })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use zerocopy::FromZeros;

    /// What the last bytes of a descriptor mean is for its kind to say: one that is not known is not damage.
    #[test]
    fn a_kind_that_is_not_known_is_unsupported_whatever_else_it_says() {
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
        for kind in [0, KIND_LOW_RANK_BASIS, KIND_KEYED_OBJECT, KIND_ADAPTER + 1, u16::MAX] {
            let mut descriptor = Descriptor::new_zeroed();
            descriptor.kind = U16::new(kind);
            descriptor.record_bytes = U32::new(7);
            (descriptor.summary, descriptor.element) = (U16::new(3), 9);
            let error = descriptor.check(&layout, 1 << 20, 1, 256).expect_err("not known");
            assert_eq!((error.code, error.field, error.offset), (FormatErrorCode::Unsupported, "descriptor kind", 256));
        }
    }
}
