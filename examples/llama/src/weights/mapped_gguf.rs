//! Opens a GGUF file as the weights of a model.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::GgmlDType;

use super::stored::{StoredTensor, WeightDType};
use super::{Entry, Weights, mapping};
use crate::config::ModelConfig;
use crate::gguf::{GgufHeader, TensorEntry, from_gguf, model_config};

/// The frequency factors of Llama 3.
const FACTORS: &str = "rope_freqs.weight";
/// The longest vector of frequency factors: half of the longest head.
const FACTORS_MAX: usize = 1 << 15;

/// Maps a GGUF file and checks its header. Returns the model's configuration and its weights.
///
/// # Errors
/// Fails if the file is unreadable or malformed, or if its model is not supported. The error names the file and the
/// place in it.
pub fn open_gguf(path: &Path) -> Result<(ModelConfig, Weights)> {
    let place = || format!("cannot read weights from {}", path.display());
    let file = Arc::new(mapping::map(path)?);
    let header = GgufHeader::parse(&file).with_context(place)?;
    let stored = |entry: &TensorEntry| {
        let dtype = match entry.kind {
            GgmlDType::F32 => WeightDType::F32,
            GgmlDType::F16 => WeightDType::F16,
            GgmlDType::BF16 => WeightDType::Bf16,
            kind => WeightDType::Blocks(kind),
        };
        StoredTensor::new(Arc::clone(&file), entry.bytes.clone(), dtype)
    };
    let factors = match header.tensors().get(FACTORS) {
        None => None,
        Some(entry) => {
            let length = entry.shape.iter().product::<usize>();
            ensure!(length <= FACTORS_MAX, "{}: tensor {FACTORS} has {length} elements", path.display());
            let mut factors = vec![0.0; length];
            stored(entry).read(0, &mut factors)?;
            Some(factors)
        }
    };
    let config = model_config(&header, factors.as_deref()).with_context(place)?;
    let tensors = header.tensors().iter().map(|(name, entry)| {
        let name = from_gguf(name).unwrap_or_else(|| (*name).to_owned());
        let (dtype, shape) = (format!("{:?}", entry.kind), entry.shape.clone());
        (name, Entry { dtype, shape, stored: Some(stored(entry)) })
    });
    let weights = Weights { origin: path.display().to_string(), is_gguf: true, tensors: tensors.collect() };
    Ok((config, weights))
}
