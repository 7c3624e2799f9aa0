//! Reads ahead, reads on demand, and attention over both.

use super::report::PipelineReport;
use crate::cache::BlockKey;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::ReadPriority;
use crate::plan::{SelectOptions, Selection};
use crate::read::{AttendOptions, ReadTicket, ReadTimes};
use crate::sequence::{Sequence, SummaryStreams};
use crate::store::Store;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A read ahead under way.
struct StepAhead {
    ticket: ReadTicket,
    selected: HashSet<BlockKey>,
    resident: HashSet<BlockKey>,
    reads: HashMap<BlockKey, usize>,
}

/// A layer whose true views are known.
struct CurrentLayer {
    layer: usize,
    views: Vec<Selection>,
    ticket: ReadTicket,
    ahead: Option<StepAhead>,
}

/// The reads of decode steps, over any number of sequences of one store. The documentation of `stratakv::pipeline` has the loop it belongs to.
pub struct Pipeline {
    store: Store,
    select: SelectOptions,
    ahead: BTreeMap<usize, StepAhead>,
    current: Option<CurrentLayer>,
    report: PipelineReport,
    /// Up to when time at the devices is in the report.
    counted_until: Option<Instant>,
    trust: bool,
    /// Records that were read ahead, of which layer and of whom.
    streamed: Vec<(usize, Weak<SummaryStreams>)>,
}

impl Pipeline {
    /// A pipeline whose [`decode`](Self::decode) selects under this budget.
    #[must_use]
    pub fn new(store: &Store, select: impl Into<SelectOptions>) -> Self {
        let (ahead, report) = (BTreeMap::new(), PipelineReport::default());
        let (store, select) = (store.clone(), select.into());
        Self { store, select, ahead, current: None, report, counted_until: None, trust: false, streamed: Vec::new() }
    }

    /// Whether [`decode`](Self::decode) attends to the groups that the prediction selected, and the newest, as KVSwap does,
    /// instead of those of the true query. Nothing is read for nothing then and nothing on demand, but the output depends on
    /// the predictions; it still does not depend on timing. Whole groups: masks of a selector's own do not carry over.
    #[must_use]
    pub fn trust_predictions(mut self, trust: bool) -> Self {
        self.trust = trust;
        self
    }

    pub(super) fn trusts(&self) -> bool {
        self.trust
    }

    pub(super) fn select_options(&self) -> SelectOptions {
        self.select
    }

    /// What was done so far.
    #[must_use]
    pub fn report(&self) -> &PipelineReport {
        &self.report
    }

    /// What was done so far; counts from zero after.
    pub fn take_report(&mut self) -> PipelineReport {
        std::mem::take(&mut self.report)
    }

    /// Starts reading the records of summaries of `layer` for those of the sequences that have them
    /// [streamed](crate::Summaries::Streamed): selections in that layer find them in memory, those of predicted queries and those of
    /// the true ones, until [`Self::read`] of the layer gives them back. The records do not depend on the query: they can be read a
    /// layer ahead of its prediction. Nothing is read for sequences that have not chosen by their records yet. Given up when no buffers are free, and whenever a read that is needed finds none; selections
    /// read them themselves then.
    ///
    /// # Errors
    /// No such layer.
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

    /// Gives back the records of a layer, or of all.
    fn give_records_back(&mut self, layer: Option<usize>) {
        self.streamed.retain(|(of, streams)| {
            let goes = layer.is_none_or(|layer| layer == *of);
            if let Some(streams) = streams.upgrade().filter(|_| goes) {
                streams.give_back(*of);
            }
            !goes
        });
    }

    /// Reads ahead what predicted queries of `layer` selected, in place of an earlier prediction of it. Given up when no
    /// buffers are free, or while the layer that was read last waits for some: never waited for.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: views of another store.
    pub fn predict(&mut self, layer: usize, views: &[Selection]) -> Result<()> {
        if let Some(old) = self.ahead.remove(&layer) {
            self.give_up(&old);
        }
        if let Some(current) = &mut self.current
            && !matches!(current.ticket.try_submit(), Ok(true))
        {
            // What fits beside the buffers of others would keep the read that is needed from ever getting enough.
            self.report.dropped_reads += 1;
            return Ok(());
        }
        match self.store.read_ahead(&views.iter().collect::<Vec<_>>()) {
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

    /// Starts reading what the true queries of `layer` selected, less what is read ahead already. [`Self::attend`] comes next.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn read(&mut self, layer: usize, views: &[Selection]) -> Result<()> {
        self.current = None;
        // It has been chosen by.
        self.give_records_back(Some(layer));
        let mut ahead = self.ahead.remove(&layer);
        let refs: Vec<&Selection> = views.iter().collect();
        let awaited = ahead.as_ref().map(|ahead| &ahead.selected);
        let mut ticket = self.store.read_as(&refs, ReadPriority::Demand(awaited))?;
        if !ticket.is_submitted() {
            // What is read ahead must not keep buffers from what is needed: all of it goes, and the read starts anew.
            self.give_all_up();
            if let Some(old) = ahead.take() {
                self.give_up(&old);
            }
            drop(ticket);
            ticket = self.store.read_as(&refs, ReadPriority::Demand(None))?;
        }
        self.count(&ticket, ahead.as_ref());
        self.current = Some(CurrentLayer { layer, views: views.to_vec(), ticket, ahead });
        Ok(())
    }

    /// Attention of `queries`, one per view given to [`Self::read`], each `[q_heads, key_dim]`, to `outs`, each
    /// `[q_heads, value_dim]`: block after block as they arrive.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: `layer` was not the last one read, or there are more or fewer queries or outputs than
    /// views; otherwise as [`attend`](crate::attend).
    pub fn attend(
        &mut self,
        layer: usize,
        queries: &[&[f32]],
        options: &AttendOptions,
        outs: &mut [&mut [f32]],
    ) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
        let Some(mut current) = self.current.take().filter(|current| current.layer == layer) else {
            return wrong(format!("layer {layer} is attended to and was not read"));
        };
        let views = current.views.len();
        if queries.len() != views || outs.len() != views {
            return wrong(format!("{} queries and {} outputs for {views} views", queries.len(), outs.len()));
        }
        if let Some(ahead) = current.ahead.take() {
            let times = ahead.ticket.times();
            let brought = ahead.ticket.wait();
            self.count_times(&times);
            let complete = brought.is_ok_and(|batch| current.ticket.fill(&batch));
            if !complete {
                // A block that could not be read ahead is read once more; if it is damaged, this read says so.
                current.ticket = self.store.read(&current.views.iter().collect::<Vec<_>>())?;
                self.report.read_bytes += current.ticket.device_bytes();
            }
        }
        // From here on it is waited for, and what it waits for must not be held by what is read ahead.
        if !current.ticket.try_submit()? {
            self.give_all_up();
        }
        for (index, (view, (query, out))) in current.views.iter().zip(queries.iter().zip(outs)).enumerate() {
            current.ticket.attend(index, query, view, options, out)?;
        }
        self.count_times(&current.ticket.times());
        Ok(())
    }

    /// Counts the time of a read that has ended: of what it overlaps with reads counted before, nothing.
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
        // Now, or when it was read ahead; what was then read counts as that.
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
