//! Sign bits: each head's key after a fixed random rotation, one bit per dimension, and its length in f16. No calibration.

use super::keys::{KeyGroup, KeyShape, KeySummary, Records, SummaryKind};
use super::lanes::{Lanes, look_up, tiles};
use super::stored::StoredAs;
use crate::error::Result;
use half::f16;
use std::ops::Range;
use stratakv_format::frame::{SUMMARY_SIGNS, SummaryRecords};

/// The kind of summary that keeps the signs of rotated keys.
#[derive(Clone, Copy, Debug)]
pub struct SignKeys;

impl SummaryKind for SignKeys {
    fn id(&self) -> String {
        "signs".into()
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn KeySummary>> {
        let dims = shape.key_dim.next_power_of_two().max(8);
        let (signs, lengths) = (shape.kv_heads * dims / 8 * shape.group_tokens, shape.kv_heads * shape.group_tokens);
        Ok(Box::new(Signs { shape, dims, signs: Records::new(signs), lengths: Records::new(lengths) }))
    }
}

/// `[groups][kv_heads][group_tokens, dims / 8]` and `[groups][kv_heads][group_tokens]`.
pub(crate) struct Signs {
    shape: KeyShape,
    /// Dimensions after the rotation: the next power of two.
    dims: usize,
    signs: Records<u8>,
    lengths: Records<u16>,
}

/// Random signs, then a Walsh-Hadamard transform: a rotation that costs `n log n`. Lengths are kept.
fn rotate(x: &mut [f32]) {
    let n = x.len();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for x in x.iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if state & 1 << 40 != 0 {
            *x = -*x;
        }
    }
    let mut half = 1;
    while half < n {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = 1.0 / (n as f32).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
}

impl Signs {
    /// Estimated scores of all tokens of `groups`: `[tokens, lanes]`.
    pub(crate) fn score(&self, lanes: &Lanes, groups: Range<usize>, out: &mut [f32]) {
        let KeyShape { kv_heads, group_tokens, .. } = self.shape;
        let (padded, bytes) = (lanes.padded(), self.dims / 8);
        // The mean magnitude of a coordinate of a random unit vector is about sqrt(2 / (pi n)).
        let factor = (2.0 / (std::f32::consts::PI * self.dims as f32)).sqrt();
        // A head's bits matter to its own lanes alone.
        let mut own: Vec<Vec<usize>> = vec![Vec::new(); kv_heads];
        lanes.rows().for_each(|(lane, head, _)| own[head].push(lane));
        let wide = own.iter().map(Vec::len).max().unwrap_or(0).next_power_of_two().max(4);
        let mut tables = vec![0.0_f32; kv_heads * bytes * 256 * wide];
        let mut rotated = vec![0.0; self.dims];
        for (lane, head, row) in lanes.rows() {
            let slot = own[head].iter().position(|own| *own == lane).unwrap_or(0);
            rotated.fill(0.0);
            rotated[..row.len()].copy_from_slice(row);
            rotate(&mut rotated);
            for (b, weights) in rotated.chunks_exact(8).enumerate() {
                let table = &mut tables[(head * bytes + b) * 256 * wide..][..256 * wide];
                for (value, out) in table.chunks_exact_mut(wide).enumerate() {
                    let signed = weights.iter().enumerate().map(|(i, w)| if value >> i & 1 == 1 { *w } else { -w });
                    out[slot] += signed.sum::<f32>() * factor;
                }
            }
        }
        let head_codes = group_tokens * bytes;
        let mut part = vec![0.0; group_tokens * wide];
        tiles(groups, padded * group_tokens, out, |groups, out| {
            out.fill(0.0);
            for (index, out) in groups.zip(out.chunks_exact_mut(padded * group_tokens)) {
                let (signs, lengths) = (self.signs.slice(index..index + 1), self.lengths.slice(index..index + 1));
                for (head, own) in own.iter().enumerate() {
                    let table = &tables[head * bytes * 256 * wide..][..bytes * 256 * wide];
                    look_up(&signs[head * head_codes..][..head_codes], table, bytes, wide, &mut part);
                    let lengths = &lengths[head * group_tokens..][..group_tokens];
                    for ((out, part), &length) in out.chunks_exact_mut(padded).zip(part.chunks_exact(wide)).zip(lengths)
                    {
                        let length = f16::from_bits(length).to_f32();
                        own.iter().zip(part).for_each(|(lane, part)| out[*lane] += length * part);
                    }
                }
            }
        });
    }
}

impl KeySummary for Signs {
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
                rotate(&mut rotated);
                let length = key.iter().map(|x| x * x).sum::<f32>().sqrt().min(65504.0);
                lengths[head * group_tokens + token] = f16::from_f32(length).to_bits();
                let to = &mut signs[(head * group_tokens + token) * bytes..][..bytes];
                for (out, run) in to.iter_mut().zip(rotated.chunks_exact(8)) {
                    *out = run.iter().enumerate().fold(0, |bits, (i, x)| bits | u8::from(*x > 0.0) << i);
                }
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

    fn stored_as(&self) -> Option<StoredAs> {
        let record_bytes = u32::try_from(self.signs.record_bytes() + self.lengths.record_bytes()).unwrap_or(u32::MAX);
        Some(StoredAs(SummaryRecords {
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
        let wrong =
            |record: &[u8]| record[signs..].as_chunks::<2>().0.iter().any(|b| !f16::from_le_bytes(*b).is_finite());
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
