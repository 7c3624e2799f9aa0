//! Format version and feature sets.

use crate::error::{FormatError, FormatErrorCode};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Major version this code reads and writes.
pub const VERSION_MAJOR: u16 = 0;
/// Minor version this code writes.
pub const VERSION_MINOR: u16 = 1;

/// Incompatible feature: the format is experimental; its bytes may change with the next minor version.
pub const INCOMPAT_EXPERIMENTAL: u64 = 1 << 0;
/// Incompatible feature, room kept: cluster pools.
pub const INCOMPAT_POOLS: u64 = 1 << 1;
/// Incompatible feature: layouts may name codecs other than raw.
pub const INCOMPAT_CODECS: u64 = 1 << 2;
/// Incompatible feature: frames have copies on other devices.
pub const INCOMPAT_REPLICAS: u64 = 1 << 3;
/// Incompatible feature, room kept: keyed objects.
pub const INCOMPAT_KEYED: u64 = 1 << 4;
/// Incompatible feature, room kept: encryption.
pub const INCOMPAT_ENCRYPTION: u64 = 1 << 5;

/// Incompatible features this code knows.
pub const INCOMPAT_KNOWN: u64 = INCOMPAT_EXPERIMENTAL | INCOMPAT_CODECS | INCOMPAT_REPLICAS;
/// Features this code must know to write, but not to read.
pub const RO_COMPAT_KNOWN: u64 = 0;

/// Version and feature sets as they stand in superblocks, manifest and segment headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Features {
    /// Major version: another one is not readable.
    pub major: U16,
    /// Minor version. While [`INCOMPAT_EXPERIMENTAL`] is set, another one is not readable either.
    pub minor: U16,
    /// Zero.
    pub reserved: [u8; 4],
    /// Features a reader and a writer may ignore.
    pub compat: U64,
    /// Features a reader may ignore; a writer must not write.
    pub ro_compat: U64,
    /// Features that nobody may ignore.
    pub incompat: U64,
}

const _: () = assert!(size_of::<Features>() == 32);

impl Features {
    /// What this code writes.
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

    /// The same with these incompatible features.
    #[must_use]
    pub fn with(mut self, incompat: u64) -> Self {
        self.incompat = U64::new(self.incompat.get() | incompat);
        self
    }

    /// The same with the feature of copies.
    #[must_use]
    pub fn with_replicas(self) -> Self {
        self.with(INCOMPAT_REPLICAS)
    }

    /// The same with the feature of codecs.
    #[must_use]
    pub fn with_codecs(self) -> Self {
        self.with(INCOMPAT_CODECS)
    }

    /// Whether layouts may name codecs other than raw.
    #[must_use]
    pub fn has_codecs(&self) -> bool {
        self.incompat.get() & INCOMPAT_CODECS != 0
    }

    /// Whether frames may have copies.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        self.incompat.get() & INCOMPAT_REPLICAS != 0
    }

    /// Whether this code may write a store with these features (it may read it in any case).
    #[must_use]
    pub fn writable(&self) -> bool {
        self.ro_compat.get() & !RO_COMPAT_KNOWN == 0
    }

    /// This code can read these features.
    pub(crate) fn check(&self, base: usize) -> Result<(), FormatError> {
        let unsupported = |field, offset: usize, known, found| {
            Err(FormatError::new(FormatErrorCode::Unsupported, field, base + offset, known, found))
        };
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
