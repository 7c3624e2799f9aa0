//! `kvbench cluster attach` measures attaching a method to a sequence that was closed, with and without its state.
//!
//! 1. Append and commit all tokens. Codes of members are stored with them.
//! 2. Attach the method, which clusters the keys. Methods that need recorded queries get them.
//! 3. Store the clusters with the state of the method, and close the store.
//! 4. Open the store and attach the method, which takes the state. Each step must choose the same entries as before.
//!
//! Step 4 is repeated. Times are medians over the restarts.

use super::args::count;
use super::decode::{ClusterDecodeArgs, DecodeWorkload};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, print, ratio, rounded};
use crate::support::store::open_store_with;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stratakv::retrieval::{Adapter, AdapterFit, HeadAggregation, MethodSpec, SelectorId};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectOptions, SelectRequest,
    Sequence, Store, StoreOptions, TensorView,
};

/// Tokens of one append, at most.
const CHUNK: usize = 512;
/// The key of the sequence.
const KEY: &str = "attach";

/// Arguments of `kvbench cluster attach`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster attach --device /nvme0 --entries 32768 --layers 1 --json
          kvbench cluster attach --device /nvme0 --methods dynakv:16,swarm:8:members --restarts 9

`keys_ms` is the attachment that clusters keys, with the recorded queries of methods that take them. `state_ms` is the
one that takes the state. `state_kv` is the bytes of the state over those of keys and values. Of --methods, those
without clusters are left out, and of --budgets, the first one counts.")]
pub(crate) struct ClusterAttachArgs {
    #[command(flatten)]
    decode: ClusterDecodeArgs,
    /// Attachments after a restart.
    #[arg(long, default_value_t = 5, value_parser = count())]
    restarts: u32,
}

/// The attachments of one method.
#[derive(Debug, Serialize)]
struct AttachResult {
    method: String,
    trace: String,
    tokens: usize,
    layers: usize,
    /// Layers that took a state after the last restart.
    restored_layers: u64,
    state_bytes: u64,
    state_kv: Option<f64>,
    keys_ms: f64,
    state_ms: f64,
    /// The time of opening the sequence, without the attachment.
    open_ms: f64,
}

/// Runs `kvbench cluster attach`.
pub(super) fn run(args: &ClusterAttachArgs) -> Result<()> {
    StoredRun::each(&args.decode, |run| {
        let title = format!("{}, attached", run.spec);
        print(args.decode.common.json, &title, &AttachRun { run, restarts: args.restarts }.result()?)
    })
}

/// The entries of each KV head that each step chooses, layer by layer.
type Choices = Vec<Vec<u64>>;

/// The run of one method on sequences of the workload.
pub(super) struct StoredRun<'a> {
    pub(super) args: &'a ClusterDecodeArgs,
    pub(super) workload: &'a DecodeWorkload,
    pub(super) spec: &'a MethodSpec,
    pub(super) directory: &'a Path,
}

/// The run of one method with restarts.
struct AttachRun<'a> {
    run: &'a StoredRun<'a>,
    restarts: u32,
}

impl AttachRun<'_> {
    fn result(&self) -> Result<AttachResult> {
        let Self { run, restarts } = self;
        let DecodeWorkload { kv_heads, dim, layers, tokens, name, .. } = run.workload;
        let adapter = run.adapter()?;
        let store = run.open()?;
        run.create(&store, KEY, adapter.as_ref(), *tokens)?;
        let mut sequence = store.open_sequence(KEY, OpenSequence::new())?;
        let started = Instant::now();
        let id = run.attach(&mut sequence, adapter.as_ref())?;
        let keys_ms = started.elapsed().as_secs_f64() * 1e3;
        let stored = sequence.store_clusters(id)?;
        let expected = run.choices(&sequence, id)?;
        drop(sequence);
        store.close()?;
        let (mut state_ms, mut open_ms, mut restored_layers) = (Vec::new(), Vec::new(), 0);
        for _ in 0..*restarts {
            check_interrupt()?;
            let store = run.open()?;
            let started = Instant::now();
            let mut sequence = store.open_sequence(KEY, OpenSequence::new())?;
            open_ms.push(started.elapsed().as_secs_f64() * 1e3);
            let started = Instant::now();
            let id = run.attach_stored(&mut sequence, adapter.as_ref())?;
            state_ms.push(started.elapsed().as_secs_f64() * 1e3);
            restored_layers = store.health().restored_layers;
            if restored_layers > 0 {
                let found = run.choices(&sequence, id)?;
                ensure!(found == expected, "{}: the state chooses other entries than before", run.spec);
            }
            drop(sequence);
            store.close()?;
        }
        // Keys and values in f16.
        let kv = (kv_heads * dim * 4 * layers.len() * tokens) as f64;
        Ok(AttachResult {
            method: run.spec.to_string(),
            trace: name.clone(),
            tokens: *tokens,
            layers: layers.len(),
            restored_layers,
            state_bytes: stored.state_bytes,
            state_kv: ratio(stored.state_bytes as f64, kv),
            keys_ms: rounded(keys_ms),
            state_ms: rounded(median(&state_ms)),
            open_ms: rounded(median(&open_ms)),
        })
    }
}

impl StoredRun<'_> {
    /// Calls `measure` for each method with clusters, with a new directory on the device.
    pub(super) fn each(args: &ClusterDecodeArgs, mut measure: impl FnMut(&StoredRun<'_>) -> Result<()>) -> Result<()> {
        let workload = DecodeWorkload::new(args)?;
        for method in args.methods.iter().filter(|method| method.has_clusters()) {
            eprintln!("kvbench: {}: {} tokens of {}", method.spec, workload.tokens, workload.name);
            let directory = tempfile::tempdir_in(&args.common.device)
                .with_context(|| format!("--device {}", args.common.device.display()))?;
            measure(&StoredRun { args, workload: &workload, spec: &method.spec, directory: directory.path() })?;
        }
        Ok(())
    }

    pub(super) fn open(&self) -> Result<Store> {
        self.open_with(StoreOptions::default())
    }

    pub(super) fn open_with(&self, options: StoreOptions) -> Result<Store> {
        let options = options.memory_limit(ByteSize::mib(4096));
        open_store_with(&self.args.common, None, &self.directory.join("store"), options)
    }

    /// Returns the adapter of a method that scores members.
    pub(super) fn adapter(&self) -> Result<Option<Arc<Adapter>>> {
        match (self.spec.adapter_fit(), self.spec.adapter_name()) {
            ((AdapterFit::Codes, Some(bits)), Some(name)) => Ok(Some(Arc::new(self.workload.codes(&name, bits)?))),
            ((AdapterFit::None, _), _) => Ok(None),
            _ => anyhow::bail!("--methods {}: its adapter is not fitted here", self.spec),
        }
    }

    /// Creates a sequence with the first `tokens` tokens, and commits it. Codes of members are stored with the groups.
    pub(super) fn create(&self, store: &Store, key: &str, adapter: Option<&Arc<Adapter>>, tokens: usize) -> Result<()> {
        let DecodeWorkload { kv_heads, dim, layers, .. } = self.workload;
        let builder = KvLayout::builder().layers(layers.len() as u16).kv_heads(*kv_heads as u16);
        let layout = builder.head_dim(*dim as u16).group_tokens(self.args.group).dtype(DType::F16).build()?;
        let mut sequence = store.create_sequence(&layout, CreateOptions::new().key(key))?;
        if let (Some(adapter), (_, Some(bits))) = (adapter, self.spec.adapter_fit()) {
            let codes: MethodSpec = format!("tck:{bits}").parse()?;
            sequence.attach_stored(codes.selector(Some(Arc::clone(adapter)))?)?;
        }
        for first in (0..tokens).step_by(CHUNK) {
            self.append(&mut sequence, first, CHUNK.min(tokens - first))?;
        }
        Ok(sequence.commit(Durability::Sync)?)
    }

    /// Appends `count` tokens of the workload to all layers.
    pub(super) fn append(&self, sequence: &mut Sequence, first: usize, count: usize) -> Result<()> {
        let DecodeWorkload { kv_heads, dim, layers, .. } = self.workload;
        let row = kv_heads * dim;
        for (at, layer) in layers.iter().enumerate() {
            check_interrupt()?;
            let rows = &layer.keys[first * row..(first + count) * row];
            let view = TensorView::token_major(rows, count, *kv_heads, *dim);
            sequence.append(at, view, view)?;
        }
        Ok(())
    }

    /// Attaches the method, which builds its clusters. It gets the recorded queries if it takes them.
    pub(super) fn attach(&self, sequence: &mut Sequence, adapter: Option<&Arc<Adapter>>) -> Result<SelectorId> {
        let id = self.attach_stored(sequence, adapter)?;
        self.profile(sequence, id)?;
        Ok(id)
    }

    /// Attaches the method, which takes its stored state if there is one.
    fn attach_stored(&self, sequence: &mut Sequence, adapter: Option<&Arc<Adapter>>) -> Result<SelectorId> {
        Ok(sequence.attach(self.spec.selector(adapter.map(Arc::clone))?)?)
    }

    /// Gives the method the recorded queries, if it takes them.
    fn profile(&self, sequence: &mut Sequence, id: SelectorId) -> Result<()> {
        for (at, layer) in self.workload.layers.iter().enumerate() {
            let queries: Vec<&[f32]> = layer.profile.iter().map(Vec::as_slice).collect();
            match sequence.profile(id, at, &queries, None) {
                // The method takes no queries.
                Err(e) if e.kind() == ErrorKind::InvalidArgument => return Ok(()),
                profiled => profiled?,
            }
        }
        Ok(())
    }

    fn choices(&self, sequence: &Sequence, id: SelectorId) -> Result<Choices> {
        let form = self.spec.aggregation().unwrap_or(HeadAggregation::Softmax);
        let budget = self.args.budgets.first().context("--budgets: one is needed")?.budget;
        let options = SelectOptions::new(budget).aggregation(form);
        let mut choices = Choices::new();
        for (at, layer) in self.workload.layers.iter().enumerate() {
            for query in &layer.steps {
                let request = SelectRequest::query(query).options(options).selector(id);
                let selection = sequence.select(at, request)?;
                choices.extend((0..self.workload.kv_heads).map(|head| selection.entries(head).collect()));
            }
        }
        Ok(choices)
    }
}
