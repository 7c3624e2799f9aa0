//! The contents of a frame before it is written.

use crate::catalog::GroupBuffer;
use crate::error::Result;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::{Descriptor, SummaryHeader, SummaryRecords};
use zerocopy::IntoBytes;

/// Tokens of a layer that are not in groups: planes `[kv_heads, tokens, dim]`.
///
/// Their bytes stay in the sequence until the frame is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub(crate) layer: usize,
    pub(crate) first_token: u64,
    pub(crate) tokens: u32,
    /// Bytes of all planes.
    pub(crate) bytes: usize,
}

/// The source of the bytes of tails.
pub(crate) trait TailRows {
    /// Appends the parts of a plane of a tail (0: keys, 1: values) to `out`, in order. Adds none if the layer has no
    /// such plane.
    ///
    /// # Errors
    /// The tokens are not in memory.
    fn rows<'a>(&'a self, tail: &Tail, plane: usize, out: &mut Vec<&'a [u8]>) -> Result<()>;
}

/// Summary records of consecutive groups of a layer.
pub(super) struct SummaryPart {
    pub(super) layer: usize,
    pub(super) first_group: u64,
    pub(super) groups: usize,
    pub(super) what: SummaryRecordKind,
    /// The records, behind their header if they have one.
    pub(super) pieces: Vec<RecordBytes>,
}

impl SummaryPart {
    pub(super) fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes().len()).sum()
    }
}

/// The records of a summary, as their bytes on disk.
pub(crate) enum RecordBytes {
    /// Made for this frame.
    Made(Vec<u8>),
    /// Shared with the summary in memory, so that they are not copied.
    Shared(Box<dyn AsRef<[u8]> + Send + Sync>),
}

impl RecordBytes {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Made(bytes) => bytes,
            Self::Shared(records) => (**records).as_ref(),
        }
    }
}

/// The kind of the records of a summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SummaryRecordKind {
    /// Minima and maxima, of this element type.
    MinMax(DType),
    /// The records of a selector's summary.
    Stored(SummaryRecords),
}

/// A part of the bytes of an adapter's layer, from byte `first` on.
pub(crate) struct AdapterPart {
    pub(crate) layer: usize,
    pub(crate) first: u64,
    pub(crate) bytes: Vec<u8>,
}

/// The ends of what a frame without groups holds: one past its last token, and one past its last token id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CoveredEnds {
    pub(crate) tokens: u64,
    pub(crate) ids: u64,
}

/// The contents of one frame.
///
/// It counts an upper bound of its bytes, so that the sequence starts the next frame in time.
#[derive(Default)]
pub(crate) struct FrameBuilder {
    pub(super) runs: Vec<Arc<GroupBuffer>>,
    pub(super) summaries: Vec<SummaryPart>,
    pub(super) tails: Vec<Tail>,
    pub(super) token_ids: Option<(u64, Vec<u8>, u32)>,
    pub(super) state: Option<(u64, Vec<u8>)>,
    pub(super) adapters: Vec<AdapterPart>,
    front_bytes: usize,
    run_bytes: usize,
    pub(super) first_token: Option<u64>,
}

impl FrameBuilder {
    /// Notes that the frame holds something of this token.
    fn holds(&mut self, first_token: u64) {
        self.first_token = Some(self.first_token.map_or(first_token, |first| first.min(first_token)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        let no_tokens = self.runs.is_empty() && self.tails.is_empty() && self.token_ids.is_none();
        no_tokens && self.state.is_none() && self.adapters.is_empty()
    }

    /// Returns whether it holds no groups.
    pub(crate) fn is_small(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns an upper bound of its bytes on disk, without the fixed part of the header.
    pub(crate) fn bytes(&self) -> usize {
        self.front_bytes + self.run_bytes
    }

    /// Returns its layers with the bytes of their groups, for placement.
    pub(crate) fn parts(&self) -> Vec<(usize, u64)> {
        let mut parts: Vec<(usize, u64)> = Vec::new();
        for run in &self.runs {
            match parts.last_mut() {
                Some((layer, bytes)) if *layer == run.layer => *bytes += run.disk_bytes() as u64,
                _ => parts.push((run.layer, run.disk_bytes() as u64)),
            }
        }
        parts
    }

    /// Adds groups with the min/max records of the first of them: element type, number of groups, bytes.
    pub(crate) fn run(
        &mut self,
        run: Arc<GroupBuffer>,
        group_tokens: u64,
        planes: usize,
        summary: Option<(DType, usize, Vec<RecordBytes>)>,
    ) {
        self.run_bytes += run.disk_bytes();
        self.holds(run.first_group * group_tokens);
        self.front_bytes += run.groups * planes * 8 + 2 * size_of::<Descriptor>();
        if let Some((element, groups, pieces)) = summary.filter(|(_, groups, _)| *groups > 0) {
            self.front_bytes += pieces.iter().map(|piece| piece.bytes().len()).sum::<usize>().next_multiple_of(8);
            self.summaries_of(&run, groups, SummaryRecordKind::MinMax(element), &[]).pieces.extend(pieces);
        }
        self.runs.push(run);
    }

    /// Adds records of a selector's summary for the first groups of the last run. `adapter` is the id of its adapter in
    /// the store.
    pub(crate) fn stored_summary(&mut self, stored: SummaryRecords, adapter: u64, groups: usize, records: Vec<u8>) {
        let Some(run) = self.runs.last().map(Arc::clone) else { return };
        let header = stored.header(adapter);
        self.front_bytes += records.len().next_multiple_of(8);
        let part = self.summaries_of(&run, groups, SummaryRecordKind::Stored(stored), header.as_bytes());
        part.pieces.push(RecordBytes::Made(records));
    }

    /// Bytes that [`Self::stored_summary`] may add beyond the records.
    pub(crate) const STORED_OVERHEAD: usize = size_of::<SummaryHeader>() + size_of::<Descriptor>() + 16;

    /// Returns the records that the first groups of a run continue, or new ones behind `header`.
    fn summaries_of(
        &mut self,
        run: &GroupBuffer,
        groups: usize,
        what: SummaryRecordKind,
        header: &[u8],
    ) -> &mut SummaryPart {
        let goes_on = |part: &SummaryPart| {
            part.layer == run.layer && part.what == what && part.first_group + part.groups as u64 == run.first_group
        };
        let at = self.summaries.iter().rposition(goes_on).unwrap_or_else(|| {
            self.front_bytes += Self::STORED_OVERHEAD;
            let (layer, first_group) = (run.layer, run.first_group);
            let pieces = vec![RecordBytes::Made(header.to_vec())];
            self.summaries.push(SummaryPart { layer, first_group, groups: 0, what, pieces });
            self.summaries.len() - 1
        });
        let part = &mut self.summaries[at];
        part.groups += groups;
        part
    }

    /// Returns the ends of what it holds, if it holds no groups.
    pub(super) fn small(&self) -> Option<CoveredEnds> {
        let tokens = self.tails.iter().map(|tail| tail.first_token + u64::from(tail.tokens)).max();
        let ids = self.token_ids.as_ref().map(|(first, _, count)| first + u64::from(*count));
        let ends = CoveredEnds { tokens: tokens.unwrap_or(0), ids: ids.unwrap_or(0) };
        self.runs.is_empty().then_some(ends)
    }

    /// Adds tokens that are not in groups.
    pub(crate) fn tail(&mut self, tail: Tail) {
        self.front_bytes += tail.bytes + 16 + size_of::<Descriptor>() + 16;
        self.holds(tail.first_token);
        self.tails.push(tail);
    }

    /// Adds token ids, from index `first` on.
    pub(crate) fn token_ids(&mut self, first: u64, ids: &[u32]) {
        self.front_bytes += ids.len() * 4 + 16 + size_of::<Descriptor>();
        self.holds(first);
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.token_ids = Some((first, bytes, ids.len() as u32));
    }

    /// Adds a part of an adapter.
    pub(crate) fn adapter(&mut self, part: AdapterPart) {
        self.front_bytes += part.bytes.len() + 16 + size_of::<Descriptor>();
        self.adapters.push(part);
    }

    /// Adds the caller's state, with the committed length that it belongs to.
    pub(crate) fn state(&mut self, tokens: u64, state: Vec<u8>) {
        self.front_bytes += state.len() + 16 + size_of::<Descriptor>();
        self.state = Some((tokens, state));
    }
}
