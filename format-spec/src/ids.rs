//! Identifiers and places.

use core::fmt;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The largest of the numbers that only grow: ids of frames and sequences, LSNs, generations, epochs, sequence numbers of slots and
/// batches, bytes written over the life of a store. Nobody gets there; whoever counts on from what a file says does not overflow.
pub const NUMBER_MAX: u64 = 1 << 62;
/// The largest number of a segment or a layout.
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
    /// A device of a store, counted from 0.
    DeviceIndex(u16)
);
id!(
    /// A segment of one device. Its file is `segments/` and this number in 8 hexadecimal digits.
    SegmentId(u32)
);
id!(
    /// A frame. Stable for its life, also when it is moved; never reused.
    FrameId(u64)
);
id!(
    /// A sequence. Never reused.
    SequenceId(u64)
);
id!(
    /// A layout as numbered in the manifest.
    LayoutId(u32)
);

/// A run of pages in a segment of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLocation {
    /// Segment id.
    pub segment: U32,
    /// First page, counted from the start of the segment file.
    pub page: U32,
    /// Pages.
    pub pages: U32,
    /// Device index.
    pub device: U16,
    /// Zero.
    pub reserved: U16,
}

const _: () = assert!(size_of::<RawLocation>() == 16);

/// A run of pages in a segment of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// Device.
    pub device: DeviceIndex,
    /// Segment of that device.
    pub segment: SegmentId,
    /// First page, counted from the start of the segment file.
    pub page: u32,
    /// Pages.
    pub pages: u32,
}

impl Location {
    /// Byte offset in the segment file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.page as u64 * crate::PAGE_BYTES as u64
    }

    /// Length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.pages as u64 * crate::PAGE_BYTES as u64
    }

    /// The bytes of this place.
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

    /// The place in these bytes.
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
