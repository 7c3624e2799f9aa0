//! The state of a method with clusters, as bytes: [`StateWriter`] appends it, [`StateReader`] takes it apart.
//!
//! A summary that is restored from its state chooses the same entries as the one that wrote it. It does not build its
//! clusters from keys again.
//!
//! All numbers are little-endian. A table is its number of elements in 8 bytes, then the elements.
//!
//! Invariants:
//! - The bytes come from a device and may be anything. The reader returns [`StateError`] and never panics.
//! - Nothing is allocated for a table before the bytes of the table are there.

use std::fmt;

/// The state of a summary, while it is written.
#[derive(Debug, Default)]
pub struct StateWriter {
    bytes: Vec<u8>,
}

/// The state of a summary, while it is read.
#[derive(Clone, Debug)]
pub struct StateReader<'a> {
    rest: &'a [u8],
}

/// The reason why a state is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateError {
    text: String,
}

impl StateError {
    /// Returns an error that says what is wrong.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into() }
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "state of clusters: {}", self.text)
    }
}

impl std::error::Error for StateError {}

/// Returns an error unless `holds`.
pub(crate) fn require(holds: bool, text: impl FnOnce() -> String) -> Result<(), StateError> {
    if holds { Ok(()) } else { Err(StateError::new(text())) }
}

impl StateWriter {
    /// Returns a writer without a byte.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reserves memory for `bytes` more bytes.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve_exact(bytes);
    }

    /// Appends a number.
    pub fn put_u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a number, bit by bit as it is.
    pub fn put_f64(&mut self, value: f64) {
        self.put_u64(value.to_bits());
    }

    /// Appends bytes, without their number.
    pub fn put_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends a table of numbers.
    pub fn put_u32s(&mut self, values: &[u32]) {
        self.put_each(values.iter().map(|value| value.to_le_bytes()));
    }

    /// Appends a table of numbers.
    pub fn put_u64s(&mut self, values: &[u64]) {
        self.put_each(values.iter().map(|value| value.to_le_bytes()));
    }

    /// Appends a table of numbers, bit by bit as they are.
    pub fn put_f32s(&mut self, values: &[f32]) {
        self.put_each(values.iter().map(|value| value.to_le_bytes()));
    }

    /// Appends a table of elements of `N` bytes.
    pub fn put_each<const N: usize>(&mut self, values: impl ExactSizeIterator<Item = [u8; N]>) {
        self.put_u64(values.len() as u64);
        values.for_each(|value| self.bytes.extend_from_slice(&value));
    }

    /// Returns the bytes.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl<'a> StateReader<'a> {
    /// Returns a reader of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Returns the number of bytes that are left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// Returns the next `count` bytes.
    ///
    /// # Errors
    /// There are fewer.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], StateError> {
        let Some((own, rest)) = self.rest.split_at_checked(count) else {
            return Err(StateError::new(format!("{count} bytes follow, but {} are left", self.rest.len())));
        };
        self.rest = rest;
        Ok(own)
    }

    /// Returns the next number.
    ///
    /// # Errors
    /// The bytes end.
    pub fn u64(&mut self) -> Result<u64, StateError> {
        let bytes = self.bytes(size_of::<u64>())?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// Returns the next number, which is at most `most`.
    ///
    /// # Errors
    /// The bytes end, or the number of `what` is larger.
    pub fn count(&mut self, what: &str, most: usize) -> Result<usize, StateError> {
        let value = self.u64()?;
        match usize::try_from(value) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(StateError::new(format!("{value} {what}, but there are at most {most}"))),
        }
    }

    /// Returns the next number as a float that is finite and not negative.
    ///
    /// # Errors
    /// The bytes end, or it is another number.
    pub fn positive_f64(&mut self, what: &str) -> Result<f64, StateError> {
        let value = f64::from_bits(self.u64()?);
        require(value.is_finite() && value >= 0.0, || format!("{what} is {value}, not a finite number from 0 on"))?;
        Ok(value)
    }

    /// Returns the next table, of elements of `N` bytes. There are at most `most`.
    ///
    /// # Errors
    /// The bytes end, or there are more elements.
    pub fn each<const N: usize>(&mut self, what: &str, most: usize) -> Result<&'a [[u8; N]], StateError> {
        let count = self.count(what, most.min(self.rest.len()))?;
        Ok(self.bytes(count.saturating_mul(N))?.as_chunks::<N>().0)
    }

    /// Returns the next table of numbers, of which there are at most `most`.
    ///
    /// # Errors
    /// As [`Self::each`].
    pub fn u32s(&mut self, what: &str, most: usize) -> Result<Vec<u32>, StateError> {
        Ok(self.each(what, most)?.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// Returns the next table of numbers, of which there are at most `most`.
    ///
    /// # Errors
    /// As [`Self::each`].
    pub fn u64s(&mut self, what: &str, most: usize) -> Result<Vec<u64>, StateError> {
        Ok(self.each(what, most)?.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// Returns the next table of numbers, of which there are at most `most`. They are finite and not negative.
    ///
    /// # Errors
    /// As [`Self::each`], or a number is another one.
    pub fn positive_f32s(&mut self, what: &str, most: usize) -> Result<Vec<f32>, StateError> {
        let values: Vec<f32> = self.each(what, most)?.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let wrong = values.iter().find(|value| !(value.is_finite() && **value >= 0.0));
        require(wrong.is_none(), || format!("{what}: {wrong:?} is not a finite number from 0 on"))?;
        Ok(values)
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// There are more bytes.
    pub fn end(&self) -> Result<(), StateError> {
        require(self.rest.is_empty(), || format!("{} bytes follow its end", self.rest.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let mut out = StateWriter::new();
        out.put_u64(7);
        out.put_f64(1.5);
        out.put_u32s(&[1, 2]);
        out.put_u64s(&[u64::MAX]);
        out.put_f32s(&[0.25]);
        let bytes = out.into_bytes();
        let mut state = StateReader::new(&bytes);
        assert_eq!((state.u64(), state.positive_f64("a number")), (Ok(7), Ok(1.5)));
        assert_eq!((state.u32s("numbers", 2), state.u64s("numbers", 9)), (Ok(vec![1, 2]), Ok(vec![u64::MAX])));
        assert!(state.end().is_err());
        assert_eq!(state.positive_f32s("numbers", 1), Ok(vec![0.25]));
        assert_eq!((state.end(), state.u64().is_err()), (Ok(()), true));
    }

    #[test]
    fn lengths_and_numbers_beyond_their_bounds_are_errors() {
        let table = |count: u64| [&count.to_le_bytes()[..], &[0; 8]].concat();
        assert_eq!(StateReader::new(&table(2)).u32s("numbers", 2), Ok(vec![0, 0]));
        for count in [3, u64::MAX, 1 << 62] {
            let error = StateReader::new(&table(count)).u32s("numbers", usize::MAX).unwrap_err();
            assert!(error.to_string().starts_with("state of clusters: "), "{error}");
        }
        assert!(StateReader::new(&table(2)).u32s("numbers", 1).unwrap_err().to_string().contains("2 numbers"));
        for value in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(StateReader::new(&value.to_le_bytes()).positive_f64("a number").is_err());
        }
    }
}
