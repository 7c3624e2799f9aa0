//! `kvbench cluster methods` measures whole methods of clusters on one layer: building, selecting, upkeep and memory.
//!
//! 1. Plant the keys of one layer, and build the summaries of a method as `Sequence::attach` does. Methods that need
//!    recorded queries get keys of the last tokens as queries.
//! 2. For each group of new tokens: choose entries for a query, then push the group and let the summary take it in.
//!    The caches are emptied before each of both, as the other layers of a model would do.
//! 3. Report the bytes that the summaries take, for as many layers as the model has.
//!
//! Reads of keys for splits are left out, because the keys are in memory. One core does all of it, except k-means.

use crate::cluster::args::{COVERED, PlantedArgs, count};
use crate::cluster::layers::{PlantedSizes, planted};
use crate::support::args::{between, share, size};
use crate::support::interrupt::check_interrupt;
use crate::support::measure::cpu_seconds;
use crate::support::method::{registered, selector};
use crate::support::model::{HEAD_DIM, KV_HEADS};
use crate::support::report::{median, print, rounded};
use anyhow::{Context, Result, ensure};
use clap::Args;
use half::f16;
use serde::Serialize;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use stratakv::retrieval::{
    EntryRequest, HeadAggregation, KeyGroup, KeyShape, LayerSummary, MethodSpec, QueryProfile, SealedKeys, Selector,
};
use stratakv::{ByteSize, DType};

/// Arguments of `kvbench cluster methods`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster methods --json
          kvbench cluster methods --methods dynakv:16,swarm:8:members --entries 131072

`select_us` is one choice of one layer. `all_layers_token_us` is the time of taking in a token, amortised over its
group, times the layers. `split_keys_per_token` are the groups whose keys splits ask for, which a store would read.")]
pub(crate) struct ClusterMethodsArgs {
    #[command(flatten)]
    planted: PlantedArgs,
    /// Methods that choose entries, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = registered,
        default_value = "dynakv:16,dynakv:16:members,clusterkv:16,swarm:8,swarm:8:members,pqcache")]
    methods: Vec<MethodSpec>,
    /// Entries that clusters are built from.
    #[arg(long, default_value_t = 32768, value_parser = count())]
    entries: u32,
    /// Tokens that are taken in afterwards.
    #[arg(long, default_value_t = 512, value_parser = count())]
    new: u32,
    /// Tokens of a group.
    #[arg(long, default_value_t = 16, value_parser = between(1, 256))]
    group_tokens: u32,
    /// Query heads of each KV head.
    #[arg(long, default_value_t = 4, value_parser = between(1, 64))]
    query_heads: u32,
    /// Recorded queries of methods that need a profile.
    #[arg(long, default_value_t = 128, value_parser = between(1, 4096))]
    queries: u32,
    /// Share of the tokens that a choice may take.
    #[arg(long, default_value_t = 1.0 / 13.0, value_parser = share)]
    budget: f64,
    /// Add up raw scores of query heads, instead of a softmax each.
    #[arg(long)]
    raw: bool,
    /// Layers of the model.
    #[arg(long, default_value_t = 32, value_parser = between(1, 1024))]
    layers: u32,
    /// Bytes that are read before each measurement, to empty the caches.
    #[arg(long, default_value = "96MiB", value_parser = size)]
    working_set: ByteSize,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    json: bool,
}

/// One method on one layer.
#[derive(Debug, Serialize)]
struct ClusterMethodResult {
    method: String,
    entries: usize,
    kv_heads: usize,
    dim: usize,
    group_tokens: usize,
    query_heads: u32,
    aggregation: &'static str,
    /// Building the summaries of the layer, the profile included.
    build_s: f64,
    build_cpu_s: f64,
    budget_tokens: usize,
    /// The median choice of a layer.
    select_us: f64,
    /// The memory that a choice reserves.
    select_bytes: usize,
    /// The mean time of taking in a token, of all layers.
    all_layers_token_us: f64,
    /// The groups that splits asked for, over the tokens.
    split_keys_per_token: f64,
    layers: u32,
    resident_bytes_layer: usize,
    resident_mib_all_layers: f64,
    /// The memory that the next group reserves in a layer, beside what is resident.
    append_scratch_bytes: usize,
}

/// The layer to measure.
struct MeasuredLayer {
    shape: KeyShape,
    /// The K plane of each group in f16.
    planes: Vec<Vec<u8>>,
    /// The keys `[tokens, dim]` of each head.
    heads: Vec<Vec<f32>>,
}

/// Runs `kvbench cluster methods`.
pub(super) fn run(args: &ClusterMethodsArgs) -> Result<()> {
    let layer = MeasuredLayer::new(args)?;
    for spec in &args.methods {
        check_interrupt()?;
        eprintln!("kvbench: {spec} on {} entries", args.entries);
        let result = measure(args, &layer, spec)?;
        print(args.json, &format!("cluster methods {spec}"), &result)?;
    }
    Ok(())
}

impl MeasuredLayer {
    fn new(args: &ClusterMethodsArgs) -> Result<Self> {
        let group_tokens = args.group_tokens as usize;
        let tokens = (args.entries as usize + args.new as usize).next_multiple_of(group_tokens);
        let sizes = PlantedSizes { entries: tokens, queries: 0, heads: KV_HEADS, dim: HEAD_DIM, covered: COVERED };
        let shape = KeyShape { kv_heads: KV_HEADS, key_dim: HEAD_DIM, group_tokens, dtype: DType::F16 };
        let heads = planted(&args.planted, sizes)?.heads;
        let row = group_tokens * HEAD_DIM;
        let plane = |group: usize| -> Vec<u8> {
            let rows = heads.iter().flat_map(|keys| &keys[group * row..][..row]);
            rows.flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()
        };
        Ok(Self { shape, planes: (0..tokens / group_tokens).map(plane).collect(), heads })
    }

    /// Returns the query heads of a token: its keys with a little noise.
    fn query(&self, token: usize, query_heads: u32, random: &mut fastrand::Rng) -> Vec<f32> {
        let mut query = Vec::with_capacity(KV_HEADS * query_heads as usize * HEAD_DIM);
        for keys in &self.heads {
            for _ in 0..query_heads {
                query.extend(keys[token * HEAD_DIM..][..HEAD_DIM].iter().map(|x| 2.0 * x + random.f32() - 0.5));
            }
        }
        query
    }

    fn push(&self, summaries: &mut [Box<dyn LayerSummary>], group: usize) -> Result<()> {
        let keys = KeyGroup::new(self.shape, &self.planes[group], group as u64)?;
        summaries.iter_mut().for_each(|summary| summary.push(&keys));
        Ok(())
    }

    /// Has the summaries take in what was pushed. Returns the groups that they asked for.
    fn advance(&self, summaries: &mut [Box<dyn LayerSummary>]) -> Result<usize> {
        let mut supplied = 0;
        for summary in summaries.iter_mut() {
            loop {
                let wanted = summary.advance()?;
                if wanted.is_empty() {
                    break;
                }
                supplied += wanted.len();
                for group in wanted {
                    summary.supply(&KeyGroup::new(self.shape, &self.planes[group as usize], group)?);
                }
            }
        }
        Ok(supplied)
    }

    /// Builds the summaries of a method over the first groups.
    fn build(
        &self,
        args: &ClusterMethodsArgs,
        selector: &dyn Selector,
        groups: usize,
    ) -> Result<Vec<Box<dyn LayerSummary>>> {
        let kinds = selector.summaries();
        let layers = kinds.iter().map(|kind| kind.layer(0, self.shape));
        let mut summaries = layers.collect::<stratakv::Result<Vec<_>>>()?;
        for group in 0..groups {
            self.push(&mut summaries, group)?;
        }
        summaries.iter_mut().for_each(|summary| summary.attached());
        self.advance(&mut summaries)?;
        let mut random = fastrand::Rng::with_seed(args.planted.seed);
        let tokens = groups * self.shape.group_tokens;
        let recorded = (0..args.queries).map(|_| random.usize(0..tokens)).collect::<Vec<_>>();
        let queries = recorded.into_iter().map(|token| self.query(token, args.query_heads, &mut random));
        let queries: Vec<Vec<f32>> = queries.collect();
        for summary in &mut summaries {
            if summary.profile_bytes(queries.len()).is_none() {
                continue;
            }
            let mut keys = SealedKeys::new(self.shape, 0);
            for (group, plane) in self.planes[..groups].iter().enumerate() {
                keys.push(&KeyGroup::new(self.shape, plane, group as u64)?);
            }
            let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
            let profile = QueryProfile { keys: &keys, shape: self.shape, queries: &queries, scale: scale() };
            summary.profile(&profile)?;
        }
        Ok(summaries)
    }
}

fn scale() -> f32 {
    (HEAD_DIM as f32).sqrt().recip()
}

/// Measures one method.
fn measure(args: &ClusterMethodsArgs, layer: &MeasuredLayer, spec: &MethodSpec) -> Result<ClusterMethodResult> {
    let selector: Arc<dyn Selector> = selector(spec, 1)?;
    let entries = selector.entries().with_context(|| format!("method {spec}: it chooses groups, not entries"))?;
    let group_tokens = layer.shape.group_tokens;
    let first = args.entries as usize / group_tokens;
    ensure!(first > 0, "--entries {}: fewer than the {group_tokens} tokens of a group", args.entries);
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let mut summaries = layer.build(args, selector.as_ref(), first)?;
    let (build_s, build_cpu_s) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let mut random = fastrand::Rng::with_seed(args.planted.seed ^ 7);
    let mut evicted = vec![1_u64; args.working_set.0 as usize / size_of::<u64>()];
    let (mut select_us, mut token_us, mut supplied, mut select_bytes) = (Vec::new(), Vec::new(), 0, 0);
    let aggregation = if args.raw { HeadAggregation::Sum } else { HeadAggregation::Softmax };
    let budget = (args.budget * f64::from(args.entries)) as usize;
    for group in first..layer.planes.len() {
        check_interrupt()?;
        let query = layer.query(random.usize(0..first * group_tokens), args.query_heads, &mut random);
        {
            let views: Vec<&dyn LayerSummary> = summaries.iter().map(|own| &**own).collect();
            let tokens = 0..entries.covered_groups(&views)? * group_tokens;
            let ask = EntryRequest { query: &query, shape: layer.shape, scale: scale(), aggregation, tokens, budget };
            evict(&mut evicted);
            let start = Instant::now();
            select_bytes = select_bytes.max(entries.choose_bytes(&views, &ask)?);
            black_box(entries.choose(&views, &ask)?);
            select_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        evict(&mut evicted);
        let start = Instant::now();
        layer.push(&mut summaries, group)?;
        supplied += layer.advance(&mut summaries)?;
        token_us.push(start.elapsed().as_secs_f64() * 1e6 / group_tokens as f64);
    }
    let resident = summaries.iter().map(|summary| summary.bytes()).sum::<usize>();
    let next = summaries.iter().map(|summary| summary.bytes_for(1)).sum::<usize>();
    let mean_token_us = token_us.iter().sum::<f64>() / token_us.len().max(1) as f64;
    Ok(ClusterMethodResult {
        method: spec.to_string(),
        entries: args.entries as usize,
        kv_heads: KV_HEADS,
        dim: HEAD_DIM,
        group_tokens,
        query_heads: args.query_heads,
        aggregation: if args.raw { "raw" } else { "softmax" },
        build_s: rounded(build_s),
        build_cpu_s: rounded(build_cpu_s),
        budget_tokens: budget,
        select_us: rounded(median(&select_us)),
        select_bytes,
        all_layers_token_us: rounded(mean_token_us * f64::from(args.layers)),
        split_keys_per_token: rounded(supplied as f64 / (token_us.len() * group_tokens).max(1) as f64),
        layers: args.layers,
        resident_bytes_layer: resident,
        resident_mib_all_layers: rounded(resident as f64 * f64::from(args.layers) / f64::from(1 << 20)),
        append_scratch_bytes: next.saturating_sub(resident),
    })
}

/// Reads and writes more than the caches hold.
fn evict(buffer: &mut [u64]) {
    for (at, x) in buffer.iter_mut().enumerate().step_by(8) {
        *x = x.wrapping_add(at as u64);
    }
    black_box(buffer);
}
