//! Products of dense matrices in f32, and the subspace that holds most of a symmetric one. No linear algebra crate: this is part
//! of every build, and what is needed is one kernel.

use crate::kernels::multiversion;

/// Columns of a block of the product.
const COLUMNS: usize = 16;
/// Rows of a block of the product.
const ROWS: usize = 4;

multiversion! {
    /// `c += a * b`, row-major: `a` is `[m, k]`, `b` is `[k, n]`, `c` is `[m, n]`.
    pub(crate) fn multiply_add(c: &mut [f32], a: &[f32], b: &[f32], k: usize, n: usize) = whole_product;
}

multiversion! {
    /// `c += a * b` for a product that is symmetric; only what is on and above the diagonal of `c` is right.
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

/// Blocks of columns, each over the rows that `rows` wants of it: a block of `b` stays in the first-level cache meanwhile.
#[inline(always)]
fn product(c: &mut [f32], a: &[f32], b: &[f32], (k, n): (usize, usize), rows: impl Fn(usize) -> usize) {
    let mut block = Vec::with_capacity(k * COLUMNS);
    for column in (0..n).step_by(COLUMNS) {
        let width = COLUMNS.min(n - column);
        block.clear();
        for row in b.chunks_exact(n).take(k) {
            let mut padded = [0.0; COLUMNS];
            padded[..width].copy_from_slice(&row[column..column + width]);
            block.push(padded);
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
    let a: [&[f32]; R] = std::array::from_fn(|r| &a[(row + r) * k..(row + r + 1) * k]);
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

/// `rank` orthonormal rows `[rank, n]` that span nearly the strongest directions of the symmetric positive `matrix` `[n, n]`:
/// subspace iteration from random directions (Halko, Martinsson and Tropp 2011, algorithm 4.4), the same for the same matrix.
/// Directions that the matrix does not have are made up, so that `rank` = n is always a whole basis.
pub(crate) fn strongest(matrix: &[f32], n: usize, rank: usize) -> Vec<f32> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut rows: Vec<f32> = (0..rank * n).map(|_| uniform(&mut random)).collect();
    orthonormalise(&mut rows, n, &mut random);
    for _ in 0..ITERATIONS {
        let mut next = vec![0.0; rank * n];
        multiply_add(&mut next, &rows, matrix, n, n);
        rows = next;
        orthonormalise(&mut rows, n, &mut random);
    }
    rows
}

const ITERATIONS: usize = 8;

fn uniform(state: &mut u64) -> f32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Gram and Schmidt's, each row twice; a row that the rows before span is made up.
fn orthonormalise(rows: &mut [f32], n: usize, random: &mut u64) {
    for at in 0..rows.len() / n {
        let (before, rest) = rows.split_at_mut(at * n);
        let row = &mut rest[..n];
        loop {
            let length = norm(row);
            if length > 0.0 && length.is_finite() {
                row.iter_mut().for_each(|x| *x /= length);
                for _ in 0..2 {
                    take_off(row, before, n);
                }
                let left = norm(row);
                if left > 1e-3 {
                    row.iter_mut().for_each(|x| *x /= left);
                    break;
                }
            }
            row.iter_mut().for_each(|x| *x = uniform(random));
        }
    }
}

fn norm(row: &[f32]) -> f32 {
    row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt() as f32
}

multiversion! {
    /// Takes the directions of `before`, which are orthonormal, off a row.
    fn take_off(row: &mut [f32], before: &[f32], n: usize) = take_off_each;
}

#[inline(always)]
fn take_off_each(row: &mut [f32], before: &[f32], n: usize) {
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

    proptest! {
        #[test]
        fn products_are_those_of_the_definition(m in 1_usize..20, k in 1_usize..20, n in 1_usize..40, seed in any::<u64>()) {
            let mut state = seed | 1;
            let a: Vec<f32> = (0..m * k).map(|_| uniform(&mut state)).collect();
            let b: Vec<f32> = (0..k * n).map(|_| uniform(&mut state)).collect();
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

    #[test]
    fn the_strongest_directions_hold_what_the_best_would() {
        // A diagonal matrix in a basis of its own: the best `rank` directions hold the sum of its largest values.
        let (n, rank) = (48, 12);
        let mut random = 7;
        let mut basis: Vec<f32> = (0..n * n).map(|_| uniform(&mut random)).collect();
        orthonormalise(&mut basis, n, &mut random);
        let values: Vec<f32> = (0..n).map(|i| 100.0 * 0.8_f32.powi(i as i32)).collect();
        let mut matrix = vec![0.0; n * n];
        for (row, value) in basis.chunks_exact(n).zip(&values) {
            for i in 0..n {
                for j in 0..n {
                    matrix[i * n + j] += value * row[i] * row[j];
                }
            }
        }
        let found = strongest(&matrix, n, rank);
        let mut times = vec![0.0; rank * n];
        multiply_add(&mut times, &found, &matrix, n, n);
        let held: f32 = times.iter().zip(&found).map(|(a, b)| a * b).sum();
        let best: f32 = values[..rank].iter().sum();
        assert!(held <= best * 1.001 && held > best * 0.995, "{held} of {best}");
    }

    #[test]
    fn a_whole_basis_even_of_nothing() {
        for matrix in [vec![0.0; 20 * 20], vec![1.0; 20 * 20]] {
            let rows = strongest(&matrix, 20, 20);
            for (i, a) in rows.chunks_exact(20).enumerate() {
                for (j, b) in rows.chunks_exact(20).enumerate() {
                    let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    assert!((dot - f32::from(u8::from(i == j))).abs() < 1e-4, "{i} {j}: {dot}");
                }
            }
        }
    }
}
