//! Summaries that are not kept in memory (LeoAM, section 4.1): a selection reads the records of its layer, in one batch, and gives
//! them back. Min/max records of groups in memory are made from their keys; selectors keep theirs until they stand on a device.

use super::restore::read_records;
use super::suffix_summary::newest_of;
use super::{Layer, Sequence};
use crate::catalog::{Source, min_max_records};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, Reservation, lock};
use crate::plan::{PlaneSet, SelectionInner};
use crate::plan::{ReadPriority, Section};
use crate::read::{ReadSection, RecordsTicket};
use crate::retrieval::{LayerRecords, Newest, RecordPiece, add_record};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use stratakv_format::frame::SummaryRecords;

/// Records that were read ahead, by layer, until they are given back.
#[derive(Default)]
pub(crate) struct Streams {
    ahead: Mutex<BTreeMap<usize, StreamAhead>>,
    /// What somebody has chosen by.
    used: Mutex<Vec<SummaryRecords>>,
}

enum StreamAhead {
    OnTheirWay(RecordsTicket),
    There(Vec<ReadSection>),
}

impl StreamAhead {
    fn has(&self, section: &Section) -> bool {
        match self {
            Self::OnTheirWay(ticket) => ticket.sections().any(|own| own.is(section)),
            Self::There(read) => read.iter().any(|own| own.section.is(section)),
        }
    }
}

impl Streams {
    /// Nobody chooses in this layer soon.
    pub(crate) fn give_back(&self, layer: usize) {
        let gone = lock(&self.ahead).remove(&layer);
        drop(gone);
    }

    /// Their memory is needed.
    pub(crate) fn give_all_back(&self) {
        let gone = std::mem::take(&mut *lock(&self.ahead));
        drop(gone);
    }

    fn has(&self, layer: usize) -> bool {
        lock(&self.ahead).contains_key(&layer)
    }

    fn uses(&self, records: SummaryRecords) {
        let mut used = lock(&self.used);
        if !used.contains(&records) {
            used.push(records);
        }
    }
}

impl Sequence {
    /// What was read ahead for it; none where its summaries are in memory.
    pub(crate) fn streams(&self) -> Option<&Arc<Streams>> {
        self.streams.as_ref()
    }

    /// Whether it carries min/max records that are not in memory.
    pub(super) fn streams_min_max(&self) -> bool {
        self.streams.is_some() && self.who.summaries != 0
    }

    /// Starts reading the records of a layer, for selections until they are given back, where some have been chosen by. The bytes
    /// that it takes from devices; none where nothing is streamed, or there are no buffers for them: never waited for.
    ///
    /// # Errors
    /// No such layer.
    pub(crate) fn stream_ahead(&self, layer: usize) -> Result<Option<u64>> {
        let state = self.layer(layer)?;
        let Some(streams) = self.streams() else { return Ok(None) };
        let used = lock(&streams.used).clone();
        if used.is_empty() {
            return Ok(None);
        }
        if streams.has(layer) {
            return Ok(Some(0));
        }
        let groups = super::select::Span::of(state, self.who.layout.group_tokens()).groups;
        // Of selectors what they do not keep; of those that were taken away nothing.
        let left = |records: &SummaryRecords| {
            if *records == min_max_of(state) {
                return groups.clone();
            }
            let mut own = state.extras.iter().filter_map(|extra| newest_of(extra.as_ref()));
            let before = own.find(|newest| newest.stored().0 == *records).map_or(0, Newest::before);
            groups.start..groups.end.min(before as u64)
        };
        let wanted = used.iter().flat_map(|records| self.wanted(state, records, left(records)));
        let sections: Vec<Section> = wanted.filter_map(|wanted| wanted.section).collect();
        let sections: Vec<Section> = sections.into_iter().filter(RecordsTicket::fits).collect();
        let ticket =
            match RecordsTicket::new(&self.store.devices, self.nothing_of(state), &sections, ReadPriority::Ahead) {
                Ok(ticket) if ticket.is_submitted() => ticket,
                // Nobody waits for them: whoever chooses reads them then.
                Ok(_) => return Ok(None),
                Err(e) if e.kind() == ErrorKind::MemoryLimit => return Ok(None),
                Err(e) => return Err(e),
            };
        let bytes = ticket.device_bytes();
        lock(&streams.ahead).insert(layer, StreamAhead::OnTheirWay(ticket));
        Ok(Some(bytes))
    }

    /// Whether selections in a layer find its records in memory, or on their way there.
    pub(crate) fn has_records(&self, layer: usize) -> bool {
        self.streams().is_none_or(|streams| lock(&streams.used).is_empty() || streams.has(layer))
    }

    /// The min/max records of sealed groups of a layer, for one selection.
    pub(super) fn layer_records(&self, state: &Layer, groups: Range<u64>) -> Result<Arc<LayerRecords>> {
        let stored = min_max_of(state);
        let wanted = self.wanted(state, &stored, groups.clone());
        let read = self.read_wanted(state, stored, &wanted)?;
        let mut records = LayerRecords::new(&state.shape(), groups.start as usize);
        for wanted in wanted {
            let piece = self.piece_of(state, &wanted, &read)?;
            if !records.add(piece) {
                return Err(Error::new(ErrorKind::Corruption, format!("records of layer {} in part", state.index)));
            }
        }
        Ok(Arc::new(records))
    }

    /// The sections that are wanted: those that were read ahead, and others, which somebody waits for. What no copy gives as it was
    /// written is left out.
    pub(super) fn read_wanted(
        &self,
        state: &Layer,
        records: SummaryRecords,
        wanted: &[StreamedLayer],
    ) -> Result<Vec<ReadSection>> {
        let streams = self.streams();
        streams.inspect(|streams| streams.uses(records));
        let mut ahead = streams.and_then(|streams| lock(&streams.ahead).remove(&state.index));
        let sections = wanted.iter().filter_map(|wanted| wanted.section.as_ref()).filter(|s| RecordsTicket::fits(s));
        let sections: Vec<Section> = sections.cloned().collect();
        let read = |sections: &[Section]| {
            RecordsTicket::new(&self.store.devices, self.nothing_of(state), sections, ReadPriority::Demand(None))
        };
        let is_missing = |section: &&Section| ahead.as_ref().is_none_or(|ahead| !ahead.has(section));
        let missing: Vec<Section> = sections.iter().filter(is_missing).cloned().collect();
        let mut ticket = if missing.is_empty() { None } else { Some(read(&missing)?) };
        if ticket.as_ref().is_some_and(|ticket| !ticket.is_submitted())
            && let Some(streams) = streams
        {
            // What was read ahead, for this layer as well, must not keep buffers from what is needed.
            drop((ticket.take(), ahead.take()));
            streams.give_all_back();
            ticket = Some(read(&sections)?);
        }
        let mut found = ticket.map_or(Ok(Vec::new()), RecordsTicket::wait).map_err(|e| match e.kind() {
            ErrorKind::Deadline => Error::new(ErrorKind::Busy, "no buffers for records: views and reads hold them all"),
            _ => e,
        })?;
        if let Some(ahead) = ahead {
            let there = match ahead {
                StreamAhead::There(there) => there,
                StreamAhead::OnTheirWay(ticket) => ticket.wait()?,
            };
            found.extend(there.iter().cloned());
            // The selection by the true query comes behind that by the predicted one.
            streams.inspect(|streams| drop(lock(&streams.ahead).insert(state.index, StreamAhead::There(there))));
        }
        Ok(found)
    }

    /// The records of groups of a layer as they stand on devices, wherever they are now.
    pub(super) fn encoded_records(&self, state: &Layer, groups: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
        let records = self.layer_records(state, groups)?;
        records.slices(records.range()).for_each(|piece| out.extend_from_slice(bytemuck::cast_slice(piece)));
        Ok(())
    }

    /// Where the records of groups are, run after run.
    pub(super) fn wanted(&self, state: &Layer, stored: &SummaryRecords, groups: Range<u64>) -> Vec<StreamedLayer> {
        let mut wanted: Vec<StreamedLayer> = Vec::new();
        let mut group = groups.start;
        while group < groups.end {
            let next = self.section_at(state, stored, group..groups.end);
            group = next.groups.end;
            match wanted.last_mut() {
                Some(last) if same(&last.section, &next.section) => last.groups.end = group,
                _ => wanted.push(next),
            }
        }
        wanted
    }

    /// Where the record of the first of these groups is, with those that follow it there.
    pub(super) fn section_at(&self, state: &Layer, stored: &SummaryRecords, groups: Range<u64>) -> StreamedLayer {
        let group = groups.start;
        let extent = state.table.find(group).filter(|_| state.building_block(group).is_none());
        let (section, end) = match extent.map(|extent| (extent, &extent.source)) {
            Some((extent, Source::Disk { frame, .. })) => {
                let frame = frame.now();
                let end = extent.first_group + extent.groups as u64;
                match frame.summary(state.index, stored, group).copied() {
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
        StreamedLayer { section, groups: group..end.clamp(group + 1, groups.end) }
    }

    /// The records of some groups: read, or made from keys where they are in memory, or damaged wherever they stand.
    fn piece_of(&self, state: &Layer, wanted: &StreamedLayer, read: &[ReadSection]) -> Result<RecordPiece> {
        let record = 2 * 2 * state.shape().width();
        if let Some(section) = &wanted.section {
            let first = (wanted.groups.start - section.place.first_group) as usize * record;
            let bytes = (wanted.groups.end - wanted.groups.start) as usize * record;
            if let Some(ReadSection { buffer, at, .. }) = read.iter().find(|read| read.section.is(section)) {
                return Ok(RecordPiece::Read { buffer: Arc::clone(buffer), at: at + first, bytes });
            }
            if !RecordsTicket::fits(section) {
                return self.large_piece(state, wanted, section);
            }
        }
        let groups = wanted.groups.clone();
        let held = self.store.devices.reserve((groups.end - groups.start) as usize * record, Category::Summaries);
        let held = held.ok_or_else(|| super::no_memory("records of groups in memory"))?;
        let mut records = Vec::with_capacity((groups.end - groups.start) as usize * record / 2);
        let shape = state.shape();
        self.each_keys(state, groups, &mut |_, keys| {
            add_record(&shape, keys, &mut records);
            Ok(())
        })?;
        Ok(RecordPiece::Made { records, _held: held })
    }

    /// Shows the decoded K planes of groups, in order.
    pub(super) fn each_keys(
        &self,
        state: &Layer,
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

    /// Min/max records that are longer than a buffer.
    fn large_piece(&self, state: &Layer, wanted: &StreamedLayer, section: &Section) -> Result<RecordPiece> {
        let record = 2 * 2 * state.shape().width();
        let groups = (wanted.groups.end - wanted.groups.start) as usize;
        let held = self.store.devices.reserve(groups * record, Category::Summaries);
        let held = held.ok_or_else(|| super::no_memory("the records of a layer"))?;
        let first = (wanted.groups.start - section.place.first_group) as usize * record;
        let read = self.large_section(section)?;
        let own = read.as_ref().and_then(|(bytes, _)| bytes.get(first..first + groups * record));
        let records = own.map(|own| own.as_chunks::<2>().0.iter().map(|bits| u16::from_le_bytes(*bits)).collect());
        match records {
            Some(records) => Ok(RecordPiece::Made { records, _held: held }),
            None => self.piece_of(state, &StreamedLayer { section: None, groups: wanted.groups.clone() }, &[]),
        }
    }

    /// The records of a section that is longer than a buffer, checked, behind its header; none where no copy gives them.
    pub(super) fn large_section(&self, section: &Section) -> Result<Option<(Vec<u8>, Reservation)>> {
        // The records, and their pages as they are read.
        let held = self.store.devices.reserve(2 * section.read_bytes(), Category::Summaries);
        let held = held.ok_or_else(|| super::no_memory("the records of a layer"))?;
        let group_tokens = self.who.layout.group_tokens() as u64;
        let read = read_records(&self.store.devices, group_tokens, std::slice::from_ref(section))?.pop().flatten();
        Ok(read.map(|read| (read, held)))
    }

    /// What records are read for: a view of nothing.
    fn nothing_of(&self, state: &Layer) -> Arc<SelectionInner> {
        Arc::new(SelectionInner {
            layout: self.who.layout.clone(),
            layer: state.index,
            length: state.tokens,
            units: Vec::new(),
            tail: None,
            rebuilt: None,
            instance: self.store.devices.identity.instance,
            handle: self.handle,
            planes: PlaneSet::KeysAndValues,
            cache: None,
        })
    }
}

/// The records of consecutive groups, in a section of a frame or nowhere.
pub(super) struct StreamedLayer {
    pub(super) section: Option<Section>,
    pub(super) groups: Range<u64>,
}

/// What the min/max records of a layer are.
fn min_max_of(state: &Layer) -> SummaryRecords {
    min_max_records((2 * 2 * state.shape().width()) as u32)
}

fn same(a: &Option<Section>, b: &Option<Section>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is(b),
        (None, None) => true,
        _ => false,
    }
}
