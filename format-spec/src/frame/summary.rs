//! Summaries of groups: their kinds, the header in front of their records, the bytes of a record.

use crate::error::{FormatError, FormatErrorCode};
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
/// Summary kind: mean key, and the lowest cosine of a key to it.
pub const SUMMARY_LANDMARKS: u16 = 4;
/// Summary kind: signs of rotated keys, and their lengths.
pub const SUMMARY_SIGNS: u16 = 5;

/// The version of the records of every kind.
pub const SUMMARY_VERSION: u32 = 1;
/// The most bytes of a record.
pub const SUMMARY_RECORD_BYTES_MAX: u32 = 1 << 20;

/// Front of an extent of summaries of kinds above [`SUMMARY_MIN_MAX`]; the records follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SummaryHeader {
    /// [`SUMMARY_VERSION`].
    pub version: U32,
    /// Low rank: rank. Codes: bytes per token. Signs: dimensions of a head after the rotation. Landmarks: 0.
    pub parameter: U32,
    /// The sequence that held the adapter when this was written, 0 = none of this store.
    pub adapter: U64,
    /// Checksum of that adapter, as in its record; 0 for kinds without one.
    pub adapter_checksum: U64,
    /// Zero.
    pub reserved: U64,
}

const _: () = assert!(size_of::<SummaryHeader>() == 32);

/// What the records of a summary above [`SUMMARY_MIN_MAX`] are: those of another one are not taken for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummaryRecords {
    /// Kind.
    pub kind: u16,
    /// As in [`SummaryHeader::parameter`].
    pub parameter: u32,
    /// As in [`SummaryHeader::adapter_checksum`].
    pub adapter_checksum: u64,
    /// Bytes of the record of a group.
    pub record_bytes: u32,
}

impl SummaryRecords {
    /// What stands in front of them. `adapter`: the sequence that holds it.
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

/// Dimensions of a head of `key_dim` after the rotation of [`SUMMARY_SIGNS`].
#[must_use]
pub const fn sign_dims(key_dim: usize) -> usize {
    let dims = key_dim.next_power_of_two();
    if dims < 8 { 8 } else { dims }
}

/// Bytes of the record of a group of a kind above [`SUMMARY_MIN_MAX`], with this parameter; none for a kind that is not known.
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

/// Whether a kind goes by an adapter.
#[must_use]
pub const fn has_adapter(kind: u16) -> bool {
    matches!(kind, SUMMARY_LOW_RANK | SUMMARY_CODES)
}

impl SummaryHeader {
    /// The header at the front of an extent of `kind` whose descriptor says `record_bytes`.
    ///
    /// # Errors
    /// Fewer bytes, another version, a parameter that does not make such records, an adapter where there is none.
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
            return Err(FormatError::new(FormatErrorCode::Unsupported, "summary version", 0, known, found));
        }
        check_zeros(header.reserved.as_bytes(), "summary header", 24)?;
        let parameter = header.parameter.get();
        let fixed = match kind {
            SUMMARY_LANDMARKS => parameter == 0,
            SUMMARY_SIGNS => parameter as usize == sign_dims(usize::from(layer.key_dim)),
            _ => parameter > 0,
        };
        let expected = self::record_bytes(kind, layer, group_tokens, parameter);
        if !fixed || expected != Some(u64::from(record_bytes)) {
            return Err(FormatError::range("summary parameter", 4, expected.unwrap_or(0), u64::from(parameter)));
        }
        if !has_adapter(kind) && (header.adapter.get() != 0 || header.adapter_checksum.get() != 0) {
            return Err(FormatError::range("summary adapter", 8, 0, header.adapter.get()));
        }
        Ok(header)
    }
}
