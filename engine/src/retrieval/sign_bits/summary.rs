//! Sign bits: each head's key after a fixed random rotation, one bit per dimension, and its length in f16. No
//! calibration.

use crate::error::Result;
use crate::kernels::{
    SIGN_BYTES, SignQuad, SignSums, SignTables, f16_to_f32, f32_to_f16, is_finite_f16, look_up, pack_signs, prefetch,
    rotate_randomly, sign_sums, signed_sum,
};
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::score_tiles::FillScores;
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, Records, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::{SUMMARY_SIGNS, SummaryRecords};

/// The specification of sign bits.
#[derive(Clone, Copy, Debug)]
pub struct SignSpec;

impl SummarySpec for SignSpec {
    fn id(&self) -> String {
        "signs".into()
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let dims = shape.key_dim.next_power_of_two().max(8);
        let (signs, lengths) = (shape.kv_heads * dims / 8 * shape.group_tokens, shape.kv_heads * shape.group_tokens);
        Ok(Box::new(Signs { shape, dims, signs: Records::new(signs), lengths: Records::new(lengths) }))
    }
}

/// The sign bits of a layer, `[groups][kv_heads][group_tokens, dims / 8]`, and the lengths of its keys,
/// `[groups][kv_heads][group_tokens]`.
pub(crate) struct Signs {
    shape: KeyShape,
    /// Dimensions after the rotation: the next power of two.
    dims: usize,
    signs: Records<u8>,
    lengths: Records<u16>,
}

impl Signs {
    /// Returns the number of columns, and a function that writes the estimated scores of all tokens of groups,
    /// `[tokens, columns]`.
    pub(crate) fn scorer<'a>(&'a self, batch: &QueryBatch) -> (usize, impl FillScores + use<'a>) {
        let columns = if batch.count() == 1 { 1 } else { batch.padded() };
        let heads = self.weights(batch);
        let fits = self.dims == 8 * SIGN_BYTES && self.shape.group_tokens.is_multiple_of(4);
        let by_nibbles = sign_sums().filter(|_| fits).map(|sums| Arc::new(Nibbles::new(sums, &heads)));
        let mut by_bytes = by_nibbles.is_none().then(|| SignTableBytes::new(self, &heads));
        let score = move |groups: Range<usize>, out: &mut [f32]| {
            if let Some(tables) = &by_nibbles {
                tables.score(self, groups, out, columns);
            } else if let Some(tables) = &mut by_bytes {
                tables.score(self, groups, out, columns);
            }
        };
        (columns, score)
    }

    /// Returns, for each head, its lanes with the weight of each bit. A set bit adds the weight, and a clear bit
    /// subtracts it.
    fn weights(&self, batch: &QueryBatch) -> Vec<Vec<(usize, Vec<f32>)>> {
        // The mean magnitude of a coordinate of a random unit vector is about sqrt(2 / (pi n)).
        let factor = (2.0 / (std::f32::consts::PI * self.dims as f32)).sqrt();
        let mut heads: Vec<Vec<(usize, Vec<f32>)>> = vec![Vec::new(); self.shape.kv_heads];
        for (lane, head, row) in batch.rows() {
            let mut rotated = vec![0.0; self.dims];
            rotated[..row.len()].copy_from_slice(row);
            rotate_randomly(&mut rotated);
            rotated.iter_mut().for_each(|x| *x *= factor);
            heads[head].push((lane, rotated));
        }
        heads
    }
}

/// Look-up tables of eight bits each, in f32.
#[derive(Clone)]
struct SignTableBytes {
    /// The lanes of each head, and its tables `[bytes, 256, wide]`.
    heads: Arc<[(Vec<usize>, Vec<f32>)]>,
    wide: usize,
    part: Vec<f32>,
}

impl SignTableBytes {
    fn new(signs: &Signs, heads: &[Vec<(usize, Vec<f32>)>]) -> Self {
        let wide = heads.iter().map(Vec::len).max().unwrap_or(0).next_power_of_two();
        let tables = |own: &Vec<(usize, Vec<f32>)>| {
            let mut tables = vec![0.0_f32; signs.dims / 8 * 256 * wide];
            for (slot, (_, rotated)) in own.iter().enumerate() {
                for (weights, table) in rotated.chunks_exact(8).zip(tables.chunks_exact_mut(256 * wide)) {
                    for (value, out) in table.chunks_exact_mut(wide).enumerate() {
                        out[slot] = signed_sum(weights, value);
                    }
                }
            }
            (own.iter().map(|(lane, _)| *lane).collect(), tables)
        };
        Self { heads: heads.iter().map(tables).collect(), wide, part: vec![0.0; signs.shape.group_tokens * wide] }
    }

    fn score(&mut self, signs: &Signs, groups: Range<usize>, out: &mut [f32], columns: usize) {
        let (group, bytes) = (signs.shape.group_tokens, signs.dims / 8);
        out.fill(0.0);
        for (index, out) in groups.zip(out.chunks_exact_mut(columns * group)) {
            let (codes, lengths) = (signs.signs.slice(index..index + 1), signs.lengths.slice(index..index + 1));
            let each = codes.chunks_exact(group * bytes).zip(lengths.chunks_exact(group));
            for ((own, table), (codes, lengths)) in self.heads.iter().zip(each) {
                look_up(codes, table, bytes, self.wide, &mut self.part);
                let parts = self.part.chunks_exact(self.wide).zip(lengths);
                for (out, (part, &length)) in out.chunks_exact_mut(columns).zip(parts) {
                    let length = f16_to_f32(length);
                    own.iter().zip(part).for_each(|(lane, part)| out[*lane] += length * part);
                }
            }
        }
    }
}

/// Tokens of one call of the sums by four bits.
const TOKENS: usize = 64;
/// The distance by which lengths are prefetched, in calls of [`TOKENS`] tokens.
const LENGTHS_AHEAD: usize = 4;

/// Look-up tables of four bits each, which fit in vector registers.
struct Nibbles {
    sums: SignSums,
    /// A head, up to four of its lanes, and one or four tables.
    parts: Vec<(usize, Vec<usize>, Vec<SignTables>)>,
}

impl Nibbles {
    fn new(sums: SignSums, heads: &[Vec<(usize, Vec<f32>)>]) -> Self {
        let mut parts = Vec::new();
        for (head, own) in heads.iter().enumerate() {
            for own in own.chunks(4) {
                let rows = own.iter().filter_map(|(_, rotated)| rotated.first_chunk());
                let mut tables: Vec<SignTables> = rows.map(SignTables::new).collect();
                tables.resize(if own.len() == 1 { 1 } else { 4 }, SignTables::zero());
                parts.push((head, own.iter().map(|(lane, _)| *lane).collect(), tables));
            }
        }
        Self { sums, parts }
    }

    fn score(&self, signs: &Signs, groups: Range<usize>, out: &mut [f32], columns: usize) {
        let quads = signs.shape.group_tokens / 4;
        // Up to the last group, because the lengths of later tokens are prefetched.
        let rest = groups.start..signs.lengths.count();
        let (codes, lengths) = (signs.signs.slice(rest.clone()), signs.lengths.slice(rest));
        let (codes, lengths) = (codes.as_chunks().0, lengths.as_chunks::<4>().0);
        let heads = signs.shape.kv_heads;
        let quads_of_all = TOKENS / 4 * heads;
        let empty: SignQuad = [0; 4 * SIGN_BYTES];
        let mut sums = [[0.0; 16]; TOKENS / 4];
        out.fill(0.0);
        for (tile, out) in out.chunks_mut(TOKENS * columns).enumerate() {
            // The rows of the first head.
            let places: [usize; TOKENS / 4] = std::array::from_fn(|i| {
                let quad = tile * (TOKENS / 4) + i;
                quad / quads * heads * quads + quad % quads
            });
            let next = places[0] + LENGTHS_AHEAD * quads_of_all;
            let next = lengths.get(next..(next + quads_of_all).min(lengths.len()));
            next.unwrap_or_default().iter().step_by(8).for_each(prefetch);
            for (head, own, tables) in &self.parts {
                let (mut of, mut length) = ([&empty; TOKENS / 4], [[0; 4]; TOKENS / 4]);
                for ((place, of), length) in places.iter().zip(&mut of).zip(&mut length) {
                    let at = place + head * quads;
                    if let (Some(codes), Some(lengths)) = (codes.get(at), lengths.get(at)) {
                        (*of, *length) = (codes, *lengths);
                    }
                }
                let Some(length) = length.as_flattened().first_chunk() else { continue };
                let sums = &mut sums[..TOKENS / 16 * tables.len()];
                (self.sums)(&of, length, tables, sums);
                if columns == 1 {
                    out.iter_mut().zip(sums.as_flattened()).for_each(|(out, sum)| *out += sum);
                    continue;
                }
                if let [lane] = own.as_slice() {
                    for (out, sum) in out[*lane..].iter_mut().step_by(columns).zip(sums.as_flattened()) {
                        *out += sum;
                    }
                    continue;
                }
                // The lanes of a head are adjacent, and no other head writes them.
                let first = own[0];
                for (out, sums) in out.chunks_exact_mut(columns).zip(sums.as_flattened().as_chunks::<4>().0) {
                    match out[first..].first_chunk_mut() {
                        Some(out) if own.len() == 4 => *out = *sums,
                        _ => out[first..].iter_mut().zip(&sums[..own.len()]).for_each(|(out, sum)| *out = *sum),
                    }
                }
            }
        }
    }
}

impl LayerSummary for Signs {
    fn groups(&self) -> usize {
        self.lengths.count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let KeyShape { kv_heads, key_dim, group_tokens, .. } = self.shape;
        let keys = group.tokens();
        let (signs, lengths) = (self.signs.add(), self.lengths.add());
        let bytes = self.dims / 8;
        let mut rotated = vec![0.0; self.dims];
        for (token, key) in keys.chunks_exact(kv_heads * key_dim).enumerate() {
            for (head, key) in key.chunks_exact(key_dim).enumerate() {
                rotated.fill(0.0);
                rotated[..key_dim].copy_from_slice(key);
                rotate_randomly(&mut rotated);
                let length = key.iter().map(|x| x * x).sum::<f32>().sqrt().min(65504.0);
                lengths[head * group_tokens + token] = f32_to_f16(length);
                let to = &mut signs[(head * group_tokens + token) * bytes..][..bytes];
                pack_signs(&rotated, to);
            }
        }
    }

    fn truncate(&mut self, groups: usize) {
        self.signs.truncate(groups);
        self.lengths.truncate(groups);
    }

    fn bytes(&self) -> usize {
        self.signs.bytes() + self.lengths.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.signs.bytes_for(groups) + self.lengths.bytes_for(groups)
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        let record_bytes = u32::try_from(self.signs.record_bytes() + self.lengths.record_bytes()).unwrap_or(u32::MAX);
        Some(SummaryRecordId(SummaryRecords {
            kind: SUMMARY_SIGNS,
            parameter: self.dims as u32,
            adapter_checksum: 0,
            record_bytes,
        }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        for group in groups {
            self.signs.encode(group..group + 1, out);
            self.lengths.encode(group..group + 1, out);
        }
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let signs = self.signs.record_bytes();
        let whole = records.chunks_exact(signs + self.lengths.record_bytes());
        let wrong = |record: &[u8]| record[signs..].as_chunks::<2>().0.iter().any(|b| !is_finite_f16(*b));
        if !whole.remainder().is_empty() || whole.clone().any(wrong) {
            return false;
        }
        for record in whole {
            let (own, lengths) = record.split_at(signs);
            self.signs.restore(own);
            self.lengths.restore(lengths);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stratakv_format::DType;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn both_tables_give_the_sums_of_the_bits(
            (kv_heads, per_head, group) in (1_usize..4, 1_usize..7, prop::sample::select(vec![4_usize, 12, 16])),
            (count, key_dim) in (1_usize..24, 100_usize..129),
            joint in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move || 2.0 * rng.f32() - 1.0;
            let shape = KeyShape { kv_heads, key_dim, group_tokens: group, dtype: DType::F32 };
            let dims = 8 * SIGN_BYTES;
            let mut signs = Signs {
                shape,
                dims,
                signs: Records::new(kv_heads * dims / 8 * group),
                lengths: Records::new(kv_heads * group),
            };
            for index in 0..count {
                let plane: Vec<u8> = (0..kv_heads * group * key_dim).flat_map(|_| random().to_le_bytes()).collect();
                signs.push(&KeyGroup::new(shape, &plane, index as u64).unwrap());
            }
            let query: Vec<f32> = (0..kv_heads * per_head * key_dim).map(|_| random()).collect();
            let batch = match joint {
                true => QueryBatch::joint(&query, kv_heads, key_dim),
                false => QueryBatch::query_heads(&query, kv_heads, key_dim),
            };
            let columns = if batch.count() == 1 { 1 } else { batch.padded() };
            let (heads, groups) = (signs.weights(&batch), count / 3..count);
            let mut expected = vec![0.0; groups.len() * group * columns];
            // Tables of four bits: each of 32 entries is off by half a step. A step is a 31st of the largest entry.
            let mut errors = vec![1e-3; expected.len()];
            let largest = |weights: &[f32]| {
                weights.chunks(4).map(|w| w.iter().map(|w| w.abs()).sum()).fold(0.0, f32::max)
            };
            let each = expected.chunks_exact_mut(group * columns).zip(errors.chunks_exact_mut(group * columns));
            for (index, (out, errors)) in groups.clone().zip(each) {
                let (bits, lengths) = (signs.signs.slice(index..index + 1), signs.lengths.slice(index..index + 1));
                let each = out.chunks_exact_mut(columns).zip(errors.chunks_exact_mut(columns));
                for (token, (out, errors)) in each.enumerate() {
                    for (head, own) in heads.iter().enumerate() {
                        let at = head * group + token;
                        let length = f16_to_f32(lengths[at]);
                        for (lane, weights) in own {
                            let bit = |i: usize| bits[at * dims / 8 + i / 8] >> (i % 8) & 1 == 1;
                            let signed = weights.iter().enumerate().map(|(i, w)| if bit(i) { *w } else { -w });
                            out[*lane] += length * signed.sum::<f32>();
                            errors[*lane] += length * largest(weights) / 31.0 * 16.0;
                        }
                    }
                }
            }
            let mut found = vec![vec![7.0; expected.len()]];
            SignTableBytes::new(&signs, &heads).score(&signs, groups.clone(), &mut found[0], columns);
            if let Some(sums) = sign_sums() {
                found.push(vec![7.0; expected.len()]);
                Nibbles::new(sums, &heads).score(&signs, groups, &mut found[1], columns);
            }
            for (way, found) in found.iter().enumerate() {
                for (at, ((x, y), error)) in found.iter().zip(&expected).zip(&errors).enumerate() {
                    let error = if way == 0 { 1e-3 } else { *error };
                    prop_assert!(
                        (x - y).abs() <= error,
                        "way {way}, number {at} of {columns} columns: {x}, expected {y}"
                    );
                }
            }
        }
    }
}
