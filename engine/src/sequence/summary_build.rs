//! Building the summaries of a kind for every layer, when a selector is attached.
//!
//! 1. A layer takes its stored state, if there is one.
//! 2. It begins, and waits until threads of the host have a layer each, or until memory is short.
//! 3. The layers that wait are finished, each on one thread: stored records first, keys for groups without records.
//!
//! A layer that is begun has memory for all of its groups. An attachment needs no more memory than with one layer at a
//! time. If a layer finds too little, those that wait are finished first, and give back what they do not keep.

use super::attached_summary::AttachedSummary;
use super::cluster_states::{RestoredLayer, StoredKind};
use super::group_scan;
use super::handle::Sequence;
use super::layer::LayerState;
use super::summary_upkeep;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::Reservation;
use crate::options::{ComputeThreads, SummaryResidency, for_each};
use crate::retrieval::{KeyGroup, LayerSummary, SummarySpec};
use std::sync::Arc;

/// The summary of a layer that is begun.
struct NewSummary {
    at: usize,
    summary: AttachedSummary,
    /// The memory of its state, if that was stored. Its clusters are there then.
    restored: Option<Reservation>,
}

impl NewSummary {
    /// Gives back the memory of the state. From then on the layer has memory of its own.
    fn give_back_state(&mut self) {
        if let Some(held) = &mut self.restored {
            held.resize(0);
        }
    }
}

/// The summaries of a kind.
struct SummaryBuild {
    threads: Option<Arc<dyn ComputeThreads>>,
    /// How many layers are finished at a time.
    at_once: usize,
    begun: Vec<NewSummary>,
    /// The most bytes of layers that are begun, with what further threads keep meanwhile.
    begun_bytes: usize,
    built: Vec<AttachedSummary>,
    built_bytes: usize,
}

impl SummaryBuild {
    fn new(threads: Option<Arc<dyn ComputeThreads>>) -> Self {
        let at_once = threads.as_ref().map_or(1, |threads| threads.threads().max(1));
        Self { threads, at_once, begun: Vec::new(), begun_bytes: 0, built: Vec::new(), built_bytes: 0 }
    }
}

impl Sequence {
    /// Builds the summaries of a kind for every layer, in the next slot. Layers whose state is stored are restored from
    /// it. Returns the stored clusters of the kind if it has states.
    pub(super) fn build(&mut self, kind: &Arc<dyn SummarySpec>) -> Result<Option<StoredKind>> {
        let mut stored: Option<StoredKind> = None;
        let mut build = SummaryBuild::new(self.store.devices.compute_threads());
        for at in 0..self.layers.slots() {
            let Some(layer) = self.layers.get(at) else { continue };
            let mut summary = kind.layer(at, layer.shape())?;
            if self.streams_bounds(summary.as_mut())? {
                self.finish(&mut build)?;
                build.built.push(AttachedSummary::Whole(summary));
                continue;
            }
            let mut restored = None;
            if summary.state_encoding().is_some() {
                let stored = stored.get_or_insert_with(|| self.stored_kind(&kind.id()));
                restored = self.restore_state(at, kind, stored, &mut build)?;
            }
            let (summary, restored) = match restored {
                Some((restored, held)) => (AttachedSummary::Whole(restored), Some(held)),
                None => match self.suffix(at, kind)? {
                    Some(suffix) => (AttachedSummary::Suffix(suffix), None),
                    None => (AttachedSummary::Whole(summary), None),
                },
            };
            self.begin(NewSummary { at, summary, restored }, &mut build)?;
        }
        self.finish(&mut build)?;
        for (layer, summary) in self.layers.iter_mut().zip(build.built) {
            layer.summaries_mut().attach(summary);
        }
        Ok(stored)
    }

    /// Returns the summary of a layer from its stored state, or none if there is no usable state. If memory is short,
    /// it finishes the layers that are begun, and tries again.
    fn restore_state(
        &mut self,
        at: usize,
        kind: &Arc<dyn SummarySpec>,
        stored: &mut StoredKind,
        build: &mut SummaryBuild,
    ) -> Result<Option<RestoredLayer>> {
        // A layer that no other one may join keeps memory for its groups until it is finished.
        if build.begun.len() >= build.at_once {
            self.finish(build)?;
        }
        match self.restored_layer((at, self.layer(at)?), kind, stored) {
            Err(e) if matches!(e.kind(), ErrorKind::MemoryLimit | ErrorKind::Busy) && !build.begun.is_empty() => {
                self.finish(build)?;
                self.restored_layer((at, self.layer(at)?), kind, stored)
            }
            restored => restored,
        }
    }

    /// Takes the memory of a layer. The layer joins those that are begun if there is memory for all, or else follows
    /// them.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]. Errors of [`Self::finish`].
    fn begin(&mut self, mut new: NewSummary, build: &mut SummaryBuild) -> Result<()> {
        let (layer, summary) = (self.layer(new.at)?, new.summary.get());
        let own = summary.bytes_for(layer.groups() as usize - summary.groups());
        let beside = thread_bytes(layer);
        let together = build.built_bytes + build.begun_bytes + own + beside;
        let may_join = !build.begun.is_empty() && build.begun.len() < build.at_once;
        // Threads need one buffer at least, and wait for each other to have it.
        let buffer = may_join.then(|| self.store.devices.arena.lease(group_scan::READ_BYTES));
        if matches!(buffer, Some(Ok(_))) && self.selectors.try_reserve(&self.layers, together) {
            build.begun_bytes += own + beside;
        } else {
            drop(buffer);
            self.finish(build)?;
            new.give_back_state();
            let alone = build.built_bytes + own;
            self.selectors.reserve(&self.store.devices, &self.layers, (new.at, 0), alone)?;
            build.begun_bytes = own;
        }
        new.give_back_state();
        build.begun.push(new);
        Ok(())
    }

    /// Adds the sealed groups of their layers to summaries that are begun. Memory that these do not keep is free again.
    ///
    /// # Errors
    /// The first error in the order of the layers.
    fn finish(&mut self, build: &mut SummaryBuild) -> Result<()> {
        if build.begun.is_empty() {
            return Ok(());
        }
        let mut outcomes: Vec<Result<()>> = build.begun.iter().map(|_| Ok(())).collect();
        let each = build.begun.iter_mut().zip(&mut outcomes);
        for_each(
            build.threads.as_deref(),
            each,
            || (),
            |(), (new, outcome)| {
                *outcome = self.finish_layer(new).map_err(|e| e.during(format!("layer {}", new.at)));
            },
        );
        outcomes.into_iter().collect::<Result<()>>()?;
        // Clusters take less than the keys that they are built from.
        build.built_bytes += build.begun.iter().map(|new| new.summary.get().bytes_for(0)).sum::<usize>();
        build.built.extend(build.begun.drain(..).map(|new| new.summary));
        build.begun_bytes = 0;
        self.selectors.give_back(&self.store.devices, &self.layers, build.built_bytes);
        Ok(())
    }

    /// Adds all sealed groups of its layer to a summary.
    ///
    /// # Errors
    /// Errors of reading keys and records. Errors of the method.
    fn finish_layer(&self, new: &mut NewSummary) -> Result<()> {
        let summary = new.summary.get_mut();
        self.fill(new.at, summary)?;
        if new.restored.is_none() {
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

/// Returns the most bytes that a thread keeps while it adds groups of a layer to a summary. It copies records or blocks
/// out of the pages that it reads, and keeps keys that a summary asks for.
fn thread_bytes(layer: &LayerState) -> usize {
    let keys = layer.coder().map_or(layer.block().key_bytes, |coder| coder.plain_bytes(0));
    2 * group_scan::READ_BYTES + summary_upkeep::GROUPS_AT_ONCE * keys
}
