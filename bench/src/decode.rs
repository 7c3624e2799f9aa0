//! `kvbench decode`: decode steps of LLaMA-3-8B's geometry with synthetic selections, on a device of any speed: what
//! resident blocks and reading ahead are worth.
//!
//! The model is left out: a layer computes by taking the time it is told to. Selections follow a trace in which a step keeps
//! a given share of the step before, as KVSwap measured it (75 to 81 %); keys and values are random, written once, and read,
//! checked and attended to as ever. Every sequence of the batch has its own bytes on the device, up to `--stored`; a context
//! beyond that selects from the part that is stored. With `--select` scoring the whole context is part of the step: with the
//! pipeline on a thread of its own, from the moment on when the layer before has its input, as KVSwap's prediction allows.

use crate::cli::{CodecShare, DecodeArgs, DecodeCodec, DecodePolicy, Switch};
use crate::decode_select::Scorer;
use crate::decode_theta::{Probe, Theta, decode_bps};
use crate::decode_trace::Trace;
use crate::devices::{self, Devices, Spec};
use crate::report::{median, print, ratio, rounded};
use crate::work::{HEAD_DIM, KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout_under, open_store_with, settle};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stratakv::pipeline::{Pipeline, PipelineReport};
use stratakv::{
    AttendOptions, Budget, ByteSize, CacheOptions, CachePolicy, CreateOptions, Durability, KvLayout, PlaneCodec,
    Selection, Sequence, Store, StoreOptions,
};

const QUERY_HEADS: usize = 32;
/// Steps before the ones that count: the caches fill.
const WARM_STEPS: u32 = 3;
/// Steps that count where theta is solved for.
const PROBE_STEPS: u32 = 8;
/// Memory beside the cache: reads of two layers, tails, frames on their way.
const WORKING_BYTES: u64 = 160 << 20;
/// Between two looks at whether selection has ended.
const POLL: Duration = Duration::from_micros(200);
/// Tokens of one append while the store is filled.
const CHUNK: usize = 512;

/// One combination of settings. `step_ms` is a median; everything else sums or means over the measured steps.
#[derive(Debug, Serialize)]
struct DecodeResult {
    tokens_per_s: f64,
    step_ms: f64,
    /// Time that reads spent at the device, per step; reads that overlap count each.
    io_ms: f64,
    /// Of it, the time that nobody waited.
    io_hidden_share: f64,
    hit_rate: f64,
    bytes_read_per_step: u64,
    resident_bytes_peak: u64,
    /// Computing, most of it emulated.
    compute_ms: f64,
    /// Appends, per step, beside `compute_ms`: work of this machine's cores.
    append_ms: f64,
    /// Attention and checking what was read, waits left out. It counts in `compute_ms`, of which it takes its time.
    attend_ms: f64,
    /// The method that scores the context in every step.
    select: String,
    /// Its work, all threads together.
    select_ms: f64,
    /// Of it, what nothing else was done in: the rest is hidden behind the computation.
    select_waited_ms: f64,
    /// What its summaries take for all sequences and layers, beside `resident_bytes_peak`.
    summary_bytes: u64,
    context: u32,
    stored_tokens: u32,
    batch: u32,
    layers: u16,
    group: u16,
    budget: u32,
    overlap: f64,
    policy: String,
    codec: String,
    codec_share: f64,
    /// Layers that the share became.
    codec_layers: usize,
    /// Where the share was solved for.
    #[serde(flatten)]
    theta: Option<Theta>,
    pipeline: bool,
    layer_compute_us: u64,
    cache_mib: u64,
    read_bps: Option<u64>,
    /// Of what was selected, what the predictions had selected too; 0 without pipeline.
    recall: f64,
    /// Of what was read ahead, what nobody needed.
    wasted_share: f64,
    /// Step time of the first combination of the same context and compute time, over this one's.
    speedup: Option<f64>,
}

pub(crate) fn run(args: &DecodeArgs) -> Result<()> {
    if args.budget < u32::from(args.group) {
        bail!("--budget {} is less than one group of {}", args.budget, args.group);
    }
    if args.codec_share == CodecShare::Auto {
        if args.codec == DecodeCodec::Raw {
            bail!("--codec-share auto needs a codec to share: --codec int8 or --codec int4");
        }
        if args.pipeline.contains(&Switch::Off) {
            bail!("--codec-share auto weighs reads that hide behind computing, and --pipeline off hides none");
        }
    }
    for &context in &args.context {
        let stored = stored_tokens(args, context);
        let bytes = u64::from(args.batch) * u64::from(stored) * TOKEN_LAYER_BYTES * u64::from(args.layers);
        // Frames carry headers, and every run appends a little.
        let needed = bytes + bytes / 32 + (512 << 20);
        let Some(read_bps) = args.read_bps else {
            let dir = crate::work::work_directory(&args.common.device, needed)?;
            measure(args, context, stored, dir.path(), None)?;
            continue;
        };
        if let Some(why) = devices::missing().or_else(devices::throttle_missing) {
            return devices::skipped(args.common.json, &why);
        }
        let spec = Spec { count: 1, bytes: needed + needed / 20, read_bps: None, write_bps: None, slow: None };
        let throttled = Devices::up(&args.common.device, &spec)?;
        let path = throttled.list[0].path.clone();
        let outcome = measure(args, context, stored, &path, Some((&throttled, read_bps.0)));
        let down = throttled.down();
        outcome.and(down)?;
    }
    Ok(())
}

/// Whole groups, the same for each sequence of the batch, within `--stored` in all.
fn stored_tokens(args: &DecodeArgs, context: u32) -> u32 {
    let token = TOKEN_LAYER_BYTES * u64::from(args.layers) * u64::from(args.batch);
    let room = u32::try_from(args.stored.0 / token).unwrap_or(u32::MAX);
    let group = u32::from(args.group);
    (context.min(room) / group).max(1) * group
}

fn measure(args: &DecodeArgs, context: u32, stored: u32, dir: &Path, throttle: Option<(&Devices, u64)>) -> Result<()> {
    let mut kept = Kept { args, stored, dir, layout: None };
    let share = match args.codec_share {
        CodecShare::Given(share) => share,
        CodecShare::Auto => 0.0,
    };
    let mut layout = layout_of(args, share)?;
    kept.write(&layout)?;
    if let Some((devices, bps)) = throttle {
        devices.limit(0, Some(bps), None)?;
    }
    let probed = match args.codec_share {
        CodecShare::Given(_) => Vec::new(),
        CodecShare::Auto => probe(&mut kept, context)?,
    };
    for method in &args.select {
        let scorer = Scorer::new(args, method, context)?;
        for &compute_us in &args.layer_compute_us {
            let mut first = None;
            for (at, policy) in args.policy.iter().enumerate() {
                let theta = probed.get(at).map(|probe| probe.solve(args.layers, compute_us));
                let codec_share = theta.as_ref().map_or(share, |theta| theta.theta);
                if theta.is_some() {
                    layout = layout_of(args, codec_share)?;
                    kept.write(&layout)?;
                }
                for pipeline in &args.pipeline {
                    check_interrupt()?;
                    let (policy, pipeline) = (*policy, *pipeline == Switch::On);
                    let (scorer, layout, steps) = (scorer.as_ref(), &layout, args.steps);
                    let case = Case { args, context, stored, layout, steps, compute_us, policy, pipeline, scorer };
                    let mut result = case.run(&kept.home()).with_context(|| format!("{policy:?}, {compute_us} us"))?;
                    result.select.clone_from(method);
                    result.read_bps = throttle.map(|(_, bps)| bps);
                    (result.codec_share, result.theta) = (rounded(codec_share), theta.clone());
                    result.speedup = first.and_then(|first| ratio(first, result.step_ms));
                    first.get_or_insert(result.step_ms);
                    let with = if case.pipeline { "with" } else { "without" };
                    let name = format!("decode {context} tokens, {policy:?}, {with} pipeline, {compute_us} us a layer");
                    print(args.common.json, &format!("{name}, selection {method}"), &result)?;
                }
            }
        }
        scorer.map_or(Ok(()), Scorer::close)?;
    }
    Ok(())
}

/// What steps bring from the device when nothing is computed, under no codec and under the codec, by policy.
fn probe(kept: &mut Kept, context: u32) -> Result<Vec<Probe>> {
    let args = kept.args;
    let decode_bps = decode_bps(args.codec, args.group)?;
    let mut reads = |codec_share: f64| -> Result<Vec<(f64, f64)>> {
        let layout = layout_of(args, codec_share)?;
        kept.write(&layout)?;
        let read = |&policy: &DecodePolicy| {
            eprintln!("kvbench: reading for theta, {policy:?}, {codec_share} of the layers under the codec");
            let (compute_us, steps, pipeline, scorer, stored) = (0, PROBE_STEPS, true, None, kept.stored);
            let case = Case { args, context, stored, layout: &layout, steps, compute_us, policy, pipeline, scorer };
            let result = case.run(&kept.home())?;
            let layers = f64::from(args.layers);
            Ok((result.bytes_read_per_step as f64 / layers, result.io_ms / 1e3 / layers))
        };
        args.policy.iter().map(read).collect()
    };
    let (raw, coded) = (reads(0.0)?, reads(1.0)?);
    let both = raw.into_iter().zip(coded);
    Ok(both.map(|((layer_bytes, raw_s), (_, coded_s))| Probe { layer_bytes, raw_s, coded_s, decode_bps }).collect())
}

/// The store that is there.
struct Kept<'a> {
    args: &'a DecodeArgs,
    stored: u32,
    dir: &'a Path,
    layout: Option<KvLayout>,
}

impl Kept<'_> {
    fn home(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Writes the store under a layout, in place of one under another.
    fn write(&mut self, layout: &KvLayout) -> Result<()> {
        if self.layout.as_ref() == Some(layout) {
            return Ok(());
        }
        let home = self.home();
        if self.layout.take().is_some() {
            std::fs::remove_dir_all(&home).with_context(|| format!("remove {}", home.display()))?;
            settle(self.dir)?;
        }
        fill(self.args, self.stored, &home, layout)?;
        settle(self.dir)?;
        self.layout = Some(layout.clone());
        Ok(())
    }
}

fn key(member: u32) -> String {
    format!("decode-{member}")
}

fn layout_of(args: &DecodeArgs, codec_share: f64) -> Result<KvLayout> {
    layout_under(args.layers, args.group, (args.codec.into(), codec_share))
}

fn fill(args: &DecodeArgs, stored: u32, home: &Path, layout: &KvLayout) -> Result<()> {
    let options = StoreOptions::default().memory_limit(ByteSize(WORKING_BYTES * 2));
    let store = open_store_with(&args.common, None, home, options)?;
    eprintln!("kvbench: {}: {} sequences of {stored} tokens, {} layers", home.display(), args.batch, args.layers);
    let mut source = KvSource::new(CHUNK);
    for member in 0..args.batch {
        let mut sequence = store.create_sequence(layout, CreateOptions::new().key(key(member)))?;
        for start in (0..stored as usize).step_by(CHUNK) {
            check_interrupt()?;
            let count = CHUNK.min(stored as usize - start);
            for layer in 0..usize::from(args.layers) {
                let (keys, values) = source.pair(count);
                sequence.append(layer, keys, values)?;
            }
        }
        sequence.commit(Durability::Sync)?;
    }
    Ok(store.close()?)
}

struct Case<'a> {
    args: &'a DecodeArgs,
    context: u32,
    stored: u32,
    layout: &'a KvLayout,
    /// Steps that count.
    steps: u32,
    compute_us: u64,
    policy: DecodePolicy,
    pipeline: bool,
    scorer: Option<&'a Scorer>,
}

/// Where the time of the steps went.
#[derive(Default)]
struct Spent {
    append: Duration,
    attend: Duration,
    select: Duration,
    /// Of it, with the step's own thread waiting.
    select_waited: Duration,
}

impl Case<'_> {
    fn groups_selected(&self) -> usize {
        (self.args.budget / u32::from(self.args.group)) as usize
    }

    fn cache_mib(&self) -> u64 {
        if self.policy == DecodePolicy::None {
            return 0;
        }
        self.args.cache_mib.0.unwrap_or_else(|| {
            // What a step selects, what the next one brings anew, and a little.
            let block = self.block_bytes() + 1024;
            let blocks = self.groups_selected() as u64 * u64::from(self.args.layers) * u64::from(self.args.batch);
            (blocks * block * 5 / 4).div_ceil(2 << 20) * 2
        })
    }

    /// Bytes of a block as it is stored, a mean over the layers.
    fn block_bytes(&self) -> u64 {
        let token = self.layout.stored_token_bytes() / f64::from(self.args.layers);
        (f64::from(self.args.group) * token) as u64
    }

    fn cache(&self) -> Option<CacheOptions> {
        let policy = match self.policy {
            DecodePolicy::None => return None,
            DecodePolicy::Fifo => CachePolicy::Fifo,
            DecodePolicy::Lru => CachePolicy::Lru,
            DecodePolicy::Swarm => CachePolicy::CostEffective { base_us: 80, mib_per_s: 1000 },
            DecodePolicy::S3Fifo => CachePolicy::S3Fifo,
        };
        Some(CacheOptions::new(ByteSize::mib(self.cache_mib())).policy(policy))
    }

    fn run(&self, home: &Path) -> Result<DecodeResult> {
        let options = StoreOptions { cache: self.cache(), ..StoreOptions::default() };
        let options = options.memory_limit(ByteSize(WORKING_BYTES + (self.cache_mib() << 20)));
        let store = open_store_with(&self.args.common, None, home, options)?;
        let mut sequences: Vec<Sequence> =
            (0..self.args.batch).map(|member| store.open_sequence(&key(member))).collect::<Result<_, _>>()?;
        let groups = self.stored / u32::from(self.args.group);
        let mut random = fastrand::Rng::with_seed(self.args.seed);
        let mut trace = || Trace::new(&mut random, u64::from(groups), self.groups_selected(), self.args.overlap);
        let count = usize::from(self.args.layers);
        let mut traces: Vec<Vec<Trace>> = (0..count).map(|_| sequences.iter().map(|_| trace()).collect()).collect();
        let mut pipeline = Pipeline::new(&store, Budget::All);
        let mut source = KvSource::new(1);
        let (mut step_ms, mut spent, mut before) = (Vec::new(), Spent::default(), Counts::of(&store));
        for step in 0..WARM_STEPS + self.steps {
            check_interrupt()?;
            if step == WARM_STEPS {
                pipeline.take_report();
                (spent, before) = (Spent::default(), Counts::of(&store));
            }
            traces.iter_mut().flatten().for_each(Trace::advance);
            let start = Instant::now();
            self.step(&mut pipeline, &mut sequences, &mut traces, &mut source, &mut spent)?;
            if step >= WARM_STEPS {
                step_ms.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        let report = pipeline.take_report();
        let after = Counts::of(&store);
        let peak = store.status().memory.peak_bytes as u64;
        drop((pipeline, sequences));
        store.close()?;
        Ok(self.result(&step_ms, &report, &spent, &before, &after, peak))
    }

    fn step(
        &self,
        pipeline: &mut Pipeline,
        sequences: &mut [Sequence],
        traces: &mut [Vec<Trace>],
        source: &mut KvSource,
        spent: &mut Spent,
    ) -> Result<()> {
        let queries = vec![vec![0.01_f32; QUERY_HEADS * HEAD_DIM]; sequences.len()];
        let inputs: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        let mut outs = queries.clone();
        let layers = traces.len();
        for layer in 0..layers {
            let due = Instant::now();
            // Norm, projections, RoPE: a quarter of the layer.
            let projected = due + Duration::from_nanos(self.compute_us * 250);
            for sequence in sequences.iter_mut() {
                let (keys, values) = source.pair(1);
                sequence.append(layer, keys, values)?;
            }
            spent.append += due.elapsed();
            let sequences = &*sequences;
            let views = |groups: &dyn Fn(usize) -> Vec<u64>, layer: usize| -> Result<Vec<Selection>> {
                let each = sequences.iter().enumerate();
                Ok(each.map(|(at, s)| s.select_groups(layer, &groups(at))).collect::<Result<_, _>>()?)
            };
            let next = (self.pipeline && layer + 1 < layers).then_some(layer + 1);
            std::thread::scope(|scope| -> Result<()> {
                // The next layer's query follows from this layer's input, which is there.
                let scorer = self.scorer;
                let mut ahead = scorer.zip(next).map(|(scorer, next)| scope.spawn(move || scorer.score(next, 1)));
                if let Some(scorer) = scorer.filter(|_| !self.pipeline || layer == 0) {
                    // Without a prediction the query is known when it is projected.
                    sleep_until(projected);
                    let took = scorer.score(layer, usize::from(self.args.select_threads))?;
                    (spent.select, spent.select_waited) = (spent.select + took, spent.select_waited + took);
                }
                let now = views(&|at| traces[layer][at].selected(), layer)?;
                // What was predicted is attended to where predictions are right by definition (KVSwap): it is known by now.
                let known = self.pipeline && layer > 0 && self.args.recall >= 1.0;
                if !known {
                    sleep_until(projected);
                }
                pipeline.read(layer, &now)?;
                let mut predict = |pipeline: &mut Pipeline, spent: &mut Spent, ahead: Option<_>| -> Result<()> {
                    let Some(next) = next else { return Ok(()) };
                    let start = Instant::now();
                    if let Some(took) = ahead.and_then(|ahead: std::thread::ScopedJoinHandle<'_, _>| ahead.join().ok())
                    {
                        spent.select += took?;
                        spent.select_waited += start.elapsed();
                    }
                    let predicted: Vec<Vec<u64>> =
                        traces[next].iter_mut().map(|t| t.predicted(self.args.recall)).collect();
                    Ok(pipeline.predict(next, &views(&|at| predicted[at].clone(), next)?)?)
                };
                // What is known is read as early as can be; what is not must not hold up this layer.
                let mut late = true;
                while late {
                    late = ahead.as_ref().is_some_and(|ahead| !ahead.is_finished());
                    if !late {
                        predict(pipeline, spent, ahead.take())?;
                    } else if Instant::now() < projected {
                        sleep_until(projected.min(Instant::now() + POLL));
                    } else {
                        break;
                    }
                }
                sleep_until(projected);
                let (start, waited) = (Instant::now(), pipeline.report().waited);
                let mut slices: Vec<&mut [f32]> = outs.iter_mut().map(Vec::as_mut_slice).collect();
                pipeline.attend(layer, &inputs, &AttendOptions::default(), &mut slices)?;
                let attended = start.elapsed().saturating_sub(pipeline.report().waited - waited);
                spent.attend += attended;
                // Output projection and feed-forward network; attention, which this machine's core has just done, is part of
                // what the layer computes.
                let rest = Duration::from_nanos(self.compute_us * 750).saturating_sub(attended);
                let finished = Instant::now() + rest;
                if late {
                    predict(pipeline, spent, ahead)?;
                }
                sleep_until(finished);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn result(
        &self,
        step_ms: &[f64],
        report: &PipelineReport,
        spent: &Spent,
        before: &Counts,
        after: &Counts,
        peak: u64,
    ) -> DecodeResult {
        let args = self.args;
        let steps = f64::from(self.steps);
        let per_step = |time: Duration| rounded(time.as_secs_f64() * 1e3 / steps);
        let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
        let step = median(step_ms);
        DecodeResult {
            tokens_per_s: rounded(f64::from(args.batch) / step * 1e3),
            step_ms: rounded(step),
            io_ms: per_step(report.device_time),
            io_hidden_share: rounded(report.hidden_share()),
            hit_rate: ratio(hits as f64, (hits + misses) as f64).unwrap_or(0.0),
            bytes_read_per_step: (after.read_bytes - before.read_bytes) / u64::from(self.steps),
            resident_bytes_peak: peak,
            compute_ms: rounded(self.compute_us as f64 * f64::from(args.layers) / 1e3),
            append_ms: per_step(spent.append),
            attend_ms: per_step(spent.attend),
            select: String::new(),
            select_ms: per_step(spent.select),
            select_waited_ms: per_step(spent.select_waited),
            summary_bytes: self.scorer.map_or(Ok(0), |scorer| scorer.summary_bytes(args.layers)).unwrap_or(0),
            context: self.context,
            stored_tokens: self.stored,
            batch: args.batch,
            layers: args.layers,
            group: args.group,
            budget: args.budget,
            overlap: args.overlap,
            policy: format!("{:?}", self.policy).to_lowercase(),
            codec: format!("{:?}", args.codec).to_lowercase(),
            codec_share: 0.0,
            codec_layers: coded_layers(self.layout),
            theta: None,
            pipeline: self.pipeline,
            layer_compute_us: self.compute_us,
            cache_mib: self.cache_mib(),
            read_bps: None,
            recall: rounded(report.recall()),
            wasted_share: rounded(report.wasted_share()),
            speedup: None,
        }
    }
}

fn coded_layers(layout: &KvLayout) -> usize {
    (0..layout.layers()).filter(|at| layout.codecs(*at).is_ok_and(|codecs| codecs != [PlaneCodec::Raw; 2])).count()
}

/// Counters of the store at one moment.
struct Counts {
    hits: u64,
    misses: u64,
    read_bytes: u64,
}

impl Counts {
    fn of(store: &Store) -> Self {
        let status = store.status();
        let cache = status.cache.unwrap_or_default();
        let read_bytes = status.devices.iter().map(|device| device.counters.read_bytes).sum();
        Self { hits: cache.hits, misses: cache.misses, read_bytes }
    }
}

/// Computes elsewhere, as a GPU would: this thread sleeps, and is on time.
pub(crate) fn sleep_until(due: Instant) {
    const EARLY: Duration = Duration::from_micros(150);
    let left = due.saturating_duration_since(Instant::now());
    if left > EARLY {
        std::thread::sleep(left - EARLY);
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}
