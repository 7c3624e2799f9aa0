//! Stores that are damaged on purpose, and what the two readers, the engine and kvfsck, say about them.

mod image;
mod judge;
mod log;
mod seal;

pub use image::{Edit, Image};
pub use judge::{Judgement, StoreContents, check, judge, recover, recover_cut};
pub use log::ManifestLog;
pub use seal::{seal, seal_page, seal_seeded};
