//! Summaries of groups: their kinds, the header of a section, and the bytes of a summary record.

use crate::error::FormatError;
use crate::layout::LayerGeometry;
use crate::verify::check_zeros;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Summary kind: element-wise minimum and maximum of the keys of a group.
pub const SUMMARY_MIN_MAX: u16 = 1;
/// Summary kind: joint keys times a low-rank adapter.
pub const SUMMARY_LOW_RANK: u16 = 2;
/// Summary kind: codes of joint keys, by an adapter with codes.
pub const SUMMARY_CODES: u16 = 3;
/// Summary kind: the mean key, and the lowest cosine of a key to it.
pub const SUMMARY_LANDMARKS: u16 = 4;
/// Summary kind: signs of rotated keys, and their lengths.
pub const SUMMARY_SIGNS: u16 = 5;

/// The version of the summary records of every kind.
pub const SUMMARY_VERSION: u32 = 1;
/// The most bytes of a summary record.
pub const SUMMARY_RECORD_BYTES_MAX: u32 = 1 << 20;

/// The header of a section of a kind above [`SUMMARY_MIN_MAX`]. The summary records follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SummaryHeader {
    /// [`SUMMARY_VERSION`].
    pub version: U32,
    /// Low rank: rank. Codes: bytes per token. Signs: dimensions of a head after the rotation. Landmarks: 0.
    pub parameter: U32,
    /// The sequence that held the adapter at the time of the write, 0 = none of this store.
    pub adapter: U64,
    /// The checksum of that adapter, as in its record. 0 for kinds without an adapter.
    pub adapter_checksum: U64,
    /// Zero.
    pub reserved: U64,
}

const _: () = assert!(size_of::<SummaryHeader>() == 32);

/// The identity of summary records of a kind above [`SUMMARY_MIN_MAX`].
///
/// A reader uses stored records only if their identity is the one that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummaryRecords {
    /// The kind.
    pub kind: u16,
    /// As in [`SummaryHeader::parameter`].
    pub parameter: u32,
    /// As in [`SummaryHeader::adapter_checksum`].
    pub adapter_checksum: u64,
    /// Bytes of the summary record of a group.
    pub record_bytes: u32,
}

impl SummaryRecords {
    /// Returns the header of a section of these records. `adapter` is the sequence that holds the adapter, 0 = none.
    #[must_use]
    pub fn header(&self, adapter: u64) -> SummaryHeader {
        SummaryHeader {
            version: U32::new(SUMMARY_VERSION),
            parameter: U32::new(self.parameter),
            adapter: U64::new(adapter),
            adapter_checksum: U64::new(self.adapter_checksum),
            reserved: U64::new(0),
        }
    }
}

/// Returns the dimensions of a head of `key_dim` after the rotation of [`SUMMARY_SIGNS`].
#[must_use]
pub const fn sign_dims(key_dim: usize) -> usize {
    let dims = key_dim.next_power_of_two();
    if dims < 8 { 8 } else { dims }
}

/// Returns the bytes of a summary record of a kind above [`SUMMARY_MIN_MAX`], or `None` for any other kind.
#[must_use]
pub fn record_bytes(kind: u16, layer: &LayerGeometry, group_tokens: usize, parameter: u32) -> Option<u64> {
    let (heads, dim, group) = (u64::from(layer.kv_heads), usize::from(layer.key_dim), group_tokens as u64);
    match kind {
        SUMMARY_LOW_RANK => Some(group * u64::from(parameter) * 2),
        SUMMARY_CODES => Some(group * u64::from(parameter)),
        SUMMARY_LANDMARKS => Some(heads * dim as u64 * 2 + 4),
        SUMMARY_SIGNS => Some(heads * group * (sign_dims(dim) as u64 / 8 + 2)),
        _ => None,
    }
}

/// Returns whether summaries of a kind are made with an adapter.
#[must_use]
pub const fn has_adapter(kind: u16) -> bool {
    matches!(kind, SUMMARY_LOW_RANK | SUMMARY_CODES)
}

impl SummaryHeader {
    /// Checks the header at the start of a section of `kind` whose descriptor has `record_bytes`.
    ///
    /// # Errors
    /// There are too few bytes, the version is unknown, or the parameter does not give `record_bytes`. Or the header
    /// names an adapter for a kind without one.
    pub fn verify<'a>(
        bytes: &'a [u8],
        kind: u16,
        layer: &LayerGeometry,
        group_tokens: usize,
        record_bytes: u32,
    ) -> Result<&'a Self, FormatError> {
        let Ok((header, _)) = Self::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("summary header", size_of::<Self>(), bytes.len()));
        };
        let version = header.version.get();
        if version != SUMMARY_VERSION {
            let (known, found) = (u64::from(SUMMARY_VERSION), u64::from(version));
            return Err(FormatError::unsupported("summary version", 0, known, found));
        }
        check_zeros(header.reserved.as_bytes(), "summary header", 24)?;
        let parameter = header.parameter.get();
        let fits_kind = match kind {
            SUMMARY_LANDMARKS => parameter == 0,
            SUMMARY_SIGNS => parameter as usize == sign_dims(usize::from(layer.key_dim)),
            _ => parameter > 0,
        };
        let expected = self::record_bytes(kind, layer, group_tokens, parameter);
        if !fits_kind || expected != Some(u64::from(record_bytes)) {
            return Err(FormatError::range("summary parameter", 4, expected.unwrap_or(0), u64::from(parameter)));
        }
        if !has_adapter(kind) && (header.adapter.get() != 0 || header.adapter_checksum.get() != 0) {
            return Err(FormatError::range("summary adapter", 8, 0, header.adapter.get()));
        }
        Ok(header)
    }
}
