//! `kvbench select`: selection in one layer on one core by any method, against the memory bandwidth of that core.

pub(crate) mod methods;

use crate::cli::{Form, SelectArgs};
use crate::report::{median, percentile, print, ratio, rounded};
use crate::work::{HEAD_DIM, KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout, open_store, work_directory};
use anyhow::Result;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;
use stratakv::retrieval::SelectorId;
use stratakv::{Budget, ByteSize, CreateOptions, SelectOptions, Sequence, StoredSummary};

const GROUP: u16 = 8;
/// Query heads of LLaMA-3-8B.
const QUERY_HEADS: usize = 32;
/// The sequence's own min/max records.
const RECORDS: &str = "records";

#[derive(Debug, Serialize)]
struct SelectResult {
    method: String,
    form: &'static str,
    tokens: u32,
    budget_tokens: u32,
    /// Layers scanned in turn.
    layers: u16,
    /// Summaries of one layer; of selectors what is held, up to a quarter more than what is read.
    summary_bytes: u64,
    /// One layer.
    p50_us: f64,
    p99_us: f64,
    /// Tokens that this time is for, per second.
    tokens_per_us: f64,
    /// Summaries over time.
    gb_per_s: f64,
    /// Words summed up by one core, in the same rounds.
    memory_gb_per_s: f64,
    ratio_memory: Option<f64>,
}

/// A method in one form, and its times.
struct Turn {
    method: String,
    /// None for the records.
    selector: Option<SelectorId>,
    form: Form,
    layer_us: Vec<f64>,
}

pub(crate) fn run(args: &SelectArgs) -> Result<()> {
    for &tokens in &args.tokens {
        for result in measure(args, tokens)? {
            print(args.common.json, &format!("select {} {} {tokens} tokens", result.method, result.form), &result)?;
        }
    }
    Ok(())
}

fn measure(args: &SelectArgs, tokens: u32) -> Result<Vec<SelectResult>> {
    let tokens_whole = tokens / u32::from(GROUP) * u32::from(GROUP);
    let record_bytes = u64::from(tokens_whole / u32::from(GROUP)) * TOKEN_LAYER_BYTES;
    let layers = args.working_set.0.div_ceil(record_bytes).clamp(1, 32) as u16;
    let kv_bytes = u64::from(tokens_whole) * TOKEN_LAYER_BYTES * u64::from(layers);
    let dir = work_directory(&args.common.device, kv_bytes + kv_bytes / 4 + (256 << 20))?;
    // No method holds more than all keys, which are half of the bytes, and grows in steps.
    let selectors = args.method.iter().filter(|method| *method != RECORDS).count() as u64;
    let memory = (256 << 20) + 2 * record_bytes * u64::from(layers) + selectors * kv_bytes;
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize(memory))?;
    let options = CreateOptions::new().key("select").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout(layers, GROUP)?, options)?;
    let mut turns = Vec::new();
    for method in &args.method {
        check_interrupt()?;
        let selector = match method.as_str() {
            RECORDS => None,
            _ => Some(sequence.attach(methods::selector(method, layers)?)?),
        };
        let forms = if selector.is_some() { args.form.as_slice() } else { &[Form::Raw] };
        turns.extend(forms.iter().map(|&form| Turn { method: method.clone(), selector, form, layer_us: Vec::new() }));
    }
    eprintln!("kvbench: {}: {layers} layers of {tokens_whole} tokens", dir.path().display());
    fill(&mut sequence, layers, tokens_whole as usize)?;

    let mut random = fastrand::Rng::with_seed(17);
    let words = vec![0x0101_0101_0101_0101_u64; (record_bytes * u64::from(layers) / 8) as usize];
    let mut memory_rates = Vec::new();
    for round in 0..=args.common.rounds {
        for turn in &mut turns {
            for layer in 0..usize::from(layers) {
                check_interrupt()?;
                let query: Vec<f32> = (0..QUERY_HEADS * HEAD_DIM).map(|_| random.f32() - 0.5).collect();
                let options = SelectOptions {
                    aggregation: turn.form.into(),
                    ..SelectOptions::new(Budget::tokens(args.budget as usize))
                };
                let start = Instant::now();
                black_box(match turn.selector {
                    Some(selector) => sequence.select_with(selector, layer, &query, options)?,
                    None => sequence.select(layer, &query, options)?,
                });
                // The first round faults pages in.
                if round > 0 {
                    turn.layer_us.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        let start = Instant::now();
        black_box(sum(black_box(&words)));
        if round > 0 {
            memory_rates.push((words.len() * 8) as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    let memory_gb_per_s = median(&memory_rates);
    let results = turns.into_iter().map(|turn| {
        let summary_bytes = match turn.selector {
            Some(selector) => scanned_bytes(&sequence, selector, tokens_whole)?,
            None => record_bytes,
        };
        let p50_us = median(&turn.layer_us);
        let gb_per_s = summary_bytes as f64 / 1e3 / p50_us;
        Ok(SelectResult {
            method: turn.method,
            form: match turn.form {
                Form::Raw => "raw",
                Form::Softmax => "softmax",
                Form::GroupSoftmax => "group-softmax",
            },
            tokens: tokens_whole,
            budget_tokens: args.budget,
            layers,
            summary_bytes,
            p50_us: rounded(p50_us),
            p99_us: rounded(percentile(&turn.layer_us, 0.99)),
            tokens_per_us: rounded(f64::from(tokens_whole) / p50_us),
            gb_per_s: rounded(gb_per_s),
            memory_gb_per_s: rounded(memory_gb_per_s),
            ratio_memory: ratio(gb_per_s, memory_gb_per_s),
        })
    });
    let results = results.collect::<Result<Vec<_>>>()?;
    drop(sequence);
    store.close()?;
    Ok(results)
}

/// Bytes of a layer that a selector scans: its records, without what their memory has room for beside them. Of `leoam` those of
/// groups alone; of longer runs it scans fewer bytes than that. Of the exact oracle, which has no records, all keys.
fn scanned_bytes(sequence: &Sequence, selector: SelectorId, tokens: u32) -> Result<u64> {
    let mut bytes = 0;
    for summary in sequence.selector_summaries(selector, 0)? {
        let mut records = Vec::new();
        summary.encode(0..summary.groups(), &mut records);
        let keys = u64::from(tokens) * TOKEN_LAYER_BYTES / 2;
        bytes += if records.is_empty() { keys } else { records.len() as u64 };
    }
    Ok(bytes)
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
