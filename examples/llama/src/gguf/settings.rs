//! A model's configuration from the metadata of a GGUF file.
//!
//! The metadata is rewritten as a `config.json`, so that both kinds of models pass the same checks.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::header::GgufHeader;
use crate::config::ModelConfig;

/// The context length that Llama 3.1 was trained with before its frequencies were scaled.
const LLAMA3_ORIGINAL: u64 = 8192;
/// The largest relative difference of a stored frequency factor from the computed one.
const FACTOR_TOLERANCE: f64 = 1e-3;

/// Returns the configuration. `factors` are the elements of `rope_freqs.weight`, if the file has that tensor.
///
/// # Errors
/// Fails if an entry is missing, of another type or impossible, or if the architecture is not supported.
pub(crate) fn model_config(header: &GgufHeader<'_>, factors: Option<&[f32]>) -> Result<ModelConfig> {
    let architecture = header.text("general.architecture")?.context("metadata has no general.architecture")?;
    ensure!(
        matches!(architecture.as_str(), "llama" | "mistral" | "qwen2" | "qwen3"),
        "general.architecture {architecture:?} is not supported; supported are llama, mistral, qwen2, qwen3"
    );
    let parts = header.count("split.count")?.unwrap_or(1);
    ensure!(parts <= 1, "the model is split into {parts} files; join them with llama-gguf-split --merge");
    let keys = Keys { header, architecture: &architecture };
    let config = keys.config(factors)?;
    let mut config = ModelConfig::parse(&Value::Object(config).to_string())?;
    // Conversion to GGUF reorders the heads of these architectures for a rotation of neighbouring elements.
    config.paired_heads = matches!(architecture.as_str(), "llama" | "mistral");
    Ok(config)
}

/// The metadata entries of one architecture.
struct Keys<'a> {
    header: &'a GgufHeader<'a>,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn count(&self, key: &str) -> Result<Option<u64>> {
        self.header.count(&self.name(key))
    }

    fn needed(&self, key: &str) -> Result<u64> {
        self.count(key)?.with_context(|| format!("metadata has no {}", self.name(key)))
    }

    /// Returns the entries of a `config.json`.
    fn config(&self, factors: Option<&[f32]>) -> Result<Map<String, Value>> {
        let (layers, heads, hidden) =
            (self.needed("block_count")?, self.needed("attention.head_count")?, self.needed("embedding_length")?);
        ensure!(heads > 0, "{} is 0", self.name("attention.head_count"));
        let head_dim = self.count("attention.key_length")?.unwrap_or(hidden / heads);
        for key in ["attention.value_length", "rope.dimension_count"] {
            let length = self.count(key)?.unwrap_or(head_dim);
            ensure!(length == head_dim, "{} is {length}, but heads have {head_dim} elements", self.name(key));
        }
        let eps_name = self.name("attention.layer_norm_rms_epsilon");
        let eps = self.header.number(&eps_name)?;
        let theta = self.header.number(&self.name("rope.freq_base"))?.unwrap_or(10_000.0);
        let has = |tensor: &str| self.header.tensors().contains_key(tensor);
        let config = json!({
            "model_type": self.architecture,
            "vocab_size": self.vocabulary()?,
            "hidden_size": hidden,
            "intermediate_size": self.needed("feed_forward_length")?,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.count("attention.head_count_kv")?.unwrap_or(heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.needed("context_length")?,
            "rms_norm_eps": eps.with_context(|| format!("metadata has no {eps_name}"))?,
            "rope_parameters": self.rope(theta, head_dim, factors)?,
            "attention_bias": has("blk.0.attn_q.bias"),
            "mlp_bias": has("blk.0.ffn_gate.bias"),
            "tie_word_embeddings": !has("output.weight"),
            "eos_token_id": self.ends()?,
        });
        let Value::Object(mut config) = config else { bail!("the configuration is not an object") };
        self.windows(layers, &mut config)?;
        Ok(config)
    }

    /// Returns the number of token ids: the rows of the embedding.
    fn vocabulary(&self) -> Result<usize> {
        let embedding =
            self.header.tensors().get("token_embd.weight").context("tensor token_embd.weight is missing")?;
        let &[rows, _] = &embedding.shape[..] else {
            bail!("tensor token_embd.weight has shape {:?}, which is not a matrix", embedding.shape)
        };
        Ok(rows)
    }

    /// Returns the token ids that end a text or a turn.
    fn ends(&self) -> Result<Vec<u64>> {
        let mut ends = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            ends.extend(self.header.count(key)?.filter(|id| !ends.contains(id)));
        }
        Ok(ends)
    }

    /// Adds the sliding window, and the layers that have it if some do not.
    fn windows(&self, layers: u64, config: &mut Map<String, Value>) -> Result<()> {
        let Some(window) = self.count("attention.sliding_window")?.filter(|window| *window > 0) else { return Ok(()) };
        config.insert("sliding_window".to_owned(), json!(window));
        config.insert("use_sliding_window".to_owned(), json!(true));
        if self.architecture == "llama" {
            // Mistral is stored under the name of Llama.
            config.insert("model_type".to_owned(), json!("mistral"));
        }
        let pattern = self.name("attention.sliding_window_pattern");
        let kinds: Vec<&str> = match self.header.list(&pattern)? {
            Some(list) => {
                let slides = |value: super::value::MetaValue<'_>| match value {
                    super::value::MetaValue::Bool(slides) => {
                        Ok(if slides { "sliding_attention" } else { "full_attention" })
                    }
                    _ => bail!("{pattern} is not a list of truth values"),
                };
                list.values().map(slides).collect::<Result<_>>()?
            }
            // The number is checked before: at most one entry per layer of a real model.
            None => vec!["sliding_attention"; usize::try_from(layers.min(4096))?],
        };
        config.insert("layer_types".to_owned(), json!(kinds));
        Ok(())
    }

    /// Returns the parameters of the rotation as `config.json` has them.
    fn rope(&self, theta: f64, head_dim: u64, factors: Option<&[f32]>) -> Result<Value> {
        if let Some(factors) = factors {
            return self.llama3(theta, head_dim, factors);
        }
        let kind = self.header.text(&self.name("rope.scaling.type"))?;
        let linear = self.header.number(&self.name("rope.scale_linear"))?;
        Ok(match (kind.as_deref(), linear) {
            (None | Some("none"), None) => json!({"rope_theta": theta, "rope_type": "default"}),
            (None, Some(factor)) => json!({"rope_theta": theta, "rope_type": "linear", "factor": factor}),
            (Some(kind), _) => {
                let factor = self.header.number(&self.name("rope.scaling.factor"))?;
                json!({"rope_theta": theta, "rope_type": kind, "factor": factor})
            }
        })
    }

    /// Returns Llama 3's scaling whose frequency factors are `factors`.
    fn llama3(&self, theta: f64, head_dim: u64, factors: &[f32]) -> Result<Value> {
        ensure!(
            factors.len() as u64 * 2 == head_dim,
            "rope_freqs.weight has {} factors for heads of {head_dim} elements",
            factors.len()
        );
        let original = self.count("rope.scaling.original_context_length")?.unwrap_or(LLAMA3_ORIGINAL) as f64;
        let factor = factors.iter().fold(1.0_f64, |most, &factor| most.max(f64::from(factor)));
        let (low, high) = (1.0, 4.0);
        for (index, &stored) in factors.iter().enumerate() {
            let wavelength = std::f64::consts::TAU * theta.powf(2.0 * index as f64 / head_dim as f64);
            let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            let expected = 1.0 / ((1.0 - smooth) / factor + smooth);
            let stored = f64::from(stored);
            ensure!(
                stored.is_finite() && (stored - expected).abs() <= FACTOR_TOLERANCE * expected,
                "rope_freqs.weight: factor {index} is {stored}; only Llama 3's scaling is supported, which has \
                 {expected:.4} there with factor {factor}"
            );
        }
        Ok(json!({
            "rope_theta": theta, "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original,
        }))
    }
}
