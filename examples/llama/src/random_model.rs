//! Random weights with the geometry of real models, for measurements.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::Write;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::GgmlDType;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::json;

use crate::config::ModelConfig;
use crate::gguf::kind::number_and_name;
use crate::gguf::write::quantise;

/// Elements that are drawn and quantised once per type and row length. Tensors repeat blocks of them in random order.
const POOL_ELEMENTS: usize = 1 << 16;
/// Bytes that are written at a time.
const BATCH_BYTES: usize = 1 << 20;

/// Returns the names of the geometries, and their configurations.
fn geometries() -> Vec<(&'static str, serde_json::Value)> {
    let model = |kind: &str, sizes: [usize; 6], head_dim: usize, vocabulary: usize, theta: f64| {
        let [hidden, wide, layers, heads, kv_heads, positions] = sizes;
        json!({
            "model_type": kind, "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": wide,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "rope_theta": theta,
            "tie_word_embeddings": kind != "mistral",
        })
    };
    let with_llama3 = |mut model: serde_json::Value| {
        model["rope_scaling"] = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        model
    };
    vec![
        ("tiny", model("llama", [512, 1024, 4, 8, 2, 131_072], 64, 4096, 5e5)),
        ("qwen2.5-1.5b", model("qwen2", [1536, 8960, 28, 12, 2, 131_072], 128, 151_936, 1e6)),
        ("llama-3.2-1b", with_llama3(model("llama", [2048, 8192, 16, 32, 8, 131_072], 64, 128_256, 5e5))),
        ("llama-3.2-3b", with_llama3(model("llama", [3072, 8192, 28, 24, 8, 131_072], 128, 128_256, 5e5))),
        ("qwen3-4b", model("qwen3", [2560, 9728, 36, 32, 8, 131_072], 128, 151_936, 1e6)),
        ("mistral-7b", model("mistral", [4096, 14_336, 32, 32, 8, 32_768], 128, 32_768, 1e6)),
    ]
}

/// Returns the configuration of a geometry, with another number of layers if one is given.
///
/// # Errors
/// Fails if no geometry has the name. The error lists the names. Fails if there are no layers.
pub fn geometry(name: &str, layers: Option<u32>) -> Result<ModelConfig> {
    let mut known = geometries();
    let names = known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let found = known.iter_mut().find(|(known, _)| *known == name);
    let (_, config) = found.with_context(|| format!("{name:?} is not a geometry; use one of {names}"))?;
    if let Some(layers) = layers {
        config["num_hidden_layers"] = json!(layers);
    }
    ModelConfig::parse(&config.to_string())
}

/// A source of random weights.
pub struct RandomWeights {
    random: ChaCha8Rng,
    /// Quantised elements by the number of a type and the length of rows.
    pools: HashMap<(u32, usize), Vec<u8>>,
}

impl RandomWeights {
    /// Makes a source that gives the same weights for the same seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { random: ChaCha8Rng::seed_from_u64(seed), pools: HashMap::new() }
    }

    /// Writes a tensor and returns its bytes. Factors of norms are 1. Elements of a matrix have the variance that keeps
    /// the size of a row's product.
    pub(crate) fn write(
        &mut self,
        rows: usize,
        columns: Option<usize>,
        kind: GgmlDType,
        out: &mut impl Write,
    ) -> Result<usize> {
        let Some(columns) = columns else {
            ensure!(kind == GgmlDType::F32, "vectors are written as f32");
            let bytes: Vec<u8> = std::iter::repeat_n(1.0_f32.to_le_bytes(), rows).flatten().collect();
            out.write_all(&bytes)?;
            return Ok(bytes.len());
        };
        let key = (number_and_name(kind)?.0, columns);
        let pool = match self.pools.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let bound = (3.0 / columns as f32).sqrt();
                let mut draw = || (self.random.next_u32() as f32 / u32::MAX as f32 * 2.0 - 1.0) * bound;
                let floats: Vec<f32> = (0..POOL_ELEMENTS).map(|_| draw()).collect();
                new.insert(quantise(floats, kind.block_size(), kind)?)
            }
        };
        let size = kind.type_size();
        let blocks = pool.len() / size;
        let total = rows * columns / kind.block_size();
        let mut batch = Vec::with_capacity(BATCH_BYTES + size);
        for left in (0..total).rev() {
            let at = self.random.next_u32() as usize % blocks * size;
            batch.extend_from_slice(&pool[at..at + size]);
            if batch.len() >= BATCH_BYTES || left == 0 {
                out.write_all(&batch)?;
                batch.clear();
            }
        }
        Ok(total * size)
    }
}
