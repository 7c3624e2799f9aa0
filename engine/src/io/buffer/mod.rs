//! Buffers: memory that the system reads into and writes from.
//!
//! | Type | What it is | File |
//! |---|---|---|
//! | [`arena::Arena`] | leases of whole pages out of slabs | `arena.rs` |
//! | [`lease::Lease`] | pages of an arena, with the I/O in flight on them | `lease.rs` |
//! | [`slab::Slab`] | 2 MiB of memory, on a huge page if possible | `slab.rs` |
//! | [`region::ReadRegion`] | memory of the embedder that reads fill | `region.rs` |
//! | [`aligned::AlignedBuf`] | aligned heap memory for small I/O | `aligned.rs` |
//!
//! The obligations of the unsafe code are listed in `UNSAFE.md`.

pub(crate) mod aligned;
pub(crate) mod arena;
pub(crate) mod lease;
pub(crate) mod pages;
pub(crate) mod region;
mod sizes;
pub(crate) mod slab;
mod slab_table;

pub(crate) use sizes::{PAGE_BYTES, SLAB_BYTES};
