//! Batches: the atomic unit of the manifest. A batch flagged [`FLAG_MORE`] takes effect together with the next one.

use super::record::Records;
use crate::checksum::crc_with_hole;
use crate::error::{FormatError, FormatErrorCode};
use crate::ids::NUMBER_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::check_zeros;
use alloc::vec;
use alloc::vec::Vec;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic of a batch.
pub const MAGIC: [u8; 4] = *b"SKMB";
/// The most pages of a batch; what does not fit goes on in the next one ([`FLAG_MORE`]).
pub const BATCH_PAGES_MAX: u32 = 256;
/// The most bytes of records of a batch.
pub const RECORDS_BYTES_MAX: usize = BATCH_PAGES_MAX as usize * PAGE_BYTES - size_of::<BatchHeader>();
/// The batch is part of the checkpoint at the front of the file.
pub const FLAG_CHECKPOINT: u16 = 1;
/// The batch takes effect together with the one behind it.
pub const FLAG_MORE: u16 = 2;
/// The field of a length that a torn header may claim.
const BATCH_PAGES: &str = "batch pages";

/// Front of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BatchHeader {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32 of the nonce of the generation (8 bytes) and all pages of the batch with this field zero.
    pub crc: U32,
    /// Sequence number: one more than the batch before, also across generations.
    pub sequence: U64,
    /// The last batch known durable when this one was written.
    pub synced_through: U64,
    /// Generation of its manifest.
    pub generation: U64,
    /// Membership epoch.
    pub epoch: U64,
    /// Pages.
    pub pages: U32,
    /// Bytes of records behind this header; zeros up to the end of the last page.
    pub records_bytes: U32,
    /// Records.
    pub record_count: U32,
    /// [`FLAG_CHECKPOINT`], [`FLAG_MORE`].
    pub flags: U16,
    /// Zero.
    pub reserved: U16,
}

const _: () = assert!(size_of::<BatchHeader>() == 56);

/// Where a batch belongs: what its checksum and header are held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlace {
    /// Generation of the manifest.
    pub generation: u64,
    /// Nonce of that generation.
    pub nonce: u64,
    /// Sequence number expected here.
    pub sequence: u64,
}

/// A batch that was checked.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    header: &'a BatchHeader,
    records: &'a [u8],
}

impl<'a> Batch<'a> {
    /// Pages the batch at the front of `bytes` claims to have, if its magic and that number are plausible. A hint for
    /// reading just enough; nothing is verified.
    #[must_use]
    pub fn claimed_pages(bytes: &[u8]) -> Option<u32> {
        let (header, _) = BatchHeader::ref_from_prefix(bytes).ok()?;
        (header.magic == MAGIC && (1..=BATCH_PAGES_MAX).contains(&header.pages.get())).then(|| header.pages.get())
    }

    /// Checks the batch at the front of `bytes`.
    ///
    /// # Errors
    /// No batch, a damaged one, or one of another place.
    pub fn verify(bytes: &'a [u8], place: &BatchPlace) -> Result<Self, FormatError> {
        let Ok((header, _)) = BatchHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("manifest batch", size_of::<BatchHeader>(), bytes.len()));
        };
        if header.magic != MAGIC {
            return Err(FormatError::new(
                FormatErrorCode::Magic,
                "manifest batch",
                0,
                u64::from(u32::from_be_bytes(MAGIC)),
                u64::from(u32::from_be_bytes(header.magic)),
            ));
        }
        let pages = header.pages.get();
        if !(1..=BATCH_PAGES_MAX).contains(&pages) {
            return Err(FormatError::range(BATCH_PAGES, 40, u64::from(BATCH_PAGES_MAX), u64::from(pages)));
        }
        let total = pages as usize * PAGE_BYTES;
        let Some(whole) = bytes.get(..total) else {
            return Err(FormatError::truncated("manifest batch", total, bytes.len()));
        };
        let crc = crc_with_hole(&place.nonce.to_le_bytes(), whole, 4..8);
        if crc != header.crc.get() {
            return Err(FormatError::new(
                FormatErrorCode::Checksum,
                "manifest batch",
                4,
                u64::from(crc),
                u64::from(header.crc.get()),
            ));
        }
        let identity = |field, offset, expected, found| {
            if expected == found {
                return Ok(());
            }
            Err(FormatError::new(FormatErrorCode::Identity, field, offset, expected, found))
        };
        identity("batch generation", 24, place.generation, header.generation.get())?;
        identity("batch sequence", 8, place.sequence, header.sequence.get())?;
        for (field, offset, number) in [("batch sequence", 8, header.sequence), ("batch epoch", 32, header.epoch)] {
            if number.get() > NUMBER_MAX {
                return Err(FormatError::range(field, offset, NUMBER_MAX, number.get()));
            }
        }
        if header.synced_through.get() >= header.sequence.get() {
            return Err(FormatError::range("synced through", 16, place.sequence, header.synced_through.get()));
        }
        if header.flags.get() & !(FLAG_CHECKPOINT | FLAG_MORE) != 0 {
            let flags = u64::from(header.flags.get());
            return Err(FormatError::new(FormatErrorCode::Unsupported, "batch flags", 52, 3, flags));
        }
        check_zeros(header.reserved.as_bytes(), "manifest batch", 54)?;
        let start = size_of::<BatchHeader>();
        let end = start + header.records_bytes.get() as usize;
        if end > total {
            return Err(FormatError::range("records bytes", 44, total as u64, end as u64));
        }
        check_zeros(&whole[end..], "manifest batch", end)?;
        Ok(Self { header, records: &whole[start..end] })
    }

    /// Whether an error of [`Self::verify`] is what a write that a crash cut short may leave. All else has a good checksum: it was
    /// written so, and is no end of a manifest.
    #[must_use]
    pub fn may_be_torn(error: &FormatError) -> bool {
        let torn = [FormatErrorCode::Checksum, FormatErrorCode::Magic, FormatErrorCode::Truncated];
        torn.contains(&error.code) || error.field == BATCH_PAGES
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &'a BatchHeader {
        self.header
    }

    /// Whether it is part of the checkpoint.
    #[must_use]
    pub fn is_checkpoint(&self) -> bool {
        self.header.flags.get() & FLAG_CHECKPOINT != 0
    }

    /// Whether it takes effect together with the one behind it.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.header.flags.get() & FLAG_MORE != 0
    }

    /// Its records.
    #[must_use]
    pub fn records(&self) -> Records<'a> {
        Records::new(self.records, self.header.record_count.get())
    }
}

/// The pages of a batch with these encoded records. `records` longer than [`RECORDS_BYTES_MAX`] is cut off by the
/// caller; here it is an error.
///
/// # Errors
/// Too many bytes of records, or a `synced_through` that is not below the sequence number.
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
