//! Compares every supported architecture with logits that `transformers` computed (`make_reference.py`).

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use stratakv_llama::kv::memory::MemoryPolicy;
use stratakv_llama::kv::{KvDType, MemoryKv};
use stratakv_llama::model::{LogitPositions, Model, argmax};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny-arch").join(name)
}

fn reference(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(name).join("reference.safetensors"), &Device::Cpu).unwrap()
}

fn ids(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec1::<i64>().unwrap().into_iter().map(|x| u32::try_from(x).unwrap()).collect()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-4, "{what}: off by {worst}");
}

/// Checks prefill at every position, a greedy continuation, and a prompt that decode steps feed.
fn check(name: &str) {
    let model = Model::load(&fixture(name)).unwrap();
    let reference = reference(name);
    let (prompt, continuation) = (ids(&reference["prompt"]), ids(&reference["continuation"]));
    let (logits, steps) = (floats(&reference["logits"]), floats(&reference["steps"]));
    let vocab = model.config().vocab_size;
    let new = || MemoryKv::new(model.kv_geometry(KvDType::F32), MemoryPolicy::Full);

    let mut kv = new();
    let got = model.prefill(&prompt, &mut [&mut kv], LogitPositions::All, &|_| ()).unwrap();
    assert_close(&format!("{name}: prefill"), &got, &logits);

    let mut last = got[(prompt.len() - 1) * vocab..].to_vec();
    for (i, &expected) in continuation.iter().enumerate() {
        assert_close(&format!("{name}: step {i}"), &last, &steps[i * vocab..][..vocab]);
        let id = argmax(&last).unwrap();
        assert_eq!(id, expected, "{name}: continuation token {i}");
        last = model.decode(id, &mut kv).unwrap();
    }

    let mut kv = new();
    for (t, &id) in prompt.iter().enumerate() {
        let got = model.decode(id, &mut kv).unwrap();
        assert_close(&format!("{name}: decode at {t}"), &got, &logits[t * vocab..][..vocab]);
    }
    let only_last = model.prefill(&prompt, &mut [], LogitPositions::Last, &|_| ()).unwrap();
    assert_close(&format!("{name}: last position alone"), &only_last, &logits[(prompt.len() - 1) * vocab..]);
}

#[test]
fn llama3_with_scaled_rope_and_shards_equals_the_reference() {
    check("llama3");
}

#[test]
fn llama2_with_multi_head_attention_and_a_tied_head_equals_the_reference() {
    check("llama2-tied");
}

#[test]
fn llama_with_linear_rope_and_biases_equals_the_reference() {
    check("llama-linear-bias");
}

#[test]
fn mistral_with_a_sliding_window_equals_the_reference() {
    check("mistral-window");
}

#[test]
fn qwen2_with_biases_and_a_tied_head_equals_the_reference() {
    check("qwen2");
}

#[test]
fn qwen2_with_a_window_in_some_layers_equals_the_reference() {
    check("qwen2-window");
}

#[test]
fn qwen3_with_head_norms_equals_the_reference() {
    check("qwen3");
}
