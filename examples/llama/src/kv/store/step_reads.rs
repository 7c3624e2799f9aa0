//! The reads of decode steps, at once or through a pipeline that prefetches the next layer.
//!
//! Invariants:
//! - Prefetching never changes what a step attends to. A wrong prediction costs bytes and changes no logit.
//! - [`StepReads::asked_bytes`] counts the bytes that the plans of all reads asked for. If nothing else uses the store,
//!   it equals the bytes that its devices complete.

use std::time::Instant;

use anyhow::{Context, Result};
use stratakv::pipeline::{Pipeline, PipelineReport};
use stratakv::{AttendOptions, Budget as EngineBudget, Selection, Sequence, Store};

use super::prediction_trial::PredictionTrial;
use crate::kv::error::engine_error;

/// The reads of one cache.
pub(super) struct StepReads {
    store: Store,
    options: AttendOptions,
    /// The reads of decode steps, if they are prefetched.
    pipeline: Option<Pipeline>,
    trial: PredictionTrial,
    /// The layer that the pipeline read last, and its selection.
    prepared: Option<(usize, Selection)>,
    asked: u64,
}

impl StepReads {
    /// Returns reads that are not prefetched. Attention scores are multiplied by `scale`.
    pub(super) fn new(store: &Store, scale: f32) -> Self {
        Self {
            store: store.clone(),
            options: AttendOptions { scale: Some(scale), ..AttendOptions::default() },
            pipeline: None,
            trial: PredictionTrial::default(),
            prepared: None,
            asked: 0,
        }
    }

    /// Sets whether decode steps prefetch what predicted queries select.
    pub(super) fn read_ahead(&mut self, on: bool) {
        // The cache selects by its own policy. The budget of the pipeline's own decode loop is not used.
        self.pipeline = on.then(|| Pipeline::new(&self.store, EngineBudget::All));
        self.trial = PredictionTrial::default();
        self.prepared = None;
    }

    /// Returns whether the next layer is predicted and prefetched.
    pub(super) fn predicts(&self) -> bool {
        self.pipeline.is_some() && !self.trial.is_paused()
    }

    /// Counts a decode step, whose time decides whether predictions go on.
    pub(super) fn count_step(&mut self) {
        if self.pipeline.is_some() {
            self.trial.count_step(Instant::now());
        }
    }

    /// Returns the bytes that this cache's reads asked the devices for.
    pub(super) fn asked_bytes(&self) -> u64 {
        self.asked
    }

    /// Returns the result of prefetching, or `None` if nothing is prefetched.
    pub(super) fn report(&self) -> Option<PipelineReport> {
        self.pipeline.as_ref().map(|pipeline| *pipeline.report())
    }

    /// Starts to read what a layer will attend to.
    pub(super) fn begin(&mut self, layer: usize, selection: Selection) -> Result<()> {
        self.through(|pipeline| pipeline.read(layer, std::slice::from_ref(&selection)))?;
        self.prepared = Some((layer, selection));
        Ok(())
    }

    /// Prefetches what a layer will probably attend to.
    pub(super) fn predict(&mut self, layer: usize, selection: &Selection) -> Result<()> {
        self.through(|pipeline| pipeline.predict(layer, std::slice::from_ref(selection)))
    }

    /// Prefetches the summaries of a layer if they are on disk and a selection will need them.
    pub(super) fn stream(&mut self, layer: usize, sequence: &Sequence) -> Result<()> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let before = pipeline.report().record_bytes;
        let done = pipeline.stream(layer, &[sequence]);
        self.asked += pipeline.report().record_bytes - before;
        done.map_err(engine_error)
    }

    /// Returns whether [`Self::begin`] has read for this layer.
    pub(super) fn has_begun(&self, layer: usize) -> bool {
        self.prepared.as_ref().is_some_and(|(prepared, _)| *prepared == layer)
    }

    /// Waits for what [`Self::begin`] reads, and attends to it. Returns the selection.
    pub(super) fn attend_begun(&mut self, queries: &[f32], out: &mut [f32]) -> Result<Selection> {
        let (layer, selection) = self.prepared.take().context("attention to a layer whose reads have not begun")?;
        let options = self.options;
        self.through(|pipeline| pipeline.attend(layer, &[queries], &options, &mut [out]))?;
        Ok(selection)
    }

    /// Reads a selection, and attends to it.
    pub(super) fn attend(&mut self, selection: &Selection, queries: &[f32], out: &mut [f32]) -> Result<()> {
        let selections = [selection];
        let request = self.store.read(&selections);
        self.asked += request.attend(&[queries], &self.options, &mut [out]).map_err(engine_error)?;
        Ok(())
    }

    /// Calls the pipeline and counts the bytes that the call asked for.
    fn through(&mut self, call: impl FnOnce(&mut Pipeline) -> stratakv::Result<()>) -> Result<()> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let before = pipeline.report().read_bytes;
        let done = call(pipeline);
        self.asked += pipeline.report().read_bytes - before;
        done.map_err(engine_error)
    }
}
