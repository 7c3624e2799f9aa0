//! The memory of prefill does not grow with the prompt if the cache is a store. It is the only test of its process,
//! because other tests would add to the memory.

use serde_json::json;
use stratakv::Durability;
use stratakv::options::CachePolicy;
use stratakv_llama::config::ModelConfig;
use stratakv_llama::convert::{WeightSource, parse_kind, write_gguf};
use stratakv_llama::kv::backend::{KvOptions, open};
use stratakv_llama::kv::memory::MemoryPolicy;
use stratakv_llama::kv::{KvCache, KvDType, MemoryKv};
use stratakv_llama::model::{LogitPositions, Model};
use stratakv_llama::process::resident_peak_bytes;
use stratakv_llama::random_model::RandomWeights;

const SHORT: usize = 8192;
const LONG: usize = 32_768;
const LIMIT: u64 = 24 << 20;
/// Bytes that the peak may differ by: buffers of the allocator, and what the store uses of its limit.
const SPREAD: u64 = 16 << 20;

fn ids(tokens: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(tokens as u64);
    (0..tokens).map(|_| random.u32(..256)).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn prefill_of_a_long_prompt_takes_the_memory_of_a_short_one() {
    // The window bounds the time of attention, not what prefill keeps: 6 KiB per token.
    let config = json!({
        "model_type": "mistral", "vocab_size": 256, "hidden_size": 1024, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 128,
        "tie_word_embeddings": true
    });
    let config = ModelConfig::parse(&config.to_string()).unwrap();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("model.gguf");
    let mut source = WeightSource::Random(Box::new(RandomWeights::new(1)));
    write_gguf(&config, &mut source, parse_kind("f16").unwrap(), &file).unwrap();
    let model = Model::load(&file).unwrap();
    let options = KvOptions {
        policy: "minmax:raw".parse().unwrap(),
        adapters: None,
        dense_layers: 0,
        cache_mib: 0,
        cache_policy: CachePolicy::COST_EFFECTIVE,
        summaries: stratakv::SummaryResidency::Resident,
        budget: "1/13".parse().unwrap(),
        group_tokens: 8,
        codec: stratakv::layout::PlaneCodec::Raw,
        devices: vec![dir.path().join("store")],
        memory_limit: Some(LIMIT),
        read_ahead: false,
        durability: Durability::Lazy,
        profile_queries: 128,
        read_only: false,
        calibrate: false,
        store_clusters: false,
    };
    std::fs::create_dir(&options.devices[0]).unwrap();
    let backend = open(&options, model.kv_geometry(KvDType::F16), [1; 32]).unwrap();
    let prefill = |tokens: usize| {
        let mut cache = backend.create("").unwrap();
        let logits = model.prefill(&ids(tokens), &mut [&mut cache], LogitPositions::Last, &|_| ()).unwrap();
        assert_eq!(cache.len(), tokens);
        (logits, resident_peak_bytes().unwrap())
    };
    let ((short, peak), (long, long_peak)) = (prefill(SHORT), prefill(LONG));
    println!("a peak of {peak} bytes with {SHORT} tokens, and of {long_peak} with {LONG}");
    assert!(long_peak <= peak + SPREAD, "{SHORT} tokens: {peak} bytes, {LONG} tokens: {long_peak} bytes");
    for (tokens, spilled) in [(SHORT, short), (LONG, long)] {
        let mut cache = MemoryKv::new(model.kv_geometry(KvDType::F16), MemoryPolicy::Full);
        let kept = model.prefill(&ids(tokens), &mut [&mut cache], LogitPositions::Last, &|_| ()).unwrap();
        assert!(kept == spilled, "{tokens} tokens: other logits");
    }
    // Without a directory the rows of the prompt are in memory, so this test would see their growth.
    let grown = resident_peak_bytes().unwrap() - long_peak;
    assert!(grown > 5 * (LONG - SHORT) as u64 * 1024, "rows in memory took only {grown} bytes");
}
