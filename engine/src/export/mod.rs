//! A sequence out of a store as one file, and into a store again: SPEC.md section 17. Streaming, in bounded memory.

mod import;
mod stream_file;
mod write;

pub use import::ImportOptions;
pub use write::Exported;

/// Bytes of a piece of groups or token ids, about: one read from devices, one write to the file.
const PIECE_BYTES: usize = 256 << 10;
