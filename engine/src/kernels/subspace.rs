//! The strongest directions of a symmetric matrix, by subspace iteration.
//!
//! 1. Start from random orthonormal rows.
//! 2. Multiply them by the matrix and make them orthonormal again, [`ITERATIONS`] times.
//!
//! Invariants:
//! - The same matrix gives the same rows, because the random numbers have a fixed seed.
//! - The rows are orthonormal even if the matrix has fewer directions. Random directions replace those it lacks.
//!
//! Source: Halko, Martinsson and Tropp 2011, algorithm 4.4.

use super::matmul::{multiply_add, subtract_projections};

/// The multiplications by the matrix.
const ITERATIONS: usize = 8;

/// Returns `rank` orthonormal rows `[rank, n]` that nearly span the strongest directions of the symmetric positive
/// `matrix` `[n, n]`. With `rank` equal to `n` they are a whole basis.
pub(crate) fn strongest_directions(matrix: &[f32], n: usize, rank: usize) -> Vec<f32> {
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

/// Returns a number between -1 and 1 (xorshift).
fn uniform(state: &mut u64) -> f32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Makes rows orthonormal by Gram-Schmidt, each row twice. A row that the rows before it span is replaced by a random
/// one.
fn orthonormalise(rows: &mut [f32], n: usize, random: &mut u64) {
    for at in 0..rows.len() / n {
        let (before, rest) = rows.split_at_mut(at * n);
        let row = &mut rest[..n];
        loop {
            let length = norm(row);
            if length > 0.0 && length.is_finite() {
                row.iter_mut().for_each(|x| *x /= length);
                for _ in 0..2 {
                    subtract_projections(row, before, n);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strongest_directions_hold_as_much_as_the_best() {
        // The matrix is diagonal in a basis of its own, so the best `rank` directions hold the sum of its largest
        // values.
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
        let found = strongest_directions(&matrix, n, rank);
        let mut times = vec![0.0; rank * n];
        multiply_add(&mut times, &found, &matrix, n, n);
        let held: f32 = times.iter().zip(&found).map(|(a, b)| a * b).sum();
        let best: f32 = values[..rank].iter().sum();
        assert!(held <= best * 1.001 && held > best * 0.995, "{held} of {best}");
    }

    #[test]
    fn strongest_directions_are_a_whole_basis_of_any_matrix() {
        for matrix in [vec![0.0; 20 * 20], vec![1.0; 20 * 20]] {
            let rows = strongest_directions(&matrix, 20, 20);
            for (i, a) in rows.chunks_exact(20).enumerate() {
                for (j, b) in rows.chunks_exact(20).enumerate() {
                    let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    assert!((dot - f32::from(u8::from(i == j))).abs() < 1e-4, "{i} {j}: {dot}");
                }
            }
        }
    }
}
