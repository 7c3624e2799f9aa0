//! A sequence out of a store as one file, and into a store again: SPEC.md section 17. Streaming, in bounded memory.

mod export;
mod file;
mod import;

pub use export::Exported;
pub use import::ImportOptions;

/// Bytes of a piece of groups or token ids, about: one read from devices, one write to the file.
const PIECE_BYTES: usize = 256 << 10;
