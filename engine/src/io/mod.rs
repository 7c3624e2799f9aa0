//! Memory, files, drivers and the threads that run them: everything that touches the operating system. Knows nothing of the
//! engine.
//!
//! [`buffer::arena`] lends page-aligned buffers; [`file::os_directory`] opens a device directory and its files; a
//! [`driver::interface::Driver`] moves bytes between the two; [`scheduler`] runs drivers on threads and hands them batches.

pub(crate) mod buffer;
pub(crate) mod coverage;
pub(crate) mod driver;
pub(crate) mod file;
pub(crate) mod planted;
pub(crate) mod scheduler;
pub(crate) mod seams;
#[cfg(feature = "sim")]
pub(crate) mod sim;

#[cfg(test)]
pub(crate) mod tests;

pub use buffer::slab::PageBacking;
pub(crate) use coverage::coverage;
pub(crate) use planted::planted;
