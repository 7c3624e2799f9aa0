//! Ids, and locations of frames.

use core::fmt;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The greatest of the numbers that only grow.
///
/// They are ids of frames and sequences, LSNs, generations, epochs, and sequence numbers of slots and batches. The
/// bytes written over the life of a store have the same limit. A number on disk can therefore be incremented without
/// overflow.
pub const NUMBER_MAX: u64 = 1 << 62;
/// The greatest number of a segment or a layout.
pub const INDEX_MAX: u32 = 1 << 31;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $raw);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// The index of a device of a store, from 0.
    DeviceIndex(u16)
);
id!(
    /// The id of a segment on one device. Its file is `segments/` and this number in 8 hexadecimal digits.
    SegmentId(u32)
);
id!(
    /// The id of a frame. A move keeps it, and no id is used twice.
    FrameId(u64)
);
id!(
    /// The id of a sequence. No id is used twice.
    SequenceId(u64)
);
id!(
    /// The number of a layout in the manifest.
    LayoutId(u32)
);

/// A [`Location`] on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLocation {
    /// The segment id.
    pub segment: U32,
    /// The first page, counted from the start of the segment file.
    pub page: U32,
    /// The number of pages.
    pub pages: U32,
    /// The device index.
    pub device: U16,
    /// Zero.
    pub reserved: U16,
}

const _: () = assert!(size_of::<RawLocation>() == 16);

/// The location of a frame: consecutive pages of a segment on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// The device.
    pub device: DeviceIndex,
    /// The segment on that device.
    pub segment: SegmentId,
    /// The first page, counted from the start of the segment file.
    pub page: u32,
    /// The number of pages.
    pub pages: u32,
}

impl Location {
    /// Returns the byte offset in the segment file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.page as u64 * crate::PAGE_BYTES as u64
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.pages as u64 * crate::PAGE_BYTES as u64
    }

    /// Converts the location to its bytes on disk.
    #[must_use]
    pub fn to_raw(self) -> RawLocation {
        RawLocation {
            segment: U32::new(self.segment.0),
            page: U32::new(self.page),
            pages: U32::new(self.pages),
            device: U16::new(self.device.0),
            reserved: U16::new(0),
        }
    }

    /// Converts a location on disk. It checks nothing.
    #[must_use]
    pub fn from_raw(raw: &RawLocation) -> Self {
        Self {
            device: DeviceIndex(raw.device.get()),
            segment: SegmentId(raw.segment.get()),
            page: raw.page.get(),
            pages: raw.pages.get(),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}, segment {:08x}, page {} (+{})", self.device, self.segment.0, self.page, self.pages)
    }
}
