//! The nearest of many rows to each of a few points.
//!
//! Few rows are nearer than all rows before them. So a few rows at a time are first asked whether any of them is,
//! which takes the lowest distance of each point and keeps no index.
//!
//! Invariant: the result is that of [`lower_to_nearest`], bit by bit.

use crate::kernels::{POINTS, PointLanes, lower_to_nearest};

/// Rows that are asked together.
const ROWS: usize = 4;

/// Returns the least `norms[j] - 2 * products[j]` of each point, and its row `j`, ties by the lower one.
///
/// The distance is infinite and the row 0 if no row has a finite distance.
pub(super) fn nearest_rows(products: &[PointLanes], norms: &[f32]) -> (PointLanes, [u32; POINTS]) {
    let (mut least, mut nearest) = ([f32::INFINITY; POINTS], [0; POINTS]);
    for ((products, norms), first) in products.chunks(ROWS).zip(norms.chunks(ROWS)).zip((0..).step_by(ROWS)) {
        let mut lowest = least;
        for (lanes, norm) in products.iter().zip(norms) {
            for (lowest, product) in lowest.iter_mut().zip(lanes) {
                let distance = norm - 2.0 * product;
                *lowest = if distance < *lowest { distance } else { *lowest };
            }
        }
        if lowest != least {
            lower_to_nearest(products, norms, first, &mut least, &mut nearest);
        }
    }
    (least, nearest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_nearest_rows_are_those_of_all_rows_at_once(
            elements in prop::collection::vec(-9_i8..9, 0..60 * POINTS), norms in prop::collection::vec(-2_i8..9, 60),
            left_out in prop::collection::vec(0_usize..60, 0..9),
        ) {
            // Small integers, so that there are ties.
            let elements: Vec<f32> = elements.into_iter().map(f32::from).collect();
            let products = elements.as_chunks::<POINTS>().0;
            let mut norms: Vec<f32> = norms.into_iter().map(f32::from).collect();
            left_out.iter().for_each(|row| norms[*row] = f32::INFINITY);
            let norms = &norms[..products.len()];
            let (mut least, mut nearest) = ([f32::INFINITY; POINTS], [0; POINTS]);
            lower_to_nearest(products, norms, 0, &mut least, &mut nearest);
            prop_assert_eq!(nearest_rows(products, norms), (least, nearest));
        }
    }
}
