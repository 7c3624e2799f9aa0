//! The parts that every area shares: arguments, clocks, test data, directories, reports and the programs to compare
//! with.
//!
//! Nothing here imports an area. `bare` has unsafe code, as only one peer has beside it.

pub(crate) mod args;
#[allow(unsafe_code, reason = "a ring and its registered buffers, without the engine around them")]
pub(crate) mod bare;
pub(crate) mod cpus;
pub(crate) mod directory;
pub(crate) mod fio;
pub(crate) mod interrupt;
pub(crate) mod measure;
pub(crate) mod method;
pub(crate) mod model;
pub(crate) mod report;
pub(crate) mod store;
