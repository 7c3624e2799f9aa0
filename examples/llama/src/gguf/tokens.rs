//! The tokenizer in the metadata of a GGUF file.
//!
//! Two kinds are supported, by `tokenizer.ggml.model`:
//!
//! - `gpt2`: byte-level BPE with merges. candle builds the tokenizer. `tokenizer.ggml.pre` names the rule that splits
//!   text into words. candle has the rules of Llama 3 and Qwen 2. This file has the rules of GPT-2 and SmolLM.
//! - `llama`: SentencePiece BPE. The file has a score per token and no merges, so that merges are made of scores. The
//!   method is `generate_merges` of `transformers` (`convert_slow_tokenizer.py`).

use std::collections::HashMap;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::{Content, Value as CandleValue, VersionedMagic};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use serde_json::json;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{PreTokenizerWrapper, Tokenizer};

use super::header::GgufHeader;
use super::value::{MetaList, MetaValue};

/// Tokens of these types are special: unknown, control, user-defined, unused.
const SPECIAL: std::ops::RangeInclusive<u64> = 2..=5;

/// Returns the tokenizer of a file.
///
/// # Errors
/// Fails if the file has no tokenizer, or one of an unknown kind. The error says which.
pub fn tokenizer(header: &GgufHeader<'_>) -> Result<Tokenizer> {
    match header.text("tokenizer.ggml.model")?.as_deref() {
        Some("gpt2") => byte_level(header),
        Some("llama") => sentence_piece(header),
        Some(other) => bail!("the kind of tokenizer {other:?} is not supported; gpt2 and llama are"),
        None => bail!("the file has no tokenizer"),
    }
}

/// Returns a list that the tokenizer needs.
fn needed<'a>(header: &GgufHeader<'a>, name: &str) -> Result<MetaList<'a>> {
    header.list(name)?.with_context(|| format!("metadata has no {name}"))
}

/// Returns a byte-level BPE tokenizer.
fn byte_level(header: &GgufHeader<'_>) -> Result<Tokenizer> {
    let pre = header.text("tokenizer.ggml.pre")?;
    // llama.cpp names the rules after models.
    let (rule, words) = match pre.as_deref() {
        Some("llama-bpe" | "llama3" | "llama-v3" | "smaug-bpe") => ("llama3", None),
        Some("qwen2" | "deepseek-r1-qwen") => ("qwen2", None),
        Some("gpt-2") => ("gpt2", Some(gpt2_words())),
        // Every digit is a word of its own.
        Some("smollm") => {
            let steps = vec![PreTokenizerWrapper::Digits(Digits::new(true)), gpt2_words()];
            ("gpt2", Some(PreTokenizerWrapper::Sequence(Sequence::new(steps))))
        }
        Some(other) => bail!("the splitting rule {other:?} of the tokenizer is not supported"),
        None => bail!("the tokenizer has no splitting rule (tokenizer.ggml.pre)"),
    };
    let mut metadata = HashMap::new();
    for (&name, value) in header.metadata().iter().filter(|(name, _)| name.starts_with("tokenizer.ggml.")) {
        metadata.insert(name.to_owned(), candle_value(value)?);
    }
    let mut put = |name: &str, value| {
        metadata.insert(format!("tokenizer.ggml.{name}"), value);
    };
    put("pre", CandleValue::String(rule.to_owned()));
    if rule == "llama3" {
        // Llama 3 takes a whole word from the vocabulary before it merges, and begins texts with its first token.
        put("ignore_merges", CandleValue::Bool(true));
        if !header.metadata().contains_key("tokenizer.ggml.add_bos_token") {
            put("add_bos_token", CandleValue::Bool(true));
        }
    }
    let content =
        Content { magic: VersionedMagic::GgufV3, metadata, tensor_infos: HashMap::new(), tensor_data_offset: 0 };
    let mut tokenizer = Tokenizer::from_gguf(&content).context("the tokenizer in the metadata")?;
    if words.is_some() {
        tokenizer.with_pre_tokenizer(words);
    }
    Ok(tokenizer)
}

/// Returns the rule of GPT-2, without the space that candle puts in front of a text.
fn gpt2_words() -> PreTokenizerWrapper {
    PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true))
}

/// Returns a value as candle holds it.
fn candle_value(value: &MetaValue<'_>) -> Result<CandleValue> {
    Ok(match *value {
        MetaValue::Unsigned(n) => CandleValue::U64(n),
        MetaValue::Signed(n) => CandleValue::I64(n),
        MetaValue::Float(x) => CandleValue::F64(x),
        MetaValue::Bool(on) => CandleValue::Bool(on),
        MetaValue::Text(bytes) => CandleValue::String(String::from_utf8_lossy(bytes).into_owned()),
        MetaValue::List(list) => CandleValue::Array(list.values().map(|v| candle_value(&v)).collect::<Result<_>>()?),
    })
}

/// Returns a SentencePiece BPE tokenizer.
fn sentence_piece(header: &GgufHeader<'_>) -> Result<Tokenizer> {
    let tokens = needed(header, "tokenizer.ggml.tokens")?;
    let texts = tokens.values().map(|v| v.text().map(String::from)).collect::<Option<Vec<String>>>();
    let texts = texts.context("tokenizer.ggml.tokens is not a list of texts")?;
    let scores = needed(header, "tokenizer.ggml.scores")?;
    let scores = scores.values().map(|v| v.number()).collect::<Option<Vec<f64>>>();
    let scores = scores.context("tokenizer.ggml.scores is not a list of numbers")?;
    ensure!(texts.len() == scores.len(), "{} tokens have {} scores", texts.len(), scores.len());
    let kinds = match header.list("tokenizer.ggml.token_type")? {
        Some(list) => list.values().map(|v| v.count().unwrap_or(1)).collect(),
        None => vec![1; texts.len()],
    };
    let vocabulary: HashMap<&str, u32> = texts.iter().zip(0..).map(|(text, id)| (text.as_str(), id)).collect();
    let merges = merges(&texts, &scores, &vocabulary);
    let special = |id: u32| texts.get(id as usize).map(|text| (id, text));
    let id = |key: &str| -> Result<Option<u32>> {
        let id = header.count(&format!("tokenizer.ggml.{key}"))?;
        id.map(|id| u32::try_from(id).with_context(|| format!("{key} is {id}"))).transpose()
    };
    let flag = |key: &str, default: bool| match header.metadata().get(format!("tokenizer.ggml.{key}").as_str()) {
        Some(MetaValue::Bool(on)) => *on,
        _ => default,
    };
    let unknown = id("unknown_token_id")?.and_then(special).or_else(|| special(0)).map(|(_, text)| text.clone());
    let begin = if flag("add_bos_token", true) { id("bos_token_id")?.and_then(special) } else { None };
    let mut steps = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if flag("add_space_prefix", true) {
        steps.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let added = texts.iter().zip(&kinds).zip(0_u32..).filter(|((_, kind), _)| SPECIAL.contains(kind));
    let added = added.map(|((text, _), id)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": null,
        "post_processor": begin.map(|(id, text)| template(id, text)),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
                  "vocab": vocabulary, "merges": merges},
    });
    Tokenizer::from_str(&tokenizer.to_string()).map_err(|e| anyhow!("the tokenizer in the metadata: {e}"))
}

/// Returns the step that puts a token in front of a text.
fn template(id: u32, text: &str) -> serde_json::Value {
    let token = json!({"SpecialToken": {"id": text, "type_id": 0}});
    json!({
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [token, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    })
}

/// Returns every pair of tokens that join to a token, those with the highest score of the result first.
fn merges(texts: &[String], scores: &[f64], vocabulary: &HashMap<&str, u32>) -> Vec<[String; 2]> {
    let mut found = Vec::new();
    for (text, &score) in texts.iter().zip(scores) {
        let mut pairs = Vec::new();
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(a), Some(b)) = (vocabulary.get(left), vocabulary.get(right)) {
                pairs.push(((*a, *b), left, right));
            }
        }
        pairs.sort_by_key(|(ids, _, _)| *ids);
        found.extend(pairs.into_iter().map(|(_, left, right)| (score, left, right)));
    }
    let length = |text: &str| text.chars().count();
    found.sort_by(|a, b| {
        let (x, y) = ((length(a.1), length(a.2)), (length(b.1), length(b.2)));
        b.0.total_cmp(&a.0).then(y.cmp(&x))
    });
    found.into_iter().map(|(_, left, right)| [left.to_owned(), right.to_owned()]).collect()
}
