//! `kvbench cluster decode` measures the reads of decode steps by methods of clusters, from groups and from pages.
//!
//! 1. Write a sequence of planted topics, or of the keys of a file of `kvrun profile` (`workload`).
//! 2. For each method of clusters: attach it, select for every step and budget, store its clusters, and select again.
//! 3. In each round, read and attend to all steps of the baseline, then from groups, then from pages (`side`). The
//!    steps of one side follow each other, because a limited device counts the requests of the steps before.
//!
//! The steps have no pipeline and no cache, so a read is waited for. Requests and bytes depend on the arguments alone.

mod args;
mod result;
mod side;
mod workload;

pub(crate) use args::ClusterDecodeArgs;
pub(super) use workload::DecodeWorkload;

use crate::devices::{DeviceLimits, DeviceSet, in_directory};
use crate::support::interrupt::check_interrupt;
use crate::support::report::print;
use crate::support::store::open_store_with;
use anyhow::{Context, Result, ensure};
use result::{ClusterDecodeResult, DecodeTrace, StoreClustersResult};
use side::DecodeSide;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stratakv::retrieval::{AdapterFit, HeadAggregation, KeyShape, MethodSpec, Selector, SelectorId, SummarySpec};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, KvLayout, SelectOptions, Sequence, Store, StoreOptions,
    TensorView,
};
use workload::DecodeLayer;

/// Tokens of one append.
const CHUNK: usize = 512;

/// Runs `kvbench cluster decode`.
pub(super) fn run(args: &ClusterDecodeArgs) -> Result<()> {
    let baseline = args.methods.first().context("--methods: at least the baseline is needed")?;
    let grouped = args.methods.iter().skip(1).find(|spec| spec.sharing().is_none());
    ensure!(grouped.is_none(), "--methods {grouped:?}: only methods of clusters can be compared with the baseline");
    ensure!(baseline.sharing().is_none(), "--methods {baseline}: the first method is the baseline; give tck:64");
    let workload = DecodeWorkload::new(args)?;
    let bytes = (workload.tokens * workload.layers.len() * workload.kv_heads * workload.dim * 4) as u64;
    // Pages may be half empty, and sets of clusters follow each other.
    let needed = bytes * 8 + (512 << 20);
    let limits = args.limits.limits();
    in_directory(&args.common.device, needed, &limits, args.common.json, &mut |directory, limited| {
        let trace = DecodeTrace::new(&workload, args.group, (limits.read_bps, limits.read_iops));
        let contest = DecodeContest::new(args, &workload, &trace, directory)?;
        contest.run(limited.map(|devices| (devices, limits)))
    })
}

/// A store with one sequence, and the methods to compare on it.
struct DecodeContest<'a> {
    args: &'a ClusterDecodeArgs,
    workload: &'a DecodeWorkload,
    trace: &'a DecodeTrace,
    /// The attention weights of each selection, step after step and layer after layer.
    weights: Vec<Vec<f32>>,
    sequence: Sequence,
    store: Store,
}

impl<'a> DecodeContest<'a> {
    fn new(
        args: &'a ClusterDecodeArgs,
        workload: &'a DecodeWorkload,
        trace: &'a DecodeTrace,
        directory: &Path,
    ) -> Result<Self> {
        let (heads, dim) = (workload.kv_heads as u16, workload.dim as u16);
        let builder = KvLayout::builder().layers(workload.layers.len() as u16).kv_heads(heads).head_dim(dim);
        let layout = builder.group_tokens(args.group).dtype(DType::F16).build()?;
        let options = StoreOptions::default().memory_limit(ByteSize::mib(4096)).gap_limit(args.gap_limit);
        let store = open_store_with(&args.common, None, &directory.join("store"), options)?;
        let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
        let row = workload.kv_heads * workload.dim;
        for first in (0..workload.tokens).step_by(CHUNK) {
            let tokens = CHUNK.min(workload.tokens - first);
            for (at, layer) in workload.layers.iter().enumerate() {
                check_interrupt()?;
                let rows = &layer.keys[first * row..(first + tokens) * row];
                let view = TensorView::token_major(rows, tokens, workload.kv_heads, workload.dim);
                sequence.append(at, view, view)?;
            }
        }
        sequence.commit(Durability::Sync)?;
        let steps = 0..workload.layers[0].steps.len();
        let each = steps.flat_map(|step| workload.layers.iter().map(move |layer| (step, layer)));
        let weights = each.map(|(step, layer)| workload.weights(layer, step)).collect();
        Ok(Self { args, workload, trace, weights, sequence, store })
    }

    fn run(mut self, limited: Option<(&DeviceSet, DeviceLimits)>) -> Result<()> {
        let [baseline, methods @ ..] = &self.args.methods[..] else { return Ok(()) };
        let adapters = self.args.methods.iter().map(|spec| self.selector(spec)).collect::<Result<Vec<_>>>()?;
        let (id, _) = self.attach(&adapters[0])?;
        for (spec, selector) in methods.iter().zip(&adapters[1..]) {
            eprintln!("kvbench: {spec} on {} tokens of {}", self.workload.tokens, self.workload.name);
            if let Some((devices, _)) = limited {
                devices.limit(0, &DeviceLimits::NONE)?;
            }
            self.method((baseline, id), (spec, selector), limited)?;
        }
        let Self { sequence, store, .. } = self;
        drop(sequence);
        Ok(store.close()?)
    }

    /// Returns the selector of a method, with an adapter that is fitted to the layers.
    fn selector(&self, spec: &MethodSpec) -> Result<Arc<dyn Selector>> {
        let adapter = match (spec.adapter_fit(), spec.adapter_name()) {
            ((AdapterFit::Codes, Some(bits)), Some(name)) => Some(Arc::new(self.workload.codes(&name, bits)?)),
            ((AdapterFit::None, _), _) => None,
            _ => anyhow::bail!("--methods {spec}: its adapter is not fitted here; give methods of codes or clusters"),
        };
        Ok(spec.selector(adapter)?)
    }

    /// Attaches a method, with the recorded queries if it needs them. Returns the seconds that this takes.
    fn attach(&mut self, selector: &Arc<dyn Selector>) -> Result<(SelectorId, f64)> {
        let start = Instant::now();
        let id = self.sequence.attach(Arc::clone(selector))?;
        let DecodeWorkload { kv_heads, dim, layers, .. } = self.workload;
        let group_tokens = usize::from(self.args.group);
        let shape = KeyShape { kv_heads: *kv_heads, key_dim: *dim, group_tokens, dtype: DType::F16 };
        let summaries = selector.summaries();
        let takes = |kind: &Arc<dyn SummarySpec>| Ok(kind.layer(0, shape)?.profile_bytes(1).is_some());
        let needs = summaries.iter().map(takes).collect::<Result<Vec<bool>>>()?.contains(&true);
        for (at, layer) in layers.iter().enumerate().filter(|_| needs) {
            let DecodeLayer { profile, .. } = layer;
            let queries: Vec<&[f32]> = profile.iter().map(Vec::as_slice).collect();
            self.sequence.profile(id, at, &queries, None)?;
        }
        Ok((id, start.elapsed().as_secs_f64()))
    }

    /// Measures one method beside the baseline, from groups and from pages.
    fn method(
        &mut self,
        (baseline, baseline_id): (&MethodSpec, SelectorId),
        (spec, selector): (&MethodSpec, &Arc<dyn Selector>),
        limited: Option<(&DeviceSet, DeviceLimits)>,
    ) -> Result<()> {
        let budgets = &self.args.budgets;
        let (id, attach_s) = self.attach(selector)?;
        let select = |sequence: &Sequence, (spec, id): (&MethodSpec, SelectorId)| -> Result<Vec<DecodeSide>> {
            let form = spec.aggregation().unwrap_or(HeadAggregation::Softmax);
            let options = |budget: Budget| SelectOptions::new(budget).aggregation(form);
            budgets.iter().map(|own| DecodeSide::select(sequence, self.workload, id, options(own.budget))).collect()
        };
        let first = select(&self.sequence, (baseline, baseline_id))?;
        let from_groups = select(&self.sequence, (spec, id))?;
        let stored = self.sequence.store_clusters(id)?;
        let from_pages = select(&self.sequence, (spec, id))?;
        self.sequence.detach(id)?;
        let (id, reattach_s) = self.attach(selector)?;
        self.sequence.detach(id)?;
        let times = [attach_s, reattach_s];
        let result = StoreClustersResult::new(spec.to_string(), &stored, times, self.workload, self.trace);
        print(self.args.common.json, &format!("store clusters {spec}"), &result)?;
        if let Some((devices, limits)) = limited {
            devices.limit(0, &limits)?;
        }
        if !self.args.common.json {
            println!("{}", ClusterDecodeResult::header());
        }
        for (nth, sides) in first.into_iter().zip(from_groups).zip(from_pages).enumerate() {
            let ((first, groups), pages) = sides;
            self.compare((baseline, spec), nth, [first, groups, pages])?;
        }
        Ok(())
    }

    /// Reads and attends to the steps of all sides, and prints a result for each.
    fn compare(
        &self,
        (baseline, spec): (&MethodSpec, &MethodSpec),
        budget: usize,
        mut sides: [DecodeSide; 3],
    ) -> Result<()> {
        let mut out = vec![0.0; self.workload.query_heads * self.workload.dim];
        for round in 0..self.args.common.rounds as usize {
            for turn in 0..sides.len() {
                let side = (turn + round) % sides.len();
                for step in 0..self.workload.layers[0].steps.len() {
                    check_interrupt()?;
                    sides[side].step(&self.store, self.workload, step, &mut out)?;
                }
            }
        }
        let figures = sides.each_ref().map(|side| side.figures(self.workload, &self.weights));
        let names = [(baseline, "groups"), (spec, "groups"), (spec, "pages")];
        for ((method, place), own) in names.into_iter().zip(figures) {
            let named = (method.to_string(), place, &self.args.budgets[budget].text[..]);
            let result = ClusterDecodeResult::new(named, own, &figures[0], self.trace);
            match self.args.common.json {
                true => print(true, "", &result)?,
                false => println!("{}", result.line()),
            }
        }
        Ok(())
    }
}
