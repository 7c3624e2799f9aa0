//! A sequence in one file, independent of any store: an export page, then pieces in a fixed order.
//!
//! - `page`: the export page, which says what follows
//! - `piece`: pieces and their headers
//!
//! # Order of the pieces
//! 1. [`PIECE_LAYOUT`], then [`PIECE_KEY`] and [`PIECE_STATE`] if the page has them
//! 2. [`PIECE_TOKEN_IDS`], as many as needed
//! 3. for each layer with KV: [`PIECE_GROUPS`], each followed by [`PIECE_SUMMARY`] if the sequence carries summaries,
//!    then [`PIECE_TAIL`] for the tokens that fill no group
//! 4. [`PIECE_END`]
//!
//! The code that reads a file checks this order. This module checks each page and piece by itself.

mod page;
mod piece;

pub use page::{ExportPage, MAGIC};
pub use piece::{
    ExportEnd, PIECE_ALIGNMENT, PIECE_BYTES_MAX, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_LAYOUT, PIECE_MAGIC,
    PIECE_STATE, PIECE_SUMMARY, PIECE_TAIL, PIECE_TOKEN_IDS, Piece, PieceHeader, piece_checksum,
};

use crate::frame::SUMMARY_MIN_MAX;

/// The summaries that a sequence may carry: bit `1 << (kind - 1)` per summary kind.
pub const SUMMARIES_KNOWN: u32 = 1 << (SUMMARY_MIN_MAX - 1);
