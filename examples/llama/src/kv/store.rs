//! A KV cache that is a sequence of a stratakv store. This file is what an embedder needs most.
//!
//! One layer of a decode step:
//!
//! 1. [`KvCache::append`] hands the token's keys and values to the sequence.
//! 2. [`KvCache::prepare`] selects groups for the token's queries under the cache's [`StorePolicy`] and starts to read
//!    them. It then predicts the queries of the next layer, selects for these, and prefetches what they select.
//! 3. [`KvCache::attend`] waits for the groups of step 2 and computes attention over them as they arrive.
//!
//! Invariants:
//! - Prefetching never changes what a step attends to. A wrong prediction costs bytes and changes no logit.
//! - [`StoreKv::asked_bytes`] counts the bytes that the plans of all reads asked for. If nothing else uses the store,
//!   it equals [`KvStats::bytes_read`], which counts completed reads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use stratakv::pipeline::Pipeline;
use stratakv::retrieval::{Codes, HeadAggregation, MethodSpec, ReconstructOptions, Selector, SelectorId, summary_as};
use stratakv::{
    AttendOptions, Budget as EngineBudget, Durability, ErrorKind, PlaneSet, SelectOptions, SelectRequest, Selection,
    Sequence, Store, TensorView,
};

use super::cache::{Committed, KvCache, KvStats, Predict};
use super::error::engine_error;
use super::geometry::KvGeometry;
use super::memory::MemoryKv;
use super::prediction_trial::PredictionTrial;
use super::probe::{Probe, ProbeSums};
use super::prompt_sample::PromptSample;
use super::recorded::RecordedQueries;
use super::selected::SelectedSums;
use crate::budget::Budget;

/// The rule that chooses which tokens a query attends to. Every attended token counts in the budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StorePolicy {
    /// All tokens.
    Full,
    /// The first `sinks` tokens and the newest ones, in whole groups (StreamingLLM, Xiao et al. 2023).
    Window {
        /// Tokens kept from the beginning.
        sinks: usize,
        /// Attended tokens per step.
        budget: Budget,
    },
    /// The groups that a selector scores highest, after the unfinished group. If all groups are full, the newest group
    /// takes the place of the unfinished one.
    Selected {
        /// A selector of this sequence.
        selector: SelectorId,
        /// How the scores of query heads become one.
        aggregation: HeadAggregation,
        /// Attended tokens per step.
        budget: Budget,
    },
    /// As `Selected`, with the stored bounds of keys as the selector (Quest, Tang et al. 2024).
    MinMax {
        /// Attended tokens per step.
        budget: Budget,
    },
}

/// The method that needs neither an adapter nor a prompt.
const FALLBACK: &str = "signs";

/// Tokens after which a commit reconstructs low-rank keys again: half of the tokens whose keys stay exact.
const RECONSTRUCT_TOKENS: u64 = 512;

/// Reconstructed keys of a sequence.
struct ReconstructedKeys {
    rank: usize,
    /// The tokens of the sequence when its keys were last reconstructed, or `None` before the first time.
    tokens: Option<u64>,
}

/// A selector that needs the prompt.
enum Deferred {
    /// It makes entries of the prompt's keys and queries.
    Entries(Arc<dyn Selector>, HeadAggregation, Budget),
    /// Its adapter is fitted to the prompt.
    Calibrated(PromptSample, HeadAggregation, Budget),
}

/// A KV cache that is a sequence of a store.
pub struct StoreKv {
    store: Store,
    sequence: Sequence,
    geometry: KvGeometry,
    policy: StorePolicy,
    durability: Durability,
    options: AttendOptions,
    /// Bytes that the store's devices had completed before this cache read anything.
    read_before: u64,
    /// Bytes that this cache's reads asked for.
    asked: u64,
    /// Calls of `attend`.
    attends: u64,
    /// Layers below this one attend to everything.
    dense_layers: usize,
    probe: Option<Probe>,
    /// The reads of decode steps, if they are prefetched.
    pipeline: Option<Pipeline>,
    trial: PredictionTrial,
    /// The layer that the pipeline read last, and its selection.
    prepared: Option<(usize, Selection)>,
    reconstructed: Option<ReconstructedKeys>,
    /// The newest queries, if a selector makes clusters of them.
    recorded: Option<RecordedQueries>,
    /// The queries that the caller gave instead of the newest ones.
    profile: Option<RecordedQueries>,
    /// The selector that a commit attaches, once the tokens that it needs are there.
    deferred: Option<Deferred>,
    /// The selector of sign bits that serves until an adapter is fitted.
    stand_in: Option<SelectorId>,
    /// A fitted adapter, or the reason why there is none, for a report.
    note: Option<String>,
    selected: SelectedSums,
    /// A directory on a disk for the rows of a long prompt.
    spill_dir: Option<PathBuf>,
    /// True if the clusters that the policy chooses are stored too.
    stores_clusters: bool,
}

impl StoreKv {
    /// Makes a cache over a sequence of `store`. The sequence's layout must be
    /// [`kv_layout`](super::layout::kv_layout) of this geometry.
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
            trial: PredictionTrial::default(),
            prepared: None,
            reconstructed: None,
            recorded: None,
            profile: None,
            deferred: None,
            stand_in: None,
            note: None,
            selected: SelectedSums::default(),
            spill_dir: None,
            stores_clusters: false,
        }
    }

    /// Sets whether the clusters that the policy chooses are stored too: after the first commit, and when the cache is
    /// kept at its end. Steps then read pages of clusters instead of groups.
    pub fn store_clusters(&mut self, on: bool) {
        self.stores_clusters = on;
    }

    /// Stores the clusters that the policy chooses. Without space, memory or clusters, a note says so and groups are
    /// read.
    fn store_own_clusters(&mut self) -> Result<()> {
        let StorePolicy::Selected { selector, .. } = self.policy else { return Ok(()) };
        if !self.stores_clusters || self.sequence.committed() == 0 {
            return Ok(());
        }
        match self.sequence.store_clusters(selector) {
            Ok(stored) => {
                let (mib, seconds) = (stored.device_bytes as f64 / (1 << 20) as f64, stored.time.as_secs_f64());
                let (clusters, kept) = (stored.clusters, stored.kept_pages);
                let note = format!("{clusters} clusters stored, {mib:.1} MiB in {seconds:.1} s, {kept} pages kept");
                self.note = Some(note);
                Ok(())
            }
            Err(e) if matches!(e.kind(), ErrorKind::InvalidArgument | ErrorKind::NoSpace | ErrorKind::MemoryLimit) => {
                self.note = Some(format!("groups are read: {e}"));
                Ok(())
            }
            Err(e) => Err(engine_error(e)),
        }
    }

    /// Sets the directory where prefill may keep what does not fit in little memory.
    pub fn set_spill_dir(&mut self, dir: PathBuf) {
        self.spill_dir = Some(dir);
    }

    /// Sets whether decode steps prefetch what predicted queries select.
    pub fn read_ahead(&mut self, on: bool) {
        // The cache selects by its own policy. The budget of the pipeline's own decode loop is not used.
        self.pipeline = on.then(|| Pipeline::new(&self.store, EngineBudget::All));
        self.trial = PredictionTrial::default();
        self.prepared = None;
    }

    /// Sets how many of the first layers attend to everything.
    pub fn set_dense_layers(&mut self, layers: usize) {
        self.dense_layers = layers;
    }

    /// Reconstructs keys from low-rank keys of this rank, so that selections read only values. `None` reads keys again.
    ///
    /// It takes effect at once if tokens are committed, and otherwise with the next commit.
    ///
    /// # Errors
    /// Fails as [`Sequence::reconstruct_keys`] does.
    pub fn reconstruct_keys(&mut self, rank: Option<usize>) -> Result<()> {
        self.sequence.forget_keys();
        self.reconstructed = rank.map(|rank| ReconstructedKeys { rank, tokens: None });
        if self.sequence.committed() > 0 { self.reconstruct() } else { Ok(()) }
    }

    /// Reconstructs keys if enough tokens were added since the last time, or if the sequence was truncated.
    fn reconstruct(&mut self) -> Result<()> {
        let Some(keys) = &mut self.reconstructed else { return Ok(()) };
        let tokens = self.sequence.len();
        if keys.tokens.is_none_or(|last| tokens >= last + RECONSTRUCT_TOKENS || tokens < last) {
            let options = ReconstructOptions::default().rank(keys.rank);
            self.sequence.reconstruct_keys(&options).map_err(engine_error)?;
            keys.tokens = Some(tokens);
        }
        Ok(())
    }

    /// Returns what selections read of the groups that they choose.
    fn planes(&self) -> PlaneSet {
        let reconstructed = self.reconstructed.as_ref().is_some_and(|keys| keys.tokens.is_some());
        if reconstructed { PlaneSet::ReconstructedKeys } else { PlaneSet::KeysAndValues }
    }

    /// Replaces the policy.
    pub fn set_policy(&mut self, policy: StorePolicy) {
        self.policy = policy;
    }

    /// Attaches a selector whose summaries are stored with the groups.
    ///
    /// # Errors
    /// Fails as [`Sequence::attach_stored`] does.
    pub fn attach_stored(&mut self, selector: Arc<dyn Selector>) -> stratakv::Result<SelectorId> {
        self.sequence.attach_stored(selector)
    }

    /// Attaches a selector whose summaries stay in memory.
    ///
    /// # Errors
    /// Fails as [`Sequence::attach`] does.
    pub fn attach(&mut self, selector: Arc<dyn Selector>) -> stratakv::Result<SelectorId> {
        self.sequence.attach(selector)
    }

    /// Attaches a selector that chooses entries, once the prompt is there. A method that needs a profile gets the
    /// [recorded](Self::record_queries) queries of every layer, or those of [`KvCache::set_profile`].
    ///
    /// # Errors
    /// Fails as [`Sequence::attach`] and [`Sequence::profile`] do.
    pub fn attach_entries(&mut self, selector: Arc<dyn Selector>) -> stratakv::Result<SelectorId> {
        let id = self.sequence.attach(selector)?;
        for layer in 0..self.geometry.layers.len() {
            let summaries = self.sequence.selector_summaries(id, layer)?;
            let takes_profile = summaries.iter().any(|summary| summary.profile_bytes(1).is_some());
            // A call of `profile_queries` would borrow the sequence too.
            let recorded = self.profile.as_ref().or(self.recorded.as_ref());
            let recorded = recorded.map_or_else(Vec::new, |recorded| recorded.of(layer));
            if takes_profile && !recorded.is_empty() {
                self.sequence.profile(id, layer, &recorded, Some(self.geometry.scale))?;
            }
        }
        Ok(id)
    }

    /// Attaches a selector that chooses entries with the first commit, and selects by it from then on. A sequence that
    /// has tokens already gets it at once. Until then the cache records the newest `queries` queries.
    ///
    /// # Errors
    /// Fails as [`Self::attach_entries`] does.
    pub fn attach_entries_later(
        &mut self,
        selector: Arc<dyn Selector>,
        (aggregation, budget): (HeadAggregation, Budget),
        queries: usize,
    ) -> Result<()> {
        self.record_queries(queries);
        self.policy = StorePolicy::Full;
        self.deferred = Some(Deferred::Entries(selector, aggregation, budget));
        // A fork has tokens before its first commit.
        if self.sequence.is_empty() { Ok(()) } else { self.attach_deferred() }
    }

    /// Fits the method's adapter to the tokens that come from now on, and selects by it from the first commit on that
    /// has seen enough of them. The store then holds the adapter. Until then steps select by sign bits.
    ///
    /// # Errors
    /// Fails if the selector of sign bits cannot be attached.
    pub fn calibrate_later(
        &mut self,
        spec: MethodSpec,
        (aggregation, budget): (HeadAggregation, Budget),
    ) -> Result<()> {
        self.policy = StorePolicy::Full;
        self.deferred = Some(Deferred::Calibrated(PromptSample::new(&self.geometry, spec), aggregation, budget));
        if self.sequence.is_empty() { Ok(()) } else { self.attach_deferred() }
    }

    /// Stores the adapter that the sample fits, if there are enough tokens. It happens before the commit, so that a
    /// session that is interrupted after it goes on with the same adapter.
    fn store_calibrated(&mut self) -> Result<Option<Arc<dyn Selector>>> {
        let Some(Deferred::Calibrated(sample, ..)) = &self.deferred else { return Ok(None) };
        let (name, (seen, needed)) = (sample.spec().adapter_name().unwrap_or_default(), sample.tokens());
        if seen < needed {
            self.note = Some(format!("sign bits, because {name} needs {needed} tokens to fit an adapter"));
            return Ok(None);
        }
        let begin = Instant::now();
        let adapter = sample.fit()?;
        self.store.put_adapter(self.sequence.layout(), &adapter, 1).map_err(engine_error)?;
        let selector = sample.spec().selector(Some(Arc::new(adapter))).map_err(engine_error)?;
        let seconds = begin.elapsed().as_secs_f64();
        self.note = Some(format!("{name} was fitted to {seen} tokens in {seconds:.1} s"));
        Ok(Some(selector))
    }

    /// Attaches the selector that waits for a commit. `calibrated` is the one of [`Self::store_calibrated`]. It takes
    /// the place of sign bits.
    fn attach_after_commit(&mut self, calibrated: Option<Arc<dyn Selector>>) -> Result<()> {
        match (calibrated, self.deferred.take()) {
            (Some(selector), Some(Deferred::Calibrated(_, aggregation, budget))) => {
                if let Some(signs) = self.stand_in.take() {
                    self.sequence.detach(signs).map_err(engine_error)?;
                }
                let selector = self.attach_stored(selector).map_err(engine_error)?;
                self.policy = StorePolicy::Selected { selector, aggregation, budget };
                Ok(())
            }
            (_, deferred) => {
                self.deferred = deferred;
                self.attach_deferred()
            }
        }
    }

    /// Attaches the selector that waits for tokens. Sign bits take the place of a method that has no adapter yet.
    fn attach_deferred(&mut self) -> Result<()> {
        let (selector, aggregation, budget) = match self.deferred.take() {
            None => return Ok(()),
            Some(Deferred::Entries(selector, aggregation, budget)) => {
                (self.attach_entries(selector).map_err(engine_error)?, aggregation, budget)
            }
            Some(Deferred::Calibrated(sample, aggregation, budget)) => {
                self.deferred = Some(Deferred::Calibrated(sample, aggregation, budget));
                if self.stand_in.is_some() {
                    return Ok(());
                }
                let signs: MethodSpec = FALLBACK.parse().map_err(engine_error)?;
                let selector = signs.selector(None).map_err(engine_error)?;
                let selector = self.attach_stored(selector).map_err(engine_error)?;
                self.stand_in = Some(selector);
                (selector, aggregation, budget)
            }
        };
        self.policy = StorePolicy::Selected { selector, aggregation, budget };
        Ok(())
    }

    /// Returns whether an adapter will be fitted to the tokens that come.
    fn is_sampled(&self) -> bool {
        matches!(self.deferred, Some(Deferred::Calibrated(..)))
    }

    /// Returns what happened to the method: an adapter that was fitted, or why there is none.
    #[must_use]
    pub fn method_note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Records the newest `limit` queries of each layer from now on.
    pub fn record_queries(&mut self, limit: usize) {
        self.recorded = Some(RecordedQueries::new(self.geometry.layers.len(), limit));
    }

    /// Returns the queries that make the clusters: the ones that [`KvCache::set_profile`] got, or the recorded ones.
    #[must_use]
    pub fn profile_queries(&self) -> Option<&RecordedQueries> {
        self.profile.as_ref().or(self.recorded.as_ref())
    }

    /// Returns sums over the selections that were attended to.
    #[must_use]
    pub fn selected(&self) -> SelectedSums {
        self.selected
    }

    /// Returns the bytes of a selector's summaries in all layers, and of reconstructed keys.
    ///
    /// # Errors
    /// Fails if the selector belongs to another sequence.
    pub fn selector_bytes(&self, selector: SelectorId) -> stratakv::Result<u64> {
        Ok(self.sequence.selector_bytes(selector)? + self.sequence.rebuilt_bytes())
    }

    /// Returns by layer how far the appended keys are from the keys that the selector's codes were calibrated on
    /// ([`Codes::drift`]). A selector without codes gives `None` for every layer.
    ///
    /// # Errors
    /// Fails if the selector belongs to another sequence.
    pub fn drift(&self, selector: SelectorId) -> stratakv::Result<Vec<Option<f64>>> {
        let of = |layer: usize| -> stratakv::Result<Option<f64>> {
            let summaries = self.sequence.selector_summaries(selector, layer)?;
            Ok(summary_as::<Codes>(&summaries).ok().and_then(Codes::drift))
        };
        (0..self.geometry.layers.len()).map(of).collect()
    }

    /// Returns [`Self::drift`] of the policy's selector, or nothing if the policy has none.
    ///
    /// # Errors
    /// Fails as [`Self::drift`] does.
    pub fn own_drift(&self) -> stratakv::Result<Vec<Option<f64>>> {
        match self.policy {
            StorePolicy::Selected { selector, .. } => self.drift(selector),
            _ => Ok(Vec::new()),
        }
    }

    /// Compares every later attend with full attention over `mirror`, which must hold the same tokens. `None` stops it.
    /// Layers that attend to everything are left out.
    pub fn probe(&mut self, mirror: Option<MemoryKv>) {
        self.probe = mirror.map(Probe::new);
    }

    /// Returns the sums of the probe.
    #[must_use]
    pub fn probed(&self) -> ProbeSums {
        self.probe.as_ref().map_or(ProbeSums::default(), Probe::sums)
    }

    /// Returns the reads that the store's devices completed.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.store.status().devices.iter().map(|d| d.counters.reads).sum()
    }

    /// Keeps the first `tokens` tokens.
    ///
    /// # Errors
    /// Fails as [`Sequence::truncate`] does.
    pub fn truncate(&mut self, tokens: usize) -> Result<()> {
        self.sequence.truncate(tokens as u64).map_err(engine_error)
    }

    /// Returns the bytes that this cache's reads asked the devices for. Of summaries on disk it counts those that were
    /// prefetched.
    #[must_use]
    pub fn asked_bytes(&self) -> u64 {
        self.asked
    }

    /// Returns a fork of the sequence, which has no selector yet.
    ///
    /// # Errors
    /// Fails as [`Sequence::fork`] does.
    pub fn fork_sequence(&mut self) -> stratakv::Result<Sequence> {
        self.sequence.fork()
    }

    /// Returns the sequence.
    #[must_use]
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Returns whether the next layer is predicted and prefetched.
    fn predicts(&self) -> bool {
        self.pipeline.is_some() && !self.trial.is_paused()
    }

    /// Calls the pipeline and counts the bytes that the call asked for.
    fn through(&mut self, call: impl FnOnce(&mut Pipeline) -> stratakv::Result<()>) -> Result<()> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let before = pipeline.report().read_bytes;
        let done = call(pipeline);
        self.asked += pipeline.report().read_bytes - before;
        done.map_err(engine_error)
    }

    /// Prefetches the summaries of a layer if they are on disk and a selection will need them.
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

    /// Selects what the queries attend to in a layer.
    fn select(&self, layer: usize, queries: &[f32]) -> stratakv::Result<Selection> {
        let tokens = usize::try_from(self.sequence.layer_len(layer)?).unwrap_or(usize::MAX);
        let group = self.sequence.layout().group_tokens();
        if layer < self.dense_layers {
            return self.sequence.select(layer, SelectRequest::all());
        }
        match self.policy {
            StorePolicy::Selected { selector, aggregation, budget } => {
                let options = SelectOptions::new(EngineBudget::tokens(budget.tokens(tokens)));
                let options = options.aggregation(aggregation).scale(self.geometry.scale).planes(self.planes());
                self.sequence.select(layer, SelectRequest::query(queries).options(options).selector(selector))
            }
            StorePolicy::Full => self.sequence.select(layer, SelectRequest::all()),
            StorePolicy::MinMax { budget } => {
                // The newest full group is not forced. Forcing it cost 0.8 points of accuracy on recall-tiny.
                let options = SelectOptions::new(EngineBudget::tokens(budget.tokens(tokens)));
                self.sequence.select(layer, SelectRequest::query(queries).options(options))
            }
            StorePolicy::Window { sinks, budget } => {
                let budget = budget.tokens(tokens);
                let tail = tokens % group;
                let groups = budget.saturating_sub(tail) / group;
                let slides = self.geometry.layers[layer].window.is_some_and(|w| w < tokens);
                // If the budget is small, the newest group is kept rather than the sinks.
                let sinks = if slides { 0 } else { sinks.div_ceil(group).min(groups.saturating_sub(1)) };
                let recent = tail + (groups - sinks.min(groups)) * group;
                let options =
                    SelectOptions::new(EngineBudget::tokens(budget)).sinks(sinks * group).recent(recent.max(1));
                self.sequence.select(layer, SelectRequest::query(queries).options(options))
            }
        }
    }
}

/// Returns the bytes that the store's devices completed.
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
        self.geometry.check_append(layer, keys, values, tokens)?;
        let shape = self.geometry.layers[layer];
        let view = |data| TensorView::token_major(data, tokens, shape.kv_heads, shape.head_dim);
        self.sequence.append(layer, view(keys), view(values)).map_err(engine_error)?;
        if let Some(Deferred::Calibrated(sample, ..)) = &mut self.deferred {
            sample.add_keys(layer, keys);
        }
        match &mut self.probe {
            Some(probe) => probe.append(layer, keys, values, tokens),
            None => Ok(()),
        }
    }

    fn spill_dir(&self) -> Option<&Path> {
        self.spill_dir.as_deref()
    }

    fn wants_queries(&self) -> bool {
        self.recorded.is_some() || self.is_sampled()
    }

    fn observe(&mut self, layer: usize, queries: &[f32]) {
        if let Some(Deferred::Calibrated(sample, ..)) = &mut self.deferred {
            sample.add_queries(layer, queries);
        }
        let row = self.geometry.layers.get(layer).map_or(0, |shape| self.geometry.query_heads * shape.head_dim);
        if let Some(recorded) = &mut self.recorded {
            recorded.add(layer, queries, row);
        }
    }

    fn set_profile(&mut self, queries: RecordedQueries) {
        self.profile = Some(queries);
    }

    fn prepare(&mut self, layer: usize, queries: &[f32], predict: Option<&Predict<'_>>) -> Result<()> {
        self.geometry.layer(layer)?;
        if !self.predicts() {
            return Ok(());
        }
        let selection = self.select(layer, queries).map_err(engine_error)?;
        self.through(|pipeline| pipeline.read(layer, std::slice::from_ref(&selection)))?;
        self.prepared = Some((layer, selection));
        self.stream(layer + 1)?;
        if let Some(predict) = predict {
            // A prediction that cannot select is skipped: the step does not depend on it.
            if let Ok(next) = self.select(layer + 1, &predict()?) {
                self.through(|pipeline| pipeline.predict(layer + 1, std::slice::from_ref(&next)))?;
            }
            self.stream(layer + 2)?;
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        self.geometry.check_attend(layer, queries, out)?;
        if self.is_sampled() || !matches!(self.policy, StorePolicy::Selected { .. }) {
            self.observe(layer, queries);
        }
        if self.predicts() && self.prepared.as_ref().is_none_or(|(prepared, _)| *prepared != layer) {
            self.prepare(layer, queries, None)?;
        }
        if self.pipeline.is_some() && layer + 1 == self.geometry.layers.len() {
            self.trial.count_step(Instant::now());
        }
        self.attends += 1;
        let selection = match self.prepared.take() {
            Some((_, selection)) => {
                let options = self.options;
                self.through(|pipeline| pipeline.attend(layer, &[queries], &options, &mut [&mut *out]))?;
                selection
            }
            None => {
                let selection = self.select(layer, queries).map_err(engine_error)?;
                let selections = [&selection];
                let request = self.store.read(&selections);
                self.asked += request.attend(&[queries], &self.options, &mut [&mut *out]).map_err(engine_error)?;
                selection
            }
        };
        if layer < self.dense_layers {
            return Ok(());
        }
        self.selected.add(&selection, self.geometry.layers[layer].kv_heads);
        match &mut self.probe {
            Some(probe) => probe.attended(layer, queries, |head| selection.entries(head).collect(), out),
            None => Ok(()),
        }
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        let (named, held) = (self.sequence.token_ids().len() + new_ids.len(), self.len());
        ensure!(named == held, "the commit names {named} tokens, the cache holds {held}");
        let calibrated = self.store_calibrated()?;
        self.sequence.append_token_ids(new_ids).map_err(engine_error)?;
        self.sequence.commit_with(state, self.durability).map_err(engine_error)?;
        let is_first = self.deferred.is_some();
        self.attach_after_commit(calibrated)?;
        if is_first {
            self.store_own_clusters()?;
        }
        self.reconstruct()
    }

    fn committed(&self) -> Result<Option<Committed>> {
        let Some(state) = self.sequence.caller_state().filter(|_| self.sequence.committed() > 0) else {
            return Ok(None);
        };
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

    fn finish(mut self: Box<Self>, keep: bool) -> Result<()> {
        if keep {
            self.store_own_clusters()?;
        }
        let sequence = self.sequence;
        let done = if keep { sequence.close() } else { sequence.delete(Durability::Lazy) };
        done.map_err(engine_error)
    }
}
