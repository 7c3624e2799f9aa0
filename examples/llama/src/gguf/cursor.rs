//! A cursor over the bytes of a GGUF file. It checks every length against the file's end, and allocates nothing.

use anyhow::{Result, ensure};

/// A position in the bytes of a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns a second cursor at the same position.
    pub(super) fn clone_at(&self) -> Self {
        Self { bytes: self.bytes, at: self.at }
    }

    /// Returns the number of bytes before the cursor.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Returns the next `count` bytes.
    pub(super) fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        let (at, total) = (self.at, self.bytes.len());
        ensure!(count <= left as u64, "byte {at}: {count} bytes are needed, but the file ends at byte {total}");
        self.at += count as usize;
        Ok(&self.bytes[at..self.at])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Returns a string: its length as 64 bits, and its bytes.
    pub(super) fn text(&mut self) -> Result<&'a [u8]> {
        let count = self.u64()?;
        self.take(count)
    }
}
