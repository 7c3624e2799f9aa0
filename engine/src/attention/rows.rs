//! Dot products of query vectors with records of 16-bit elements, for selection: attention's kernels over summaries, which are
//! read once per step and should be read at the speed of memory.

use super::ahead::{Ahead, Cursor};
use super::kernel::{Kernel, PAD, Plane, SCRATCH};
use super::shape::MAX_HEAD_DIM;
use stratakv_format::DType;

/// Records of one call of a kernel.
const TILE: usize = 64;

/// Query vectors, laid out for the kernels.
pub(crate) struct RowQuery {
    /// `[heads, per_head, stride]` for every stretch of up to [`MAX_HEAD_DIM`] elements.
    stretches: Vec<Stretch>,
    heads: Vec<u8>,
    per_head: usize,
    dim: usize,
    /// What a tile gave, and the kernels' own; kept because a call may be for two records.
    found: Vec<f32>,
    scratch: Box<[f32; SCRATCH]>,
}

struct Stretch {
    first: usize,
    len: usize,
    stride: usize,
    query: Vec<f32>,
}

impl RowQuery {
    /// `query` is `[heads, per_head, dim]`: the vectors of head `h` meet the elements `h * dim..(h + 1) * dim` of a record. At
    /// most 256 heads.
    pub(crate) fn new(query: &[f32], heads: usize, dim: usize) -> Self {
        debug_assert!(heads <= 256 && heads > 0 && dim > 0);
        let per_head = query.len() / (heads * dim).max(1);
        let stretches = (0..dim).step_by(MAX_HEAD_DIM).map(|first| {
            let len = (dim - first).min(MAX_HEAD_DIM);
            let stride = len.next_multiple_of(PAD);
            let mut padded = vec![0.0; heads * per_head * stride];
            for (to, row) in padded.chunks_exact_mut(stride).zip(query.chunks_exact(dim)) {
                to[..len].copy_from_slice(&row[first..first + len]);
            }
            Stretch { first, len, stride, query: padded }
        });
        Self {
            stretches: stretches.collect(),
            heads: (0..=u8::MAX).take(heads).collect(),
            per_head,
            dim,
            found: vec![0.0; TILE * heads * per_head],
            scratch: Box::new([0.0; SCRATCH]),
        }
    }

    /// Adds to `out`, `[records, columns]`, the dot products with the elements from `offset` on of each record of `record`
    /// elements of `dtype`, 16 bits wide: query vector `i` to column `i`.
    pub(crate) fn add(
        &mut self,
        records: &[u16],
        (record, offset): (usize, usize),
        dtype: DType,
        out: &mut [f32],
        columns: usize,
    ) {
        self.add_pieces(std::iter::once(records), (record, offset), dtype, out, columns);
    }

    /// As [`Self::add`] over the records of all pieces as if they were one: how they are cut changes no bit.
    pub(crate) fn add_pieces<'a>(
        &mut self,
        pieces: impl Iterator<Item = &'a [u16]>,
        (record, offset): (usize, usize),
        dtype: DType,
        out: &mut [f32],
        columns: usize,
    ) {
        debug_assert!(dtype.bytes() == 2 && offset + self.heads.len() * self.dim <= record);
        let count = self.heads.len() * self.per_head;
        let mut records = pieces.flat_map(|piece| piece.chunks_exact(record));
        let mut tile: Vec<&[u16]> = Vec::with_capacity(TILE);
        let mut rows: Vec<&[u8]> = Vec::with_capacity(TILE);
        for out in out.chunks_mut(TILE * columns) {
            tile.clear();
            tile.extend(records.by_ref().take(TILE));
            for stretch in &self.stretches {
                rows.clear();
                rows.extend(tile.iter().map(|row| bytemuck::cast_slice(&row[offset + stretch.first..])));
                let plane =
                    Plane { rows: &rows, head_stride: 2 * self.dim, heads: &self.heads, dtype, take: stretch.len };
                let none = Plane { rows: &[], ..plane };
                let mut ahead = Ahead { cursor: &mut Cursor::new(), planes: [plane, none, none, none] };
                Kernel::best().scores(
                    &plane,
                    &stretch.query,
                    stretch.stride,
                    self.per_head,
                    &mut self.found,
                    count,
                    &mut self.scratch,
                    &mut ahead,
                );
                for (out, found) in out.chunks_exact_mut(columns).zip(self.found.chunks_exact(count)).take(rows.len()) {
                    out.iter_mut().zip(found).for_each(|(out, found)| *out += found);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn are_the_dot_products(
            (heads, per_head, dim) in prop_oneof![(1_usize..5, 1_usize..9, 1_usize..70), Just((1, 3, 1500)), Just((1, 9, 1024))],
            count in 0_usize..150, offset in 0_usize..3, rest in 0_usize..3, bf in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut random = fastrand(seed);
            let query: Vec<f32> = (0..heads * per_head * dim).map(|_| random()).collect();
            let record = offset + heads * dim + rest;
            let dtype = if bf { DType::Bf16 } else { DType::F16 };
            let narrow = |x: f32| if bf { bf16::from_f32(x).to_bits() } else { f16::from_f32(x).to_bits() };
            let wide = |b: u16| if bf { bf16::from_bits(b).to_f32() } else { f16::from_bits(b).to_f32() };
            let records: Vec<u16> = (0..count * record).map(|_| narrow(random())).collect();
            let columns = (heads * per_head).next_multiple_of(8);
            let mut out = vec![0.5; count * columns];
            RowQuery::new(&query, heads, dim).add(&records, (record, offset), dtype, &mut out, columns);
            for (row, out) in records.chunks_exact(record).zip(out.chunks_exact(columns)) {
                for (i, out) in out.iter().enumerate() {
                    let Some(q) = query.get(i * dim..(i + 1) * dim) else { prop_assert_eq!(*out, 0.5); continue };
                    let key = &row[offset + i / per_head * dim..][..dim];
                    let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(wide(*k))).sum();
                    prop_assert!((f64::from(*out) - 0.5 - dot).abs() < 1e-4 * (dim as f64).max(1.0), "{out} {dot}");
                }
            }
        }
    }

    fn fastrand(seed: u64) -> impl FnMut() -> f32 {
        let mut state = seed | 1;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        }
    }
}
