//! The on-disk format of stratakv: bytes to types and back. No I/O, no allocation beyond what a parsed table needs.
#![no_std]
#![forbid(unsafe_code)]

pub mod dtype;
pub use dtype::DType;
