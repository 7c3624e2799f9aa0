//! One combination of settings: its store, its cache, its decode steps, and what they measure.
//!
//! A layer of a step:
//! 1. Append one token per sequence.
//! 2. Score the context for the next layer on a thread of its own if the pipeline predicts. Otherwise wait for the
//!    query to be projected and score the context for this layer.
//! 3. Start the reads of this layer's selection.
//! 4. Predict the next layer's selection as soon as its scoring has ended, at the latest after this layer's attention.
//! 5. Attend, and wait for the rest of the computing time.

use crate::decode::args::{Ahead, DecodeArgs, DecodePolicy};
use crate::decode::prepared_store::{WORKING_BYTES, key};
use crate::decode::result::StepFigures;
use crate::decode::scorer::Scorer;
use crate::decode::trace::SelectionTrace;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::sleep_until;
use crate::support::model::{HEAD_DIM, KvSource, QUERY_HEADS};
use crate::support::report::{median, ratio, rounded};
use crate::support::store::{open_store_with, read_bytes};
use anyhow::{Result, anyhow};
use std::path::Path;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use stratakv::options::CacheOptions;
use stratakv::pipeline::{Pipeline, PipelineReport};
use stratakv::{
    AttendOptions, Budget, ByteSize, KvLayout, OpenSequence, SelectRequest, Selection, Sequence, Store, StoreOptions,
};

/// Steps before the measured ones, which fill the caches.
const WARM_STEPS: u32 = 3;
/// The pause between two checks whether scoring has ended.
const POLL: Duration = Duration::from_micros(200);

/// One combination of settings.
pub(crate) struct DecodeCase<'a> {
    pub(crate) args: &'a DecodeArgs,
    /// Tokens of each stored sequence.
    pub(crate) stored: u32,
    pub(crate) layout: &'a KvLayout,
    /// Steps that are measured.
    pub(crate) steps: u32,
    pub(crate) compute_us: u64,
    pub(crate) policy: DecodePolicy,
    pub(crate) ahead: Ahead,
    pub(crate) scorer: Option<&'a Scorer>,
}

/// Figures of the measured steps of a case.
pub(crate) struct CaseFigures {
    pub(crate) steps: StepFigures,
    /// Milliseconds of scoring per step, summed over the threads.
    pub(crate) select_ms: f64,
    /// The part of `select_ms` during which the step waited.
    pub(crate) select_waited_ms: f64,
    pub(crate) recall: f64,
    pub(crate) wasted_share: f64,
}

/// Times of the measured steps.
#[derive(Default)]
struct StepTimes {
    append: Duration,
    attend: Duration,
    select: Duration,
    /// The part of `select` during which the step's own thread waited.
    select_waited: Duration,
}

/// Counters of the store at one moment.
struct StoreCounters {
    hits: u64,
    misses: u64,
    read_bytes: u64,
}

impl StoreCounters {
    fn of(store: &Store) -> Self {
        let cache = store.status().cache.unwrap_or_default();
        Self { hits: cache.hits, misses: cache.misses, read_bytes: read_bytes(store) }
    }
}

/// The batch while it decodes.
struct DecodeState {
    pipeline: Pipeline,
    sequences: Vec<Sequence>,
    /// Traces by layer, then by sequence.
    traces: Vec<Vec<SelectionTrace>>,
    source: KvSource,
    times: StepTimes,
}

impl DecodeCase<'_> {
    fn groups_selected(&self) -> usize {
        (self.args.budget / u32::from(self.args.group)) as usize
    }

    /// Returns the size of the cache in MiB; 0 for no cache.
    pub(crate) fn cache_mib(&self) -> u64 {
        if self.policy.0.is_none() {
            return 0;
        }
        self.args.cache_mib.0.unwrap_or_else(|| {
            // The selection of one step, and a quarter more for the groups that the next step adds. Each block has a
            // KiB to spare.
            let block = self.block_bytes() + 1024;
            let blocks = self.groups_selected() as u64 * u64::from(self.args.layers) * u64::from(self.args.batch);
            (blocks * block * 5 / 4).div_ceil(2 << 20) * 2
        })
    }

    /// Returns the mean bytes of a stored block over the layers.
    fn block_bytes(&self) -> u64 {
        let token = self.layout.stored_token_bytes() / f64::from(self.args.layers);
        (f64::from(self.args.group) * token) as u64
    }

    fn cache(&self) -> Option<CacheOptions> {
        let policy = self.policy.0?;
        Some(CacheOptions::new(ByteSize::mib(self.cache_mib())).policy(policy))
    }

    /// Opens the store, decodes the warm-up steps and the measured ones, and closes it.
    ///
    /// # Errors
    /// The engine fails, or the run was interrupted.
    pub(crate) fn run(&self, path: &Path) -> Result<CaseFigures> {
        let options = StoreOptions::default().cache(self.cache());
        let options = options.memory_limit(ByteSize(WORKING_BYTES + (self.cache_mib() << 20)));
        let store = open_store_with(&self.args.common, None, path, options)?;
        let mut state = self.state(&store)?;
        let (mut step_ms, mut before) = (Vec::new(), StoreCounters::of(&store));
        for step in 0..WARM_STEPS + self.steps {
            check_interrupt()?;
            if step == WARM_STEPS {
                state.pipeline.take_report();
                (state.times, before) = (StepTimes::default(), StoreCounters::of(&store));
            }
            state.traces.iter_mut().flatten().for_each(SelectionTrace::advance);
            let start = Instant::now();
            self.step(&mut state)?;
            if step >= WARM_STEPS {
                step_ms.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        let report = state.pipeline.take_report();
        let after = StoreCounters::of(&store);
        let mut figures = self.figures(&step_ms, &report, &state.times, &before, &after);
        figures.steps.resident_bytes_peak = store.status().memory.peak_bytes as u64;
        drop(state);
        store.close()?;
        Ok(figures)
    }

    fn state(&self, store: &Store) -> Result<DecodeState> {
        let sequences: Vec<Sequence> = (0..self.args.batch)
            .map(|member| store.open_sequence(&key(member), OpenSequence::new()))
            .collect::<Result<_, _>>()?;
        let groups = u64::from(self.stored / u32::from(self.args.group));
        let mut random = fastrand::Rng::with_seed(self.args.seed);
        let mut trace = || SelectionTrace::new(&mut random, groups, self.groups_selected(), self.args.overlap);
        let traces = (0..self.args.layers).map(|_| sequences.iter().map(|_| trace()).collect()).collect();
        Ok(DecodeState {
            pipeline: Pipeline::new(store, Budget::All),
            sequences,
            traces,
            source: KvSource::new(1),
            times: StepTimes::default(),
        })
    }

    fn step(&self, state: &mut DecodeState) -> Result<()> {
        let queries = vec![vec![0.01_f32; QUERY_HEADS * HEAD_DIM]; state.sequences.len()];
        let inputs: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        let mut outputs = queries.clone();
        for layer in 0..state.traces.len() {
            let begun = Instant::now();
            for sequence in &mut state.sequences {
                let (keys, values) = state.source.pair(1);
                sequence.append(layer, keys, values)?;
            }
            state.times.append += begun.elapsed();
            self.layer(state, layer, begun, &inputs, &mut outputs)?;
        }
        Ok(())
    }

    /// Selects, reads and attends in one layer, and starts the reads of the next one.
    fn layer(
        &self,
        state: &mut DecodeState,
        layer: usize,
        begun: Instant,
        inputs: &[&[f32]],
        outputs: &mut [Vec<f32>],
    ) -> Result<()> {
        let DecodeState { pipeline, sequences, traces, times, .. } = state;
        // Norm, projections and RoPE take a quarter of the layer.
        let projected = begun + Duration::from_nanos(self.compute_us * 250);
        let predicts = self.ahead == Ahead::On;
        let next = (predicts && layer + 1 < traces.len()).then_some(layer + 1);
        std::thread::scope(|scope| -> Result<()> {
            // The next layer's query is predicted from this layer's input, which is known already.
            let scoring = self.scorer.zip(next).map(|(scorer, next)| scope.spawn(move || scorer.score(next, 1)));
            if let Some(scorer) = self.scorer.filter(|_| !predicts || layer == 0) {
                // Without a prediction the query is known once it is projected.
                sleep_until(projected);
                let took = scorer.score(layer, usize::from(self.args.select_threads))?;
                (times.select, times.select_waited) = (times.select + took, times.select_waited + took);
            }
            let selected: Vec<Vec<u64>> = traces[layer].iter().map(SelectionTrace::selected).collect();
            let selections = select_groups(sequences, layer, &selected)?;
            // With a recall of 1 the layer attends to the predicted groups (KVSwap), which are known by now.
            let predicted = predicts && layer > 0 && self.args.recall >= 1.0;
            if !predicted {
                sleep_until(projected);
            }
            pipeline.read(layer, &selections)?;
            if let Some(next) = traces.get(layer + 1).filter(|_| self.ahead == Ahead::Last) {
                let last: Vec<Vec<u64>> = next.iter().map(SelectionTrace::last_selected).collect();
                pipeline.predict(layer + 1, &select_groups(sequences, layer + 1, &last)?)?;
            }
            let mut prediction = next.map(|layer| Prediction { layer, scoring });
            // The prediction is submitted early if its scoring has ended, but this layer does not wait for it.
            while prediction.as_ref().is_some_and(|prediction| !prediction.is_scored()) && Instant::now() < projected {
                sleep_until(projected.min(Instant::now() + POLL));
            }
            if let Some(prediction) = prediction.take_if(|prediction| prediction.is_scored()) {
                prediction.submit(pipeline, sequences, &mut traces[layer + 1], self.args.recall, times)?;
            }
            sleep_until(projected);
            let (start, waited) = (Instant::now(), pipeline.report().waited);
            let mut slices: Vec<&mut [f32]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
            pipeline.attend(layer, inputs, &AttendOptions::default(), &mut slices)?;
            let attended = start.elapsed().saturating_sub(pipeline.report().waited - waited);
            times.attend += attended;
            // Attention, output projection and feed-forward network take the other three quarters. Only attention was
            // computed by this machine.
            let rest = Duration::from_nanos(self.compute_us * 750).saturating_sub(attended);
            let finished = Instant::now() + rest;
            if let Some(prediction) = prediction {
                prediction.submit(pipeline, sequences, &mut traces[layer + 1], self.args.recall, times)?;
            }
            sleep_until(finished);
            Ok(())
        })
    }

    fn figures(
        &self,
        step_ms: &[f64],
        report: &PipelineReport,
        times: &StepTimes,
        before: &StoreCounters,
        after: &StoreCounters,
    ) -> CaseFigures {
        let per_step = |time: Duration| rounded(time.as_secs_f64() * 1e3 / f64::from(self.steps));
        let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
        let step = median(step_ms);
        let steps = StepFigures {
            tokens_per_s: rounded(f64::from(self.args.batch) / step * 1e3),
            step_ms: rounded(step),
            io_ms: per_step(report.device_time),
            io_hidden_share: rounded(report.hidden_share()),
            hit_rate: ratio(hits as f64, (hits + misses) as f64).unwrap_or(0.0),
            bytes_read_per_step: (after.read_bytes - before.read_bytes) / u64::from(self.steps),
            resident_bytes_peak: 0,
            compute_ms: rounded(self.compute_us as f64 * f64::from(self.args.layers) / 1e3),
            append_ms: per_step(times.append),
            attend_ms: per_step(times.attend),
        };
        CaseFigures {
            steps,
            select_ms: per_step(times.select),
            select_waited_ms: per_step(times.select_waited),
            recall: rounded(report.recall()),
            wasted_share: rounded(report.wasted_share()),
        }
    }
}

/// A prediction of a layer's selection that the pipeline does not know yet.
struct Prediction<'scope> {
    layer: usize,
    /// The thread that scores the context for it, if a method does.
    scoring: Option<ScopedJoinHandle<'scope, Result<Duration>>>,
}

impl Prediction<'_> {
    fn is_scored(&self) -> bool {
        self.scoring.as_ref().is_none_or(|scoring| scoring.is_finished())
    }

    /// Waits for the scoring and gives the predicted groups to the pipeline, which starts to read them.
    fn submit(
        self,
        pipeline: &mut Pipeline,
        sequences: &[Sequence],
        traces: &mut [SelectionTrace],
        recall: f64,
        times: &mut StepTimes,
    ) -> Result<()> {
        if let Some(scoring) = self.scoring {
            let start = Instant::now();
            times.select += scoring.join().map_err(|_| anyhow!("score: the thread of the selection panicked"))??;
            times.select_waited += start.elapsed();
        }
        let predicted: Vec<Vec<u64>> = traces.iter_mut().map(|trace| trace.predicted(recall)).collect();
        Ok(pipeline.predict(self.layer, &select_groups(sequences, self.layer, &predicted)?)?)
    }
}

/// Selects groups in one layer, for each sequence its own.
fn select_groups(sequences: &[Sequence], layer: usize, groups: &[Vec<u64>]) -> Result<Vec<Selection>> {
    let each = sequences.iter().zip(groups);
    Ok(each.map(|(sequence, own)| sequence.select(layer, SelectRequest::groups(own))).collect::<Result<_, _>>()?)
}
