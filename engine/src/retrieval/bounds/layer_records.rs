//! Min/max records of a layer that are in memory for a selection or two: in the buffers of their read, or made from
//! keys.

use crate::kernels::extremes;
use crate::metrics::Reservation;
use crate::retrieval::bounds::records::Reserve;
use crate::retrieval::key_shape::KeyShape;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::min_max_element;

/// The records of consecutive groups, in pieces.
pub(crate) struct LayerRecords {
    first_group: usize,
    groups: usize,
    /// The pieces, each with its first group.
    pieces: Vec<(usize, RecordPiece)>,
    /// The elements of a record: minima, then maxima.
    record: usize,
    element: DType,
}

/// Min/max records that were read for one selection, and the budget that takes the memory of what is computed from
/// them.
#[allow(unreachable_pub, reason = "a hidden method of a public trait takes it")]
pub struct LoadedMinMax<'a> {
    pub(crate) records: &'a Arc<LayerRecords>,
    pub(crate) reserve: Reserve<'a>,
}

/// Records of consecutive groups in one piece of memory.
pub(crate) enum RecordPiece {
    /// Verified records in the buffer of a read.
    Read(Box<dyn AsRef<[u8]> + Send + Sync>),
    /// Records made from keys, or copied.
    Made { records: Vec<u16>, _held: Reservation },
}

impl RecordPiece {
    fn records(&self) -> &[u16] {
        match self {
            Self::Read(bytes) => bytemuck::try_cast_slice((**bytes).as_ref()).unwrap_or_default(),
            Self::Made { records, .. } => records,
        }
    }
}

impl LayerRecords {
    /// Returns no records, for groups from `first_group` on with keys of this shape.
    pub(crate) fn new(shape: &KeyShape, first_group: usize) -> Self {
        let element = min_max_element(shape.dtype);
        Self { first_group, groups: 0, pieces: Vec::new(), record: 2 * shape.width(), element }
    }

    /// Adds the records of the next groups. Returns false if the piece does not hold whole records.
    pub(crate) fn add(&mut self, piece: RecordPiece) -> bool {
        let elements = piece.records().len();
        let whole = elements.is_multiple_of(self.record);
        if whole {
            self.pieces.push((self.range().end, piece));
            self.groups += elements / self.record;
        }
        whole
    }

    /// Returns the groups that have records.
    pub(crate) fn range(&self) -> Range<usize> {
        self.first_group..self.first_group + self.groups
    }

    /// Returns the elements of a record.
    pub(crate) fn record(&self) -> usize {
        self.record
    }

    /// Returns the type of the elements.
    pub(crate) fn element(&self) -> DType {
        self.element
    }

    /// Returns the records of groups, in pieces.
    pub(crate) fn slices(&self, range: Range<usize>) -> impl Iterator<Item = &[u16]> {
        let at = self.pieces.partition_point(|(first, _)| *first <= range.start).saturating_sub(1);
        let pieces = self.pieces[at..].iter().take_while(move |(first, _)| *first < range.end);
        pieces.filter_map(move |(first, piece)| {
            let records = piece.records();
            let own = *first..first + records.len() / self.record;
            let (start, end) = (range.start.max(own.start), range.end.min(own.end));
            (start < end).then(|| &records[(start - own.start) * self.record..(end - own.start) * self.record])
        })
    }
}

/// Appends the record of a group, made from its decoded K plane `[kv_heads, G, key_dim]`.
pub(crate) fn add_record(shape: &KeyShape, key_plane: &[u8], out: &mut Vec<u16>) {
    let (start, width) = (out.len(), shape.width());
    out.resize(start + 2 * width, 0);
    let (minima, maxima) = out[start..].split_at_mut(width);
    extremes(key_plane, shape.kv_heads, shape.group_tokens, shape.dtype, minima, maxima);
}
