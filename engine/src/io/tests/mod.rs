//! Buffers and directories.

mod arena;
pub(crate) mod bare;
mod os_directory;
mod progress;
pub(crate) mod sandbox;

/// Says what a test left out, past the test runner, which keeps what tests print that pass.
pub(crate) fn skipped(why: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
