//! Products of rows with a few points side by side, and the nearest row of each point.
//!
//! A block holds [`POINTS`] points as `[dim][POINTS]`, so that one register has the same element of every point. Four
//! rows share the load of a register. Nothing is added across lanes.
//!
//! Addition order: each product adds its terms in ascending order of the dimension, in one sum. So it depends on the
//! row and the point alone, not on the others of a block.

use super::dispatch::multiversion;

/// Points of a block.
pub(crate) const POINTS: usize = 16;
/// Rows that share the load of a register.
const ROWS: usize = 4;

/// The same element of every point of a block, or the product of a row with every point.
pub(crate) type PointLanes = [f32; POINTS];

multiversion! {
    /// Writes the block of at most [`POINTS`] points `[points, dim]`, where points that are missing are 0.
    pub(crate) fn point_block(points: &[f32], block: &mut [PointLanes]) = lay_points_side_by_side;
}

multiversion! {
    /// Writes the products of each row of `rows` `[out.len(), dim]` with the points of a block `[dim][POINTS]`.
    pub(crate) fn point_products(block: &[PointLanes], rows: &[f32], out: &mut [PointLanes]) = products_of_rows;
}

multiversion! {
    /// Writes the products of the rows of these indices with the points of a block.
    pub(crate) fn indexed_point_products(block: &[PointLanes], rows: &[f32], indices: &[u32], out: &mut [PointLanes])
        = products_of_indexed_rows;
}

multiversion! {
    /// Lowers `least` to the least `norms[j] - 2 * products[j]` of each point, and sets `nearest` to `first + j`, ties
    /// by the lower one. All are finite.
    fn lower_to_nearest(
        products: &[PointLanes], norms: &[f32], first: u32, least: &mut PointLanes, nearest: &mut [u32; POINTS],
    ) = lower_each_to_nearest;
}

/// Returns the least `norms[j] - 2 * products[j]` of each point, and its row `j`, ties by the lower one.
///
/// The distance is infinite and the row 0 if no row has a finite distance.
pub(crate) fn nearest_rows(products: &[PointLanes], norms: &[f32]) -> (PointLanes, [u32; POINTS]) {
    let (mut least, mut nearest) = ([f32::INFINITY; POINTS], [0; POINTS]);
    lower_to_nearest(products, norms, 0, &mut least, &mut nearest);
    (least, nearest)
}

#[inline(always)]
fn lay_points_side_by_side(points: &[f32], block: &mut [PointLanes]) {
    let dim = block.len();
    if points.len() == POINTS * dim {
        for (d, lanes) in block.iter_mut().enumerate() {
            for i in 0..POINTS {
                lanes[i] = points[i * dim + d];
            }
        }
        return;
    }
    block.fill([0.0; POINTS]);
    for (i, point) in points.chunks_exact(dim).take(POINTS).enumerate() {
        block.iter_mut().zip(point).for_each(|(lanes, x)| lanes[i] = *x);
    }
}

#[inline(always)]
fn products_of_rows(block: &[PointLanes], rows: &[f32], out: &mut [PointLanes]) {
    let dim = block.len();
    let (quads, rest) = out.as_chunks_mut::<ROWS>();
    let done = quads.len() * ROWS;
    for (out, rows) in quads.iter_mut().zip(rows.chunks_exact(ROWS * dim)) {
        let (ab, cd) = rows.split_at(2 * dim);
        let ((a, b), (c, d)) = (ab.split_at(dim), cd.split_at(dim));
        *out = four_products(block, [a, b, c, d]);
    }
    for (out, row) in rest.iter_mut().zip(rows[done * dim..].chunks_exact(dim)) {
        *out = one_product(block, row);
    }
}

#[inline(always)]
fn products_of_indexed_rows(block: &[PointLanes], rows: &[f32], indices: &[u32], out: &mut [PointLanes]) {
    let dim = block.len();
    let (quads, rest) = indices.as_chunks::<ROWS>();
    let (out_quads, out_rest) = out.as_chunks_mut::<ROWS>();
    for (out, quad) in out_quads.iter_mut().zip(quads) {
        *out = four_products(block, quad.map(|at| &rows[at as usize * dim..][..dim]));
    }
    for (out, at) in out_rest.iter_mut().zip(rest) {
        *out = one_product(block, &rows[*at as usize * dim..][..dim]);
    }
}

#[inline(always)]
fn four_products(block: &[PointLanes], [a, b, c, d]: [&[f32]; ROWS]) -> [PointLanes; ROWS] {
    let mut sums = [[0.0_f32; POINTS]; ROWS];
    // The rows are zipped, because an index would be checked for each of them.
    for ((((lanes, a), b), c), d) in block.iter().zip(a).zip(b).zip(c).zip(d) {
        for i in 0..POINTS {
            sums[0][i] += a * lanes[i];
            sums[1][i] += b * lanes[i];
            sums[2][i] += c * lanes[i];
            sums[3][i] += d * lanes[i];
        }
    }
    sums
}

#[inline(always)]
fn one_product(block: &[PointLanes], row: &[f32]) -> PointLanes {
    let mut sums = [0.0_f32; POINTS];
    for (lanes, x) in block.iter().zip(row) {
        for i in 0..POINTS {
            sums[i] += x * lanes[i];
        }
    }
    sums
}

#[inline(always)]
fn lower_each_to_nearest(
    products: &[PointLanes],
    norms: &[f32],
    first: u32,
    least: &mut PointLanes,
    nearest: &mut [u32; POINTS],
) {
    // Copies of the results stay in registers. Through the references, each row would be stored.
    let (mut lowest, mut found) = (*least, *nearest);
    for ((lanes, norm), at) in products.iter().zip(norms).zip(first..) {
        let distances: PointLanes = lanes.map(|product| norm - 2.0 * product);
        for i in 0..POINTS {
            found[i] = if distances[i] < lowest[i] { at } else { found[i] };
        }
        for i in 0..POINTS {
            lowest[i] = if distances[i] < lowest[i] { distances[i] } else { lowest[i] };
        }
    }
    (*least, *nearest) = (lowest, found);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn products_and_the_nearest_equal_their_definition(
            dim in 1_usize..40, points in 1_usize..17, rows in 1_usize..23,
            elements in prop::collection::vec(-9_i8..9, 40 * 40), picks in prop::collection::vec(0_usize..23, 0..11),
        ) {
            // Small integers, so that all sums are exact.
            let elements: Vec<f32> = elements.into_iter().map(f32::from).collect();
            let (points, rest) = elements.split_at(points * dim);
            let rows = &rest[..rows * dim];
            let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let mut block = vec![[7.0; POINTS]; dim];
            point_block(points, &mut block);
            let mut out = vec![[7.0; POINTS]; rows.len() / dim];
            point_products(&block, rows, &mut out);
            for (row, found) in rows.chunks(dim).zip(&out) {
                let expected = points.chunks(dim).map(|point| product(row, point));
                let expected: Vec<f32> = expected.chain(std::iter::repeat(0.0)).take(POINTS).collect();
                prop_assert_eq!(found.as_slice(), expected);
            }
            let picks: Vec<u32> = picks.into_iter().map(|at| (at % out.len()) as u32).collect();
            let mut picked = vec![[7.0; POINTS]; picks.len()];
            indexed_point_products(&block, rows, &picks, &mut picked);
            prop_assert!(picks.iter().zip(&picked).all(|(at, found)| *found == out[*at as usize]));
            let norms: Vec<f32> = rows.chunks(dim).map(|row| product(row, row)).collect();
            let (mut least, mut nearest) = ([f32::INFINITY; POINTS], [0; POINTS]);
            let half = out.len() / 2;
            lower_to_nearest(&out[..half], &norms, 0, &mut least, &mut nearest);
            lower_to_nearest(&out[half..], &norms[half..], half as u32, &mut least, &mut nearest);
            for ((point, nearest), least) in points.chunks(dim).zip(nearest).zip(least) {
                let distance = |row: &[f32]| product(row, row) - 2.0 * product(row, point);
                let each = rows.chunks(dim).map(distance).enumerate();
                let expected = each.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
                prop_assert_eq!((nearest as usize, least), expected);
            }
        }
    }
}
