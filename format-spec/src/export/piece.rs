//! The pieces of an exported sequence.
//!
//! A piece is a header, its bytes, and zeros up to a multiple of [`PIECE_ALIGNMENT`]. Its checksum is always
//! CRC-64/NVME. The CRC of the header is seeded with the nonce of the file, so that a piece verifies only in its file
//! and place.

use crate::checksum::crc_with_hole;
use crate::dtype::DType;
use crate::error::{FormatError, FormatErrorCode};
use crate::frame::{SUMMARY_MIN_MAX, TOKENS_MAX, min_max_record_bytes, tail_plane_bytes};
use crate::layout::Layout;
use crate::verify::{Unverified, Verified, check_crc, check_short_magic, check_zeros};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of a piece.
pub const PIECE_MAGIC: [u8; 4] = *b"SKXP";
/// The most bytes of a piece, without its header and padding.
pub const PIECE_BYTES_MAX: usize = 1 << 20;
/// Pieces start and end at multiples of this number of bytes.
pub const PIECE_ALIGNMENT: usize = 8;

/// Piece kind: the encoded layout.
pub const PIECE_LAYOUT: u16 = 1;
/// Piece kind: the key.
pub const PIECE_KEY: u16 = 2;
/// Piece kind: the caller state.
pub const PIECE_STATE: u16 = 3;
/// Piece kind: token ids.
pub const PIECE_TOKEN_IDS: u16 = 4;
/// Piece kind: whole groups of a layer.
pub const PIECE_GROUPS: u16 = 5;
/// Piece kind: summaries of the groups of the previous piece.
pub const PIECE_SUMMARY: u16 = 6;
/// Piece kind: the last tokens of a layer, which fill no group.
pub const PIECE_TAIL: u16 = 7;
/// Piece kind: the end of the file.
pub const PIECE_END: u16 = 8;

/// The header of a piece. Its bytes and zeros up to a multiple of [`PIECE_ALIGNMENT`] follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PieceHeader {
    /// [`PIECE_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32 of the nonce of the file (8 bytes) and this header with this field zero.
    pub crc: U32,
    /// The number of the piece, from 0.
    pub index: U64,
    /// CRC-64/NVME of its bytes.
    pub checksum: U64,
    /// The first token. Token ids: the index of the first. Else 0.
    pub first: U64,
    /// The number of tokens or token ids, else 0.
    pub tokens: U32,
    /// Bytes, without the zeros after them.
    pub bytes: U32,
    /// The kind.
    pub kind: U16,
    /// The layer, 0 for kinds without one.
    pub layer: U16,
    /// The summary kind, else 0.
    pub summary: U16,
    /// The element type of a summary ([`DType`]), else 0.
    pub element: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = assert!(size_of::<PieceHeader>() == 48);

/// The bytes of the last piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportEnd {
    /// The number of pieces before this one.
    pub pieces: U64,
    /// Bytes of the file, this piece included.
    pub file_bytes: U64,
}

const _: () = assert!(size_of::<ExportEnd>() == 16);

/// The contents of a piece: its header without magic, number, length and checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The kind.
    pub kind: u16,
    /// The layer, 0 for kinds without one.
    pub layer: u16,
    /// The first token. Token ids: the index of the first. Else 0.
    pub first: u64,
    /// The number of tokens or token ids, else 0.
    pub tokens: u32,
    /// The summary kind, else 0.
    pub summary: u16,
    /// The element type of a summary.
    pub element: Option<DType>,
}

impl Piece {
    /// Returns a piece without tokens: layout, key, state or end.
    #[must_use]
    pub const fn plain(kind: u16) -> Self {
        Self { kind, layer: 0, first: 0, tokens: 0, summary: 0, element: None }
    }

    /// Returns the bytes of a piece of token ids, groups, summaries or a tail in `layout`.
    ///
    /// It returns `None` for other kinds, for a layer without KV, and for groups that are not whole.
    #[must_use]
    pub fn bytes_in(&self, layout: &Layout) -> Option<u64> {
        let (tokens, group) = (u64::from(self.tokens), u64::from(layout.group_tokens));
        if self.kind == PIECE_TOKEN_IDS {
            return (self.layer == 0 && tokens > 0).then_some(tokens * 4);
        }
        let layer = layout.layers.get(usize::from(self.layer)).filter(|layer| layer.has_kv())?;
        let whole = tokens > 0 && tokens.is_multiple_of(group) && self.first.is_multiple_of(group);
        match self.kind {
            PIECE_GROUPS if whole => {
                let block = layout.block(layer);
                Some(tokens / group * (block.key_bytes + block.value_bytes) as u64)
            }
            PIECE_SUMMARY if whole && self.summary == SUMMARY_MIN_MAX => {
                Some(tokens / group * min_max_record_bytes(layer) as u64)
            }
            PIECE_TAIL if (1..group).contains(&tokens) && self.first.is_multiple_of(group) => {
                let (key, value) = tail_plane_bytes(layer, layout.dtype, self.tokens as usize);
                Some((key + value) as u64)
            }
            _ => None,
        }
    }
}

/// Returns the CRC-64/NVME of the bytes of a piece.
#[must_use]
pub fn piece_checksum(bytes: &[u8]) -> u64 {
    let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    crc.update(bytes);
    crc.finalize()
}

impl PieceHeader {
    /// Returns the header of a piece with these bytes, at most [`PIECE_BYTES_MAX`].
    #[must_use]
    pub fn new(piece: &Piece, index: u64, nonce: u64, bytes: &[u8]) -> Self {
        let mut header = Self {
            magic: PIECE_MAGIC,
            crc: U32::new(0),
            index: U64::new(index),
            checksum: U64::new(piece_checksum(bytes)),
            first: U64::new(piece.first),
            tokens: U32::new(piece.tokens),
            bytes: U32::new(bytes.len() as u32),
            kind: U16::new(piece.kind),
            layer: U16::new(piece.layer),
            summary: U16::new(piece.summary),
            element: piece.element.map_or(0, DType::code),
            reserved: 0,
        };
        header.crc = U32::new(crc_with_hole(&nonce.to_le_bytes(), header.as_bytes(), 4..8));
        header
    }

    /// Returns the bytes that follow the header, the zeros at the end included.
    #[must_use]
    pub fn padded_bytes(&self) -> usize {
        (self.bytes.get() as usize).next_multiple_of(PIECE_ALIGNMENT)
    }

    /// Returns the contents of the piece.
    #[must_use]
    pub fn piece(&self) -> Piece {
        Piece {
            kind: self.kind.get(),
            layer: self.layer.get(),
            first: self.first.get(),
            tokens: self.tokens.get(),
            summary: self.summary.get(),
            element: DType::from_code(self.element),
        }
    }

    /// Checks `padded`, the bytes after the header, and returns them without the zeros at the end.
    ///
    /// # Errors
    /// The length or the checksum does not match, or the padding is not zero.
    pub fn check_bytes<'a>(&self, padded: &'a [u8]) -> Result<&'a [u8], FormatError> {
        let bytes = self.bytes.get() as usize;
        if padded.len() != self.padded_bytes() {
            return Err(FormatError::truncated("piece", self.padded_bytes(), padded.len()));
        }
        let (bytes, padding) = padded.split_at(bytes);
        check_zeros(padding, "piece", bytes.len())?;
        match piece_checksum(bytes) {
            sum if sum == self.checksum.get() => Ok(bytes),
            sum => Err(FormatError::new(FormatErrorCode::Checksum, "piece", 16, sum, self.checksum.get())),
        }
    }
}

impl Unverified<'_, PieceHeader> {
    /// Checks the header of piece `index` of the file with this nonce.
    ///
    /// # Errors
    /// The header is damaged or belongs to another file or place, or this code does not know its kind.
    pub fn verify(&self, index: u64, nonce: u64) -> Result<Verified<PieceHeader>, FormatError> {
        let header = self.peek();
        check_short_magic(header.magic, "piece header", PIECE_MAGIC)?;
        let crc = crc_with_hole(&nonce.to_le_bytes(), header.as_bytes(), 4..8);
        check_crc(crc, header.crc.get(), "piece header")?;
        FormatError::check_identity("piece number", 8, index, header.index.get())?;
        let kind = header.kind.get();
        if !(PIECE_LAYOUT..=PIECE_END).contains(&kind) {
            return Err(FormatError::unsupported("piece kind", 40, 8, u64::from(kind)));
        }
        if header.bytes.get() as usize > PIECE_BYTES_MAX {
            let (bound, found) = (PIECE_BYTES_MAX as u64, u64::from(header.bytes.get()));
            return Err(FormatError::range("piece bytes", 36, bound, found));
        }
        let is_summary = kind == PIECE_SUMMARY;
        let (summary, element) = (header.summary.get(), header.element);
        if is_summary && (summary != SUMMARY_MIN_MAX || DType::from_code(element).is_none()) {
            return Err(FormatError::unsupported("summary", 44, 1, u64::from(summary)));
        }
        if !is_summary && (summary != 0 || element != 0) {
            return Err(FormatError::range("summary kind", 44, 0, u64::from(summary)));
        }
        let lists_tokens = matches!(kind, PIECE_TOKEN_IDS..=PIECE_TAIL);
        if !lists_tokens && (header.first.get() != 0 || header.tokens.get() != 0 || header.layer.get() != 0) {
            return Err(FormatError::range("first token of a piece without tokens", 24, 0, header.first.get()));
        }
        let end = header.first.get().checked_add(u64::from(header.tokens.get()));
        if end.is_none_or(|end| end > TOKENS_MAX) {
            return Err(FormatError::range("tokens", 24, TOKENS_MAX, header.first.get()));
        }
        check_zeros(&[header.reserved], "piece header", 47)?;
        Ok(Verified::new(*header))
    }
}
