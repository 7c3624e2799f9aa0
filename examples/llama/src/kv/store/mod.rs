//! A KV cache that is a sequence of a stratakv store. This folder is what an embedder needs most.
//!
//! One layer of a decode step:
//!
//! 1. [`KvCache::append`] hands the token's keys and values to the sequence.
//! 2. [`KvCache::prepare`] selects groups for the token's queries under the cache's [`StorePolicy`] and starts to read
//!    them. It then predicts the queries of the next layer, selects for these, and prefetches what they select.
//! 3. [`KvCache::attend`] waits for the groups of step 2 and computes attention over them as they arrive.
//!
//! | File | What it shows |
//! |---|---|
//! | `policy` | what a query attends to |
//! | `step_reads`, `prediction_trial` | reading it, and prefetching the next layer if that is faster |
//! | `late_selector` | selectors that a commit attaches, because they need the prompt |
//! | `reconstructed_keys` | keys that are computed instead of read |
//! | `selected_sums` | what steps selected, for reports |

mod late_selector;
mod policy;
mod prediction_trial;
mod reconstructed_keys;
mod selected_sums;
mod step_reads;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, ensure};
use stratakv::retrieval::{Codes, Selector, SelectorId, summary_as};
use stratakv::{Durability, ErrorKind, PlaneSet, SelectRequest, Selection, Sequence, Store, TensorView};

use self::late_selector::LateSelector;
use self::policy::LayerContext;
use self::reconstructed_keys::ReconstructedKeys;
use self::step_reads::StepReads;
use super::cache::{Committed, KvCache, KvStats, Predict};
use super::error::engine_error;
use super::geometry::KvGeometry;
use super::memory::MemoryKv;
use super::probe::{Probe, ProbeSums};
use super::recorded::RecordedQueries;

pub use self::policy::StorePolicy;
pub use self::selected_sums::SelectedSums;

/// A KV cache that is a sequence of a store.
pub struct StoreKv {
    store: Store,
    sequence: Sequence,
    geometry: KvGeometry,
    policy: StorePolicy,
    durability: Durability,
    /// Bytes that the store's devices had completed before this cache read anything.
    read_before: u64,
    /// Calls of `attend`.
    attends: u64,
    /// Layers below this one attend to everything.
    dense_layers: usize,
    probe: Option<Probe>,
    reads: StepReads,
    reconstructed: Option<ReconstructedKeys>,
    /// The newest queries, if a selector makes clusters of them.
    recorded: Option<RecordedQueries>,
    /// The queries that the caller gave instead of the newest ones.
    profile: Option<RecordedQueries>,
    /// The selector that a commit attaches, once the tokens that it needs are there.
    late: Option<LateSelector>,
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
        let (read_before, reads) = (read_bytes(store), StepReads::new(store, geometry.scale));
        Self {
            store: store.clone(),
            sequence,
            geometry,
            policy,
            durability,
            read_before,
            attends: 0,
            dense_layers: 0,
            probe: None,
            reads,
            reconstructed: None,
            recorded: None,
            profile: None,
            late: None,
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
        self.reads.read_ahead(on);
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
        self.reconstructed = rank.map(ReconstructedKeys::new);
        if self.sequence.committed() > 0 { self.reconstruct() } else { Ok(()) }
    }

    fn reconstruct(&mut self) -> Result<()> {
        self.reconstructed.as_mut().map_or(Ok(()), |keys| keys.renew(&mut self.sequence))
    }

    /// Returns what selections read of the groups that they choose.
    fn planes(&self) -> PlaneSet {
        let reconstructed = self.reconstructed.as_ref().is_some_and(ReconstructedKeys::are_there);
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
        self.reads.asked_bytes()
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

    /// Prefetches the summaries of a layer if they are on disk and a selection will need them.
    fn stream(&mut self, layer: usize) -> Result<()> {
        if layer < self.dense_layers || layer >= self.geometry.layers.len() {
            return Ok(());
        }
        self.reads.stream(layer, &self.sequence)
    }

    /// Starts to read what the queries attend to in a layer, and what the next layer will attend to, if this is faster.
    fn begin_reads(&mut self, layer: usize, queries: &[f32], predict: Option<&Predict<'_>>) -> Result<()> {
        if !self.reads.predicts() {
            return Ok(());
        }
        let selection = self.select(layer, queries).map_err(engine_error)?;
        self.reads.begin(layer, selection)?;
        self.stream(layer + 1)?;
        if let Some(predict) = predict {
            // A prediction that cannot select is skipped: the step does not depend on it.
            if let Ok(next) = self.select(layer + 1, &predict()?) {
                self.reads.predict(layer + 1, &next)?;
            }
            self.stream(layer + 2)?;
        }
        Ok(())
    }

    /// Selects what the queries attend to in a layer.
    fn select(&self, layer: usize, queries: &[f32]) -> stratakv::Result<Selection> {
        let tokens = usize::try_from(self.sequence.layer_len(layer)?).unwrap_or(usize::MAX);
        if layer < self.dense_layers {
            return self.sequence.select(layer, SelectRequest::all());
        }
        let context = LayerContext {
            tokens,
            group_tokens: self.sequence.layout().group_tokens(),
            slides: self.geometry.layers[layer].window.is_some_and(|window| window < tokens),
            scale: self.geometry.scale,
            planes: self.planes(),
        };
        self.sequence.select(layer, self.policy.request(queries, &context))
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
        if let Some(LateSelector::Calibrated(sample, ..)) = &mut self.late {
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
        if let Some(LateSelector::Calibrated(sample, ..)) = &mut self.late {
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
        self.begin_reads(layer, queries, predict)?;
        // A prompt that goes on in a session attends to many tokens without announcing them. They are no steps.
        if layer + 1 == self.geometry.layers.len() {
            self.reads.count_step();
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        self.geometry.check_attend(layer, queries, out)?;
        if self.is_sampled() || !matches!(self.policy, StorePolicy::Selected { .. }) {
            self.observe(layer, queries);
        }
        if self.reads.predicts() && !self.reads.has_begun(layer) {
            self.begin_reads(layer, queries, None)?;
        }
        self.attends += 1;
        let selection = if self.reads.has_begun(layer) {
            self.reads.attend_begun(queries, out)?
        } else {
            let selection = self.select(layer, queries).map_err(engine_error)?;
            self.reads.attend(&selection, queries, out)?;
            selection
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
        let is_first = self.late.is_some();
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
            pipeline: self.reads.report(),
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
