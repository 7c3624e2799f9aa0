//! `kvbench resident` measures the memory of one sequence while it decodes, by method: as the engine's account counts
//! it and as the kernel counts it for the process.
//!
//! 1. Write the sequence once. If summaries are streamed, the records of the methods are written beside its groups.
//! 2. For each method, open the store within `--limit`, or with a larger limit if the method does not fit.
//! 3. In each step and layer, append a token, select by the method, read through the pipeline and a cache of resident
//!    blocks, and attend.
//!
//! Keys and queries are random, because the bytes held do not depend on them.

use crate::support::args::{CommonArgs, Switch, between, between_u16, size};
use crate::support::directory::work_directory;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::process_resident_bytes;
use crate::support::method::{self, MethodArg};
use crate::support::model::{HEAD_DIM, KvSource, QUERY_HEADS, TOKEN_LAYER_BYTES, layout, random_query};
use crate::support::report::{median, print, rounded};
use crate::support::store::{open_store, open_store_with, read_bytes};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stratakv::options::{CacheOptions, CachePolicy};
use stratakv::pipeline::Pipeline;
use stratakv::retrieval::{HeadAggregation, MethodSpec, Selector, SelectorId};
use stratakv::{
    AttendOptions, Budget, ByteSize, CreateOptions, Durability, ErrorKind, OpenSequence, SelectOptions, SelectRequest,
    Selection, Sequence, Store, StoreOptions, StoredSummary, SummaryResidency,
};

/// Tokens of one append while the sequence is written.
const CHUNK: usize = 512;
/// The key of the sequence.
const KEY: &str = "resident";

/// Arguments of `kvbench resident`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench resident --device /nvme0 --context 32768 --method kvswap:32:raw,tck:64 \\
           --limit 120MiB --json")]
pub(crate) struct ResidentArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 32768, value_parser = between(64, 1 << 20))]
    pub(crate) context: u32,
    /// Layers.
    #[arg(long, default_value_t = 32, value_parser = between_u16(1, 128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 128))]
    pub(crate) group: u16,
    /// Tokens attended to per layer.
    #[arg(long, default_value_t = 400)]
    pub(crate) budget: u32,
    /// Methods, separated by commas. `kvbench select` lists their names; `:raw` asks for raw scores. `none` attends to
    /// the newest tokens, and `records` needs `--summaries streamed`.
    #[arg(
        long,
        value_name = "METHOD",
        value_delimiter = ',',
        default_value = "none,kvswap:32:raw,tck:32:raw,tck:64:raw"
    )]
    pub(crate) method: Vec<String>,
    /// Memory limit of the store while it decodes. A method that does not fit is measured with a larger one.
    #[arg(long, default_value = "120MiB", value_parser = size)]
    pub(crate) limit: ByteSize,
    /// MiB of the cache of resident blocks, which is part of the limit.
    #[arg(long, default_value_t = 16)]
    pub(crate) cache_mib: u64,
    /// Decode steps.
    #[arg(long, default_value_t = 8, value_parser = between(1, 10_000))]
    pub(crate) steps: u32,
    /// Place of the summaries. `streamed` stores min/max records and the records of the methods with the sequence, and
    /// reads a layer's records for each selection.
    #[arg(long, value_enum, default_value = "resident")]
    pub(crate) summaries: SummaryPlace,
    /// Prefetching of what predicted queries select. The queries are random, so no step uses the prefetched blocks.
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) predict: Switch,
}

/// The place of summaries on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SummaryPlace {
    Resident,
    Streamed,
}

impl From<SummaryPlace> for SummaryResidency {
    fn from(place: SummaryPlace) -> Self {
        match place {
            SummaryPlace::Resident => Self::Resident,
            SummaryPlace::Streamed => Self::Streamed,
        }
    }
}

/// Most bytes held at one time, from opening the store to the last step.
#[derive(Debug, Serialize)]
struct ResidentResult {
    #[serde(flatten)]
    setup: ResidentSetup,
    #[serde(flatten)]
    memory: ResidentMemory,
    /// `resident` or `streamed`.
    summaries: String,
    predict: bool,
    step_ms: f64,
    #[serde(flatten)]
    reads: ResidentReads,
}

/// The method and the sequence.
#[derive(Debug, Serialize)]
struct ResidentSetup {
    method: String,
    context: u32,
    layers: u16,
    group: u16,
    budget: u32,
}

/// Memory by the engine's account and by the kernel's.
#[derive(Debug, Serialize)]
struct ResidentMemory {
    cache_bytes: u64,
    /// The memory limit of this run.
    limit_bytes: u64,
    /// True if the run kept to `--limit`. Otherwise the method does not fit in it.
    within_limit: bool,
    /// Bytes of the method's summaries.
    summary_bytes: u64,
    /// Bytes of the method's summaries per token and layer.
    summary_bytes_per_token: f64,
    account_peak_bytes: u64,
    /// Peaks by category, which need not coincide.
    categories: BTreeMap<String, u64>,
    /// Growth of the process, including adapters that the caller holds.
    process_bytes: Option<u64>,
    /// The account's peak over the bytes of all keys and values of the sequence.
    account_of_kv: f64,
}

/// Bytes that a step reads.
#[derive(Debug, Serialize)]
struct ResidentReads {
    /// Bytes read from the devices per step: blocks, and records that are streamed.
    bytes_read_per_step: u64,
    /// The same over the bytes of all keys and values.
    read_of_kv: f64,
    /// The share that LeoAM predicts: the selected share, and two keys of each group's keys and values.
    alpha_plus_records: f64,
}

/// A method with its selector, if it has one.
struct ResidentMethod<'a> {
    name: &'a str,
    selector: Option<&'a Arc<dyn Selector>>,
    form: HeadAggregation,
    /// False for `none`, which takes the newest tokens without scoring.
    scores: bool,
}

/// Runs `kvbench resident`.
pub(crate) fn run(args: &ResidentArgs) -> Result<()> {
    let tokens = args.context / u32::from(args.group) * u32::from(args.group);
    let bytes = u64::from(tokens) * TOKEN_LAYER_BYTES * u64::from(args.layers);
    // Min/max records are at most a quarter of the keys and values, and the records of other methods are smaller.
    let dir = work_directory(&args.common.device, bytes + bytes / 2 + (256 << 20))?;
    let path = dir.path().join("store");
    // The adapters are fitted first, so that the growth of the process does not include the fitting.
    let mut selectors: BTreeMap<(&str, Option<usize>), Arc<dyn Selector>> = BTreeMap::new();
    let identity = |spec: &MethodSpec| (spec.method().name, spec.parameter());
    let mut methods = Vec::new();
    for name in &args.method {
        let parsed = MethodArg::parse(name)?;
        if let MethodArg::Registered(spec) = &parsed
            && !selectors.contains_key(&identity(spec))
        {
            selectors.insert(identity(spec), method::selector(spec, args.layers)?);
        }
        methods.push((name, parsed));
    }
    write(args, &path, tokens as usize, selectors.values())?;
    for (name, parsed) in methods {
        let selector = match &parsed {
            MethodArg::None | MethodArg::Records(_) => None,
            MethodArg::Registered(spec) => selectors.get(&identity(spec)),
        };
        let form = parsed.aggregation().unwrap_or(HeadAggregation::Softmax);
        let method = ResidentMethod { name, selector, form, scores: !matches!(parsed, MethodArg::None) };
        let result = measure_within(args, &path, &method, bytes)?;
        print(args.common.json, &format!("resident {name} {tokens} tokens"), &result)?;
    }
    Ok(())
}

/// Writes a store with one sequence.
fn write<'a>(
    args: &ResidentArgs,
    path: &Path,
    tokens: usize,
    selectors: impl Iterator<Item = &'a Arc<dyn Selector>>,
) -> Result<()> {
    let store = open_store(&args.common, path, ByteSize::mib(512))?;
    let options = CreateOptions::new().key(KEY);
    let options = match args.summaries {
        SummaryPlace::Resident => options,
        SummaryPlace::Streamed => {
            options.store_summary(StoredSummary::MinMax).summary_residency(SummaryResidency::Streamed)
        }
    };
    let mut sequence = store.create_sequence(&layout(args.layers, args.group)?, options)?;
    if args.summaries == SummaryPlace::Streamed {
        for selector in selectors {
            sequence.attach_stored(Arc::clone(selector))?;
        }
    }
    KvSource::new(CHUNK).append(&mut sequence, tokens)?;
    sequence.commit(Durability::Sync)?;
    drop(sequence);
    Ok(store.close()?)
}

/// Measures a method within `--limit`, and with twice `kv_bytes` more if it does not fit.
fn measure_within(
    args: &ResidentArgs,
    path: &Path,
    method: &ResidentMethod<'_>,
    kv_bytes: u64,
) -> Result<ResidentResult> {
    check_interrupt()?;
    let mut result = match measure(args, path, method, args.limit) {
        Err(e) if is_out_of_memory(&e) => {
            eprintln!("kvbench: {}: {e:#}; trying again with a larger limit", method.name);
            let limit = ByteSize(args.limit.0 + 2 * kv_bytes);
            let mut result = measure(args, path, method, limit).with_context(|| method.name.to_owned())?;
            result.memory.within_limit = false;
            result
        }
        outcome => outcome.with_context(|| method.name.to_owned())?,
    };
    result.memory.account_of_kv = rounded(result.memory.account_peak_bytes as f64 / kv_bytes as f64);
    Ok(result)
}

fn is_out_of_memory(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<stratakv::Error>().map(stratakv::Error::kind);
    matches!(kind, Some(ErrorKind::MemoryLimit | ErrorKind::Busy | ErrorKind::Configuration))
}

fn measure(args: &ResidentArgs, path: &Path, method: &ResidentMethod<'_>, limit: ByteSize) -> Result<ResidentResult> {
    let process_before = process_resident_bytes();
    let cache = ByteSize::mib(args.cache_mib);
    let cache_options = (args.cache_mib > 0).then(|| CacheOptions::new(cache).policy(CachePolicy::Lru));
    let options = StoreOptions::default().cache(cache_options).memory_limit(limit);
    let store = open_store_with(&args.common, None, path, options)?;
    let mut sequence = store.open_sequence(KEY, OpenSequence::new().summary_residency(args.summaries.into()))?;
    let selector = method.selector.map(|selector| sequence.attach(Arc::clone(selector))).transpose()?;
    let mut decoding = Decoding::new(args, &store, sequence, selector, method);
    let (mut process_peak, mut step_ms, read_before) = (None, Vec::new(), read_bytes(&store));
    for _ in 0..args.steps {
        check_interrupt()?;
        let start = Instant::now();
        for layer in 0..usize::from(args.layers) {
            decoding.layer(layer)?;
        }
        step_ms.push(start.elapsed().as_secs_f64() * 1e3);
        process_peak = process_peak.max(process_resident_bytes());
    }
    let memory = store.status().memory;
    let bytes_read_per_step = (read_bytes(&store) - read_before) / u64::from(args.steps);
    let kv = u64::from(args.context) * TOKEN_LAYER_BYTES * u64::from(args.layers);
    let summary_bytes = selector.map_or(Ok(0), |selector| decoding.sequence.selector_bytes(selector))?;
    drop(decoding);
    store.close()?;
    let token_layers = f64::from(args.context) * f64::from(args.layers);
    let categories = memory.categories.iter();
    Ok(ResidentResult {
        setup: ResidentSetup {
            method: method.name.to_owned(),
            context: args.context,
            layers: args.layers,
            group: args.group,
            budget: args.budget,
        },
        memory: ResidentMemory {
            cache_bytes: cache.0,
            limit_bytes: limit.0,
            within_limit: true,
            summary_bytes,
            summary_bytes_per_token: rounded(summary_bytes as f64 / token_layers),
            account_peak_bytes: memory.peak_bytes as u64,
            categories: categories
                .map(|own| (format!("{:?}", own.category).to_lowercase(), own.peak_bytes as u64))
                .collect(),
            process_bytes: process_peak.zip(process_before).map(|(peak, before)| peak.saturating_sub(before)),
            account_of_kv: 0.0,
        },
        summaries: format!("{:?}", args.summaries).to_lowercase(),
        predict: args.predict == Switch::On,
        step_ms: rounded(median(&step_ms)),
        reads: ResidentReads {
            bytes_read_per_step,
            read_of_kv: rounded(bytes_read_per_step as f64 / kv as f64),
            alpha_plus_records: rounded(f64::from(args.budget) / f64::from(args.context) + 1.0 / f64::from(args.group)),
        },
    })
}

/// The sequence while it decodes.
struct Decoding {
    pipeline: Pipeline,
    sequence: Sequence,
    selector: Option<SelectorId>,
    options: SelectOptions,
    scores: bool,
    predict: bool,
    layers: usize,
    source: KvSource,
    random: fastrand::Rng,
    output: Vec<f32>,
}

impl Decoding {
    fn new(
        args: &ResidentArgs,
        store: &Store,
        sequence: Sequence,
        selector: Option<SelectorId>,
        method: &ResidentMethod<'_>,
    ) -> Self {
        let options = SelectOptions::new(Budget::tokens(args.budget as usize)).aggregation(method.form);
        let options = if method.scores { options } else { options.recent(args.budget as usize) };
        Self {
            pipeline: Pipeline::new(store, options),
            sequence,
            selector,
            options,
            scores: method.scores,
            predict: args.predict == Switch::On,
            layers: usize::from(args.layers),
            source: KvSource::new(1),
            random: fastrand::Rng::with_seed(41),
            output: vec![0.0; QUERY_HEADS * HEAD_DIM],
        }
    }

    fn select(&self, layer: usize, query: &[f32]) -> Result<Selection> {
        Ok(match self.selector {
            Some(selector) => {
                self.sequence.select(layer, SelectRequest::query(query).options(self.options).selector(selector))?
            }
            None => self.sequence.select(layer, SelectRequest::query(query).options(self.options))?,
        })
    }

    /// Decodes one layer of a step, and starts the reads of the next ones.
    fn layer(&mut self, layer: usize) -> Result<()> {
        let (keys, values) = self.source.pair(1);
        self.sequence.append(layer, keys, values)?;
        let query = random_query(&mut self.random);
        let selection = self.select(layer, &query)?;
        self.pipeline.read(layer, &[selection])?;
        let next = layer + 1;
        let streams = self.scores && next < self.layers;
        if streams {
            self.pipeline.stream(next, &[&self.sequence])?;
        }
        if self.predict && next < self.layers {
            let selection = self.select(next, &query)?;
            self.pipeline.predict(next, &[selection])?;
            if streams && next + 1 < self.layers {
                self.pipeline.stream(next + 1, &[&self.sequence])?;
            }
        }
        self.pipeline.attend(layer, &[&query], &AttendOptions::default(), &mut [&mut self.output])?;
        Ok(())
    }
}
