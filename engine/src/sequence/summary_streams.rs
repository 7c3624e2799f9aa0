//! Streamed summaries (LeoAM, section 4.1): a selection reads the records of its layer in one batch and frees them
//! after.
//!
//! 1. [`Sequence::stream_ahead`] reads the records of a layer before a selection asks, if buffers are free.
//! 2. A selection finds the place of each group's record ([`Sequence::wanted`]).
//! 3. It takes what was read ahead and reads the rest ([`Sequence::read_wanted`]).
//! 4. Min/max records of groups in memory, and damaged ones, are computed from the keys.
//!
//! Records that were read ahead stay until they are given back, because a selection by the true query follows the one
//! by the predicted query. They must never keep buffers from a read that a caller waits for.

use super::attached_summary::AttachedSummary;
use super::errors::no_memory;
use super::handle::Sequence;
use super::layer::LayerState;
use super::restore::read_records;
use super::span::Span;
use super::streams::{StreamAhead, StreamedGroups, SummaryStreams};
use crate::catalog::{Source, min_max_records};
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::metrics::{Category, Reservation};
use crate::plan::{PlaneSet, SelectionInner};
use crate::plan::{ReadPriority, Section};
use crate::read::{ReadSection, RecordsTicket};
use crate::retrieval::{LayerRecords, RecordPiece, SuffixSummary, add_record};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::SummaryRecords;

impl Sequence {
    /// Returns the records that were read ahead; none if summaries are resident.
    pub(crate) fn streams(&self) -> Option<&Arc<SummaryStreams>> {
        self.streams.as_ref()
    }

    /// Returns whether the sequence stores min/max records and streams them.
    pub(super) fn streams_min_max(&self) -> bool {
        self.streams.is_some() && self.identity.summaries != 0
    }

    /// Starts to read the records of a layer, of the kinds that selections have used. Returns the bytes that devices
    /// read. Returns none if nothing is streamed, or if there are no buffers, because it never waits.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such layer.
    pub(crate) fn stream_ahead(&self, layer: usize) -> Result<Option<u64>> {
        let state = self.layer(layer)?;
        let Some(streams) = self.streams() else { return Ok(None) };
        let used = streams.used();
        if used.is_empty() {
            return Ok(None);
        }
        if streams.has(layer) {
            return Ok(Some(0));
        }
        let groups = Span::of(state, self.identity.layout.group_tokens()).groups;
        // A suffix is in memory, so its groups are not read. A kind that was detached needs nothing.
        let left = |records: &SummaryRecords| {
            if *records == min_max_of(state) {
                return groups.clone();
            }
            let mut own = state.summaries().attached().iter().filter_map(AttachedSummary::suffix);
            let before = own.find(|suffix| suffix.stored().0 == *records).map_or(0, SuffixSummary::first_group);
            groups.start..groups.end.min(before as u64)
        };
        let wanted = used.iter().flat_map(|records| self.wanted(state, records, left(records)));
        let sections: Vec<Section> = wanted.filter_map(|wanted| wanted.section).collect();
        let sections: Vec<Section> = sections.into_iter().filter(RecordsTicket::fits).collect();
        let ticket = match RecordsTicket::new(
            &self.store.devices,
            self.empty_selection(state),
            &sections,
            ReadPriority::Ahead,
        ) {
            Ok(ticket) if ticket.is_submitted() => ticket,
            // The selection reads the records itself.
            Ok(_) => return Ok(None),
            Err(e) if e.kind() == ErrorKind::MemoryLimit => return Ok(None),
            Err(e) => return Err(e),
        };
        let bytes = ticket.device_bytes();
        streams.put(layer, StreamAhead::InFlight(ticket));
        Ok(Some(bytes))
    }

    /// Returns whether selections in a layer find its records in memory or in flight.
    pub(crate) fn has_records(&self, layer: usize) -> bool {
        self.streams().is_none_or(|streams| streams.used().is_empty() || streams.has(layer))
    }

    /// Returns the min/max records of sealed groups of a layer, for one selection.
    ///
    /// # Errors
    /// As [`Self::read_wanted`]. Errors of reading keys.
    pub(super) fn layer_records(&self, state: &LayerState, groups: Range<u64>) -> Result<Arc<LayerRecords>> {
        let stored = min_max_of(state);
        let wanted = self.wanted(state, &stored, groups.clone());
        let read = self.read_wanted(state, stored, &wanted)?;
        let mut records = LayerRecords::new(&state.shape(), groups.start as usize);
        for wanted in wanted {
            let piece = self.piece_of(state, &wanted, &read)?;
            if !records.add(piece) {
                let text = format!("the min/max records of layer {} have a gap", state.index());
                return Err(Error::new(ErrorKind::Corruption, text));
            }
        }
        Ok(Arc::new(records))
    }

    /// Returns the sections that are wanted. Waits for those that were not read ahead. Omits sections that are damaged
    /// in every copy.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`], [`ErrorKind::MemoryLimit`]: no buffers. [`ErrorKind::Io`].
    pub(super) fn read_wanted(
        &self,
        state: &LayerState,
        records: SummaryRecords,
        wanted: &[StreamedGroups],
    ) -> Result<Vec<ReadSection>> {
        let streams = self.streams();
        streams.inspect(|streams| streams.mark_used(records));
        let mut ahead = streams.and_then(|streams| streams.take(state.index()));
        let sections = wanted.iter().filter_map(|wanted| wanted.section.as_ref()).filter(|s| RecordsTicket::fits(s));
        let sections: Vec<Section> = sections.cloned().collect();
        let read = |sections: &[Section]| {
            RecordsTicket::new(&self.store.devices, self.empty_selection(state), sections, ReadPriority::Demand(None))
        };
        let is_missing = |section: &&Section| ahead.as_ref().is_none_or(|ahead| !ahead.has(section));
        let missing: Vec<Section> = sections.iter().filter(is_missing).cloned().collect();
        let mut ticket = if missing.is_empty() { None } else { Some(read(&missing)?) };
        if ticket.as_ref().is_some_and(|ticket| !ticket.is_submitted())
            && let Some(streams) = streams
        {
            // Free all that was read ahead, for this layer as well: it must not keep buffers from this read.
            drop((ticket.take(), ahead.take()));
            streams.give_all_back();
            ticket = Some(read(&sections)?);
        }
        let mut found = ticket.map_or(Ok(Vec::new()), RecordsTicket::wait).map_err(|e| match e.kind() {
            ErrorKind::Deadline => {
                Error::new(ErrorKind::Busy, "no buffers for records: selections and reads hold them all; drop some")
            }
            _ => e,
        })?;
        if let Some(ahead) = ahead {
            let there = match ahead {
                StreamAhead::Loaded(there) => there,
                StreamAhead::InFlight(ticket) => ticket.wait()?,
            };
            found.extend(there.iter().cloned());
            // The selection by the true query follows that by the predicted one.
            streams.inspect(|streams| streams.put(state.index(), StreamAhead::Loaded(there)));
        }
        Ok(found)
    }

    /// Adds the min/max records of groups to `out`, as they are stored.
    pub(super) fn encoded_records(&self, state: &LayerState, groups: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
        let records = self.layer_records(state, groups)?;
        records.slices(records.range()).for_each(|piece| out.extend_from_slice(bytemuck::cast_slice(piece)));
        Ok(())
    }

    /// Returns where the records of groups are, in runs that share a place.
    pub(super) fn wanted(
        &self,
        state: &LayerState,
        stored: &SummaryRecords,
        groups: Range<u64>,
    ) -> Vec<StreamedGroups> {
        let mut wanted: Vec<StreamedGroups> = Vec::new();
        let mut group = groups.start;
        while group < groups.end {
            let next = self.section_at(state, stored, group..groups.end);
            group = next.groups.end;
            match wanted.last_mut() {
                Some(last) if last.same_place(&next) => last.groups.end = group,
                _ => wanted.push(next),
            }
        }
        wanted
    }

    /// Returns where the record of the first of these groups is, with the groups whose records follow it there.
    pub(super) fn section_at(&self, state: &LayerState, stored: &SummaryRecords, groups: Range<u64>) -> StreamedGroups {
        let group = groups.start;
        let extent = state.table().find(group).filter(|_| state.building_block(group).is_none());
        let (section, end) = match extent.map(|extent| (extent, &extent.source)) {
            Some((extent, Source::Disk { frame, .. })) => {
                let frame = frame.now();
                let end = extent.first_group + extent.groups as u64;
                match frame.summary(state.index(), stored, group).copied() {
                    Some(place) => {
                        let end = end.min(place.first_group + u64::from(place.groups));
                        (Some(Section { frame, place }), end)
                    }
                    None => (None, group + 1),
                }
            }
            Some((extent, Source::Memory(_))) => (None, extent.first_group + extent.groups as u64),
            None => (None, group + 1),
        };
        StreamedGroups { section, groups: group..end.clamp(group + 1, groups.end) }
    }

    /// Returns the min/max records of some groups: those that were read, or else those computed from the keys.
    fn piece_of(&self, state: &LayerState, wanted: &StreamedGroups, read: &[ReadSection]) -> Result<RecordPiece> {
        let record = 2 * 2 * state.shape().width();
        if let Some(section) = &wanted.section {
            let first = (wanted.groups.start - section.place.first_group) as usize * record;
            let bytes = (wanted.groups.end - wanted.groups.start) as usize * record;
            if let Some(ReadSection { buffer, at, .. }) = read.iter().find(|read| read.section.is(section)) {
                let range = at + first..at + first + bytes;
                return Ok(RecordPiece::Read(Box::new(BufferRange { buffer: Arc::clone(buffer), range })));
            }
            if !RecordsTicket::fits(section) {
                return self.large_piece(state, wanted, section);
            }
        }
        let groups = wanted.groups.clone();
        let held = self.store.devices.reserve((groups.end - groups.start) as usize * record, Category::Summaries);
        let held = held.ok_or_else(|| no_memory("records of groups in memory"))?;
        let mut records = Vec::with_capacity((groups.end - groups.start) as usize * record / 2);
        let shape = state.shape();
        self.each_keys(state, groups, &mut |_, keys| {
            add_record(&shape, keys, &mut records);
            Ok(())
        })?;
        Ok(RecordPiece::Made { records, _held: held })
    }

    /// Passes the decoded K planes of groups to `each`, in order.
    pub(super) fn each_keys(
        &self,
        state: &LayerState,
        groups: Range<u64>,
        each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut group = groups.start;
        while group < groups.end {
            group = self.visit(state, group, &[], &mut |group, keys, _| match group < groups.end {
                true => each(group, keys),
                false => Ok(()),
            })?;
        }
        Ok(())
    }

    /// Returns min/max records that are longer than a buffer.
    fn large_piece(&self, state: &LayerState, wanted: &StreamedGroups, section: &Section) -> Result<RecordPiece> {
        let record = 2 * 2 * state.shape().width();
        let groups = (wanted.groups.end - wanted.groups.start) as usize;
        let held = self.store.devices.reserve(groups * record, Category::Summaries);
        let held = held.ok_or_else(|| no_memory("the records of a layer"))?;
        let first = (wanted.groups.start - section.place.first_group) as usize * record;
        let read = self.large_section(section)?;
        let own = read.as_ref().and_then(|(bytes, _)| bytes.get(first..first + groups * record));
        let records = own.map(|own| own.as_chunks::<2>().0.iter().map(|bits| u16::from_le_bytes(*bits)).collect());
        match records {
            Some(records) => Ok(RecordPiece::Made { records, _held: held }),
            None => self.piece_of(state, &StreamedGroups { section: None, groups: wanted.groups.clone() }, &[]),
        }
    }

    /// Returns the checked records of a section that is longer than a buffer, without its header, and their memory;
    /// none if no copy has them undamaged.
    pub(super) fn large_section(&self, section: &Section) -> Result<Option<(Vec<u8>, Reservation)>> {
        // The records and the pages with them are in memory together.
        let held = self.store.devices.reserve(2 * section.read_bytes(), Category::Summaries);
        let held = held.ok_or_else(|| no_memory("the records of a layer"))?;
        let group_tokens = self.identity.layout.group_tokens() as u64;
        let read = read_records(&self.store.devices, group_tokens, std::slice::from_ref(section))?.pop().flatten();
        Ok(read.map(|read| (read, held)))
    }

    /// Returns a selection without groups, which a read of records belongs to.
    fn empty_selection(&self, state: &LayerState) -> Arc<SelectionInner> {
        Arc::new(SelectionInner {
            layout: self.identity.layout.clone(),
            layer: state.index(),
            length: state.tokens(),
            groups: Vec::new(),
            pages: Vec::new(),
            tail: None,
            rebuilt: None,
            instance: self.store.devices.identity.instance,
            handle: self.handle,
            planes: PlaneSet::KeysAndValues,
            cache: None,
            cluster_runs: None,
            clusters: None,
        })
    }
}

/// Returns the identity of the min/max records of a layer.
fn min_max_of(state: &LayerState) -> SummaryRecords {
    min_max_records((2 * 2 * state.shape().width()) as u32)
}

/// A range of a read buffer, which is held as long as the records in it are used.
struct BufferRange {
    buffer: Arc<Lease>,
    range: Range<usize>,
}

impl AsRef<[u8]> for BufferRange {
    fn as_ref(&self) -> &[u8] {
        self.buffer.bytes().and_then(|all| all.get(self.range.clone())).unwrap_or_default()
    }
}
