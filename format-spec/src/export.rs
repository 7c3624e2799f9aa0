//! A sequence in one file, apart from any store: a page that says what follows, then pieces in a fixed order.

use crate::checksum::crc_with_hole;
use crate::dtype::DType;
use crate::error::{FormatError, FormatErrorCode};
use crate::features::Features;
use crate::frame::{CALLER_STATE_BYTES_MAX, SUMMARY_MIN_MAX, TOKENS_MAX, summary_record_bytes, tail_plane_bytes};
use crate::layout::{LAYERS_MAX, Layout, RawLayer, RawLayoutHeader};
use crate::manifest::KEY_BYTES_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::{Unverified, Verified, check_page, check_zeros, seal_page};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic of the page at the front.
pub const MAGIC: [u8; 8] = *b"SKVEXPRT";
/// Magic of a piece.
pub const PIECE_MAGIC: [u8; 4] = *b"SKXP";
/// The most bytes of a piece, without its header and padding.
pub const PIECE_BYTES_MAX: usize = 1 << 20;
/// Pieces start and end at multiples of this.
pub const PIECE_ALIGNMENT: usize = 8;

/// Piece: the encoded layout.
pub const PIECE_LAYOUT: u16 = 1;
/// Piece: the key.
pub const PIECE_KEY: u16 = 2;
/// Piece: the caller's state.
pub const PIECE_STATE: u16 = 3;
/// Piece: token ids.
pub const PIECE_TOKEN_IDS: u16 = 4;
/// Piece: whole groups of a layer.
pub const PIECE_GROUPS: u16 = 5;
/// Piece: summaries of the groups of the piece before.
pub const PIECE_SUMMARY: u16 = 6;
/// Piece: the tokens of a layer that fill no group.
pub const PIECE_TAIL: u16 = 7;
/// Piece: the end of the file.
pub const PIECE_END: u16 = 8;

/// Summaries that a sequence may carry in a file of this version.
pub const SUMMARIES_KNOWN: u32 = 1 << (SUMMARY_MIN_MAX - 1);

/// The page at the front.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportPage {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Version and features.
    pub features: Features,
    /// The store it came from.
    pub store_id: [u8; 16],
    /// Its id in that store.
    pub sequence: U64,
    /// Random number of this file; seeds the checksums of its pieces.
    pub nonce: U64,
    /// Tokens of every layer with KV.
    pub tokens: U64,
    /// Token ids.
    pub token_ids: U64,
    /// When the sequence was created, milliseconds since 1970.
    pub created_unix_ms: U64,
    /// When the file was written, milliseconds since 1970.
    pub exported_unix_ms: U64,
    /// Time to live in milliseconds, 0 = forever.
    pub ttl_ms: U64,
    /// Bytes of the encoded layout.
    pub layout_bytes: U32,
    /// Bytes of the key, 0 = none.
    pub key_bytes: U32,
    /// Bytes of the caller's state.
    pub state_bytes: U32,
    /// Summaries it carries: bit `1 << (kind - 1)` per summary kind.
    pub summaries: U32,
    /// 1 where there is a caller's state.
    pub has_state: u8,
    /// Eviction priority: 0 = never evicted.
    pub evictable: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<ExportPage>() == 136);

impl ExportPage {
    /// The page.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }
}

impl Unverified<'_, ExportPage> {
    /// Checks the page.
    ///
    /// # Errors
    /// No such page, damage, or a version, feature or summary this code does not know.
    pub fn verify(&self) -> Result<Verified<ExportPage>, FormatError> {
        check_page(self.bytes(), "export page", MAGIC, size_of::<ExportPage>())?;
        let page = self.peek();
        let range = |field, offset, bound: usize, found: U32| {
            Err(FormatError::range(field, offset, bound as u64, u64::from(found.get())))
        };
        if page.tokens.get() > TOKENS_MAX {
            return Err(FormatError::range("tokens", 72, TOKENS_MAX, page.tokens.get()));
        }
        if page.token_ids.get() > TOKENS_MAX {
            return Err(FormatError::range("token ids", 80, TOKENS_MAX, page.token_ids.get()));
        }
        let layout_max = size_of::<RawLayoutHeader>() + LAYERS_MAX * size_of::<RawLayer>();
        if page.layout_bytes.get() as usize > layout_max || page.layout_bytes.get() == 0 {
            return range("layout bytes", 112, layout_max, page.layout_bytes);
        }
        if page.key_bytes.get() as usize > KEY_BYTES_MAX {
            return range("key bytes", 116, KEY_BYTES_MAX, page.key_bytes);
        }
        if page.state_bytes.get() as usize > CALLER_STATE_BYTES_MAX {
            return range("caller state bytes", 120, CALLER_STATE_BYTES_MAX, page.state_bytes);
        }
        if page.summaries.get() & !SUMMARIES_KNOWN != 0 {
            let (known, found) = (u64::from(SUMMARIES_KNOWN), u64::from(page.summaries.get()));
            return Err(FormatError::new(FormatErrorCode::Unsupported, "summaries", 124, known, found));
        }
        if page.has_state > 1 || (page.has_state == 0 && page.state_bytes.get() != 0) {
            return Err(FormatError::range("caller state flag", 128, 1, u64::from(page.has_state)));
        }
        check_zeros(&page.reserved, "export page", 130)?;
        Ok(Verified::new(*page))
    }
}

/// The header of a piece; its bytes and zeros up to a multiple of [`PIECE_ALIGNMENT`] follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PieceHeader {
    /// [`PIECE_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32 of the nonce of the file (8 bytes) and this header with this field zero.
    pub crc: U32,
    /// Number of the piece, from 0.
    pub index: U64,
    /// CRC-64/NVME of its bytes.
    pub checksum: U64,
    /// First token; of token ids the index of the first; else 0.
    pub first: U64,
    /// Tokens or token ids; else 0.
    pub tokens: U32,
    /// Bytes, without the zeros behind them.
    pub bytes: U32,
    /// Kind.
    pub kind: U16,
    /// Layer, 0 where there is none.
    pub layer: U16,
    /// Kind of summary, else 0.
    pub summary: U16,
    /// Element type of a summary ([`DType`]), else 0.
    pub element: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = assert!(size_of::<PieceHeader>() == 48);

/// What the last piece holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportEnd {
    /// Pieces before this one.
    pub pieces: U64,
    /// Bytes of the file, this piece included.
    pub file_bytes: U64,
}

const _: () = assert!(size_of::<ExportEnd>() == 16);

/// What one piece is: everything of its header but magic and checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Kind.
    pub kind: u16,
    /// Layer, 0 where there is none.
    pub layer: u16,
    /// First token; of token ids the index of the first; else 0.
    pub first: u64,
    /// Tokens or token ids; else 0.
    pub tokens: u32,
    /// Kind of summary, else 0.
    pub summary: u16,
    /// Element type of a summary.
    pub element: Option<DType>,
}

impl Piece {
    /// A piece without tokens: layout, key, state, end.
    #[must_use]
    pub const fn plain(kind: u16) -> Self {
        Self { kind, layer: 0, first: 0, tokens: 0, summary: 0, element: None }
    }

    /// Bytes of a piece that lists tokens: token ids, or groups, summaries and tails in `layout`. None where there is no such
    /// piece: no such layer, or groups that are not whole.
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
                Some(tokens / group * summary_record_bytes(layer, self.element?) as u64)
            }
            PIECE_TAIL if (1..group).contains(&tokens) && self.first.is_multiple_of(group) => {
                let (key, value) = tail_plane_bytes(layer, layout.dtype, self.tokens as usize);
                Some((key + value) as u64)
            }
            _ => None,
        }
    }
}

/// CRC-64/NVME of the bytes of a piece.
#[must_use]
pub fn piece_checksum(bytes: &[u8]) -> u64 {
    let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    crc.update(bytes);
    crc.finalize()
}

impl PieceHeader {
    /// The header of a piece with these bytes, at most [`PIECE_BYTES_MAX`].
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

    /// Bytes behind the header, the zeros at the end included.
    #[must_use]
    pub fn padded_bytes(&self) -> usize {
        (self.bytes.get() as usize).next_multiple_of(PIECE_ALIGNMENT)
    }

    /// What the piece is.
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

    /// Checks `padded`, the bytes behind the header, against it.
    ///
    /// # Errors
    /// The checksum does not match, or the padding is not zero.
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
    /// Damage, a piece of another file or place, or a kind this code does not know.
    pub fn verify(&self, index: u64, nonce: u64) -> Result<Verified<PieceHeader>, FormatError> {
        let header = self.peek();
        if header.magic != PIECE_MAGIC {
            let word = |magic: [u8; 4]| u64::from(u32::from_be_bytes(magic));
            let (expected, found) = (word(PIECE_MAGIC), word(header.magic));
            return Err(FormatError::new(FormatErrorCode::Magic, "piece header", 0, expected, found));
        }
        let crc = crc_with_hole(&nonce.to_le_bytes(), header.as_bytes(), 4..8);
        if crc != header.crc.get() {
            let (expected, found) = (u64::from(crc), u64::from(header.crc.get()));
            return Err(FormatError::new(FormatErrorCode::Checksum, "piece header", 4, expected, found));
        }
        if header.index.get() != index {
            return Err(FormatError::new(FormatErrorCode::Identity, "piece number", 8, index, header.index.get()));
        }
        let kind = header.kind.get();
        if !(PIECE_LAYOUT..=PIECE_END).contains(&kind) {
            return Err(FormatError::new(FormatErrorCode::Unsupported, "piece kind", 40, 8, u64::from(kind)));
        }
        if header.bytes.get() as usize > PIECE_BYTES_MAX {
            let (bound, found) = (PIECE_BYTES_MAX as u64, u64::from(header.bytes.get()));
            return Err(FormatError::range("piece bytes", 36, bound, found));
        }
        let is_summary = kind == PIECE_SUMMARY;
        let (summary, element) = (header.summary.get(), header.element);
        if is_summary && (summary != SUMMARY_MIN_MAX || DType::from_code(element).is_none()) {
            return Err(FormatError::new(FormatErrorCode::Unsupported, "summary", 44, 1, u64::from(summary)));
        }
        if !is_summary && (summary != 0 || element != 0) {
            return Err(FormatError::range("summary kind", 44, 0, u64::from(summary)));
        }
        let lists = matches!(kind, PIECE_TOKEN_IDS..=PIECE_TAIL);
        if !lists && (header.first.get() != 0 || header.tokens.get() != 0 || header.layer.get() != 0) {
            return Err(FormatError::range("tokens of a piece without", 24, 0, header.first.get()));
        }
        let end = header.first.get().checked_add(u64::from(header.tokens.get()));
        if end.is_none_or(|end| end > TOKENS_MAX) {
            return Err(FormatError::range("tokens", 24, TOKENS_MAX, header.first.get()));
        }
        check_zeros(&[header.reserved], "piece header", 47)?;
        Ok(Verified::new(*header))
    }
}
