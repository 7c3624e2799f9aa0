//! The format version and the feature sets of a single-page structure.

use crate::error::FormatError;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The major version that this code reads and writes.
pub const VERSION_MAJOR: u16 = 0;
/// The minor version that this code writes.
pub const VERSION_MINOR: u16 = 1;

/// Incompatible feature: the format is experimental. Its bytes may change with the next minor version.
pub const INCOMPAT_EXPERIMENTAL: u64 = 1 << 0;
/// Incompatible feature: frames may be derived, and hold pools of pages and directories of clusters.
pub const INCOMPAT_POOLS: u64 = 1 << 1;
/// Incompatible feature: layouts may name codecs other than raw.
pub const INCOMPAT_CODECS: u64 = 1 << 2;
/// Incompatible feature: frames may have copies on other devices.
pub const INCOMPAT_REPLICAS: u64 = 1 << 3;
/// Incompatible feature, reserved: keyed objects.
pub const INCOMPAT_KEYED: u64 = 1 << 4;
/// Incompatible feature, reserved: encryption.
pub const INCOMPAT_ENCRYPTION: u64 = 1 << 5;

/// The incompatible features that this code knows.
pub const INCOMPAT_KNOWN: u64 = INCOMPAT_EXPERIMENTAL | INCOMPAT_POOLS | INCOMPAT_CODECS | INCOMPAT_REPLICAS;
/// The read-only compatible features that this code knows. A store with any other may be read but not written.
pub const RO_COMPAT_KNOWN: u64 = 0;

/// The version and feature sets in superblock slots, manifest and segment pages, and export pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Features {
    /// The major version. A reader refuses any other.
    pub major: U16,
    /// The minor version. A reader refuses any other while [`INCOMPAT_EXPERIMENTAL`] is set.
    pub minor: U16,
    /// Zero.
    pub reserved: [u8; 4],
    /// Features that readers and writers may ignore.
    pub compat: U64,
    /// Features that readers may ignore. A writer that lacks one must not write.
    pub ro_compat: U64,
    /// Features that neither readers nor writers may ignore.
    pub incompat: U64,
}

const _: () = assert!(size_of::<Features>() == 32);

impl Features {
    /// Returns the version and features of a store without copies, codecs and pools.
    #[must_use]
    pub fn current() -> Self {
        Self {
            major: U16::new(VERSION_MAJOR),
            minor: U16::new(VERSION_MINOR),
            reserved: [0; 4],
            compat: U64::new(0),
            ro_compat: U64::new(0),
            incompat: U64::new(INCOMPAT_EXPERIMENTAL),
        }
    }

    /// Adds incompatible features.
    #[must_use]
    pub fn with(mut self, incompat: u64) -> Self {
        self.incompat = U64::new(self.incompat.get() | incompat);
        self
    }

    /// Adds [`INCOMPAT_REPLICAS`].
    #[must_use]
    pub fn with_copies(self) -> Self {
        self.with(INCOMPAT_REPLICAS)
    }

    /// Adds [`INCOMPAT_CODECS`].
    #[must_use]
    pub fn with_codecs(self) -> Self {
        self.with(INCOMPAT_CODECS)
    }

    /// Adds [`INCOMPAT_POOLS`].
    #[must_use]
    pub fn with_pools(self) -> Self {
        self.with(INCOMPAT_POOLS)
    }

    /// Returns whether frames may be derived.
    #[must_use]
    pub fn has_pools(&self) -> bool {
        self.incompat.get() & INCOMPAT_POOLS != 0
    }

    /// Returns whether layouts may name codecs other than raw.
    #[must_use]
    pub fn has_codecs(&self) -> bool {
        self.incompat.get() & INCOMPAT_CODECS != 0
    }

    /// Returns whether frames may have copies on other devices.
    #[must_use]
    pub fn has_copies(&self) -> bool {
        self.incompat.get() & INCOMPAT_REPLICAS != 0
    }

    /// Returns whether this code may write a store with these features. It may read the store in any case.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.ro_compat.get() & !RO_COMPAT_KNOWN == 0
    }

    /// Checks that this code can read these features, which are at offset `base` of their structure.
    pub(crate) fn check(&self, base: usize) -> Result<(), FormatError> {
        let unsupported =
            |field, offset: usize, known, found| Err(FormatError::unsupported(field, base + offset, known, found));
        if self.major.get() != VERSION_MAJOR {
            return unsupported("major version", 0, u64::from(VERSION_MAJOR), u64::from(self.major.get()));
        }
        if self.incompat.get() & !INCOMPAT_KNOWN != 0 {
            return unsupported("incompatible features", 24, INCOMPAT_KNOWN, self.incompat.get());
        }
        if self.incompat.get() & INCOMPAT_EXPERIMENTAL != 0 && self.minor.get() != VERSION_MINOR {
            return unsupported("experimental minor version", 2, u64::from(VERSION_MINOR), u64::from(self.minor.get()));
        }
        crate::verify::check_zeros(&self.reserved, "features", base + 4)
    }
}
