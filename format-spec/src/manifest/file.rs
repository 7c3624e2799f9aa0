//! The header page of a manifest file, and the names of manifest files.

use crate::error::FormatError;
use crate::features::Features;
use crate::ids::NUMBER_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::{Unverified, Verified, check_page, check_zeros, seal_page};
use alloc::format;
use alloc::string::String;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of the header page.
pub const MAGIC: [u8; 8] = *b"SKVMANIF";
/// The most bytes of a manifest file.
pub const FILE_BYTES_MAX: u64 = 4 << 30;
/// The directory of the manifests, in the device directory.
pub const DIRECTORY: &str = "manifest";

/// The first page of a manifest file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ManifestPage {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The version and features.
    pub features: Features,
    /// The id of the store.
    pub store_id: [u8; 16],
    /// The generation. It grows with every checkpoint.
    pub generation: U64,
    /// A random number of this generation. It seeds the checksums of its batches.
    pub nonce: U64,
    /// The generation that this one replaces, 0 for the first.
    pub previous_generation: U64,
    /// The sequence number of the first batch in this file.
    pub first_batch: U64,
    /// The creation time of the generation, seconds since 1970.
    pub created_unix_s: U64,
    /// The index of the device that stores the file.
    pub device: U16,
    /// The number of the copy on that device, 0 or 1.
    pub copy: u8,
    /// Zero.
    pub reserved: [u8; 5],
}

const _: () = assert!(size_of::<ManifestPage>() == 104);

impl ManifestPage {
    /// Returns the bytes of the page.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }
}

impl Unverified<'_, ManifestPage> {
    /// Checks the page itself. The caller compares store, generation, nonce, device and copy with the place.
    ///
    /// # Errors
    /// The page is damaged, or this code does not know its version or a feature.
    pub fn verify(&self) -> Result<Verified<ManifestPage>, FormatError> {
        check_page(self.bytes(), "manifest page", MAGIC, size_of::<ManifestPage>())?;
        let page = self.peek();
        if page.copy > 1 {
            return Err(FormatError::range("manifest copy", 98, 1, u64::from(page.copy)));
        }
        if page.generation.get() == 0 {
            return Err(FormatError::range("manifest generation", 56, 1, 0));
        }
        let numbers = [
            ("manifest generation", 56, page.generation),
            ("generation before", 72, page.previous_generation),
            ("first batch", 80, page.first_batch),
        ];
        if let Some((name, at, number)) = numbers.into_iter().find(|(_, _, number)| number.get() > NUMBER_MAX) {
            return Err(FormatError::range(name, at, NUMBER_MAX, number.get()));
        }
        check_zeros(&page.reserved, "manifest page", 99)?;
        Ok(Verified::new(*page))
    }
}

/// Returns the path of a copy of a generation in the device directory.
#[must_use]
pub fn file_name(generation: u64, copy: u8) -> String {
    format!("{DIRECTORY}/{generation:016x}-{copy}")
}

/// Returns generation and copy of the file with this name in [`DIRECTORY`], or `None` if no manifest has it.
#[must_use]
pub fn parse_file_name(name: &str) -> Option<(u64, u8)> {
    let (generation, copy) = name.split_once('-')?;
    let hex = generation.len() == 16 && generation.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let copy = match copy {
        "0" => 0,
        "1" => 1,
        _ => return None,
    };
    if hex { Some((u64::from_str_radix(generation, 16).ok()?, copy)) } else { None }
}
