//! The step from unverified to verified structures, and the checks that single-page structures share.
//!
//! A single-page structure is checked in this order:
//!
//! 1. Length and magic.
//! 2. CRC-32 of the whole page.
//! 3. Version and features.
//! 4. Zeros after its fields.
//! 5. The ranges of its own fields, in the module of the structure.
//!
//! Version and features come before the zeros, because a newer version may use bytes that this version keeps zero. Such
//! a page is unsupported, not damaged.

use crate::checksum::page_crc;
use crate::error::{FormatError, FormatErrorCode};
use crate::features::Features;
use crate::page::{PAGE_BYTES, PAGE_CRC_OFFSET, SECTOR_BYTES};
use core::ops::Deref;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A structure in bytes that were not checked.
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

    /// Returns the structure.
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
    /// Views the start of `bytes` as a `T`. `what` names the structure in errors.
    ///
    /// # Errors
    /// There are fewer bytes than a `T` takes.
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

/// Offset of version and features in every single-page structure, after the magic. All versions keep it.
pub(crate) const FEATURES_OFFSET: usize = 8;

/// Runs steps 1 to 4 on a page whose fields take `fields_bytes`.
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

/// Checks the magic of 8 bytes of a single-page structure.
pub(crate) fn check_magic(bytes: &[u8], what: &'static str, magic: [u8; 8]) -> Result<(), FormatError> {
    let mut found = [0; 8];
    found.copy_from_slice(&bytes[..8]);
    if found == magic {
        return Ok(());
    }
    Err(FormatError::new(FormatErrorCode::Magic, what, 0, u64::from_be_bytes(magic), u64::from_be_bytes(found)))
}

/// Checks the magic of 4 bytes of a batch, frame header or piece header.
pub(crate) fn check_short_magic(found: [u8; 4], what: &'static str, magic: [u8; 4]) -> Result<(), FormatError> {
    if found == magic {
        return Ok(());
    }
    let word = |magic: [u8; 4]| u64::from(u32::from_be_bytes(magic));
    Err(FormatError::new(FormatErrorCode::Magic, what, 0, word(magic), word(found)))
}

/// Compares the CRC stored at offset 4 of a batch, frame header or piece header with the computed one.
pub(crate) fn check_crc(computed: u32, stored: u32, what: &'static str) -> Result<(), FormatError> {
    if computed == stored {
        return Ok(());
    }
    Err(FormatError::new(FormatErrorCode::Checksum, what, 4, u64::from(computed), u64::from(stored)))
}

fn stored_page_crc(page: &[u8]) -> u32 {
    let mut crc = [0; 4];
    crc.copy_from_slice(&page[PAGE_CRC_OFFSET..SECTOR_BYTES]);
    u32::from_le_bytes(crc)
}

/// Returns a zeroed page with `fields` at its start and its CRC at [`PAGE_CRC_OFFSET`].
pub(crate) fn seal_page(fields: &(impl IntoBytes + Immutable)) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let bytes = fields.as_bytes();
    page[..bytes.len()].copy_from_slice(bytes);
    let crc = page_crc(&page);
    page[PAGE_CRC_OFFSET..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Checks that every byte is zero. The error names the first byte that is not, at its offset plus `base`.
pub(crate) fn check_zeros(bytes: &[u8], what: &'static str, base: usize) -> Result<(), FormatError> {
    // Nearly all bytes are zero. Chunks without a branch per byte skip them fast.
    let zeros = bytes.chunks(64).take_while(|chunk| chunk.iter().fold(0, |or, byte| or | byte) == 0).count() * 64;
    let rest = bytes.get(zeros..).unwrap_or_default();
    match rest.iter().position(|&b| b != 0).map(|at| zeros + at) {
        None => Ok(()),
        Some(at) => Err(FormatError::new(FormatErrorCode::Reserved, what, base + at, 0, u64::from(bytes[at]))),
    }
}
