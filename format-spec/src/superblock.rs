//! The superblock of a device: two slots of one page each. A writer alternates between them.

use crate::checksum::PayloadChecksum;
use crate::error::{FormatError, FormatErrorCode};
use crate::features::Features;
use crate::ids::NUMBER_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::{Unverified, Verified, check_page, seal_page};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of a slot.
pub const MAGIC: [u8; 8] = *b"STRATAKV";
/// The number of slots in the file.
pub const SLOTS: usize = 2;
/// The name of the file in the device directory.
pub const FILE: &str = "superblock";

/// State: a writer has the store open, or stopped without closing it.
pub const STATE_OPEN: u8 = 1;
/// State: closed. `synced_through` is the last batch of the manifest.
pub const STATE_CLOSED: u8 = 2;

/// One slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Slot {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The version and features.
    pub features: Features,
    /// The number of writes of this superblock. `sequence % 2` is the slot.
    pub sequence: U64,
    /// The id of the store.
    pub store_id: [u8; 16],
    /// The id of this device.
    pub device_id: [u8; 16],
    /// The last membership epoch that this device took part in.
    pub epoch: U64,
    /// The generation of the manifest in force.
    pub manifest_generation: U64,
    /// The nonce of that generation.
    pub manifest_nonce: U64,
    /// The last batch of that generation known to be durable when the slot was written.
    pub synced_through: U64,
    /// The creation time of the store, seconds since 1970.
    pub created_unix_s: U64,
    /// Bytes of every segment file of the store.
    pub segment_bytes: U64,
    /// The index of this device.
    pub device_index: U16,
    /// The number of devices of the store in that epoch.
    pub device_count: U16,
    /// [`PayloadChecksum`].
    pub payload_checksum: u8,
    /// [`STATE_OPEN`] or [`STATE_CLOSED`].
    pub state: u8,
    /// The copies of that manifest generation on this device: at most 2 on the only device of a store, else at most 1.
    pub manifest_copies: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = assert!(size_of::<Slot>() == 136);

/// The most pages of a segment.
pub const SEGMENT_PAGES_MAX: u64 = 1 << 24;
/// The fewest pages of a segment.
pub const SEGMENT_PAGES_MIN: u64 = 8;
/// The most devices of a store.
pub const DEVICES_MAX: u16 = 256;

impl Slot {
    /// Returns the page of this slot.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }

    /// Returns the payload checksum of the store.
    #[must_use]
    pub fn checksum(&self) -> PayloadChecksum {
        PayloadChecksum::from_code(self.payload_checksum).unwrap_or_default()
    }

    fn check_ranges(&self) -> Result<(), FormatError> {
        let numbers = [
            ("slot sequence", 40, self.sequence),
            ("membership epoch", 80, self.epoch),
            ("manifest generation", 88, self.manifest_generation),
            ("synced through", 104, self.synced_through),
        ];
        if let Some((name, at, number)) = numbers.into_iter().find(|(_, _, number)| number.get() > NUMBER_MAX) {
            return Err(FormatError::range(name, at, NUMBER_MAX, number.get()));
        }
        if segment_pages(self.segment_bytes.get()).is_none() {
            return Err(FormatError::range("segment bytes", 120, SEGMENT_PAGES_MAX, self.segment_bytes.get()));
        }
        if PayloadChecksum::from_code(self.payload_checksum).is_none() {
            return Err(FormatError::unsupported("payload checksum", 132, 2, u64::from(self.payload_checksum)));
        }
        if !matches!(self.state, STATE_OPEN | STATE_CLOSED) {
            return Err(FormatError::range("superblock state", 133, 2, u64::from(self.state)));
        }
        if self.manifest_generation.get() == 0 {
            return Err(FormatError::range("manifest generation", 88, 1, 0));
        }
        if self.manifest_copies > 2 {
            return Err(FormatError::range("manifest copies", 134, 2, u64::from(self.manifest_copies)));
        }
        let (index, count) = (self.device_index.get(), self.device_count.get());
        if count == 0 || count > DEVICES_MAX || index >= count {
            return Err(FormatError::range("device index", 128, u64::from(count), u64::from(index)));
        }
        Ok(())
    }
}

impl Unverified<'_, Slot> {
    /// Checks the page as slot `index`.
    ///
    /// # Errors
    /// The page is damaged or belongs to the other slot, or this code does not know its version or a feature.
    pub fn verify(&self, index: usize) -> Result<Verified<Slot>, FormatError> {
        check_page(self.bytes(), "superblock", MAGIC, size_of::<Slot>())?;
        let slot = self.peek();
        if slot.sequence.get() % SLOTS as u64 != index as u64 {
            let (expected, found) = (index as u64, slot.sequence.get());
            return Err(FormatError::new(FormatErrorCode::Identity, "superblock slot", 40, expected, found));
        }
        slot.check_ranges()?;
        crate::verify::check_zeros(&[slot.reserved], "superblock", 135)?;
        Ok(Verified::new(*slot))
    }
}

/// Returns the slot in force of a superblock file: the valid one with the higher sequence number.
///
/// # Errors
/// A slot is unsupported, because a newer version wrote to this device. Or neither slot is valid.
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
        (_, Some(e)) if e.code == FormatErrorCode::Unsupported => Err(e),
        (Some(slot), _) => Ok(slot),
        (None, Some(e)) => Err(e),
        (None, None) => Err(FormatError::truncated("superblock", SLOTS * PAGE_BYTES, file.len())),
    }
}

/// Returns the pages of a segment of `bytes`, or `None` if `bytes` is not a multiple of the page or out of the limits.
#[must_use]
pub fn segment_pages(bytes: u64) -> Option<U32> {
    let pages = bytes / PAGE_BYTES as u64;
    (bytes.is_multiple_of(PAGE_BYTES as u64) && (SEGMENT_PAGES_MIN..=SEGMENT_PAGES_MAX).contains(&pages))
        .then(|| U32::new(pages as u32))
}
