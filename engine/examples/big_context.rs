//! A 64K-token context of an 8B-class model (8 GiB of keys and values) in 300 MB: ingest, decode steps, reopen, memory.
//! `cargo run --release -p stratakv --example big_context -- DIRECTORY [TOKENS]`

use std::time::Instant;
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, KvLayout, OpenSequence, SelectRequest, Store, StoredSummary,
    TensorView, attend,
};

const LAYERS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const CHUNK: usize = 512;

fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().ok_or("give an empty directory on an SSD")?;
    let tokens: usize = arguments.next().map_or(Ok(64 << 10), |n| n.parse())?;
    let limit = ByteSize::mib(280);
    let before = resident_mib();
    let open = || Store::options().device(&directory).memory_limit(limit).open();
    let store = open()?;
    let layout = KvLayout::builder().layers(LAYERS as u16).kv_heads(8).head_dim(128).group_tokens(64).build()?;
    let options = CreateOptions::new().key("big").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout, options)?;

    let mut seed = 1_u64;
    let mut random = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        half::f16::from_f32((seed >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    let data: Vec<half::f16> = (0..(CHUNK + 97) * KV_HEADS * DIM).map(|_| random()).collect();
    let started = Instant::now();
    for layer in 0..LAYERS {
        for chunk in 0..tokens / CHUNK {
            let shift = (layer * 31 + chunk * 17) % 97 * KV_HEADS * DIM;
            let tensor = TensorView::token_major(&data[shift..], CHUNK, KV_HEADS, DIM);
            sequence.append(layer, tensor, tensor)?;
        }
    }
    sequence.commit(Durability::Sync)?;
    let seconds = started.elapsed().as_secs_f64();
    let bytes = sequence.kv_bytes() as f64;
    println!("ingest: {:.2} GiB in {seconds:.1} s, {:.2} GB/s", bytes / (1 << 30) as f64, bytes / 1e9 / seconds);
    println!("resident: {:.0} MiB more than at the start", resident_mib() - before);

    let query: Vec<f32> = (0..32 * DIM).map(|i| ((i * 29) % 41) as f32 / 41.0 - 0.5).collect();
    let mut out = vec![0.0; query.len()];
    let mut steps = Vec::new();
    for step in 0..20 {
        let started = Instant::now();
        for layer in 0..LAYERS {
            let token = TensorView::token_major(&data[step * KV_HEADS * DIM..], 1, KV_HEADS, DIM);
            sequence.append(layer, token, token)?;
            let view = sequence.select(layer, SelectRequest::query(&query).budget(Budget::tokens(1024)))?;
            let batch = store.read(&[&view]).wait()?;
            attend(&query, &view, batch.get(0)?, &mut out)?;
        }
        steps.push(started.elapsed().as_secs_f64() * 1e3);
    }
    sequence.commit(Durability::Sync)?;
    steps.sort_by(f64::total_cmp);
    println!("decode: {:.1} ms a step (median), {:.0} MiB resident", steps[10], resident_mib() - before);
    let length = sequence.len();
    drop(sequence);
    let memory = store.status().memory;
    println!("memory account: peak {} of {}", ByteSize(memory.peak_bytes as u64), limit);
    store.close()?;
    let started = Instant::now();
    let store = open()?;
    let opened = started.elapsed();
    let sequence = store.open_sequence("big", OpenSequence::new())?;
    println!("reopen: store {opened:.1?}, sequence of {} tokens {:.1?}", sequence.len(), started.elapsed() - opened);
    assert_eq!(sequence.len(), length);
    Ok(())
}
