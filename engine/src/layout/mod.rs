//! The layout of a sequence: tensor geometry, dtype and group size to block geometry. Pure.

mod geometry;
mod placement;
mod tensor;

pub(crate) use geometry::part_groups;
pub use geometry::{KvLayout, KvLayoutBuilder, LayerSpec};
pub(crate) use placement::{Candidate, Placed};
pub(crate) use tensor::narrow;
pub use tensor::{Element, TensorView};
