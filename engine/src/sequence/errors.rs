//! Errors that several files of this folder report in the same words.

use crate::error::{Error, ErrorKind};

/// Returns the error for memory that `memory_limit` does not leave for `what`.
pub(super) fn no_memory(what: &str) -> Error {
    let text = format!("{what}: no memory within memory_limit; close handles or raise memory_limit");
    Error::new(ErrorKind::MemoryLimit, text)
}

/// Returns the error for tables that do not fit into `memory_limit`.
pub(super) fn no_index_memory() -> Error {
    no_memory("the index of the sequence")
}

/// Returns the error for a sealed group that neither memory nor a frame holds.
pub(super) fn lost_group(group: u64, layer: usize) -> Error {
    let text = format!("group {group} of layer {layer} is neither in memory nor in a frame");
    Error::new(ErrorKind::Corruption, text)
}
