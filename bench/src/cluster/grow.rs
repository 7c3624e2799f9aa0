//! `kvbench cluster grow` measures clusters that are stored again and again while a sequence grows.
//!
//! 1. Append the first tokens, build the clusters and store them.
//! 2. Append some tokens, commit, and store the clusters again, until the sequence is complete.
//! 3. Read the selections of all steps. Release the set, store it at once, and read the same selections again.
//!
//! Requests and bytes depend on the arguments alone.

use super::args::count;
use super::decode::{ClusterDecodeArgs, DecodeWorkload};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, print, ratio, rounded};
use crate::support::store::open_store_with;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use stratakv::retrieval::{AdapterFit, HeadAggregation, MethodSpec, SelectorId};
use stratakv::sequence::StoredClusters;
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, KvLayout, SelectOptions, SelectRequest, Sequence, Store, StoreOptions,
    TensorView,
};

/// Tokens of one append, at most.
const CHUNK: usize = 512;

/// Arguments of `kvbench cluster grow`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster grow --device /nvme0 --methods dynakv:8:members --json
          kvbench cluster grow --device /nvme0 --from 4096 --every 512 --entries 32768 --layers 1

`written_kv` is the bytes that all stores wrote to the device, over the bytes of keys and values. `rewritten_kv` is what
they would have written without pages that stay, and `space_kv` the space of the grown set. `ratio_requests` and
`ratio_bytes` compare reads of the grown set with those of a set that was stored at once. Figures of reads are per step
and layer. Of --methods, those without clusters are left out, and of --budgets, the first one counts.")]
pub(crate) struct ClusterGrowArgs {
    #[command(flatten)]
    decode: ClusterDecodeArgs,
    /// Tokens of the first store. Without it, a quarter of all.
    #[arg(long, value_parser = count())]
    from: Option<u32>,
    /// Tokens between two stores. Without it, a sixteenth of all.
    #[arg(long, value_parser = count())]
    every: Option<u32>,
}

/// The growth of one method's clusters.
#[derive(Debug, Serialize)]
struct GrowthResult {
    method: String,
    trace: String,
    tokens: usize,
    layers: usize,
    from: usize,
    every: usize,
    stores: usize,
    /// Pages that stayed, over the pages that were there before.
    kept_share: f64,
    written_kv: Option<f64>,
    rewritten_kv: Option<f64>,
    /// Bytes of directories, of `written_kv`.
    directories_kv: Option<f64>,
    /// The space of the grown set, pages that no cluster names included, over the bytes of keys and values.
    space_kv: Option<f64>,
    /// Pages of the grown set over those of the set that was stored at once.
    ratio_pages: Option<f64>,
    requests: f64,
    ratio_requests: Option<f64>,
    bytes: f64,
    ratio_bytes: Option<f64>,
    /// The median time of a store.
    grow_ms: f64,
    /// The time of the store at once.
    store_ms: f64,
}

/// Runs `kvbench cluster grow`.
pub(super) fn run(args: &ClusterGrowArgs) -> Result<()> {
    let decode = &args.decode;
    let workload = DecodeWorkload::new(decode)?;
    let group = usize::from(decode.group);
    let from = args.from.map_or(workload.tokens / 4, |tokens| tokens as usize) / group * group;
    let every = (args.every.map_or(workload.tokens / 16, |tokens| tokens as usize) / group * group).max(group);
    ensure!((1..=workload.tokens).contains(&from), "--from {from}: the sequence has {} tokens", workload.tokens);
    for method in decode.methods.iter().filter(|method| method.has_clusters()) {
        let spec = &method.spec;
        eprintln!("kvbench: {spec}: {from} to {} tokens by {every} of {}", workload.tokens, workload.name);
        let directory = tempfile::tempdir_in(&decode.common.device)
            .with_context(|| format!("--device {}", decode.common.device.display()))?;
        let result = Growth::new(decode, &workload, spec, directory.path())?.run((from, every))?;
        let text = format!("{spec}, stored while growing");
        print(decode.common.json, &text, &result)?;
    }
    Ok(())
}

/// A sequence that grows.
struct Growth<'a> {
    workload: &'a DecodeWorkload,
    args: &'a ClusterDecodeArgs,
    spec: &'a MethodSpec,
    sequence: Sequence,
    store: Store,
}

impl<'a> Growth<'a> {
    fn new(
        args: &'a ClusterDecodeArgs,
        workload: &'a DecodeWorkload,
        spec: &'a MethodSpec,
        directory: &Path,
    ) -> Result<Self> {
        let (heads, dim) = (workload.kv_heads as u16, workload.dim as u16);
        let builder = KvLayout::builder().layers(workload.layers.len() as u16).kv_heads(heads).head_dim(dim);
        let layout = builder.group_tokens(args.group).dtype(DType::F16).build()?;
        let options = StoreOptions::default().memory_limit(ByteSize::mib(4096)).gap_limit(args.gap_limit.0);
        let store = open_store_with(&args.common, None, &directory.join("store"), options)?;
        let sequence = store.create_sequence(&layout, CreateOptions::new())?;
        Ok(Self { workload, args, spec, sequence, store })
    }

    fn run(mut self, (from, every): (usize, usize)) -> Result<GrowthResult> {
        self.append(0..from)?;
        let id = self.attach()?;
        let mut stored = vec![self.sequence.store_clusters(id)?];
        let mut length = from;
        while length < self.workload.tokens {
            let end = (length + every).min(self.workload.tokens);
            self.append(length..end)?;
            length = end;
            stored.push(self.sequence.store_clusters(id)?);
        }
        let grown = self.read(id)?;
        let with_set = self.live_bytes();
        self.sequence.drop_stored_clusters()?;
        let set_bytes = with_set.saturating_sub(self.live_bytes());
        let at_once = self.sequence.store_clusters(id)?;
        let fresh = self.read(id)?;
        let result = self.result((from, every), &stored, &at_once, (grown, fresh), set_bytes);
        let Self { sequence, store, .. } = self;
        drop(sequence);
        store.close()?;
        Ok(result)
    }

    /// Returns the bytes of all frames that sequences name.
    fn live_bytes(&self) -> u64 {
        self.store.status().live_bytes
    }

    /// Appends tokens to all layers, and commits them.
    fn append(&mut self, tokens: Range<usize>) -> Result<()> {
        let DecodeWorkload { kv_heads, dim, layers, .. } = self.workload;
        let row = kv_heads * dim;
        for first in tokens.clone().step_by(CHUNK) {
            let count = CHUNK.min(tokens.end - first);
            for (at, layer) in layers.iter().enumerate() {
                check_interrupt()?;
                let rows = &layer.keys[first * row..(first + count) * row];
                let view = TensorView::token_major(rows, count, *kv_heads, *dim);
                self.sequence.append(at, view, view)?;
            }
        }
        Ok(self.sequence.commit(Durability::Sync)?)
    }

    /// Attaches the method, with the recorded queries if it takes them.
    fn attach(&mut self) -> Result<SelectorId> {
        let adapter = match (self.spec.adapter_fit(), self.spec.adapter_name()) {
            ((AdapterFit::Codes, Some(bits)), Some(name)) => Some(Arc::new(self.workload.codes(&name, bits)?)),
            ((AdapterFit::None, _), _) => None,
            _ => anyhow::bail!("--methods {}: its adapter is not fitted here", self.spec),
        };
        let id = self.sequence.attach(self.spec.selector(adapter)?)?;
        for (at, layer) in self.workload.layers.iter().enumerate() {
            let queries: Vec<&[f32]> = layer.profile.iter().map(Vec::as_slice).collect();
            match self.sequence.profile(id, at, &queries, None) {
                // The method takes no queries.
                Err(e) if e.kind() == stratakv::ErrorKind::InvalidArgument => break,
                profiled => profiled?,
            }
        }
        Ok(id)
    }

    /// Reads the selections of all steps. Returns requests and bytes, per step and layer.
    fn read(&self, id: SelectorId) -> Result<(f64, f64)> {
        let form = self.spec.aggregation().unwrap_or(HeadAggregation::Softmax);
        let budget = self.args.budgets.first().context("--budgets: one is needed")?.budget;
        let options = SelectOptions::new(budget).aggregation(form);
        let (mut requests, mut bytes, mut reads) = (0, 0, 0);
        for (at, layer) in self.workload.layers.iter().enumerate() {
            for query in &layer.steps {
                check_interrupt()?;
                let request = SelectRequest::query(query).options(options).selector(id);
                let selection = self.sequence.select(at, request)?;
                let ticket = self.store.read(&[&selection]).submit()?;
                (requests, bytes, reads) = (requests + ticket.requests(), bytes + ticket.device_bytes(), reads + 1);
                ticket.wait()?;
            }
        }
        let reads = f64::from(reads.max(1));
        Ok((requests as f64 / reads, bytes as f64 / reads))
    }

    fn result(
        &self,
        (from, every): (usize, usize),
        stored: &[StoredClusters],
        at_once: &StoredClusters,
        (grown, fresh): ((f64, f64), (f64, f64)),
        set_bytes: u64,
    ) -> GrowthResult {
        let DecodeWorkload { kv_heads, dim, layers, tokens, name, .. } = self.workload;
        // Keys and values in f16.
        let kv = (kv_heads * dim * 4 * layers.len() * tokens) as f64;
        let sum = |of: &dyn Fn(&StoredClusters) -> u64| stored.iter().map(of).sum::<u64>() as f64;
        let page_bytes = at_once.page_bytes as f64 / at_once.pages.max(1) as f64;
        let before: u64 = stored[..stored.len() - 1].iter().map(|own| own.pages).sum();
        let times: Vec<f64> = stored[1..].iter().map(|own| own.time.as_secs_f64() * 1e3).collect();
        let last = stored.last().map_or(0, |own| own.pages);
        GrowthResult {
            method: self.spec.to_string(),
            trace: name.clone(),
            tokens: *tokens,
            layers: layers.len(),
            from,
            every,
            stores: stored.len(),
            kept_share: rounded(sum(&|own| own.kept_pages) / before.max(1) as f64),
            written_kv: ratio(sum(&|own| own.device_bytes), kv),
            rewritten_kv: ratio(sum(&|own| own.pages) * page_bytes + sum(&|own| own.directory_bytes), kv),
            directories_kv: ratio(sum(&|own| own.directory_bytes), kv),
            space_kv: ratio(set_bytes as f64, kv),
            ratio_pages: ratio(last as f64, at_once.pages as f64),
            requests: rounded(grown.0),
            ratio_requests: ratio(grown.0, fresh.0),
            bytes: rounded(grown.1),
            ratio_bytes: ratio(grown.1, fresh.1),
            grow_ms: rounded(median(&times)),
            store_ms: rounded(at_once.time.as_secs_f64() * 1e3),
        }
    }
}
