//! Selecting: which groups of a layer a step attends to.

use super::Sequence;
use super::layer::Layer;
use crate::attention::{HeadMask, MAX_Q_HEADS, TokenMask};
use crate::catalog::{BlockPlace, Extent, Source};
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::dot_fn;
use crate::log::Tail;
use crate::plan::{
    GroupSource, KeySource, PlaneSet, SelectOptions, SelectedGroup, SelectedTail, Selection, SelectionInner,
};
use crate::retrieval::choose;
use crate::retrieval::{KeptOutliers, MinMax, upper_bounds};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;

impl Sequence {
    /// Selects what `query` `[q_heads, key_dim]` attends to in `layer` under a budget, by the upper bound of its scores
    /// summed over the query heads (min/max summaries). The tail, or the newest group while there is none, is always part
    /// of it and counts; when the budget is smaller than that, exactly that is selected. Layers with a sliding window
    /// select inside it. A budget of everything needs no summary.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a query of the wrong shape, of more than [`MAX_Q_HEADS`] heads or not finite, a budget of zero, a scale that is not finite and
    /// above 0, a layer that has no tokens yet, a sequence without the summary that choosing needs, or [`PlaneSet`] that the layer does not have.
    /// Where summaries are [streamed](crate::Summaries::Streamed): [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no memory for those
    /// of the layer, for ten seconds; and what reading keys says where records are damaged and are made anew.
    pub fn select(&self, layer: usize, query: &[f32], options: impl Into<SelectOptions>) -> Result<Selection> {
        let options = options.into();
        let state = self.layer(layer)?;
        let place = |e: Error| e.during(format!("select in layer {layer}"));
        check_query(state, query).map_err(place)?;
        let span = Span::of(state, self.who.layout.group_tokens());
        let count = span.count(&options).map_err(place)?;
        let forced = span.forced(&options);
        let mut scores = Vec::new();
        if count < span.len() && span.needs_scores(count, &forced) {
            scores.reserve_exact(span.len());
            let groups = span.groups.start as usize..span.groups.end as usize;
            let heads = usize::from(state.geometry.kv_heads);
            match &state.summary {
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
                    let text = "the sequence carries no summary; create it with one, or select everything";
                    return Err(place(Error::new(ErrorKind::InvalidArgument, text)));
                }
            }
        } else {
            scores.resize(span.len(), 0.0);
        }
        let chosen = choose(span.groups.clone(), count, &forced, &scores);
        self.view(state, &span, &chosen, options.planes)
    }

    /// Selects everything a layer attends to.
    ///
    /// # Errors
    /// No such layer, or no token in it yet.
    pub fn select_all(&self, layer: usize) -> Result<Selection> {
        let state = self.layer(layer)?;
        let span = Span::of(state, self.who.layout.group_tokens());
        let chosen: Vec<u64> = span.groups.clone().collect();
        self.view(state, &span, &chosen, PlaneSet::KeysAndValues)
    }

    /// The devices that have a copy of a group, by index, the first copy's in front; none for a group that is in memory only.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layer has no such group.
    pub fn group_devices(&self, layer: usize, group: u64) -> Result<Vec<u16>> {
        let state = self.layer(layer)?;
        if group >= state.tokens / self.who.layout.group_tokens() as u64 {
            let text = format!("layer {layer} has no group {group}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let place =
            state.table.find(group).and_then(|extent| extent.place(group, &state.block, state.geometry.planes()));
        let copies = |place: BlockPlace| (0..place.frame.copies()).map(|at| place.frame.copy(at).0.key.0.0).collect();
        Ok(place.map(copies).unwrap_or_default())
    }

    /// The view of a selection made elsewhere: `groups` in rising order, and the tail.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: groups out of order, or outside of what the layer attends to.
    pub fn select_groups(&self, layer: usize, groups: &[u64]) -> Result<Selection> {
        self.select_planes(layer, groups, PlaneSet::KeysAndValues)
    }

    /// [`Self::select_groups`], of which these planes are read. With [`PlaneSet::ValuesOnly`] the bytes read are those of the V planes,
    /// rounded out to the units that the device reads; a layout with
    /// [planes on pages of their own](crate::KvLayoutBuilder::separate_planes) never reads a K plane with them.
    ///
    /// # Errors
    /// As there; [`ErrorKind::InvalidArgument`]: the layer has no V plane.
    pub fn select_planes(&self, layer: usize, groups: &[u64], planes: PlaneSet) -> Result<Selection> {
        let state = self.layer(layer)?;
        let span = Span::of(state, self.who.layout.group_tokens());
        let rising = groups.windows(2).all(|pair| pair[0] < pair[1]);
        if !rising || groups.iter().any(|group| !span.groups.contains(group)) {
            let text = format!("groups must rise and lie in {:?} of layer {layer}", span.groups);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.view(state, &span, groups, planes)
    }

    /// The view of stored groups wherever the layer's window is, without the tail.
    pub(crate) fn stored_groups(&self, layer: usize, groups: Range<u64>) -> Result<Selection> {
        let state = self.layer(layer)?;
        let (tokens, group) = (state.tokens, self.who.layout.group_tokens() as u64);
        let span = Span { first_token: 0, tokens, group, groups: 0..tokens / group };
        let mut view = self.view(state, &span, &groups.collect::<Vec<_>>(), PlaneSet::KeysAndValues)?;
        // Reading all of it once is no reason to keep any of it.
        if let Some(inner) = Arc::get_mut(&mut view.inner) {
            inner.cache = None;
        }
        Ok(view)
    }

    /// The tokens of a layer that fill no group; their planes `[kv_heads, tokens, dim]`, keys then values, go to `out`.
    pub(crate) fn stored_tail(&self, layer: usize, out: &mut Vec<u8>) -> Result<Option<Tail>> {
        let layer = self.layer(layer)?;
        let Some(tail) = layer.tail_piece() else { return Ok(None) };
        let mut parts = Vec::new();
        (0..2).try_for_each(|plane| layer.rows(&tail, plane, &mut parts))?;
        parts.iter().for_each(|part| out.extend_from_slice(part));
        Ok(Some(tail))
    }

    /// The summaries of groups of a layer, as they stand on disk, if it carries any.
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
            return Ok(Some(MinMax::element(self.who.layout.dtype())));
        }
        let Some(summary) = &state.summary else { return Ok(None) };
        summary.encoded(groups.start as usize..groups.end as usize).for_each(|piece| out.extend_from_slice(piece));
        Ok(Some(summary.dtype()))
    }

    pub(super) fn view(&self, state: &Layer, span: &Span, chosen: &[u64], planes: PlaneSet) -> Result<Selection> {
        if state.tokens == 0 {
            let text = format!("layer {} has no tokens yet", state.index);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if planes != PlaneSet::KeysAndValues && state.geometry.value_dim == 0 {
            let text = format!("layer {} has no V plane: its values are a part of the keys", state.index);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let heads = HeadMask::all(usize::from(state.geometry.kv_heads));
        let mut units = Vec::with_capacity(chosen.len());
        for (&group, extent) in chosen.iter().zip(state.table.find_all(chosen)) {
            let source = source(state, group, extent)?;
            let keys = KeySource::Stored;
            let mut unit = SelectedGroup { group, heads, positions: span.positions(group), source, keys };
            match planes {
                PlaneSet::KeysAndValues => {}
                PlaneSet::ValuesOnly => unit.leave_keys(&state.block, KeySource::Absent),
                PlaneSet::ReconstructedKeys => take_kept(state, &mut unit)?,
            }
            units.push(unit);
        }
        let needed = units.iter().any(|unit| matches!(unit.keys, KeySource::Rebuilt));
        let rebuilt = state.kept.as_ref().filter(|_| needed).map(|kept| Arc::clone(kept.rebuilt()));
        let tail_tokens = state.tail_tokens();
        let tail = (tail_tokens > 0).then(|| SelectedTail {
            block: Arc::clone(state.tail()),
            tokens: tail_tokens,
            positions: span.positions(span.groups.end),
        });
        let inner = SelectionInner {
            layout: self.who.layout.clone(),
            layer: state.index,
            length: state.tokens,
            units,
            tail,
            rebuilt,
            instance: self.store.devices.identity.instance,
            handle: self.handle,
            planes,
            cache: self.cache.clone(),
        };
        Ok(Selection { inner: Arc::new(inner) })
    }
}

/// Leaves what of a unit is kept in memory where it is.
fn take_kept(state: &Layer, unit: &mut SelectedGroup) -> Result<()> {
    let Some(kept) = &state.kept else {
        let text = format!("no keys of layer {} are kept: Sequence::reconstruct_keys comes first", state.index);
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    };
    // What is in memory as a whole has its keys.
    if !matches!(unit.source, GroupSource::Disk { .. }) {
        return Ok(());
    }
    match kept.find(unit.group) {
        None => {}
        Some(KeptOutliers::Block(block)) => unit.source = GroupSource::Copied(block),
        Some(KeptOutliers::Plane(plane)) => unit.leave_keys(&state.block, KeySource::Kept(plane)),
        Some(KeptOutliers::Reconstructed) => unit.leave_keys(&state.block, KeySource::Rebuilt),
    }
    Ok(())
}

fn source(state: &Layer, group: u64, extent: Option<&Extent>) -> Result<GroupSource> {
    if let Some(block) = state.building_block(group) {
        return Ok(GroupSource::Copied(block.into()));
    }
    let lost = || Error::new(ErrorKind::Corruption, format!("group {group} of layer {} is nowhere", state.index));
    let extent = extent.ok_or_else(lost)?;
    if let Source::Memory(run) = &extent.source {
        let index = (group - extent.first_group) as usize + extent.skip;
        return Ok(GroupSource::Run { run: Arc::clone(run), index });
    }
    let place = extent.place(group, &state.block, state.geometry.planes()).ok_or_else(lost)?;
    Ok(GroupSource::Disk { frame: place.frame, offset: place.offset, checksum: place.checksum })
}

pub(super) fn check_query(state: &Layer, query: &[f32]) -> Result<()> {
    let row = usize::from(state.geometry.key_dim);
    let heads = usize::from(state.geometry.kv_heads);
    if query.is_empty() || !query.len().is_multiple_of(row * heads) {
        let text = format!("query of {} elements; q_heads x {row} with q_heads a multiple of {heads}", query.len());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if query.len() / row > MAX_Q_HEADS {
        let text = format!("query of {} heads; there may be {MAX_Q_HEADS}", query.len() / row);
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

/// What a layer attends to at most: everything, or its window.
pub(super) struct Span {
    pub(super) first_token: u64,
    pub(super) tokens: u64,
    group: u64,
    /// Sealed groups with a visible token.
    pub(super) groups: Range<u64>,
}

impl Span {
    pub(super) fn of(state: &Layer, group: usize) -> Self {
        let (tokens, group) = (state.tokens, group as u64);
        let first_token = state.geometry.window.map_or(0, |window| tokens.saturating_sub(u64::from(window)));
        let sealed = tokens / group;
        Self { first_token, tokens, group, groups: (first_token / group).min(sealed)..sealed }
    }

    pub(super) fn len(&self) -> usize {
        (self.groups.end - self.groups.start) as usize
    }

    /// Visible positions of a group (the tail counts as the one behind the last); none when all are.
    fn positions(&self, group: u64) -> Option<TokenMask> {
        let start = group * self.group;
        if start >= self.first_token {
            return None;
        }
        let valid = (self.tokens - start).min(self.group) as usize;
        let hidden = (self.first_token - start).min(self.group) as usize;
        Some(TokenMask::all(valid).difference(TokenMask::all(hidden)))
    }

    /// Whole groups that a budget in tokens allows beside the tail; at least the newest when there is no tail.
    pub(super) fn group_count(&self, budget: usize) -> usize {
        let visible = (self.tokens - self.first_token) as usize;
        if budget >= visible {
            return self.len();
        }
        let tail = (self.tokens - self.groups.end * self.group).min(visible as u64) as usize;
        let count = budget.saturating_sub(tail) / self.group as usize;
        if tail == 0 { count.max(1) } else { count }
    }

    /// Groups that are part of any selection: sinks, then the newest.
    pub(super) fn forced(&self, options: &SelectOptions) -> [Range<u64>; 2] {
        let Range { start, end } = self.groups;
        let sinks = if self.first_token == 0 { (options.sink_tokens as u64).div_ceil(self.group) } else { 0 };
        let tail = self.tokens - end * self.group;
        let recent = (options.recent_tokens as u64).saturating_sub(tail).div_ceil(self.group);
        let recent = if tail == 0 { recent.max(1) } else { recent };
        [start..(start + sinks).min(end), end.saturating_sub(recent).max(start)..end]
    }

    /// Whether `count` groups leave any to choose beside the forced ones.
    pub(super) fn needs_scores(&self, count: usize, forced: &[Range<u64>; 2]) -> bool {
        count > self.forced_count(forced)
    }

    /// Groups that are forced, once each.
    pub(super) fn forced_count(&self, forced: &[Range<u64>; 2]) -> usize {
        let overlap = forced[0].end.saturating_sub(forced[1].start.max(forced[0].start));
        (forced.iter().map(|r| r.end - r.start).sum::<u64>() - overlap) as usize
    }
}
