//! Methods that choose entries. What a reopened sequence selects must be what a fresh one with the same tokens selects.
//!
//! 1. The method of the case is attached to a sequence, and profiled if it needs recorded queries.
//! 2. Its summaries are built a second time from the keys of the model, without a store.
//! 3. Both choose for the same query. Each KV head must attend to the same tokens.
//!
//! The model does not know the rounded keys of an encoded layer, so such layers are left out.

use super::{Runner, StepResult, Stop, failed};
use crate::sim::content::{CaseShape, Contents, Token};
use crate::sim::coverage;
use std::sync::Arc;
use stratakv::retrieval::{
    ChosenEntries, EntryRequest, EntrySelector, HeadAggregation, KeyGroup, LayerSummary, MethodSpec, QueryProfile,
    SealedKeys, Selector, SelectorId,
};
use stratakv::{Budget, Error, ErrorKind, SelectOptions, SelectRequest, Selection, Sequence, Store};

/// The recorded queries of a profile.
const QUERIES: usize = 3;
/// The fewest groups of a layer that is compared.
const GROUPS_MIN: usize = 3;
/// The tokens from which on a method has clusters by k-means.
const CLUSTERED: usize = 320;

/// The entries of each KV head, in rising order.
type Entries = Vec<Vec<u64>>;

impl Runner<'_> {
    /// Attaches the method of the case to a sequence with these tokens, compares its selections, and detaches it.
    /// `Ok(Err)` is an error of the store.
    pub(super) fn compare_entries(
        &mut self,
        (store, sequence): (&Store, &mut Sequence),
        layers: &[Vec<Token>],
        contents: Option<&[Contents]>,
    ) -> StepResult<stratakv::Result<()>> {
        let Some(method) = &self.case.entries else { return Ok(Ok(())) };
        let compared: Vec<usize> =
            (0..self.shape.layers).filter(|layer| layers[*layer].len() / self.shape.group >= GROUPS_MIN).collect();
        if compared.is_empty() {
            return Ok(Ok(()));
        }
        let selector = method.parse().and_then(|spec: MethodSpec| spec.selector(None));
        let selector = selector.map_err(|e| Stop::Failed(format!("method {method}: {e}")))?;
        let before = super::states::taken();
        let id = match sequence.attach(Arc::clone(&selector)) {
            Ok(id) => id,
            Err(e) => return Ok(no_memory_or(e)),
        };
        let is_restored = self.check_taken(before, (&*sequence, id), layers)?;
        let mut outcome = Ok(Ok(()));
        for layer in compared {
            let own = contents.and_then(|contents| contents.get(layer));
            let method = (id, selector.as_ref(), is_restored);
            outcome = self.compare_layer((store, sequence), method, (layer, &layers[layer]), own);
            if !matches!(outcome, Ok(Ok(()))) {
                break;
            }
        }
        sequence.detach(id).map_err(|e| Stop::Failed(format!("detach: {e}")))?;
        outcome
    }

    fn compare_layer(
        &mut self,
        (store, sequence): (&Store, &mut Sequence),
        (id, selector, is_restored): (SelectorId, &dyn Selector, bool),
        (layer, tokens): (usize, &[Token]),
        contents: Option<&Contents>,
    ) -> StepResult<stratakv::Result<()>> {
        let selection = match self.select_entries(sequence, (id, selector), layer, tokens.len()) {
            Ok(selection) => selection,
            Err(e) => return Ok(no_memory_or(e)),
        };
        // A method that stayed attached has clusters of the tokens of then. So has one that was restored, unless a
        // profile has made it new.
        let is_new = !is_restored || self.takes_profile(selector, layer).unwrap_or(false);
        if is_new && !self.stored.is_kept(sequence.id().0) && !self.shape.encodes(layer, 0) {
            self.compare_with_fresh(sequence, selector, &selection, (layer, tokens))?;
        }
        if contents.is_some() && selection.stored_pages() > 0 {
            self.coverage.add(coverage::PAGED);
        }
        self.check_pages((store, sequence), &selection, (layer, tokens), contents)
    }

    /// Compares the entries of a selection with those that a fresh sequence chooses.
    fn compare_with_fresh(
        &mut self,
        sequence: &Sequence,
        selector: &dyn Selector,
        selection: &Selection,
        (layer, tokens): (usize, &[Token]),
    ) -> StepResult {
        let found = entries_of(&self.shape, selection);
        let wrong = |what: String| format!("sequence {}, layer {layer}, {}: {what}", sequence.id(), selector.name());
        let expected = fresh(&self.shape, selector, layer, tokens).map_err(|e| Stop::Failed(wrong(e.to_string())))?;
        if found != expected {
            return failed(wrong(format!("it selects {found:?}, a fresh sequence {expected:?}")));
        }
        self.coverage.add(coverage::ENTRIES);
        if tokens.len() >= CLUSTERED {
            self.coverage.add(coverage::CLUSTERS);
        }
        Ok(())
    }

    /// Selects by a method that was just attached. Profiles the layer first if the method needs that.
    fn select_entries(
        &self,
        sequence: &mut Sequence,
        (id, selector): (SelectorId, &dyn Selector),
        layer: usize,
        tokens: usize,
    ) -> stratakv::Result<Selection> {
        self.profile_layer(sequence, (id, selector), layer)?;
        let (query, options) = (query(&self.shape, layer), options(tokens));
        sequence.select(layer, SelectRequest::query(&query).options(options).selector(id))
    }

    /// Returns whether a method is built from recorded queries.
    fn takes_profile(&self, selector: &dyn Selector, layer: usize) -> stratakv::Result<bool> {
        let mut takes_profile = false;
        for kind in selector.summaries() {
            takes_profile |= kind.layer(layer, self.shape.keys())?.profile_bytes(QUERIES).is_some();
        }
        Ok(takes_profile)
    }

    /// Profiles a layer if the method needs that.
    pub(super) fn profile_layer(
        &self,
        sequence: &mut Sequence,
        (id, selector): (SelectorId, &dyn Selector),
        layer: usize,
    ) -> stratakv::Result<()> {
        if self.takes_profile(selector, layer)? {
            let queries = recorded(&self.shape, layer);
            let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
            sequence.profile(id, layer, &queries, None)?;
        }
        Ok(())
    }
}

/// Returns an error, unless there was no memory for a method. Cases have little.
fn no_memory_or(e: Error) -> stratakv::Result<()> {
    if e.kind() == ErrorKind::MemoryLimit { Ok(()) } else { Err(e) }
}

pub(super) fn entries_of(shape: &CaseShape, selection: &Selection) -> Entries {
    let sorted = |head| {
        let mut own: Vec<u64> = selection.entries(head).collect();
        own.sort_unstable();
        own
    };
    (0..shape.keys().kv_heads).map(sorted).collect()
}

pub(super) fn query(shape: &CaseShape, layer: usize) -> Vec<f32> {
    (0..shape.width()).map(|i| ((i * 7 + layer) % 5) as f32 - 2.0).collect()
}

fn recorded(shape: &CaseShape, layer: usize) -> Vec<Vec<f32>> {
    (0..QUERIES).map(|at| (0..shape.width()).map(|i| ((i * 5 + at * 3 + layer) % 7) as f32 - 3.0).collect()).collect()
}

pub(super) fn options(tokens: usize) -> SelectOptions {
    SelectOptions::new(Budget::tokens(tokens / 2)).aggregation(HeadAggregation::Softmax)
}

/// Returns what a method selects in a layer of a fresh sequence with these tokens, of which half may be attended. It
/// follows the rules of `docs/internals/clusters.md`: groups that the method does not know are attended whole, and so
/// are the tail, or the newest group if there is no tail.
fn fresh(shape: &CaseShape, selector: &dyn Selector, layer: usize, tokens: &[Token]) -> stratakv::Result<Entries> {
    let keys = shape.keys();
    let planes: Vec<Vec<u8>> =
        tokens.chunks_exact(keys.group_tokens).map(|group| shape.key_plane(layer, group)).collect();
    let group = |index: usize| KeyGroup::new(keys, &planes[index], index as u64);
    let recorded = recorded(shape, layer);
    let queries: Vec<&[f32]> = recorded.iter().map(Vec::as_slice).collect();
    let scale = 1.0 / (keys.key_dim as f32).sqrt();
    let mut built: Vec<Box<dyn LayerSummary>> = Vec::new();
    for kind in selector.summaries() {
        let mut own = kind.layer(layer, keys)?;
        let mut sealed = SealedKeys::new(keys, 0);
        for index in 0..planes.len() {
            sealed.push(&group(index)?);
            own.push(&group(index)?);
        }
        own.attached();
        let mut wanted = own.advance()?;
        while !wanted.is_empty() {
            for index in wanted {
                own.supply(&group(index as usize)?);
            }
            wanted = own.advance()?;
        }
        if own.profile_bytes(QUERIES).is_some() {
            own.profile(&QueryProfile { keys: &sealed, shape: keys, queries: &queries, scale })?;
        }
        built.push(own);
    }
    let summaries: Vec<&dyn LayerSummary> = built.iter().map(AsRef::as_ref).collect();
    let Some(method) = selector.entries() else { return Ok(Vec::new()) };
    let newest = usize::from(tokens.len().is_multiple_of(keys.group_tokens));
    let choosable = method.covered_groups(&summaries)?.min(planes.len() - newest) * keys.group_tokens;
    let chosen = choose(method, &summaries, shape, (layer, scale), (choosable, tokens.len()))?;
    let mut heads = chosen.heads;
    if heads.len() == 1 {
        heads = vec![heads.swap_remove(0); keys.kv_heads];
    }
    let whole = choosable as u64..tokens.len() as u64;
    Ok(heads
        .into_iter()
        .map(|own| {
            let mut own: Vec<u64> = own.into_iter().map(u64::from).chain(whole.clone()).collect();
            own.sort_unstable();
            own
        })
        .collect())
}

/// Has a method choose among the first `choosable` of `tokens` tokens.
fn choose(
    method: &dyn EntrySelector,
    summaries: &[&dyn LayerSummary],
    shape: &CaseShape,
    (layer, scale): (usize, f32),
    (choosable, tokens): (usize, usize),
) -> stratakv::Result<ChosenEntries> {
    let (query, shape) = (query(shape, layer), shape.keys());
    let budget = (tokens / 2).saturating_sub(tokens - choosable);
    if budget.min(choosable) == 0 {
        return Ok(ChosenEntries { heads: vec![Vec::new()], ..ChosenEntries::default() });
    }
    let aggregation = HeadAggregation::Softmax;
    method.choose(summaries, &EntryRequest { query: &query, shape, scale, aggregation, tokens: 0..choosable, budget })
}
