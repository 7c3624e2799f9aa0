//! The nearest of many rows of signed bytes, for k-means.
//!
//! 1. Points and rows are bytes with a factor each, as [`narrow_to_bytes`] makes them.
//! 2. Sixteen rows make a block. It has four elements of each row, then the next four, so that a register holds four
//!    elements of all sixteen.
//! 3. The squared distance of a point to a row, halved and without the norm of the point, is
//!    `half_norm(row) - factor(point) * factor(row) * sum`. The sum of the products of bytes is exact.
//!
//! AVX-512 VNNI adds 64 products with one instruction. It multiplies unsigned by signed bytes. So the bytes of rows are
//! stored with 128 added, and sums begin at -128 times the sum of the point's bytes.
//!
//! Without these instructions the caller compares rows of f32 instead.

use super::scaled_bytes::narrow_to_bytes;

/// Rows of a block.
const ROWS: usize = 16;
/// Points that share the loads of a block.
const POINTS: usize = 4;

/// Points that are compared with blocks of rows.
#[derive(Clone, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has an instance"))]
pub(crate) struct BytePoints {
    /// Four elements each, `[points, words]`. Points and elements behind the last are 0.
    words: Vec<[i8; 4]>,
    factors: Vec<f32>,
    sums: Vec<i32>,
}

/// Blocks of rows that points are compared with.
#[derive(Clone, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has an instance"))]
pub(crate) struct ByteBlocks {
    /// `[blocks, words]`, each with four elements of sixteen rows. 128 is added to each element.
    words: Vec<[[u8; 4]; ROWS]>,
    /// The factors and the halved squared norms of the rows of each block.
    scales: Vec<[[f32; ROWS]; 2]>,
    words_per_row: usize,
}

impl BytePoints {
    /// Narrows points `[len, dim]` after subtracting `origin` from each.
    pub(crate) fn new(points: &[f32], origin: &[f32]) -> Self {
        let (dim, words_per_row) = (origin.len(), origin.len().div_ceil(4));
        let len = (points.len() / dim).next_multiple_of(POINTS);
        let mut own = Self { words: vec![[0; 4]; len * words_per_row], factors: vec![0.0; len], sums: vec![0; len] };
        let mut row = vec![0.0; dim];
        for (at, point) in points.chunks_exact(dim).enumerate() {
            row.iter_mut().zip(point).zip(origin).for_each(|((x, point), origin)| *x = point - origin);
            let bytes = &mut own.words[at * words_per_row..][..words_per_row].as_flattened_mut()[..dim];
            own.factors[at] = narrow_to_bytes(&row, bytes);
            own.sums[at] = bytes.iter().map(|byte| i32::from(*byte)).sum();
        }
        own
    }

    /// Returns the bytes that [`Self::new`] takes.
    pub(crate) fn bytes_for(points: usize, dim: usize) -> usize {
        points.saturating_add(POINTS).saturating_mul(dim.saturating_add(12))
    }
}

impl ByteBlocks {
    /// Narrows rows `[len, dim]` after subtracting `origin` from each.
    pub(crate) fn new(rows: &[f32], origin: &[f32]) -> Self {
        let (dim, words_per_row) = (origin.len(), origin.len().div_ceil(4));
        let blocks = (rows.len() / dim).div_ceil(ROWS).next_multiple_of(POINTS);
        let mut words = vec![[[128; 4]; ROWS]; blocks * words_per_row];
        // A row that does not exist is never the nearest.
        let mut scales = vec![[[0.0; ROWS], [f32::INFINITY; ROWS]]; blocks];
        let (mut row, mut bytes) = (vec![0.0; dim], vec![0; dim]);
        for (at, from) in rows.chunks_exact(dim).enumerate() {
            let (block, lane) = (at / ROWS, at % ROWS);
            row.iter_mut().zip(from).zip(origin).for_each(|((x, from), origin)| *x = from - origin);
            scales[block][0][lane] = narrow_to_bytes(&row, &mut bytes);
            scales[block][1][lane] = 0.5 * row.iter().map(|x| x * x).sum::<f32>();
            for (words, bytes) in words[block * words_per_row..].iter_mut().zip(bytes.chunks(4)) {
                words[lane].iter_mut().zip(bytes).for_each(|(out, byte)| *out = *byte as u8 ^ 128);
            }
        }
        Self { words, scales, words_per_row }
    }

    /// Returns the bytes that [`Self::new`] takes.
    pub(crate) fn bytes_for(rows: usize, dim: usize) -> usize {
        rows.saturating_add(ROWS * POINTS).saturating_mul(dim.saturating_add(16))
    }
}

/// Writes the nearest row of each point, ties by the lower row. With `others`, row `i` is not compared with point `i`.
/// All points and rows are finite, with elements of at most 1e15, and there is a row.
pub(crate) type NearestBytes = fn(points: &BytePoints, rows: &ByteBlocks, others: bool, nearest: &mut [u32]);

/// Returns the instance of this processor, or none without instructions for sums of products of bytes.
pub(crate) fn nearest_bytes() -> Option<NearestBytes> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::dispatch::{FeatureSet, has};
        if has(FeatureSet::Avx512Vnni) {
            // SAFETY: the processor has what the function is compiled for.
            return Some(|points, rows, others, nearest| unsafe { x86::nearest(points, rows, others, nearest) });
        }
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ByteBlocks, BytePoints, POINTS, ROWS};
    use std::arch::x86_64::*;

    /// Points whose best rows are kept at once.
    const CHUNK: usize = 64;
    /// Blocks of a tile. Their bytes stay in the L1 cache while a chunk of points passes.
    const TILE: usize = 8;

    /// The least distance of a point so far and its row, in each lane.
    #[derive(Clone, Copy)]
    struct Best {
        distances: __m512,
        rows: __m512i,
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn nearest(points: &BytePoints, rows: &ByteBlocks, others: bool, nearest: &mut [u32]) {
        let words = rows.words_per_row;
        assert!(nearest.len().next_multiple_of(POINTS) * words <= points.words.len(), "a point for each result");
        let none = Best { distances: _mm512_set1_ps(f32::INFINITY), rows: _mm512_setzero_si512() };
        for (nearest, chunk) in nearest.chunks_mut(CHUNK).zip((0..).step_by(CHUNK)) {
            let mut best = [none; CHUNK];
            for tile in (0..rows.scales.len()).step_by(TILE) {
                let tile = tile..(tile + TILE).min(rows.scales.len());
                for (quad, best) in
                    best.as_chunks_mut::<POINTS>().0[..nearest.len().div_ceil(POINTS)].iter_mut().enumerate()
                {
                    let first = chunk + quad * POINTS;
                    for block in tile.clone().step_by(POINTS) {
                        let sums = sums(points, first, rows, block);
                        for (at, sums) in sums.into_iter().enumerate() {
                            lower(points, first, rows, (block + at, others), sums, best);
                        }
                    }
                }
            }
            for (nearest, best) in nearest.iter_mut().zip(&best) {
                *nearest = lowest(best);
            }
        }
    }

    /// Returns the sums of four blocks from `block` on, each for four points from `first` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn sums(points: &BytePoints, first: usize, rows: &ByteBlocks, block: usize) -> [[__m512i; POINTS]; POINTS] {
        let words = rows.words_per_row;
        let own = |at: usize| &points.words[(first + at) * words..][..words];
        let (p, q, r, s) = (own(0), own(1), own(2), own(3));
        let of = |at: usize| &rows.words[(block + at) * words..][..words];
        let (a, b, c, d) = (of(0), of(1), of(2), of(3));
        let [e, f, g, h] = [first, first + 1, first + 2, first + 3];
        let start = [first_sum(points, e), first_sum(points, f), first_sum(points, g), first_sum(points, h)];
        let mut sums = [start; POINTS];
        for word in 0..words {
            let blocks = [load(&a[word]), load(&b[word]), load(&c[word]), load(&d[word])];
            let point = [broadcast(p[word]), broadcast(q[word]), broadcast(r[word]), broadcast(s[word])];
            for at in 0..POINTS {
                for of in 0..POINTS {
                    sums[at][of] = _mm512_dpbusd_epi32(sums[at][of], blocks[at], point[of]);
                }
            }
        }
        sums
    }

    /// Returns what takes the 128 of each element of a row off the sum of a point.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn first_sum(points: &BytePoints, at: usize) -> __m512i {
        _mm512_set1_epi32(-128 * points.sums[at])
    }

    /// Returns four elements of a point in every lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn broadcast([a, b, c, d]: [i8; 4]) -> __m512i {
        _mm512_set1_epi32(i32::from_le_bytes([a as u8, b as u8, c as u8, d as u8]))
    }

    /// Compares four points with the rows of a block, and keeps the best row of each point so far.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn lower(
        points: &BytePoints,
        first: usize,
        rows: &ByteBlocks,
        (block, others): (usize, bool),
        sums: [__m512i; POINTS],
        best: &mut [Best; POINTS],
    ) {
        let [factors, half_norms] = &rows.scales[block];
        let (factors, half_norms) = (load_floats(factors), load_floats(half_norms));
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let index = _mm512_add_epi32(lanes, _mm512_set1_epi32((block * ROWS) as i32));
        for ((best, sums), at) in best.iter_mut().zip(sums).zip(first..) {
            let factor = _mm512_mul_ps(factors, _mm512_set1_ps(points.factors[at]));
            let distance = _mm512_fnmadd_ps(factor, _mm512_cvtepi32_ps(sums), half_norms);
            let mut nearer = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(distance, best.distances);
            if others {
                nearer &= _mm512_cmpneq_epi32_mask(index, _mm512_set1_epi32(at as i32));
            }
            best.distances = _mm512_mask_mov_ps(best.distances, nearer, distance);
            best.rows = _mm512_mask_mov_epi32(best.rows, nearer, index);
        }
    }

    /// Returns the row of the least distance of all lanes, the lowest of equal ones.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn lowest(best: &Best) -> u32 {
        let least = _mm512_set1_ps(_mm512_reduce_min_ps(best.distances));
        let equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(best.distances, least);
        _mm512_mask_reduce_min_epu32(equal, best.rows)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn load(word: &[[u8; 4]; ROWS]) -> __m512i {
        // SAFETY: the array has 64 bytes, and the load needs no alignment.
        unsafe { _mm512_loadu_si512(word.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn load_floats(floats: &[f32; ROWS]) -> __m512 {
        // SAFETY: the array has 16 f32.
        unsafe { _mm512_loadu_ps(floats.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the kernel, or prints why its tests are skipped.
    fn kernel() -> Option<NearestBytes> {
        let found = nearest_bytes();
        if found.is_none() {
            println!("skipped: the processor has no sums of products of bytes (AVX-512 VNNI)");
        }
        found
    }

    fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn the_nearest_row_is_found_up_to_the_rounding_of_bytes(
            dim in 1_usize..70, points in 1_usize..140, rows in 1_usize..200, others in any::<bool>(),
            values in prop::collection::vec(-9.0_f32..9.0, 70 * 97), origin in -5.0_f32..5.0,
        ) {
            let Some(nearest_bytes) = kernel() else { return Ok(()) };
            let value = |at: usize| values[at * 31 % values.len()];
            let points: Vec<f32> = (0..points * dim).map(|at| value(at) + origin).collect();
            let rows: Vec<f32> = (0..rows * dim).map(|at| value(at + 17) + origin).collect();
            let origin = vec![origin; dim];
            let mut nearest = vec![u32::MAX; points.len() / dim];
            let blocks = ByteBlocks::new(&rows, &origin);
            // With a single row there may be no other.
            let others = others && rows.len() > dim;
            nearest_bytes(&BytePoints::new(&points, &origin), &blocks, others, &mut nearest);
            // Elements are rounded by a 254th of 9 at most, so halved distances by dim * 9 * 9 / 127.
            let bound = 2.0 * dim as f64 * 81.0 / 127.0 + 1e-3;
            for ((own, point), found) in points.chunks(dim).enumerate().zip(&nearest) {
                prop_assert!(!others || *found as usize != own);
                let compared = rows.chunks(dim).enumerate().filter(|(row, _)| !others || *row != own);
                let least = compared.map(|(_, row)| squared_distance(point, row)).fold(f64::INFINITY, f64::min);
                let distance = squared_distance(point, &rows[*found as usize * dim..][..dim]);
                prop_assert!(distance <= least + 2.0 * bound, "{distance} {least}");
            }
        }
    }

    #[test]
    fn ties_are_broken_by_the_lower_row() {
        let Some(nearest_bytes) = kernel() else { return };
        let rows: Vec<f32> = (0..100).flat_map(|at| [f32::from(at % 7 == 3), 1.0, -1.0]).collect();
        let points = BytePoints::new(&[1.0, 1.0, -1.0, 0.0, 1.0, -1.0], &[0.0; 3]);
        let mut nearest = [9; 2];
        nearest_bytes(&points, &ByteBlocks::new(&rows, &[0.0; 3]), false, &mut nearest);
        assert_eq!(nearest, [3, 0]);
        nearest_bytes(&points, &ByteBlocks::new(&rows, &[0.0; 3]), true, &mut nearest);
        assert_eq!(nearest, [3, 0]);
    }

    #[test]
    fn extremes_have_a_nearest_row() {
        let Some(nearest_bytes) = kernel() else { return };
        let rows = [1e15, -1e15, 0.0, 1e-30, -1e15, -1e15];
        let mut nearest = [9; 3];
        nearest_bytes(&BytePoints::new(&rows, &[0.0; 2]), &ByteBlocks::new(&rows, &[0.0; 2]), false, &mut nearest);
        assert_eq!(nearest, [0, 1, 2]);
    }
}
