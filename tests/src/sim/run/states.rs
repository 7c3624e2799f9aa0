//! States of methods: what an attachment that takes a state may choose.
//!
//! The runner notes the tokens of a sequence whenever the engine wrote a state, and what the method chose then. When an
//! attachment takes a state, one of the noted states is of tokens that the sequence still has. If it has the same
//! tokens as when its only state was written, the method chooses the same entries.

use super::entries::{entries_of, options, query};
use super::{Runner, StepResult, failed};
use crate::sim::content::Token;
use crate::sim::coverage;
use std::collections::BTreeMap;
use stratakv::retrieval::SelectorId;
use stratakv::sim::{Event, events};
use stratakv::{SelectRequest, Sequence};

/// A state that the engine wrote.
#[derive(Clone, Debug)]
struct NotedState {
    /// The tokens of each layer at that time.
    layers: Vec<Vec<Token>>,
    /// The entries of each KV head that the method chose then, by layer.
    chosen: Vec<Option<Vec<Vec<u64>>>>,
}

/// The states that the engine wrote.
#[derive(Debug, Default)]
pub(super) struct NotedStates {
    /// By sequence, oldest first. Forks have those of their parent.
    by_sequence: BTreeMap<u64, Vec<NotedState>>,
}

/// Returns how many states were written.
pub(super) fn written() -> u64 {
    events(Event::ClusterStateWritten)
}

/// Returns how many layers were restored from a state.
pub(super) fn taken() -> u64 {
    events(Event::ClusterStateTaken)
}

impl NotedStates {
    /// Records a fork.
    pub(super) fn forked(&mut self, from: u64, to: u64) {
        if let Some(own) = self.by_sequence.get(&from).cloned() {
            self.by_sequence.insert(to, own);
        }
    }
}

impl Runner<'_> {
    /// Notes the state of a sequence, if one was written since there were `before` of them. Its tokens are committed.
    pub(super) fn note_state(
        &mut self,
        before: u64,
        sequence: &Sequence,
        selector: Option<SelectorId>,
        layers: &[Vec<Token>],
    ) -> StepResult {
        if written() == before {
            return Ok(());
        }
        // The method has seen the sealed groups.
        let (group, committed) = (self.shape.group, sequence.committed());
        let sealed = layers.iter().map(|own| own.len() / group * group).max().unwrap_or(0) as u64;
        if sealed > committed {
            return failed(format!("a state of {sealed} tokens was stored, and {committed} are committed"));
        }
        self.coverage.add(coverage::STATE_STORED);
        let chosen = |layer: usize| self.chosen(sequence, selector?, layer, layers[layer].len());
        let chosen = (0..layers.len()).map(chosen);
        let noted = NotedState { layers: layers.to_vec(), chosen: chosen.collect() };
        self.states.by_sequence.entry(sequence.id().0).or_default().push(noted);
        Ok(())
    }

    /// Notes the state that a commit of the sequence of a slot wrote, if one was written since there were `before`.
    pub(super) fn note_state_of_commit(&mut self, slot: usize, before: u64) -> StepResult {
        let Some((id, sequence)) = self.handles[slot].take() else { return Ok(()) };
        let now = self.model.lives.get(&id).map(|life| life.now.layers.clone());
        let noted = match (self.stored.selector(id), now) {
            (Some(selector), Some(layers)) => self.note_state(before, &sequence, Some(selector), &layers),
            _ => Ok(()),
        };
        self.handles[slot] = Some((id, sequence));
        noted
    }

    /// Returns what a method chooses in a layer, unless it refuses.
    fn chosen(&self, sequence: &Sequence, selector: SelectorId, layer: usize, tokens: usize) -> Option<Vec<Vec<u64>>> {
        let (query, options) = (query(&self.shape, layer), options(tokens));
        let selection = sequence.select(layer, SelectRequest::query(&query).options(options).selector(selector));
        selection.ok().map(|selection| entries_of(&self.shape, &selection))
    }

    /// Checks an attachment that took states, of which there were `before`. Returns whether all layers were restored.
    pub(super) fn check_taken(
        &mut self,
        before: u64,
        (sequence, selector): (&Sequence, SelectorId),
        layers: &[Vec<Token>],
    ) -> StepResult<bool> {
        let (count, id) = (taken() - before, sequence.id().0);
        if count == 0 {
            return Ok(false);
        }
        let noted = self.states.by_sequence.get(&id).map(Vec::as_slice).unwrap_or_default();
        let group = self.shape.group;
        let is_known = |own: &NotedState| {
            own.layers.iter().zip(layers).all(|(then, now)| now.starts_with(&then[..then.len() / group * group]))
        };
        if !noted.iter().any(is_known) {
            return failed(format!("sequence {id} took a state of tokens that it does not have"));
        }
        self.coverage.add(coverage::STATE_TAKEN);
        if let Some(newest) = noted.last().filter(|own| noted.len() == 1 && own.layers == layers) {
            for (layer, expected) in newest.chosen.iter().enumerate() {
                let found = self.chosen(sequence, selector, layer, layers[layer].len());
                let both = expected.as_ref().zip(found.as_ref());
                if count == layers.len() as u64 && both.is_some_and(|(expected, found)| expected != found) {
                    return failed(format!(
                        "sequence {id}, layer {layer}: from its state it selects {found:?}, before it was {expected:?}"
                    ));
                }
            }
        }
        Ok(true)
    }
}
