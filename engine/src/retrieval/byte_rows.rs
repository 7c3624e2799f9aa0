//! [`ByteRows`]: vectors in 8 bits per element, such as centroids.

use crate::kernels::{narrow_to_bytes, narrow_to_bytes_evenly, squared_norm_of_bytes, widen_bytes};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::summary_records::Records;

/// The largest factor of a row that is read. Keys are at most 1e15, which is 127 times the factor. With it the norm of
/// every row is finite.
const FACTOR_MAX: f32 = 1e13;

/// Rows of signed bytes, each with a factor of its own.
#[derive(Clone, Debug)]
pub(crate) struct ByteRows {
    dim: usize,
    bytes: Records<i8>,
    factors: Records<f32>,
}

impl ByteRows {
    /// Returns no rows, which have `dim` elements each, with room for `rows` of them.
    pub(crate) fn with_capacity(dim: usize, rows: usize) -> Self {
        let mut empty = Self { dim, bytes: Records::new(dim), factors: Records::new(1) };
        empty.bytes.reserve(rows);
        empty.factors.reserve(rows);
        empty
    }

    /// Returns the bytes of a row of `dim` elements in memory.
    pub(crate) fn row_bytes(dim: usize) -> usize {
        dim.saturating_add(size_of::<f32>())
    }

    /// Reserves memory for exactly `rows` more rows, if there is no room for one.
    pub(crate) fn reserve_when_full(&mut self, rows: usize) {
        self.bytes.reserve_when_full(rows);
        self.factors.reserve_when_full(rows);
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.bytes.count()
    }

    /// Returns the elements of a row.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Adds a finite row.
    pub(crate) fn push(&mut self, row: &[f32]) {
        self.factors.add()[0] = narrow_to_bytes(row, self.bytes.add());
    }

    /// Replaces a row by a finite one.
    pub(crate) fn set(&mut self, at: usize, row: &[f32]) {
        self.factors.record_mut(at)[0] = narrow_to_bytes(row, self.bytes.record_mut(at));
    }

    /// Replaces a row by a finite one that is close to it. Rounding adds up to nothing over many moves.
    pub(crate) fn set_moved(&mut self, at: usize, row: &[f32]) {
        self.factors.record_mut(at)[0] = narrow_to_bytes_evenly(row, self.bytes.record_mut(at));
    }

    /// Writes a row.
    pub(crate) fn read(&self, at: usize, row: &mut [f32]) {
        widen_bytes(self.bytes.slice(at..at + 1), self.factor(at), row);
    }

    /// Returns the squared norm of a row.
    pub(crate) fn squared_norm(&self, at: usize) -> f32 {
        self.factor(at) * self.factor(at) * squared_norm_of_bytes(self.bytes.slice(at..at + 1)) as f32
    }

    /// Returns the elements of all rows. Each is multiplied by the [`Self::factor`] of its row.
    pub(crate) fn elements(&self) -> &[i8] {
        self.bytes.slice(0..self.len())
    }

    /// Returns the factor of a row.
    pub(crate) fn factor(&self, at: usize) -> f32 {
        self.factors.slice(at..at + 1)[0]
    }

    /// Appends the rows as they are.
    pub(crate) fn put_state(&self, out: &mut StateWriter) {
        let elements = self.elements();
        out.put_u64(self.len() as u64);
        out.put_bytes(&elements.iter().map(|x| x.to_le_bytes()[0]).collect::<Vec<u8>>());
        out.put_f32s(self.factors.slice(0..self.len()));
    }

    /// Returns the rows of a state, at most `most`.
    ///
    /// # Errors
    /// There are more rows, an element is -128, or a factor is not one of a finite row.
    pub(crate) fn from_state(state: &mut StateReader<'_>, dim: usize, most: usize) -> Result<Self, StateError> {
        let count = state.count("rows", most)?;
        let elements = state.bytes(count.saturating_mul(dim))?;
        let factors = state.positive_f32s("factors", count)?;
        require(factors.len() == count, || format!("{count} rows have {} factors", factors.len()))?;
        require(!elements.contains(&0x80), || "an element is below -127".into())?;
        let largest = factors.iter().copied().fold(0.0, f32::max);
        require(largest <= FACTOR_MAX, || format!("a factor of {largest}"))?;
        let mut rows = Self::with_capacity(dim, count);
        for (row, factor) in elements.chunks_exact(dim.max(1)).zip(factors) {
            rows.bytes.add().iter_mut().zip(row).for_each(|(to, x)| *to = i8::from_le_bytes([*x]));
            rows.factors.add()[0] = factor;
        }
        Ok(rows)
    }

    /// Returns the bytes that it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.bytes() + self.factors.bytes()
    }

    /// Returns the most bytes that it takes in memory after `more` rows.
    pub(crate) fn bytes_for(&self, more: usize) -> usize {
        self.bytes.bytes_for(more) + self.factors.bytes_for(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_added_and_replaced_within_their_bytes() {
        let mut rows = ByteRows::with_capacity(3, 0);
        for at in 0..50 {
            let bytes = rows.bytes_for(1);
            rows.push(&[at as f32, -0.5 * at as f32, 127.0]);
            assert!(rows.bytes() <= bytes);
        }
        rows.set(4, &[7.0, 0.0, -7.0]);
        rows.set_moved(5, &[-3.0, 9.0, 254.0]);
        let read = |at| {
            let mut row = [0.0; 3];
            rows.read(at, &mut row);
            row
        };
        assert_eq!((rows.len(), rows.elements().len(), rows.dim()), (50, 150, 3));
        assert_eq!((read(8), rows.factor(8), rows.squared_norm(8)), ([8.0, -4.0, 127.0], 1.0, 16209.0));
        assert!((read(4)[0] - 7.0).abs() < 1e-5 && read(4)[1] == 0.0 && (read(4)[2] + 7.0).abs() < 1e-5);
        assert!((read(5)[0] + 3.0).abs() <= 2.0 && (read(5)[1] - 9.0).abs() <= 2.0 && read(5)[2] == 254.0);
    }
}
