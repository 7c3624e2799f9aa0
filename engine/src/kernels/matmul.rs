//! Products of dense matrices in f32, row-major.
//!
//! No linear algebra crate is used, because these few loops are part of every build.
//!
//! Addition order: each element of a product adds its terms in ascending order of the inner index, in one sum.
//! [`subtract_projections`] is the exception: it adds in 16 sums.

use super::dispatch::multiversion;

/// The columns of a block of the product.
const COLUMNS: usize = 16;
/// The rows of a block of the product.
const ROWS: usize = 4;

multiversion! {
    /// Adds `a * b` to `c`. `a` is `[m, k]`, `b` is `[k, n]` and `c` is `[m, n]`.
    pub(crate) fn multiply_add(c: &mut [f32], a: &[f32], b: &[f32], k: usize, n: usize) = whole_product;
}

multiversion! {
    /// Adds `a * b` to `c` for a symmetric product. The elements of `c` below the diagonal are unspecified.
    pub(crate) fn multiply_add_upper(c: &mut [f32], a: &[f32], b: &[f32], k: usize, n: usize) = upper_product;
}

#[inline(always)]
fn whole_product(c: &mut [f32], a: &[f32], b: &[f32], k: usize, n: usize) {
    let m = c.len() / n.max(1);
    product(c, a, b, (k, n), |_| m);
}

#[inline(always)]
fn upper_product(c: &mut [f32], a: &[f32], b: &[f32], k: usize, n: usize) {
    let m = c.len() / n.max(1);
    product(c, a, b, (k, n), |column| m.min(column + COLUMNS));
}

/// Works on blocks of columns, each over its first `rows(column)` rows. A block of `b` stays in the L1 cache meanwhile.
#[inline(always)]
fn product(c: &mut [f32], a: &[f32], b: &[f32], (k, n): (usize, usize), rows: impl Fn(usize) -> usize) {
    let mut block = Vec::with_capacity(k * COLUMNS);
    for column in (0..n).step_by(COLUMNS) {
        let width = COLUMNS.min(n - column);
        block.clear();
        for row in b.chunks_exact(n).take(k) {
            // A copy of fixed length needs no call.
            block.push(match row[column..].first_chunk::<COLUMNS>() {
                Some(whole) => *whole,
                None => std::array::from_fn(|i| if i < width { row[column + i] } else { 0.0 }),
            });
        }
        let rows = rows(column);
        let mut row = 0;
        while row + ROWS <= rows {
            add_block::<ROWS>(c, a, &block, row, column, width, (k, n));
            row += ROWS;
        }
        for row in row..rows {
            add_block::<1>(c, a, &block, row, column, width, (k, n));
        }
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a struct would be built for each block")]
fn add_block<const R: usize>(
    c: &mut [f32],
    a: &[f32],
    block: &[[f32; COLUMNS]],
    row: usize,
    column: usize,
    width: usize,
    (k, n): (usize, usize),
) {
    let mut sums = [[0.0_f32; COLUMNS]; R];
    // Rows of the length of the block need no check of their index.
    let a: [&[f32]; R] = std::array::from_fn(|r| &a[(row + r) * k..(row + r + 1) * k][..block.len()]);
    for (at, b) in block.iter().enumerate() {
        for r in 0..R {
            let x = a[r][at];
            for i in 0..COLUMNS {
                sums[r][i] += x * b[i];
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let out = &mut c[(row + r) * n + column..][..width];
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
    }
}

multiversion! {
    /// Adds weighted rows: `sums[j] += sum_i weights[i] * matrix[i][j]`.
    pub(crate) fn add_weighted_rows(weights: &[f32], matrix: &[f32], sums: &mut [f32]) = add_each_weighted_row;
}

#[inline(always)]
fn add_each_weighted_row(weights: &[f32], matrix: &[f32], sums: &mut [f32]) {
    for (weight, row) in weights.iter().zip(matrix.chunks_exact(sums.len().max(1))) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += weight * x;
        }
    }
}

multiversion! {
    /// Writes `out[token][lane] = sum_j keys[token][j] * weights[j][lane]`. Keys are `[tokens, rank]`, weights
    /// `[rank, lanes]` and `out` is `[tokens, lanes]`, with a multiple of 8 lanes.
    pub(crate) fn multiply_by_lanes(keys: &[f32], weights: &[f32], rank: usize, lanes: usize, out: &mut [f32])
        = multiply_each_lane;
}

#[inline(always)]
fn multiply_each_lane(keys: &[f32], weights: &[f32], rank: usize, lanes: usize, out: &mut [f32]) {
    for (keys, out) in keys.chunks(rank * 4).zip(out.chunks_mut(lanes * 4)) {
        let tokens = keys.len() / rank;
        for first in (0..lanes).step_by(8) {
            let mut sums = [[0.0_f32; 8]; 4];
            for j in 0..rank {
                let Some(weights) = weights[j * lanes + first..].first_chunk::<8>() else { continue };
                for (token, sums) in sums.iter_mut().enumerate().take(tokens) {
                    let key = keys[token * rank + j];
                    for i in 0..8 {
                        sums[i] += key * weights[i];
                    }
                }
            }
            for (token, sums) in sums.iter().enumerate().take(tokens) {
                out[token * lanes + first..][..8].copy_from_slice(sums);
            }
        }
    }
}

multiversion! {
    /// Subtracts from a row its projections on the rows of `before` `[rows, n]`, which are orthonormal.
    pub(super) fn subtract_projections(row: &mut [f32], before: &[f32], n: usize) = subtract_each_projection;
}

#[inline(always)]
fn subtract_each_projection(row: &mut [f32], before: &[f32], n: usize) {
    for other in before.chunks_exact(n) {
        let mut sums = [0.0_f32; COLUMNS];
        let (a, b) = (row.as_chunks::<COLUMNS>(), other.as_chunks::<COLUMNS>());
        for (a, b) in a.0.iter().zip(b.0) {
            for i in 0..COLUMNS {
                sums[i] += a[i] * b[i];
            }
        }
        let rest: f32 = a.1.iter().zip(b.1).map(|(a, b)| a * b).sum();
        let dot = sums.iter().sum::<f32>() + rest;
        row.iter_mut().zip(other).for_each(|(x, y)| *x -= dot * y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn uniform(random: &mut fastrand::Rng) -> f32 {
        2.0 * random.f32() - 1.0
    }

    proptest! {
        #[test]
        fn products_equal_their_definition(
            m in 1_usize..20, k in 1_usize..20, n in 1_usize..40, seed in any::<u64>(),
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let a: Vec<f32> = (0..m * k).map(|_| uniform(&mut random)).collect();
            let b: Vec<f32> = (0..k * n).map(|_| uniform(&mut random)).collect();
            let mut c = vec![0.5; m * n];
            multiply_add(&mut c, &a, &b, k, n);
            let mut upper = vec![0.5; m * n];
            multiply_add_upper(&mut upper, &a, &b, k, n);
            for i in 0..m {
                for j in 0..n {
                    let sum: f32 = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
                    prop_assert!((c[i * n + j] - 0.5 - sum).abs() < 1e-4);
                    prop_assert!(i > j || upper[i * n + j] == c[i * n + j]);
                }
            }
        }
    }
}
