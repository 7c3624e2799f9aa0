//! Selection as part of a decode step: a selector scores every token of the context from summaries in memory.
//!
//! The keys are random, so only the cost of the selection counts. The trace decides what is read. The summaries belong
//! to one sequence of `--context` tokens and a few layers. They are scored in rotation for all sequences and layers of
//! the step, so that large summaries do not stay in a core's caches between two uses.

use crate::decode::args::DecodeArgs;
use crate::support::directory::work_directory;
use crate::support::method::{self, MethodArg};
use crate::support::model::{KvSource, QUERY_HEADS, TOKEN_LAYER_BYTES, layout, random_query};
use crate::support::store::open_store;
use anyhow::{Result, anyhow, bail};
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::retrieval::{HeadAggregation, SelectorId};
use stratakv::{Budget, ByteSize, CreateOptions, SelectOptions, SelectRequest, Sequence, Store};
use tempfile::TempDir;

/// Layers that have summaries.
const LAYERS: u16 = 4;
/// Tokens of one append.
const CHUNK: usize = 1024;

/// A selector with summaries of a whole context.
pub(crate) struct Scorer {
    sequence: Sequence,
    selector: SelectorId,
    options: SelectOptions,
    query: Vec<f32>,
    batch: usize,
    // Fields drop in this order: the sequence, its store, the store's directory.
    store: Store,
    _directory: TempDir,
}

impl Scorer {
    /// Builds the summaries of `context` tokens. Returns none for the method `none`.
    ///
    /// # Errors
    /// The method is unknown, or the store cannot hold the context.
    pub(crate) fn new(args: &DecodeArgs, method: &str, context: u32) -> Result<Option<Self>> {
        let spec = match MethodArg::parse(method)? {
            MethodArg::None => return Ok(None),
            MethodArg::Records(_) => bail!("--select {method}: the sequence has no records; give `minmax`"),
            MethodArg::Registered(spec) => spec,
        };
        let form = spec.aggregation().unwrap_or(HeadAggregation::Softmax);
        let tokens = (context / u32::from(args.group)).max(1) as usize * usize::from(args.group);
        let bytes = tokens as u64 * TOKEN_LAYER_BYTES * u64::from(LAYERS);
        let directory = work_directory(&args.common.device, bytes + bytes / 8 + (256 << 20))?;
        // A method holds at most all keys, which are half of the bytes, and its memory grows in steps. Scores take four
        // bytes per token and query head.
        let memory = (256 << 20) + bytes + tokens as u64 * QUERY_HEADS as u64 * 4;
        let store = open_store(&args.common, &directory.path().join("store"), ByteSize(memory))?;
        let mut sequence = store.create_sequence(&layout(LAYERS, args.group)?, CreateOptions::new())?;
        let selector = sequence.attach(method::selector(&spec, LAYERS)?)?;
        eprintln!("kvbench: {method}: building summaries of {tokens} tokens in {LAYERS} layers");
        KvSource::new(CHUNK).append_by_layer(&mut sequence, tokens)?;
        let options = SelectOptions::new(Budget::tokens(args.budget as usize)).aggregation(form);
        let query = random_query(&mut fastrand::Rng::with_seed(31));
        let batch = args.batch as usize;
        Ok(Some(Self { sequence, selector, options, query, batch, store, _directory: directory }))
    }

    /// Scores and selects in one layer of every sequence. Returns the time taken, summed over the threads.
    ///
    /// # Errors
    /// A selection fails or its thread panics.
    pub(crate) fn score(&self, layer: usize, threads: usize) -> Result<Duration> {
        let share = |thread: usize| -> Result<Duration> {
            let start = Instant::now();
            for member in (thread..self.batch).step_by(threads) {
                let at = (layer * self.batch + member) % usize::from(LAYERS);
                black_box(
                    self.sequence
                        .select(at, SelectRequest::query(&self.query).options(self.options).selector(self.selector))?,
                );
            }
            Ok(start.elapsed())
        };
        std::thread::scope(|scope| {
            let share = &share;
            let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || share(thread))).collect();
            let mut sum = share(0)?;
            for other in others {
                sum += other.join().map_err(|_| anyhow!("score: a thread of the selection panicked"))??;
            }
            Ok(sum)
        })
    }

    /// Returns the bytes of summaries that `layers` layers of every sequence would hold.
    ///
    /// # Errors
    /// The selector is not attached.
    pub(crate) fn summary_bytes(&self, layers: u16) -> Result<u64> {
        let bytes = self.sequence.selector_bytes(self.selector)?;
        Ok(bytes / u64::from(LAYERS) * u64::from(layers) * self.batch as u64)
    }

    /// Closes the store and removes its directory.
    ///
    /// # Errors
    /// The store cannot be closed.
    pub(crate) fn close(self) -> Result<()> {
        drop(self.sequence);
        Ok(self.store.close()?)
    }
}
