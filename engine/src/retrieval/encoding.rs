//! The bytes of adapters: numbers and floats, little-endian, from untrusted sources.

use crate::error::{Error, ErrorKind, Result};

/// The most elements of a matrix: 4096 joint dimensions squared.
const ELEMENTS_MAX: usize = 1 << 24;

/// Checks that a matrix has `rows * columns` finite elements.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: it has another number of elements, or one that is not finite.
pub(crate) fn check_matrix(what: &str, matrix: &[f32], rows: usize, columns: usize) -> Result<()> {
    let fits = rows.checked_mul(columns) == Some(matrix.len()) && !matrix.is_empty() && matrix.len() <= ELEMENTS_MAX;
    if fits && matrix.iter().all(|x| x.is_finite()) {
        return Ok(());
    }
    let text = format!("adapter: {what} has {} elements; {rows} x {columns} finite ones are expected", matrix.len());
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Appends a number.
pub(crate) fn put(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// Appends floats.
pub(crate) fn put_all(out: &mut Vec<u8>, numbers: &[f32]) {
    numbers.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
}

/// Returns the CRC-32 of zip.
pub(crate) fn crc(bytes: &[u8]) -> u32 {
    // Bit by bit, because adapters are read once.
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(crc & 1)))
    })
}

/// Untrusted bytes that are being read.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    /// Takes bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: fewer bytes are left. The other methods return the same error.
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let short = || Error::new(ErrorKind::Corruption, "adapter: the bytes end early");
        let (head, rest) = self.0.split_at_checked(len).ok_or_else(short)?;
        self.0 = rest;
        Ok(head)
    }

    /// Takes a number.
    pub(crate) fn number(&mut self) -> Result<usize> {
        let bytes = self.take(4)?;
        Ok(bytes.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)))
    }

    /// Takes floats.
    pub(crate) fn floats(&mut self, count: usize) -> Result<Vec<f32>> {
        let bytes = self.take(count.saturating_mul(4))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}
