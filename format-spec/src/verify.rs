//! `Unverified -> Verified`: only checked structures leave this crate.

use crate::checksum::page_crc;
use crate::error::{FormatError, FormatErrorCode};
use crate::features::Features;
use crate::page::{PAGE_BYTES, PAGE_CRC_OFFSET, SECTOR_BYTES};
use core::ops::Deref;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A structure seen in bytes nobody has checked yet.
#[derive(Clone, Copy, Debug)]
pub struct Unverified<'a, T> {
    value: &'a T,
    bytes: &'a [u8],
}

/// A structure whose magic, version, checksum, place and reserved bytes were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified<T>(T);

impl<T> Verified<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(value)
    }

    /// The structure.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> Deref for Verified<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<'a, T: FromBytes + KnownLayout + Immutable + Unaligned> Unverified<'a, T> {
    /// Looks at the front of `bytes` as a `T`.
    ///
    /// # Errors
    /// Fewer bytes than a `T` takes.
    pub fn at_front(bytes: &'a [u8], what: &'static str) -> Result<Self, FormatError> {
        match T::ref_from_prefix(bytes) {
            Ok((value, _)) => Ok(Self { value, bytes }),
            Err(_) => Err(FormatError::truncated(what, size_of::<T>(), bytes.len())),
        }
    }

    pub(crate) fn peek(&self) -> &'a T {
        self.value
    }

    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Offset of version and features in every single-page structure: behind the magic, in every version.
pub(crate) const FEATURES_OFFSET: usize = 8;

/// The checks that every single-page structure shares: length, magic, CRC, version and features, zeros behind its fields,
/// in that order: a newer version may use bytes that this one keeps zero, and is then unsupported, not damaged.
pub(crate) fn check_page(
    bytes: &[u8],
    what: &'static str,
    magic: [u8; 8],
    fields_bytes: usize,
) -> Result<(), FormatError> {
    let Ok(bytes) = <&[u8; PAGE_BYTES]>::try_from(bytes) else {
        return Err(FormatError::truncated(what, PAGE_BYTES, bytes.len()));
    };
    check_magic(bytes, what, magic)?;
    let stored = stored_page_crc(bytes);
    let computed = page_crc(bytes);
    if stored != computed {
        return Err(FormatError::new(
            FormatErrorCode::Checksum,
            what,
            PAGE_CRC_OFFSET,
            u64::from(computed),
            u64::from(stored),
        ));
    }
    if let Ok((features, _)) = Features::ref_from_prefix(&bytes[FEATURES_OFFSET..]) {
        features.check(FEATURES_OFFSET)?;
    }
    check_zeros(&bytes[fields_bytes..PAGE_CRC_OFFSET], what, fields_bytes)?;
    check_zeros(&bytes[SECTOR_BYTES..], what, SECTOR_BYTES)
}

pub(crate) fn check_magic(bytes: &[u8], what: &'static str, magic: [u8; 8]) -> Result<(), FormatError> {
    let mut found = [0; 8];
    found.copy_from_slice(&bytes[..8]);
    if found == magic {
        return Ok(());
    }
    Err(FormatError::new(FormatErrorCode::Magic, what, 0, u64::from_be_bytes(magic), u64::from_be_bytes(found)))
}

fn stored_page_crc(page: &[u8]) -> u32 {
    let mut crc = [0; 4];
    crc.copy_from_slice(&page[PAGE_CRC_OFFSET..SECTOR_BYTES]);
    u32::from_le_bytes(crc)
}

/// Writes `fields` at the front of a zeroed page and its CRC behind them.
pub(crate) fn seal_page(fields: &(impl IntoBytes + Immutable)) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let bytes = fields.as_bytes();
    page[..bytes.len()].copy_from_slice(bytes);
    let crc = page_crc(&page);
    page[PAGE_CRC_OFFSET..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Every byte is zero, or the first that is not, at its offset plus `base`.
pub(crate) fn check_zeros(bytes: &[u8], what: &'static str, base: usize) -> Result<(), FormatError> {
    // Most are: blocks without a branch per byte first.
    let zeros = bytes.chunks(64).take_while(|chunk| chunk.iter().fold(0, |or, byte| or | byte) == 0).count() * 64;
    let rest = bytes.get(zeros..).unwrap_or_default();
    match rest.iter().position(|&b| b != 0).map(|at| zeros + at) {
        None => Ok(()),
        Some(at) => Err(FormatError::new(FormatErrorCode::Reserved, what, base + at, 0, u64::from(bytes[at]))),
    }
}
