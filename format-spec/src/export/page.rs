//! The export page.

use super::SUMMARIES_KNOWN;
use crate::error::FormatError;
use crate::features::Features;
use crate::frame::{CALLER_STATE_BYTES_MAX, TOKENS_MAX};
use crate::layout::LAYOUT_BYTES_MAX;
use crate::manifest::KEY_BYTES_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::{Unverified, Verified, check_page, check_zeros, seal_page};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of the export page.
pub const MAGIC: [u8; 8] = *b"SKVEXPRT";

/// The first page of an exported sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportPage {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The version and features.
    pub features: Features,
    /// The id of the store that it was exported from.
    pub store_id: [u8; 16],
    /// The id of the sequence in that store.
    pub sequence: U64,
    /// A random number of this file. It seeds the checksums of its pieces.
    pub nonce: U64,
    /// The number of tokens of every layer with KV.
    pub tokens: U64,
    /// The number of token ids.
    pub token_ids: U64,
    /// The creation time of the sequence, milliseconds since 1970.
    pub created_unix_ms: U64,
    /// The time of the export, milliseconds since 1970.
    pub exported_unix_ms: U64,
    /// The time to live in milliseconds, 0 = forever.
    pub ttl_ms: U64,
    /// Bytes of the encoded layout.
    pub layout_bytes: U32,
    /// Bytes of the key, 0 = none.
    pub key_bytes: U32,
    /// Bytes of the caller state.
    pub state_bytes: U32,
    /// The summaries that the sequence carries: bit `1 << (kind - 1)` per summary kind.
    pub summaries: U32,
    /// 1 if there is a caller state, else 0.
    pub has_state: u8,
    /// The eviction priority, 0 = never evicted.
    pub evictable: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<ExportPage>() == 136);

impl ExportPage {
    /// Returns the bytes of the page.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }
}

impl Unverified<'_, ExportPage> {
    /// Checks the page.
    ///
    /// # Errors
    /// The bytes are no export page or a damaged one, or this code does not know its version, a feature or a summary.
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
        if page.layout_bytes.get() as usize > LAYOUT_BYTES_MAX || page.layout_bytes.get() == 0 {
            return range("layout bytes", 112, LAYOUT_BYTES_MAX, page.layout_bytes);
        }
        if page.key_bytes.get() as usize > KEY_BYTES_MAX {
            return range("key bytes", 116, KEY_BYTES_MAX, page.key_bytes);
        }
        if page.state_bytes.get() as usize > CALLER_STATE_BYTES_MAX {
            return range("caller state bytes", 120, CALLER_STATE_BYTES_MAX, page.state_bytes);
        }
        if page.summaries.get() & !SUMMARIES_KNOWN != 0 {
            let (known, found) = (u64::from(SUMMARIES_KNOWN), u64::from(page.summaries.get()));
            return Err(FormatError::unsupported("summaries", 124, known, found));
        }
        if page.has_state > 1 || (page.has_state == 0 && page.state_bytes.get() != 0) {
            return Err(FormatError::range("caller state flag", 128, 1, u64::from(page.has_state)));
        }
        check_zeros(&page.reserved, "export page", 130)?;
        Ok(Verified::new(*page))
    }
}
