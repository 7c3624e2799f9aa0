//! Helpers that the tests of several crates share.
//!
//! - [`scratch`] makes directories for devices and copies them.
//! - [`TestStore`] is a store on scratch directories; [`small`] and [`medium`] are its options.
//! - [`uniform_layout`] is a layout whose layers are equal.
//! - [`GroupPattern`] and [`content::SequenceShape`] write keys and values, and check what a read returns.
//! - [`EntryShape`] makes clustered keys and checks selections of entries; [`EntrySequence`] stores such keys.
//! - [`EntryHistory`] runs random histories of methods that choose entries, beside a plain model.
//! - [`rng`] makes random numbers that follow from a seed.
//!
//! The engine uses this crate in `engine/tests` only. Unit tests inside `engine/src` cannot use it, because they would
//! see the types of two builds of the engine.
#![forbid(unsafe_code)]

pub mod content;
mod counters;
mod entries;
mod entry_history;
mod pattern;
pub mod rng;
pub mod scratch;
mod store;

pub use counters::{read_bytes, summary_bytes};
pub use entries::{EntrySequence, EntryShape};
pub use entry_history::{DeviceState, EntryHistory};
pub use pattern::{GroupPattern, uniform_layout};
pub use store::{TestStore, medium, small, small_options};
