//! `kvbench cluster decode` measures the reads of decode steps by methods of clusters, from groups and from pages.
//!
//! 1. Write a sequence for each group size, of planted topics or of the keys of a file of `kvrun profile` (`workload`).
//! 2. For each method: attach it and select for every step and budget. If it has clusters, store them and select again.
//!    Each of these is a side (`side`). Selections keep the pages of sets that later ones replace.
//! 3. For each device profile, budget and batch, and in each round, every side reads and attends to all steps. The
//!    steps of one side follow each other, because a limited device counts the requests of the steps before.
//! 4. With several lengths, do so for each of them. Then compare the times of each side with a line (`lengths`).
//!
//! The steps have no pipeline and no cache, and reads are direct, so every step waits for a cold read. Requests and
//! bytes depend on the arguments alone, unless `--gap-limit auto` makes them follow the engine's estimate.

mod args;
mod lengths;
mod result;
mod side;
mod workload;

pub(crate) use args::ClusterDecodeArgs;
pub(super) use workload::DecodeWorkload;

use crate::devices::{DeviceLimits, DeviceSet, on_devices};
use crate::support::directory::{make_private, work_directory};
use crate::support::interrupt::check_interrupt;
use crate::support::report::print;
use crate::support::store::{device_sum, open_store_with};
use anyhow::{Context, Result, ensure};
use args::{DecodeMethod, DecodePlace, DeviceCondition};
use lengths::LengthTimes;
use result::{ClusterDecodeResult, DecodeTrace, StoreClustersResult};
use side::{DecodeSide, SideBatch, SideReads, TurnTimes};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stratakv::retrieval::{AdapterFit, HeadAggregation, KeyShape, MethodSpec, Selector, SelectorId, SummarySpec};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, KvLayout, SelectOptions, Sequence, Store, StoreOptions, TensorView,
};
use workload::DecodeLayer;

/// Tokens of one append.
const CHUNK: usize = 512;
/// The steps that a turn under a limit begins with, in milliseconds: more than the slice that the kernel grants ahead.
const WARM_MS: u64 = 120;
/// A step of more milliseconds waited for the next slice. Without that, steps read at the speed of the host.
const STALL_MS: u64 = 10;
/// The least milliseconds of a turn under a limit.
const LIMITED_TURN_MS: u64 = 250;

/// Runs `kvbench cluster decode`.
pub(super) fn run(args: &ClusterDecodeArgs) -> Result<()> {
    let baseline = args.methods.first().context("--methods: at least the baseline is needed")?;
    let (name, has_clusters) = (&baseline.spec, baseline.has_clusters());
    ensure!(!has_clusters, "--methods {name}: the first method is the baseline, which reads groups; give tck:64");
    if args.lengths.is_empty() {
        return measure(args, args.entries, &mut LengthTimes::default());
    }
    let mut times = LengthTimes::default();
    args.lengths.iter().try_for_each(|entries| measure(args, *entries, &mut times))?;
    times.print(args.common.json)
}

/// Measures one length, and adds its times to `times`.
fn measure(args: &ClusterDecodeArgs, entries: u32, times: &mut LengthTimes) -> Result<()> {
    let workload = DecodeWorkload::with_entries(args, entries)?;
    let bytes = (workload.tokens * workload.layers.len() * workload.kv_heads * workload.dim * 4) as u64;
    // A token of few bytes takes a page of its own in groups of one token.
    let layers = workload.layers.len() as u64;
    let group_bytes = |group: &u16| bytes.max(workload.tokens as u64 / u64::from(*group) * layers * 4096) * 2;
    let sets = args.methods.iter().filter(|own| own.has_clusters()).count() as u64;
    let each = args.groups().iter().map(group_bytes).sum::<u64>() + bytes * 4 * sets;
    let needed = each * args.largest_batch() as u64 + (1 << 30);
    let conditions = args.conditions();
    let mut measure = |directories: &[PathBuf], devices: Option<&DeviceSet>| {
        let trace = DecodeTrace::new(&workload, directories.len());
        DecodeContest::new(args, &workload, &trace, directories)?.run(&conditions, devices, times)
    };
    if !args.directories.is_empty() {
        let each = needed / args.directories.len() as u64 + (512 << 20);
        let made = args.directories.iter().map(|own| work_directory(own, each)).collect::<Result<Vec<_>>>()?;
        let paths: Vec<PathBuf> = made.iter().map(|own| own.path().to_owned()).collect();
        return measure(&paths, None);
    }
    if args.profiles.is_empty() && args.count == 1 && conditions.iter().all(|own| own.limits == DeviceLimits::NONE) {
        let made = work_directory(&args.common.device, needed)?;
        return measure(&[made.path().to_owned()], None);
    }
    let each = (args.count, needed / u64::from(args.count) + (512 << 20));
    let limits = conditions.first().map_or(DeviceLimits::NONE, |own| own.limits);
    on_devices(&args.common.device, each, &limits, args.common.json, &mut |devices| {
        let paths: Vec<PathBuf> = devices.list.iter().map(|own| own.path.clone()).collect();
        measure(&paths, Some(devices))
    })
}

/// A store with the sequences of a batch per group size, and the sides to compare.
struct DecodeContest<'a> {
    args: &'a ClusterDecodeArgs,
    workload: &'a DecodeWorkload,
    trace: &'a DecodeTrace,
    /// The attention weights of each selection, step after step and layer after layer.
    weights: Vec<Vec<f32>>,
    /// By the tokens of a group.
    sequences: BTreeMap<u16, Vec<Sequence>>,
    store: Store,
}

impl<'a> DecodeContest<'a> {
    fn new(
        args: &'a ClusterDecodeArgs,
        workload: &'a DecodeWorkload,
        trace: &'a DecodeTrace,
        directories: &[PathBuf],
    ) -> Result<Self> {
        let store = open(args, directories)?;
        let group = |group: u16| {
            let own = (0..args.largest_batch()).map(|_| sequence(&store, workload, group));
            Ok((group, own.collect::<Result<Vec<_>>>()?))
        };
        let sequences = args.groups().into_iter().map(group).collect::<Result<_>>()?;
        let steps = 0..workload.layers[0].steps.len();
        let each = steps.flat_map(|step| workload.layers.iter().map(move |layer| (step, layer)));
        let weights = each.map(|(step, layer)| workload.weights(layer, step, workload.tokens)).collect();
        Ok(Self { args, workload, trace, weights, sequences, store })
    }

    fn run(
        mut self,
        conditions: &[DeviceCondition],
        devices: Option<&DeviceSet>,
        times: &mut LengthTimes,
    ) -> Result<()> {
        let mut sides = Vec::new();
        for method in &self.args.methods {
            eprintln!("kvbench: {} on {} tokens of {}", method.spec, self.workload.tokens, self.workload.name);
            self.method(method, &mut sides)?;
        }
        if !self.args.common.json {
            println!("{}", ClusterDecodeResult::header());
        }
        for condition in conditions {
            for index in 0..devices.map_or(0, |devices| devices.list.len()) {
                devices.map_or(Ok(()), |devices| devices.limit(index, &condition.limits))?;
            }
            for budget in 0..self.args.budgets.len() {
                let own: Vec<&DecodeSide> = sides.iter().filter(|side| side.budget == budget).collect();
                for batch in &self.args.batch {
                    self.compare(&own, condition, *batch as usize, times)?;
                }
            }
        }
        for index in 0..devices.map_or(0, |devices| devices.list.len()) {
            devices.map_or(Ok(()), |devices| devices.limit(index, &DeviceLimits::NONE))?;
        }
        let rebuilt = device_sum(&self.store, |device| device.counters.rebuilt_pages);
        ensure!(rebuilt == 0, "{rebuilt} pages failed and were read from groups, so the figures are wrong");
        let Self { sequences, store, .. } = self;
        drop((sides, sequences));
        Ok(store.close()?)
    }

    /// Appends the sides of one method: from groups, and from pages if it has clusters.
    fn method(&mut self, method: &DecodeMethod, sides: &mut Vec<DecodeSide>) -> Result<()> {
        let selector = self.selector(&method.spec)?;
        let first = sides.len();
        for member in 0..self.args.largest_batch() {
            let own = self.member(method, &selector, member)?;
            if member == 0 {
                sides.extend(own);
            } else {
                sides[first..].iter_mut().zip(own).for_each(|(side, own)| side.join(own));
            }
        }
        Ok(())
    }

    /// Returns the sides of one method in one sequence of the batch.
    fn member(
        &mut self,
        method: &DecodeMethod,
        selector: &Arc<dyn Selector>,
        member: usize,
    ) -> Result<Vec<DecodeSide>> {
        let (args, workload, group) = (self.args, self.workload, self.args.group_of(method));
        let sequences = self.sequences.get_mut(&group);
        let sequence = sequences.and_then(|own| own.get_mut(member)).context("a sequence for each group size")?;
        let form = method.spec.aggregation().unwrap_or(HeadAggregation::Softmax);
        let mut sides = Vec::new();
        let mut select = |sequence: &Sequence, id: SelectorId, place: DecodePlace| {
            for (nth, own) in args.budgets.iter().enumerate() {
                let named = (method.spec.to_string(), group, place);
                let options = SelectOptions::new(own.budget).aggregation(form);
                sides.push(DecodeSide::select((sequence, member), workload, named, (id, nth, options))?);
            }
            anyhow::Ok(())
        };
        let (id, attach_s) = attach(sequence, workload, group, selector)?;
        if !method.has_clusters() || args.places.contains(&DecodePlace::Groups) {
            sequence.drop_stored_clusters()?;
            select(sequence, id, DecodePlace::Groups)?;
        }
        let stores = method.has_clusters() && args.places.contains(&DecodePlace::Pages);
        let stored = if stores { Some(sequence.store_clusters(id)?) } else { None };
        if stores {
            select(sequence, id, DecodePlace::Pages)?;
        }
        sequence.detach(id)?;
        if let Some(stored) = stored.filter(|_| member == 0) {
            let (id, reattach_s) = attach(sequence, workload, group, selector)?;
            sequence.detach(id)?;
            let times = [attach_s, reattach_s];
            let result = StoreClustersResult::new(method.spec.to_string(), &stored, times, workload, self.trace);
            print(args.common.json, &format!("store clusters {}", method.spec), &result)?;
        }
        Ok(sides)
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

    /// Reads and attends to the steps of all sides in each round, and prints a result for each side.
    fn compare(
        &self,
        sides: &[&DecodeSide],
        condition: &DeviceCondition,
        batch: usize,
        lengths: &mut LengthTimes,
    ) -> Result<()> {
        let is_limited = condition.limits != DeviceLimits::NONE || !self.args.directories.is_empty();
        let least = self.args.turn_ms.map_or(if is_limited { LIMITED_TURN_MS } else { 0 }, u64::from);
        let [warm, stall] = if is_limited { [WARM_MS, STALL_MS] } else { [0, 0] };
        let [warm, least, stall] = [warm, least, stall].map(Duration::from_millis);
        let times = TurnTimes { warm, least, stall };
        let of = SideBatch { store: &self.store, workload: self.workload, batch };
        let mut out = vec![0.0; self.workload.query_heads * self.workload.dim];
        let mut reads: Vec<SideReads> = sides.iter().map(|_| SideReads::default()).collect();
        for round in 0..self.args.common.rounds as usize {
            for turn in 0..sides.len() {
                let side = (turn + round) % sides.len();
                sides[side].turn(of, times, &mut out, &mut reads[side])?;
            }
        }
        let figures = |(side, reads): (&&DecodeSide, &SideReads)| side.figures(of, &self.weights, reads);
        let figures: Vec<_> = sides.iter().zip(&reads).map(figures).collect();
        for (side, own) in sides.iter().zip(&figures) {
            let named = (*side, &self.args.budgets[side.budget].text[..], batch);
            let result = ClusterDecodeResult::new(named, (*own, &figures[0]), condition, self.trace);
            match self.args.common.json {
                true => print(true, "", &result)?,
                false => println!("{}", result.line()),
            }
            lengths.add(&result, self.workload.tokens, own.step_us);
        }
        Ok(())
    }
}

/// Opens the store, with a directory on each device.
fn open(args: &ClusterDecodeArgs, directories: &[PathBuf]) -> Result<Store> {
    let options = StoreOptions::default().memory_limit(ByteSize::mib(4096)).gap_limit(args.gap_limit.0);
    let [first, others @ ..] = directories else { anyhow::bail!("no directory for the store") };
    let own = |directory: &Path| directory.join("store");
    let options = others.iter().try_fold(options, |options, directory| {
        make_private(&own(directory))?;
        anyhow::Ok(options.device(own(directory)))
    })?;
    open_store_with(&args.common, None, &own(first), options)
}

/// Writes the layers as a sequence in groups of `group` tokens.
fn sequence(store: &Store, workload: &DecodeWorkload, group: u16) -> Result<Sequence> {
    let (heads, dim) = (workload.kv_heads as u16, workload.dim as u16);
    let builder = KvLayout::builder().layers(workload.layers.len() as u16).kv_heads(heads).head_dim(dim);
    let layout = builder.group_tokens(group).dtype(DType::F16).build()?;
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
    Ok(sequence)
}

/// Attaches a method, with the recorded queries if it needs them. Returns the seconds that this takes.
fn attach(
    sequence: &mut Sequence,
    workload: &DecodeWorkload,
    group: u16,
    selector: &Arc<dyn Selector>,
) -> Result<(SelectorId, f64)> {
    let start = Instant::now();
    let id = sequence.attach(Arc::clone(selector))?;
    let DecodeWorkload { kv_heads, dim, layers, .. } = workload;
    let shape = KeyShape { kv_heads: *kv_heads, key_dim: *dim, group_tokens: usize::from(group), dtype: DType::F16 };
    let summaries = selector.summaries();
    let takes = |kind: &Arc<dyn SummarySpec>| Ok(kind.layer(0, shape)?.profile_bytes(1).is_some());
    let needs = summaries.iter().map(takes).collect::<Result<Vec<bool>>>()?.contains(&true);
    for (at, layer) in layers.iter().enumerate().filter(|_| needs) {
        let DecodeLayer { profile, .. } = layer;
        let queries: Vec<&[f32]> = profile.iter().map(Vec::as_slice).collect();
        sequence.profile(id, at, &queries, None)?;
    }
    Ok((id, start.elapsed().as_secs_f64()))
}
