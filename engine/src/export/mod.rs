//! Exporting a sequence as one file, and importing it: SPEC.md chapter 17.
//!
//! Both stream piece by piece in bounded memory. A piece is verified before it is used. An import becomes visible with
//! the commit after its last piece, so that a damaged or truncated file leaves nothing.

mod import;
mod stream_file;
mod write;

pub use import::ImportOptions;
pub use write::Exported;

/// About the bytes of a piece of groups or token ids: one read from devices, one write to the file.
const PIECE_BYTES: usize = 256 << 10;
