//! [`ScaledRows`]: vectors in 16 bits per element, such as the keys of medoids.

use crate::kernels::{SCALED_EXPONENT_MAX, narrow_scaled, power_of_two, widen_scaled};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::summary_records::Records;

/// Rows of f16 elements, each with a power of two of its own.
#[derive(Clone, Debug)]
pub(crate) struct ScaledRows {
    dim: usize,
    halves: Records<u16>,
    exponents: Records<i8>,
}

impl ScaledRows {
    /// Returns no rows, which have `dim` elements each.
    pub(crate) fn new(dim: usize) -> Self {
        Self { dim, halves: Records::new(dim), exponents: Records::new(1) }
    }

    /// Returns no rows, with room for `rows` of them.
    pub(crate) fn with_capacity(dim: usize, rows: usize) -> Self {
        let mut empty = Self::new(dim);
        empty.halves.reserve(rows);
        empty.exponents.reserve(rows);
        empty
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.halves.count()
    }

    /// Returns the elements of a row.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Adds a finite row.
    pub(crate) fn push(&mut self, row: &[f32]) {
        self.exponents.add()[0] = narrow_scaled(row, self.halves.add());
    }

    /// Adds a row of the little-endian bytes of f16 elements, in parts of any length.
    pub(crate) fn push_halves<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) {
        let mut row = self.halves.add();
        for part in parts {
            let (own, rest) = std::mem::take(&mut row).split_at_mut(part.len() / size_of::<u16>());
            own.iter_mut().zip(part.as_chunks::<2>().0).for_each(|(half, bytes)| *half = u16::from_le_bytes(*bytes));
            row = rest;
        }
        self.exponents.add()[0] = 0;
    }

    /// Writes a row.
    pub(crate) fn read(&self, at: usize, row: &mut [f32]) {
        widen_scaled(self.halves.slice(at..at + 1), self.exponents.slice(at..at + 1)[0], row);
    }

    /// Keeps the first `rows` rows.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.halves.truncate(rows);
        self.exponents.truncate(rows);
    }

    /// Keeps the rows for which `keep` holds, in their order.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        let mut left = Self::with_capacity(self.dim, (0..self.len()).filter(|row| keep(*row)).count());
        for row in (0..self.len()).filter(|row| keep(*row)) {
            left.halves.add().copy_from_slice(self.halves.slice(row..row + 1));
            left.exponents.add().copy_from_slice(self.exponents.slice(row..row + 1));
        }
        *self = left;
    }

    /// Returns the elements of all rows. Each is multiplied by the [`Self::factor`] of its row.
    pub(crate) fn halves(&self) -> &[u16] {
        self.halves.slice(0..self.len())
    }

    /// Returns the power of two of a row.
    pub(crate) fn factor(&self, at: usize) -> f32 {
        power_of_two(self.exponents.slice(at..at + 1)[0])
    }

    /// Appends the rows as they are.
    pub(crate) fn put_state(&self, out: &mut StateWriter) {
        out.put_u64(self.len() as u64);
        out.put_each(self.halves().iter().map(|half| half.to_le_bytes()));
        out.put_each(self.exponents.slice(0..self.len()).iter().map(|exponent| exponent.to_le_bytes()));
    }

    /// Returns the rows of a state, of which there are `count`.
    ///
    /// # Errors
    /// There are others, an element is not finite, or an exponent is none that narrowing gives.
    pub(crate) fn from_state(state: &mut StateReader<'_>, dim: usize, count: usize) -> Result<Self, StateError> {
        let found = state.count("rows", count)?;
        let halves: &[[u8; 2]] = state.each("elements", count.saturating_mul(dim))?;
        let exponents: &[[u8; 1]] = state.each("exponents", count)?;
        let is_whole = found == count && halves.len() == count.saturating_mul(dim) && exponents.len() == count;
        require(is_whole, || format!("{found} of {count} rows"))?;
        // The exponent of a number that is not finite is all ones.
        let is_finite = |half: &[u8; 2]| u16::from_le_bytes(*half) & 0x7c00 != 0x7c00;
        require(halves.iter().all(is_finite), || "an element of a row is not finite".into())?;
        let wrong =
            exponents.iter().map(|own| i8::from_le_bytes(*own)).find(|own| i32::from(*own).abs() > SCALED_EXPONENT_MAX);
        require(wrong.is_none(), || format!("an exponent of {}", wrong.unwrap_or(0)))?;
        let mut rows = Self::with_capacity(dim, count);
        for (row, exponent) in halves.chunks_exact(dim.max(1)).zip(exponents) {
            rows.halves.add().iter_mut().zip(row).for_each(|(to, half)| *to = u16::from_le_bytes(*half));
            rows.exponents.add()[0] = i8::from_le_bytes(*exponent);
        }
        Ok(rows)
    }

    /// Returns the bytes that it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.halves.bytes() + self.exponents.bytes()
    }

    /// Returns the most bytes that it takes in memory after `more` rows.
    pub(crate) fn bytes_for(&self, more: usize) -> usize {
        self.halves.bytes_for(more) + self.exponents.bytes_for(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_added_and_dropped_within_their_bytes() {
        let mut rows = ScaledRows::new(3);
        let row = |at: usize| [at as f32, -0.5 * at as f32, 1e9];
        for at in 0..50 {
            let bytes = rows.bytes_for(1);
            rows.push(&row(at));
            assert!(rows.bytes() <= bytes);
        }
        rows.retain(|at| at % 2 == 0);
        rows.truncate(20);
        let read = |at| {
            let mut row = [0.0; 3];
            rows.read(at, &mut row);
            row
        };
        assert_eq!((rows.len(), rows.halves().len(), read(2)[1]), (20, 60, -2.0));
        // Elements that are a billion times smaller than the largest one keep some bits.
        assert_eq!((read(1)[0], (read(1)[2] / 1e9 - 1.0).abs() < 1e-3), (2.0, true));
    }
}
