//! Checks of the ranges of a layout.

use super::raw::{RawLayer, RawLayoutHeader};
use super::{BLOCK_BYTES_MAX, GROUP_TOKENS_MAX, HEAD_DIM_MAX, KV_HEADS_MAX, LAYERS_MAX, LayerGeometry, Layout};
use crate::error::FormatError;
use crate::rope::{ROPES_MAX, Rope};

impl Layout {
    /// Checks every range of this layout.
    ///
    /// # Errors
    /// The first field out of range, with its bound.
    pub fn check(&self) -> Result<(), FormatError> {
        let layers = self.layers.len();
        if layers == 0 || layers > LAYERS_MAX {
            return Err(FormatError::range("layers", 4, LAYERS_MAX as u64, layers as u64));
        }
        let group_tokens = self.group_tokens;
        if group_tokens == 0 || group_tokens > GROUP_TOKENS_MAX {
            return Err(FormatError::range("group tokens", 6, u64::from(GROUP_TOKENS_MAX), u64::from(group_tokens)));
        }
        if !self.layers.iter().any(LayerGeometry::has_kv) {
            return Err(FormatError::range("layers with KV", 4, 1, 0));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let at = size_of::<RawLayoutHeader>() + index * size_of::<RawLayer>();
            if layer.kv_heads > KV_HEADS_MAX {
                return Err(FormatError::range("KV heads", at, u64::from(KV_HEADS_MAX), u64::from(layer.kv_heads)));
            }
            if !layer.has_kv() {
                layer.check_without_kv(at)?;
                continue;
            }
            layer.check_with_kv(at)?;
            self.check_block(layer, at)?;
        }
        let ropes = self.ropes().len();
        if ropes > ROPES_MAX {
            return Err(FormatError::range("rotations", 10, ROPES_MAX as u64, ropes as u64));
        }
        Ok(())
    }

    /// Checks the length of a layer's blocks and the codecs of its planes. `at` is the offset of the layer.
    fn check_block(&self, layer: &LayerGeometry, at: usize) -> Result<(), FormatError> {
        // The limit is for raw planes, because no codec makes a block longer.
        let bytes = self.plain_block(layer).block_bytes;
        if bytes > BLOCK_BYTES_MAX {
            return Err(FormatError::range("block bytes", at, BLOCK_BYTES_MAX as u64, bytes as u64));
        }
        for plane in 0..2 {
            let (codec, shape) = (layer.codecs[plane], self.plane_shape(layer, plane));
            if !codec.suits(&shape) {
                let (bound, found) = ((shape.bytes() / 20 * 19) as u64, codec.bytes(&shape) as u64);
                return Err(FormatError::range("codec of a plane that it does not shrink", at, bound, found));
            }
        }
        Ok(())
    }
}

impl LayerGeometry {
    /// Checks that a layer without KV has no other geometry. `at` is the offset of the layer in the encoded layout.
    fn check_without_kv(&self, at: usize) -> Result<(), FormatError> {
        if self.key_dim != 0 || self.value_dim != 0 || self.window.is_some() || self.rope.is_some() {
            return Err(FormatError::range("head dim of a layer without KV", at, 0, u64::from(self.key_dim)));
        }
        if self.is_encoded() {
            return Err(FormatError::range("codec of a layer without KV", at, 0, u64::from(self.codec_code())));
        }
        Ok(())
    }

    /// Checks head dims, window and rotation. `at` is the offset of the layer in the encoded layout.
    fn check_with_kv(&self, at: usize) -> Result<(), FormatError> {
        if self.key_dim == 0 || self.key_dim > HEAD_DIM_MAX {
            return Err(FormatError::range("key dim", at + 2, u64::from(HEAD_DIM_MAX), u64::from(self.key_dim)));
        }
        if self.value_dim > HEAD_DIM_MAX {
            return Err(FormatError::range("value dim", at + 4, u64::from(HEAD_DIM_MAX), u64::from(self.value_dim)));
        }
        if self.window == Some(0) {
            return Err(FormatError::range("window", at + 8, 1, 0));
        }
        match &self.rope {
            Some(rope) => self.check_rope(rope, at),
            None => Ok(()),
        }
    }

    fn check_rope(&self, rope: &Rope, at: usize) -> Result<(), FormatError> {
        rope.check(at)?;
        let end = rope.first() + rope.dims();
        if end > usize::from(self.key_dim) {
            return Err(FormatError::range("rotated dims", at + 7, u64::from(self.key_dim), end as u64));
        }
        Ok(())
    }
}
