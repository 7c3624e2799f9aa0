//! The layout of a sequence: dtype, group size, and the geometry of each layer.
//!
//! A layout is stored in a Layout record and in every frame header. [`Layout`] is its form in memory.
//!
//! - `raw` holds the structures on disk.
//! - `encoding` converts between both forms.
//! - `check` checks the ranges of a layout.
//! - `block` computes the offsets of blocks in an extent.
//!
//! # Invariants
//! - Layouts with the same meaning have the same bytes.
//! - Every [`Layout`] that [`Layout::decode`] returns passes [`Layout::check`].
//!
//! # Example
//! ```
//! use stratakv_format::DType;
//! use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
//!
//! let layer =
//!     LayerGeometry { kv_heads: 8, key_dim: 128, value_dim: 128, window: None, rope: None, codecs: RAW_PLANES };
//! let layout = Layout {
//!     dtype: DType::F16,
//!     group_tokens: 8,
//!     padded_planes: false,
//!     fingerprint: [7; 32],
//!     layers: vec![layer],
//! };
//! layout.check()?;
//!
//! let mut bytes = Vec::new();
//! layout.encode(&mut bytes);
//! assert_eq!(Layout::decode(&bytes)?, layout);
//! assert_eq!(layout.block(&layer).block_bytes, 32_768);
//! # Ok::<(), stratakv_format::FormatError>(())
//! ```

mod block;
mod check;
mod encoding;
mod raw;

pub use block::BlockGeometry;
pub use raw::{
    FLAG_CODECS, FLAG_PADDED_PLANES, FLAG_ROPE, LAYER_FULL, LAYER_NONE, LAYER_SLIDING, RawCodecs, RawLayer,
    RawLayoutHeader,
};

use crate::codec::{PlaneCodec, PlaneShape};
use crate::dtype::DType;
use crate::rope::{ROPES_MAX, Rope};
use alloc::vec::Vec;

/// The most layers.
pub const LAYERS_MAX: usize = 1024;
/// The most bytes of an encoded layout: all layers, rotations and codecs.
pub const LAYOUT_BYTES_MAX: usize = encoding::encoded_bytes(LAYERS_MAX, ROPES_MAX, true);
/// The most KV heads of a layer.
pub const KV_HEADS_MAX: u16 = 128;
/// The greatest head dim of keys or values.
pub const HEAD_DIM_MAX: u16 = 1024;
/// The most tokens of a group.
pub const GROUP_TOKENS_MAX: u16 = 128;
/// The most bytes of a block with raw planes.
pub const BLOCK_BYTES_MAX: usize = 1 << 20;

/// The codecs of a layer whose K and V planes are both raw.
pub const RAW_PLANES: [PlaneCodec; 2] = [PlaneCodec::Raw; 2];

/// The geometry of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGeometry {
    /// The number of KV heads, 0 for a layer without KV.
    pub kv_heads: u16,
    /// The head dim of keys, elements.
    pub key_dim: u16,
    /// The head dim of values, elements. 0 if values are a prefix of the keys.
    pub value_dim: u16,
    /// The window of a sliding layer, tokens.
    pub window: Option<u32>,
    /// The rotation of its keys, if the layout states it.
    pub rope: Option<Rope>,
    /// The codecs of the K and the V plane of its groups.
    pub codecs: [PlaneCodec; 2],
}

impl LayerGeometry {
    /// Returns whether the layer has keys and values.
    #[must_use]
    pub const fn has_kv(&self) -> bool {
        self.kv_heads > 0
    }

    /// Returns the elements of one token's keys, all heads.
    #[must_use]
    pub const fn key_elements(&self) -> usize {
        self.kv_heads as usize * self.key_dim as usize
    }

    /// Returns the elements of one token's values, all heads.
    #[must_use]
    pub const fn value_elements(&self) -> usize {
        self.kv_heads as usize * self.value_dim as usize
    }

    /// Returns whether a plane of its groups has a codec other than raw.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.codecs != RAW_PLANES
    }

    /// Returns the `codec` field of a descriptor of its groups.
    #[must_use]
    pub const fn codec_code(&self) -> u16 {
        self.codecs[0].code() as u16 | (self.codecs[1].code() as u16) << 8
    }

    /// Returns the planes of a block: 2 for K and V, 1 for K alone.
    #[must_use]
    pub const fn planes(&self) -> usize {
        if self.value_dim == 0 { 1 } else { 2 }
    }
}

/// A layout: the meaning of the bytes of a sequence. Two sequences are compatible if their layouts are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// The element type.
    pub dtype: DType,
    /// The tokens of a group, G.
    pub group_tokens: u16,
    /// True if each plane starts on a page, so that V can be read alone.
    pub padded_planes: bool,
    /// The fingerprint of model, weights and positional encoding.
    pub fingerprint: [u8; 32],
    /// The geometry of each layer.
    pub layers: Vec<LayerGeometry>,
}

impl Layout {
    /// Returns the shape of a plane of a layer's groups: 0 = K, 1 = V.
    #[must_use]
    pub fn plane_shape(&self, layer: &LayerGeometry, plane: usize) -> PlaneShape {
        let dims = usize::from(if plane == 0 { layer.key_dim } else { layer.value_dim });
        let (heads, tokens) = (usize::from(layer.kv_heads), usize::from(self.group_tokens));
        PlaneShape { plane, heads, tokens, dims, dtype: self.dtype }
    }

    /// Returns whether a plane of any layer has a codec other than raw.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.layers.iter().any(LayerGeometry::is_encoded)
    }

    /// Returns the distinct rotations of its layers, in the order of the first layer that has each.
    #[must_use]
    pub fn ropes(&self) -> Vec<Rope> {
        let mut ropes = Vec::new();
        for rope in self.layers.iter().filter_map(|layer| layer.rope) {
            if !ropes.contains(&rope) {
                ropes.push(rope);
            }
        }
        ropes
    }
}
