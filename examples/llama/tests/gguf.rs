//! GGUF files: the same answers as the model directory that they were made of, and errors for files that are damaged.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::quantized::GgmlDType;
use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use stratakv_llama::config::ModelConfig;
use stratakv_llama::convert::{WeightSource, write_gguf};
use stratakv_llama::gguf::GgufHeader;
use stratakv_llama::gguf::value::MetaValue;
use stratakv_llama::gguf::write::{NewTensor, NewValue, header, pad_tensor};
use stratakv_llama::kv::memory::MemoryPolicy;
use stratakv_llama::kv::{KvDType, MemoryKv};
use stratakv_llama::model::{LogitPositions, Model};
use stratakv_llama::random_model::{RandomWeights, geometry};
use stratakv_llama::text::Vocabulary;
use stratakv_llama::weights::{Weights, fingerprint};

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Converts a model directory.
fn convert(dir: &Path, kind: GgmlDType, out: &Path) {
    let mut source = WeightSource::Stored(Weights::load(dir).unwrap());
    write_gguf(&ModelConfig::load(dir).unwrap(), &mut source, kind, out).unwrap();
}

/// Returns the logits of a prompt by prefill and by decode steps.
fn logits(path: &Path, ids: &[u32]) -> Vec<f32> {
    let model = Model::load(path).unwrap();
    let mut logits = model.prefill(ids, &mut [], LogitPositions::All, &|_| ()).unwrap();
    let mut kv = MemoryKv::new(model.kv_geometry(KvDType::F32), MemoryPolicy::Full);
    for &id in &ids[..ids.len().min(20)] {
        logits.extend(model.decode(id, &mut kv).unwrap());
    }
    logits
}

fn worst(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn every_architecture_gives_the_logits_of_its_directory() {
    let ids: Vec<u32> = (0..60).map(|i| (3 + i * 7) % 120).collect();
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama3", "llama2-tied", "mistral-window", "qwen2", "qwen2-window", "qwen3", "llama-linear-bias"] {
        let from = fixtures().join("tiny-arch").join(name);
        let expected = logits(&from, &ids);
        // Directories hold f32 or bf16, which f32 holds exactly. Other types round weights.
        for (kind, roundoff) in
            [(GgmlDType::F32, 0.0), (GgmlDType::F16, F16_ROUNDOFF), (GgmlDType::BF16, BF16_ROUNDOFF)]
        {
            let file = dir.path().join("model.gguf");
            convert(&from, kind, &file);
            let off = worst(&logits(&file, &ids), &expected);
            let noise = (0..NOISE_SEEDS).map(|seed| {
                let noisy = tempfile::tempdir().unwrap();
                noisy_copy(&from, noisy.path(), roundoff, seed);
                worst(&logits(noisy.path(), &ids), &expected)
            });
            // Sums in another order differ by 1e-5 without any rounding of weights.
            let tolerance = if roundoff == 0.0 { 1e-5 } else { noise.fold(0.0, f32::max) };
            println!("{name} as {kind:?}: off by {off}, tolerance {tolerance}");
            assert!(off < tolerance, "{name} as {kind:?}: off by {off}, tolerance {tolerance}");
        }
    }
}

/// The largest relative change by rounding to f16, which has 11 significant bits.
const F16_ROUNDOFF: f32 = 1.0 / 2048.0;
/// The largest relative change by rounding to bf16, which has 8 significant bits.
const BF16_ROUNDOFF: f32 = 1.0 / 256.0;
/// Noisy copies of a model. The largest change of their logits is the tolerance for rounded weights.
///
/// Rounding changes an element by up to the roundoff, and by less if its significand is large. Noise of the full
/// roundoff is therefore larger on average, and passes through the same layers. Rounding gives 0.4 to 0.7 of the
/// tolerance here.
const NOISE_SEEDS: u64 = 4;
/// Copies a model's directory in f32. Each element of a matrix changes by up to `roundoff` times itself.
fn noisy_copy(from: &Path, to: &Path, roundoff: f32, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for entry in std::fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            noisy_file(&from.join(&name), &to.join(&name), roundoff, &mut random);
        } else {
            std::fs::copy(from.join(&name), to.join(&name)).unwrap();
        }
    }
}

fn noisy_file(from: &Path, to: &Path, roundoff: f32, random: &mut fastrand::Rng) {
    let bytes = std::fs::read(from).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = Vec::new();
    for (name, tensor) in file.tensors() {
        let values: Vec<f32> = match tensor.dtype() {
            Dtype::F32 => tensor.data().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
            Dtype::BF16 => tensor.data().as_chunks::<2>().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
            other => panic!("{name} is {other:?}"),
        };
        // Vectors stay f32 in every file.
        let roundoff = if tensor.shape().len() == 2 { roundoff } else { 0.0 };
        let noisy = values.iter().map(|x| x * (1.0 + roundoff * (2.0 * random.f32() - 1.0)));
        let data: Vec<u8> = noisy.flat_map(f32::to_le_bytes).collect();
        tensors.push((name, tensor.shape().to_vec(), data));
    }
    let view = |shape: &[usize], data| TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap();
    let views = tensors.iter().map(|(name, shape, data)| (name.as_str(), view(shape, data)));
    safetensors::serialize_to_file(views, None, to).unwrap();
}

#[test]
fn quantised_recall_models_answer_the_shipped_prompts() {
    let dir = tempfile::tempdir().unwrap();
    let from = fixtures().join("recall-tiny");
    let prompts = from.join("prompts.jsonl.gz");
    for (kind, least) in [
        (GgmlDType::F16, 1.0),
        (GgmlDType::Q8_0, 1.0),
        (GgmlDType::Q6K, 1.0),
        (GgmlDType::Q5K, 0.9),
        (GgmlDType::Q4K, 0.9),
    ] {
        let file = dir.path().join("recall.gguf");
        convert(&from, kind, &file);
        let output = Command::new(env!("CARGO_BIN_EXE_kvrun"))
            .args(["recall", "--policy", "full", "--contexts", "1024", "--limit", "2", "--json", "--model"])
            .arg(&file)
            .arg("--prompts")
            .arg(&prompts)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let cells = json["cells"].as_array().unwrap();
        assert_eq!(cells.len(), 5);
        let mean = cells.iter().map(|cell| cell["accuracy"].as_f64().unwrap()).sum::<f64>() / 5.0;
        assert!(mean >= least, "{kind:?}: {mean}");
    }
}

#[test]
fn a_fingerprint_changes_with_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("a.gguf"), dir.path().join("b.gguf"));
    let config = geometry("tiny", Some(2)).unwrap();
    assert_eq!(config.layers(), 2);
    for (seed, file) in [(1, &first), (2, &second)] {
        let mut source = WeightSource::Random(Box::new(RandomWeights::new(seed)));
        write_gguf(&config, &mut source, GgmlDType::Q4K, file).unwrap();
    }
    assert_ne!(fingerprint(&first).unwrap(), fingerprint(&second).unwrap());
    std::fs::copy(&first, &second).unwrap();
    assert_eq!(fingerprint(&first).unwrap(), fingerprint(&second).unwrap());
    assert!(geometry("huge", None).unwrap_err().to_string().contains("tiny, qwen2.5-1.5b"));
}

/// A file of one layer, small enough to damage every byte of its header.
struct Small {
    metadata: Vec<(String, NewValue)>,
    tensors: Vec<NewTensor>,
}

impl Small {
    fn new() -> Self {
        let (text, count) = (|text: &str| NewValue::Text(text.to_owned()), NewValue::Count);
        let metadata = [
            ("general.architecture", text("qwen3")),
            ("qwen3.block_count", count(1)),
            ("qwen3.context_length", count(64)),
            ("qwen3.embedding_length", count(32)),
            ("qwen3.feed_forward_length", count(64)),
            ("qwen3.attention.head_count", count(2)),
            ("qwen3.attention.head_count_kv", count(1)),
            ("qwen3.attention.key_length", count(16)),
            ("qwen3.attention.layer_norm_rms_epsilon", NewValue::Number(1e-6)),
            ("qwen3.rope.freq_base", NewValue::Number(1e6)),
        ];
        let tensors = [
            ("token_embd.weight", vec![50, 32], GgmlDType::Q8_0),
            ("output_norm.weight", vec![32], GgmlDType::F32),
            ("blk.0.attn_norm.weight", vec![32], GgmlDType::F32),
            ("blk.0.attn_q.weight", vec![32, 32], GgmlDType::Q8_0),
            ("blk.0.attn_k.weight", vec![16, 32], GgmlDType::Q8_0),
            ("blk.0.attn_v.weight", vec![16, 32], GgmlDType::F16),
            ("blk.0.attn_q_norm.weight", vec![16], GgmlDType::F32),
            ("blk.0.attn_k_norm.weight", vec![16], GgmlDType::F32),
            ("blk.0.attn_output.weight", vec![32, 32], GgmlDType::Q8_0),
            ("blk.0.ffn_norm.weight", vec![32], GgmlDType::F32),
            ("blk.0.ffn_gate.weight", vec![64, 32], GgmlDType::Q4_0),
            ("blk.0.ffn_up.weight", vec![64, 32], GgmlDType::Q4_0),
            ("blk.0.ffn_down.weight", vec![32, 64], GgmlDType::BF16),
        ];
        Self {
            metadata: metadata.map(|(name, value)| (name.to_owned(), value)).into(),
            tensors: tensors.map(|(name, shape, kind)| NewTensor { name: name.to_owned(), shape, kind }).into(),
        }
    }

    /// Returns the bytes of the file, and the length of its header.
    fn bytes(&self) -> (Vec<u8>, usize) {
        let mut bytes = header(&self.metadata, &self.tensors).unwrap();
        let start = bytes.len();
        for tensor in &self.tensors {
            let length = tensor.bytes();
            bytes.extend(std::iter::repeat_n(0x11, length));
            pad_tensor(&mut bytes, length).unwrap();
        }
        (bytes, start)
    }

    fn set(&mut self, name: &str, value: Option<NewValue>) {
        self.metadata.retain(|(known, _)| known != name);
        self.metadata.extend(value.map(|value| (name.to_owned(), value)));
    }

    fn tensor(&mut self, name: &str) -> &mut NewTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }
}

/// Loads a model from these bytes and returns the error.
fn error(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("small.gguf");
    std::fs::write(&file, bytes).unwrap();
    let text = format!("{:#}", Model::load(&file).map(|_| ()).unwrap_err());
    assert!(text.contains("small.gguf"), "the error names the file: {text}");
    text
}

#[test]
fn the_small_file_loads_and_computes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("small.gguf");
    std::fs::write(&file, Small::new().bytes().0).unwrap();
    assert_eq!(logits(&file, &[1, 2, 3]).len(), 6 * 50);
}

#[test]
fn headers_with_impossible_entries_are_errors_that_name_the_place() {
    let count = |n: u32| Some(NewValue::Count(n));
    for (name, value, needle) in [
        ("general.architecture", None, "no general.architecture"),
        ("general.architecture", Some(NewValue::Text("rwkv".into())), "\"rwkv\" is not supported"),
        ("general.architecture", count(3), "is not a text"),
        ("general.alignment", count(0), "general.alignment is 0"),
        ("general.alignment", count(24), "general.alignment is 24"),
        ("general.alignment", count(1 << 20), "general.alignment is 1048576"),
        ("split.count", count(3), "split into 3 files"),
        ("qwen3.block_count", None, "no qwen3.block_count"),
        ("qwen3.block_count", count(2), "tensor blk.1."),
        ("qwen3.block_count", count(u32::MAX), "num_hidden_layers"),
        ("qwen3.embedding_length", count(0), "hidden_size"),
        ("qwen3.embedding_length", count(64), "has shape [50, 32]"),
        ("qwen3.attention.head_count", count(0), "head_count is 0"),
        ("qwen3.attention.head_count_kv", count(3), "3 KV heads"),
        ("qwen3.attention.key_length", count(u32::MAX), "head_dim"),
        ("qwen3.attention.value_length", count(8), "value_length is 8"),
        ("qwen3.rope.dimension_count", count(8), "dimension_count is 8"),
        ("qwen3.attention.layer_norm_rms_epsilon", Some(NewValue::Number(f32::NAN)), "finite number"),
        ("qwen3.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon"),
        ("qwen3.rope.freq_base", Some(NewValue::Number(-1.0)), "rope_theta"),
        ("qwen3.rope.scaling.type", Some(NewValue::Text("yarn".into())), "yarn"),
        ("qwen3.feed_forward_length", Some(NewValue::Number(64.0)), "is not a count"),
    ] {
        let mut small = Small::new();
        small.set(name, value.clone());
        let text = error(&small.bytes().0);
        assert!(text.contains(needle), "{name} {value:?}: {text}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_errors_that_name_them() {
    let mut missing = Small::new();
    missing.tensors.retain(|tensor| tensor.name != "blk.0.attn_k_norm.weight");
    assert!(error(&missing.bytes().0).contains("tensor blk.0.attn_k_norm.weight (expected shape [16]) is missing"));
    let mut shape = Small::new();
    shape.tensor("blk.0.attn_v.weight").shape = vec![32, 16];
    assert!(error(&shape.bytes().0).contains("blk.0.attn_v.weight has shape [32, 16]"));
    let mut vector = Small::new();
    vector.tensor("token_embd.weight").shape = vec![1600];
    assert!(error(&vector.bytes().0).contains("token_embd.weight has shape [1600]"));
    let mut factors = Small::new();
    factors.tensors.push(NewTensor { name: "rope_freqs.weight".into(), shape: vec![8], kind: GgmlDType::F32 });
    assert!(error(&factors.bytes().0).contains("rope_freqs.weight: factor 0"));
    let mut twice = Small::new();
    twice.tensors.push(twice.tensors[0].clone());
    assert!(error(&twice.bytes().0).contains("tensor token_embd.weight is there twice"));
}

#[test]
fn hostile_numbers_in_the_header_are_errors_that_name_the_place() {
    let (good, _) = Small::new().bytes();
    let find = |needle: &[u8]| good.windows(needle.len()).position(|part| part == needle).unwrap();
    // After a name come the number of dimensions, the dimensions, the type and the offset.
    let (matrix, second) = (find(b"token_embd.weight") + 17, find(b"output_norm.weight") + 18);
    let value = find(b"qwen3.block_count") + 17;
    let most = u64::MAX.to_le_bytes();
    for (at, new, needle) in [
        (0, &b"GGML"[..], "begins with \"GGUF\""),
        (4, &1_u32.to_le_bytes(), "version 1"),
        (4, &4_u32.to_le_bytes(), "version 4"),
        (4, &3_u32.to_be_bytes(), "big-endian"),
        (8, &most, "tensor "),
        (16, &most, "metadata entry"),
        (24, &most, "metadata entry 0 of 10: byte 32: 18446744073709551615 bytes are needed"),
        (32, &[0xff; 4], "not UTF-8"),
        (value, &99_u32.to_le_bytes(), "metadata entry \"qwen3.block_count\": value type 99"),
        (matrix, &0_u32.to_le_bytes(), "0 dimensions"),
        (matrix, &u32::MAX.to_le_bytes(), "4294967295 dimensions"),
        (matrix + 4, &33_u64.to_le_bytes(), "rows of 33 elements are not whole blocks of 32"),
        (matrix + 4, &most, "too many"),
        (matrix + 12, &0_u64.to_le_bytes(), "no elements"),
        (matrix + 12, &(1_u64 << 40).to_le_bytes(), "token_embd.weight: bytes"),
        (matrix + 20, &9_u32.to_le_bytes(), "elements of type Q8_1 are not supported"),
        (matrix + 20, &23_u32.to_le_bytes(), "elements of type IQ4_XS are not supported"),
        (matrix + 20, &4_000_u32.to_le_bytes(), "element type 4000 is unknown"),
        (matrix + 24, &7_u64.to_le_bytes(), "the offset 7 is not a multiple of 32"),
        (matrix + 24, &(u64::MAX - 31).to_le_bytes(), "does not fit 64 bits"),
        (matrix + 24, &(1_u64 << 30).to_le_bytes(), "but the file ends at byte"),
        (second + 16, &0_u64.to_le_bytes(), "share bytes"),
    ] {
        let mut bytes = good.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        let text = error(&bytes);
        assert!(text.contains(needle), "at {at}: {text}");
    }
}

#[test]
fn truncated_and_damaged_headers_never_panic() {
    let (good, start) = Small::new().bytes();
    for end in 0..start {
        assert!(GgufHeader::parse(&good[..end]).is_err(), "{end} bytes");
    }
    for end in [start, start + 1, good.len() - 33, good.len() - 40] {
        assert!(error(&good[..end]).contains(&format!("the file ends at byte {end}")));
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("small.gguf");
    for at in 0..start {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= flip;
            std::fs::write(&file, &bytes).unwrap();
            // A changed byte may give another model.
            let _ = Model::load(&file);
            let _ = fingerprint(&file);
        }
    }
}

/// Returns a header without tensors, up to the type of the elements of its only entry: the list `x`.
fn header_with_a_list() -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    for number in [0_u64, 1, 1] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.push(b'x');
    bytes.extend(9_u32.to_le_bytes());
    bytes
}

#[test]
fn deep_and_long_lists_are_refused_without_memory_for_them() {
    let list = |depth: usize, count: u64| {
        let mut bytes = header_with_a_list();
        for _ in 0..depth {
            bytes.extend(9_u32.to_le_bytes());
            bytes.extend(1_u64.to_le_bytes());
        }
        bytes.extend(8_u32.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes
    };
    assert!(GgufHeader::parse(&list(0, 0)).is_ok());
    let text = |bytes: &[u8]| format!("{:#}", GgufHeader::parse(bytes).map(|_| ()).unwrap_err());
    assert!(text(&list(100_000, 0)).contains("nested deeper than 4"));
    assert!(text(&list(0, u64::MAX)).contains("metadata entry \"x\""));
}

/// A reader gets every element of a list that the header accepts.
#[test]
fn lists_of_truth_values_hold_only_zeros_and_ones() {
    let list = |values: &[u8]| {
        let mut bytes = header_with_a_list();
        bytes.extend(7_u32.to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values);
        bytes
    };
    let good = list(&[1, 0, 1]);
    let header = GgufHeader::parse(&good).unwrap();
    let MetaValue::List(found) = header.metadata()["x"] else { panic!("no list") };
    let expected = [true, false, true].map(MetaValue::Bool);
    assert_eq!(found.values().collect::<Vec<_>>(), expected);
    let bad = list(&[1, 0, 2, 1]);
    let text = format!("{:#}", GgufHeader::parse(&bad).map(|_| ()).unwrap_err());
    let place = bad.len() - 2;
    assert!(text.contains(&format!("byte {place}: 2 is neither true nor false")), "{text}");
}

/// Loads the tokenizer of a file with this metadata.
fn vocabulary(entries: Vec<(&str, NewValue)>) -> Vocabulary {
    let mut small = Small::new();
    for (name, value) in entries {
        small.set(&format!("tokenizer.ggml.{name}"), Some(value));
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("small.gguf");
    std::fs::write(&file, small.bytes().0).unwrap();
    Vocabulary::load(&file)
}

fn texts(list: &[&str]) -> NewValue {
    NewValue::Texts(list.iter().map(|text| (*text).to_owned()).collect())
}

#[test]
fn tokenizers_come_from_the_metadata() {
    let model = |name: &str| ("model", NewValue::Text(name.to_owned()));
    let tokens = texts(&["<s>", "a", "b", "\u{120}", "ab", "\u{120}ab"]);
    let merges = texts(&["a b", "\u{120} ab"]);
    let pre = |name: &str| ("pre", NewValue::Text(name.to_owned()));
    let bytes = |rule: &str| vec![model("gpt2"), pre(rule), ("tokens", tokens.clone()), ("merges", merges.clone())];
    assert_eq!(vocabulary(bytes("qwen2")).encode("ab ab", true).unwrap(), [4, 5]);
    let begins = [bytes("llama-bpe"), vec![("bos_token_id", NewValue::Count(0))]].concat();
    assert_eq!(vocabulary(begins.clone()).encode("ab ab", true).unwrap(), [0, 4, 5]);
    assert_eq!(vocabulary(begins).encode("ab ab", false).unwrap(), [4, 5]);

    // A rule that splits digits apart, and one that leaves them together.
    let numbers = texts(&["1", "2", "12", "\u{120}", "a", "\u{120}1"]);
    let merges = texts(&["1 2", "\u{120} 1"]);
    let digits = |rule: &str| vec![model("gpt2"), pre(rule), ("tokens", numbers.clone()), ("merges", merges.clone())];
    assert_eq!(vocabulary(digits("gpt-2")).encode("12a 1", true).unwrap(), [2, 4, 5]);
    assert_eq!(vocabulary(digits("smollm")).encode("12a 1", true).unwrap(), [0, 1, 4, 3, 0]);

    let pieces = texts(&["<unk>", "<s>", "<0x41>", "\u{2581}", "a", "b", "\u{2581}a", "\u{2581}ab", "ab"]);
    let scores = NewValue::Numbers(vec![0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -2.0, -1.0, -3.0]);
    let kinds = NewValue::Counts(vec![2, 3, 6, 1, 1, 1, 1, 1, 1]);
    let begin = ("bos_token_id", NewValue::Count(1));
    let entries = vec![model("llama"), ("tokens", pieces), ("scores", scores), ("token_type", kinds), begin];
    let llama = vocabulary(entries);
    if let Vocabulary::Ids(why) = &llama {
        panic!("{why}");
    }
    // A byte without a piece becomes its byte token.
    assert_eq!(llama.encode("ab bA", true).unwrap(), [1, 7, 3, 5, 2]);
    let mut stream = stratakv_llama::text::Stream::new(&llama);
    [7, 3, 5, 2].into_iter().for_each(|id| drop(stream.push(id).unwrap()));
    assert_eq!(stream.text().unwrap(), "ab bA");
}

#[test]
fn a_file_without_a_usable_tokenizer_says_why() {
    let model = |name: &str| vec![("model", NewValue::Text(name.to_owned()))];
    for (entries, needle) in [
        (Vec::new(), "has no tokenizer"),
        (model("bert"), "\"bert\" is not supported"),
        ([model("gpt2"), vec![("pre", NewValue::Text("tekken".into()))]].concat(), "\"tekken\""),
        (model("gpt2"), "no splitting rule"),
        (model("llama"), "tokenizer.ggml.tokens"),
        ([model("llama"), vec![("tokens", NewValue::Counts(vec![1]))]].concat(), "not a list of texts"),
        ([model("llama"), vec![("tokens", texts(&["a"])), ("scores", texts(&["a"]))]].concat(), "list of numbers"),
        (
            [model("llama"), vec![("tokens", texts(&["a"])), ("scores", NewValue::Numbers(vec![]))]].concat(),
            "1 tokens have 0 scores",
        ),
    ] {
        let text = vocabulary(entries).encode("x", true).unwrap_err().to_string();
        assert!(text.contains(needle) && text.contains("small.gguf"), "{text}");
    }
}
