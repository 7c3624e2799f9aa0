//! `kvbench resident`: what one sequence holds in memory while it decodes, by method, as the account has it and as the
//! kernel has it for the process.
//!
//! The sequence is written once and opened again for each method, its summaries built from the stored keys or, where they are to
//! be streamed, written beside the groups and left there. Every step selects in each layer by the method, reads through the pipeline and a cache of resident blocks, and attends. Keys and
//! queries are random: bytes do not depend on them.

use crate::cli::{ResidentArgs, SummaryHome, Switch};
use crate::decode_select::form;
use crate::report::{median, print, rounded};
use crate::select::methods;
use crate::work::{
    HEAD_DIM, KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout, open_store, open_store_with, work_directory,
};
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stratakv::pipeline::Pipeline;
use stratakv::retrieval::{HeadAggregation, Selector};
use stratakv::{
    AttendOptions, Budget, ByteSize, CacheOptions, CachePolicy, CreateOptions, Durability, ErrorKind, OpenSequence,
    SelectOptions, Store, StoreOptions, StoredSummary, SummaryResidency,
};

const QUERY_HEADS: usize = 32;
const CHUNK: usize = 512;
const KEY: &str = "resident";

/// What was held at most, in bytes, from opening the store to the last step.
#[derive(Debug, Serialize)]
struct ResidentResult {
    method: String,
    context: u32,
    layers: u16,
    group: u16,
    budget: u32,
    cache_bytes: u64,
    /// The limit it ran under.
    limit_bytes: u64,
    /// Whether that is the one asked for; where it is not, the method does not fit in it.
    within_limit: bool,
    /// The method's summaries, and their share of a token and layer.
    summary_bytes: u64,
    summary_bytes_per_token: f64,
    account_peak_bytes: u64,
    /// Peaks by category; they need not coincide.
    categories: BTreeMap<String, u64>,
    /// Growth of the process, adapters that the caller holds included.
    process_bytes: Option<u64>,
    /// The account's peak over all keys and values of the sequence.
    account_of_kv: f64,
    /// Where summaries are: `resident` or `streamed`.
    summaries: String,
    predict: bool,
    step_ms: f64,
    /// What devices brought per step: blocks, and records that are streamed.
    bytes_read_per_step: u64,
    /// Over all keys and values.
    read_of_kv: f64,
    /// What LeoAM moves: the share selected, and two keys of each group's keys and values.
    alpha_plus_records: f64,
}

pub(crate) fn run(args: &ResidentArgs) -> Result<()> {
    let tokens = args.context / u32::from(args.group) * u32::from(args.group);
    let bytes = u64::from(tokens) * TOKEN_LAYER_BYTES * u64::from(args.layers);
    // Records of min/max are up to a quarter of it, those of other methods less.
    let dir = work_directory(&args.common.device, bytes + bytes / 2 + (256 << 20))?;
    let home = dir.path().join("store");
    // Fitted before the process is measured.
    let mut selectors: BTreeMap<&str, Arc<dyn Selector>> = BTreeMap::new();
    for name in args.method.iter().map(|method| form(method).0) {
        if !matches!(name, "none" | "records") && !selectors.contains_key(name) {
            selectors.insert(name, methods::selector(name, args.layers)?);
        }
    }
    fill(args, &home, tokens as usize, selectors.values())?;
    for method in &args.method {
        let (name, form) = form(method);
        let selector = selectors.get(name);
        let limits = [(args.limit, true), (ByteSize(args.limit.0 + 2 * bytes), false)];
        for (limit, asked) in limits {
            check_interrupt()?;
            match measure(args, &home, (method, selector, form), limit) {
                Err(e) if asked && out_of_memory(&e) => eprintln!("kvbench: {method}: {e:#}"),
                Err(e) => return Err(e).with_context(|| method.clone()),
                Ok(mut result) => {
                    result.within_limit = asked;
                    result.account_of_kv = rounded(result.account_peak_bytes as f64 / bytes as f64);
                    print(args.common.json, &format!("resident {method} {tokens} tokens"), &result)?;
                    break;
                }
            }
        }
    }
    Ok(())
}

fn out_of_memory(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<stratakv::Error>().map(stratakv::Error::kind);
    matches!(kind, Some(ErrorKind::MemoryLimit | ErrorKind::Busy | ErrorKind::Configuration))
}

fn fill<'a>(
    args: &ResidentArgs,
    home: &Path,
    tokens: usize,
    selectors: impl Iterator<Item = &'a Arc<dyn Selector>>,
) -> Result<()> {
    let store = open_store(&args.common, home, ByteSize::mib(512))?;
    let options = CreateOptions::new().key(KEY);
    let options = match args.summaries {
        SummaryHome::Resident => options,
        SummaryHome::Streamed => {
            options.store_summary(StoredSummary::MinMax).summary_residency(SummaryResidency::Streamed)
        }
    };
    let mut sequence = store.create_sequence(&layout(args.layers, args.group)?, options)?;
    if args.summaries == SummaryHome::Streamed {
        for selector in selectors {
            sequence.attach_stored(Arc::clone(selector))?;
        }
    }
    let mut source = KvSource::new(CHUNK);
    for start in (0..tokens).step_by(CHUNK) {
        check_interrupt()?;
        for layer in 0..usize::from(args.layers) {
            let (keys, values) = source.pair(CHUNK.min(tokens - start));
            sequence.append(layer, keys, values)?;
        }
    }
    sequence.commit(Durability::Sync)?;
    drop(sequence);
    Ok(store.close()?)
}

type Chosen<'a> = (&'a str, Option<&'a Arc<dyn Selector>>, HeadAggregation);

fn measure(args: &ResidentArgs, home: &Path, chosen: Chosen<'_>, limit: ByteSize) -> Result<ResidentResult> {
    let (method, selector, form) = chosen;
    let before = process_bytes();
    let cache = ByteSize::mib(args.cache_mib);
    let cache_options = (args.cache_mib > 0).then(|| CacheOptions::new(cache).policy(CachePolicy::Lru));
    let options = StoreOptions { cache: cache_options, ..StoreOptions::default() }.memory_limit(limit);
    let store = open_store_with(&args.common, None, home, options)?;
    let summaries = match args.summaries {
        SummaryHome::Resident => SummaryResidency::Resident,
        SummaryHome::Streamed => SummaryResidency::Streamed,
    };
    let mut sequence = store.open_sequence_with(KEY, OpenSequence::new().summary_residency(summaries))?;
    let selector = match selector {
        Some(selector) => Some(sequence.attach(Arc::clone(selector))?),
        None => None,
    };
    let options = SelectOptions::new(Budget::tokens(args.budget as usize)).aggregation(form);
    // Then there is nothing to score: the newest.
    let scores = method != "none";
    let options = if !scores { options.recent(args.budget as usize) } else { options };
    let mut random = fastrand::Rng::with_seed(41);
    let mut source = KvSource::new(1);
    let mut pipeline = Pipeline::new(&store, options);
    let mut out = vec![0.0_f32; QUERY_HEADS * HEAD_DIM];
    let (mut held, mut step_ms, before_bytes) = (None, Vec::new(), read_bytes(&store));
    for _ in 0..args.steps {
        check_interrupt()?;
        let start = Instant::now();
        for layer in 0..usize::from(args.layers) {
            let (keys, values) = source.pair(1);
            sequence.append(layer, keys, values)?;
            let query: Vec<f32> = (0..QUERY_HEADS * HEAD_DIM).map(|_| random.f32() - 0.5).collect();
            let view = |layer: usize| match selector {
                Some(selector) => sequence.select_with(selector, layer, &query, options),
                None => sequence.select(layer, &query, options),
            };
            pipeline.read(layer, &[view(layer)?])?;
            let next = layer + 1;
            let selects = scores && next < usize::from(args.layers);
            if selects {
                pipeline.stream(next, &[&sequence])?;
            }
            if args.predict == Switch::On && next < usize::from(args.layers) {
                pipeline.predict(next, &[view(next)?])?;
                if selects && next + 1 < usize::from(args.layers) {
                    pipeline.stream(next + 1, &[&sequence])?;
                }
            }
            pipeline.attend(layer, &[&query], &AttendOptions::default(), &mut [&mut out])?;
        }
        step_ms.push(start.elapsed().as_secs_f64() * 1e3);
        held = held.max(process_bytes());
    }
    let memory = store.status().memory;
    let read = (read_bytes(&store) - before_bytes) / u64::from(args.steps);
    let kv = u64::from(args.context) * TOKEN_LAYER_BYTES * u64::from(args.layers);
    let summary_bytes = selector.map_or(Ok(0), |selector| sequence.selector_bytes(selector))?;
    drop((pipeline, sequence));
    store.close()?;
    let categories =
        memory.categories.iter().map(|c| (format!("{:?}", c.category).to_lowercase(), c.peak_bytes as u64));
    Ok(ResidentResult {
        method: method.to_owned(),
        context: args.context,
        layers: args.layers,
        group: args.group,
        budget: args.budget,
        cache_bytes: cache.0,
        limit_bytes: limit.0,
        within_limit: false,
        summary_bytes,
        summary_bytes_per_token: rounded(summary_bytes as f64 / f64::from(args.context) / f64::from(args.layers)),
        account_peak_bytes: memory.peak_bytes as u64,
        categories: categories.collect(),
        process_bytes: held.zip(before).map(|(held, before)| held.saturating_sub(before)),
        account_of_kv: 0.0,
        summaries: format!("{:?}", args.summaries).to_lowercase(),
        predict: args.predict == Switch::On,
        step_ms: rounded(median(&step_ms)),
        bytes_read_per_step: read,
        read_of_kv: rounded(read as f64 / kv as f64),
        alpha_plus_records: rounded(f64::from(args.budget) / f64::from(args.context) + 1.0 / f64::from(args.group)),
    })
}

fn read_bytes(store: &Store) -> u64 {
    store.status().devices.iter().map(|device| device.counters.read_bytes).sum()
}

/// Resident bytes of this process, as the kernel has them.
fn process_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}
