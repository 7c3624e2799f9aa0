//! Records of summaries that were read ahead of selections, and the sections that records are read from.

use crate::metrics::lock;
use crate::options::SummaryResidency;
use crate::plan::Section;
use crate::read::{ReadSection, RecordsTicket};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use stratakv_format::frame::SummaryRecords;

/// Records that were read ahead, by layer, until they are given back.
#[derive(Default)]
pub(crate) struct SummaryStreams {
    /// True if only bounds are streamed.
    bounds_alone: bool,
    ahead: Mutex<BTreeMap<usize, StreamAhead>>,
    /// The kinds of records that a selection has used.
    used: Mutex<Vec<SummaryRecords>>,
}

/// The records of one layer that were read ahead.
pub(super) enum StreamAhead {
    /// The reads are in flight.
    InFlight(RecordsTicket),
    /// The records are in memory.
    Loaded(Vec<ReadSection>),
}

impl StreamAhead {
    pub(super) fn has(&self, section: &Section) -> bool {
        match self {
            Self::InFlight(ticket) => ticket.sections().any(|own| own.is(section)),
            Self::Loaded(read) => read.iter().any(|own| own.section.is(section)),
        }
    }
}

impl SummaryStreams {
    /// Returns none if all summaries are in memory.
    pub(super) fn new(residency: SummaryResidency) -> Option<Arc<Self>> {
        let bounds_alone = residency == SummaryResidency::BoundsStreamed;
        (residency != SummaryResidency::Resident).then(|| Arc::new(Self { bounds_alone, ..Self::default() }))
    }

    pub(super) fn residency(&self) -> SummaryResidency {
        if self.bounds_alone { SummaryResidency::BoundsStreamed } else { SummaryResidency::Streamed }
    }

    /// Frees the records of a layer, because no selection in it is expected soon.
    pub(crate) fn give_back(&self, layer: usize) {
        drop(self.take(layer));
    }

    /// Frees all records, because their memory or their frames are needed.
    pub(crate) fn give_all_back(&self) {
        let gone = std::mem::take(&mut *lock(&self.ahead));
        // Dropped without the lock, because a ticket waits for its reads.
        drop(gone);
    }

    /// Returns the records of a layer and removes them.
    pub(super) fn take(&self, layer: usize) -> Option<StreamAhead> {
        lock(&self.ahead).remove(&layer)
    }

    /// Keeps records for a layer. Records that it had before are dropped.
    pub(super) fn put(&self, layer: usize, ahead: StreamAhead) {
        drop(lock(&self.ahead).insert(layer, ahead));
    }

    pub(super) fn has(&self, layer: usize) -> bool {
        lock(&self.ahead).contains_key(&layer)
    }

    /// Returns the kinds of records that selections have used.
    pub(super) fn used(&self) -> Vec<SummaryRecords> {
        lock(&self.used).clone()
    }

    /// Counts a kind of records as used.
    pub(super) fn mark_used(&self, records: SummaryRecords) {
        let mut used = lock(&self.used);
        if !used.contains(&records) {
            used.push(records);
        }
    }
}

/// The records of consecutive groups.
pub(super) struct StreamedGroups {
    /// The section of a frame with the records; none if no frame has them.
    pub(super) section: Option<Section>,
    pub(super) groups: Range<u64>,
}

impl StreamedGroups {
    /// Returns whether two runs of groups have their records in the same place, or both have none.
    pub(super) fn same_place(&self, other: &Self) -> bool {
        match (&self.section, &other.section) {
            (Some(a), Some(b)) => a.is(b),
            (None, None) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::min_max_records;

    #[test]
    fn summary_streams_list_each_used_kind_once() {
        let streams = SummaryStreams::default();
        streams.mark_used(min_max_records(8));
        streams.mark_used(min_max_records(8));
        assert_eq!(streams.used(), [min_max_records(8)]);
    }

    #[test]
    fn summary_streams_give_back_what_was_read() {
        let streams = SummaryStreams::default();
        streams.put(1, StreamAhead::Loaded(Vec::new()));
        streams.put(2, StreamAhead::Loaded(Vec::new()));
        streams.give_back(1);
        assert!(!streams.has(1) && streams.has(2));
        streams.give_all_back();
        assert!(!streams.has(2) && streams.take(2).is_none());
    }
}
