//! `kvbench select`: min/max selection of one layer on one core, against the memory bandwidth of that core.

use crate::cli::SelectArgs;
use crate::report::{median, percentile, print, ratio, rounded};
use crate::work::{HEAD_DIM, KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout, open_store, work_directory};
use anyhow::Result;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;
use stratakv::{Budget, ByteSize, Sequence, SequenceOptions, Summary};

const GROUP: u16 = 8;
/// Query heads of LLaMA-3-8B.
const QUERY_HEADS: usize = 32;

#[derive(Debug, Serialize)]
struct SelectResult {
    tokens: u32,
    budget_tokens: u32,
    /// Layers scanned in turn.
    layers: u16,
    /// Summaries of one layer.
    summary_bytes: u64,
    /// One layer.
    p50_us: f64,
    p99_us: f64,
    /// Summaries read.
    gb_per_s: f64,
    /// The same bytes summed up by one core, in the same rounds.
    memory_gb_per_s: f64,
    ratio_memory: Option<f64>,
}

pub(crate) fn run(args: &SelectArgs) -> Result<()> {
    for &tokens in &args.tokens {
        let result = measure(args, tokens)?;
        print(args.common.json, &format!("select {tokens} tokens"), &result)?;
    }
    Ok(())
}

fn measure(args: &SelectArgs, tokens: u32) -> Result<SelectResult> {
    let tokens_whole = tokens / u32::from(GROUP) * u32::from(GROUP);
    let summary_bytes = u64::from(tokens_whole / u32::from(GROUP)) * TOKEN_LAYER_BYTES;
    let layers = args.working_set.0.div_ceil(summary_bytes).clamp(1, 32) as u16;
    let kv_bytes = u64::from(tokens_whole) * TOKEN_LAYER_BYTES * u64::from(layers);
    let dir = work_directory(&args.common.device, kv_bytes + kv_bytes / 4 + (256 << 20))?;
    let memory = ByteSize((256 << 20) + 2 * summary_bytes * u64::from(layers));
    let store = open_store(&args.common, &dir.path().join("store"), memory)?;
    let options = SequenceOptions::new().key("select").summary(Summary::MinMax);
    let mut sequence = store.create_sequence(&layout(layers, GROUP)?, options)?;
    eprintln!("kvbench: {}: {layers} layers of {tokens_whole} tokens", dir.path().display());
    fill(&mut sequence, layers, tokens_whole as usize)?;

    let mut random = fastrand::Rng::with_seed(17);
    let words = vec![0x0101_0101_0101_0101_u64; (summary_bytes * u64::from(layers) / 8) as usize];
    let (mut layer_us, mut rates, mut memory_rates) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=args.common.rounds {
        check_interrupt()?;
        let mut seconds = 0.0;
        for layer in 0..usize::from(layers) {
            let query: Vec<f32> = (0..QUERY_HEADS * HEAD_DIM).map(|_| random.f32() - 0.5).collect();
            let start = Instant::now();
            black_box(sequence.select(layer, &query, Budget::tokens(args.budget as usize))?);
            let took = start.elapsed().as_secs_f64();
            seconds += took;
            if round > 0 {
                layer_us.push(took * 1e6);
            }
        }
        let start = Instant::now();
        black_box(sum(black_box(&words)));
        let memory_seconds = start.elapsed().as_secs_f64();
        // The first round faults pages in.
        if round > 0 {
            let bytes = summary_bytes as f64 * f64::from(layers) / 1e9;
            rates.push(bytes / seconds);
            memory_rates.push(bytes / memory_seconds);
        }
    }
    drop(sequence);
    store.close()?;
    Ok(SelectResult {
        tokens: tokens_whole,
        budget_tokens: args.budget,
        layers,
        summary_bytes,
        p50_us: rounded(median(&layer_us)),
        p99_us: rounded(percentile(&layer_us, 0.99)),
        gb_per_s: rounded(median(&rates)),
        memory_gb_per_s: rounded(median(&memory_rates)),
        ratio_memory: ratio(median(&rates), median(&memory_rates)),
    })
}

fn fill(sequence: &mut Sequence, layers: u16, tokens: usize) -> Result<()> {
    let chunk = 1024;
    let mut source = KvSource::new(chunk);
    for layer in 0..usize::from(layers) {
        let mut left = tokens;
        while left > 0 {
            check_interrupt()?;
            let count = left.min(chunk);
            let (keys, values) = source.pair(count);
            sequence.append(layer, keys, values)?;
            left -= count;
        }
    }
    Ok(())
}

/// Sums up words in independent lanes, which the compiler keeps in vector registers.
fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0_u64; 32];
    let (runs, rest) = words.as_chunks::<32>();
    for run in runs {
        for (lane, word) in lanes.iter_mut().zip(run) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().chain(rest).fold(0, |sum, word| sum.wrapping_add(*word))
}
