//! Keys and values of a real model, and the planes of groups that the engine would store of them.

use anyhow::{Context, Result, bail};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;
use stratakv::DType;
use stratakv::codec::{PlaneKind, PlaneShape};

/// Keys or values `[heads, tokens, dims]` of a layer.
pub(super) struct ModelTensor {
    kind: PlaneKind,
    heads: usize,
    tokens: usize,
    dims: usize,
    values: Vec<f32>,
}

/// Planes of one shape.
pub(super) struct GroupPlanes {
    pub(super) shape: PlaneShape,
    /// The bytes of each plane; there is at least one.
    pub(super) bytes: Vec<Vec<u8>>,
}

/// Reads the tensors `k_*` and `v_*` of a safetensors file.
///
/// # Errors
/// The file cannot be read, has no such tensors, or one of them is not f32 with three dimensions.
pub(super) fn load(path: &Path) -> Result<Vec<ModelTensor>> {
    let bytes = std::fs::read(path).with_context(|| format!("--kv {}", path.display()))?;
    let file = SafeTensors::deserialize(&bytes).with_context(|| format!("--kv {}", path.display()))?;
    let mut found = Vec::new();
    for (name, tensor) in file.tensors() {
        let kind = match name.rsplit('.').next().unwrap_or_default() {
            name if name.starts_with("k_") => PlaneKind::Keys,
            name if name.starts_with("v_") => PlaneKind::Values,
            _ => continue,
        };
        let (&[heads, tokens, dims], Dtype::F32) = (tensor.shape(), tensor.dtype()) else {
            bail!("--kv {}: tensor {name} is not f32 [heads, tokens, dims]", path.display());
        };
        let values = tensor.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        found.push(ModelTensor { kind, heads, tokens, dims, values });
    }
    if found.is_empty() {
        bail!("--kv {}: the file has no tensors named k_* or v_*", path.display());
    }
    Ok(found)
}

/// Returns the planes of whole groups, in the engine's layout. Tensors of another shape than the first are left out.
pub(super) fn group_planes(
    tensors: &[ModelTensor],
    kind: PlaneKind,
    group: usize,
    dtype: DType,
) -> Option<GroupPlanes> {
    let mut bytes = Vec::new();
    let mut shape = None;
    for tensor in tensors.iter().filter(|tensor| tensor.kind == kind) {
        let own = PlaneShape { kind, heads: tensor.heads, tokens: group, dims: tensor.dims, dtype };
        if *shape.get_or_insert(own) != own {
            continue;
        }
        for first in (0..tensor.tokens / group).map(|nth| nth * group) {
            let rows = (0..tensor.heads).flat_map(|head| (0..group).map(move |t| head * tensor.tokens + first + t));
            let values = rows.flat_map(|row| tensor.values[row * tensor.dims..(row + 1) * tensor.dims].iter().copied());
            bytes.push(to_bytes(dtype, values));
        }
    }
    shape.filter(|_| !bytes.is_empty()).map(|shape| GroupPlanes { shape, bytes })
}

fn to_bytes(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// Widens the little-endian elements of a plane.
pub(super) fn to_values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|word| f16::from_le_bytes(*word).to_f32()).collect(),
        DType::Bf16 => bytes.as_chunks().0.iter().map(|word| bf16::from_le_bytes(*word).to_f32()).collect(),
    }
}
