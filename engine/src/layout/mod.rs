//! The layout of a sequence: tensor geometry, dtype and group size to block geometry. Pure.

mod geometry;
mod placement;
mod tensor;

pub use geometry::{KvLayout, KvLayoutBuilder, LayerSpec};
pub(crate) use geometry::{is_encoded, part_groups};
pub(crate) use placement::{Candidate, Placed};
pub(crate) use tensor::narrow;
pub use tensor::{Element, TensorView};
