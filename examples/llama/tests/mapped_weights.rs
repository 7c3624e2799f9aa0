//! Weights in bf16 and f16 stay mapped: logits are the bits of an f32 copy, and a model takes little memory of its own.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use stratakv_llama::kv::memory::MemoryPolicy;
use stratakv_llama::kv::{KvDType, MemoryKv};
use stratakv_llama::model::{LogitPositions, Model};

/// Returns the logits of a prompt by prefill and by decode steps, as bits.
fn logits(dir: &Path, ids: &[u32]) -> Vec<u32> {
    let model = Model::load(dir).unwrap();
    let mut logits = model.prefill(ids, &mut [], LogitPositions::All, &|_| ()).unwrap();
    let mut kv = MemoryKv::new(model.kv_geometry(KvDType::F16), MemoryPolicy::Full);
    for &id in &ids[..ids.len().min(20)] {
        logits.extend(model.decode(id, &mut kv).unwrap());
    }
    assert!(logits.iter().all(|x| x.is_finite()));
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Copies a model of one weight file, with its weights converted to f32.
fn f32_copy(from: &Path, to: &Path) {
    std::fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, tensor)| {
        let halves = tensor.data().as_chunks::<2>().0.iter();
        let data: Vec<u8> = match tensor.dtype() {
            Dtype::BF16 => halves.flat_map(|b| bf16::from_le_bytes(*b).to_f32().to_le_bytes()).collect(),
            Dtype::F16 => halves.flat_map(|b| f16::from_le_bytes(*b).to_f32().to_le_bytes()).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (name, tensor.shape().to_vec(), data)
    });
    let tensors: Vec<_> = tensors.collect();
    let view = |shape: &[usize], data| TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap();
    let views = tensors.iter().map(|(name, shape, data)| (name.as_str(), view(shape, data)));
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors")).unwrap();
}

/// Writes a Qwen2 model with random weights in `dtype`, `"BF16"` or `"F16"`.
fn random_model(dir: &Path, sizes: [usize; 6], dtype: &str) {
    let [vocab, hidden, wide, layers, heads, kv_heads] = sizes;
    let config = json!({
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let kv = hidden / heads * kv_heads;
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocab, hidden])];
    for layer in 0..layers {
        for (part, shape) in [
            ("input_layernorm.weight", vec![hidden]),
            ("self_attn.q_proj.weight", vec![hidden, hidden]),
            ("self_attn.k_proj.weight", vec![kv, hidden]),
            ("self_attn.v_proj.weight", vec![kv, hidden]),
            ("self_attn.q_proj.bias", vec![hidden]),
            ("self_attn.k_proj.bias", vec![kv]),
            ("self_attn.v_proj.bias", vec![kv]),
            ("self_attn.o_proj.weight", vec![hidden, hidden]),
            ("post_attention_layernorm.weight", vec![hidden]),
            ("mlp.gate_proj.weight", vec![wide, hidden]),
            ("mlp.up_proj.weight", vec![wide, hidden]),
            ("mlp.down_proj.weight", vec![hidden, wide]),
        ] {
            tensors.push((format!("model.layers.{layer}.{part}"), shape));
        }
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in &tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]}));
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    let mut out = BufWriter::new(File::create(dir.join("model.safetensors")).unwrap());
    out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    out.write_all(header.as_bytes()).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..end / 2 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // A number between -0.06 and 0.06, different at every place.
        let value = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.06;
        let bits = if dtype == "F16" { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() };
        out.write_all(&bits.to_le_bytes()).unwrap();
    }
    out.flush().unwrap();
}

#[test]
fn half_precision_weights_give_the_logits_of_their_f32_copy_to_the_bit() {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let ids: Vec<u32> = (0..90).map(|i| (3 + i * 7) % 120).collect();
    for name in ["tiny-arch/qwen3", "tiny-arch/mistral-window", "recall-tiny"] {
        let dir = tempfile::tempdir().unwrap();
        f32_copy(&fixtures.join(name), dir.path());
        assert_eq!(logits(&fixtures.join(name), &ids), logits(dir.path(), &ids), "{name}");
    }
    // The embedding and the MLP of this model take several tiles.
    for dtype in ["BF16", "F16"] {
        let (halves, floats) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        random_model(halves.path(), [5000, 512, 3000, 1, 8, 2], dtype);
        f32_copy(halves.path(), floats.path());
        assert_eq!(logits(halves.path(), &ids), logits(floats.path(), &ids), "{dtype}");
    }
}

#[test]
#[cfg(target_os = "linux")]
#[ignore = "writes a model of 1 GB"]
fn a_mapped_model_of_a_gigabyte_takes_little_memory_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    // The geometry of Qwen2.5-0.5B.
    random_model(dir.path(), [151_936, 896, 4864, 24, 14, 2], "BF16");
    let bytes = std::fs::metadata(dir.path().join("model.safetensors")).unwrap().len();
    let ids = dir.path().join("ids");
    std::fs::write(&ids, (0..300).map(|i| format!("{} ", i * 499)).collect::<String>()).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_kvrun"))
        .args(["generate", "--policy", "full", "--max-tokens", "4", "--json", "--model"])
        .arg(dir.path())
        .arg("--prompt-ids")
        .arg(&ids)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // `RssAnon` is the memory of the process without mapped files.
    let status = format!("/proc/{}/status", child.id());
    let mut most = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib: u64 = line.and_then(|l| l.trim().strip_suffix(" kB")).map_or(0, |n| n.parse().unwrap());
        most = most.max(kib << 10);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(child.wait().unwrap().success());
    println!("weights of {} MiB, at most {} MiB of memory without mapped files", bytes >> 20, most >> 20);
    assert!(most > 1 << 20 && most < bytes / 4, "{most} bytes");
}
