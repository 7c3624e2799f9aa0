//! The weights of a model: a GGUF file, or the safetensors files of a directory.
//!
//! A directory has `model.safetensors`, or the shards that `model.safetensors.index.json` names.
//!
//! 1. `mapping.rs` maps each file read-only. Nothing is copied yet.
//! 2. The header of each file is checked once: names, shapes, element types, and ranges inside of the file.
//! 3. The model takes vectors and matrices out by name. Their shapes must be those that the configuration implies.
//! 4. `matrix.rs` keeps matrices mapped, except f32 ones. It converts blocks of rows to f32 when they are used.
//! 5. `blocks.rs` multiplies quantised rows without a conversion. `vector_products.rs` does so with AVX-512 and
//!    `offset_products.rs` with AVX2, for the types that candle has no such loops for.
//!
//! The files must not be changed while a model uses them.

mod blocks;
mod fingerprint;
mod mapped_gguf;
mod mapping;
mod matrix;
#[cfg(target_arch = "x86_64")]
mod offset_products;
mod product;
mod stored;
#[cfg(target_arch = "x86_64")]
mod vector_blocks;
#[cfg(target_arch = "x86_64")]
mod vector_products;

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

pub use fingerprint::fingerprint;
pub use mapped_gguf::open_gguf;
pub(crate) use mapping::map;
pub(crate) use matrix::WeightMatrix;
use stored::{StoredTensor, WeightDType};

use crate::gguf;

/// The tensors of a model that were not taken out yet, by their Hugging Face names.
pub struct Weights {
    origin: String,
    /// True if the file has other names.
    is_gguf: bool,
    tensors: HashMap<String, Entry>,
}

/// One tensor as the header of its file describes it.
struct Entry {
    /// The name of the element type.
    dtype: String,
    shape: Vec<usize>,
    /// The tensor, or `None` if its element type cannot be used as a weight.
    stored: Option<StoredTensor>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

impl Weights {
    /// Maps the weight files of a model directory and checks their headers.
    ///
    /// # Errors
    /// Fails if there are no weights, if a file is unreadable or malformed, or if the index names a tensor that its
    /// shard does not hold.
    pub fn load(dir: &Path) -> Result<Self> {
        let (files, promised) = files(dir)?;
        let mut tensors = HashMap::new();
        for file in files {
            tensors.extend(entries(&file)?);
        }
        for (name, shard) in &promised {
            ensure!(
                tensors.contains_key(name),
                "{}: the index promises {name} in {shard}, which does not hold it",
                dir.display()
            );
        }
        Ok(Self { origin: dir.display().to_string(), is_gguf: false, tensors })
    }

    /// Takes a vector out, as f32.
    ///
    /// # Errors
    /// Fails if the tensor is missing, or if its shape or element type is not the expected one.
    pub(crate) fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>> {
        let stored = self.take(name, &[length])?;
        let mut out = vec![0.0; length];
        stored.read(0, &mut out)?;
        Ok(out)
    }

    /// Takes matrices `[rows, columns]` out and joins their rows; `parts` are names and rows.
    ///
    /// # Errors
    /// Fails as [`Weights::vector`] does.
    pub(crate) fn matrix(&mut self, parts: &[(String, usize)], columns: usize) -> Result<WeightMatrix> {
        let stored = parts.iter().map(|(name, rows)| self.take(name, &[*rows, columns])).collect::<Result<_>>()?;
        WeightMatrix::new(stored, columns)
    }

    /// Takes a vector out as a matrix of one column.
    ///
    /// # Errors
    /// Fails as [`Weights::vector`] does.
    pub(crate) fn column(&mut self, name: &str, length: usize) -> Result<WeightMatrix> {
        WeightMatrix::new(vec![self.take(name, &[length])?], 1)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<StoredTensor> {
        let Some(entry) = self.tensors.remove(name) else { return Err(self.missing(name, shape)) };
        let (origin, name) = (&self.origin, self.own_name(name));
        let rule = if self.is_gguf { "the metadata" } else { "config.json" };
        ensure!(entry.shape == shape, "{origin}: tensor {name} has shape {:?}, {rule} implies {shape:?}", entry.shape);
        let dtype = entry.dtype;
        entry.stored.with_context(|| format!("{origin}: tensor {name} is {dtype}; weights must be f32, f16 or bf16"))
    }

    /// Returns a tensor's name in the file.
    fn own_name(&self, name: &str) -> String {
        let own = if self.is_gguf { gguf::to_gguf(name) } else { None };
        own.unwrap_or_else(|| name.to_owned())
    }

    fn missing(&self, name: &str, shape: &[usize]) -> anyhow::Error {
        let mut names: Vec<String> = self.tensors.keys().map(|name| self.own_name(name)).collect();
        names.sort_unstable();
        let name = self.own_name(name);
        let more = names.len().saturating_sub(8);
        names.truncate(8);
        anyhow::anyhow!(
            "{}: tensor {name} (expected shape {shape:?}) is missing; not yet used are {}{}",
            self.origin,
            if names.is_empty() { "none".to_owned() } else { names.join(", ") },
            if more > 0 { format!(" and {more} more") } else { String::new() }
        )
    }
}

/// Maps a file and reads its header.
fn entries(path: &Path) -> Result<HashMap<String, Entry>> {
    let file = Arc::new(mapping::map(path)?);
    let (header, metadata) =
        SafeTensors::read_metadata(&file).with_context(|| format!("cannot read weights from {}", path.display()))?;
    // The data follows the header and the eight bytes of its length. The metadata's ranges fill the rest of the file.
    let data = 8 + header;
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let dtype = match info.dtype {
            Dtype::F32 => Some(WeightDType::F32),
            Dtype::F16 => Some(WeightDType::F16),
            Dtype::BF16 => Some(WeightDType::Bf16),
            _ => None,
        };
        let bytes = data + info.data_offsets.0..data + info.data_offsets.1;
        let stored = dtype.map(|dtype| StoredTensor::new(Arc::clone(&file), bytes, dtype));
        (name, Entry { dtype: format!("{:?}", info.dtype), shape: info.shape.clone(), stored })
    };
    Ok(metadata.tensors().into_iter().map(entry).collect())
}

/// Returns the files that hold the weights, and the shard that the index promises each tensor in.
fn files(dir: &Path) -> Result<(Vec<PathBuf>, HashMap<String, String>)> {
    let single = dir.join("model.safetensors");
    let index = dir.join("model.safetensors.index.json");
    if single.is_file() {
        return Ok((vec![single], HashMap::new()));
    }
    if !index.is_file() {
        bail!("{} holds neither model.safetensors nor model.safetensors.index.json", dir.display());
    }
    let text = std::fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
    let index_file: ShardIndex = serde_json::from_str(&text).with_context(|| format!("in {}", index.display()))?;
    let shards: BTreeSet<&String> = index_file.weight_map.values().collect();
    let mut files = Vec::new();
    for shard in shards {
        let plain = matches!(Path::new(shard).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
        ensure!(plain, "{} names {shard:?}, which is not a file of this directory", index.display());
        files.push(dir.join(shard));
    }
    Ok((files, index_file.weight_map))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A safetensors file: the length of the header, the header, the data.
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    fn load(bytes: &[u8]) -> Result<Weights> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        Weights::load(dir.path())
    }

    #[test]
    fn tensors_at_odd_addresses_are_read_in_every_dtype() {
        for (dtype, data) in [
            ("F32", [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
            ("F16", vec![0x00, 0x3e, 0x00, 0xc0]),
            ("BF16", vec![0xc0, 0x3f, 0x00, 0xc0]),
        ] {
            for pad in 0..4 {
                let end = data.len();
                let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[2],"data_offsets":[0,{end}]}}}}"#);
                let header = header + &" ".repeat(pad);
                let mut weights = load(&file(&header, &data)).unwrap();
                assert_eq!(weights.vector("w", 2).unwrap(), [1.5, -2.0], "{dtype}, {pad} blanks");
            }
        }
    }

    #[test]
    fn malformed_files_are_errors_that_name_the_file() {
        let tensor = |text: &str| format!(r#"{{"w":{text}}}"#);
        let good = tensor(r#"{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}"#);
        assert!(load(&file(&good, &[0; 8])).is_ok());
        for (what, bytes) in [
            ("nothing", Vec::new()),
            ("half of the header's length", vec![8, 0, 0, 0]),
            ("a header beyond the end", [&1000u64.to_le_bytes()[..], b"{}"].concat()),
            ("a header of 2^64 - 1 bytes", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
            ("a header that is not JSON", file("not json", &[])),
            ("a header that is not UTF-8", [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()),
            ("too few bytes", file(&good, &[0; 7])),
            ("too many bytes", file(&good, &[0; 9])),
            ("an end before the begin", file(&tensor(r#"{"dtype":"BF16","shape":[4],"data_offsets":[8,0]}"#), &[0; 8])),
            (
                "an end of 2^64 - 1",
                file(&tensor(r#"{"dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551615]}"#), &[0; 8]),
            ),
            (
                "a shape that overflows",
                file(&tensor(r#"{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,8]}"#), &[0; 8]),
            ),
            ("a shape of another size", file(&tensor(r#"{"dtype":"F32","shape":[4],"data_offsets":[0,8]}"#), &[0; 8])),
            ("an unknown dtype", file(&tensor(r#"{"dtype":"Q4","shape":[4],"data_offsets":[0,8]}"#), &[0; 8])),
        ] {
            let error = format!("{:#}", load(&bytes).map(|_| ()).unwrap_err());
            assert!(
                error.contains("cannot read weights from") && error.contains("model.safetensors"),
                "{what}: {error}"
            );
        }
    }

    #[test]
    fn a_shard_that_is_missing_or_not_a_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        for (shard, needle) in
            [("folder", "not a regular file"), ("absent", "cannot read weights"), ("..", "not a file")]
        {
            let index = format!(r#"{{"weight_map": {{"w": "{shard}"}}}}"#);
            std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
            let error = format!("{:#}", Weights::load(dir.path()).map(|_| ()).unwrap_err());
            assert!(error.contains(needle) && error.contains(shard), "{shard}: {error}");
        }
    }

    #[test]
    fn weights_of_another_shape_or_dtype_are_refused() {
        let header = r#"{"i":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},
                         "w":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}"#;
        let mut weights = load(&file(header, &[0; 8])).unwrap();
        let error = weights.vector("i", 1).unwrap_err().to_string();
        assert!(error.contains("tensor i is I32; weights must be f32, f16 or bf16"), "{error}");
        let error = weights.vector("w", 3).unwrap_err().to_string();
        assert!(error.contains("tensor w has shape [2], config.json implies [3]"), "{error}");
        let error = weights.vector("w", 2).unwrap_err().to_string();
        assert!(error.contains("tensor w (expected shape [2]) is missing"), "{error}");
    }
}
