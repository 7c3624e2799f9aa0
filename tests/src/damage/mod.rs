//! Images of stores that are broken on purpose: what both readers, the engine and kvfsck, make of them.

mod image;
mod judge;
mod log;
mod seal;

pub use image::{Edit, Image};
pub use judge::{Held, Judgement, judge, recover, recover_cut};
pub use log::Log;
pub use seal::{seal, seal_page, seal_seeded};
