//! Compares the store's accounted memory with the growth of the process. It is the only test of its process, because
//! other tests would add to the growth.

use stratakv::Durability;
use stratakv::options::CachePolicy;
use stratakv_llama::kv::backend::{KvOptions, open};
use stratakv_llama::kv::{KvCache, KvDType, KvGeometry, LayerGeometry};
use stratakv_llama::process::resident_bytes;

const TOKENS: usize = 16_384;
const WIDTH: usize = 128;
const LIMIT: u64 = 24 << 20;

#[test]
#[cfg(target_os = "linux")]
fn the_process_grows_by_the_memory_that_the_store_accounts_for() {
    let layer = LayerGeometry { kv_heads: 2, head_dim: 64, window: None };
    let geometry = KvGeometry { layers: vec![layer; 4], query_heads: 4, scale: 0.1, dtype: KvDType::F16, rope: None };
    let dir = tempfile::tempdir().unwrap();
    let options = KvOptions {
        policy: "minmax:raw".parse().unwrap(),
        adapters: None,
        dense_layers: 0,
        cache_mib: 0,
        cache_policy: CachePolicy::COST_EFFECTIVE,
        summaries: stratakv::SummaryResidency::Resident,
        budget: "1/13".parse().unwrap(),
        group_tokens: 4,
        codec: stratakv::layout::PlaneCodec::Raw,
        devices: vec![dir.path().to_path_buf()],
        memory_limit: Some(LIMIT),
        read_ahead: false,
        durability: Durability::Lazy,
        profile_queries: 128,
        read_only: false,
        calibrate: false,
        store_clusters: false,
    };
    let value = |i: usize| ((i.wrapping_mul(0x9e37_79b9) >> 8) % 257) as f32 / 128.0 - 1.0;
    let keys: Vec<f32> = (0..TOKENS * WIDTH).map(value).collect();
    let values: Vec<f32> = (0..TOKENS * WIDTH).map(|i| value(i + 5)).collect();
    let queries: Vec<f32> = (0..4 * 64).map(|i| value(3 * i)).collect();
    let ids = vec![1; TOKENS];
    let mut out = vec![0.0; queries.len()];
    let before = resident_bytes().unwrap();
    let mut most = before;
    let backend = open(&options, geometry, [1; 32]).unwrap();
    let mut cache = backend.create("").unwrap();
    let mut look = || most = most.max(resident_bytes().unwrap());
    for layer in 0..4 {
        for start in (0..TOKENS).step_by(1024) {
            let part = start * WIDTH..(start + 1024) * WIDTH;
            cache.append(layer, &keys[part.clone()], &values[part], 1024).unwrap();
            look();
        }
    }
    cache.commit(&ids, b"state").unwrap();
    look();
    for step in 0..40 {
        for layer in 0..4 {
            let at = step * WIDTH..(step + 1) * WIDTH;
            cache.append(layer, &keys[at.clone()], &values[at], 1).unwrap();
            cache.attend(layer, &queries, &mut out).unwrap();
            look();
        }
    }
    let stats = cache.stats();
    let (grown, told) = (most - before, stats.resident_bytes_peak);
    println!("the process grew by {grown} bytes; the store accounts for {told}, limit {LIMIT}");
    assert_eq!(stats.kv_bytes_total as usize, (TOKENS + 40) * 4 * 2 * WIDTH * 2);
    assert!(stats.kv_bytes_total > LIMIT, "the cache does not fit in memory");
    assert!(told <= LIMIT && grown <= LIMIT + (16 << 20), "grew by {grown}, accounted {told}");
    assert!(grown.abs_diff(told) <= 6 << 20, "grew by {grown}, accounted {told}");
    assert_eq!(stats.bytes_read, cache.asked_bytes());
}
