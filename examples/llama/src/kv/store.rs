//! Keys and values in a stratakv store: a step selects groups, reads them from the devices, and attends as they arrive. With
//! [`StoreKv::read_ahead`] what predicted queries of the next layer select is read while this layer computes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use stratakv::pipeline::Pipeline;
use stratakv::retrieval::{Codes, HeadAggregation, ReconstructOptions, Selector, SelectorId, summary_as};
use stratakv::{
    AttendOptions, Budget as EngineBudget, DType, Durability, Error, ErrorKind, KvLayout, LayerSpec, PlaneCodec,
    PlaneSet, SelectOptions, Selection, Sequence, Store, TensorView,
};

use super::probe::Probe;
use super::{Committed, KvCache, KvDType, KvGeometry, KvStats, Predict, check_append, check_attend, check_layer};
use crate::budget::Budget;

/// Which tokens a query sees; every attended token counts in the budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StorePolicy {
    /// All of them.
    Full,
    /// The first `sinks` tokens and the newest ones, in whole groups (StreamingLLM, Xiao et al. 2023).
    Window {
        /// Tokens kept from the beginning.
        sinks: usize,
        /// Attended tokens per step.
        budget: Budget,
    },
    /// The unfinished group (the newest while there is none), then the groups that a selector of the sequence scores highest.
    Selected {
        /// Of this sequence.
        selector: SelectorId,
        /// How heads are added up.
        form: HeadAggregation,
        /// Attended tokens per step.
        budget: Budget,
    },
    /// The unfinished group (the newest while there is none), then the groups with the highest upper bound of their scores (Quest, Tang et al. 2024).
    MinMax {
        /// Attended tokens per step.
        budget: Budget,
    },
}

/// An engine error, followed by its kind and what to do about it.
#[derive(Debug)]
pub struct EngineError(Error);

/// For `map_err`.
#[must_use]
pub fn engine_error(error: Error) -> anyhow::Error {
    EngineError(error).into()
}

impl EngineError {
    /// What to do about an error of this kind.
    fn advice(&self) -> &'static str {
        match self.0.kind() {
            ErrorKind::InvalidArgument => "nothing changed",
            ErrorKind::Configuration => {
                "--device takes directories of your own that nobody else can write to, empty or with all of one store"
            }
            ErrorKind::NotFound => "check the name",
            ErrorKind::AlreadyExists => "choose another name",
            ErrorKind::InUse => "try again when the other one has ended",
            ErrorKind::Unsupported => "use the version that wrote it, or an empty directory",
            ErrorKind::LayoutMismatch => "use the model, --dtype and --group-tokens it was begun with, or another name",
            ErrorKind::Corruption => "kvfsck check tells what is damaged",
            ErrorKind::Io => "check the device",
            ErrorKind::NoSpace => "make room on the device",
            ErrorKind::MemoryLimit => "raise --memory-limit",
            ErrorKind::Busy => "raise --memory-limit, or try again",
            ErrorKind::Poisoned | ErrorKind::Indeterminate => "run it again; it continues from the last durable commit",
            _ => "run it again",
        }
    }
}

impl std::fmt::Display for EngineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({:?}: {})", self.0, self.0.kind(), self.advice())
    }
}

impl std::error::Error for EngineError {
    // Display shows the inner error with its own source already.
}

/// The engine's name of an element type.
pub(super) const fn engine_dtype(dtype: KvDType) -> DType {
    match dtype {
        KvDType::F32 => DType::F32,
        KvDType::F16 => DType::F16,
        KvDType::Bf16 => DType::Bf16,
    }
}

/// The engine's layout of a model's cache.
///
/// # Errors
/// Sizes the engine does not take.
pub fn kv_layout(
    geometry: &KvGeometry,
    group_tokens: usize,
    codec: PlaneCodec,
    fingerprint: [u8; 32],
) -> Result<KvLayout> {
    let mut specs = Vec::with_capacity(geometry.layers.len());
    for layer in &geometry.layers {
        let (heads, dim) = (u16::try_from(layer.kv_heads)?, u16::try_from(layer.head_dim)?);
        specs.push(match layer.window {
            None => LayerSpec::full(heads, dim),
            Some(window) => LayerSpec::sliding(heads, dim, u32::try_from(window)?),
        });
    }
    let dtype = engine_dtype(geometry.dtype);
    let builder = KvLayout::builder().layer_specs(specs).dtype(dtype).group_tokens(u16::try_from(group_tokens)?);
    let builder = if let Some(rope) = geometry.rope { builder.rope(rope) } else { builder };
    builder.codec(codec).fingerprint(fingerprint).build().map_err(engine_error)
}

/// A KV cache that is a sequence of a store.
pub struct StoreKv {
    store: Store,
    sequence: Sequence,
    geometry: KvGeometry,
    policy: StorePolicy,
    durability: Durability,
    options: AttendOptions,
    /// Device completions before this cache read anything.
    read_before: u64,
    /// Bytes that this cache's reads asked for.
    asked: u64,
    attends: u64,
    /// Layers below this attend to everything.
    dense_layers: usize,
    probe: Option<Probe>,
    /// Reads of decode steps, where they begin before they are needed.
    pipeline: Option<Pipeline>,
    /// The layer that was read last through it, and what it attends to.
    prepared: Option<(usize, Selection)>,
    /// Rank of keys that are rebuilt, and the tokens that were there when they were built last.
    rebuilt: Option<(usize, Option<u64>)>,
}

/// Tokens after which a commit builds low-rank keys anew: half of those that stay exact.
const REBUILD_TOKENS: u64 = 512;

impl StoreKv {
    /// A cache over a sequence of `store`, whose layout is [`kv_layout`] of this geometry.
    #[must_use]
    pub fn new(
        store: &Store,
        sequence: Sequence,
        geometry: KvGeometry,
        policy: StorePolicy,
        durability: Durability,
    ) -> Self {
        let options = AttendOptions { scale: Some(geometry.scale), ..AttendOptions::default() };
        let read_before = read_bytes(store);
        Self {
            store: store.clone(),
            sequence,
            geometry,
            policy,
            durability,
            options,
            read_before,
            asked: 0,
            attends: 0,
            dense_layers: 0,
            probe: None,
            pipeline: None,
            prepared: None,
            rebuilt: None,
        }
    }

    /// Whether decode steps read ahead what predicted queries select. What is attended does not depend on it.
    pub fn read_ahead(&mut self, on: bool) {
        // Views come from this cache's own policy: the budget of the pipeline's own loop is not asked for.
        self.pipeline = on.then(|| Pipeline::new(&self.store, EngineBudget::All));
        self.prepared = None;
    }

    /// The first `layers` layers attend to everything from now on.
    pub fn set_dense_layers(&mut self, layers: usize) {
        self.dense_layers = layers;
    }

    /// From the next commit on, or from now on where there are committed tokens: selections read values alone and rebuild keys
    /// from this rank. `None` ends it.
    ///
    /// # Errors
    /// As [`Sequence::reconstruct_keys`].
    pub fn reconstruct_keys(&mut self, rank: Option<usize>) -> Result<()> {
        self.sequence.forget_keys();
        self.rebuilt = rank.map(|rank| (rank, None));
        if self.sequence.committed() > 0 { self.rebuild() } else { Ok(()) }
    }

    fn rebuild(&mut self) -> Result<()> {
        let Some((rank, built)) = &mut self.rebuilt else { return Ok(()) };
        let tokens = self.sequence.len();
        if built.is_none_or(|built| tokens >= built + REBUILD_TOKENS || tokens < built) {
            self.sequence.reconstruct_keys(&ReconstructOptions::default().rank(*rank)).map_err(engine_error)?;
            *built = Some(tokens);
        }
        Ok(())
    }

    /// What selections read of the groups that they choose.
    fn planes(&self) -> PlaneSet {
        if matches!(self.rebuilt, Some((_, Some(_)))) { PlaneSet::ReconstructedKeys } else { PlaneSet::KeysAndValues }
    }

    /// Another policy from now on.
    pub fn set_policy(&mut self, policy: StorePolicy) {
        self.policy = policy;
    }

    /// Gives the sequence a selector whose summaries are stored with the groups.
    ///
    /// # Errors
    /// As [`Sequence::attach_stored`].
    pub fn attach_stored(&mut self, selector: Arc<dyn Selector>) -> stratakv::Result<SelectorId> {
        self.sequence.attach_stored(selector)
    }

    /// See [`Sequence::attach`].
    pub fn attach(&mut self, selector: Arc<dyn Selector>) -> stratakv::Result<SelectorId> {
        self.sequence.attach(selector)
    }

    /// Bytes of a selector's summaries, all layers, and of rebuilt keys.
    ///
    /// # Errors
    /// A selector of another sequence.
    pub fn selector_bytes(&self, selector: SelectorId) -> stratakv::Result<u64> {
        Ok(self.sequence.selector_bytes(selector)? + self.sequence.rebuilt_bytes())
    }

    /// By layer, how far the keys that were appended are from those that the selector's codes were calibrated on
    /// ([`Codes::drift`]); none for selectors without codes.
    ///
    /// # Errors
    /// A selector of another sequence.
    pub fn drift(&self, selector: SelectorId) -> stratakv::Result<Vec<Option<f64>>> {
        let of = |layer: usize| -> stratakv::Result<Option<f64>> {
            let summaries = self.sequence.selector_summaries(selector, layer)?;
            Ok(summary_as::<Codes>(&summaries).ok().and_then(Codes::drift))
        };
        (0..self.geometry.layers.len()).map(of).collect()
    }

    /// [`Self::drift`] of the selector that its policy chooses by; nothing where there is none.
    ///
    /// # Errors
    /// As there.
    pub fn own_drift(&self) -> stratakv::Result<Vec<Option<f64>>> {
        match self.policy {
            StorePolicy::Selected { selector, .. } => self.drift(selector),
            _ => Ok(Vec::new()),
        }
    }

    /// Compares each attend from now on with full attention over `mirror`, which holds the same tokens; `None` ends it.
    pub fn probe(&mut self, mirror: Option<super::MemoryKv>) {
        self.probe = mirror.map(Probe::new);
    }

    /// What the probe found: see [`Probe::found`].
    #[must_use]
    pub fn probed(&self) -> (f64, f64, u64, Duration) {
        self.probe.as_ref().map_or((0.0, 0.0, 0, Duration::ZERO), Probe::found)
    }

    /// Device reads of the store so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.store.status().devices.iter().map(|d| d.counters.reads).sum()
    }

    /// Keeps the first `tokens` tokens.
    ///
    /// # Errors
    /// See [`Sequence::truncate`].
    pub fn truncate(&mut self, tokens: usize) -> Result<()> {
        self.sequence.truncate(tokens as u64).map_err(engine_error)
    }

    /// Bytes this cache's reads asked the devices for, by plan; of streamed records those that were read ahead. With nothing else running on the store it equals
    /// [`KvStats::bytes_read`], which counts completions.
    #[must_use]
    pub fn asked_bytes(&self) -> u64 {
        self.asked
    }

    /// The sequence behind it.
    #[must_use]
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// One call of the pipeline; the bytes that it asks for count.
    fn through(&mut self, call: impl FnOnce(&mut Pipeline) -> stratakv::Result<()>) -> Result<()> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let before = pipeline.report().read_bytes;
        let done = call(pipeline);
        self.asked += pipeline.report().read_bytes - before;
        done.map_err(engine_error)
    }

    /// Reads ahead the records of a layer that selections will want, where there are such and they are streamed.
    fn stream(&mut self, layer: usize) -> Result<()> {
        if layer < self.dense_layers || layer >= self.geometry.layers.len() {
            return Ok(());
        }
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let before = pipeline.report().record_bytes;
        let done = pipeline.stream(layer, &[&self.sequence]);
        self.asked += pipeline.report().record_bytes - before;
        done.map_err(engine_error)
    }

    fn select(&self, layer: usize, queries: &[f32]) -> stratakv::Result<Selection> {
        let tokens = usize::try_from(self.sequence.layer_len(layer)?).unwrap_or(usize::MAX);
        let group = self.sequence.layout().group_tokens();
        if layer < self.dense_layers {
            return self.sequence.select_all(layer);
        }
        match self.policy {
            StorePolicy::Selected { selector, form, budget } => {
                let options = SelectOptions::new(EngineBudget::tokens(budget.tokens(tokens)));
                let options = options.aggregation(form).scale(self.geometry.scale).planes(self.planes());
                self.sequence.select_with(selector, layer, queries, options)
            }
            StorePolicy::Full => self.sequence.select_all(layer),
            StorePolicy::MinMax { budget } => {
                // Forcing the newest group beside the tail as well cost 0.8 points on recall-tiny.
                let options = SelectOptions::new(EngineBudget::tokens(budget.tokens(tokens)));
                self.sequence.select(layer, queries, options)
            }
            StorePolicy::Window { sinks, budget } => {
                let budget = budget.tokens(tokens);
                let tail = tokens % group;
                let groups = budget.saturating_sub(tail) / group;
                let slides = self.geometry.layers[layer].window.is_some_and(|w| w < tokens);
                // Newest tokens go first where the budget is small.
                let sinks = if slides { 0 } else { sinks.div_ceil(group).min(groups.saturating_sub(1)) };
                let recent = tail + (groups - sinks.min(groups)) * group;
                let options =
                    SelectOptions::new(EngineBudget::tokens(budget)).sinks(sinks * group).recent(recent.max(1));
                self.sequence.select(layer, queries, options)
            }
        }
    }
}

fn read_bytes(store: &Store) -> u64 {
    store.status().devices.iter().map(|d| d.counters.read_bytes).sum()
}

impl KvCache for StoreKv {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn len(&self) -> usize {
        usize::try_from(self.sequence.len()).unwrap_or(usize::MAX)
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        check_append(&self.geometry, layer, keys, values, tokens)?;
        let shape = self.geometry.layers[layer];
        let view = |data| TensorView::token_major(data, tokens, shape.kv_heads, shape.head_dim);
        self.sequence.append(layer, view(keys), view(values)).map_err(engine_error)?;
        match &mut self.probe {
            Some(probe) => probe.append(layer, keys, values, tokens),
            None => Ok(()),
        }
    }

    fn prepare(&mut self, layer: usize, queries: &[f32], predict: Option<&Predict<'_>>) -> Result<()> {
        check_layer(&self.geometry, layer)?;
        if self.pipeline.is_none() {
            return Ok(());
        }
        let view = self.select(layer, queries).map_err(engine_error)?;
        self.through(|pipeline| pipeline.read(layer, std::slice::from_ref(&view)))?;
        self.prepared = Some((layer, view));
        self.stream(layer + 1)?;
        if let Some(predict) = predict {
            // Whatever keeps a prediction from selecting keeps no step from going on.
            if let Ok(next) = self.select(layer + 1, &predict()?) {
                self.through(|pipeline| pipeline.predict(layer + 1, std::slice::from_ref(&next)))?;
            }
            self.stream(layer + 2)?;
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        check_attend(&self.geometry, layer, queries, out)?;
        if self.pipeline.is_some() && self.prepared.as_ref().is_none_or(|(prepared, _)| *prepared != layer) {
            self.prepare(layer, queries, None)?;
        }
        self.attends += 1;
        let view = match self.prepared.take() {
            Some((_, view)) => {
                let options = self.options;
                self.through(|pipeline| pipeline.attend(layer, &[queries], &options, &mut [&mut *out]))?;
                view
            }
            None => {
                let view = self.select(layer, queries).map_err(engine_error)?;
                let mut ticket = self.store.read(&[&view]).map_err(engine_error)?;
                self.asked += ticket.device_bytes();
                ticket.attend(0, queries, &view, &self.options, out).map_err(engine_error)?;
                view
            }
        };
        match &mut self.probe {
            Some(probe) => probe.attended(layer, queries, view.positions(), out),
            None => Ok(()),
        }
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        let (named, held) = (self.sequence.token_ids().len() + new_ids.len(), self.len());
        ensure!(named == held, "the commit names {named} tokens, the cache holds {held}");
        self.sequence.append_token_ids(new_ids).map_err(engine_error)?;
        self.sequence.commit_with(state, self.durability).map_err(engine_error)?;
        self.rebuild()
    }

    fn committed(&self) -> Result<Option<Committed>> {
        let Some(state) = self.sequence.state().filter(|_| self.sequence.committed() > 0) else { return Ok(None) };
        Ok(Some(Committed { ids: self.sequence.token_ids().to_vec(), state: state.to_vec() }))
    }

    fn stats(&self) -> KvStats {
        KvStats {
            kv_bytes_total: self.sequence.kv_bytes(),
            bytes_read: read_bytes(&self.store) - self.read_before,
            steps: self.attends.checked_div(self.geometry.layers.len() as u64).unwrap_or(0),
            resident_bytes_peak: self.store.status().memory.peak_bytes as u64,
            pipeline: self.pipeline.as_ref().map(|pipeline| *pipeline.report()),
        }
    }

    fn finish(self: Box<Self>, keep: bool) -> Result<()> {
        let sequence = self.sequence;
        let done = if keep { sequence.close() } else { sequence.delete(Durability::Lazy) };
        done.map_err(engine_error)
    }
}
