//! `kvbench cluster grow` measures clusters that are stored again and again while a sequence grows.
//!
//! 1. Append the first tokens, build the clusters and store them.
//! 2. Append some tokens, commit, and store the clusters again, until the sequence is complete.
//! 3. Read the selections of all steps. Release the set, store it at once, and read the same selections again.
//! 4. Compare what the stores moved with packed clusters: one after the other, without space between them. An entry
//!    that joins a packed cluster moves all entries behind that cluster.
//!
//! Source of packed clusters: DynaKV, figure 13.
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
          kvbench cluster grow --device /nvme0 --from 28672 --every 512 --entries 32768 --layers 1 --steps 1

`written_kv` is the bytes that all stores wrote to the device, over the bytes of keys and values. `rewritten_kv` is what
they would have written without pages that stay, and `space_kv` the space of the grown set. `ratio_requests` and
`ratio_bytes` compare reads of the grown set with those of a set that was stored at once. Figures of reads are per step
and layer. `moved` is the bytes of pages that the later stores wrote beyond the new entries, over these entries.
`moved_packed` is what packed clusters move if each new entry goes to its cluster, and `moved_packed_stores` if all
entries of a store go to their clusters together, both as means over all orders of clusters. Of --methods, those without
clusters are left out, and of --budgets, the first one counts.")]
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
    /// Entries that the stores after the first one moved, per new entry.
    moved: f64,
    /// The same of packed clusters, entry by entry.
    moved_packed: f64,
    /// The same of packed clusters, store by store.
    moved_packed_stores: f64,
    /// `moved_packed` over `moved`. None if nothing was moved.
    ratio_packed: Option<f64>,
    ratio_packed_stores: Option<f64>,
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
        let moves = PackedMoves::of(&stored.iter().map(|own| own.tokens).collect::<Vec<_>>());
        let token_bytes = (kv_heads * dim * 4 * layers.len()) as f64;
        let later: u64 = stored[1..].iter().map(|own| own.page_bytes).sum();
        let per_new = |entries: f64| rounded(entries / (moves.new as f64).max(1.0));
        let moved = (later as f64 / token_bytes - moves.new as f64).max(0.0);
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
            moved: per_new(moved),
            moved_packed: per_new(moves.by_entry),
            moved_packed_stores: per_new(moves.by_store),
            ratio_packed: ratio(moves.by_entry, moved),
            ratio_packed_stores: ratio(moves.by_store, moved),
            grow_ms: rounded(median(&times)),
            store_ms: rounded(at_once.time.as_secs_f64() * 1e3),
        }
    }
}

/// Entries that packed clusters move while they grow, as a mean over all orders of clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct PackedMoves {
    /// New entries.
    new: u64,
    /// Moved entries, if each new entry goes to its cluster by itself.
    by_entry: f64,
    /// Moved entries, if all new entries of a store go to their clusters together.
    by_store: f64,
}

impl PackedMoves {
    /// Returns the moves of clusters that have these numbers of entries after each store. The first store moves none.
    ///
    /// An entry goes to any place among those that are there, so half of them are behind it. Of `m` entries together,
    /// the first one decides: `m / (m + 1)` of the others are behind it.
    fn of(entries: &[u64]) -> Self {
        let mut moves = Self::default();
        for (before, after) in entries.iter().zip(entries.iter().skip(1)) {
            let new = after.saturating_sub(*before);
            let (before, m) = (*before as f64, new as f64);
            moves.new += new;
            moves.by_entry += m * before / 2.0 + m * (m - 1.0).max(0.0) / 4.0;
            moves.by_store += before * m / (m + 1.0);
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_clusters_move_what_is_behind_a_new_entry() {
        assert_eq!(PackedMoves::of(&[100]), PackedMoves::default());
        // Two entries go among 100 and 101. Together, the first of both has two thirds of 100 behind it.
        let moves = PackedMoves::of(&[100, 102]);
        assert_eq!((moves.new, moves.by_entry), (2, 50.0 + 50.5));
        assert!((moves.by_store - 200.0 / 3.0).abs() < 1e-9);
        // One by one, both counts are equal.
        let single = PackedMoves::of(&[100, 101, 102, 102]);
        assert_eq!((single.new, single.by_entry, single.by_store), (2, 100.5, 100.5));
    }
}
