//! The payload checksum of a plane, computed over bytes that arrive in parts.

use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use zerocopy::IntoBytes;

/// A payload checksum in progress. It stays on the stack, because a box would cost an allocation per plane.
#[allow(clippy::large_enum_variant)]
pub(super) enum Digest {
    Crc32(crc32fast::Hasher),
    Crc64(crc_fast::Digest),
}

impl Digest {
    /// Starts with the identity of the plane (SPEC.md chapter 12).
    pub(super) fn new(kind: PayloadChecksum, identity: &PlaneIdentity) -> Self {
        let mut digest = match kind {
            PayloadChecksum::Crc32 => Self::Crc32(crc32fast::Hasher::new()),
            PayloadChecksum::Crc64Nvme => Self::Crc64(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme)),
        };
        digest.update(identity.as_bytes());
        digest
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc32(crc) => crc.update(bytes),
            Self::Crc64(crc) => crc.update(bytes),
        }
    }

    pub(super) fn finish(self) -> u64 {
        match self {
            Self::Crc32(crc) => u64::from(crc.finalize()),
            Self::Crc64(crc) => crc.finalize(),
        }
    }
}
