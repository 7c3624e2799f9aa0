//! Reads `config.json` of a Hugging Face Llama-family model and checks it before any arithmetic uses it.
//!
//! 1. The file is parsed: its own keys, most of them optional.
//! 2. The architecture decides the defaults: biases, head norms, sliding windows.
//! 3. Sizes are bounded, so that later products of sizes cannot overflow.
//! 4. RoPE parameters are read in both spellings, `rope_scaling` and `rope_parameters`.
//!
//! Unsupported settings are errors that name the setting, so that a wrong model never gives wrong tokens silently.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use stratakv::layout::Rope;

use crate::kv::geometry::{KvDType, KvGeometry, LayerGeometry};

/// A supported architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3.
    Llama,
    /// Mistral. If it has a sliding window, every layer has it.
    Mistral,
    /// Qwen2 and 2.5. Queries, keys and values have biases.
    Qwen2,
    /// Qwen3. Each head of queries and keys has an RMS norm.
    Qwen3,
}

const SUPPORTED: &str = "llama, mistral, qwen2, qwen3";

/// How rotary frequencies are scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency is divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies are divided by the factor, high ones are kept, and the rest is interpolated (Llama 3.1).
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Frequencies with a wavelength above `original / low` are low.
        low: f64,
        /// Frequencies with a wavelength below `original / high` are high.
        high: f64,
        /// The context length of the original training.
        original: f64,
    },
}

/// A model's shape and constants.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub architecture: Architecture,
    /// The number of token ids.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements per head. `heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// The sliding window of each layer. The length is the number of layers.
    pub windows: Vec<Option<usize>>,
    /// The longest sequence that the model was made for.
    pub max_positions: usize,
    /// The addend to the mean square in RMS norms.
    pub norm_eps: f32,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// The scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// True if query, key and value projections have biases.
    pub qkv_bias: bool,
    /// True if the output projection has a bias.
    pub output_bias: bool,
    /// True if the MLP has biases.
    pub mlp_bias: bool,
    /// True if each query and key head has an RMS norm.
    pub qk_norm: bool,
    /// True if the output head is the embedding table.
    pub tied_head: bool,
    /// True if the weights of queries and keys give the two elements that RoPE rotates together next to each other.
    /// Otherwise they are half a head apart.
    pub paired_heads: bool,
    /// Token ids that end a text.
    pub eos: Vec<u32>,
}

/// The keys of `config.json` that this runtime uses.
#[derive(Deserialize)]
struct RawConfig {
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
    /// Reads `config.json` in `dir`. If there is a `generation_config.json`, its end-of-text ids are added.
    ///
    /// # Errors
    /// Fails if a file is missing or unreadable, if the architecture, RoPE type or activation is unsupported, or if a
    /// size is impossible.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!("{} is neither a GGUF file nor a model directory: cannot read {}", dir.display(), path.display())
        })?;
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
    /// Fails as [`ModelConfig::load`] does.
    pub fn parse(text: &str) -> Result<Self> {
        let raw: RawConfig = serde_json::from_str(text)?;
        let architecture = architecture(&raw)?;
        ensure!(raw.quantization_config.is_none(), "quantised weights are not supported (quantization_config)");
        if let Some(act) = raw.hidden_act.as_deref() {
            ensure!(act == "silu", "hidden_act {act:?} is not supported, only silu");
        }
        let (heads, kv_heads, head_dim) = heads(&raw)?;
        check_sizes(&raw, heads, head_dim)?;
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
            paired_heads: false,
            eos: ids(raw.eos_token_id.as_ref())?,
        })
    }

    /// Returns the number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Returns the geometry of this model's KV cache.
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

    /// Returns the rotation of this model's keys for a store's layout.
    ///
    /// # Errors
    /// Fails if the heads are longer than a layout can hold.
    pub fn rope(&self) -> Result<Rope> {
        let rope = Rope::new(u16::try_from(self.head_dim)?, self.rope_theta);
        Ok(rope.scaled(match self.rope_scaling {
            RopeScaling::None => stratakv::layout::RopeScaling::None,
            RopeScaling::Linear { factor } => stratakv::layout::RopeScaling::Linear { factor },
            RopeScaling::Llama3 { factor, low, high, original } => {
                stratakv::layout::RopeScaling::Llama3 { factor, low, high, original }
            }
        }))
    }
}

/// Returns the architecture that `model_type` or `architectures` names.
fn architecture(raw: &RawConfig) -> Result<Architecture> {
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
        None => bail!("there is no model_type, and architectures {:?} contains none of {SUPPORTED}", raw.architectures),
    }
}

/// Returns query heads, KV heads and the elements of a head.
fn heads(raw: &RawConfig) -> Result<(usize, usize, usize)> {
    let heads = raw.num_attention_heads;
    let kv_heads = raw.num_key_value_heads.unwrap_or(heads);
    ensure!(
        heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "num_attention_heads {heads} is not a multiple of {kv_heads} KV heads"
    );
    let head_dim = match raw.head_dim {
        Some(d) => d,
        None => {
            ensure!(
                raw.hidden_size.is_multiple_of(heads),
                "hidden_size {} is not a multiple of {heads} heads",
                raw.hidden_size
            );
            raw.hidden_size / heads
        }
    };
    ensure!(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim {head_dim} must be even, because RoPE rotates pairs");
    Ok((heads, kv_heads, head_dim))
}

/// Bounds the sizes, so that products of them cannot overflow.
fn check_sizes(raw: &RawConfig, heads: usize, head_dim: usize) -> Result<()> {
    for (name, size) in [
        ("vocab_size", raw.vocab_size),
        ("hidden_size", raw.hidden_size),
        ("intermediate_size", raw.intermediate_size),
        ("num_hidden_layers", raw.num_hidden_layers),
        ("max_position_embeddings", raw.max_position_embeddings),
    ] {
        ensure!(size > 0 && size <= 1 << 30, "{name} is {size}; it must be from 1 to {}", 1 << 30);
    }
    ensure!(
        raw.num_hidden_layers <= 4096,
        "num_hidden_layers is {}; at most 4096 are supported",
        raw.num_hidden_layers
    );
    ensure!(
        head_dim <= 1 << 16 && heads <= 1 << 16,
        "{heads} heads of {head_dim}: at most 65536 are supported of both"
    );
    Ok(())
}

/// Returns the sliding window of each layer.
fn windows(raw: &RawConfig, architecture: Architecture) -> Result<Vec<Option<usize>>> {
    let layers = raw.num_hidden_layers;
    ensure!(raw.sliding_window != Some(0), "sliding_window is 0; leave it out for full attention");
    let used = match architecture {
        Architecture::Llama => false,
        Architecture::Mistral => true,
        Architecture::Qwen2 | Architecture::Qwen3 => raw.use_sliding_window.unwrap_or(false),
    };
    let window = if used { raw.sliding_window } else { None };
    if let Some(types) = &raw.layer_types {
        ensure!(types.len() == layers, "layer_types has {} entries for {layers} layers", types.len());
        return types
            .iter()
            .map(|kind| match kind.as_str() {
                "full_attention" => Ok(None),
                "sliding_attention" => {
                    window.map(Some).context("layer_types has sliding_attention, but no sliding_window is in use")
                }
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

/// Returns theta and the scaling. Newer files hold both in `rope_parameters`, older files in `rope_theta` and
/// `rope_scaling`.
fn rope(raw: &RawConfig) -> Result<(f64, RopeScaling)> {
    let parameters = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref()).filter(|v| !v.is_null());
    let theta =
        parameters.and_then(|p| p.get("rope_theta")).and_then(Value::as_f64).or(raw.rope_theta).unwrap_or(10_000.0);
    ensure!(theta.is_finite() && theta > 1.0, "rope_theta is {theta}; it must be above 1");
    let partial = parameters
        .and_then(|p| p.get("partial_rotary_factor"))
        .and_then(Value::as_f64)
        .or(raw.partial_rotary_factor)
        .unwrap_or(1.0);
    ensure!(partial == 1.0, "partial_rotary_factor {partial} is not supported");
    let Some(parameters) = parameters else { return Ok((theta, RopeScaling::None)) };
    ensure!(parameters.is_object(), "RoPE parameters are not an object: {parameters}");
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type")).and_then(Value::as_str);
    let number = |name: &str| -> Result<f64> {
        let value = parameters.get(name).and_then(Value::as_f64);
        let value = value.with_context(|| format!("RoPE type {:?} needs {name}", kind.unwrap_or("default")))?;
        ensure!(value.is_finite() && value > 0.0, "RoPE {name} is {value}; it must be positive");
        Ok(value)
    };
    let scaling = match kind {
        None if parameters.get("factor").is_some() => bail!("RoPE parameters {parameters} have no rope_type"),
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("llama3") => {
            let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
            ensure!(low < high, "RoPE low_freq_factor {low} must be below high_freq_factor {high}");
            let original = number("original_max_position_embeddings")?;
            RopeScaling::Llama3 { factor: number("factor")?, low, high, original }
        }
        Some(other) => bail!("RoPE type {other:?} is not supported; supported are default, linear, llama3"),
    };
    Ok((theta, scaling))
}

/// Returns token ids from a JSON value that is one id, a list of ids, or nothing.
fn ids(value: Option<&Value>) -> Result<Vec<u32>> {
    let one = |v: &Value| -> Result<u32> {
        let id = v.as_u64().and_then(|id| u32::try_from(id).ok());
        id.with_context(|| format!("eos_token_id {v} is not a token id"))
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
        json!({"model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 64,
               "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128})
    }

    fn with(changes: Value) -> Result<ModelConfig> {
        let mut config = base();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        ModelConfig::parse(&config.to_string())
    }

    #[test]
    fn an_old_llama_file_gets_the_defaults() {
        let config = with(json!({"eos_token_id": [2, 7], "rope_scaling": null})).unwrap();
        assert_eq!((config.kv_heads, config.head_dim, config.layers()), (4, 8, 3));
        assert_eq!((config.rope_theta, config.rope_scaling), (10_000.0, RopeScaling::None));
        assert_eq!(config.windows, [None; 3]);
        assert_eq!(config.eos, [2, 7]);
        assert!(!config.qkv_bias && !config.tied_head && !config.qk_norm);
    }

    #[test]
    fn rope_parameters_parse_in_both_spellings() {
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
    fn sliding_windows_depend_on_the_architecture() {
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
    fn unsupported_settings_are_errors_that_name_them() {
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
