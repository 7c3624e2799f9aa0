//! Checksums: CRC-32 of metadata, and the payload checksum, bound to the identity of what it covers.

use crate::ids::SequenceId;
use crate::page::{PAGE_BYTES, PAGE_CRC_OFFSET, SECTOR_BYTES};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// CRC-32 (ISO-HDLC) of a page with its CRC field taken as zero.
#[must_use]
pub fn page_crc(page: &[u8; PAGE_BYTES]) -> u32 {
    crc_with_hole(&[], page, PAGE_CRC_OFFSET..SECTOR_BYTES)
}

/// CRC-32 of `seed` and then `bytes`, with the bytes of `hole` taken as zero.
pub fn crc_with_hole(seed: &[u8], bytes: &[u8], hole: core::ops::Range<usize>) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(seed);
    crc.update(&bytes[..hole.start]);
    crc.update(&[0; 8][..hole.len()]);
    crc.update(&bytes[hole.end..]);
    crc.finalize()
}

/// The payload checksum of a store, chosen when the store is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum PayloadChecksum {
    /// CRC-32 (ISO-HDLC), in the lower half of its 8-byte field.
    Crc32 = 1,
    /// CRC-64/NVME. The default by measurement.
    #[default]
    Crc64Nvme = 2,
}

impl PayloadChecksum {
    /// The kind with this code, or `None`.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Crc32),
            2 => Some(Self::Crc64Nvme),
            _ => None,
        }
    }

    /// Checksum of `identity` and then `data`.
    #[must_use]
    pub fn compute(self, identity: &PlaneIdentity, data: &[u8]) -> u64 {
        self.compute_parts(identity, [data])
    }

    /// [`Self::compute`] of data that lies in several parts, in order.
    #[must_use]
    pub fn compute_parts<'a>(self, identity: &PlaneIdentity, parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        match self {
            Self::Crc32 => {
                let mut crc = crc32fast::Hasher::new();
                crc.update(identity.as_bytes());
                parts.into_iter().for_each(|part| crc.update(part));
                u64::from(crc.finalize())
            }
            Self::Crc64Nvme => {
                let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
                crc.update(identity.as_bytes());
                parts.into_iter().for_each(|part| crc.update(part));
                crc.finalize()
            }
        }
    }
}

/// CRC-64/NVME of bytes by themselves: what names an adapter by what it says.
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// What a payload checksum is seeded with: which bytes these are. The right bytes in the wrong place do not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PlaneIdentity {
    /// Nonce of the frame, kept when the frame is moved.
    pub nonce: U64,
    /// The sequence that wrote it.
    pub sequence: U64,
    /// First token of the piece.
    pub first_token: U64,
    /// Valid tokens in the piece; for caller state and adapters its bytes.
    pub tokens: U32,
    /// Layer, 0 where there is none.
    pub layer: U16,
    /// Descriptor kind.
    pub kind: U16,
    /// Plane: 0 = K or the only one, 1 = V.
    pub plane: U16,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<PlaneIdentity>() == 40);

impl PlaneIdentity {
    /// The identity of one plane of a piece.
    #[must_use]
    pub fn new(
        nonce: u64,
        sequence: SequenceId,
        kind: u16,
        layer: u16,
        first_token: u64,
        tokens: u32,
        plane: u16,
    ) -> Self {
        Self {
            nonce: U64::new(nonce),
            sequence: U64::new(sequence.0),
            first_token: U64::new(first_token),
            tokens: U32::new(tokens),
            layer: U16::new(layer),
            kind: U16::new(kind),
            plane: U16::new(plane),
            reserved: [0; 6],
        }
    }
}
