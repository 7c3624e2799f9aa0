//! The on-disk format of stratakv: conversion between bytes and types, without I/O.
//!
//! The normative text is `SPEC.md` beside this crate. Each module implements one of its chapters:
//!
//! | module | chapter |
//! |---|---|
//! | [`features`], [`page`], [`verify`] | 2 versions and features, 3 pages and sectors |
//! | [`superblock`] | 5 superblock |
//! | [`manifest`] | 6 manifest, 7 records |
//! | [`layout`], [`rope`], [`codec`], [`dtype`] | 8 layouts and blocks |
//! | [`segment`] | 9 segments |
//! | [`frame`] | 10 frames, 11 descriptors |
//! | [`pool`] | 11 pools and directories of clusters |
//! | [`checksum`] | 12 identities and checksums |
//! | [`export`] | 17 a sequence in one file |
//!
//! A reader turns bytes into types in two steps:
//!
//! 1. [`Unverified`] views a page or a header as a structure. It checks nothing but the length.
//! 2. Its `verify` checks magic, version, checksum, place and reserved bytes, and returns a [`Verified`] value.
//!
//! Batches and frame headers do both steps in one call: [`manifest::Batch::verify`] and [`frame::FrameView::verify`].
//! Code outside this crate accepts only verified structures.
//!
//! # Example
//! ```
//! use stratakv_format::error::FormatErrorCode;
//! use stratakv_format::{PAGE_BYTES, superblock};
//!
//! let zeros = [0; superblock::SLOTS * PAGE_BYTES];
//! let error = superblock::newest(&zeros).unwrap_err();
//! assert_eq!(error.code, FormatErrorCode::Magic);
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

// Sizes from disk are below 2^53 before they are multiplied. The products fit only in a 64-bit `usize`.
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
pub mod pool;
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
