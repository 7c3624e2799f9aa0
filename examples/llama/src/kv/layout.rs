//! A model's geometry as the engine's layout.

use anyhow::Result;
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::{DType, KvLayout};

use super::error::engine_error;
use super::geometry::{KvDType, KvGeometry};

/// Returns the engine's name of an element type.
pub(super) const fn engine_dtype(dtype: KvDType) -> DType {
    match dtype {
        KvDType::F32 => DType::F32,
        KvDType::F16 => DType::F16,
        KvDType::Bf16 => DType::Bf16,
    }
}

/// Returns the engine's layout of a model's cache.
///
/// # Errors
/// Fails if the engine does not support one of the sizes.
pub fn kv_layout(
    geometry: &KvGeometry,
    group_tokens: usize,
    codec: PlaneCodec,
    fingerprint: [u8; 32],
) -> Result<KvLayout> {
    let mut specs = Vec::with_capacity(geometry.layers.len());
    for layer in &geometry.layers {
        let (heads, dim) = (u16::try_from(layer.kv_heads)?, u16::try_from(layer.head_dim)?);
        specs.push(match layer.window {
            None => LayerSpec::full(heads, dim),
            Some(window) => LayerSpec::sliding(heads, dim, u32::try_from(window)?),
        });
    }
    let dtype = engine_dtype(geometry.dtype);
    let builder = KvLayout::builder().layer_specs(specs).dtype(dtype).group_tokens(u16::try_from(group_tokens)?);
    let builder = if let Some(rope) = geometry.rope { builder.rope(rope) } else { builder };
    builder.codec(codec).fingerprint(fingerprint).build().map_err(engine_error)
}
