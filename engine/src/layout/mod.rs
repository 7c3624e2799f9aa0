//! The layout of a sequence, the placement of its frames, and the caller's tensors. This room is pure: it does no I/O.
//!
//! - `geometry` derives the block geometry from tensor shapes, dtype, group size and codecs.
//! - `placement` chooses the devices of the next frame.
//! - `tensor` holds keys and values as the caller has them, and converts rows to the stored dtype.

mod geometry;
mod placement;
mod tensor;

pub use geometry::{KvLayout, KvLayoutBuilder, LayerSpec};
pub(crate) use geometry::{is_encoded, part_groups};
pub(crate) use placement::{Candidate, PlacedBytes};
pub use tensor::{Element, TensorView};

pub use stratakv_format::rope::{Rope, RopePairing, RopeScaling};
pub use stratakv_format::{DType, PlaneCodec};
