//! Batches: the atomic units of a manifest file.
//!
//! A batch is a header, records and zeros, in whole pages. Batches with [`FLAG_MORE`] and the next batch without it
//! form a run, which takes effect as a whole.

use super::record::Records;
use crate::checksum::crc_with_hole;
use crate::error::{FormatError, FormatErrorCode};
use crate::ids::NUMBER_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::{check_crc, check_short_magic, check_zeros};
use alloc::vec;
use alloc::vec::Vec;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of a batch.
pub const MAGIC: [u8; 4] = *b"SKMB";
/// The most pages of a batch. More records need a run of several batches ([`FLAG_MORE`]).
pub const BATCH_PAGES_MAX: u32 = 256;
/// The most bytes of records of a batch.
pub const RECORDS_BYTES_MAX: usize = BATCH_PAGES_MAX as usize * PAGE_BYTES - size_of::<BatchHeader>();
/// Batch flag: the batch is part of the checkpoint at the start of the file.
pub const FLAG_CHECKPOINT: u16 = 1;
/// Batch flag: the batch takes effect together with the next one.
pub const FLAG_MORE: u16 = 2;
/// Name of the length in errors. A torn header may have any value there.
const BATCH_PAGES: &str = "batch pages";

/// The header of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BatchHeader {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32 of the nonce of the generation (8 bytes) and all pages of the batch with this field zero.
    pub crc: U32,
    /// The sequence number, one more than that of the previous batch, also across generations.
    pub sequence: U64,
    /// The last batch known to be durable when this one was written.
    pub synced_through: U64,
    /// The generation of its manifest.
    pub generation: U64,
    /// The membership epoch.
    pub epoch: U64,
    /// The number of pages.
    pub pages: U32,
    /// Bytes of records after this header. Zeros follow up to the end of the last page.
    pub records_bytes: U32,
    /// The number of records.
    pub record_count: U32,
    /// [`FLAG_CHECKPOINT`], [`FLAG_MORE`].
    pub flags: U16,
    /// Zero.
    pub reserved: U16,
}

const _: () = assert!(size_of::<BatchHeader>() == 56);

/// The place of a batch. Its checksum and header must match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlace {
    /// The generation of the manifest.
    pub generation: u64,
    /// The nonce of that generation.
    pub nonce: u64,
    /// The sequence number that is expected at the place.
    pub sequence: u64,
}

/// A batch that was checked.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    header: &'a BatchHeader,
    records: &'a [u8],
}

impl<'a> Batch<'a> {
    /// Returns the pages that the batch at the start of `bytes` claims, if its magic and that number are plausible.
    ///
    /// A reader uses it to read just enough bytes. Nothing is verified.
    #[must_use]
    pub fn claimed_pages(bytes: &[u8]) -> Option<u32> {
        let (header, _) = BatchHeader::ref_from_prefix(bytes).ok()?;
        (header.magic == MAGIC && (1..=BATCH_PAGES_MAX).contains(&header.pages.get())).then(|| header.pages.get())
    }

    /// Checks the batch at the start of `bytes`.
    ///
    /// # Errors
    /// The bytes are no batch, a damaged one, or one of another place.
    pub fn verify(bytes: &'a [u8], place: &BatchPlace) -> Result<Self, FormatError> {
        let Ok((header, _)) = BatchHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("manifest batch", size_of::<BatchHeader>(), bytes.len()));
        };
        check_short_magic(header.magic, "manifest batch", MAGIC)?;
        let pages = header.pages.get();
        if !(1..=BATCH_PAGES_MAX).contains(&pages) {
            return Err(FormatError::range(BATCH_PAGES, 40, u64::from(BATCH_PAGES_MAX), u64::from(pages)));
        }
        let total = pages as usize * PAGE_BYTES;
        let Some(whole) = bytes.get(..total) else {
            return Err(FormatError::truncated("manifest batch", total, bytes.len()));
        };
        let crc = crc_with_hole(&place.nonce.to_le_bytes(), whole, 4..8);
        check_crc(crc, header.crc.get(), "manifest batch")?;
        header.check(place)?;
        let start = size_of::<BatchHeader>();
        let end = start + header.records_bytes.get() as usize;
        if end > total {
            return Err(FormatError::range("records bytes", 44, total as u64, end as u64));
        }
        check_zeros(&whole[end..], "manifest batch", end)?;
        Ok(Self { header, records: &whole[start..end] })
    }

    /// Returns whether a write that a crash interrupted can cause this error of [`Self::verify`].
    ///
    /// Bytes with any other error have a correct checksum. They were written as they are, and do not end a manifest.
    #[must_use]
    pub fn may_be_torn(error: &FormatError) -> bool {
        let torn = [FormatErrorCode::Checksum, FormatErrorCode::Magic, FormatErrorCode::Truncated];
        torn.contains(&error.code) || error.field == BATCH_PAGES
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &'a BatchHeader {
        self.header
    }

    /// Returns whether the batch is part of the checkpoint.
    #[must_use]
    pub fn is_checkpoint(&self) -> bool {
        self.header.flags.get() & FLAG_CHECKPOINT != 0
    }

    /// Returns whether the batch takes effect together with the next one.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.header.flags.get() & FLAG_MORE != 0
    }

    /// Returns the records.
    #[must_use]
    pub fn records(&self) -> Records<'a> {
        Records::new(self.records, self.header.record_count.get())
    }
}

impl BatchHeader {
    /// Checks a header with a correct checksum: identity, ranges, flags and reserved bytes.
    fn check(&self, place: &BatchPlace) -> Result<(), FormatError> {
        FormatError::check_identity("batch generation", 24, place.generation, self.generation.get())?;
        FormatError::check_identity("batch sequence", 8, place.sequence, self.sequence.get())?;
        for (field, offset, number) in [("batch sequence", 8, self.sequence), ("batch epoch", 32, self.epoch)] {
            if number.get() > NUMBER_MAX {
                return Err(FormatError::range(field, offset, NUMBER_MAX, number.get()));
            }
        }
        if self.synced_through.get() >= self.sequence.get() {
            return Err(FormatError::range("synced through", 16, place.sequence, self.synced_through.get()));
        }
        if self.flags.get() & !(FLAG_CHECKPOINT | FLAG_MORE) != 0 {
            return Err(FormatError::unsupported("batch flags", 52, 3, u64::from(self.flags.get())));
        }
        check_zeros(self.reserved.as_bytes(), "manifest batch", 54)
    }
}

/// Returns the pages of a batch with these encoded records. The caller splits longer lists of records into a run.
///
/// # Errors
/// `records` is longer than [`RECORDS_BYTES_MAX`], or `synced_through` is not below the sequence number.
pub fn encode_batch(
    place: &BatchPlace,
    synced_through: u64,
    epoch: u64,
    flags: u16,
    records: &[u8],
    record_count: u32,
) -> Result<Vec<u8>, FormatError> {
    if records.len() > RECORDS_BYTES_MAX {
        return Err(FormatError::range("records bytes", 44, RECORDS_BYTES_MAX as u64, records.len() as u64));
    }
    if synced_through >= place.sequence {
        return Err(FormatError::range("synced through", 16, place.sequence, synced_through));
    }
    let start = size_of::<BatchHeader>();
    let pages = (start + records.len()).div_ceil(PAGE_BYTES);
    let mut bytes = vec![0; pages * PAGE_BYTES];
    let header = BatchHeader {
        magic: MAGIC,
        crc: U32::new(0),
        sequence: U64::new(place.sequence),
        synced_through: U64::new(synced_through),
        generation: U64::new(place.generation),
        epoch: U64::new(epoch),
        pages: U32::new(pages as u32),
        records_bytes: U32::new(records.len() as u32),
        record_count: U32::new(record_count),
        flags: U16::new(flags),
        reserved: U16::new(0),
    };
    bytes[..start].copy_from_slice(header.as_bytes());
    bytes[start..start + records.len()].copy_from_slice(records);
    let crc = crc_with_hole(&place.nonce.to_le_bytes(), &bytes, 4..8);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    Ok(bytes)
}
