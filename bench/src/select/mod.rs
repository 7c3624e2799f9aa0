//! `kvbench select` measures selection in one layer, against the memory bandwidth of one core.
//!
//! 1. Create one sequence with enough layers that their summaries exceed the caches, and attach every method to it.
//! 2. In each round, let every method in every form select in each layer, and sum up as much memory by plain loads.
//! 3. Leave the first round out, because it faults pages in, and report medians of the others.

use crate::support::args::{CommonArgs, between, size};
use crate::support::directory::work_directory;
use crate::support::interrupt::check_interrupt;
use crate::support::method::{self, MethodArg, methods_help};
use crate::support::model::{KvSource, TOKEN_LAYER_BYTES, layout, random_query};
use crate::support::report::{median, percentile, print, ratio, rounded};
use crate::support::store::open_store;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use stratakv::retrieval::{HeadAggregation, SelectorId};
use stratakv::{
    Budget, ByteSize, ComputeThreads, CreateOptions, SelectOptions, SelectRequest, Sequence, Store, StoredSummary,
};

const GROUP: u16 = 8;
/// Tokens of one append.
const CHUNK: usize = 1024;

/// Arguments of `kvbench select`.
#[derive(Args, Debug)]
#[command(
    after_help = format!(
        "Examples: kvbench select --tokens 32768,131072 --method records,tck:64 --form raw,softmax --json
          kvbench select --method kvswap:32:raw,tck:64:group --json
          kvbench select --method tck:64 --form softmax --threads 1,2

The methods select in rotation over the layers of one sequence. A method that names its HEADS is measured in that form
alone, the others in each --form. `records` scores the sequence's own min/max records, raw unless it names another form.
Adapters are fitted to random keys, which changes the choice but not its cost.

{}",
        methods_help()
    )
)]
pub(crate) struct SelectArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Tokens of the context, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "32768,131072", value_parser = between(64, 1 << 24))]
    pub(crate) tokens: Vec<u32>,
    /// Tokens to select.
    #[arg(long, default_value_t = 400)]
    pub(crate) budget: u32,
    /// Methods, separated by commas; they are listed below.
    #[arg(long, value_delimiter = ',', default_value = "records")]
    pub(crate) method: Vec<String>,
    /// Ways to aggregate the scores of query heads, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "raw")]
    pub(crate) form: Vec<FormArg>,
    /// Bytes of min/max records in memory. A step scans layer after layer, so give more than the caches hold.
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub(crate) working_set: ByteSize,
    /// Threads that select, separated by commas. Loads of memory are always on one.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) threads: Vec<u8>,
}

/// Threads of a pool, of which the calling one is a member.
struct PoolThreads(usize);

impl ComputeThreads for PoolThreads {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, parts: usize, part: &(dyn Fn() + Sync)) {
        rayon::scope(|scope| {
            (1..parts).for_each(|_| scope.spawn(|_| part()));
            part();
        });
    }
}

/// A form of scores on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormArg {
    /// The sum over query heads.
    Raw,
    /// Softmax per query head, then the sum.
    Softmax,
    /// Softmax over groups per query head, each group with its best token, then the sum.
    GroupSoftmax,
}

/// Returns the name of a form in results.
fn form_name(form: HeadAggregation) -> &'static str {
    match form {
        HeadAggregation::Sum => "raw",
        HeadAggregation::Softmax => "softmax",
        HeadAggregation::GroupSoftmax => "group-softmax",
    }
}

impl From<FormArg> for HeadAggregation {
    fn from(form: FormArg) -> Self {
        match form {
            FormArg::Raw => Self::Sum,
            FormArg::Softmax => Self::Softmax,
            FormArg::GroupSoftmax => Self::GroupSoftmax,
        }
    }
}

/// Medians of one method in one form.
#[derive(Debug, Serialize)]
struct SelectResult {
    method: String,
    form: &'static str,
    threads: u8,
    tokens: u32,
    budget_tokens: u32,
    /// Layers that are scanned one after another.
    layers: u16,
    /// Bytes of summaries that one selection scans.
    summary_bytes: u64,
    /// Time of a selection in one layer.
    p50_us: f64,
    p99_us: f64,
    /// Tokens of the context over the time.
    tokens_per_us: f64,
    /// Bytes of summaries over the time.
    gb_per_s: f64,
    #[serde(flatten)]
    memory: MemoryComparison,
}

/// Plain loads by one core in the same rounds, and the selection over them.
#[derive(Debug, Serialize)]
struct MemoryComparison {
    memory_gb_per_s: f64,
    ratio_memory: Option<f64>,
}

/// A method in one form, and its times.
struct MethodSamples {
    method: String,
    /// None for the records.
    selector: Option<SelectorId>,
    form: HeadAggregation,
    threads: u8,
    layer_us: Vec<f64>,
}

/// The sizes of a measurement, which follow from the arguments.
struct SelectSizes {
    /// Tokens of whole groups.
    tokens: u32,
    layers: u16,
    /// Bytes of min/max records of one layer.
    record_bytes: u64,
}

impl SelectSizes {
    fn new(args: &SelectArgs, tokens: u32) -> Self {
        let groups = tokens / u32::from(GROUP);
        let record_bytes = u64::from(groups) * TOKEN_LAYER_BYTES;
        let layers = args.working_set.0.div_ceil(record_bytes).clamp(1, 32) as u16;
        Self { tokens: groups * u32::from(GROUP), layers, record_bytes }
    }

    fn all_record_bytes(&self) -> u64 {
        self.record_bytes * u64::from(self.layers)
    }

    fn kv_bytes(&self) -> u64 {
        u64::from(self.tokens) * TOKEN_LAYER_BYTES * u64::from(self.layers)
    }
}

/// Runs `kvbench select`.
pub(crate) fn run(args: &SelectArgs) -> Result<()> {
    let most = args.threads.iter().copied().max().unwrap_or(1);
    if most > 1 {
        rayon::ThreadPoolBuilder::new().num_threads(usize::from(most)).use_current_thread().build_global()?;
    }
    for &tokens in &args.tokens {
        for result in measure(args, &SelectSizes::new(args, tokens))? {
            let (method, form, threads) = (&result.method, result.form, result.threads);
            print(args.common.json, &format!("select {method} {form} {tokens} tokens, {threads} threads"), &result)?;
        }
    }
    Ok(())
}

fn measure(args: &SelectArgs, sizes: &SelectSizes) -> Result<Vec<SelectResult>> {
    let kv_bytes = sizes.kv_bytes();
    let dir = work_directory(&args.common.device, kv_bytes + kv_bytes / 4 + (256 << 20))?;
    // A method holds at most all keys, which are half of the bytes, and its memory grows in steps.
    let selectors = args.method.iter().filter(|method| !method.starts_with("records")).count() as u64;
    let memory = (256 << 20) + 2 * sizes.all_record_bytes() + selectors * kv_bytes;
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize(memory))?;
    let options = CreateOptions::new().key("select").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout(sizes.layers, GROUP)?, options)?;
    let mut samples = attach(args, &mut sequence, sizes.layers)?;
    eprintln!("kvbench: {}: {} layers of {} tokens", dir.path().display(), sizes.layers, sizes.tokens);
    KvSource::new(CHUNK).append_by_layer(&mut sequence, sizes.tokens as usize)?;
    let memory_gb_per_s = measure_rounds(args, &store, &sequence, sizes, &mut samples)?;
    let results = samples.into_iter().map(|samples| {
        let summary_bytes = match samples.selector {
            Some(selector) => scanned_bytes(&sequence, selector, sizes.tokens)?,
            None => sizes.record_bytes,
        };
        let p50_us = median(&samples.layer_us);
        let gb_per_s = summary_bytes as f64 / 1e3 / p50_us;
        Ok(SelectResult {
            method: samples.method,
            form: form_name(samples.form),
            threads: samples.threads,
            tokens: sizes.tokens,
            budget_tokens: args.budget,
            layers: sizes.layers,
            summary_bytes,
            p50_us: rounded(p50_us),
            p99_us: rounded(percentile(&samples.layer_us, 0.99)),
            tokens_per_us: rounded(f64::from(sizes.tokens) / p50_us),
            gb_per_s: rounded(gb_per_s),
            memory: MemoryComparison {
                memory_gb_per_s: rounded(memory_gb_per_s),
                ratio_memory: ratio(gb_per_s, memory_gb_per_s),
            },
        })
    });
    let results = results.collect::<Result<Vec<_>>>()?;
    drop(sequence);
    store.close()?;
    Ok(results)
}

/// Attaches every method and pairs it with the forms that it is measured in.
fn attach(args: &SelectArgs, sequence: &mut Sequence, layers: u16) -> Result<Vec<MethodSamples>> {
    let mut samples = Vec::new();
    for method in &args.method {
        check_interrupt()?;
        let parsed = MethodArg::parse(method)?;
        let (selector, forms) = match &parsed {
            MethodArg::None => bail!("--method none: nothing is scored; give `records` or a method"),
            MethodArg::Records(_) => (None, vec![HeadAggregation::Sum]),
            MethodArg::Registered(spec) => {
                let forms = args.form.iter().map(|form| HeadAggregation::from(*form)).collect();
                (Some(sequence.attach(method::selector(spec, layers)?)?), forms)
            }
        };
        let forms = parsed.aggregation().map_or(forms, |named| vec![named]);
        for form in forms {
            let of = |threads: &u8| {
                let (method, layer_us) = (method.clone(), Vec::new());
                MethodSamples { method, selector, form, threads: *threads, layer_us }
            };
            samples.extend(args.threads.iter().map(of));
        }
    }
    Ok(samples)
}

/// Measures all rounds. Returns the median bandwidth of plain loads in GB per second.
fn measure_rounds(
    args: &SelectArgs,
    store: &Store,
    sequence: &Sequence,
    sizes: &SelectSizes,
    samples: &mut [MethodSamples],
) -> Result<f64> {
    let mut random = fastrand::Rng::with_seed(17);
    let words = vec![0x0101_0101_0101_0101_u64; (sizes.all_record_bytes() / 8) as usize];
    let mut memory_rates = Vec::new();
    for round in 0..=args.common.rounds {
        for own in samples.iter_mut() {
            let threads: Option<Arc<dyn ComputeThreads>> = match own.threads {
                1 => None,
                threads => Some(Arc::new(PoolThreads(usize::from(threads)))),
            };
            store.set_compute_threads(threads);
            for layer in 0..usize::from(sizes.layers) {
                check_interrupt()?;
                let query = random_query(&mut random);
                let options = SelectOptions::new(Budget::tokens(args.budget as usize)).aggregation(own.form);
                let start = Instant::now();
                black_box(match own.selector {
                    Some(selector) => {
                        sequence.select(layer, SelectRequest::query(&query).options(options).selector(selector))?
                    }
                    None => sequence.select(layer, SelectRequest::query(&query).options(options))?,
                });
                // The first round faults pages in.
                if round > 0 {
                    own.layer_us.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        let start = Instant::now();
        black_box(sum(black_box(&words)));
        if round > 0 {
            memory_rates.push((words.len() * 8) as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok(median(&memory_rates))
}

/// Returns the bytes that a selector scans in one layer: its records, without the unused part of their memory.
///
/// For `leoam` this counts the records of groups only. Its bounds of longer runs of groups let it scan fewer bytes. The
/// exact oracle has no records and scans all keys.
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
