//! `config.json` of a Hugging Face Llama-family model, checked before any arithmetic uses it.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use stratakv::Rope;

use crate::kv::{KvDType, KvGeometry, LayerGeometry};

/// What differs between the supported architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3.
    Llama,
    /// Mistral: every layer with the sliding window, if there is one.
    Mistral,
    /// Qwen2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: RMS norm over each head of queries and keys.
    Qwen3,
}

const SUPPORTED: &str = "llama, mistral, qwen2, qwen3";

/// How rotary frequencies follow from `rope_theta`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// As they are.
    None,
    /// All divided by the factor.
    Linear {
        /// Position stretch.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by the factor, high ones kept, those between interpolated.
    Llama3 {
        /// Stretch of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// Context length of the original training.
        original: f64,
    },
}

/// A model's shape and constants.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head; `heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Sliding window of each layer; its length is the number of layers.
    pub windows: Vec<Option<usize>>,
    /// Longest sequence the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in RMS norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Their scaling.
    pub rope_scaling: RopeScaling,
    /// Biases on query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub output_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// RMS norm over each query and key head.
    pub qk_norm: bool,
    /// The head is the embedding table.
    pub tied_head: bool,
    /// Ids that end a generation.
    pub eos: Vec<u32>,
}

/// The file's own keys, as far as they matter.
#[derive(Deserialize)]
struct Raw {
    model_type: Option<String>,
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<Value>,
    quantization_config: Option<Value>,
}

impl ModelConfig {
    /// Reads `config.json` in `dir`, and the end-of-text ids of `generation_config.json` where there is one.
    ///
    /// # Errors
    /// A missing or unreadable file, an architecture, RoPE type or activation that is not supported, impossible sizes.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("{} is no model directory: cannot read {}", dir.display(), path.display()))?;
        let mut config = Self::parse(&text).with_context(|| format!("in {}", path.display()))?;
        if let Ok(text) = std::fs::read_to_string(dir.join("generation_config.json")) {
            let value: Value = serde_json::from_str(&text)
                .with_context(|| format!("in {}", dir.join("generation_config.json").display()))?;
            for id in ids(value.get("eos_token_id"))? {
                if !config.eos.contains(&id) {
                    config.eos.push(id);
                }
            }
        }
        Ok(config)
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// As [`ModelConfig::load`].
    pub fn parse(text: &str) -> Result<Self> {
        let raw: Raw = serde_json::from_str(text)?;
        let architecture = architecture(&raw)?;
        ensure!(raw.quantization_config.is_none(), "quantised weights are not supported (quantization_config)");
        if let Some(act) = raw.hidden_act.as_deref() {
            ensure!(act == "silu", "hidden_act {act:?} is not supported, only silu");
        }
        let heads = raw.num_attention_heads;
        let kv_heads = raw.num_key_value_heads.unwrap_or(heads);
        ensure!(
            heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "{heads} query heads do not share {kv_heads} KV heads"
        );
        let head_dim = match raw.head_dim {
            Some(d) => d,
            None => {
                ensure!(
                    raw.hidden_size.is_multiple_of(heads),
                    "hidden_size {} is no multiple of {heads} heads",
                    raw.hidden_size
                );
                raw.hidden_size / heads
            }
        };
        ensure!(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim {head_dim} cannot be rotated: it must be even");
        for (name, size) in [
            ("vocab_size", raw.vocab_size),
            ("hidden_size", raw.hidden_size),
            ("intermediate_size", raw.intermediate_size),
            ("num_hidden_layers", raw.num_hidden_layers),
            ("max_position_embeddings", raw.max_position_embeddings),
        ] {
            ensure!(size > 0 && size <= 1 << 30, "{name} is {size}");
        }
        ensure!(raw.num_hidden_layers <= 4096, "num_hidden_layers is {}", raw.num_hidden_layers);
        ensure!(head_dim <= 1 << 16 && heads <= 1 << 16, "{heads} heads of {head_dim}");
        let windows = windows(&raw, architecture)?;
        let (rope_theta, rope_scaling) = rope(&raw)?;
        let attention_bias = raw.attention_bias.unwrap_or(false);
        Ok(Self {
            architecture,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            heads,
            kv_heads,
            head_dim,
            windows,
            max_positions: raw.max_position_embeddings,
            norm_eps: raw.rms_norm_eps.unwrap_or(1e-6) as f32,
            rope_theta,
            rope_scaling,
            qkv_bias: match architecture {
                Architecture::Qwen2 => true,
                Architecture::Llama | Architecture::Qwen3 => attention_bias,
                Architecture::Mistral => false,
            },
            output_bias: matches!(architecture, Architecture::Llama | Architecture::Qwen3) && attention_bias,
            mlp_bias: architecture == Architecture::Llama && raw.mlp_bias.unwrap_or(false),
            qk_norm: architecture == Architecture::Qwen3,
            tied_head: raw.tie_word_embeddings.unwrap_or(false),
            eos: ids(raw.eos_token_id.as_ref())?,
        })
    }

    /// Layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// The geometry of this model's KV cache.
    #[must_use]
    pub fn kv_geometry(&self, dtype: KvDType) -> KvGeometry {
        let layer = |window| LayerGeometry { kv_heads: self.kv_heads, head_dim: self.head_dim, window };
        KvGeometry {
            layers: self.windows.iter().copied().map(layer).collect(),
            query_heads: self.heads,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            dtype,
            rope: None,
        }
    }

    /// How this model rotates keys, as a store's layout says it.
    ///
    /// # Errors
    /// Heads beyond what a layout can say.
    pub fn rope(&self) -> Result<Rope> {
        let rope = Rope::new(u16::try_from(self.head_dim)?, self.rope_theta);
        Ok(rope.scaled(match self.rope_scaling {
            RopeScaling::None => stratakv::RopeScaling::None,
            RopeScaling::Linear { factor } => stratakv::RopeScaling::Linear { factor },
            RopeScaling::Llama3 { factor, low, high, original } => {
                stratakv::RopeScaling::Llama3 { factor, low, high, original }
            }
        }))
    }
}

fn architecture(raw: &Raw) -> Result<Architecture> {
    let named = |name: &str| {
        Some(match name {
            "llama" | "LlamaForCausalLM" => Architecture::Llama,
            "mistral" | "MistralForCausalLM" => Architecture::Mistral,
            "qwen2" | "Qwen2ForCausalLM" => Architecture::Qwen2,
            "qwen3" | "Qwen3ForCausalLM" => Architecture::Qwen3,
            _ => return None,
        })
    };
    if let Some(kind) = &raw.model_type {
        return named(kind).with_context(|| format!("model_type {kind:?} is not supported; supported are {SUPPORTED}"));
    }
    match raw.architectures.iter().find_map(|name| named(name)) {
        Some(architecture) => Ok(architecture),
        None => bail!("no model_type, and architectures {:?} names none of {SUPPORTED}", raw.architectures),
    }
}

fn windows(raw: &Raw, architecture: Architecture) -> Result<Vec<Option<usize>>> {
    let layers = raw.num_hidden_layers;
    ensure!(raw.sliding_window != Some(0), "sliding_window is 0");
    let used = match architecture {
        Architecture::Llama => false,
        Architecture::Mistral => true,
        Architecture::Qwen2 | Architecture::Qwen3 => raw.use_sliding_window.unwrap_or(false),
    };
    let window = if used { raw.sliding_window } else { None };
    if let Some(types) = &raw.layer_types {
        ensure!(types.len() == layers, "layer_types names {} layers of {layers}", types.len());
        return types
            .iter()
            .map(|kind| match kind.as_str() {
                "full_attention" => Ok(None),
                "sliding_attention" => window
                    .map(Some)
                    .context("layer_types asks for sliding_attention, but there is no sliding_window in use"),
                other => bail!("layer type {other:?} is not supported, only full_attention and sliding_attention"),
            })
            .collect();
    }
    let first = match architecture {
        Architecture::Qwen2 | Architecture::Qwen3 => raw.max_window_layers.unwrap_or(28),
        Architecture::Llama | Architecture::Mistral => 0,
    };
    Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect())
}

/// `rope_parameters` of newer files holds everything; older ones have `rope_theta` and `rope_scaling`.
fn rope(raw: &Raw) -> Result<(f64, RopeScaling)> {
    let parameters = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref()).filter(|v| !v.is_null());
    let theta =
        parameters.and_then(|p| p.get("rope_theta")).and_then(Value::as_f64).or(raw.rope_theta).unwrap_or(10_000.0);
    ensure!(theta.is_finite() && theta > 1.0, "rope_theta is {theta}");
    let partial = parameters
        .and_then(|p| p.get("partial_rotary_factor"))
        .and_then(Value::as_f64)
        .or(raw.partial_rotary_factor)
        .unwrap_or(1.0);
    ensure!(partial == 1.0, "partial_rotary_factor {partial} is not supported");
    let Some(parameters) = parameters else { return Ok((theta, RopeScaling::None)) };
    ensure!(parameters.is_object(), "RoPE parameters are no object: {parameters}");
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type")).and_then(Value::as_str);
    let number = |name: &str| -> Result<f64> {
        let value = parameters.get(name).and_then(Value::as_f64);
        let value = value.with_context(|| format!("RoPE type {:?} needs {name}", kind.unwrap_or("default")))?;
        ensure!(value.is_finite() && value > 0.0, "RoPE {name} is {value}");
        Ok(value)
    };
    let scaling = match kind {
        None if parameters.get("factor").is_some() => bail!("RoPE parameters {parameters} name no rope_type"),
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("llama3") => {
            let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
            ensure!(low < high, "RoPE low_freq_factor {low} is not below high_freq_factor {high}");
            let original = number("original_max_position_embeddings")?;
            RopeScaling::Llama3 { factor: number("factor")?, low, high, original }
        }
        Some(other) => bail!("RoPE type {other:?} is not supported; supported are default, linear, llama3"),
    };
    Ok((theta, scaling))
}

/// One id, a list of ids, or nothing.
fn ids(value: Option<&Value>) -> Result<Vec<u32>> {
    let one = |v: &Value| -> Result<u32> {
        let id = v.as_u64().and_then(|id| u32::try_from(id).ok());
        id.with_context(|| format!("eos_token_id {v} is no token id"))
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(v) => Ok(vec![one(v)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn base() -> Value {
        json!({"model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
               "num_attention_heads": 4, "max_position_embeddings": 128})
    }

    fn with(changes: Value) -> Result<ModelConfig> {
        let mut config = base();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        ModelConfig::parse(&config.to_string())
    }

    #[test]
    fn defaults_of_an_old_llama_file() {
        let config = with(json!({"eos_token_id": [2, 7], "rope_scaling": null})).unwrap();
        assert_eq!((config.kv_heads, config.head_dim, config.layers()), (4, 8, 3));
        assert_eq!((config.rope_theta, config.rope_scaling), (10_000.0, RopeScaling::None));
        assert_eq!(config.windows, [None; 3]);
        assert_eq!(config.eos, [2, 7]);
        assert!(!config.qkv_bias && !config.tied_head && !config.qk_norm);
    }

    #[test]
    fn rope_in_both_spellings() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 8192});
        let old = with(json!({"rope_theta": 5e5, "rope_scaling": llama3})).unwrap();
        let mut parameters = llama3.clone();
        parameters["rope_theta"] = json!(5e5);
        assert_eq!(old, with(json!({"rope_parameters": parameters})).unwrap());
        assert_eq!(old.rope_scaling, RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 });
        let linear = with(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn windows_by_family() {
        let mistral = with(json!({"model_type": "mistral", "sliding_window": 16})).unwrap();
        assert_eq!(mistral.windows, [Some(16); 3]);
        assert_eq!(with(json!({"model_type": "mistral", "sliding_window": null})).unwrap().windows, [None; 3]);
        let qwen = json!({"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 2});
        assert_eq!(with(qwen.clone()).unwrap().windows, [None; 3], "use_sliding_window is off by default");
        let mut used = qwen;
        used["use_sliding_window"] = json!(true);
        assert_eq!(with(used).unwrap().windows, [None, None, Some(16)]);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (changes, needle) in [
            (json!({"model_type": "gemma3"}), "gemma3"),
            (json!({"model_type": null, "architectures": ["FooForCausalLM"]}), "FooForCausalLM"),
            (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "yarn"),
            (json!({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}), "low_freq_factor"),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (json!({"num_key_value_heads": 3}), "3 KV heads"),
            (json!({"head_dim": 7}), "head_dim 7"),
            (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
            (json!({"sliding_window": 0}), "sliding_window"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
            (json!({"vocab_size": "many"}), "line 1 column"),
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (json!({"layer_types": ["linear_attention", "full_attention", "full_attention"]}), "linear_attention"),
        ] {
            let error = with(changes.clone()).map(|_| ()).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(needle), "{changes}: {error}");
        }
    }
}
