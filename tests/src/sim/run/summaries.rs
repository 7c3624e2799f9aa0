//! Selectors with stored summaries. Their summaries must equal those computed from the keys.

use super::{Runner, StepResult, Stop, failed};
use crate::sim::coverage;
use std::sync::Arc;
use stratakv::retrieval::{
    BoundsSpec, HeadAggregation, KeyGroup, KeyShape, LayerSummary, Quest, ScoreRequest, Selector, ShadowKv, SignBits,
    SummarySpec,
};
use stratakv::{Budget, SelectRequest};

impl Runner<'_> {
    /// Attaches a selector that needs no calibration to the sequence of a slot, and compares its summaries with those
    /// computed from the keys.
    pub(super) fn attach(&mut self, slot: usize, landmarks: bool) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        let selector: Arc<dyn Selector> = if landmarks { Arc::new(ShadowKv::default()) } else { Arc::new(SignBits) };
        let attached = match sequence.attach_stored(Arc::clone(&selector)) {
            Ok(attached) => attached,
            Err(e) => return self.fault("attach", &e),
        };
        let Some(life) = self.model.lives.get(&id) else { return Ok(()) };
        let wrong = |e: stratakv::Error| Stop::Failed(format!("summary: {e}"));
        // The model does not know the rounded keys of an encoded layer.
        let exact = |layer: &usize| !self.shape.encodes(*layer, 0);
        for (layer, tokens) in life.now.layers.iter().enumerate().filter(|(layer, _)| exact(layer)) {
            let keys = self.shape.keys();
            let kinds = selector.summaries();
            let Some(kind) = kinds.first() else { continue };
            let mut own = kind.layer(layer, keys).map_err(wrong)?;
            for (group, tokens) in tokens.chunks_exact(keys.group_tokens).enumerate() {
                let plane = self.shape.key_plane(layer, tokens);
                own.push(&KeyGroup::new(keys, &plane, group as u64).map_err(wrong)?);
            }
            if self.case.streamed {
                // A streamed selector keeps only its suffix in memory, so its selection is checked instead.
                if let Some((query, budget)) = asked(keys, layer, tokens.len()) {
                    let chosen: Vec<u64> =
                        match sequence.select(layer, SelectRequest::query(&query).options(budget).selector(attached)) {
                            Ok(view) => view.groups().collect(),
                            Err(e) => return self.fault("select", &e),
                        };
                    best_are_chosen(selector.as_ref(), own.as_ref(), (&query, keys, tokens.len()), &chosen)
                        .or_else(|e| failed(format!("sequence {id}, layer {layer}: {e}")))?;
                }
                continue;
            }
            let found = sequence.selector_summaries(attached, layer).map_err(wrong)?;
            let (mut expected, mut there) = (Vec::new(), Vec::new());
            own.encode(0..own.groups(), &mut expected);
            found.iter().for_each(|summary| summary.encode(0..summary.groups(), &mut there));
            if there != expected {
                return failed(format!("sequence {id}: the summaries of layer {layer} are not those of its keys"));
            }
        }
        self.coverage.add(coverage::ATTACHED);
        if self.case.streamed {
            self.choose(slot, id)?;
        }
        let Some((_, mut sequence)) = self.handles[slot].take() else { return Ok(()) };
        let layers = self.model.lives.get(&id).map(|life| life.now.layers.clone()).unwrap_or_default();
        let store = self.store()?.clone();
        let compared = match layers.is_empty() {
            true => Ok(Ok(())),
            false => self.compare_entries((&store, &mut sequence), &layers, None),
        };
        self.handles[slot] = Some((id, sequence));
        compared?.or_else(|e| self.fault("choose entries", &e))
    }

    /// Selects with streamed summaries, and compares the selection with the bounds of the keys.
    fn choose(&mut self, slot: usize, id: u64) -> StepResult {
        let Some(life) = self.model.lives.get(&id) else { return Ok(()) };
        let wrong = |e: stratakv::Error| Stop::Failed(format!("bounds: {e}"));
        let keys = self.shape.keys();
        let exact = |layer: &usize| !self.shape.encodes(*layer, 0);
        for (layer, tokens) in life.now.layers.iter().enumerate().filter(|(layer, _)| exact(layer)) {
            let Some((_, sequence)) = &self.handles[slot] else { return Ok(()) };
            let Some((query, budget)) = asked(keys, layer, tokens.len()) else { continue };
            let chosen: Vec<u64> = match sequence.select(layer, SelectRequest::query(&query).options(budget)) {
                Ok(view) => view.groups().collect(),
                Err(e) => return self.fault("select", &e),
            };
            let mut own = BoundsSpec { levels: 1 }.layer(layer, keys).map_err(wrong)?;
            for (group, tokens) in tokens.chunks_exact(keys.group_tokens).enumerate() {
                let plane = self.shape.key_plane(layer, tokens);
                own.push(&KeyGroup::new(keys, &plane, group as u64).map_err(wrong)?);
            }
            best_are_chosen(&Quest, own.as_ref(), (&query, keys, tokens.len()), &chosen)
                .or_else(|e| failed(format!("sequence {id}, layer {layer}: {e}")))?;
            self.coverage.add(coverage::STREAMED);
        }
        Ok(())
    }
}

/// Returns a query of a layer and a budget of half its tokens. Returns none if that leaves no choice.
fn asked(keys: KeyShape, layer: usize, tokens: usize) -> Option<(Vec<f32>, Budget)> {
    let query = (0..keys.width()).map(|i| ((i * 7 + layer) % 5) as f32 - 2.0).collect();
    (tokens / keys.group_tokens >= 3).then(|| (query, Budget::tokens(tokens / 2)))
}

/// Checks that no unselected group scores higher than a selected one, apart from the newest group.
fn best_are_chosen(
    selector: &dyn Selector,
    own: &dyn LayerSummary,
    (query, keys, tokens): (&[f32], KeyShape, usize),
    chosen: &[u64],
) -> Result<(), String> {
    let groups = tokens / keys.group_tokens;
    // Without a tail, the newest group is selected whatever it scores.
    let newest = usize::from(tokens.is_multiple_of(keys.group_tokens));
    let (form, forced, count) =
        (HeadAggregation::Sum, [0..0, groups - newest..groups], chosen.len().saturating_sub(newest));
    let ask = ScoreRequest {
        query,
        shape: keys,
        scale: 1.0,
        aggregation: form,
        groups: 0..groups,
        forced,
        count,
        threads: None,
    };
    let mut scores = vec![0.0; groups];
    selector.score(&[own], &ask, &mut scores).map_err(|e| e.to_string())?;
    let is_chosen = |group: &usize| chosen.contains(&(*group as u64));
    let least = (0..groups - newest).filter(is_chosen).map(|group| scores[group]).fold(f32::INFINITY, f32::min);
    let left = (0..groups - newest).filter(|group| !is_chosen(group)).map(|group| scores[group]);
    let most = left.fold(f32::NEG_INFINITY, f32::max);
    match most > least + 1e-3 * least.abs().max(1.0) {
        true => Err(format!("{chosen:?} chosen by {scores:?}")),
        false => Ok(()),
    }
}
