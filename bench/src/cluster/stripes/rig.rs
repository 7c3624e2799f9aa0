//! [`StripeRig`]: a store on several devices with one sequence, whose clusters are stored in one way after the other.

use crate::cluster::stripes::args::StripeArgs;
use crate::cluster::stripes::result::{ComparedSide, StripeFigures};
use crate::cluster::stripes::selector::PlannedSelector;
use crate::devices::{DeviceLimits, DeviceSet, DeviceSpec, limits_unavailable, unavailable};
use crate::support::directory::{make_private, settle, work_directory};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{print, print_skipped};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use stratakv::options::{BalancePolicy, ClusterStripe, StoreClusterOptions};
use stratakv::retrieval::{HeadAggregation, SelectorId};
use stratakv::store::DeviceStatus;
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, KvLayout, OpenSequence, SelectOptions, SelectRequest, Sequence,
    Store, StoreOptions, TensorView,
};

/// The key of the sequence.
const KEY: &str = "stripes";
/// Tokens of a group.
const GROUP: usize = 8;
/// Tokens of one append.
const CHUNK: usize = 512;

/// What a side stores and chooses, and by which policy it reads.
pub(super) struct StripeSide<'a> {
    pub(super) name: String,
    pub(super) stripe: ClusterStripe,
    pub(super) policy: BalancePolicy,
    pub(super) clusters: &'a [Vec<u32>],
    /// The entries of each step.
    pub(super) steps: &'a [Vec<u32>],
}

/// A store on several devices.
pub(super) struct StripeRig<'a> {
    args: &'a StripeArgs,
    limits: DeviceLimits,
    limited: Option<&'a DeviceSet>,
    paths: Vec<PathBuf>,
}

/// Calls `body` with a rig for each number of devices. Prints why if such devices cannot be made here.
///
/// # Errors
/// There is not enough space, a step fails, or the errors of `body`.
pub(super) fn on_devices(
    args: &StripeArgs,
    tokens: usize,
    body: &mut dyn FnMut(&StripeRig<'_>) -> Result<()>,
) -> Result<()> {
    let limits = args.limits.limits();
    let most = args.devices.iter().copied().max().unwrap_or(1);
    let entry = u64::from(args.kv_heads) * u64::from(args.head_dim) * 4;
    // Groups, and two sets of clusters of which one is being replaced, with free segments.
    let needed = tokens as u64 * entry.max(4096) * 5 + (160 << 20);
    if limits == DeviceLimits::NONE {
        let directory = work_directory(&args.common.device, needed)?;
        let paths: Vec<PathBuf> = (0..most).map(|nth| directory.path().join(format!("device-{nth}"))).collect();
        paths.iter().try_for_each(|path| make_private(path))?;
        return each(args, (limits, None), &paths, tokens, body);
    }
    if let Some(why) = unavailable().or_else(limits_unavailable) {
        return print_skipped(args.common.json, &why);
    }
    let least = u64::from(args.devices.iter().copied().min().unwrap_or(1));
    // A file system of whole mebibytes.
    let bytes = (needed / least + (96 << 20)).next_multiple_of(1 << 20);
    let mut set =
        DeviceSet::up(&args.common.device, &DeviceSpec { count: most, bytes, limits: DeviceLimits::NONE, slow: None })?;
    set.measure_host(bytes, &limits)?;
    let paths: Vec<PathBuf> = set.list.iter().map(|device| device.path.clone()).collect();
    let outcome = each(args, (limits, Some(&set)), &paths, tokens, body);
    let down = set.down();
    outcome.and(down)
}

fn each(
    args: &StripeArgs,
    (limits, limited): (DeviceLimits, Option<&DeviceSet>),
    devices: &[PathBuf],
    tokens: usize,
    body: &mut dyn FnMut(&StripeRig<'_>) -> Result<()>,
) -> Result<()> {
    for count in &args.devices {
        let paths: Vec<PathBuf> =
            devices.iter().take(*count as usize).map(|path| path.join(format!("store-{count}"))).collect();
        paths.iter().try_for_each(|path| make_private(path))?;
        let rig = StripeRig { args, limits, limited, paths };
        rig.fill(tokens)?;
        let outcome = body(&rig);
        for path in &rig.paths {
            std::fs::remove_dir_all(path).with_context(|| format!("remove {}", path.display()))?;
        }
        outcome?;
    }
    Ok(())
}

/// Measures the sides in order and prints each beside the first one.
///
/// # Errors
/// As [`StripeRig::measure`].
pub(super) fn compare(rig: &StripeRig<'_>, sides: &[StripeSide<'_>], json: bool) -> Result<()> {
    let Some(one) = sides.first() else { return Ok(()) };
    let first = rig.measure(one)?;
    for (nth, side) in sides.iter().enumerate() {
        let other = if nth == 0 { None } else { Some(rig.measure(side)?) };
        let own = other.as_ref().unwrap_or(&first);
        let title = format!("{} on {} devices", side.name, rig.paths.len());
        print(json, &title, &ComparedSide::new(&side.name, own, (&one.name, &first)))?;
    }
    Ok(())
}

impl StripeRig<'_> {
    fn limit(&self, limits: &DeviceLimits) -> Result<()> {
        let Some(set) = self.limited else { return Ok(()) };
        (0..self.paths.len()).try_for_each(|index| set.limit(index, limits))
    }

    fn open(&self, policy: BalancePolicy) -> Result<Store> {
        let options = StoreOptions::default().memory_limit(ByteSize::mib(1024)).gap_limit(ByteSize(0));
        let options = options.balance(policy).hedge_percentile(None).segment_bytes(ByteSize::mib(16));
        let options = options.driver(self.args.common.driver.into());
        Ok(self.paths.iter().fold(options, |options, path| options.device(path)).open()?)
    }

    /// Writes `tokens` tokens and a tail.
    fn fill(&self, tokens: usize) -> Result<()> {
        let (heads, dim) = (usize::from(self.args.kv_heads), usize::from(self.args.head_dim));
        let builder = KvLayout::builder().layers(1).kv_heads(self.args.kv_heads).head_dim(self.args.head_dim);
        let layout = builder.group_tokens(GROUP as u16).dtype(DType::F16).build()?;
        let store = self.open(BalancePolicy::EarliestFinish)?;
        let mut sequence = store.create_sequence(&layout, CreateOptions::new().key(KEY))?;
        let mut random = fastrand::Rng::with_seed(self.args.planted.seed);
        // A tail, so that no group is attended because it is the newest.
        let all = tokens.next_multiple_of(GROUP) + 1;
        for first in (0..all).step_by(CHUNK) {
            check_interrupt()?;
            let count = CHUNK.min(all - first);
            let rows: Vec<f32> = (0..count * heads * dim).map(|_| random.f32() - 0.5).collect();
            let view = TensorView::token_major(&rows, count, heads, dim);
            sequence.append(0, view, view)?;
        }
        sequence.commit(Durability::Sync)?;
        drop(sequence);
        store.close()?;
        self.paths.iter().try_for_each(|path| settle(path))
    }

    /// Stores the clusters of a side, and reads its steps.
    ///
    /// # Errors
    /// A step fails, or a selection does not read pages alone.
    pub(super) fn measure(&self, side: &StripeSide<'_>) -> Result<StripeFigures> {
        check_interrupt()?;
        self.limit(&DeviceLimits::NONE)?;
        let store = self.open(side.policy)?;
        let mut sequence = store.open_sequence(KEY, OpenSequence::new())?;
        let selector = Arc::new(PlannedSelector::new(side.name.clone(), side.clusters));
        let id = sequence.attach(Arc::clone(&selector) as _)?;
        sequence.store_clusters_with(id, StoreClusterOptions::new().stripe(side.stripe))?;
        self.paths.iter().try_for_each(|path| settle(path))?;
        self.limit(&self.limits)?;
        let figures = self.read(&store, &sequence, (&selector, id), side);
        self.limit(&DeviceLimits::NONE)?;
        drop(sequence);
        store.close()?;
        figures
    }

    fn read(
        &self,
        store: &Store,
        sequence: &Sequence,
        (selector, id): (&PlannedSelector, SelectorId),
        side: &StripeSide<'_>,
    ) -> Result<StripeFigures> {
        let heads = usize::from(self.args.kv_heads) * usize::from(self.args.head_dim);
        let query = vec![0.5; heads];
        let mut figures = StripeFigures::new(self.limits, self.paths.len());
        for round in 0..self.args.common.rounds {
            for entries in side.steps {
                check_interrupt()?;
                selector.choose_next(entries);
                let budget = Budget::tokens(entries.len() + 2 * GROUP);
                let options = SelectOptions::new(budget).aggregation(HeadAggregation::Sum);
                let start = Instant::now();
                let selection = sequence.select(0, SelectRequest::query(&query).options(options).selector(id))?;
                let select_us = start.elapsed().as_secs_f64() * 1e6;
                anyhow::ensure!(selection.stored_pages() > 0, "{}: a selection reads no page", side.name);
                let before = counters(store);
                let start = Instant::now();
                let ticket = store.read(&[&selection]).submit()?;
                let batch = ticket.wait()?;
                let io_us = start.elapsed().as_secs_f64() * 1e6;
                batch.get(0)?;
                let after = counters(store);
                let each: Vec<[u64; 3]> = before.iter().zip(&after).map(since).collect();
                figures.add((round as usize, entries.len()), (select_us, io_us), &each);
            }
        }
        Ok(figures)
    }
}

/// Returns the requests, the bytes and the batches of demand reads of each device so far.
fn counters(store: &Store) -> Vec<[u64; 3]> {
    let of = |device: &DeviceStatus| {
        let own = &device.counters;
        [own.reads, own.read_bytes, own.demand_batches]
    };
    store.status().devices.iter().map(of).collect()
}

fn since((before, after): (&[u64; 3], &[u64; 3])) -> [u64; 3] {
    std::array::from_fn(|at| after[at] - before[at])
}
