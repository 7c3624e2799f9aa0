//! Selectors of a sequence: attaching them, building their summaries, and choosing by them.
//!
//! Attaching a selector has three steps:
//!
//! 1. Every layer starts an empty summary of each kind that the selector needs and the sequence lacks.
//! 2. The summary takes its stored state (see `cluster_states`), the stored records of groups, and the keys of groups
//!    without records (see `summary_build`).
//! 3. From then on, each append adds the sealed groups to it.
//!
//! If summaries are streamed, a layer keeps nothing of a kind that min/max records give, and only the suffix without
//! stored records of other kinds (see `suffix_summary`).

use super::attached_summary::AttachedSummary;
use super::handle::Sequence;
use super::select::check_query;
use super::selector_set::AttachedSelector;
use super::span::Span;
use super::suffix_summary::ScoredSummary;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, Reservation, lock};
use crate::plan::{SelectOptions, Selection};
use crate::retrieval::{LayerSummary, ScoreRequest, Selector, SelectorId, SummaryRecordId, choose, sharing_threads};
use std::sync::Arc;

/// The most bytes that another thread keeps for the tiles of a layer.
const THREAD_BYTES: usize = 128 << 10;

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
    /// [streamed](crate::SummaryResidency::Streamed), bounds have no group. Others have only the groups whose records
    /// are on no device.
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
            let _scratch = self.reserve_scores(&mut request).map_err(place)?;
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
    /// of each. A request without memory for its threads loses them: memory of reads in flight is not worth them.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    fn reserve_scores(&self, request: &mut ScoreRequest<'_>) -> Result<Reservation> {
        let (shape, groups) = (request.shape, request.groups.len());
        let heads = request.query.len() / shape.key_dim;
        let lanes = heads.next_multiple_of(if heads > 8 { 16 } else { 8 });
        let bytes = groups * (shape.group_tokens.max(2) * lanes * 4 + 96);
        if let Some(threads) = request.threads {
            let others = sharing_threads(threads.threads(), groups, shape.group_tokens * lanes) - 1;
            // Each has a tile, the query in the forms of the method, and widened keys of a group.
            let each = THREAD_BYTES + 4 * size_of_val(request.query) + 4 * shape.width() * (shape.group_tokens + heads);
            let more = bytes.saturating_add(others.saturating_mul(each));
            let both = (others > 0).then(|| self.store.devices.budget.try_reserve(more, Category::Summaries));
            if let Some(both) = both.flatten() {
                return Ok(both);
            }
            request.threads = None;
        }
        self.reserve_scratch(bytes)
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
}
