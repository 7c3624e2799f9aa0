//! Tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

/// All tensors of a model directory, in the dtype of the file, until they are taken.
pub struct Weights {
    origin: String,
    tensors: HashMap<String, Tensor>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Weights {
    /// Reads the weights of a model directory.
    ///
    /// # Errors
    /// No weights, unreadable or malformed files, an index that names tensors its shards do not hold.
    pub fn load(dir: &Path) -> Result<Self> {
        let (files, promised) = files(dir)?;
        let mut tensors = HashMap::new();
        for file in files {
            tensors.extend(read(&file)?);
        }
        for (name, shard) in &promised {
            ensure!(tensors.contains_key(name), "{} promises {name} in {shard}, which does not hold it", dir.display());
        }
        Ok(Self { origin: dir.display().to_string(), tensors })
    }

    /// Whether a tensor of this name is there.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Takes a tensor out, as f32.
    ///
    /// # Errors
    /// The tensor is missing, or its shape or dtype is not the expected one.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let Some(tensor) = self.tensors.remove(name) else {
            let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
            names.sort_unstable();
            let more = names.len().saturating_sub(8);
            names.truncate(8);
            bail!(
                "{}: tensor {name} (expected shape {shape:?}) is missing; not yet used are {}{}",
                self.origin,
                if names.is_empty() { "none".to_owned() } else { names.join(", ") },
                if more > 0 { format!(" and {more} more") } else { String::new() }
            );
        };
        ensure!(
            tensor.dims() == shape,
            "{}: tensor {name} has shape {:?}, config.json implies {shape:?}",
            self.origin,
            tensor.dims()
        );
        match tensor.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Ok(tensor.to_dtype(DType::F32)?),
            other => bail!("{}: tensor {name} is {other:?}; weights must be f32, f16 or bf16", self.origin),
        }
    }
}

fn read(path: &Path) -> Result<HashMap<String, Tensor>> {
    candle_core::safetensors::load(path, &Device::Cpu)
        .with_context(|| format!("cannot read weights from {}", path.display()))
}

/// The files that hold the weights, and the tensors that an index promises in them.
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
    let index_file: Index = serde_json::from_str(&text).with_context(|| format!("in {}", index.display()))?;
    let shards: BTreeSet<&String> = index_file.weight_map.values().collect();
    let mut files = Vec::new();
    for shard in shards {
        let plain = matches!(Path::new(shard).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
        ensure!(plain, "{} names {shard:?}, which is no file of this directory", index.display());
        files.push(dir.join(shard));
    }
    Ok((files, index_file.weight_map))
}

/// BLAKE3 over `config.json` and every weight file: two models with the same fingerprint compute the same keys and values.
///
/// # Errors
/// Files that are missing or cannot be read.
pub fn fingerprint(dir: &Path) -> Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    for path in std::iter::once(dir.join("config.json")).chain(files(dir)?.0) {
        let mut file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // The length in front keeps the files apart.
        hasher.update(&file.metadata()?.len().to_le_bytes());
        std::io::copy(&mut file, &mut hasher).with_context(|| format!("cannot read {}", path.display()))?;
    }
    Ok(*hasher.finalize().as_bytes())
}
