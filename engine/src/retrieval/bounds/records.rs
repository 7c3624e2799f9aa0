//! Element-wise minimum and maximum of the keys of each group (LeoAM section 4.1; Quest).
//!
//! Invariant: for every token of a group and every query, `sum_j max(q_j * max_j, q_j * min_j)` is at least `q . k`.
//!
//! Records have 16-bit elements. Records of f16 and bf16 keys are exact. Records of f32 keys are bf16, with minima
//! rounded down and maxima rounded up, so that the invariant holds.

use crate::kernels::extremes;
use crate::metrics::Reservation;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::min_max_element;
use stratakv_format::layout::LayerGeometry;

/// Bytes of a chunk of records. A sequence shares whole chunks with its forks and readers.
const CHUNK_BYTES: usize = 16 << 10;

/// A chunk: the records of consecutive groups, with their memory reservation.
struct RecordChunk {
    records: Vec<u16>,
    held: Option<Reservation>,
}

/// Records of consecutive groups in a shared chunk.
pub(crate) struct SharedRecords {
    chunk: Arc<RecordChunk>,
    elements: Range<usize>,
}

impl AsRef<[u8]> for SharedRecords {
    /// Returns the bytes of the records, as a frame stores them.
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.chunk.records[self.elements.clone()])
    }
}

/// Reserves bytes of the memory budget.
pub(crate) type Reserve<'a> = &'a mut dyn FnMut(usize) -> Option<Reservation>;

/// The records of one layer, by group. Clones are cheap, because they share chunks until they change them.
#[derive(Clone)]
pub(crate) struct MinMax {
    /// Minima `[kv_heads, key_dim]` and then maxima, per group. All chunks but the last hold [`Self::chunk_groups`]
    /// groups. The last may hold more groups than count.
    chunks: Vec<Arc<RecordChunk>>,
    groups: usize,
    /// The elements of the minima of a record.
    elements: usize,
    element: DType,
}

impl RecordChunk {
    fn bytes(&self) -> usize {
        self.held.as_ref().map_or(0, Reservation::bytes)
    }
}

impl MinMax {
    /// Returns no records, for keys of `dtype`.
    pub(crate) fn new(layer: &LayerGeometry, dtype: DType) -> Self {
        Self { chunks: Vec::new(), groups: 0, elements: layer.key_elements(), element: min_max_element(dtype) }
    }

    /// Returns how many groups have a record.
    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the elements of a record.
    pub(crate) fn record(&self) -> usize {
        2 * self.elements
    }

    /// Returns the groups of a full chunk.
    fn chunk_groups(&self) -> usize {
        (CHUNK_BYTES / (2 * self.record())).max(1)
    }

    /// Returns the bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.bytes()).sum()
    }

    /// Returns the bytes that a clone does not share: the list of chunks.
    pub(crate) fn own_bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<Arc<RecordChunk>>()
    }

    /// Makes room for `more` groups. Returns false if there is no memory, and the records are unchanged.
    pub(crate) fn room(&mut self, more: usize, reserve: Reserve<'_>) -> bool {
        if more == 0 {
            return true;
        }
        let (record, full) = (self.record(), self.chunk_groups());
        let end = self.groups + more;
        for index in self.groups / full..end.div_ceil(full) {
            let used = self.groups.saturating_sub(index * full).min(full) * record;
            let wanted = (end - index * full).min(full) * record;
            let chunk = self.chunks.get_mut(index);
            if let Some(chunk) = chunk.and_then(Arc::get_mut)
                && chunk.records.capacity() >= wanted
            {
                continue;
            }
            // Chunks grow in steps.
            let elements = (wanted + wanted / 4).min(full * record);
            let Some(held) = reserve(2 * elements) else { return false };
            let mut records = Vec::new();
            records.reserve_exact(elements);
            let chunk = |records| Arc::new(RecordChunk { records, held: Some(held) });
            match self.chunks.get_mut(index) {
                Some(old) => {
                    records.extend_from_slice(&old.records[..used]);
                    *old = chunk(records);
                }
                None => self.chunks.push(chunk(records)),
            }
        }
        true
    }

    /// Adds up to `count` records of zeros in one chunk and returns them. There must be [room](Self::room) for them.
    fn slots(&mut self, count: usize) -> &mut [u16] {
        let (record, full) = (self.record(), self.chunk_groups());
        let (index, first) = (self.groups / full, self.groups % full);
        let count = count.min(full - first);
        let chunk = self.chunks.get_mut(index).and_then(Arc::get_mut);
        debug_assert!(chunk.is_some(), "no room was made");
        let Some(chunk) = chunk else { return &mut [] };
        chunk.records.truncate(first * record);
        chunk.records.resize((first + count) * record, 0);
        self.groups += count;
        &mut chunk.records[first * record..]
    }

    /// Adds the record of the next group, from its K plane `[kv_heads, G, key_dim]` in `dtype`. There must be
    /// [room](Self::room).
    pub(crate) fn push(&mut self, key_plane: &[u8], heads: usize, tokens: usize, dtype: DType) {
        let elements = self.elements;
        let slot = self.slots(1);
        if slot.is_empty() {
            return;
        }
        let (minima, maxima) = slot.split_at_mut(elements);
        extremes(key_plane, heads, tokens, dtype, minima, maxima);
    }

    /// Returns where the records of groups are: chunks, and the elements in each.
    fn places(&self, range: Range<usize>) -> impl Iterator<Item = (&Arc<RecordChunk>, Range<usize>)> {
        let (record, full) = (self.record(), self.chunk_groups());
        let chunks = self.chunks.iter().enumerate().skip(range.start / full);
        chunks.take_while(move |(index, _)| index * full < range.end).map(move |(index, chunk)| {
            let first = index * full;
            let (start, end) = (range.start.max(first) - first, range.end.min(first + full) - first);
            (chunk, start * record..end * record)
        })
    }

    /// Returns the records of groups, in pieces.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[u16]> {
        self.places(range).map(|(chunk, elements)| &chunk.records[elements])
    }

    /// Returns the records of groups as shared pieces. While a piece is held, its chunk has no [room](Self::room).
    pub(crate) fn shared(&self, range: Range<usize>) -> impl Iterator<Item = SharedRecords> {
        self.places(range).map(|(chunk, elements)| SharedRecords { chunk: Arc::clone(chunk), elements })
    }

    /// Returns the bytes of the records of groups as stored, in pieces.
    pub(crate) fn encoded(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        self.pieces(range).map(bytemuck::cast_slice)
    }

    /// Puts stored records from `first_group` on, over existing ones. Earlier groups without a record get one of zeros.
    /// Returns false if there is no memory.
    pub(crate) fn lay(&mut self, first_group: usize, bytes: &[u8], reserve: Reserve<'_>) -> bool {
        let mut rest = bytes.as_chunks::<2>().0;
        let record = self.record();
        let end = first_group + rest.len() / record;
        // Records behind them are put back afterwards.
        let start = first_group.min(self.groups);
        let before = std::mem::replace(&mut self.groups, start);
        if before > start && before > end {
            let mut kept = Vec::new();
            self.groups = before;
            self.encoded(end..before).for_each(|piece| kept.extend_from_slice(piece));
            self.groups = start;
            return self.lay(first_group, bytes, reserve) && self.lay(end, &kept, reserve);
        }
        if !self.room(end - start, reserve) {
            self.groups = before;
            return false;
        }
        while self.groups < first_group {
            let gap = first_group - self.groups;
            if self.slots(gap).is_empty() {
                return false;
            }
        }
        while rest.len() >= record {
            let slots = self.slots(rest.len() / record);
            if slots.is_empty() {
                return false;
            }
            let taken;
            (taken, rest) = rest.split_at(slots.len());
            for (slot, bits) in slots.iter_mut().zip(taken) {
                *slot = u16::from_le_bytes(*bits);
            }
        }
        true
    }

    /// Removes the records from `groups` on.
    pub(crate) fn truncate(&mut self, groups: usize) {
        self.groups = self.groups.min(groups);
        self.chunks.truncate(self.groups.div_ceil(self.chunk_groups()));
    }

    /// Returns the element type of the records.
    pub(crate) fn dtype(&self) -> DType {
        self.element
    }
}

/// Writes upper bounds of the groups of `pieces`, summed over all query heads, to `scores`.
///
/// `query` is `[q_heads, key_dim]`, `heads` are the KV heads, `record` is the elements of a record, and `dot` returns
/// `sum_j weights_j * record_j`.
///
/// Let `p_j` be the sum of the positive and `n_j` that of the negative `q_j` over the query heads of a KV head. The sum
/// of their bounds is `sum_j p_j * max_j + n_j * min_j`, so that the cost does not grow with the number of query heads.
pub(crate) fn upper_bounds<'a>(
    query: &[f32],
    heads: usize,
    record: usize,
    pieces: impl Iterator<Item = &'a [u16]>,
    dot: impl Fn(&[f32], &[u16]) -> f32,
    scores: &mut Vec<f32>,
) {
    let width = record / 2;
    let dim = width / heads;
    // In the order of a record: weights of the minima, then of the maxima.
    let mut weights = vec![0.0; record];
    let (negative, positive) = weights.split_at_mut(width);
    let ratio = query.len() / width;
    for (head, rows) in query.chunks_exact(ratio * dim).enumerate() {
        for row in rows.chunks_exact(dim) {
            for (j, &q) in row.iter().enumerate() {
                let at = head * dim + j;
                if q < 0.0 { negative[at] += q } else { positive[at] += q }
            }
        }
    }
    for piece in pieces {
        scores.extend(piece.chunks_exact(record).map(|record| dot(&weights, record)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Category, MemoryBudget};
    use half::{bf16, f16};
    use proptest::prelude::*;

    fn layer(kv_heads: u16, key_dim: u16) -> LayerGeometry {
        LayerGeometry {
            kv_heads,
            key_dim,
            value_dim: key_dim,
            window: None,
            rope: None,
            codecs: stratakv_format::layout::RAW_PLANES,
        }
    }

    fn plenty() -> impl FnMut(usize) -> Option<Reservation> {
        let budget = MemoryBudget::new(1 << 30);
        move |bytes| budget.try_reserve(bytes, Category::Summaries)
    }

    fn to_bytes(values: &[f32], dtype: DType) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = Vec::new();
        let mut stored = Vec::new();
        for &x in values {
            match dtype {
                DType::F32 => bytes.extend(x.to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
                DType::Bf16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
            }
            stored.push(match dtype {
                DType::F32 => x,
                DType::F16 => f16::from_f32(x).to_f32(),
                DType::Bf16 => bf16::from_f32(x).to_f32(),
            });
        }
        (bytes, stored)
    }

    proptest! {
        #[test]
        fn the_bound_holds_for_every_token(
            dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
            heads in 1_usize..4, ratio in 1_usize..4, dim in 1_usize..20, tokens in 1_usize..9,
            seed in any::<u64>(), magnitude in -6_i32..4,
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = || (2.0 * rng.f32() - 1.0) * 10_f32.powi(magnitude);
            let keys: Vec<f32> = (0..heads * tokens * dim).map(|_| random()).collect();
            let query: Vec<f32> = (0..heads * ratio * dim).map(|_| random()).collect();
            let (bytes, stored) = to_bytes(&keys, dtype);
            let mut summary = MinMax::new(&layer(heads as u16, dim as u16), dtype);
            prop_assert!(summary.room(1, &mut plenty()));
            summary.push(&bytes, heads, tokens, dtype);
            let mut scores = Vec::new();
            let widen = |bits| match dtype {
                DType::F16 => f16::from_bits(bits).to_f32(),
                _ => bf16::from_bits(bits).to_f32(),
            };
            let dot = |weights: &[f32], record: &[u16]| weights.iter().zip(record).map(|(w, &r)| w * widen(r)).sum();
            upper_bounds(&query, heads, summary.record(), summary.pieces(0..1), dot, &mut scores);
            // The sum over heads of upper bounds is an upper bound of the sum over heads of each best token.
            let mut best = 0.0_f64;
            let mut scale = 0.0_f64;
            for q_head in 0..heads * ratio {
                let q = &query[q_head * dim..][..dim];
                let dots = (0..tokens).map(|t| {
                    let k = &stored[(q_head / ratio * tokens + t) * dim..][..dim];
                    scale += q.iter().zip(k).map(|(a, b)| f64::from(a * b).abs()).sum::<f64>();
                    q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                });
                best += dots.fold(f64::NEG_INFINITY, f64::max);
            }
            prop_assert!(f64::from(scores[0]) >= best - 1e-5 * scale, "{} < {best}", scores[0]);
            // With one token, minimum and maximum equal the key, and the bound is the dot product.
            if tokens == 1 && dtype != DType::F32 {
                prop_assert!((f64::from(scores[0]) - best).abs() <= 1e-5 * scale);
            }
        }

    }

    proptest! {
        #[test]
        fn clones_keep_their_records_and_pay_for_what_they_hold(
            steps in prop::collection::vec((0_usize..40, 0_usize..4, any::<bool>()), 1..40), dim in 100_u16..700,
        ) {
            // Records of 400 to 2800 bytes give chunks of 40 to 5 groups. A record here repeats one number.
            let elements = usize::from(dim);
            let budget = MemoryBudget::new(1 << 30);
            let mut reserve = |bytes| budget.try_reserve(bytes, Category::Summaries);
            let mut summary = MinMax::new(&layer(1, dim), DType::F16);
            let (mut model, mut kept): (Vec<u16>, Vec<(MinMax, Vec<u16>)>) = (Vec::new(), Vec::new());
            let record = |value: u16| value.to_le_bytes().repeat(2 * elements);
            let mut value = 0_u16;
            for (count, kind, clone) in steps {
                value += 1;
                match kind {
                    0 => {
                        prop_assert!(summary.room(count, &mut reserve));
                        for _ in 0..count / 2 {
                            value += 1;
                            summary.push(&value.to_le_bytes().repeat(elements), 1, 1, DType::F16);
                            model.push(value);
                        }
                    }
                    1 => {
                        // Behind a gap, over the middle, and over the end.
                        let first = count * (model.len() + 3) / 40;
                        prop_assert!(summary.lay(first, &record(value).repeat(7), &mut reserve));
                        model.resize(model.len().max(first + 7), 0);
                        model[first..first + 7].fill(value);
                    }
                    2 => {
                        summary.truncate(count);
                        model.truncate(count);
                    }
                    _ => {
                        let before = budget.used();
                        prop_assert!(!summary.room(count + 1, &mut |_| None) || budget.used() == before);
                    }
                }
                if clone {
                    let before = budget.used();
                    kept.push((summary.clone(), model.clone()));
                    prop_assert_eq!(budget.used(), before, "a clone costs nothing");
                }
            }
            kept.push((summary, model));
            for (summary, model) in kept {
                prop_assert_eq!(summary.groups(), model.len());
                let middle = model.len() / 3..model.len();
                let mut bytes = Vec::new();
                summary.encoded(middle.clone()).for_each(|piece| bytes.extend_from_slice(piece));
                prop_assert_eq!(bytes, model[middle].iter().flat_map(|v| record(*v)).collect::<Vec<_>>());
                let mut scores = Vec::new();
                let dot = |_: &[f32], record: &[u16]| f32::from(record[0]);
                let (query, pieces) = (vec![1.0; elements], summary.pieces(0..model.len()));
                upper_bounds(&query, 1, summary.record(), pieces, dot, &mut scores);
                prop_assert_eq!(scores, model.iter().map(|v| f32::from(*v)).collect::<Vec<_>>());
            }
            prop_assert_eq!(budget.used(), 0, "all dropped");
        }
    }

    #[test]
    fn records_survive_disk() {
        let mut summary = MinMax::new(&layer(2, 4), DType::F16);
        assert!(summary.room(3, &mut plenty()));
        for group in 0..3 {
            let keys: Vec<f32> = (0..2 * 5 * 4).map(|i| (i * 7 % 13) as f32 - group as f32).collect();
            summary.push(&to_bytes(&keys, DType::F16).0, 2, 5, DType::F16);
        }
        let bytes = summary.encoded(0..3).collect::<Vec<_>>().concat();
        let mut again = MinMax::new(&layer(2, 4), DType::F16);
        assert!(again.lay(0, &bytes, &mut plenty()));
        assert_eq!(again.encoded(0..3).collect::<Vec<_>>().concat(), bytes);
    }
}
