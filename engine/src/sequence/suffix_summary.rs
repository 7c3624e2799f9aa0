//! Summaries of selectors in a sequence that streams its summaries.
//!
//! A layer keeps only the *suffix*: the groups from the first one whose record is on no device. A selection reads the
//! stored prefix, appends the suffix, scores both and frees the result. Bounds are computed from the min/max records
//! alone, so a layer keeps nothing of them.

use super::attached_summary::AttachedSummary;
use super::errors::no_memory;
use super::handle::Sequence;
use super::layer::LayerState;
use super::span::Span;
use super::streams::StreamedGroups;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, Reservation};
use crate::options::SummaryResidency;
use crate::read::{ReadSection, RecordsTicket};
use crate::retrieval::{KeyGroup, LayerSummary, LoadedMinMax, SuffixSummary, SummaryRecordId, SummarySpec};
use std::sync::Arc;
use stratakv_format::frame::SummaryRecords;

/// A summary that a selector scores by.
pub(super) enum ScoredSummary<'a> {
    /// A summary that the layer keeps in memory.
    Resident(&'a dyn LayerSummary),
    /// A summary that is built for one selection, with its memory.
    Temporary { summary: Box<dyn LayerSummary>, _held: Option<Reservation> },
}

impl ScoredSummary<'_> {
    pub(super) fn get(&self) -> &dyn LayerSummary {
        match self {
            Self::Resident(summary) => *summary,
            Self::Temporary { summary, .. } => summary.as_ref(),
        }
    }
}

impl Sequence {
    /// Returns the summaries that a selector scores by, from what the layer keeps for it.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no memory for records. Errors of reading keys.
    pub(super) fn scored<'a>(
        &self,
        state: &LayerState,
        own: impl Iterator<Item = &'a AttachedSummary>,
        span: &Span,
    ) -> Result<Vec<ScoredSummary<'a>>> {
        let all_streamed = self.summary_residency() == SummaryResidency::Streamed;
        let scored = |summary: &'a AttachedSummary| match summary {
            AttachedSummary::Suffix(suffix) => match suffix.first_group() {
                0 => Ok(ScoredSummary::Resident(suffix.resident())),
                _ => self.whole(state, suffix, span),
            },
            AttachedSummary::Whole(bounds) if all_streamed && bounds.streams_from_min_max() => {
                let records = self.layer_records(state, span.groups.clone())?;
                let mut reserve = |bytes| self.store.devices.reserve(bytes, Category::Summaries);
                let over = bounds.over_min_max(LoadedMinMax { records: &records, reserve: &mut reserve });
                let over = over.ok_or_else(|| no_memory("bounds of runs of groups"))?;
                Ok(ScoredSummary::Temporary { summary: over, _held: None })
            }
            AttachedSummary::Whole(summary) => Ok(ScoredSummary::Resident(summary.as_ref())),
        };
        own.map(scored).collect()
    }

    /// Builds the summary of all groups of a layer. Groups before the layer's window are zero.
    fn whole<'a>(&self, state: &LayerState, suffix: &SuffixSummary, span: &Span) -> Result<ScoredSummary<'a>> {
        let SummaryRecordId(stored) = *suffix.stored();
        let in_part = || {
            let text = format!("the summary records of layer {} have a gap", state.index());
            Error::new(ErrorKind::Corruption, text)
        };
        let mut whole = suffix.empty()?;
        let bytes =
            whole.bytes_for(span.groups.end as usize) + suffix.resident().groups() * stored.record_bytes as usize;
        let held = self.store.devices.reserve(bytes, Category::Summaries);
        let held = held.ok_or_else(|| no_memory("the summary of a layer, read for a selection"))?;
        let first_group = suffix.first_group() as u64;
        let unseen = span.groups.start.min(first_group);
        let zeros = vec![0; stored.record_bytes as usize];
        if !(0..unseen).all(|_| whole.restore(&zeros)) {
            return Err(in_part());
        }
        let wanted = self.wanted(state, &stored, unseen..first_group);
        let read = self.read_wanted(state, stored, &wanted)?;
        for wanted in &wanted {
            if !self.restore_wanted(wanted, &read, whole.as_mut())? {
                // The keys give the same records as when the group was written.
                let shape = state.shape();
                self.each_keys(state, wanted.groups.clone(), &mut |group, keys| {
                    whole.push(&KeyGroup::new(shape, keys, group)?);
                    Ok(())
                })?;
            }
        }
        let (resident, mut records) = (suffix.resident(), Vec::new());
        resident.encode(0..resident.groups(), &mut records);
        if !whole.restore(&records) || (whole.groups() as u64) < span.groups.end {
            return Err(in_part());
        }
        Ok(ScoredSummary::Temporary { summary: whole, _held: Some(held) })
    }

    /// Adds the groups of a section that was read. Returns `false` and changes nothing if it was not read, or lacks the
    /// records.
    fn restore_wanted(
        &self,
        wanted: &StreamedGroups,
        read: &[ReadSection],
        whole: &mut dyn LayerSummary,
    ) -> Result<bool> {
        let Some(section) = &wanted.section else { return Ok(false) };
        let (place, record) = (&section.place, section.place.stored.record_bytes as usize);
        let first = (wanted.groups.start - place.first_group) as usize * record;
        let own = first..first + (wanted.groups.end - wanted.groups.start) as usize * record;
        let mut restore = |records: Option<&[u8]>| {
            records.and_then(|records| records.get(own.clone())).is_some_and(|own| whole.restore(own))
        };
        if let Some(ReadSection { buffer, at, .. }) = read.iter().find(|read| read.section.is(section)) {
            let records = at + place.header_bytes()..at + section.bytes();
            return Ok(restore(buffer.bytes().and_then(|all| all.get(records))));
        }
        let large = if RecordsTicket::fits(section) { None } else { self.large_section(section)? };
        Ok(restore(large.as_ref().map(|(records, _)| records.as_slice())))
    }

    /// Returns an empty suffix for a kind of summary. Returns none if summaries are resident, or if the kind has no
    /// records on devices, so that it is kept whole.
    ///
    /// # Errors
    /// As [`SummarySpec::layer`].
    pub(super) fn suffix(&self, layer: usize, kind: &Arc<dyn SummarySpec>) -> Result<Option<SuffixSummary>> {
        if self.summary_residency() != SummaryResidency::Streamed {
            return Ok(None);
        }
        let state = self.layer(layer)?;
        SuffixSummary::new(Arc::clone(kind), layer, state.shape(), |stored| self.stored_until(state, stored, 0))
    }

    /// Returns the first group from `from` on whose record is on no device.
    fn stored_until(&self, state: &LayerState, stored: &SummaryRecords, from: usize) -> usize {
        let mut group = from as u64;
        while group < state.groups() {
            let there = self.section_at(state, stored, group..state.groups());
            if there.section.is_none() {
                break;
            }
            group = there.groups.end;
        }
        group as usize
    }

    /// Drops what suffixes of one layer, or of all, keep of groups whose records are on devices by now. It looks only
    /// if a suffix is long enough for that to be worthwhile.
    ///
    /// # Errors
    /// As [`SummarySpec::layer`].
    pub(super) fn drop_stored_summaries(&mut self, layer: Option<usize>) -> Result<()> {
        let mut any = false;
        for at in layer.map_or(0..self.layers.slots(), |layer| layer..layer + 1) {
            let Some(state) = self.layers.get(at) else { continue };
            let due = |summary: &AttachedSummary| {
                let suffix = summary.suffix().filter(|suffix| suffix.is_due())?;
                Some(self.stored_until(state, &suffix.stored().0, suffix.first_group()))
            };
            let until: Vec<Option<usize>> = state.summaries().attached().iter().map(due).collect();
            any |= until.iter().any(Option::is_some);
            let Some(state) = self.layers.get_mut(at) else { continue };
            for (slot, until) in until.into_iter().enumerate() {
                if let Some(until) = until {
                    state.summaries_mut().drop_stored(slot, until)?;
                }
            }
        }
        if any {
            self.account_summaries();
        }
        Ok(())
    }
}
