//! `kvbench cluster idle` measures decode steps whose clusters are split in the idle time between them.
//!
//! 1. Create a sequence without the tokens of the steps, build the clusters, and store them with their state.
//! 2. For each number of splits and in each round: attach the method to a fork, which takes the state.
//! 3. In each step, select, read and attend in all layers: the *demand*. Then append the next token to all layers, and
//!    split up to this number of clusters.
//!
//! Invariant: all rounds have the same figures but for times.

use super::attach::StoredRun;
use super::decode::{ClusterDecodeArgs, DecodeWorkload};
use crate::support::args::between;
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median_of, percentile, print, ratio, rounded};
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;
use stratakv::retrieval::{Adapter, HeadAggregation, HeadSharing, SelectorId};
use stratakv::{OpenSequence, SelectOptions, SelectRequest, Selection, Sequence, Store, StoreOptions, attend};

/// The key of the sequence that is forked.
const KEY: &str = "idle";
/// Kept weight is computed in each of these steps.
const WEIGHED_STEPS: usize = 16;

/// Arguments of `kvbench cluster idle`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster idle --device /nvme0 --methods dynakv:16:members --json
          kvbench cluster idle --device /nvme0 --methods dynakv:8 --idle-splits 0,1,4 --steps 1024 --budgets 1/13

Each step appends one token, so the last --steps tokens are appended. `loose` is the mean number of entries that wait
for a split when a step selects, per list of clusters. `demand_p50_us` and `demand_p99_us` are the time of selecting,
reading and attending, `append_*` of appending a token, and `idle_us` the mean time of the splits of a step. The time
of a step is its median over the rounds. Times, requests and bytes are per layer. `ratio_*` compare with the first of
--idle-splits. `weight_kept` is the share of full attention that selections keep, in every 16th step. Of --methods,
those without clusters are left out, and of --budgets, the first one counts.")]
pub(crate) struct ClusterIdleArgs {
    #[command(flatten)]
    decode: ClusterDecodeArgs,
    /// Most clusters to split after each step, separated by commas. The first number is the baseline.
    #[arg(long, value_delimiter = ',', default_value = "0,1", value_parser = between(0, 100_000))]
    idle_splits: Vec<u32>,
    /// Steps from one call to the next.
    #[arg(long, default_value_t = 1, value_parser = between(1, 10_000))]
    idle_every: u32,
}

/// The decode steps with one number of splits.
#[derive(Debug, Serialize)]
struct ClusterIdleResult<'a> {
    method: String,
    trace: &'a str,
    tokens: usize,
    layers: usize,
    steps: usize,
    idle_splits: u32,
    idle_every: u32,
    loose: f64,
    ratio_loose: Option<f64>,
    /// Splits in idle time, of all layers.
    splits: usize,
    /// Clusters of a list, after the last step.
    clusters: f64,
    requests: f64,
    ratio_requests: Option<f64>,
    bytes: f64,
    ratio_bytes: Option<f64>,
    weight_kept: f64,
    demand_p50_us: f64,
    demand_p99_us: f64,
    ratio_demand_p99: Option<f64>,
    append_p50_us: f64,
    append_p99_us: f64,
    append_mean_us: f64,
    idle_us: f64,
}

/// Counts and times of the steps of one side in one round.
#[derive(Clone, Debug, Default)]
struct IdleSteps {
    loose: usize,
    lists: usize,
    splits: usize,
    clusters: usize,
    requests: usize,
    bytes: u64,
    weights: Vec<f64>,
    demand_us: Vec<f64>,
    append_us: Vec<f64>,
    idle_us: Vec<f64>,
}

/// Runs `kvbench cluster idle`.
pub(super) fn run(args: &ClusterIdleArgs) -> Result<()> {
    StoredRun::each(&args.decode, |run| IdleRun { run, args }.measure())
}

struct IdleRun<'a> {
    run: &'a StoredRun<'a>,
    args: &'a ClusterIdleArgs,
}

impl IdleRun<'_> {
    fn measure(&self) -> Result<()> {
        let workload = self.run.workload;
        let steps = workload.layers[0].steps.len();
        let group = usize::from(self.args.decode.group);
        let from = workload.tokens.saturating_sub(steps) / group * group;
        ensure!(from > 0, "--steps {steps}: the sequence has {} tokens", workload.tokens);
        let adapter = self.run.adapter()?;
        let gap_limit = self.args.decode.gap_limit.0;
        let store = self.run.open_with(StoreOptions::default().gap_limit(gap_limit))?;
        self.run.create(&store, KEY, adapter.as_ref(), from)?;
        let mut sequence = store.open_sequence(KEY, OpenSequence::new())?;
        let id = self.run.attach(&mut sequence, adapter.as_ref())?;
        sequence.store_clusters(id)?;
        let mut rounds: Vec<Vec<IdleSteps>> = vec![Vec::new(); self.args.idle_splits.len()];
        for round in 0..self.args.decode.common.rounds as usize {
            for turn in 0..rounds.len() {
                let side = (turn + round) % rounds.len();
                let splits = self.args.idle_splits[side];
                let found = self.steps((&store, &mut sequence), adapter.as_ref(), splits as usize, round == 0)?;
                rounds[side].push(found);
            }
        }
        let base = IdleFigures::of(&rounds[0]);
        for (splits, rounds) in self.args.idle_splits.iter().zip(&rounds) {
            let result = self.result(*splits, rounds, &base);
            print(self.args.decode.common.json, &format!("{}, {splits} splits per step", self.run.spec), &result)?;
        }
        drop(sequence);
        Ok(store.close()?)
    }

    /// Decodes the steps in a fork.
    fn steps(
        &self,
        (store, sequence): (&Store, &mut Sequence),
        adapter: Option<&Arc<Adapter>>,
        splits: usize,
        weighs: bool,
    ) -> Result<IdleSteps> {
        let workload = self.run.workload;
        let mut fork = sequence.fork()?;
        let before = store.health().restored_layers;
        let id = self.run.attach(&mut fork, adapter)?;
        let restored = store.health().restored_layers - before;
        ensure!(restored == workload.layers.len() as u64, "{}: it has no stored state", self.run.spec);
        let form = self.run.spec.aggregation().unwrap_or(HeadAggregation::Softmax);
        let budget = self.args.decode.budgets.first().context("--budgets: one is needed")?.budget;
        let options = SelectOptions::new(budget).aggregation(form);
        let mut found = IdleSteps::default();
        let mut out = vec![0.0; workload.query_heads * workload.dim];
        for step in 0..workload.layers[0].steps.len() {
            check_interrupt()?;
            let (loose, lists) = self.loose(&fork, id)?;
            found.loose += loose;
            found.lists += lists;
            let begun = Instant::now();
            let mut selections = Vec::with_capacity(workload.layers.len());
            for (at, layer) in workload.layers.iter().enumerate() {
                let query = &layer.steps[step];
                let selection = fork.select(at, SelectRequest::query(query).options(options).selector(id))?;
                let ticket = store.read(&[&selection]).submit()?;
                (found.requests, found.bytes) =
                    (found.requests + ticket.requests(), found.bytes + ticket.device_bytes());
                attend(query, &selection, ticket.wait()?.get(0)?, &mut out)?;
                selections.push(selection);
            }
            found.demand_us.push(begun.elapsed().as_secs_f64() * 1e6);
            if weighs && step % WEIGHED_STEPS == 0 {
                let kept = selections.iter().enumerate().map(|(at, own)| kept_weight(workload, (at, step), own));
                found.weights.extend(kept);
            }
            drop(selections);
            let next = fork.len() as usize;
            if next < workload.tokens {
                let begun = Instant::now();
                self.run.append(&mut fork, next, 1)?;
                found.append_us.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            let begun = Instant::now();
            if splits > 0 && (step + 1).is_multiple_of(self.args.idle_every as usize) {
                found.splits += fork.split_clusters(id, splits)?;
            }
            found.idle_us.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        for at in 0..workload.layers.len() {
            let summaries = fork.selector_summaries(id, at)?;
            found.clusters += summaries.iter().flat_map(|own| own.cluster_lists()).map(|own| own.len()).sum::<usize>();
        }
        Ok(found)
    }

    /// Returns the entries that wait for splits, and the number of lists of clusters.
    fn loose(&self, sequence: &Sequence, id: SelectorId) -> Result<(usize, usize)> {
        let (mut loose, workload) = (0, self.run.workload);
        for at in 0..workload.layers.len() {
            let summaries = sequence.selector_summaries(id, at)?;
            loose += summaries.iter().flat_map(|own| own.buffer_sizes()).sum::<usize>();
        }
        let is_joint = self.run.spec.sharing() == Some(HeadSharing::Joint);
        Ok((loose, workload.layers.len() * if is_joint { 1 } else { workload.kv_heads }))
    }

    fn result(&self, idle_splits: u32, rounds: &[IdleSteps], base: &IdleFigures) -> ClusterIdleResult<'_> {
        let DecodeWorkload { layers, tokens, name, .. } = self.run.workload;
        let (first, own) = (&rounds[0], IdleFigures::of(rounds));
        let steps = first.demand_us.len();
        let (each, per_layer) = ((steps * layers.len()) as f64, |us: f64| rounded(us / layers.len() as f64));
        let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len().max(1) as f64;
        let over = |of: fn(&IdleSteps) -> &[f64], share| per_layer(percentile(&step_times(rounds, of), share));
        let mean_over = |of: fn(&IdleSteps) -> &[f64]| per_layer(mean(&step_times(rounds, of)));
        ClusterIdleResult {
            method: self.run.spec.to_string(),
            trace: name,
            tokens: *tokens,
            layers: layers.len(),
            steps,
            idle_splits,
            idle_every: self.args.idle_every,
            loose: rounded(own.loose),
            ratio_loose: ratio(own.loose, base.loose),
            splits: first.splits,
            clusters: rounded(first.clusters as f64 * steps as f64 / first.lists as f64),
            requests: rounded(first.requests as f64 / each),
            ratio_requests: ratio(own.requests, base.requests),
            bytes: rounded(first.bytes as f64 / each),
            ratio_bytes: ratio(own.bytes, base.bytes),
            weight_kept: rounded(mean(&first.weights)),
            demand_p50_us: over(|own| &own.demand_us, 0.5),
            demand_p99_us: per_layer(own.demand_p99_us),
            ratio_demand_p99: ratio(own.demand_p99_us, base.demand_p99_us),
            append_p50_us: over(|own| &own.append_us, 0.5),
            append_p99_us: over(|own| &own.append_us, 0.99),
            append_mean_us: mean_over(|own| &own.append_us),
            idle_us: mean_over(|own| &own.idle_us),
        }
    }
}

/// The figures by which sides are compared.
struct IdleFigures {
    loose: f64,
    requests: f64,
    bytes: f64,
    demand_p99_us: f64,
}

impl IdleFigures {
    fn of(rounds: &[IdleSteps]) -> Self {
        let first = &rounds[0];
        Self {
            loose: first.loose as f64 / first.lists as f64,
            requests: first.requests as f64,
            bytes: first.bytes as f64,
            demand_p99_us: percentile(&step_times(rounds, |own| &own.demand_us), 0.99),
        }
    }
}

/// Returns the time of each step: its median over the rounds, because a step does the same work in each round.
fn step_times(rounds: &[IdleSteps], of: fn(&IdleSteps) -> &[f64]) -> Vec<f64> {
    let steps = rounds.iter().map(|own| of(own).len()).min().unwrap_or(0);
    (0..steps).map(|step| median_of(rounds, |own| of(own)[step])).collect()
}

/// Returns the share of full attention that a selection of a step keeps, as a mean over query heads.
fn kept_weight(workload: &DecodeWorkload, (layer, step): (usize, usize), selection: &Selection) -> f64 {
    let (ratio, length) = (workload.query_heads / workload.kv_heads, selection.length() as usize);
    let weights = workload.weights(&workload.layers[layer], step, length);
    let of_head = |(head, weights): (usize, &[f32])| -> f64 {
        selection.entries(head / ratio).map(|token| f64::from(weights[token as usize])).sum()
    };
    weights.chunks_exact(length).enumerate().map(of_head).sum::<f64>() / workload.query_heads as f64
}
