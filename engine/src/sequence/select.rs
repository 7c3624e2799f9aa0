//! Selecting: which groups of a layer a decode step attends to.
//!
//! 1. The span gives the groups in the layer's window, and those that every selection includes.
//! 2. If the budget leaves a choice, min/max records give an upper bound of each group's score.
//! 3. The groups with the highest bounds fill the budget.
//! 4. [`Sequence::selection`] finds where each chosen group is, in memory or in a frame.
//!
//! A selection is a snapshot: it pins the frames and buffers that it names, so later appends, cuts and moves of frames
//! do not affect it.

use super::errors::lost_group;
use super::handle::Sequence;
use super::layer::LayerState;
use super::span::Span;
use crate::attention::MAX_Q_HEADS;
use crate::catalog::{BlockPlace, Extent, Source};
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::dot_fn;
use crate::log::Tail;
use crate::plan::{
    AttendedEntries, Choice, EntryLimits, GroupEntries, GroupSource, KeySource, PlaneSet, SelectOptions, SelectRequest,
    SelectedGroup, SelectedTail, Selection, SelectionInner,
};
use crate::retrieval::choose;
use crate::retrieval::{KeptOutliers, upper_bounds};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::min_max_element;

impl Sequence {
    /// Returns whether a selection is of this handle.
    pub(crate) fn made(&self, selection: &Selection) -> bool {
        self.handle == selection.inner.handle
    }

    /// Selects what a step attends to in `layer`: the groups that a query chooses, given groups or entries, or
    /// everything.
    ///
    /// A query `[q_heads, key_dim]` ranks groups by the upper bound of their scores, summed over the query heads
    /// (min/max summaries; Quest), or by the [selector](SelectRequest::selector) of the request. The tail is always
    /// selected and counts against the budget; without a tail the newest group is. If the budget is smaller than that,
    /// exactly that is selected. A layer with a sliding window selects inside the window. A budget of everything needs
    /// no summary.
    ///
    /// ```
    /// use stratakv::{
    ///     Budget, ByteSize, CreateOptions, Durability, KvLayout, SelectRequest, Store, StoredSummary, TensorView,
    /// };
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(16).build()?;
    /// let options = CreateOptions::new().store_summary(StoredSummary::MinMax);
    /// let mut sequence = store.create_sequence(&layout, options)?;
    /// let rows = vec![0.5_f32; 160 * 8];
    /// let tensor = TensorView::token_major(&rows, 160, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    /// sequence.commit(Durability::Sync)?;
    ///
    /// let query = [1.0_f32; 8];
    /// let selection = sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(64)))?;
    /// assert_eq!(selection.groups().count(), 4);
    /// assert_eq!(sequence.select(0, SelectRequest::groups(&[0, 7]))?.tokens(), 32);
    /// assert_eq!(sequence.select(0, SelectRequest::all())?.tokens(), 160);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such layer, a layer without tokens, or a [`PlaneSet`] that the layer does not
    /// have.
    ///
    /// Queries: [`ErrorKind::InvalidArgument`]: a query of the wrong shape, of more than [`MAX_Q_HEADS`] heads, or not
    /// finite. Also a budget of zero, or a scale that is not finite and above 0. Also a sequence without min/max
    /// summaries, or a selector of another sequence. [`ErrorKind::MemoryLimit`]: no memory for the scores. Errors of
    /// the selector.
    ///
    /// Groups: [`ErrorKind::InvalidArgument`]: groups out of order, or outside of the layer's window.
    ///
    /// Entries: [`ErrorKind::InvalidArgument`]: as for groups. Also a head or token that the layer does not have, an
    /// item without heads or tokens, or a head that is named twice for a group.
    ///
    /// If summaries are [streamed](crate::SummaryResidency::Streamed): [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]:
    /// no memory for the records of the layer within ten seconds. If records are damaged, errors of reading the keys.
    pub fn select(&self, layer: usize, request: SelectRequest<'_>) -> Result<Selection> {
        let planes = request.options.planes;
        match (request.choice, request.selector) {
            (Choice::Query(query), Some(selector)) => self.select_by(selector, layer, query, &request.options),
            (Choice::Query(query), None) => self.select_by_min_max(layer, query, &request.options),
            (_, Some(_)) => {
                let text = "select: a selector needs a query to score; give it one, or select without a selector";
                Err(Error::new(ErrorKind::InvalidArgument, text))
            }
            (Choice::Groups(groups), None) => self.select_groups(layer, groups, planes),
            (Choice::Entries(entries), None) => self.select_entries(layer, entries, planes),
            (Choice::All, None) => {
                let state = self.layer(layer)?;
                let span = Span::of(state, self.identity.layout.group_tokens());
                let chosen: Vec<u64> = span.groups.clone().collect();
                self.selection(state, &span, &chosen, planes)
            }
        }
    }

    fn select_by_min_max(&self, layer: usize, query: &[f32], options: &SelectOptions) -> Result<Selection> {
        let state = self.layer(layer)?;
        let place = |e: Error| e.during(format!("select in layer {layer}"));
        check_query(state, query).map_err(place)?;
        let span = Span::of(state, self.identity.layout.group_tokens());
        let count = span.count(options).map_err(place)?;
        let forced = span.forced(options);
        let mut scores = Vec::new();
        if count < span.len() && span.needs_scores(count, &forced) {
            scores.reserve_exact(span.len());
            let groups = span.groups.start as usize..span.groups.end as usize;
            let heads = usize::from(state.geometry().kv_heads);
            match state.summaries().min_max() {
                Some(own) => {
                    let dot = dot_fn(own.dtype());
                    upper_bounds(query, heads, own.record(), own.pieces(groups), dot, &mut scores);
                }
                None if self.streams_min_max() => {
                    let read = self.layer_records(state, span.groups.clone()).map_err(place)?;
                    let dot = dot_fn(read.element());
                    upper_bounds(query, heads, read.record(), read.slices(groups), dot, &mut scores);
                }
                None => {
                    let text = "the sequence stores no min/max summary; create it with one, or select everything";
                    return Err(place(Error::new(ErrorKind::InvalidArgument, text)));
                }
            }
        } else {
            scores.resize(span.len(), 0.0);
        }
        let chosen = choose(span.groups.clone(), count, &forced, &scores);
        self.selection(state, &span, &chosen, options.planes)
    }

    /// Returns the indices of the devices with a copy of a group, in the order of the copies; none for a group in
    /// memory only.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layer has no such group.
    pub fn group_devices(&self, layer: usize, group: u64) -> Result<Vec<u16>> {
        let state = self.layer(layer)?;
        if group >= state.tokens() / self.identity.layout.group_tokens() as u64 {
            let text = format!("layer {layer} has no group {group}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let place =
            state.table().find(group).and_then(|extent| extent.place(group, state.block(), state.geometry().planes()));
        let copies = |place: BlockPlace| (0..place.frame.copies()).map(|at| place.frame.copy(at).0.key.0.0).collect();
        Ok(place.map(copies).unwrap_or_default())
    }

    fn select_groups(&self, layer: usize, groups: &[u64], planes: PlaneSet) -> Result<Selection> {
        let state = self.layer(layer)?;
        let span = Span::of(state, self.identity.layout.group_tokens());
        let rising = groups.windows(2).all(|pair| pair[0] < pair[1]);
        if !rising || groups.iter().any(|group| !span.groups.contains(group)) {
            let text = format!("select: groups must rise and be in {:?}, the groups of layer {layer}", span.groups);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.selection(state, &span, groups, planes)
    }

    fn select_entries(&self, layer: usize, entries: &[GroupEntries], planes: PlaneSet) -> Result<Selection> {
        let state = self.layer(layer)?;
        let group_tokens = self.identity.layout.group_tokens();
        let span = Span::of(state, group_tokens);
        let limits = EntryLimits {
            kv_heads: usize::from(state.geometry().kv_heads),
            group_tokens,
            groups: span.groups.clone(),
            first_token: span.first_token,
        };
        let (groups, attended) = limits.check(entries).map_err(|e| e.during(format!("layer {layer}")))?;
        let mut selection = self.selection(state, &span, &groups, planes)?;
        // The selection is new, so nothing else refers to it.
        if let Some(inner) = Arc::get_mut(&mut selection.inner) {
            inner.groups.iter_mut().zip(attended).for_each(|(group, entries)| group.entries = entries);
        }
        Ok(selection)
    }

    /// Selects groups without the tail, whatever the layer's window is.
    ///
    /// # Errors
    /// As [`Self::select`].
    pub(crate) fn stored_groups(&self, layer: usize, groups: Range<u64>) -> Result<Selection> {
        let state = self.layer(layer)?;
        let span = Span::all(state.tokens(), self.identity.layout.group_tokens());
        let mut selection = self.selection(state, &span, &groups.collect::<Vec<_>>(), PlaneSet::KeysAndValues)?;
        // The caller reads everything once, so nothing of it is worth caching.
        if let Some(inner) = Arc::get_mut(&mut selection.inner) {
            inner.cache = None;
        }
        Ok(selection)
    }

    /// Returns the tail of a layer and adds its planes `[kv_heads, tokens, dim]`, keys then values, to `out`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such layer.
    pub(crate) fn stored_tail(&self, layer: usize, out: &mut Vec<u8>) -> Result<Option<Tail>> {
        let layer = self.layer(layer)?;
        let Some(tail) = layer.tail_piece() else { return Ok(None) };
        let mut parts = Vec::new();
        (0..2).try_for_each(|plane| layer.rows(&tail, plane, &mut parts))?;
        parts.iter().for_each(|part| out.extend_from_slice(part));
        Ok(Some(tail))
    }

    /// Replaces `out` with the min/max records of groups, as they are stored. Returns their element type; none if the
    /// sequence stores none.
    ///
    /// # Errors
    /// As [`Self::select`], if summaries are streamed.
    pub(crate) fn stored_summaries(
        &self,
        layer: usize,
        groups: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<Option<DType>> {
        let state = self.layer(layer)?;
        out.clear();
        if self.streams_min_max() {
            self.encoded_records(state, groups, out)?;
            return Ok(Some(min_max_element(self.identity.layout.dtype())));
        }
        let Some(summary) = state.summaries().min_max() else { return Ok(None) };
        summary.encoded(groups.start as usize..groups.end as usize).for_each(|piece| out.extend_from_slice(piece));
        Ok(Some(summary.dtype()))
    }

    /// Returns the selection of `chosen` groups, in rising order, and of the tail.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a layer without tokens, or without the planes.
    pub(super) fn selection(
        &self,
        state: &LayerState,
        span: &Span,
        chosen: &[u64],
        planes: PlaneSet,
    ) -> Result<Selection> {
        if state.tokens() == 0 {
            let text = format!("select: layer {} has no tokens yet", state.index());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if planes != PlaneSet::KeysAndValues && state.geometry().value_dim == 0 {
            let text = format!("select: layer {} has no V plane: its values are a part of the keys", state.index());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut groups = Vec::with_capacity(chosen.len());
        for (&group, extent) in chosen.iter().zip(state.table().find_all(chosen)) {
            let source = source(state, group, extent)?;
            let keys = KeySource::Stored;
            let entries = AttendedEntries::AllHeads(span.positions(group));
            let mut selected = SelectedGroup { index: group, entries, source, keys, beside_pages: None };
            match planes {
                PlaneSet::KeysAndValues => {}
                PlaneSet::ValuesOnly => selected.leave_keys(state.block(), KeySource::Absent),
                PlaneSet::ReconstructedKeys => use_keys_in_memory(state, &mut selected)?,
            }
            groups.push(selected);
        }
        let needed = groups.iter().any(|group| matches!(group.keys, KeySource::Rebuilt));
        let rebuilt = state.summaries().exact_keys().filter(|_| needed).map(|keys| Arc::clone(keys.rebuilt()));
        let tail_tokens = state.tail_tokens();
        let tail = (tail_tokens > 0).then(|| SelectedTail {
            block: Arc::clone(state.tail()),
            tokens: tail_tokens,
            positions: span.positions(span.groups.end),
        });
        let inner = SelectionInner {
            layout: self.identity.layout.clone(),
            layer: state.index(),
            length: state.tokens(),
            groups,
            pages: Vec::new(),
            tail,
            rebuilt,
            instance: self.store.devices.identity.instance,
            handle: self.handle,
            planes,
            cache: self.cache.clone(),
            cluster_runs: None,
            clusters: None,
        };
        Ok(Selection { inner: Arc::new(inner) })
    }
}

/// Makes a selected group use the keys that are in memory.
fn use_keys_in_memory(state: &LayerState, group: &mut SelectedGroup) -> Result<()> {
    let Some(kept) = state.summaries().exact_keys() else {
        let text = format!("select: call Sequence::reconstruct_keys first; layer {} has no such keys", state.index());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    };
    // A group in memory has its keys.
    if !matches!(group.source, GroupSource::Disk { .. }) {
        return Ok(());
    }
    match kept.find(group.index) {
        None => {}
        Some(KeptOutliers::Block(block)) => group.source = GroupSource::Copied(block),
        Some(KeptOutliers::Plane(plane)) => group.leave_keys(state.block(), KeySource::Kept(plane)),
        Some(KeptOutliers::Reconstructed) => group.leave_keys(state.block(), KeySource::Rebuilt),
    }
    Ok(())
}

/// Returns where a group is.
///
/// # Errors
/// [`ErrorKind::Corruption`]: nowhere.
fn source(state: &LayerState, group: u64, extent: Option<&Extent>) -> Result<GroupSource> {
    if let Some(block) = state.building_block(group) {
        return Ok(GroupSource::Copied(block.into()));
    }
    let lost = || lost_group(group, state.index());
    let extent = extent.ok_or_else(lost)?;
    if let Source::Memory(run) = &extent.source {
        let index = (group - extent.first_group) as usize + extent.skip;
        return Ok(GroupSource::Run { run: Arc::clone(run), index });
    }
    let place = extent.place(group, state.block(), state.geometry().planes()).ok_or_else(lost)?;
    Ok(GroupSource::Disk { frame: place.frame, offset: place.offset, checksum: place.checksum })
}

/// Checks that a query is `[q_heads, key_dim]` and finite.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`].
pub(super) fn check_query(state: &LayerState, query: &[f32]) -> Result<()> {
    let row = usize::from(state.geometry().key_dim);
    let heads = usize::from(state.geometry().kv_heads);
    if query.is_empty() || !query.len().is_multiple_of(row * heads) {
        let text = format!(
            "query of {} elements: it must be [q_heads, {row}] with q_heads a multiple of {heads}",
            query.len()
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if query.len() / row > MAX_Q_HEADS {
        let text = format!("query of {} heads: at most {MAX_Q_HEADS} are supported", query.len() / row);
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    match query.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let text = format!("element {} of query head {} is {}", at % row, at / row, query[at]);
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}
