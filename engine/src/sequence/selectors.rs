//! Selectors of a sequence: their summaries are built from what there is, grow with it, and choose.

use super::Sequence;
use super::select::Span;
use super::suffix_summary::{Scored, newest_of};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, Reservation, lock};
use crate::options::SummaryResidency;
use crate::plan::{SelectOptions, Selection};
use crate::retrieval::{
    Bounds, KeyGroup, LayerSummary, ScoreRequest, Selector, SelectorId, SummaryRecordId, SummarySpec, choose,
};
use std::any::Any;
use std::sync::Arc;

/// Selectors and the kinds of summaries that layers keep for them.
#[derive(Default)]
pub(super) struct Methods {
    /// In the order of their numbers.
    selectors: Vec<(SelectorId, Attached)>,
    /// By slot: those of the summaries of a layer.
    kinds: Vec<SelectorSummary>,
}

struct SelectorSummary {
    id: String,
    /// Where it is written with the groups: the id of its adapter, 0 where the store has none.
    stored: Option<u64>,
    /// Holds the memory of its adapter.
    _adapter: Option<Arc<Reservation>>,
}

struct Attached {
    selector: Arc<dyn Selector>,
    /// Which kinds it needs.
    slots: Vec<usize>,
    /// Holds the memory of its adapters, which may be others of the same numbers than its kinds'.
    _adapters: Vec<Arc<Reservation>>,
}

impl Methods {
    /// Summaries of a layer that are written with its groups, with their adapter.
    pub(super) fn stored<'a>(
        &'a self,
        extras: &'a [Box<dyn LayerSummary>],
    ) -> impl Iterator<Item = (&'a dyn LayerSummary, u64)> {
        extras.iter().zip(&self.kinds).filter_map(|(extra, kind)| kind.stored.map(|adapter| (extra.as_ref(), adapter)))
    }
}

impl Sequence {
    /// Gives the sequence one more way of choosing. Summaries that it needs and that no other selector of the sequence has are
    /// taken from where they are stored with the groups ([`Self::attach_stored`]), built from the keys where they are not, read
    /// back in pieces of a megabyte, and kept in memory from then on; readers and forks start without them and attach their own.
    /// Any number of selectors choose from the same stored tokens.
    ///
    /// # Errors
    /// A layer that the selector's summaries do not suit, keys that cannot be read, [`ErrorKind::MemoryLimit`]; the sequence
    /// is as it was.
    pub fn attach(&mut self, selector: Arc<dyn Selector>) -> Result<SelectorId> {
        self.attach_as(selector, false)
    }

    /// As [`Self::attach`], and what the selector's summaries know of groups is from then on written in front of them, in the
    /// same frames: the next one to attach such a selector, after the sequence was opened again or in a fork, does not read the
    /// keys of these groups. Summaries of another adapter, kind or shape, and damaged ones, are not used. Groups on devices
    /// already are not written again. Of kinds that are not stored (an embedder's own, exact keys) nothing is written; bounds
    /// (Quest, LeoAM) come back from the min/max records of a sequence that has them ([`StoredSummary::MinMax`](crate::Summary)).
    ///
    /// # Errors
    /// As [`Self::attach`].
    pub fn attach_stored(&mut self, selector: Arc<dyn Selector>) -> Result<SelectorId> {
        self.attach_as(selector, true)
    }

    fn attach_as(&mut self, selector: Arc<dyn Selector>, store: bool) -> Result<SelectorId> {
        let before = (self.methods.kinds.len(), self.method_bytes.bytes());
        let (slots, adapters) = self.slots_of(selector.as_ref()).inspect_err(|_| self.forget_kinds(before))?;
        if store {
            slots.iter().for_each(|slot| self.store_with_groups(*slot));
        }
        let id = SelectorId::next();
        self.methods.selectors.push((id, Attached { selector, slots, _adapters: adapters }));
        // What was promised for building is more than what came of it.
        self.account_methods();
        Ok(id)
    }

    /// Takes a selector away, and the summaries that no other one needs: their memory is free, and they are not written with new
    /// groups any more. Those that are written stay where they are.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a selector of another sequence, or one that was taken away before.
    pub fn detach(&mut self, selector: SelectorId) -> Result<()> {
        self.selector(selector)?;
        let selectors = &mut self.methods.selectors;
        selectors.retain(|(id, _)| *id != selector);
        let used: Vec<bool> = (0..self.methods.kinds.len())
            .map(|slot| selectors.iter().any(|(_, attached)| attached.slots.contains(&slot)))
            .collect();
        for (_, attached) in selectors {
            attached.slots.iter_mut().for_each(|slot| *slot = used[..*slot].iter().filter(|used| **used).count());
        }
        keep(&mut self.methods.kinds, &used);
        self.layers.iter_mut().flatten().for_each(|layer| keep(&mut layer.extras, &used));
        self.account_methods();
        Ok(())
    }

    /// The kinds that a selector needs, and the memory of their adapters; kinds that are not there yet are built.
    fn slots_of(&mut self, selector: &dyn Selector) -> Result<(Vec<usize>, Vec<Arc<Reservation>>)> {
        let (mut slots, mut adapters) = (Vec::new(), Vec::new());
        for kind in selector.summaries() {
            let id = kind.id();
            let adapter = kind.adapter().map(|adapter| self.store.hold_adapter(adapter)).transpose()?;
            adapters.extend(adapter.clone());
            let found = self.methods.kinds.iter().position(|known| known.id == id);
            slots.push(match found {
                Some(at) => at,
                None => {
                    self.build(&kind).map_err(|e| e.during(format!("summary {id}")))?;
                    self.methods.kinds.push(SelectorSummary { id, stored: None, _adapter: adapter });
                    self.methods.kinds.len() - 1
                }
            });
        }
        Ok((slots, adapters))
    }

    /// Forgets all kinds behind the first ones, and gives back what was taken for them beyond `held` bytes.
    fn forget_kinds(&mut self, (first, held): (usize, usize)) {
        self.methods.kinds.truncate(first);
        self.layers.iter_mut().flatten().for_each(|layer| layer.extras.truncate(first));
        // It only shrinks.
        self.store.devices.resize(&mut self.method_bytes, held);
    }

    /// Has what the summaries of a kind know written with the groups, where it can be.
    fn store_with_groups(&mut self, slot: usize) {
        let mut extras = self.layers.iter().flatten().filter_map(|layer| layer.extras.get(slot));
        let stored = extras.find_map(|extra| extra.stored_as()).filter(|stored| !stored.is_min_max());
        let Some(SummaryRecordId(stored)) = stored else { return };
        let catalog = lock(&self.store.catalog);
        let mut adapters = catalog.adapters.values().filter(|id| {
            let adapter = catalog.sequences.get(id).and_then(|meta| meta.adapter.as_ref());
            stored.adapter_checksum != 0 && adapter.is_some_and(|adapter| adapter.checksum == stored.adapter_checksum)
        });
        self.methods.kinds[slot].stored = Some(adapters.next().map_or(0, |id| id.0));
    }

    /// Bytes in memory of the summaries that a selector chooses by, those that it shares included. Not those of its adapter
    /// ([`Adapter::bytes`](crate::retrieval::Adapter::bytes)), which all sequences share.
    ///
    /// # Errors
    /// A selector of another sequence.
    pub fn selector_bytes(&self, selector: SelectorId) -> Result<u64> {
        let attached = self.selector(selector)?;
        let layers = self.layers.iter().flatten();
        Ok(layers
            .flat_map(|layer| attached.slots.iter().filter_map(|slot| layer.extras.get(*slot)))
            .map(|s| s.bytes() as u64)
            .sum())
    }

    /// The summaries of a layer that a selector chooses by, for its own inspection. Of those that are
    /// [streamed](crate::Summaries::Streamed): bounds know no group, others the newest, those of which records stand on devices left out.
    ///
    /// # Errors
    /// No such layer, a selector of another sequence.
    pub fn selector_summaries(&self, selector: SelectorId, layer: usize) -> Result<Vec<&dyn LayerSummary>> {
        let own = Self::own_summaries(self.selector(selector)?, self.layer(layer)?);
        Ok(own.map(|summary| newest_of(summary).map_or(summary, |newest| newest.kept())).collect())
    }

    /// As [`Self::select`], by a selector of this sequence instead of its min/max records.
    ///
    /// # Errors
    /// As [`Self::select`]; [`ErrorKind::InvalidArgument`]: a selector of another sequence; [`ErrorKind::MemoryLimit`]: no memory
    /// for the scores; what the selector reports.
    pub fn select_with(
        &self,
        selector: SelectorId,
        layer: usize,
        query: &[f32],
        options: impl Into<SelectOptions>,
    ) -> Result<Selection> {
        let options = options.into();
        let method = &self.selector(selector)?.selector;
        let place = |e: Error| e.during(format!("select by {} in layer {layer}", method.name()));
        let state = self.layer(layer)?;
        super::select::check_query(state, query).map_err(place)?;
        let group = self.who.layout.group_tokens();
        let span = Span::of(state, group);
        let count = span.count(&options).map_err(place)?;
        let forced = span.forced(&options);
        let mut scores = vec![0.0; span.len()];
        if count < span.len() && span.needs_scores(count, &forced) {
            let shape = state.shape();
            let scale = options.scale.unwrap_or(1.0 / (shape.key_dim as f32).sqrt());
            let heads = query.len() / shape.key_dim;
            let lanes = heads.next_multiple_of(if heads > 8 { 16 } else { 8 });
            // The scores of a layer once; a method that looks at groups alone may have them twice, with notes of each.
            let bytes = span.len() * (group.max(2) * lanes * 4 + 96);
            let reservation = self.store.devices.reserve(bytes, Category::Summaries);
            let _scratch = reservation.ok_or_else(|| {
                let text = format!("{bytes} bytes of scores do not fit in what memory_limit has left");
                place(Error::new(ErrorKind::MemoryLimit, text))
            })?;
            let ask = ScoreRequest {
                query,
                shape,
                scale,
                aggregation: options.aggregation,
                groups: span.groups.start as usize..span.groups.end as usize,
                forced: forced.clone().map(|forced| forced.start as usize..forced.end as usize),
                count: count.saturating_sub(span.forced_count(&forced)),
            };
            let own = Self::own_summaries(self.selector(selector)?, state);
            let scored = self.scored(state, own, &span).map_err(place)?;
            let summaries: Vec<&dyn LayerSummary> = scored.iter().map(Scored::get).collect();
            method.score(&summaries, &ask, &mut scores).map_err(place)?;
            // A method that cannot tell says the least, not the most.
            scores.iter_mut().filter(|s| s.is_nan()).for_each(|s| *s = f32::NEG_INFINITY);
        }
        let chosen = choose(span.groups.clone(), count, &forced, &scores);
        self.view(state, &span, &chosen, options.planes)
    }

    /// What a layer has of the summaries of a selector.
    fn own_summaries<'a>(
        attached: &'a Attached,
        layer: &'a super::Layer,
    ) -> impl Iterator<Item = &'a dyn LayerSummary> + use<'a> {
        attached.slots.iter().filter_map(|slot| layer.extras.get(*slot)).map(AsRef::as_ref)
    }

    fn selector(&self, selector: SelectorId) -> Result<&Attached> {
        let found = self.methods.selectors.iter().find(|(id, _)| *id == selector);
        let unknown = || Error::new(ErrorKind::InvalidArgument, "a selector of another sequence");
        found.map(|(_, attached)| attached).ok_or_else(unknown)
    }

    /// Accounts for what the summaries of selectors hold once `layer` has `groups` more.
    pub(super) fn reserve_methods(&mut self, layer: usize, groups: usize, more: usize) -> Result<()> {
        let held = self.methods_bytes(layer, groups) + more;
        if held > self.method_bytes.bytes() && !self.store.devices.resize(&mut self.method_bytes, held) {
            let text = format!("summaries of {held} bytes do not fit in what memory_limit has left");
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        Ok(())
    }

    /// Gives back what summaries and kept keys do not hold any more.
    pub(super) fn account_methods(&mut self) {
        let held = self.methods_bytes(0, 0);
        // It only shrinks.
        self.store.devices.resize(&mut self.method_bytes, held);
    }

    /// Bytes of the summaries of selectors once `layer` has `groups` more.
    fn methods_bytes(&self, layer: usize, groups: usize) -> usize {
        let bytes = |l: &super::Layer| -> usize {
            let groups = if l.index == layer { groups } else { 0 };
            let kept = l.kept.as_ref().map_or(0, |kept| kept.bytes_for(groups));
            l.extras.iter().map(|summary| summary.bytes_for(groups)).sum::<usize>() + kept
        };
        self.layers.iter().flatten().map(bytes).sum()
    }

    fn build(&mut self, kind: &Arc<dyn SummarySpec>) -> Result<()> {
        let mut built = Vec::new();
        let mut held = 0;
        for at in 0..self.layers.len() {
            let Some(layer) = &self.layers[at] else { continue };
            let mut summary = kind.layer(at, layer.shape())?;
            if self.streams_bounds(summary.as_mut())? {
                built.push(summary);
                continue;
            }
            let groups = layer.groups() as usize;
            if let Some(newest) = self.newest(at, kind)? {
                summary = Box::new(newest);
            }
            held += summary.bytes_for(groups - summary.groups());
            self.reserve_methods(at, 0, held)?;
            self.fill(at, summary.as_mut()).map_err(|e| e.during(format!("layer {at}")))?;
            built.push(summary);
        }
        for (layer, summary) in self.layers.iter_mut().flatten().zip(built) {
            layer.extras.push(summary);
        }
        Ok(())
    }

    /// Whether a summary is made of min/max records that are streamed: nothing of it is kept then.
    fn streams_bounds(&self, summary: &mut dyn LayerSummary) -> Result<bool> {
        let bounds = (summary as &mut dyn Any).downcast_mut::<Bounds>();
        let (Some(bounds), SummaryResidency::Streamed) = (bounds, self.summary_residency()) else { return Ok(false) };
        if self.who.summaries == 0 {
            let text = "bounds are to be streamed, and the sequence carries no min/max summary: create it with one";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        bounds.stream();
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

/// Keeps the elements that are marked.
fn keep<T>(list: &mut Vec<T>, marks: &[bool]) {
    let mut marks = marks.iter();
    list.retain(|_| marks.next().copied().unwrap_or(true));
}

impl Span {
    /// Groups that a budget has room for.
    pub(super) fn count(&self, options: &SelectOptions) -> Result<usize> {
        if let Some(scale) = options.scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
            let text = format!("a scale of {scale}; finite and above 0");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let visible = (self.tokens - self.first_token) as usize;
        Ok(self.group_count(options.budget.of(visible)?))
    }
}
