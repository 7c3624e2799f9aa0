//! The nearest of many points: squared distances, and the least of a row of products.
//!
//! The squared distance of row x to point c is compared as `|c|^2 - 2 x . c`, because `|x|^2` is the same for all
//! points.
//!
//! Addition order: a squared norm or distance adds in 16 sums, then adds these in ascending order.

use super::dispatch::multiversion;

/// Elements that are added side by side.
const LANES: usize = 16;

multiversion! {
    /// Writes the squared norm of each row of `[norms.len(), dim]`.
    pub(crate) fn squared_norms(rows: &[f32], dim: usize, norms: &mut [f32]) = squared_norm_of_rows;
}

multiversion! {
    /// Lowers each distance to the squared distance of its row to `point`, if that is less. `rows` is
    /// `[distances.len(), point.len()]`.
    pub(crate) fn lower_distances(rows: &[f32], point: &[f32], distances: &mut [f32]) = lower_distance_of_rows;
}

multiversion! {
    /// Writes, for each row of `products` `[nearest.len(), norms.len()]`, the column with the least
    /// `norms[column] - 2 * product`, ties by the lower column. There is at least one column, and all are finite.
    pub(crate) fn nearest_columns(products: &[f32], norms: &[f32], nearest: &mut [u32]) = nearest_column_of_rows;
}

multiversion! {
    /// Writes the transpose of `rows` `[rows.len() / dim, dim]`.
    pub(crate) fn transpose(rows: &[f32], dim: usize, transposed: &mut [f32]) = transpose_blocks;
}

/// Transposes sixteen rows at a time, so that whole cache lines are written.
#[inline(always)]
fn transpose_blocks(rows: &[f32], dim: usize, transposed: &mut [f32]) {
    let count = rows.len() / dim;
    for first in (0..count).step_by(LANES) {
        let block = &rows[first * dim..(first + LANES).min(count) * dim];
        let width = block.len() / dim;
        for d in 0..dim {
            let out = &mut transposed[d * count + first..][..width];
            if width == LANES {
                for i in 0..LANES {
                    out[i] = block[i * dim + d];
                }
            } else {
                out.iter_mut().enumerate().for_each(|(i, out)| *out = block[i * dim + d]);
            }
        }
    }
}

multiversion! {
    /// Adds `factor` times a row to sums.
    pub(crate) fn add_row(sums: &mut [f32], row: &[f32], factor: f32) = add_elements;
}

multiversion! {
    /// Multiplies all elements by a factor.
    pub(crate) fn scale_row(row: &mut [f32], factor: f32) = scale_elements;
}

#[inline(always)]
fn squared_norm_of_rows(rows: &[f32], dim: usize, norms: &mut [f32]) {
    for (row, norm) in rows.chunks_exact(dim).zip(norms) {
        let (runs, rest) = row.as_chunks::<LANES>();
        let mut sums = [0.0_f32; LANES];
        for run in runs {
            for i in 0..LANES {
                sums[i] += run[i] * run[i];
            }
        }
        *norm = sums.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
    }
}

#[inline(always)]
fn lower_distance_of_rows(rows: &[f32], point: &[f32], distances: &mut [f32]) {
    let (points, point_rest) = point.as_chunks::<LANES>();
    for (row, distance) in rows.chunks_exact(point.len()).zip(distances) {
        let (runs, rest) = row.as_chunks::<LANES>();
        let mut sums = [0.0_f32; LANES];
        for (run, point) in runs.iter().zip(points) {
            for i in 0..LANES {
                sums[i] += (run[i] - point[i]) * (run[i] - point[i]);
            }
        }
        let rest: f32 = rest.iter().zip(point_rest).map(|(x, c)| (x - c) * (x - c)).sum();
        let found = sums.iter().sum::<f32>() + rest;
        *distance = if found < *distance { found } else { *distance };
    }
}

#[inline(always)]
fn nearest_column_of_rows(products: &[f32], norms: &[f32], nearest: &mut [u32]) {
    let (norm_runs, norm_rest) = norms.as_chunks::<LANES>();
    for (row, nearest) in products.chunks_exact(norms.len()).zip(nearest) {
        let (runs, rest) = row.as_chunks::<LANES>();
        let (mut least, mut first) = ([f32::INFINITY; LANES], [0_u32; LANES]);
        for ((run, norms), at) in runs.iter().zip(norm_runs).zip((0_u32..).step_by(LANES)) {
            for i in 0..LANES {
                let distance = norms[i] - 2.0 * run[i];
                let is_nearer = distance < least[i];
                least[i] = if is_nearer { distance } else { least[i] };
                first[i] = if is_nearer { at } else { first[i] };
            }
        }
        let mut best = (f32::INFINITY, u32::MAX);
        for i in 0..LANES {
            let column = first[i] + i as u32;
            if least[i] < best.0 || (least[i] == best.0 && column < best.1) {
                best = (least[i], column);
            }
        }
        let behind = (norms.len() - norm_rest.len()) as u32;
        for ((product, norm), column) in rest.iter().zip(norm_rest).zip(behind..) {
            let distance = norm - 2.0 * product;
            if distance < best.0 {
                best = (distance, column);
            }
        }
        *nearest = best.1.min(norms.len() as u32 - 1);
    }
}

#[inline(always)]
fn add_elements(sums: &mut [f32], row: &[f32], factor: f32) {
    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
}

#[inline(always)]
fn scale_elements(row: &mut [f32], factor: f32) {
    row.iter_mut().for_each(|x| *x *= factor);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn distances_and_the_nearest_equal_their_definition(
            dim in 1_usize..40, columns in 1_usize..50, elements in prop::collection::vec(-9_i8..9, 90 * 40),
        ) {
            // Small integers, so that all sums are exact.
            let elements: Vec<f32> = elements.into_iter().map(f32::from).collect();
            let (rows, points) = (&elements[..30 * dim], &elements[30 * dim..][..columns * dim]);
            let exact = |x: &[f32], c: &[f32]| -> f32 { x.iter().zip(c).map(|(x, c)| (x - c).powi(2)).sum() };
            let mut norms = vec![0.0; columns];
            squared_norms(points, dim, &mut norms);
            let zero = vec![0.0; dim];
            prop_assert!(points.chunks(dim).zip(&norms).all(|(c, norm)| exact(c, &zero) == *norm));
            let products: Vec<f32> = rows.chunks(dim).flat_map(|x| points.chunks(dim).map(move |c| {
                x.iter().zip(c).map(|(x, c)| x * c).sum::<f32>()
            })).collect();
            let mut nearest = vec![7; 30];
            nearest_columns(&products, &norms, &mut nearest);
            let mut distances = vec![50.0; 30];
            lower_distances(rows, &points[..dim], &mut distances);
            for ((x, nearest), distance) in rows.chunks(dim).zip(nearest).zip(distances) {
                let each = points.chunks(dim).map(|c| exact(x, c));
                let expected = each.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).map(|(at, _)| at as u32);
                prop_assert_eq!(Some(nearest), expected);
                prop_assert_eq!(distance, exact(x, &points[..dim]).min(50.0));
            }
        }
    }

    #[test]
    fn rows_become_columns() {
        for (rows, dim) in [(1, 5), (16, 3), (35, 7), (0, 4)] {
            let elements: Vec<f32> = (0..rows * dim).map(|at| at as f32).collect();
            let mut transposed = vec![-1.0; rows * dim];
            transpose(&elements, dim, &mut transposed);
            assert!((0..rows * dim).all(|at| transposed[at % dim * rows + at / dim] == at as f32));
        }
    }

    #[test]
    fn rows_are_added_and_scaled() {
        let mut sums = vec![1.0; 20];
        add_row(&mut sums, &[2.0; 20], -0.25);
        scale_row(&mut sums, 4.0);
        assert_eq!(sums, [2.0; 20]);
    }
}
