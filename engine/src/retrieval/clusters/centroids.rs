//! [`Centroids`]: the centroids of clusters, and which of them is nearest to a key.
//!
//! 1. The next keys are compared with all centroids at once ([`Centroids::expect`]). Centroids are read from memory
//!    once for up to sixteen keys.
//! 2. Each key asks for its nearest centroid ([`Centroids::nearest`]).
//! 3. A centroid that changes in between is compared with the expected keys once more.
//!
//! The squared distance of key x to centroid c is compared as `|c|^2 - 2 x . c`, because `|x|^2` is the same for all
//! centroids. Ties go to the lower centroid.
//!
//! Invariants:
//! - The nearest centroid does not depend on which keys are expected together.
//! - A centroid that is left out has an infinite norm.

use crate::kernels::{POINTS, PointLanes, RowQuery, nearest_rows, point_block, point_products, squared_norms};
use crate::retrieval::byte_rows::ByteRows;
use crate::retrieval::summary_records::Records;
use std::ops::Range;

/// Full lists of centroids grow by this part of themselves.
const GROWTH: usize = 16;

/// The elements in which centroids are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CentroidPrecision {
    /// f32.
    #[default]
    Single,
    /// Signed bytes with a factor per centroid.
    Byte,
}

/// The centroids of clusters.
#[derive(Clone, Debug)]
pub(super) struct Centroids {
    dim: usize,
    rows: CentroidRows,
    norms: Records<f32>,
    expected: ExpectedKeys,
}

#[derive(Clone, Debug)]
enum CentroidRows {
    Single(Records<f32>),
    Byte(ByteRows),
}

/// The next keys, with their products and their nearest centroids.
#[derive(Clone, Debug, Default)]
struct ExpectedKeys {
    /// `[count, dim]`.
    keys: Vec<f32>,
    /// The keys that were asked for.
    asked: usize,
    /// `[dim]`, the keys side by side, for centroids in f32.
    block: Vec<PointLanes>,
    /// The keys as queries, for centroids in bytes.
    query: Option<RowQuery>,
    /// `[centroids]`.
    products: Vec<PointLanes>,
    least: PointLanes,
    nearest: [u32; POINTS],
}

impl Centroids {
    /// Returns no centroids, which have `dim` elements each, with room for `clusters` of them.
    pub(super) fn with_capacity(dim: usize, clusters: usize, precision: CentroidPrecision) -> Self {
        let rows = match precision {
            CentroidPrecision::Single => {
                let mut rows = Records::new(dim);
                rows.reserve(clusters);
                CentroidRows::Single(rows)
            }
            CentroidPrecision::Byte => CentroidRows::Byte(ByteRows::with_capacity(dim, clusters)),
        };
        let mut norms = Records::new(1);
        norms.reserve(clusters);
        Self { dim, rows, norms, expected: ExpectedKeys::default() }
    }

    /// Returns the bytes of exactly this many centroids, without expected keys.
    pub(super) fn bytes_for(clusters: usize, dim: usize, precision: CentroidPrecision) -> usize {
        let per_cluster = match precision {
            CentroidPrecision::Single => dim.saturating_mul(size_of::<f32>()),
            CentroidPrecision::Byte => ByteRows::row_bytes(dim),
        };
        clusters.saturating_mul(per_cluster.saturating_add(size_of::<f32>()))
    }

    /// Returns the bytes that they take in memory.
    pub(super) fn bytes(&self) -> usize {
        let rows = match &self.rows {
            CentroidRows::Single(rows) => rows.bytes(),
            CentroidRows::Byte(rows) => rows.bytes(),
        };
        let expected = &self.expected;
        let lanes = (expected.block.capacity() + expected.products.capacity()) * size_of::<PointLanes>();
        let query = expected.query.as_ref().map_or(0, |_| RowQuery::bytes_for(POINTS, self.dim));
        rows + self.norms.bytes() + lanes + query + expected.keys.capacity() * size_of::<f32>()
    }

    /// Returns the most bytes that they take once there are `clusters` of them, without expected keys.
    pub(super) fn bytes_once(&self, clusters: usize) -> usize {
        let more = clusters.saturating_sub(self.len());
        let rows = match &self.rows {
            CentroidRows::Single(rows) => rows.bytes_for(more),
            CentroidRows::Byte(rows) => rows.bytes_for(more),
        };
        rows + self.norms.bytes_for(more)
    }

    /// Returns the most bytes that expected keys take.
    pub(super) fn expected_bytes(clusters: usize, dim: usize) -> usize {
        // The keys twice, and as a block or a query. The products double when a centroid is added.
        let rows = (3 * POINTS).saturating_mul(dim).saturating_mul(size_of::<f32>());
        let products = clusters.max(4).saturating_mul(2 * size_of::<PointLanes>());
        products.saturating_add(rows).saturating_add(RowQuery::bytes_for(POINTS, dim))
    }

    /// Returns the number of centroids.
    pub(super) fn len(&self) -> usize {
        self.norms.count()
    }

    /// Writes a centroid.
    pub(super) fn read(&self, at: usize, centroid: &mut [f32]) {
        match &self.rows {
            CentroidRows::Single(rows) => centroid.copy_from_slice(rows.slice(at..at + 1)),
            CentroidRows::Byte(rows) => rows.read(at, centroid),
        }
    }

    /// Returns the centroids `[centroids, dim]`, if they are kept in f32.
    pub(super) fn single(&self) -> Option<&[f32]> {
        match &self.rows {
            CentroidRows::Single(rows) => Some(rows.slice(0..rows.count())),
            CentroidRows::Byte(_) => None,
        }
    }

    /// Returns the centroids, if they are kept in bytes.
    pub(super) fn byte_rows(&self) -> Option<&ByteRows> {
        match &self.rows {
            CentroidRows::Single(_) => None,
            CentroidRows::Byte(rows) => Some(rows),
        }
    }

    /// Adds a centroid.
    pub(super) fn push(&mut self, centroid: &[f32]) {
        let more = 1 + self.len() / GROWTH;
        match &mut self.rows {
            CentroidRows::Single(rows) => rows.reserve_when_full(more),
            CentroidRows::Byte(rows) => rows.reserve_when_full(more),
        }
        self.norms.reserve_when_full(more);
        match &mut self.rows {
            CentroidRows::Single(rows) => rows.add().copy_from_slice(centroid),
            CentroidRows::Byte(rows) => rows.push(centroid),
        }
        self.norms.add();
        self.changed(self.len() - 1);
    }

    /// Replaces a centroid, which counts from now on.
    pub(super) fn set(&mut self, at: usize, centroid: &[f32]) {
        match &mut self.rows {
            CentroidRows::Single(rows) => rows.record_mut(at).copy_from_slice(centroid),
            CentroidRows::Byte(rows) => rows.set(at, centroid),
        }
        self.changed(at);
    }

    /// Moves a centroid, which counts from now on. Bytes are rounded so that many small moves add up.
    pub(super) fn shift(&mut self, at: usize, centroid: &[f32]) {
        match &mut self.rows {
            CentroidRows::Single(rows) => rows.record_mut(at).copy_from_slice(centroid),
            CentroidRows::Byte(rows) => rows.set_moved(at, centroid),
        }
        self.changed(at);
    }

    /// Returns the centroids that these rows are. None is left out.
    pub(super) fn from_byte_rows(rows: ByteRows) -> Self {
        let mut norms = Records::new(1);
        norms.reserve(rows.len());
        (0..rows.len()).for_each(|at| norms.add()[0] = rows.squared_norm(at));
        Self { dim: rows.dim(), rows: CentroidRows::Byte(rows), norms, expected: ExpectedKeys::default() }
    }

    /// Returns whether a centroid is left out.
    pub(super) fn is_left_out(&self, at: usize) -> bool {
        self.norms.slice(at..at + 1)[0] == f32::INFINITY
    }

    /// Leaves a centroid out, until it is replaced. Expected keys are forgotten.
    pub(super) fn leave_out(&mut self, at: usize) {
        self.norms.record_mut(at)[0] = f32::INFINITY;
        self.forget_expected();
    }

    /// Takes note of a centroid that was replaced or added.
    fn changed(&mut self, at: usize) {
        let mut product = [[0.0; POINTS]];
        match (&self.rows, &mut self.expected.query) {
            (CentroidRows::Single(rows), _) => {
                let row = rows.slice(at..at + 1);
                squared_norms(row, self.dim, self.norms.record_mut(at));
                if !self.expected.is_empty() {
                    point_products(&self.expected.block, row, &mut product);
                }
            }
            (CentroidRows::Byte(rows), query) => {
                self.norms.record_mut(at)[0] = rows.squared_norm(at);
                if let Some(query) = query {
                    byte_products(rows, at..at + 1, query, &mut product);
                }
            }
        }
        if self.expected.is_empty() {
            return;
        }
        self.expected.replace(at, product[0], self.norms.slice(0..self.norms.count()));
    }

    /// Compares the next keys `[count, dim]` with all centroids. At most sixteen of them are.
    pub(super) fn expect(&mut self, keys: &[f32]) {
        let keys = &keys[..keys.len().min(POINTS * self.dim)];
        let expected = &mut self.expected;
        expected.keys.clear();
        expected.keys.extend_from_slice(keys);
        expected.asked = 0;
        let count = self.norms.count();
        expected.products.resize(count, [0.0; POINTS]);
        match &self.rows {
            CentroidRows::Single(rows) => {
                expected.block.resize(self.dim, [0.0; POINTS]);
                point_block(keys, &mut expected.block);
                point_products(&expected.block, rows.slice(0..count), &mut expected.products);
            }
            CentroidRows::Byte(rows) => {
                // The number of queries is always the same, so that a centroid has the same products at any time.
                let mut queries = keys.to_vec();
                queries.resize(POINTS * self.dim, 0.0);
                let query = expected.query.insert(RowQuery::new(&queries, 1, self.dim));
                byte_products(rows, 0..count, query, &mut expected.products);
            }
        }
        (expected.least, expected.nearest) = nearest_rows(&expected.products, self.norms.slice(0..count));
    }

    /// Forgets the keys that are expected, and gives their memory back.
    pub(super) fn forget_expected(&mut self) {
        self.expected = ExpectedKeys::default();
    }

    /// Returns the nearest centroid, ties by the lower one. It is 0 if all are left out.
    pub(super) fn nearest(&mut self, key: &[f32]) -> usize {
        let at = self.expected.asked;
        if self.expected.keys.get(at * self.dim..(at + 1) * self.dim) != Some(key) {
            self.expect(key);
        }
        self.expected.asked += 1;
        self.expected.nearest[self.expected.asked - 1] as usize
    }
}

/// Writes the products of centroids with the expected keys.
fn byte_products(rows: &ByteRows, range: Range<usize>, query: &mut RowQuery, products: &mut [PointLanes]) {
    let dim = rows.dim();
    let elements = &rows.elements()[range.start * dim..range.end * dim];
    query.put_bytes(elements, (dim, 0), products.as_flattened_mut(), POINTS);
    for (at, products) in range.zip(products) {
        let factor = rows.factor(at);
        products.iter_mut().for_each(|product| *product *= factor);
    }
}

impl ExpectedKeys {
    fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Replaces the products of a centroid, or adds them behind the last one.
    fn replace(&mut self, at: usize, products: PointLanes, norms: &[f32]) {
        if at == self.products.len() {
            self.products.push(products);
        } else {
            self.products[at] = products;
        }
        for (lane, product) in products.iter().enumerate().skip(self.asked) {
            let distance = norms[at] - 2.0 * product;
            let (least, nearest) = (self.least[lane], self.nearest[lane] as usize);
            if distance < least || (distance == least && at <= nearest) {
                (self.least[lane], self.nearest[lane]) = (distance, at as u32);
            } else if nearest == at {
                // The nearest centroid moved away, so that any other may be nearer.
                (self.least[lane], self.nearest[lane]) = self.nearest_of_lane(lane, norms);
            }
        }
    }

    fn nearest_of_lane(&self, lane: usize, norms: &[f32]) -> (f32, u32) {
        let mut found = (f32::INFINITY, 0);
        for ((products, norm), at) in self.products.iter().zip(norms).zip(0..) {
            let distance = norm - 2.0 * products[lane];
            found = if distance < found.0 { (distance, at) } else { found };
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_nearest_centroid_is_that_of_the_definition(
            elements in prop::collection::vec(-6_i8..6, 60 * 3), bytes in any::<bool>(), count in 1_usize..30,
            changes in prop::collection::vec((0_usize..40, 0_usize..60, any::<bool>()), 0..60), together in 1_usize..20,
        ) {
            let row = |at: usize| elements[at % 60 * 3..][..3].iter().map(|x| f32::from(*x)).collect::<Vec<f32>>();
            let precision = if bytes { CentroidPrecision::Byte } else { CentroidPrecision::Single };
            let mut found = Centroids::with_capacity(3, count, precision);
            let kept = |row: Vec<f32>| {
                let mut one = Centroids::with_capacity(3, 1, precision);
                one.push(&row);
                let mut kept = row;
                one.read(0, &mut kept);
                kept
            };
            let mut expected: Vec<Option<Vec<f32>>> = (0..count).map(|at| Some(kept(row(at)))).collect();
            (0..count).for_each(|at| found.push(&row(at)));
            let keys: Vec<f32> = (0..changes.len()).flat_map(|at| row(at * 7 + 5)).collect();
            for (step, (at, to, leaves)) in changes.iter().enumerate() {
                if step % together == 0 {
                    found.expect(&keys[step * 3..]);
                }
                match (*at, leaves) {
                    (at, true) if at < expected.len() && step % 4 == 0 => {
                        found.leave_out(at);
                        expected[at] = None;
                    }
                    (at, _) if at < expected.len() => {
                        found.set(at, &row(*to));
                        expected[at] = Some(kept(row(*to)));
                    }
                    _ => {
                        found.push(&row(*to));
                        expected.push(Some(kept(row(*to))));
                    }
                }
                let key = &keys[step * 3..][..3];
                let distance = |c: &Vec<f32>| c.iter().zip(key).map(|(c, x)| (c - x).powi(2)).sum::<f32>();
                let each = expected.iter().enumerate().filter_map(|(at, c)| Some((distance(c.as_ref()?), at)));
                let nearest = each.min_by(|a, b| a.0.total_cmp(&b.0));
                let chosen = found.nearest(key);
                // Bytes round, so that one of two centroids at about the same distance is the nearest.
                let excess = nearest.map_or(0.0, |(least, _)| distance(expected[chosen].as_ref().unwrap()) - least);
                let is_nearest = if bytes { excess < 1e-3 } else { chosen == nearest.map_or(0, |(_, at)| at) };
                prop_assert!(is_nearest, "step {}: {}, not {:?}", step, chosen, nearest);
            }
            let (mut last, at) = (vec![0.0; 3], expected.len() - 1);
            found.read(at, &mut last);
            prop_assert!(expected[at].as_ref().is_none_or(|row| *row == last));
            let most = found.bytes_once(found.len()) + Centroids::expected_bytes(found.len(), 3);
            prop_assert!(found.bytes() <= most, "{} of {most}", found.bytes());
        }
    }
}
