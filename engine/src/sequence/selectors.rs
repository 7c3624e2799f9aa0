//! Selectors of a sequence: attaching them, building their summaries, and choosing by them.
//!
//! Attaching a selector has three steps:
//!
//! 1. Every layer starts an empty summary of each kind that the selector needs and the sequence lacks.
//! 2. The summary takes its stored state (see `cluster_states`), the stored records of groups, and the keys of groups
//!    without records ([`Sequence::fill`]).
//! 3. From then on, each append adds the sealed groups to it.
//!
//! If summaries are streamed, a layer keeps nothing of a kind that min/max records give, and only the suffix without
//! stored records of other kinds (see `suffix_summary`).

use super::attached_summary::AttachedSummary;
use super::cluster_states::StoredKind;
use super::handle::Sequence;
use super::select::check_query;
use super::selector_set::AttachedSelector;
use super::span::Span;
use super::suffix_summary::ScoredSummary;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, Reservation, lock};
use crate::options::{ComputeThreads, SummaryResidency, for_each};
use crate::plan::{SelectOptions, Selection};
use crate::retrieval::{
    KeyGroup, LayerSummary, ScoreRequest, Selector, SelectorId, SummaryRecordId, SummarySpec, choose,
};
use std::sync::Arc;

/// The most bytes that another thread keeps for the scores of a layer, beside copies of the query. It has room for a
/// tile and for widened records.
const THREAD_BYTES: usize = 128 << 10;

/// The summary of a layer that is being built.
struct NewSummary {
    at: usize,
    summary: AttachedSummary,
    /// True if its state was stored, so that its clusters are there.
    is_restored: bool,
}

/// The slots of the kinds of a selector, the memory of their adapters, and the kinds whose stored clusters were
/// searched for.
type AttachedKinds = (Vec<usize>, Vec<Arc<Reservation>>, Vec<String>);

impl Sequence {
    /// Attaches a selector: one more way to choose among the same stored tokens.
    ///
    /// Summaries that no other selector of the sequence has are restored from stored records ([`Self::attach_stored`]).
    /// For groups without records, the keys are read in pieces of a megabyte. Summaries stay in memory and grow with
    /// the sequence. Readers and forks start without selectors and attach their own.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use stratakv::retrieval::Quest;
    /// use stratakv::{Budget, ByteSize, CreateOptions, KvLayout, SelectRequest, Store, TensorView};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(16).build()?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
    /// let rows = vec![0.5_f32; 160 * 8];
    /// let tensor = TensorView::token_major(&rows, 160, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    ///
    /// let quest = sequence.attach(Arc::new(Quest))?;
    /// let selection = sequence.select(0, SelectRequest::query(&[1.0; 8]).budget(Budget::tokens(64)).selector(quest))?;
    /// assert_eq!(selection.groups().count(), 4);
    /// sequence.detach(quest)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a layer whose shape the summaries do not support. [`ErrorKind::Corruption`],
    /// [`ErrorKind::Io`]: keys that cannot be read. [`ErrorKind::MemoryLimit`]. After an error the sequence is
    /// unchanged.
    pub fn attach(&mut self, selector: Arc<dyn Selector>) -> Result<SelectorId> {
        self.attach_as(selector, false)
    }

    /// Attaches a selector, as [`Self::attach`], and stores the records of its summaries with groups that are written
    /// from now on. The next handle or fork that attaches such a selector does not read the keys of these groups.
    ///
    /// Records of another adapter, kind or shape are not used, nor are damaged ones. Groups on devices are not written
    /// again. Kinds without a record format (an embedder's own, exact keys) store nothing. Bounds (Quest, LeoAM) use
    /// the min/max records of a sequence that has them ([`StoredSummary::MinMax`](crate::StoredSummary::MinMax)).
    ///
    /// # Errors
    /// As [`Self::attach`].
    pub fn attach_stored(&mut self, selector: Arc<dyn Selector>) -> Result<SelectorId> {
        self.attach_as(selector, true)
    }

    fn attach_as(&mut self, selector: Arc<dyn Selector>, store: bool) -> Result<SelectorId> {
        let before = self.selectors.mark();
        let slots = self.slots_of(selector.as_ref()).inspect_err(|_| {
            let left = self.selectors.roll_back(&self.store.devices, before);
            self.layers.iter_mut().for_each(|layer| layer.summaries_mut().detach_from(left));
        });
        let (slots, adapters, searched) = slots?;
        if store {
            slots.iter().for_each(|slot| self.store_with_groups(*slot));
        }
        let id = self.selectors.add(AttachedSelector::new(selector, slots, adapters));
        // The account for building is more than the summaries take.
        self.account_summaries();
        self.load_clusters(id, &searched);
        Ok(id)
    }

    /// Detaches a selector, and drops the summaries that no other one needs. Their memory is free, and their records
    /// are not written with new groups. Records that are stored stay.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a selector of another sequence, or one that was detached before.
    pub fn detach(&mut self, selector: SelectorId) -> Result<()> {
        self.selectors.get(selector)?;
        let used = self.selectors.remove(selector);
        self.layers.iter_mut().for_each(|layer| layer.summaries_mut().keep(&used));
        self.account_summaries();
        Ok(())
    }

    /// Returns the slots of the kinds that a selector needs, the memory of their adapters, and the kinds whose stored
    /// clusters were searched for. Kinds that the sequence lacks are built.
    fn slots_of(&mut self, selector: &dyn Selector) -> Result<AttachedKinds> {
        let (mut slots, mut adapters, mut searched) = (Vec::new(), Vec::new(), Vec::new());
        for kind in selector.summaries() {
            let id = kind.id();
            let adapter = kind.adapter().map(|adapter| self.store.hold_adapter(adapter)).transpose()?;
            adapters.extend(adapter.clone());
            slots.push(match self.selectors.slot_of(&id) {
                Some(slot) => slot,
                None => {
                    let stored = self.build(&kind).map_err(|e| e.during(format!("summary {id}")))?;
                    let slot = self.selectors.add_kind(id.clone(), adapter);
                    if let Some(stored) = stored {
                        searched.push(id);
                        stored.loaded.into_iter().for_each(|loaded| self.selectors.load(loaded));
                    }
                    slot
                }
            });
        }
        Ok((slots, adapters, searched))
    }

    /// Has the records of a kind written with new groups, if the kind has a record format of its own.
    fn store_with_groups(&mut self, slot: usize) {
        let mut summaries = self.layers.iter().filter_map(|layer| layer.summaries().attached().get(slot));
        let stored = summaries.find_map(|summary| summary.get().stored_as()).filter(|stored| !stored.is_min_max());
        let Some(SummaryRecordId(stored)) = stored else { return };
        let catalog = lock(&self.store.catalog);
        let mut adapters = catalog.adapters.values().filter(|id| {
            let adapter = catalog.sequences.get(id).and_then(|meta| meta.adapter.as_ref());
            stored.adapter_checksum != 0 && adapter.is_some_and(|adapter| adapter.checksum == stored.adapter_checksum)
        });
        self.selectors.store(slot, adapters.next().map_or(0, |id| id.0));
    }

    /// Returns the bytes in memory of the summaries that a selector chooses by, including those that it shares. The
    /// adapter ([`Adapter::bytes`](crate::retrieval::Adapter::bytes)) does not count, because all sequences share it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a selector of another sequence.
    pub fn selector_bytes(&self, selector: SelectorId) -> Result<u64> {
        let attached = self.selectors.get(selector)?;
        let summaries = self.layers.iter().flat_map(|layer| attached.summaries(layer));
        Ok(summaries.map(|summary| summary.get().bytes() as u64).sum())
    }

    /// Returns the summaries of a layer that a selector chooses by, for its own inspection. If summaries are
    /// [streamed](SummaryResidency::Streamed), bounds have no group, and others only the groups whose records are on no
    /// device.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such layer, or a selector of another sequence.
    pub fn selector_summaries(&self, selector: SelectorId, layer: usize) -> Result<Vec<&dyn LayerSummary>> {
        let own = self.selectors.get(selector)?.summaries(self.layer(layer)?);
        Ok(own.map(AttachedSummary::in_memory).collect())
    }

    /// Selects groups of `layer` by an attached selector, as [`Self::select`] does.
    pub(super) fn select_by(
        &self,
        selector: SelectorId,
        layer: usize,
        query: &[f32],
        options: &SelectOptions,
    ) -> Result<Selection> {
        let attached = self.selectors.get(selector)?;
        let place = |e: Error| e.during(format!("select by {} in layer {layer}", attached.selector().name()));
        let state = self.layer(layer)?;
        check_query(state, query).map_err(place)?;
        if let Some(entries) = attached.selector().entries() {
            let scored = |span: &Span| self.scored(state, attached.summaries(state), span);
            return self.choose_entries((selector, entries), state, query, options, scored).map_err(place);
        }
        let span = Span::of(state, self.identity.layout.group_tokens());
        let count = span.count(options).map_err(place)?;
        let forced = span.forced(options);
        let mut scores = vec![0.0; span.len()];
        if count < span.len() && span.needs_scores(count, &forced) {
            let (shape, threads) = (state.shape(), self.store.devices.compute_threads());
            let mut request = ScoreRequest {
                query,
                shape,
                scale: options.scale.unwrap_or(1.0 / (shape.key_dim as f32).sqrt()),
                aggregation: options.aggregation,
                groups: span.groups.start as usize..span.groups.end as usize,
                forced: forced.clone().map(|forced| forced.start as usize..forced.end as usize),
                count: count.saturating_sub(span.forced_count(&forced)),
                threads: threads.as_deref(),
            };
            let mut scratch = self.reserve_scores(&span, &request);
            if scratch.is_err() && request.threads.take().is_some() {
                // One thread needs less.
                scratch = self.reserve_scores(&span, &request);
            }
            let _scratch = scratch.map_err(place)?;
            let scored = self.scored(state, attached.summaries(state), &span).map_err(place)?;
            let summaries: Vec<&dyn LayerSummary> = scored.iter().map(ScoredSummary::get).collect();
            attached.selector().score(&summaries, &request, &mut scores).map_err(place)?;
            // A selector that cannot score a group ranks it last.
            scores.iter_mut().filter(|s| s.is_nan()).for_each(|s| *s = f32::NEG_INFINITY);
        }
        let chosen = choose(span.groups.clone(), count, &forced, &scores);
        self.selection(state, &span, &chosen, options.planes)
    }

    /// Takes the memory of the scores of a layer. A selector that looks at groups alone may need them twice, with notes
    /// of each.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    fn reserve_scores(&self, span: &Span, request: &ScoreRequest<'_>) -> Result<Reservation> {
        let heads = request.query.len() / request.shape.key_dim;
        let lanes = heads.next_multiple_of(if heads > 8 { 16 } else { 8 });
        let bytes = span.len() * (self.identity.layout.group_tokens().max(2) * lanes * 4 + 96);
        let others = request.threads.map_or(0, |threads| threads.threads().saturating_sub(1));
        let each = THREAD_BYTES + 4 * size_of_val(request.query);
        self.reserve_scratch(bytes.saturating_add(others.saturating_mul(each)))
    }

    /// Takes the memory of a choice.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub(super) fn reserve_scratch(&self, bytes: usize) -> Result<Reservation> {
        self.store.devices.reserve(bytes, Category::Summaries).ok_or_else(|| {
            let text = format!("{bytes} bytes of scores do not fit into memory_limit; raise it");
            Error::new(ErrorKind::MemoryLimit, text)
        })
    }

    /// Returns memory that summaries and exact keys no longer hold to the budget.
    pub(super) fn account_summaries(&mut self) {
        self.selectors.account(&self.store.devices, &self.layers);
    }

    /// Builds the summaries of a kind for every layer, in the next slot. Layers whose state is stored are restored from
    /// it. Returns the stored clusters of the kind if it has states.
    ///
    /// Threads of the host build as many layers at a time as there is memory for.
    fn build(&mut self, kind: &Arc<dyn SummarySpec>) -> Result<Option<StoredKind>> {
        let mut stored: Option<StoredKind> = None;
        let mut built = Vec::new();
        let threads = self.store.devices.compute_threads();
        let at_once = threads.as_ref().map_or(1, |threads| threads.threads().max(1));
        let mut begun: Vec<NewSummary> = Vec::new();
        // The most bytes of finished layers, and of those that are begun.
        let (mut held, mut most) = (0, 0);
        for at in 0..self.layers.slots() {
            let Some(layer) = self.layers.get(at) else { continue };
            let mut summary = kind.layer(at, layer.shape())?;
            if self.streams_bounds(summary.as_mut())? {
                held += self.finish_layers(&mut begun, threads.as_deref(), &mut built)?;
                most = 0;
                built.push(AttachedSummary::Whole(summary));
                continue;
            }
            let groups = layer.groups() as usize;
            let mut restored = None;
            if summary.state_encoding().is_some() {
                let stored = stored.get_or_insert_with(|| self.stored_kind(&kind.id()));
                restored = self.restored_layer((at, layer), kind, stored)?;
            }
            let is_restored = restored.is_some();
            let summary = match restored {
                Some(restored) => AttachedSummary::Whole(restored),
                None => match self.suffix(at, kind)? {
                    Some(suffix) => AttachedSummary::Suffix(suffix),
                    None => AttachedSummary::Whole(summary),
                },
            };
            let own = summary.get().bytes_for(groups - summary.get().groups());
            let together = held + most + own;
            let joins = begun.len() < at_once
                && self.selectors.reserve(&self.store.devices, &self.layers, (at, 0), together).is_ok();
            if !joins {
                held += self.finish_layers(&mut begun, threads.as_deref(), &mut built)?;
                most = 0;
                self.selectors.reserve(&self.store.devices, &self.layers, (at, 0), held + own)?;
            }
            most += own;
            begun.push(NewSummary { at, summary, is_restored });
        }
        self.finish_layers(&mut begun, threads.as_deref(), &mut built)?;
        for (layer, summary) in self.layers.iter_mut().zip(built) {
            layer.summaries_mut().attach(summary);
        }
        Ok(stored)
    }

    /// Adds the sealed groups of their layers to summaries, and moves these to `built`. Returns the bytes that they
    /// take.
    ///
    /// # Errors
    /// The first error in the order of the layers.
    fn finish_layers(
        &self,
        begun: &mut Vec<NewSummary>,
        threads: Option<&dyn ComputeThreads>,
        built: &mut Vec<AttachedSummary>,
    ) -> Result<usize> {
        let mut outcomes: Vec<Result<()>> = begun.iter().map(|_| Ok(())).collect();
        let each = begun.iter_mut().zip(&mut outcomes);
        for_each(
            threads,
            each,
            || (),
            |(), (new, outcome)| {
                *outcome = self.finish_layer(new).map_err(|e| e.during(format!("layer {}", new.at)));
            },
        );
        outcomes.into_iter().collect::<Result<()>>()?;
        // Clusters take less than the keys that they are built from.
        let bytes = begun.iter().map(|new| new.summary.get().bytes_for(0)).sum();
        built.extend(begun.drain(..).map(|new| new.summary));
        Ok(bytes)
    }

    /// Adds all sealed groups of its layer to a summary.
    ///
    /// # Errors
    /// Errors of reading keys and records. Errors of the method.
    fn finish_layer(&self, new: &mut NewSummary) -> Result<()> {
        let summary = new.summary.get_mut();
        self.fill(new.at, summary)?;
        if !new.is_restored {
            summary.attached();
        }
        self.advance_new(self.layer(new.at)?, summary)
    }

    /// Makes a summary keep nothing if selections can compute it from streamed min/max records. Returns whether they
    /// can.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the sequence streams its summaries, but stores no min/max records.
    fn streams_bounds(&self, summary: &mut dyn LayerSummary) -> Result<bool> {
        if self.summary_residency() != SummaryResidency::Streamed || !summary.streams_from_min_max() {
            return Ok(false);
        }
        if self.identity.summaries == 0 {
            let text = "bounds cannot be streamed, because the sequence stores no min/max summary; create it with one";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        summary.stream();
        Ok(true)
    }

    /// Adds all sealed groups of a layer to a summary.
    fn fill(&self, layer: usize, summary: &mut dyn LayerSummary) -> Result<()> {
        let state = self.layer(layer)?;
        let shape = state.shape();
        let known = summary.groups() as u64;
        let mut group = self.restore(layer, summary, known)?;
        while group < state.groups() {
            group = self.visit(state, group, &[], &mut |group, keys, _| {
                summary.push(&KeyGroup::new(shape, keys, group)?);
                Ok(())
            })?;
            group = self.restore(layer, summary, group)?;
        }
        Ok(())
    }
}
