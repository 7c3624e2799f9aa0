//! Export of a sequence to a file and import into another store. The engine and kvfsck agree on every file.
//!
//! - `imported`: the imported sequence equals the exported one, whatever the sizes of frames and segments.
//! - `refused`: a damaged, foreign or interrupted file is refused and leaves nothing in the store.
//! - `elements`: elements and summaries at the limits of the format.
//! - `files`: makes sequences, exports and changed files for these tests.

mod elements;
mod files;
mod imported;
mod refused;
