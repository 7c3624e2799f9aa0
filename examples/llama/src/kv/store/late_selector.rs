//! Selectors that need the prompt, so that a commit attaches them.
//!
//! - A selector that chooses entries makes them of the prompt's keys and queries.
//! - A method whose adapter the store lacks has it fitted to the prompt. Sign bits take its place until then.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use stratakv::retrieval::{HeadAggregation, MethodSpec, Selector, SelectorId};

use super::{StoreKv, StorePolicy};
use crate::budget::Budget;
use crate::kv::error::engine_error;
use crate::kv::prompt_sample::PromptSample;

/// The method that needs neither an adapter nor a prompt.
const FALLBACK: &str = "signs";

/// A selector that needs the prompt.
pub(super) enum LateSelector {
    /// It makes entries of the prompt's keys and queries.
    Entries(Arc<dyn Selector>, HeadAggregation, Budget),
    /// Its adapter is fitted to the prompt.
    Calibrated(PromptSample, HeadAggregation, Budget),
}

impl StoreKv {
    /// Attaches a selector that chooses entries, once the prompt is there. A method that needs a profile gets the
    /// [recorded](Self::record_queries) queries of every layer. Queries that
    /// [`KvCache::set_profile`](crate::kv::KvCache::set_profile) gave take their place.
    ///
    /// # Errors
    /// Fails as [`Sequence::attach`](stratakv::Sequence::attach) and
    /// [`Sequence::profile`](stratakv::Sequence::profile) do.
    pub fn attach_entries(&mut self, selector: Arc<dyn Selector>) -> stratakv::Result<SelectorId> {
        let id = self.sequence.attach(selector)?;
        for layer in 0..self.geometry.layers.len() {
            let summaries = self.sequence.selector_summaries(id, layer)?;
            let takes_profile = summaries.iter().any(|summary| summary.profile_bytes(1).is_some());
            // A call of `profile_queries` would borrow the sequence too.
            let recorded = self.profile.as_ref().or(self.recorded.as_ref());
            let recorded = recorded.map_or_else(Vec::new, |recorded| recorded.of(layer));
            if takes_profile && !recorded.is_empty() {
                self.sequence.profile(id, layer, &recorded, Some(self.geometry.scale))?;
            }
        }
        Ok(id)
    }

    /// Attaches a selector that chooses entries with the first commit, and selects by it from then on. A sequence that
    /// has tokens already gets it at once. Until then the cache records the newest `queries` queries.
    ///
    /// # Errors
    /// Fails as [`Self::attach_entries`] does.
    pub fn attach_entries_later(
        &mut self,
        selector: Arc<dyn Selector>,
        (aggregation, budget): (HeadAggregation, Budget),
        queries: usize,
    ) -> Result<()> {
        self.record_queries(queries);
        self.policy = StorePolicy::Full;
        self.late = Some(LateSelector::Entries(selector, aggregation, budget));
        // A fork has tokens before its first commit.
        if self.sequence.is_empty() { Ok(()) } else { self.attach_late() }
    }

    /// Fits the method's adapter to the tokens that come from now on, and selects by it from the first commit on that
    /// has seen enough of them. The store then holds the adapter. Until then steps select by sign bits.
    ///
    /// # Errors
    /// Fails if the selector of sign bits cannot be attached.
    pub fn calibrate_later(
        &mut self,
        spec: MethodSpec,
        (aggregation, budget): (HeadAggregation, Budget),
    ) -> Result<()> {
        self.policy = StorePolicy::Full;
        self.late = Some(LateSelector::Calibrated(PromptSample::new(&self.geometry, spec), aggregation, budget));
        if self.sequence.is_empty() { Ok(()) } else { self.attach_late() }
    }

    /// Stores the adapter that the sample fits, if there are enough tokens. It happens before the commit, so that a
    /// session that is interrupted after it goes on with the same adapter.
    pub(super) fn store_calibrated(&mut self) -> Result<Option<Arc<dyn Selector>>> {
        let Some(LateSelector::Calibrated(sample, ..)) = &self.late else { return Ok(None) };
        let (name, (seen, needed)) = (sample.spec().adapter_name().unwrap_or_default(), sample.tokens());
        if seen < needed {
            self.note = Some(format!("sign bits, because {name} needs {needed} tokens to fit an adapter"));
            return Ok(None);
        }
        let begin = Instant::now();
        let adapter = sample.fit()?;
        self.store.put_adapter(self.sequence.layout(), &adapter, 1).map_err(engine_error)?;
        let selector = sample.spec().selector(Some(Arc::new(adapter))).map_err(engine_error)?;
        let seconds = begin.elapsed().as_secs_f64();
        self.note = Some(format!("{name} was fitted to {seen} tokens in {seconds:.1} s"));
        Ok(Some(selector))
    }

    /// Attaches the selector that waits for a commit. `calibrated` is the one of [`Self::store_calibrated`]. It takes
    /// the place of sign bits.
    pub(super) fn attach_after_commit(&mut self, calibrated: Option<Arc<dyn Selector>>) -> Result<()> {
        match (calibrated, self.late.take()) {
            (Some(selector), Some(LateSelector::Calibrated(_, aggregation, budget))) => {
                if let Some(signs) = self.stand_in.take() {
                    self.sequence.detach(signs).map_err(engine_error)?;
                }
                let selector = self.attach_stored(selector).map_err(engine_error)?;
                self.policy = StorePolicy::Selected { selector, aggregation, budget };
                Ok(())
            }
            (_, late) => {
                self.late = late;
                self.attach_late()
            }
        }
    }

    /// Attaches the selector that waits for tokens. Sign bits take the place of a method that has no adapter yet.
    fn attach_late(&mut self) -> Result<()> {
        let (selector, aggregation, budget) = match self.late.take() {
            None => return Ok(()),
            Some(LateSelector::Entries(selector, aggregation, budget)) => {
                (self.attach_entries(selector).map_err(engine_error)?, aggregation, budget)
            }
            Some(LateSelector::Calibrated(sample, aggregation, budget)) => {
                self.late = Some(LateSelector::Calibrated(sample, aggregation, budget));
                if self.stand_in.is_some() {
                    return Ok(());
                }
                let signs: MethodSpec = FALLBACK.parse().map_err(engine_error)?;
                let selector = signs.selector(None).map_err(engine_error)?;
                let selector = self.attach_stored(selector).map_err(engine_error)?;
                self.stand_in = Some(selector);
                (selector, aggregation, budget)
            }
        };
        self.policy = StorePolicy::Selected { selector, aggregation, budget };
        Ok(())
    }

    /// Returns whether an adapter will be fitted to the tokens that come.
    pub(super) fn is_sampled(&self) -> bool {
        matches!(self.late, Some(LateSelector::Calibrated(..)))
    }
}
