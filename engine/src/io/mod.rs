//! I/O: everything that touches a device. It knows nothing of frames, segments or sequences.
//!
//! ```text
//!   log, read, sequence, maintenance      callers
//!        |  batches        ^  outcomes
//!   scheduler   threads that serve devices, by priority
//!        |  operations     ^  completions
//!   driver      io_uring, threads, runtimes
//!        |  system calls
//!   file  buffer            device directories, memory
//! ```
//!
//! | Part | What it does |
//! |---|---|
//! | [`scheduler`] | takes batches from callers and feeds the drivers |
//! | [`driver`] | moves bytes between files and memory |
//! | [`file`] | opens device directories and their files |
//! | [`buffer`] | lends page-aligned memory |
//! | [`seams`] | clock, random numbers and scheduling as traits, for a simulator |
//! | [`coverage`](mod@coverage), [`planted`](mod@planted) | marks and faults for simulated runs |
//!
//! Lock order inside the room: a device's sync lock, the threads of a store, then queues and arenas, which are leaves.

pub(crate) mod buffer;
pub(crate) mod coverage;
pub(crate) mod driver;
pub(crate) mod file;
pub(crate) mod planted;
pub(crate) mod replacement;
pub(crate) mod scheduler;
pub(crate) mod seams;
mod signals;

#[cfg(test)]
pub(crate) mod tests;

pub use buffer::slab::PageBacking;
pub(crate) use coverage::coverage;
pub(crate) use planted::planted;
