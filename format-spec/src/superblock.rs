//! The superblock of a device: two slots, one page each, written in turn.

use crate::checksum::PayloadChecksum;
use crate::error::{FormatError, FormatErrorCode};
use crate::features::Features;
use crate::ids::NUMBER_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::{Unverified, Verified, check_page, seal_page};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic of a slot.
pub const MAGIC: [u8; 8] = *b"STRATAKV";
/// Slots in the file.
pub const SLOTS: usize = 2;
/// The file, inside the device directory.
pub const FILE: &str = "superblock";

/// State: a writer has the store open, or had when it stopped.
pub const STATE_OPEN: u8 = 1;
/// State: closed; `synced_through` is the last batch of the manifest.
pub const STATE_CLOSED: u8 = 2;

/// One slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Slot {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Version and features.
    pub features: Features,
    /// Counts the writes of this superblock; slot `sequence % 2` holds it.
    pub sequence: U64,
    /// The store.
    pub store_id: [u8; 16],
    /// This device.
    pub device_id: [u8; 16],
    /// Last membership epoch this device took part in.
    pub epoch: U64,
    /// Generation of the manifest in force.
    pub manifest_generation: U64,
    /// Nonce of that generation.
    pub manifest_nonce: U64,
    /// The last batch of that generation known durable when this slot was written.
    pub synced_through: U64,
    /// When the store was created, seconds since 1970.
    pub created_unix_s: U64,
    /// Bytes of every segment file of the store.
    pub segment_bytes: U64,
    /// Index of this device.
    pub device_index: U16,
    /// Devices of the store in that epoch.
    pub device_count: U16,
    /// [`PayloadChecksum`].
    pub payload_checksum: u8,
    /// [`STATE_OPEN`] or [`STATE_CLOSED`].
    pub state: u8,
    /// Copies of the manifest on this device: 2 where it is the only device, else 1, 0 on devices that hold none.
    pub manifest_copies: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = assert!(size_of::<Slot>() == 136);

/// The largest segment, in pages.
pub const SEGMENT_PAGES_MAX: u64 = 1 << 24;
/// The smallest segment, in pages.
pub const SEGMENT_PAGES_MIN: u64 = 8;
/// The most devices of a store.
pub const DEVICES_MAX: u16 = 256;

impl Slot {
    /// The page of this slot.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }

    /// The payload checksum of the store.
    #[must_use]
    pub fn checksum(&self) -> PayloadChecksum {
        PayloadChecksum::from_code(self.payload_checksum).unwrap_or_default()
    }
}

impl Unverified<'_, Slot> {
    /// Checks the page as slot `index`.
    ///
    /// # Errors
    /// Damage, another slot's page, or a version or feature this code does not know.
    pub fn verify(&self, index: usize) -> Result<Verified<Slot>, FormatError> {
        check_page(self.bytes(), "superblock", MAGIC, size_of::<Slot>())?;
        let slot = self.peek();
        if slot.sequence.get() % SLOTS as u64 != index as u64 {
            return Err(FormatError::new(
                FormatErrorCode::Identity,
                "superblock slot",
                40,
                index as u64,
                slot.sequence.get(),
            ));
        }
        let numbers = [
            ("slot sequence", 40, slot.sequence),
            ("membership epoch", 80, slot.epoch),
            ("manifest generation", 88, slot.manifest_generation),
            ("synced through", 104, slot.synced_through),
        ];
        if let Some((name, at, number)) = numbers.into_iter().find(|(_, _, number)| number.get() > NUMBER_MAX) {
            return Err(FormatError::range(name, at, NUMBER_MAX, number.get()));
        }
        let pages = slot.segment_bytes.get() / PAGE_BYTES as u64;
        if !slot.segment_bytes.get().is_multiple_of(PAGE_BYTES as u64)
            || !(SEGMENT_PAGES_MIN..=SEGMENT_PAGES_MAX).contains(&pages)
        {
            return Err(FormatError::range("segment bytes", 120, SEGMENT_PAGES_MAX, slot.segment_bytes.get()));
        }
        if PayloadChecksum::from_code(slot.payload_checksum).is_none() {
            return Err(FormatError::new(
                FormatErrorCode::Unsupported,
                "payload checksum",
                132,
                2,
                u64::from(slot.payload_checksum),
            ));
        }
        if !matches!(slot.state, STATE_OPEN | STATE_CLOSED) {
            return Err(FormatError::range("superblock state", 133, 2, u64::from(slot.state)));
        }
        if slot.manifest_generation.get() == 0 {
            return Err(FormatError::range("manifest generation", 88, 1, 0));
        }
        if slot.manifest_copies > 2 {
            return Err(FormatError::range("manifest copies", 134, 2, u64::from(slot.manifest_copies)));
        }
        let (index, count) = (slot.device_index.get(), slot.device_count.get());
        if count == 0 || count > DEVICES_MAX || index >= count {
            return Err(FormatError::range("device index", 128, u64::from(count), u64::from(index)));
        }
        crate::verify::check_zeros(&[slot.reserved], "superblock", 135)?;
        Ok(Verified::new(*slot))
    }
}

/// The slot to believe among the two pages of a superblock file: the valid one with the highest sequence.
///
/// # Errors
/// Neither slot is valid: the error of the slot that is closer to one (a version error before damage).
pub fn newest(file: &[u8]) -> Result<Verified<Slot>, FormatError> {
    let mut best: Option<Verified<Slot>> = None;
    let mut error: Option<FormatError> = None;
    for index in 0..SLOTS {
        let page = file.get(index * PAGE_BYTES..(index + 1) * PAGE_BYTES).unwrap_or_default();
        match Unverified::<Slot>::at_front(page, "superblock").and_then(|slot| slot.verify(index)) {
            Ok(slot) => {
                if best.is_none_or(|b| b.sequence.get() < slot.sequence.get()) {
                    best = Some(slot);
                }
            }
            Err(e) => {
                if error.is_none_or(|old| old.code != FormatErrorCode::Unsupported) {
                    error = Some(e);
                }
            }
        }
    }
    match (best, error) {
        // A slot of a newer format beside an older one: a newer build wrote here.
        (_, Some(e)) if e.code == FormatErrorCode::Unsupported => Err(e),
        (Some(slot), _) => Ok(slot),
        (None, Some(e)) => Err(e),
        (None, None) => Err(FormatError::truncated("superblock", SLOTS * PAGE_BYTES, file.len())),
    }
}

/// The pages a segment of `bytes` has. `None` beyond [`SEGMENT_PAGES_MAX`] or when `bytes` is no multiple of the page.
#[must_use]
pub fn segment_pages(bytes: u64) -> Option<U32> {
    let pages = bytes / PAGE_BYTES as u64;
    (bytes.is_multiple_of(PAGE_BYTES as u64) && (SEGMENT_PAGES_MIN..=SEGMENT_PAGES_MAX).contains(&pages))
        .then(|| U32::new(pages as u32))
}
