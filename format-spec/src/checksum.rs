//! Checksums: the CRC-32 of metadata, and the payload checksum, which is bound to the identity of a plane.

use crate::ids::SequenceId;
use crate::page::{PAGE_BYTES, PAGE_CRC_OFFSET, SECTOR_BYTES};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Returns the CRC-32 (ISO-HDLC) of a page with its CRC field taken as zero.
#[must_use]
pub fn page_crc(page: &[u8; PAGE_BYTES]) -> u32 {
    crc_with_hole(&[], page, PAGE_CRC_OFFSET..SECTOR_BYTES)
}

/// Returns the CRC-32 of `seed` and then `bytes`, with the bytes of `hole` taken as zero. `hole` has at most 8 bytes.
pub fn crc_with_hole(seed: &[u8], bytes: &[u8], hole: core::ops::Range<usize>) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(seed);
    crc.update(&bytes[..hole.start]);
    crc.update(&[0; 8][..hole.len()]);
    crc.update(&bytes[hole.end..]);
    crc.finalize()
}

/// The kind of a store's payload checksum. It is chosen when the store is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum PayloadChecksum {
    /// CRC-32 (ISO-HDLC), zero-extended to 8 bytes.
    Crc32 = 1,
    /// CRC-64/NVME, the default.
    #[default]
    Crc64Nvme = 2,
}

impl PayloadChecksum {
    /// Returns the kind with this code, or `None` for an unknown code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Crc32),
            2 => Some(Self::Crc64Nvme),
            _ => None,
        }
    }

    /// Returns the checksum of `identity` and then `data`.
    #[must_use]
    pub fn compute(self, identity: &PlaneIdentity, data: &[u8]) -> u64 {
        self.compute_parts(identity, [data])
    }

    /// Returns the checksum of `identity` and then all `parts`, in order.
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

/// Returns the CRC-64/NVME of bytes without an identity. Adapter records store it.
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Returns the CRC-64/NVME state after `bytes`, from the state before them.
///
/// A state is a checksum with all bits inverted.
#[must_use]
pub fn crc64_continue(state: u64, bytes: &[u8]) -> u64 {
    let mut crc = crc_fast::Digest::new_with_init_state(crc_fast::CrcAlgorithm::Crc64Nvme, state);
    crc.update(bytes);
    !crc.finalize()
}

/// The identity of a plane, which seeds its payload checksum.
///
/// Because of the seed, the right bytes in the wrong place do not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PlaneIdentity {
    /// The nonce of the frame, kept by a move.
    pub nonce: U64,
    /// The sequence that wrote the frame.
    pub sequence: U64,
    /// The first token of the block or extent.
    pub first_token: U64,
    /// The valid tokens of the block or extent. For caller state and adapters, its bytes.
    pub tokens: U32,
    /// The layer, 0 for kinds without one.
    pub layer: U16,
    /// The descriptor kind.
    pub kind: U16,
    /// The plane: 0 = K or the only one, 1 = V.
    pub plane: U16,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<PlaneIdentity>() == 40);

impl PlaneIdentity {
    /// Returns the identity of plane 0, K or the only plane, of a block or extent.
    #[must_use]
    pub fn new(nonce: u64, sequence: SequenceId, kind: u16, layer: u16, first_token: u64, tokens: u32) -> Self {
        Self {
            nonce: U64::new(nonce),
            sequence: U64::new(sequence.0),
            first_token: U64::new(first_token),
            tokens: U32::new(tokens),
            layer: U16::new(layer),
            kind: U16::new(kind),
            plane: U16::new(0),
            reserved: [0; 6],
        }
    }

    /// Returns the identity of another plane of the same block or extent: 0 = K, 1 = V.
    #[must_use]
    #[inline]
    pub fn with_plane(mut self, plane: u16) -> Self {
        self.plane = U16::new(plane);
        self
    }
}
