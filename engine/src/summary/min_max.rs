//! Element-wise minimum and maximum of the keys of each group (LeoAM section 4.1; Quest).
//!
//! For every token of a group and every query, `sum_j max(q_j * max_j, q_j * min_j)` is at least `q . k`. Records are
//! stored in 16 bits: those of f16 and bf16 keys are exact, those of f32 keys are bf16 with the minimum rounded down and the
//! maximum up, so that the bound holds in any case.

use half::bf16;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::layout::LayerGeometry;

/// Bytes of the records that are shared as one between a sequence and its readers.
const CHUNK_BYTES: usize = 16 << 10;

/// The records of one layer, by group. Cheap to clone: clones share full chunks.
#[derive(Clone, Debug)]
pub(crate) struct MinMax {
    /// Minima `[kv_heads, key_dim]` and then maxima, per group; all chunks but the last hold [`Self::chunk_groups`] of them.
    chunks: Vec<Arc<Vec<u16>>>,
    /// Elements of the minima of one record.
    elements: usize,
    element: DType,
}

impl MinMax {
    /// No records yet, for keys of `dtype`.
    pub(crate) fn new(layer: &LayerGeometry, dtype: DType) -> Self {
        Self { chunks: Vec::new(), elements: layer.key_elements(), element: Self::element(dtype) }
    }

    /// Element type of the records for keys of `dtype`.
    pub(crate) fn element(dtype: DType) -> DType {
        if dtype == DType::F16 { DType::F16 } else { DType::Bf16 }
    }

    /// Groups with a record.
    pub(crate) fn groups(&self) -> usize {
        let last = self.chunks.last().map_or(0, |chunk| chunk.len() / self.record());
        self.chunks.len().saturating_sub(1) * self.chunk_groups() + last
    }

    /// Elements of one record.
    fn record(&self) -> usize {
        2 * self.elements
    }

    /// Groups of a full chunk.
    fn chunk_groups(&self) -> usize {
        (CHUNK_BYTES / (2 * self.record())).max(1)
    }

    /// Bytes in memory that `groups` more records take.
    pub(crate) fn bytes_for(&self, groups: usize) -> usize {
        4 * self.elements * groups
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.capacity() * 2).sum()
    }

    /// Bytes that a clone has to itself once either side goes on: the last chunk and the list.
    pub(crate) fn own_bytes(&self) -> usize {
        self.chunks.last().map_or(0, |chunk| chunk.capacity() * 2) + self.chunks.len() * size_of::<Arc<Vec<u16>>>()
    }

    /// Adds the record of the next group from its K plane, `[kv_heads, G, key_dim]` in `dtype`, all G tokens valid.
    pub(crate) fn push(&mut self, key_plane: &[u8], heads: usize, tokens: usize, dtype: DType) {
        let elements = self.elements;
        let (minima, maxima) = self.grow().split_at_mut(elements);
        extremes(key_plane, heads, tokens, dtype, minima, maxima);
    }

    /// Room for one more record, of its own.
    fn grow(&mut self) -> &mut [u16] {
        let (record, full) = (self.record(), self.chunk_groups() * self.record());
        if self.chunks.last().is_none_or(|last| last.len() == full) {
            self.chunks.push(Arc::default());
        }
        let last = self.chunks.len() - 1;
        // Readers keep the chunk that they have.
        let chunk = Arc::make_mut(&mut self.chunks[last]);
        let start = chunk.len();
        if chunk.capacity() < start + record {
            // Exact growth in steps: the memory account promises what is really taken.
            chunk.reserve_exact(record.max(start / 4).min(full - start));
        }
        chunk.resize(start + record, 0);
        &mut chunk[start..]
    }

    /// The records of groups `range`, in pieces.
    fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[u16]> {
        let (record, groups) = (self.record(), self.chunk_groups());
        let chunks = self.chunks.iter().enumerate().skip(range.start / groups).take(range.end.div_ceil(groups));
        chunks.filter_map(move |(index, chunk)| {
            let first = index * groups;
            let start = range.start.max(first) - first;
            let end = range.end.min(first + groups).checked_sub(first)?;
            chunk.get(start * record..end * record)
        })
    }

    /// The records of groups `range` as they stand on disk.
    pub(crate) fn encoded(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        self.pieces(range).map(bytemuck::cast_slice)
    }

    /// Puts records as they stand on disk from `first_group` on; those that were there from that group on are dropped.
    /// `false` when there is a gap before them.
    pub(crate) fn lay(&mut self, first_group: usize, bytes: &[u8]) -> bool {
        if first_group > self.groups() {
            return false;
        }
        self.truncate(first_group);
        self.extend(bytes);
        true
    }

    fn extend(&mut self, bytes: &[u8]) {
        let record = self.record();
        let full = self.chunk_groups() * record;
        let mut rest = bytes.as_chunks::<2>().0;
        while !rest.is_empty() {
            let room = match self.chunks.last() {
                Some(last) if last.len() < full => full - last.len(),
                _ => {
                    self.chunks.push(Arc::default());
                    full
                }
            };
            let taken;
            (taken, rest) = rest.split_at(room.min(rest.len()));
            if let Some(last) = self.chunks.last_mut() {
                let chunk = Arc::make_mut(last);
                chunk.reserve_exact(taken.len());
                chunk.extend(taken.iter().map(|bits| u16::from_le_bytes(*bits)));
            }
        }
    }

    /// Drops the records from `groups` on.
    pub(crate) fn truncate(&mut self, groups: usize) {
        let (record, per_chunk) = (self.record(), self.chunk_groups());
        self.chunks.truncate(groups.div_ceil(per_chunk));
        let kept = groups.saturating_sub(self.chunks.len().saturating_sub(1) * per_chunk) * record;
        if let Some(last) = self.chunks.last_mut().filter(|last| last.len() > kept) {
            Arc::make_mut(last).truncate(kept);
        }
    }

    /// Upper bounds for groups `range`, summed over all query heads, to `scores`. `query` is `[q_heads, key_dim]`, and `dot`
    /// gives `sum_j weights_j * record_j` over elements of [`Self::dtype`].
    ///
    /// With `p_j` the sum of the positive and `n_j` of the negative `q_j` over the query heads of a KV head, the sum of
    /// their bounds is `sum_j p_j * max_j + n_j * min_j`: the cost does not grow with the number of query heads.
    pub(crate) fn scores(
        &self,
        query: &[f32],
        heads: usize,
        range: Range<usize>,
        dot: impl Fn(&[f32], &[u16]) -> f32,
        scores: &mut Vec<f32>,
    ) {
        let dim = self.elements / heads;
        // As in a record: weights of the minima, then of the maxima.
        let mut weights = vec![0.0; 2 * self.elements];
        let (negative, positive) = weights.split_at_mut(self.elements);
        let ratio = query.len() / self.elements;
        for (head, rows) in query.chunks_exact(ratio * dim).enumerate() {
            for row in rows.chunks_exact(dim) {
                for (j, &q) in row.iter().enumerate() {
                    let at = head * dim + j;
                    if q < 0.0 { negative[at] += q } else { positive[at] += q }
                }
            }
        }
        for piece in self.pieces(range) {
            scores.extend(piece.chunks_exact(self.record()).map(|record| dot(&weights, record)));
        }
    }

    /// Element type of the records.
    pub(crate) fn dtype(&self) -> DType {
        self.element
    }
}

/// Minima and maxima `[kv_heads, key_dim]` of a K plane `[kv_heads, tokens, key_dim]`.
pub(super) fn extremes(
    key_plane: &[u8],
    heads: usize,
    tokens: usize,
    dtype: DType,
    minima: &mut [u16],
    maxima: &mut [u16],
) {
    let dim = minima.len() / heads;
    let head_bytes = tokens * dim * dtype.bytes();
    for head in 0..heads {
        let plane = &key_plane[head * head_bytes..(head + 1) * head_bytes];
        let (minima, maxima) = (&mut minima[head * dim..][..dim], &mut maxima[head * dim..][..dim]);
        match dtype {
            DType::F32 => extremes_f32(plane, minima, maxima),
            DType::F16 | DType::Bf16 => extremes_16(plane, minima, maxima),
        }
    }
}

/// Maps the bits of a 16-bit float to an integer of the same order.
pub(super) fn ordered(bits: u16) -> i16 {
    (bits ^ (((bits as i16) >> 15) as u16 & 0x7fff)) as i16
}

/// The inverse of [`ordered`], which is its own inverse.
fn unordered(ordered: i16) -> u16 {
    ordered as u16 ^ ((ordered >> 15) as u16 & 0x7fff)
}

/// Columns that are worked on together: their minima and maxima stay in registers over all tokens.
const COLUMNS: usize = 32;

fn extremes_16(plane: &[u8], minima: &mut [u16], maxima: &mut [u16]) {
    let row_bytes = minima.len() * 2;
    for (start, (minima, maxima)) in minima.chunks_mut(COLUMNS).zip(maxima.chunks_mut(COLUMNS)).enumerate() {
        let first = start * COLUMNS * 2;
        let mut low = [i16::MAX; COLUMNS];
        let mut high = [i16::MIN; COLUMNS];
        for row in plane.chunks_exact(row_bytes) {
            let bytes = &row[first..first + minima.len() * 2];
            match bytes.as_chunks::<2>().0.try_into() {
                Ok(columns) => extend_16::<COLUMNS>(columns, &mut low, &mut high),
                Err(_) => {
                    for (at, bits) in bytes.as_chunks::<2>().0.iter().enumerate() {
                        let value = ordered(u16::from_le_bytes(*bits));
                        (low[at], high[at]) = (low[at].min(value), high[at].max(value));
                    }
                }
            }
        }
        // Two loops: a chained one does not become vector instructions.
        minima.iter_mut().zip(low).for_each(|(out, value)| *out = unordered(value));
        maxima.iter_mut().zip(high).for_each(|(out, value)| *out = unordered(value));
    }
}

/// Of fixed length, so that it becomes vector instructions.
fn extend_16<const N: usize>(columns: &[[u8; 2]; N], low: &mut [i16; N], high: &mut [i16; N]) {
    for at in 0..N {
        let value = ordered(u16::from_le_bytes(columns[at]));
        low[at] = low[at].min(value);
        high[at] = high[at].max(value);
    }
}

fn extremes_f32(plane: &[u8], minima: &mut [u16], maxima: &mut [u16]) {
    let dim = minima.len();
    let mut low = vec![f32::INFINITY; dim];
    let mut high = vec![f32::NEG_INFINITY; dim];
    for row in plane.chunks_exact(dim * 4) {
        for (j, bits) in row.chunks_exact(4).enumerate() {
            let value = f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
            low[j] = low[j].min(value);
            high[j] = high[j].max(value);
        }
    }
    for j in 0..dim {
        minima[j] = round_down(low[j]);
        maxima[j] = round_down(-high[j]) ^ 0x8000;
    }
}

/// The largest bf16 not above `x`; for `x` below every finite bf16 the lowest finite one (an element of that size is
/// refused by append).
fn round_down(x: f32) -> u16 {
    let bits = x.to_bits();
    let cut = (bits >> 16) as u16;
    if x < 0.0 && bits & 0xffff != 0 { (cut + 1).min(bf16::MIN.to_bits()) } else { cut }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    fn layer(kv_heads: u16, key_dim: u16) -> LayerGeometry {
        LayerGeometry { kv_heads, key_dim, value_dim: key_dim, window: None }
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
            let mut state = seed | 1;
            let mut random = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 10_f32.powi(magnitude)
            };
            let keys: Vec<f32> = (0..heads * tokens * dim).map(|_| random()).collect();
            let query: Vec<f32> = (0..heads * ratio * dim).map(|_| random()).collect();
            let (bytes, stored) = to_bytes(&keys, dtype);
            let mut summary = MinMax::new(&layer(heads as u16, dim as u16), dtype);
            summary.push(&bytes, heads, tokens, dtype);
            let mut scores = Vec::new();
            let widen = |bits| if dtype == DType::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() };
            let dot = |weights: &[f32], record: &[u16]| weights.iter().zip(record).map(|(w, &r)| w * widen(r)).sum();
            summary.scores(&query, heads, 0..1, dot, &mut scores);
            // The sum over heads bounds the sum over heads of the best token of each.
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
            // One token: minimum and maximum are the key, and the bound is the dot product itself.
            if tokens == 1 && dtype != DType::F32 {
                prop_assert!((f64::from(scores[0]) - best).abs() <= 1e-5 * scale);
            }
        }

        #[test]
        fn f32_records_are_rounded_outward(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(x.is_finite() && x.abs() < f32::from_bits(0x7f7f_8000));
            let (mut low, mut high) = ([0], [0]);
            extremes_f32(&x.to_le_bytes(), &mut low, &mut high);
            let (low, high) = (bf16::from_bits(low[0]).to_f32(), bf16::from_bits(high[0]).to_f32());
            prop_assert!(low <= x && x <= high && (high - low) <= x.abs() / 64.0 + f32::MIN_POSITIVE);
        }

        #[test]
        fn ordered_bits_keep_the_order(a in any::<u16>(), b in any::<u16>()) {
            let (x, y) = (f16::from_bits(a), f16::from_bits(b));
            prop_assume!(x.is_finite() && y.is_finite() && x != y);
            prop_assert_eq!(x < y, ordered(a) < ordered(b));
            prop_assert_eq!(unordered(ordered(a)), a);
        }
    }

    #[test]
    fn records_survive_disk() {
        let mut summary = MinMax::new(&layer(2, 4), DType::F16);
        for group in 0..3 {
            let keys: Vec<f32> = (0..2 * 5 * 4).map(|i| (i * 7 % 13) as f32 - group as f32).collect();
            summary.push(&to_bytes(&keys, DType::F16).0, 2, 5, DType::F16);
        }
        let mut bytes = Vec::new();
        summary.encoded(0..3).for_each(|piece| bytes.extend_from_slice(piece));
        assert_eq!(bytes.len(), summary.bytes_for(3));
        let mut again = MinMax::new(&layer(2, 4), DType::F16);
        again.extend(&bytes);
        assert_eq!(again.chunks, summary.chunks);
        again.truncate(1);
        assert_eq!(again.groups(), 1);
    }

    proptest! {
        #[test]
        fn clones_keep_their_records(
            steps in prop::collection::vec((0_usize..40, any::<bool>(), any::<bool>()), 1..40), dim in 100_u16..700,
        ) {
            // Records of 400 to 2800 bytes: chunks of 40 to 5 groups. A record here is one number over and over.
            let dim_elements = usize::from(dim);
            let mut summary = MinMax::new(&layer(1, dim), DType::F16);
            let (mut model, mut kept): (Vec<u16>, Vec<(MinMax, Vec<u16>)>) = (Vec::new(), Vec::new());
            let record = |value: u16| [value.to_le_bytes(), value.to_le_bytes()].concat().repeat(dim_elements);
            let mut value = 0_u16;
            for (count, push, clone) in steps {
                if push {
                    for _ in 0..count / 2 {
                        value += 1;
                        let keys: Vec<u8> = value.to_le_bytes().repeat(dim_elements);
                        summary.push(&keys, 1, 1, DType::F16);
                        model.push(value);
                    }
                } else if count % 3 == 0 {
                    value += 1;
                    let laid = count.min(model.len());
                    prop_assert!(summary.lay(laid, &record(value).repeat(7)));
                    model.truncate(laid);
                    model.extend([value; 7]);
                } else {
                    summary.truncate(count);
                    model.truncate(count);
                }
                if clone {
                    kept.push((summary.clone(), model.clone()));
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
                summary.scores(&vec![1.0; dim_elements], 1, 0..model.len(), dot, &mut scores);
                prop_assert_eq!(scores, model.iter().map(|v| f32::from(*v)).collect::<Vec<_>>());
            }
        }
    }
}
