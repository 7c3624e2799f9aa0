//! Makes GGUF files: from a Hugging Face model directory, or with random weights of a real model's geometry.
//!
//! Both are for tests and measurements. A file has no tokenizer; a `tokenizer.json` beside it serves instead.
//!
//! 1. The configuration implies the tensors, their shapes and the metadata.
//! 2. Vectors are written as f32. Matrices are written in the type that is asked for. A matrix whose rows are not whole
//!    blocks of that type is written as f16.
//! 3. Rows of a Llama's queries and keys are reordered, because GGUF files hold them for a rotation of neighbours.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::GgmlDType;

use crate::config::{Architecture, ModelConfig, RopeScaling};
use crate::gguf::kind::number_and_name;
use crate::gguf::to_gguf;
use crate::gguf::write::{NewTensor, NewValue, header, pad_tensor, quantise};
use crate::random_model::RandomWeights;
use crate::rope::RotaryFrequencies;
use crate::weights::Weights;

/// Elements that are converted at a time.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// The weights that are written.
pub enum WeightSource {
    /// The weights of a model directory.
    Stored(Weights),
    /// Random ones.
    Random(Box<RandomWeights>),
}

/// One tensor of a model.
struct ModelTensor {
    /// The Hugging Face name.
    name: String,
    rows: usize,
    /// `None` for a vector.
    columns: Option<usize>,
    /// True if its rows are the outputs of heads of queries or keys.
    is_rotated: bool,
}

/// Writes a model as a GGUF file. Returns the file's length and the number of matrices that became f16.
///
/// # Errors
/// Fails if a tensor is missing, if the model cannot be described in GGUF, or if the file cannot be written.
pub fn write_gguf(
    config: &ModelConfig,
    source: &mut WeightSource,
    kind: GgmlDType,
    out: &Path,
) -> Result<(u64, usize)> {
    let factors = frequency_factors(config);
    let tensors = tensors(config);
    let mut listed = Vec::new();
    for tensor in &tensors {
        let name = to_gguf(&tensor.name).with_context(|| format!("{} has no name in GGUF files", tensor.name))?;
        let (shape, kind) = match tensor.columns {
            None => (vec![tensor.rows], GgmlDType::F32),
            Some(columns) if columns.is_multiple_of(kind.block_size()) => (vec![tensor.rows, columns], kind),
            Some(columns) => (vec![tensor.rows, columns], GgmlDType::F16),
        };
        listed.push(NewTensor { name, shape, kind });
    }
    let fallen = listed.iter().filter(|tensor| tensor.shape.len() == 2 && tensor.kind != kind).count();
    if let Some(factors) = &factors {
        let shape = vec![factors.len()];
        listed.insert(0, NewTensor { name: "rope_freqs.weight".to_owned(), shape, kind: GgmlDType::F32 });
    }
    let place = || format!("cannot write {}", out.display());
    let mut file = BufWriter::with_capacity(1 << 20, File::create(out).with_context(place)?);
    file.write_all(&header(&metadata(config, kind)?, &listed)?).with_context(place)?;
    let mut kinds = listed.iter().map(|tensor| tensor.kind);
    if let Some(factors) = &factors {
        let bytes: Vec<u8> = factors.iter().flat_map(|x| x.to_le_bytes()).collect();
        file.write_all(&bytes).with_context(place)?;
        pad_tensor(&mut file, bytes.len())?;
        kinds.next();
    }
    for (tensor, kind) in tensors.iter().zip(kinds) {
        let written = source.write(config, tensor, kind, &mut file).with_context(|| tensor.name.clone())?;
        pad_tensor(&mut file, written).with_context(place)?;
    }
    let file = file.into_inner().map_err(std::io::IntoInnerError::into_error).with_context(place)?;
    Ok((file.metadata().with_context(place)?.len(), fallen))
}

impl WeightSource {
    /// Writes one tensor, and returns its bytes.
    fn write(
        &mut self,
        config: &ModelConfig,
        tensor: &ModelTensor,
        kind: GgmlDType,
        out: &mut impl Write,
    ) -> Result<usize> {
        let columns = tensor.columns.unwrap_or(1);
        match self {
            Self::Random(random) => random.write(tensor.rows, tensor.columns, kind, out),
            Self::Stored(weights) => {
                let matrix = match tensor.columns {
                    Some(columns) => weights.matrix(&[(tensor.name.clone(), tensor.rows)], columns)?,
                    None => weights.column(&tensor.name, tensor.rows)?,
                };
                let order = row_order(config, tensor);
                let chunk = (CHUNK_ELEMENTS / columns).max(1);
                let mut written = 0;
                for rows in order.chunks(chunk) {
                    let floats = matrix.gather(rows)?;
                    let bytes = quantise(floats, columns, kind)?;
                    out.write_all(&bytes)?;
                    written += bytes.len();
                }
                Ok(written)
            }
        }
    }
}

/// Returns the rows in the order that the file has them in.
fn row_order(config: &ModelConfig, tensor: &ModelTensor) -> Vec<u32> {
    let rows = 0..tensor.rows as u32;
    if !tensor.is_rotated || !is_reordered(config.architecture) {
        return rows.collect();
    }
    let (dim, half) = (config.head_dim as u32, config.head_dim as u32 / 2);
    rows.map(|row| row / dim * dim + row % dim % 2 * half + row % dim / 2).collect()
}

/// Returns whether GGUF files hold this architecture's heads for a rotation of neighbouring elements.
fn is_reordered(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::Llama | Architecture::Mistral)
}

/// Returns the tensors that the configuration implies.
fn tensors(config: &ModelConfig) -> Vec<ModelTensor> {
    let c = config;
    let (hidden, wide) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let mut all = Vec::new();
    let mut put = |name: String, rows: usize, columns: Option<usize>, is_rotated: bool| {
        all.push(ModelTensor { name, rows, columns, is_rotated });
    };
    put("model.embed_tokens.weight".to_owned(), c.vocab_size, Some(hidden), false);
    put("model.norm.weight".to_owned(), hidden, None, false);
    if !c.tied_head {
        put("lm_head.weight".to_owned(), c.vocab_size, Some(hidden), false);
    }
    for layer in 0..c.layers() {
        let name = |part: &str, suffix: &str| format!("model.layers.{layer}.{part}.{suffix}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            put(name(norm, "weight"), hidden, None, false);
        }
        for norm in ["self_attn.q_norm", "self_attn.k_norm"].into_iter().filter(|_| c.qk_norm) {
            put(name(norm, "weight"), c.head_dim, None, false);
        }
        for (part, rows, columns, bias, is_rotated) in [
            ("self_attn.q_proj", q, hidden, c.qkv_bias, true),
            ("self_attn.k_proj", kv, hidden, c.qkv_bias, true),
            ("self_attn.v_proj", kv, hidden, c.qkv_bias, false),
            ("self_attn.o_proj", hidden, q, c.output_bias, false),
            ("mlp.gate_proj", wide, hidden, c.mlp_bias, false),
            ("mlp.up_proj", wide, hidden, c.mlp_bias, false),
            ("mlp.down_proj", hidden, wide, c.mlp_bias, false),
        ] {
            put(name(part, "weight"), rows, Some(columns), is_rotated);
            if bias {
                put(name(part, "bias"), rows, None, is_rotated);
            }
        }
    }
    all
}

/// Returns Llama 3's factors of the rotary frequencies, or `None` for another scaling.
fn frequency_factors(config: &ModelConfig) -> Option<Vec<f32>> {
    let RopeScaling::Llama3 { .. } = config.rope_scaling else { return None };
    let plain = RotaryFrequencies::new(&ModelConfig { rope_scaling: RopeScaling::None, ..config.clone() });
    let scaled = RotaryFrequencies::new(config);
    Some(plain.values().iter().zip(scaled.values()).map(|(plain, scaled)| plain / scaled).collect())
}

/// Returns the metadata of a model.
fn metadata(config: &ModelConfig, kind: GgmlDType) -> Result<Vec<(String, NewValue)>> {
    let architecture = match config.architecture {
        Architecture::Llama | Architecture::Mistral => "llama",
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
    };
    let count = |n: usize| Ok::<_, anyhow::Error>(NewValue::Count(u32::try_from(n)?));
    let text = |text: &str| NewValue::Text(text.to_owned());
    let mut entries = vec![
        ("general.architecture".to_owned(), text(architecture)),
        ("general.quantization_version".to_owned(), NewValue::Count(2)),
        ("tokenizer.ggml.model".to_owned(), text("no_vocab")),
    ];
    let mut put = |key: &str, value: NewValue| entries.push((format!("{architecture}.{key}"), value));
    for (key, n) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("block_count", config.layers()),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ] {
        put(key, count(n)?);
    }
    put("attention.layer_norm_rms_epsilon", NewValue::Number(config.norm_eps));
    put("rope.freq_base", NewValue::Number(config.rope_theta as f32));
    match config.rope_scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            put("rope.scaling.type", text("linear"));
            put("rope.scaling.factor", NewValue::Number(factor as f32));
        }
        RopeScaling::Llama3 { low, high, original, .. } => {
            ensure!((low, high) == (1.0, 4.0), "Llama 3 frequencies from {low} to {high} have no form in GGUF files");
            put("rope.scaling.original_context_length", count(original as usize)?);
        }
    }
    if let Some(window) = config.windows.iter().flatten().next() {
        ensure!(config.windows.iter().flatten().all(|w| w == window), "layers have windows of several lengths");
        put("attention.sliding_window", count(*window)?);
        put("attention.sliding_window_pattern", NewValue::Flags(config.windows.iter().map(Option::is_some).collect()));
    }
    if let Some(eos) = config.eos.first() {
        entries.push(("tokenizer.ggml.eos_token_id".to_owned(), NewValue::Count(*eos)));
    }
    entries.push(("general.name".to_owned(), NewValue::Text(format!("{architecture} {}", number_and_name(kind)?.1))));
    Ok(entries)
}

/// Returns the type with this name, such as `q4_k`.
///
/// # Errors
/// Fails if no supported type has the name. The error lists them.
pub fn parse_kind(text: &str) -> Result<GgmlDType> {
    let kinds = crate::gguf::kind::TENSOR_KINDS;
    match kinds.iter().find(|(_, name, _)| name.eq_ignore_ascii_case(text)) {
        Some((_, _, kind)) => Ok(*kind),
        None => bail!("{text:?} is not one of {}", kinds.map(|(_, name, _)| name.to_ascii_lowercase()).join(", ")),
    }
}
