//! Selection as part of a decode step: a selector scores every token of the context from summaries in memory, in the time that
//! the step has for it.
//!
//! Keys of the trace are random, so that what a selector would choose from them says nothing: it costs what it costs, and what
//! is read follows the trace. Summaries are those of a sequence of `--context` tokens and a few layers, scored in turn for all
//! sequences and layers of the step: more than a core's caches hold between two uses where the method's summaries are large.

use crate::cli::DecodeArgs;
use crate::select::methods;
use crate::work::{HEAD_DIM, KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout, open_store, work_directory};
use anyhow::{Result, anyhow};
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::retrieval::{HeadAggregation, SelectorId};
use stratakv::{Budget, ByteSize, CreateOptions, SelectOptions, Sequence, Store};
use tempfile::TempDir;

/// Layers whose summaries are there.
const LAYERS: u16 = 4;
/// Query heads of LLaMA-3-8B.
const QUERY_HEADS: usize = 32;
/// Tokens of one append.
const CHUNK: usize = 1024;

/// A selector with summaries of a whole context.
pub(crate) struct Scorer {
    sequence: Sequence,
    selector: SelectorId,
    options: SelectOptions,
    query: Vec<f32>,
    batch: usize,
    // Behind what lies in them.
    store: Store,
    _directory: TempDir,
}

/// The method's name and its form: `tck:32:raw`.
pub(crate) fn form(method: &str) -> (&str, HeadAggregation) {
    match method.rsplit_once(':') {
        Some((name, "raw")) => (name, HeadAggregation::Sum),
        Some((name, "group")) => (name, HeadAggregation::GroupSoftmax),
        Some((name, "softmax")) => (name, HeadAggregation::Softmax),
        _ => (method, HeadAggregation::Softmax),
    }
}

impl Scorer {
    /// None for the method `none`.
    pub(crate) fn new(args: &DecodeArgs, method: &str, context: u32) -> Result<Option<Self>> {
        if method == "none" {
            return Ok(None);
        }
        let (name, form) = form(method);
        let tokens = (context / u32::from(args.group)).max(1) as usize * usize::from(args.group);
        let bytes = tokens as u64 * TOKEN_LAYER_BYTES * u64::from(LAYERS);
        let directory = work_directory(&args.common.device, bytes + bytes / 8 + (256 << 20))?;
        // No method holds more than all keys, which are half of the bytes, and grows in steps; scores are per token and head.
        let memory = (256 << 20) + bytes + tokens as u64 * QUERY_HEADS as u64 * 4;
        let store = open_store(&args.common, &directory.path().join("store"), ByteSize(memory))?;
        let mut sequence = store.create_sequence(&layout(LAYERS, args.group)?, CreateOptions::new())?;
        let selector = sequence.attach(methods::selector(name, LAYERS)?)?;
        eprintln!("kvbench: {method}: summaries of {tokens} tokens, {LAYERS} layers");
        let mut source = KvSource::new(CHUNK);
        for layer in 0..usize::from(LAYERS) {
            for start in (0..tokens).step_by(CHUNK) {
                check_interrupt()?;
                let (keys, values) = source.pair(CHUNK.min(tokens - start));
                sequence.append(layer, keys, values)?;
            }
        }
        let options = SelectOptions::new(Budget::tokens(args.budget as usize)).aggregation(form);
        let mut random = fastrand::Rng::with_seed(31);
        let query = (0..QUERY_HEADS * HEAD_DIM).map(|_| random.f32() - 0.5).collect();
        let batch = args.batch as usize;
        Ok(Some(Self { sequence, selector, options, query, batch, store, _directory: directory }))
    }

    /// Scores what one layer of every sequence holds and chooses from it. How long it took, all threads together.
    pub(crate) fn score(&self, layer: usize, threads: usize) -> Result<Duration> {
        let share = |thread: usize| -> Result<Duration> {
            let start = Instant::now();
            for member in (thread..self.batch).step_by(threads) {
                let at = (layer * self.batch + member) % usize::from(LAYERS);
                black_box(self.sequence.select_with(self.selector, at, &self.query, self.options)?);
            }
            Ok(start.elapsed())
        };
        std::thread::scope(|scope| {
            let share = &share;
            let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || share(thread))).collect();
            let own = share(0)?;
            let joined =
                others.into_iter().map(|other| other.join().map_err(|_| anyhow!("a thread of selection ended")));
            let mut sum = own;
            for took in joined {
                sum += took??;
            }
            Ok(sum)
        })
    }

    /// Bytes of summaries that as many layers and sequences would hold.
    pub(crate) fn summary_bytes(&self, layers: u16) -> Result<u64> {
        let bytes = self.sequence.selector_bytes(self.selector)?;
        Ok(bytes / u64::from(LAYERS) * u64::from(layers) * self.batch as u64)
    }

    pub(crate) fn close(self) -> Result<()> {
        drop(self.sequence);
        Ok(self.store.close()?)
    }
}
