//! k-means in a metric: the second moment of the queries.
//!
//! The error of a score `q . (k - c)`, squared and averaged over the queries, is `(k - c)^T S (k - c)` for their second
//! moment S. With `S = L L^T` (Cholesky) it is the squared length of `L^T (k - c)`, so that k-means of the keys
//! `L^T k` minimises it.
//!
//! Invariant: a ridge of 1e-3 times the mean eigenvalue is added, so that directions without queries count a little.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::multiply_add;

/// Returns the keys `[entries, dim]` with each key multiplied by `L^T`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: the metric is not a symmetric, positive matrix `[dim, dim]`.
pub(super) fn in_metric(keys: &[f32], dim: usize, metric: &[f32]) -> Result<Vec<f32>> {
    let factor = cholesky(metric, dim)?;
    let mut transformed = vec![0.0; keys.len()];
    multiply_add(&mut transformed, keys, &factor, dim, dim);
    Ok(transformed)
}

/// Returns the lower triangle L of the metric with its ridge, row-major.
fn cholesky(metric: &[f32], dim: usize) -> Result<Vec<f32>> {
    let refused = |what: &str| Err(Error::new(ErrorKind::InvalidArgument, format!("k-means: the metric {what}")));
    if metric.len() != dim * dim {
        return refused(&format!("has {} elements, not {dim} times {dim}", metric.len()));
    }
    let largest = metric.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let at = |row: usize, column: usize| metric[row * dim + column];
    let is_symmetric = |row: usize| (0..row).all(|c| (at(row, c) - at(c, row)).abs() <= 1e-3 * largest);
    if metric.iter().any(|x| !x.is_finite()) || !(0..dim).all(is_symmetric) {
        return refused("is not finite and symmetric");
    }
    let ridge = 1e-3 * (0..dim).map(|d| f64::from(at(d, d))).sum::<f64>() / dim as f64;
    let mut lower = vec![0.0_f64; dim * dim];
    for row in 0..dim {
        for column in 0..=row {
            let (a, b) = (&lower[row * dim..][..column], &lower[column * dim..][..column]);
            let known: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            let rest = f64::from(at(row, column)) + if row == column { ridge } else { 0.0 } - known;
            lower[row * dim + column] = if row == column {
                if rest.is_nan() || rest <= 0.0 {
                    return refused("is not positive");
                }
                rest.sqrt()
            } else {
                rest / lower[column * dim + column]
            };
        }
    }
    Ok(lower.into_iter().map(|x| x as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lengths_are_those_of_the_metric(
            queries in prop::collection::vec(-3.0_f32..3.0, 12 * 5), key in prop::collection::vec(-3.0_f32..3.0, 5),
        ) {
            let mut metric = vec![0.0_f32; 25];
            for q in queries.chunks(5) {
                (0..25).for_each(|at| metric[at] += q[at / 5] * q[at % 5]);
            }
            let ridge = 1e-3 * (0..5).map(|d| metric[d * 6]).sum::<f32>() / 5.0;
            let score = |q: &[f32]| q.iter().zip(&key).map(|(q, k)| q * k).sum::<f32>();
            let expected: f32 = queries.chunks(5).map(|q| score(q).powi(2)).sum();
            let expected = expected + ridge * key.iter().map(|x| x * x).sum::<f32>();
            let found: f32 = in_metric(&key, 5, &metric).unwrap().iter().map(|x| x * x).sum();
            prop_assert!((found - expected).abs() <= 1e-3 * expected.max(1e-3), "{found} {expected}");
        }
    }

    #[test]
    fn wrong_metrics_are_refused() {
        let wrong = [&[1.0, 0.0, 0.0][..], &[1.0, 2.0, 0.0, 1.0], &[f32::NAN; 4], &[0.0; 4], &[1.0, 5.0, 5.0, 1.0]];
        for metric in wrong {
            assert_eq!(in_metric(&[1.0, 2.0], 2, metric).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }
}
