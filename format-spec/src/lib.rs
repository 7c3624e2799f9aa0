//! The on-disk format of stratakv: bytes to types and back. No I/O.
//!
//! The normative text is `SPEC.md` beside this crate; every module mirrors one of its chapters. Bytes become types in two
//! steps: a page or a table is looked at as [`Unverified`], its `verify` checks magic, version, checksum, place and
//! reserved bytes, and only the [`Verified`] value it returns is accepted elsewhere.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

// Sizes from disk are bounded below 2^53 before they are multiplied: that needs a 64-bit `usize`.
const _: () = assert!(usize::BITS >= 64);

pub mod checksum;
pub mod codec;
pub mod dtype;
pub mod error;
pub mod export;
pub mod features;
pub mod frame;
pub mod ids;
pub mod layout;
pub mod manifest;
pub mod page;
pub mod rope;
pub mod segment;
pub mod superblock;
pub mod verify;

pub use checksum::{PayloadChecksum, PlaneIdentity};
pub use codec::PlaneCodec;
pub use dtype::DType;
pub use error::FormatError;
pub use ids::{DeviceIndex, FrameId, LayoutId, Location, SegmentId, SequenceId};
pub use page::PAGE_BYTES;
pub use verify::{Unverified, Verified};
