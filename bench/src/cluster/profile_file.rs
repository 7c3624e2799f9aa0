//! Files of `kvrun profile`: safetensors with the keys of each layer and the entries that its queries activated.
//!
//! The metadata has `format` `stratakv-profile`, `version` `1` and the number of `layers`. Layer `n` has:
//! - `layers.n.keys`: `[entries, kv_heads, head_dim]` in f32, f16 or bf16.
//! - `layers.n.offsets`: query `q` activated elements `offsets[q]..offsets[q + 1]` of the next tensor.
//! - `layers.n.activated`: entries, in rising order per query.
//! - `layers.n.weights`: the attention weight of each activated entry, in f32.
//! - `layers.n.queries`: `[queries, query_heads, head_dim]`.
//!
//! `positions` has the token of each query, for all layers.
//!
//! Every length and index is checked before it is used.

use crate::cluster::layer_trace::LayerTrace;
use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;
use std::path::Path;

/// Reads layers of a profile, or all of them if none are named.
///
/// # Errors
/// The file cannot be read, is not a profile of version 1, or has no such layer.
pub(super) fn load(path: &Path, layers: &[usize]) -> Result<Vec<LayerTrace>> {
    each_layer(path, layers, &load_layer)
}

/// Reads the recorded queries of the layers, each `[query_heads, head_dim]`.
///
/// # Errors
/// As [`load`], or the profile has no queries.
pub(super) fn load_queries(path: &Path, layers: &[usize]) -> Result<Vec<Vec<Vec<f32>>>> {
    each_layer(path, layers, &|file, layer| {
        let name = format!("layers.{layer}.queries");
        let tensor = file.tensor(&name).with_context(|| format!("tensor {name}"))?;
        let &[_, heads, dim] = tensor.shape() else { bail!("layer {layer}: queries have no 3 axes") };
        ensure!(heads > 0 && dim > 0, "layer {layer}: queries of shape {:?}", tensor.shape());
        Ok(floats(&tensor)?.chunks_exact(heads * dim).map(<[f32]>::to_vec).collect())
    })
}

/// Reads the weights of the activated entries of each query.
///
/// # Errors
/// As [`load`], or the weights are not those of the activated entries.
pub(super) fn load_weights(path: &Path, layers: &[usize]) -> Result<Vec<Vec<Vec<f32>>>> {
    each_layer(path, layers, &|file, layer| {
        let tensor = |part: &str| {
            let name = format!("layers.{layer}.{part}");
            file.tensor(&name).with_context(|| format!("tensor {name}"))
        };
        let (weights, offsets) = (floats(&tensor("weights")?)?, words(&tensor("offsets")?)?);
        let ends = (offsets.first().copied(), offsets.last().map(|last| *last as usize));
        let is_cut = ends == (Some(0), Some(weights.len())) && offsets.is_sorted();
        ensure!(is_cut, "layer {layer}: the offsets do not cut the list of {} weights", weights.len());
        Ok(offsets.windows(2).map(|ends| weights[ends[0] as usize..ends[1] as usize].to_vec()).collect())
    })
}

/// Reads the token of each recorded query.
///
/// # Errors
/// As [`load`], or the profile has no tokens of queries.
pub(super) fn load_positions(path: &Path) -> Result<Vec<u32>> {
    let of_first = each_layer(path, &[0], &|file, _| words(&file.tensor("positions").context("tensor positions")?))?;
    Ok(of_first.into_iter().flatten().collect())
}

/// Reads a part of each of the layers, or of all of them if none are named.
fn each_layer<T>(path: &Path, layers: &[usize], of: &dyn Fn(&SafeTensors<'_>, usize) -> Result<T>) -> Result<Vec<T>> {
    let read = || -> Result<Vec<T>> {
        let bytes = std::fs::read(path)?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes)?;
        let none = HashMap::new();
        let texts = metadata.metadata().as_ref().unwrap_or(&none);
        let text = |key: &str| texts.get(key).map(String::as_str).unwrap_or_default();
        let (format, version) = (text("format"), text("version"));
        ensure!(
            (format, version) == ("stratakv-profile", "1"),
            "format {format:?} version {version:?}; kvbench reads files of `kvrun profile`, version 1"
        );
        let count: usize = text("layers").parse().context("the number of layers")?;
        let all: Vec<usize> = (0..count.min(usize::from(u16::MAX))).collect();
        let layers = if layers.is_empty() { &all } else { layers };
        if let Some(layer) = layers.iter().find(|layer| **layer >= count) {
            bail!("--layer {layer}: the file has {count} layers");
        }
        let file = SafeTensors::deserialize(&bytes)?;
        layers.iter().map(|&layer| of(&file, layer)).collect()
    };
    read().with_context(|| format!("--file {}", path.display()))
}

fn load_layer(file: &SafeTensors<'_>, layer: usize) -> Result<LayerTrace> {
    let tensor = |part: &str| -> Result<TensorView<'_>> {
        let name = format!("layers.{layer}.{part}");
        file.tensor(&name).with_context(|| format!("tensor {name}"))
    };
    let keys = tensor("keys")?;
    let &[entries, heads, dim] = keys.shape() else { bail!("layer {layer}: keys have no 3 axes") };
    ensure!(heads > 0 && dim > 0, "layer {layer}: keys of shape {:?}", keys.shape());
    let (values, offsets, activated) = (floats(&keys)?, words(&tensor("offsets")?)?, words(&tensor("activated")?)?);
    let ends = (offsets.first().copied(), offsets.last().map(|last| *last as usize));
    let is_cut = ends == (Some(0), Some(activated.len())) && offsets.is_sorted();
    ensure!(is_cut, "layer {layer}: the offsets do not cut the list of {} activated entries", activated.len());
    let lists = offsets.windows(2).map(|ends| activated[ends[0] as usize..ends[1] as usize].to_vec());
    let activated: Vec<Vec<u32>> = lists.collect();
    let is_known = |list: &Vec<u32>| list.is_sorted_by(|a, b| a < b) && list.iter().all(|at| (*at as usize) < entries);
    ensure!(activated.iter().all(is_known), "layer {layer}: activated entries do not rise, or are not below {entries}");
    let rows = values.chunks_exact(dim);
    let of_head = |head| rows.clone().skip(head).step_by(heads).flatten().copied().collect();
    let heads = (0..heads).map(of_head).collect();
    Ok(LayerTrace { name: format!("layer {layer}"), entries, dim, heads, activated })
}

/// Returns the elements of a tensor of floats.
fn floats(tensor: &TensorView<'_>) -> Result<Vec<f32>> {
    let (four, two) = (tensor.data().as_chunks::<4>().0, tensor.data().as_chunks::<2>().0);
    Ok(match tensor.dtype() {
        Dtype::F32 => four.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        Dtype::F16 => two.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
        Dtype::BF16 => two.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        other => bail!("keys of {other:?} are not supported"),
    })
}

/// Returns the elements of a tensor of 32-bit words.
fn words(tensor: &TensorView<'_>) -> Result<Vec<u32>> {
    ensure!(tensor.dtype() == Dtype::U32, "a list has elements of {:?}, not U32", tensor.dtype());
    Ok(tensor.data().as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(offsets: &[u32], activated: &[u32], version: &str) -> tempfile::NamedTempFile {
        let bytes = |words: &[u32]| words.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let keys: Vec<u8> = (0..12).flat_map(|x| f16::from_f32(x as f32).to_le_bytes()).collect();
        let query_bytes: Vec<u8> =
            [0.5_f32, 0.25, 2.0, 4.0, 8.0, 16.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let weight_bytes: Vec<u8> = (1..=activated.len()).flat_map(|x| (x as f32).to_le_bytes()).collect();
        let (offset_bytes, activated_bytes, position_bytes) = (bytes(offsets), bytes(activated), bytes(&[0, 1, 2]));
        let tensors = [
            ("layers.0.keys", TensorView::new(Dtype::F16, vec![3, 2, 2], &keys)),
            ("layers.0.offsets", TensorView::new(Dtype::U32, vec![offsets.len()], &offset_bytes)),
            ("layers.0.activated", TensorView::new(Dtype::U32, vec![activated.len()], &activated_bytes)),
            ("layers.0.queries", TensorView::new(Dtype::F32, vec![3, 1, 2], &query_bytes)),
            ("layers.0.weights", TensorView::new(Dtype::F32, vec![activated.len()], &weight_bytes)),
            ("positions", TensorView::new(Dtype::U32, vec![3], &position_bytes)),
        ];
        let about = [("format", "stratakv-profile"), ("version", version), ("layers", "1")];
        let about = about.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let tensors = tensors.into_iter().map(|(name, view)| (name, view.unwrap()));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), safetensors::serialize(tensors, Some(about)).unwrap()).unwrap();
        file
    }

    #[test]
    fn a_profile_gives_keys_per_head_and_activated_entries_per_query() {
        let file = file(&[0, 2, 2, 3], &[0, 2, 1], "1");
        let layers = load(file.path(), &[]).unwrap();
        let expected = LayerTrace {
            name: "layer 0".into(),
            entries: 3,
            dim: 2,
            heads: vec![vec![0.0, 1.0, 4.0, 5.0, 8.0, 9.0], vec![2.0, 3.0, 6.0, 7.0, 10.0, 11.0]],
            activated: vec![vec![0, 2], vec![], vec![1]],
        };
        assert_eq!(layers, [expected]);
        assert_eq!(layers[0].joined_keys(), (0..12).map(|x| x as f32).collect::<Vec<_>>());
        assert_eq!((layers[0].activated_per_query(), layers[0].co_activation().unwrap().queries()), (1.0, 3));
        assert_eq!(load_queries(file.path(), &[]).unwrap(), [[[0.5, 0.25], [2.0, 4.0], [8.0, 16.0]]]);
        assert_eq!(load_weights(file.path(), &[]).unwrap(), [[vec![1.0, 2.0], vec![], vec![3.0]]]);
        assert_eq!(load_positions(file.path()).unwrap(), [0, 1, 2]);
    }

    #[test]
    fn a_file_that_is_no_profile_is_refused() {
        let refused =
            |file: &tempfile::NamedTempFile, layers: &[usize]| format!("{:#}", load(file.path(), layers).unwrap_err());
        assert!(refused(&file(&[0, 2], &[0, 2], "2"), &[]).contains("version 1"));
        assert!(refused(&file(&[0, 2], &[0, 2], "1"), &[1]).contains("--layer 1: the file has 1 layers"));
        assert!(refused(&file(&[0, 3], &[0, 2], "1"), &[]).contains("offsets"));
        assert!(refused(&file(&[0, 2], &[0, 3], "1"), &[]).contains("not below 3"));
        assert!(refused(&file(&[0, 2], &[2, 0], "1"), &[]).contains("do not rise"));
        assert!(load(Path::new("/nowhere"), &[]).is_err());
    }
}
