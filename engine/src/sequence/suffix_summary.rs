//! Summaries of selectors whose records stand with the groups, where summaries are streamed: only those of the newest groups are
//! kept, the others are read for a selection and given back.

use super::select::Span;
use super::summary_streams::StreamedLayer;
use super::{Layer, Sequence};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, Reservation};
use crate::read::{ReadSection, RecordsTicket};
use crate::retrieval::{Bounds, KeyGroup, LayerSummary, Newest, SummaryRecordId, SummarySpec};
use std::any::Any;
use std::sync::Arc;
use stratakv_format::frame::SummaryRecords;

/// A summary to choose by.
pub(super) enum Scored<'a> {
    /// It is in memory.
    Kept(&'a dyn LayerSummary),
    /// Put together for one selection, with the memory that it takes.
    ForNow { summary: Box<dyn LayerSummary>, _held: Option<Reservation> },
}

impl Scored<'_> {
    pub(super) fn get(&self) -> &dyn LayerSummary {
        match self {
            Self::Kept(summary) => *summary,
            Self::ForNow { summary, .. } => summary.as_ref(),
        }
    }
}

impl Sequence {
    /// The summaries that a selector chooses by, whose own are these.
    pub(super) fn scored<'a>(
        &self,
        state: &Layer,
        own: impl Iterator<Item = &'a dyn LayerSummary>,
        span: &Span,
    ) -> Result<Vec<Scored<'a>>> {
        let scored = |summary: &'a dyn LayerSummary| {
            if let Some(newest) = newest_of(summary) {
                return match newest.before() {
                    0 => Ok(Scored::Kept(newest.kept())),
                    _ => self.whole(state, newest, span),
                };
            }
            let bounds = (summary as &dyn Any).downcast_ref::<Bounds>();
            let Some(bounds) = bounds.filter(|bounds| bounds.is_streamed()) else { return Ok(Scored::Kept(summary)) };
            let records = self.layer_records(state, span.groups.clone())?;
            let over = bounds.over(&records, &mut |bytes| self.store.devices.reserve(bytes, Category::Summaries));
            let over = over.ok_or_else(|| super::no_memory("bounds of runs of groups"))?;
            Ok(Scored::ForNow { summary: Box::new(over), _held: None })
        };
        own.map(scored).collect()
    }

    /// The summary of all groups of a layer. Of groups that the layer does not see any more it knows zeros.
    fn whole<'a>(&self, state: &Layer, newest: &Newest, span: &Span) -> Result<Scored<'a>> {
        let SummaryRecordId(stored) = *newest.stored();
        let in_part = || Error::new(ErrorKind::Corruption, format!("records of layer {} in part", state.index));
        let mut whole = newest.empty()?;
        let bytes = whole.bytes_for(span.groups.end as usize) + newest.kept().groups() * stored.record_bytes as usize;
        let held = self.store.devices.reserve(bytes, Category::Summaries);
        let held = held.ok_or_else(|| super::no_memory("the summary of a layer, read for a selection"))?;
        let before = newest.before() as u64;
        let unseen = span.groups.start.min(before);
        let zeros = vec![0; stored.record_bytes as usize];
        if !(0..unseen).all(|_| whole.restore(&zeros)) {
            return Err(in_part());
        }
        let wanted = self.wanted(state, &stored, unseen..before);
        let read = self.read_wanted(state, stored, &wanted)?;
        for wanted in &wanted {
            if !self.restore_wanted(wanted, &read, whole.as_mut())? {
                // As it was when the group was written.
                let shape = state.shape();
                self.each_keys(state, wanted.groups.clone(), &mut |group, keys| {
                    whole.push(&KeyGroup::new(shape, keys, group)?);
                    Ok(())
                })?;
            }
        }
        let (kept, mut records) = (newest.kept(), Vec::new());
        kept.encode(0..kept.groups(), &mut records);
        if !whole.restore(&records) || (whole.groups() as u64) < span.groups.end {
            return Err(in_part());
        }
        Ok(Scored::ForNow { summary: whole, _held: Some(held) })
    }

    /// Adds the groups of a section that was read. `false`, and nothing changes, where it was not, or holds no such records.
    fn restore_wanted(
        &self,
        wanted: &StreamedLayer,
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

    /// What is kept of a summary of this kind where summaries are streamed: of the groups behind the last one whose record stands
    /// with it, none yet. No value where it is kept whole.
    ///
    /// # Errors
    /// As [`SummarySpec::layer`].
    pub(super) fn newest(&self, layer: usize, kind: &Arc<dyn SummarySpec>) -> Result<Option<Newest>> {
        if self.streams().is_none() {
            return Ok(None);
        }
        let state = self.layer(layer)?;
        Newest::new(Arc::clone(kind), layer, state.shape(), |stored| self.stored_until(state, stored, 0))
    }

    /// The first group from `from` on whose record stands on no device.
    fn stored_until(&self, state: &Layer, stored: &SummaryRecords, from: usize) -> usize {
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

    /// Gives up what summaries of a layer, or of all, keep of groups whose records stand on devices by now, where that may be many.
    ///
    /// # Errors
    /// As [`SummarySpec::layer`].
    pub(super) fn leave_stored(&mut self, layer: Option<usize>) -> Result<()> {
        let mut any = false;
        for at in layer.map_or(0..self.layers.len(), |layer| layer..layer + 1) {
            let Some(Some(state)) = self.layers.get(at) else { continue };
            let due = |extra: &dyn LayerSummary| {
                let newest = newest_of(extra).filter(|newest| newest.is_due())?;
                Some(self.stored_until(state, &newest.stored().0, newest.before()))
            };
            let until: Vec<Option<usize>> = state.extras.iter().map(|extra| due(extra.as_ref())).collect();
            any |= until.iter().any(Option::is_some);
            let extras = self.layers[at].iter_mut().flat_map(|state| &mut state.extras);
            for (extra, until) in extras.zip(until) {
                let newest = (extra.as_mut() as &mut dyn Any).downcast_mut::<Newest>();
                if let Some((newest, until)) = newest.zip(until) {
                    newest.leave(until)?;
                }
            }
        }
        if any {
            self.account_methods();
        }
        Ok(())
    }
}

/// The summary as one of which only the newest groups are kept, if it is.
pub(super) fn newest_of(summary: &dyn LayerSummary) -> Option<&Newest> {
    (summary as &dyn Any).downcast_ref()
}
