//! The steps of a pipeline: prefetching predicted blocks, reading the missed ones, attending to both.
//!
//! Invariant: a prefetch never holds buffers that a needed read waits for. It is cancelled first.

use super::report::PipelineReport;
use crate::cache::BlockKey;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::ReadPriority;
use crate::plan::{SelectOptions, Selection};
use crate::read::{AttendOptions, PrefetchedBlocks, ReadTicket, ReadTimes};
use crate::sequence::{Sequence, SummaryStreams};
use crate::store::Store;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A prefetch in flight.
struct StepAhead {
    ticket: ReadTicket,
    selected: HashSet<BlockKey>,
    resident: HashSet<BlockKey>,
    reads: HashMap<BlockKey, usize>,
}

/// A layer whose true selections are known.
struct CurrentLayer {
    layer: usize,
    selections: Vec<Selection>,
    ticket: ReadTicket,
    ahead: Option<StepAhead>,
}

impl CurrentLayer {
    /// Attends with blocks of a prefetch. Returns false if it did not bring a block that is needed.
    fn attend_prefetched(
        &mut self,
        prefetched: &mut PrefetchedBlocks,
        queries: &[&[f32]],
        options: &AttendOptions,
        outs: &mut [&mut [f32]],
    ) -> Result<bool> {
        for (index, (query, out)) in queries.iter().zip(outs).enumerate() {
            if !self.ticket.attend_prefetched(prefetched, (index, query), options, out)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The reads of decode steps, over any number of sequences of one store. The [module](crate::pipeline) shows the loop.
pub struct Pipeline {
    store: Store,
    select: SelectOptions,
    ahead: BTreeMap<usize, StepAhead>,
    current: Option<CurrentLayer>,
    report: PipelineReport,
    /// The end of the device time that the report contains.
    counted_until: Option<Instant>,
    trust: bool,
    /// By layer what the last step selected, if it is prefetched.
    last: Option<BTreeMap<usize, Vec<Selection>>>,
    /// Prefetched summary records, by layer and sequence.
    streamed: Vec<(usize, Weak<SummaryStreams>)>,
}

impl Pipeline {
    /// Returns a pipeline whose [`decode`](Self::decode) selects under this budget.
    #[must_use]
    pub fn new(store: &Store, select: impl Into<SelectOptions>) -> Self {
        let (ahead, report) = (BTreeMap::new(), PipelineReport::default());
        let (store, select) = (store.clone(), select.into());
        let (current, counted_until, last, streamed) = (None, None, None, Vec::new());
        Self { store, select, ahead, current, report, counted_until, trust: false, last, streamed }
    }

    /// Makes [`decode`](Self::decode) attend to the groups of the prediction and the newest ones, as KVSwap does.
    ///
    /// Every prefetched block is then used, and no block is read on demand. The output depends on the predictions, but
    /// not on timing. Groups are attended whole, because masks of a selector do not apply.
    #[must_use]
    pub fn trust_predictions(mut self, trust: bool) -> Self {
        self.trust = trust;
        self
    }

    /// Makes [`decode`](Self::decode) prefetch what the last step selected in the next layer, if the model does not
    /// predict it.
    ///
    /// Successive steps select much the same. A [cache](crate::StoreOptions::cache) keeps these blocks in memory for
    /// all layers. A prefetch keeps them for two layers, and each step reads them again. DynaKV calls it a virtual
    /// cache (section 6.1). The output has the same bits as without it.
    ///
    /// The pipeline keeps the selections of a step, so that their groups stay readable until the next one.
    #[must_use]
    pub fn prefetch_last(mut self, prefetch: bool) -> Self {
        self.last = prefetch.then(BTreeMap::new);
        self
    }

    /// Returns what the last step selected in a layer for these sequences, if it is to be prefetched.
    pub(super) fn last_selected(&self, layer: usize, sequences: &[&Sequence]) -> Option<Vec<Selection>> {
        let selections = self.last.as_ref()?.get(&layer)?.iter();
        let selections = selections.filter(|last| sequences.iter().any(|sequence| sequence.made(last)));
        Some(selections.cloned().collect()).filter(|selections: &Vec<_>| !selections.is_empty())
    }

    /// Keeps the selections of a layer for the next step.
    pub(super) fn keep_selected(&mut self, layer: usize, selections: Vec<Selection>) {
        if let Some(last) = &mut self.last {
            last.insert(layer, selections);
        }
    }

    pub(super) fn trusts(&self) -> bool {
        self.trust
    }

    pub(super) fn select_options(&self) -> SelectOptions {
        self.select
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn report(&self) -> &PipelineReport {
        &self.report
    }

    /// Returns the counters and resets them.
    pub fn take_report(&mut self) -> PipelineReport {
        std::mem::take(&mut self.report)
    }

    /// Prefetches the summary records of `layer` for sequences with [streamed](crate::SummaryResidency::Streamed)
    /// summaries.
    ///
    /// Selections in that layer find the records in memory until [`Self::read`] of the layer frees them. Records do not
    /// depend on the query, so they can be read a layer ahead of its prediction. Sequences that have not selected by
    /// records yet are skipped. If no buffers are free, or a needed read takes them, selections read the records
    /// themselves.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such layer.
    pub fn stream(&mut self, layer: usize, sequences: &[&Sequence]) -> Result<()> {
        for sequence in sequences {
            let Some(streams) = sequence.streams() else { continue };
            match sequence.stream_ahead(layer)? {
                Some(bytes) => self.report.record_bytes += bytes,
                None => continue,
            }
            let streams = Arc::downgrade(streams);
            if !self.streamed.iter().any(|(of, known)| *of == layer && known.ptr_eq(&streams)) {
                self.streamed.push((layer, streams));
            }
        }
        Ok(())
    }

    /// Frees the records of a layer, or of all layers.
    fn give_records_back(&mut self, layer: Option<usize>) {
        self.streamed.retain(|(of, streams)| {
            let goes = layer.is_none_or(|layer| layer == *of);
            if let Some(streams) = streams.upgrade().filter(|_| goes) {
                streams.give_back(*of);
            }
            !goes
        });
    }

    /// Prefetches the blocks that predicted queries of `layer` selected. It replaces an earlier prediction of the
    /// layer.
    ///
    /// It never waits: it does nothing if no buffers are free, or while the current layer waits for buffers.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a selection is of another store.
    pub fn predict(&mut self, layer: usize, selections: &[Selection]) -> Result<()> {
        if let Some(old) = self.ahead.remove(&layer) {
            self.give_up(&old);
        }
        if let Some(current) = &mut self.current
            && !matches!(current.ticket.try_submit(), Ok(true))
        {
            // A prefetch now could keep the needed read from ever getting enough buffers.
            self.report.dropped_reads += 1;
            return Ok(());
        }
        match self.store.read(&selections.iter().collect::<Vec<_>>()).prefetch().submit() {
            Ok(ticket) if ticket.is_submitted() => {
                let (selected, resident, reads) = (ticket.selected(), ticket.resident(), ticket.reads());
                self.report.read_bytes += ticket.device_bytes();
                self.ahead.insert(layer, StepAhead { ticket, selected, resident, reads });
                Ok(())
            }
            Ok(_) => {
                self.report.dropped_reads += 1;
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::MemoryLimit => {
                self.report.dropped_reads += 1;
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Starts reading the blocks that the true queries of `layer` selected, except for prefetched ones. Call
    /// [`Self::attend`] next.
    ///
    /// # Errors
    /// The errors of [`Store::read`].
    pub fn read(&mut self, layer: usize, selections: &[Selection]) -> Result<()> {
        self.current = None;
        // The layer's selections are made, so its records are not needed any more.
        self.give_records_back(Some(layer));
        let mut ahead = self.ahead.remove(&layer);
        let refs: Vec<&Selection> = selections.iter().collect();
        let awaited = ahead.as_ref().map(|ahead| &ahead.selected);
        let mut ticket = self.store.read_as(&refs, ReadPriority::Demand(awaited))?;
        if !ticket.is_submitted() {
            // Prefetches must not hold buffers that a needed read waits for. All are cancelled, and the read is planned
            // again.
            self.give_all_up();
            if let Some(old) = ahead.take() {
                self.give_up(&old);
            }
            drop(ticket);
            ticket = self.store.read_as(&refs, ReadPriority::Demand(None))?;
        }
        self.count(&ticket, ahead.as_ref());
        self.current = Some(CurrentLayer { layer, selections: selections.to_vec(), ticket, ahead });
        Ok(())
    }

    /// Attends with `queries`, one per selection given to [`Self::read`], each `[q_heads, key_dim]`, as blocks arrive.
    /// Writes `outs`, each `[q_heads, value_dim]`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: `layer` is not the last one read, or the numbers of queries, outputs and
    /// selections differ. The errors of [`attend`](crate::attend).
    pub fn attend(
        &mut self,
        layer: usize,
        queries: &[&[f32]],
        options: &AttendOptions,
        outs: &mut [&mut [f32]],
    ) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
        let Some(mut current) = self.current.take().filter(|current| current.layer == layer) else {
            return wrong(format!("attend: layer {layer} was not read; call read first"));
        };
        let count = current.selections.len();
        if queries.len() != count || outs.len() != count {
            return wrong(format!(
                "attend: {} queries and {} outputs for {count} selections",
                queries.len(),
                outs.len()
            ));
        }
        // The caller waits from here on, so no prefetch may hold the buffers.
        if !current.ticket.try_submit()? {
            self.give_all_up();
        }
        if let Some(ahead) = current.ahead.take() {
            let mut prefetched = PrefetchedBlocks::new(ahead.ticket);
            let complete = current.attend_prefetched(&mut prefetched, queries, options, outs)?;
            self.count_times(&prefetched.finish());
            if complete {
                self.count_times(&current.ticket.times());
                return Ok(());
            }
            // A block whose prefetch failed is read again. If it is damaged, this read returns the error.
            current.ticket = self.store.read(&current.selections.iter().collect::<Vec<_>>()).submit()?;
            self.report.read_bytes += current.ticket.device_bytes();
            if !current.ticket.try_submit()? {
                self.give_all_up();
            }
        }
        for (index, (selection, (query, out))) in current.selections.iter().zip(queries.iter().zip(outs)).enumerate() {
            current.ticket.attend(index, query, selection, options, out)?;
        }
        self.count_times(&current.ticket.times());
        Ok(())
    }

    /// Reads and attends in one call, on rings of the calling thread, for a layer without a prefetch. It has the
    /// arguments of [`Self::read`] and [`Self::attend`].
    pub(super) fn read_and_attend(
        &mut self,
        layer: usize,
        selections: &[Selection],
        queries: &[&[f32]],
        options: &AttendOptions,
        outs: &mut [&mut [f32]],
    ) -> Result<()> {
        self.current = None;
        self.give_records_back(Some(layer));
        let mut ticket = self.store.read_later(&selections.iter().collect::<Vec<_>>())?;
        self.count(&ticket, None);
        // Prefetches must not hold buffers that a needed read waits for.
        if !ticket.take_buffers()? {
            self.give_all_up();
        }
        let mut times = Vec::new();
        let attended = ticket.attend_here(queries, options, outs, &mut times);
        times.iter().for_each(|times| self.count_times(times));
        attended
    }

    /// Returns whether a prefetch of the layer is in flight.
    pub(super) fn is_prefetched(&self, layer: usize) -> bool {
        self.ahead.contains_key(&layer)
    }

    /// Counts the device time of a read, without the part that overlaps with reads counted before.
    fn count_times(&mut self, times: &ReadTimes) {
        self.report.waited += times.waited();
        let Some((begun, ended)) = times.at_devices() else { return };
        let counted = self.counted_until.filter(|counted| *counted > begun).unwrap_or(begun);
        self.report.device_time += ended.saturating_duration_since(counted);
        self.counted_until = Some(ended.max(counted));
    }

    fn give_all_up(&mut self) {
        self.give_records_back(None);
        for old in std::mem::take(&mut self.ahead).into_values() {
            self.give_up(&old);
        }
    }

    fn give_up(&mut self, ahead: &StepAhead) {
        self.report.dropped_reads += 1;
        self.report.wasted += ahead.reads.len() as u64;
        self.report.wasted_bytes += ahead.reads.values().map(|bytes| *bytes as u64).sum::<u64>();
    }

    fn count(&mut self, ticket: &ReadTicket, ahead: Option<&StepAhead>) {
        let report = &mut self.report;
        let (selected, reads) = (ticket.selected(), ticket.reads());
        report.layers += 1;
        report.read_bytes += ticket.device_bytes();
        report.selected += selected.len() as u64;
        if let Some(ahead) = ahead {
            report.predicted_layers += 1;
            report.predictable += selected.len() as u64;
            report.predicted += selected.intersection(&ahead.selected).count() as u64;
            report.corrected += reads.len() as u64;
            for (key, bytes) in &ahead.reads {
                if selected.contains(key) {
                    report.prefetched += 1;
                } else {
                    report.wasted += 1;
                    report.wasted_bytes += *bytes as u64;
                }
            }
        }
        // Cached now, or cached when it was prefetched. Blocks that the prefetch read count as prefetched.
        let mut resident = ticket.resident();
        if let Some(ahead) = ahead {
            resident.extend(ahead.resident.intersection(&selected));
            resident.retain(|key| !ahead.reads.contains_key(key));
        }
        report.resident += resident.iter().filter(|key| !reads.contains_key(key)).count() as u64;
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.give_records_back(None);
    }
}
