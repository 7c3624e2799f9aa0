//! Tests of buffers, directories and the progress of operations, and what other tests of the room share.
//!
//! `bare` is the loop that the driver is measured against, and `sandbox` restricts a process.

mod arena;
pub(crate) mod bare;
mod os_directory;
mod progress;
pub(crate) mod sandbox;

/// Prints why a test was skipped. It writes to standard error, because the test runner hides what passing tests print.
pub(crate) fn skipped(why: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
