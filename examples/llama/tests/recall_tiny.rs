//! Compares the trained fixture with its reference tensors and answers.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use indicatif::ProgressBar;
use stratakv_llama::kv::memory::MemoryPolicy;
use stratakv_llama::kv::{KvCache, KvDType, KvGeometry, MemoryKv};
use stratakv_llama::model::{LogitPositions, Model, argmax};
use stratakv_llama::recall::{self, RecallRun};

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recall-tiny")
}

fn prompts(limit: usize) -> Vec<recall::Prompt> {
    recall::load(&fixture().join("prompts.jsonl.gz"), &[], &[1024, 2048], limit).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn worst(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Converts `[tokens, kv_heads, dim]` to the reference's order, `[kv_heads, tokens, dim]`.
fn head_major(token_major: &[f32], heads: usize, dim: usize) -> Vec<f32> {
    let tokens = token_major.len() / (heads * dim);
    let mut out = Vec::with_capacity(token_major.len());
    for head in 0..heads {
        for t in 0..tokens {
            out.extend_from_slice(&token_major[(t * heads + head) * dim..][..dim]);
        }
    }
    out
}

#[test]
fn logits_keys_and_values_equal_the_reference() {
    let model = Model::load(&fixture()).unwrap();
    let reference: HashMap<String, Tensor> =
        candle_core::safetensors::load(fixture().join("reference.safetensors"), &Device::Cpu).unwrap();
    let listed: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(fixture().join("reference.json")).unwrap()).unwrap();
    let prompts = prompts(25);
    for entry in listed["prompts"].as_array().unwrap() {
        let i = entry["i"].as_u64().unwrap();
        let prompt = prompts.iter().find(|p| p.id == entry["id"].as_str().unwrap()).unwrap();
        let mut kv = MemoryKv::new(model.kv_geometry(KvDType::F32), MemoryPolicy::Full);
        let logits = model.prefill(&prompt.prompt, &mut [&mut kv], LogitPositions::Last, &|_| ()).unwrap();
        assert!(worst(&logits, &floats(&reference[&format!("p{i}.logits")])) < 2e-4, "logits of {}", prompt.id);
        assert_eq!(argmax(&logits).map(u64::from), entry["argmax"].as_u64());
        for (layer, name) in [(0, "first"), (model.config().layers() - 1, "last")] {
            let keys = head_major(&kv.keys(layer, 0..64).unwrap(), 2, 64);
            let values = head_major(&kv.values(layer, 0..64).unwrap(), 2, 64);
            assert!(
                worst(&keys, &floats(&reference[&format!("p{i}.k_{name}")])) < 2e-4,
                "{name} keys of {}",
                prompt.id
            );
            assert!(
                worst(&values, &floats(&reference[&format!("p{i}.v_{name}")])) < 2e-4,
                "{name} values of {}",
                prompt.id
            );
        }
    }
}

#[test]
fn decode_steps_equal_prefill() {
    let model = Model::load(&fixture()).unwrap();
    let prompt = &prompts(1)[0].prompt[..300];
    let vocab = model.config().vocab_size;
    let all = model.prefill(prompt, &mut [], LogitPositions::All, &|_| ()).unwrap();
    let mut kv = MemoryKv::new(model.kv_geometry(KvDType::F32), MemoryPolicy::Full);
    for (t, &id) in prompt.iter().enumerate() {
        let logits = model.decode(id, &mut kv).unwrap();
        assert!(worst(&logits, &all[t * vocab..][..vocab]) < 1e-3, "position {t}");
    }
}

#[test]
fn decode_steps_after_a_short_prefill_fill_caches_as_a_full_prefill_does() {
    let model = Model::load(&fixture()).unwrap();
    let mut prompt = prompts(1)[0].clone();
    prompt.prompt.drain(200..prompt.query_start);
    prompt.query_start = 200;
    let empty = || MemoryKv::new(model.kv_geometry(KvDType::F32), MemoryPolicy::Full);
    let filled = |prefill: Option<usize>| {
        let (mut first, mut second, told) = (empty(), empty(), std::cell::Cell::new(0));
        let (ids, tick) = (&prompt.prompt[..200], |n| told.set(told.get() + n));
        recall::fill(&model, ids, prefill, &mut [&mut first, &mut second], LogitPositions::Nothing, &tick).unwrap();
        assert_eq!((first.len(), second.len(), told.get()), (200, 200, 200));
        for layer in 0..model.config().layers() {
            assert_eq!(first.keys(layer, 0..200).unwrap(), second.keys(layer, 0..200).unwrap());
        }
        recall::answer(&model, &prompt, &mut second).unwrap()
    };
    let expected = filled(None);
    for prefill in [1, 150, 200] {
        let got = filled(Some(prefill));
        for (a, b) in got.logits.iter().zip(&expected.logits) {
            assert!(worst(a, b) < 1e-3, "prefill of {prefill} tokens");
        }
        assert_eq!(got.predicted, expected.predicted);
    }
    for wrong in [0, 201] {
        let mut cache = empty();
        let ids = &prompt.prompt[..200];
        let error =
            recall::fill(&model, ids, Some(wrong), &mut [&mut cache], LogitPositions::Nothing, &|_| ()).unwrap_err();
        assert!(error.to_string().contains("gets 200 tokens"), "{error}");
    }
}

/// Runs the prompts with caches in memory, of full attention and of this policy.
fn run_in_memory(
    model: &Model,
    prompts: &[recall::Prompt],
    label: (&str, &str),
    geometry: &KvGeometry,
    policy: MemoryPolicy,
) -> recall::Report {
    let bar = ProgressBar::hidden();
    let run = RecallRun { model, prompts, policy: label, prefill: None, questions: None, profile: None, bar: &bar };
    run.run(
        || Ok(MemoryKv::new(geometry.clone(), MemoryPolicy::Full)),
        |_| Ok(MemoryKv::new(geometry.clone(), policy)),
        |cache| Ok(cache.clone()),
        |_, _| Ok(()),
    )
    .unwrap()
}

#[test]
fn full_attention_answers_as_the_reference_says() {
    let model = Model::load(&fixture()).unwrap();
    let prompts = recall::load(&fixture().join("prompts.jsonl.gz"), &[], &[1024], 2).unwrap();
    for dtype in [KvDType::F32, KvDType::F16] {
        let geometry = model.kv_geometry(dtype);
        let report = run_in_memory(&model, &prompts, ("full", "1"), &geometry, MemoryPolicy::Full);
        assert_eq!(report.cells.len(), 5);
        for cell in &report.cells {
            assert_eq!((cell.n, cell.full_accuracy, cell.accuracy), (2, 1.0, 1.0), "{} at {dtype:?}", cell.task);
            assert_eq!((cell.same_answers, cell.logit_difference_max), (2, 0.0), "both caches attend alike");
            assert_eq!(cell.kv_bytes_total % geometry.bytes_per_token() as u64, 0);
        }
    }
}

#[test]
fn the_window_policy_alone_does_not_find_the_answers() {
    let model = Model::load(&fixture()).unwrap();
    let prompts = recall::load(&fixture().join("prompts.jsonl.gz"), &[], &[1024], 2).unwrap();
    let geometry = model.kv_geometry(KvDType::F32);
    let policy = MemoryPolicy::Window { sinks: 4, budget: "1/13".parse().unwrap() };
    let report = run_in_memory(&model, &prompts, ("window", "1/13"), &geometry, policy);
    let (_, accuracy, full) = report.means()[0];
    assert!(full == 1.0 && accuracy < 0.4, "full {full}, window {accuracy}");
    for cell in &report.cells {
        let share = cell.kv_bytes_read_per_step as f64 / cell.kv_bytes_total as f64;
        assert!(share > 0.05 && share <= 1.0 / 13.0, "{}: {share} of the KV read per step", cell.task);
    }
}

#[test]
fn unknown_tokens_and_too_long_prompts_are_errors() {
    let model = Model::load(&fixture()).unwrap();
    let refuse = |ids: &[u32]| model.prefill(ids, &mut [], LogitPositions::Last, &|_| ()).unwrap_err().to_string();
    assert!(refuse(&[]).contains("empty"));
    assert!(refuse(&[1, 256]).contains("token id 256 at position 1"));
    assert!(refuse(&[1; 8193]).contains("8193 tokens are more than the model's 8192"));
    let mut kv = MemoryKv::new(model.kv_geometry(KvDType::F32), MemoryPolicy::Full);
    model.prefill(&[1, 2, 3], &mut [&mut kv], LogitPositions::Nothing, &|_| ()).unwrap();
    let again = model.prefill(&[1], &mut [&mut kv], LogitPositions::Last, &|_| ()).unwrap_err().to_string();
    assert!(again.contains("holds 3 tokens"), "{again}");
    assert!(model.decode(999, &mut kv).is_err());
    assert_eq!(model.decode(4, &mut kv).unwrap().len(), 256);
}

#[test]
fn broken_model_directories_are_errors_that_name_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let load = || format!("{:#}", Model::load(dir.path()).map(|_| ()).unwrap_err());
    assert!(load().contains("config.json"));
    let config = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), &config).unwrap();
    assert!(load().contains("model.safetensors.index.json"));
    std::fs::copy(fixture().join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    assert!(Model::load(dir.path()).is_ok());

    let deeper = config.replace("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
    std::fs::write(dir.path().join("config.json"), deeper).unwrap();
    let error = load();
    assert!(error.contains("model.layers.4.input_layernorm.weight") && error.contains("missing"), "{error}");
    let wider = config.replace("\"intermediate_size\": 512", "\"intermediate_size\": 640");
    std::fs::write(dir.path().join("config.json"), wider).unwrap();
    let error = load();
    assert!(error.contains("mlp.gate_proj.weight has shape [512, 256]") && error.contains("[640, 256]"), "{error}");

    std::fs::write(dir.path().join("config.json"), &config).unwrap();
    let bytes = std::fs::read(fixture().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
    assert!(load().contains("cannot read weights"));
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let index = r#"{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    assert!(load().contains("not a file of this directory"));
}
