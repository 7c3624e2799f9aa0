//! [`Records`]: the memory of summaries, records of equal length that grow by a quarter.

use crate::huge_pages::{HUGE_PAGE_BYTES, make_huge};
use std::ops::Range;

/// Records of equal length, one per token or group. They grow in steps that [`Self::bytes_for`] can predict.
#[derive(Clone, Debug)]
pub(crate) struct Records<T> {
    data: Vec<T>,
    len: usize,
}

impl<T: Copy + Default> Records<T> {
    /// Returns an empty list of records of `len` elements, which is not 0.
    pub(crate) fn new(len: usize) -> Self {
        Self { data: Vec::new(), len: len.max(1) }
    }

    pub(crate) fn count(&self) -> usize {
        self.data.len() / self.len
    }

    /// Reserves memory for exactly `records` more records.
    pub(crate) fn reserve(&mut self, records: usize) {
        self.data.reserve_exact(records * self.len);
    }

    /// Reserves memory for exactly `records` more records, if there is no room for one.
    pub(crate) fn reserve_when_full(&mut self, records: usize) {
        if self.data.capacity() < self.data.len() + self.len {
            self.reserve(records);
        }
    }

    /// Adds a record of zeros.
    pub(crate) fn add(&mut self) -> &mut [T] {
        let start = self.data.len();
        if self.data.capacity() < start + self.len {
            self.data.reserve_exact(self.len.max(start / 4));
        }
        self.data.resize(start + self.len, T::default());
        // Growth may have moved the records to small pages.
        if start * size_of::<T>() / HUGE_PAGE_BYTES < size_of_val(self.data.as_slice()) / HUGE_PAGE_BYTES {
            make_huge(&self.data);
        }
        &mut self.data[start..]
    }

    /// Appends records as little-endian bytes.
    pub(crate) fn encode(&self, range: Range<usize>, out: &mut Vec<u8>)
    where
        T: ToBytes,
    {
        self.slice(range).iter().for_each(|x| x.put(out));
    }

    /// Adds a record from exactly its bytes.
    pub(crate) fn restore(&mut self, bytes: &[u8])
    where
        T: ToBytes,
    {
        for (out, bytes) in self.add().iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
            *out = T::get(bytes);
        }
    }

    /// Returns the bytes of a record.
    pub(crate) fn record_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Keeps the first `count` records. Returns memory if less than half of it is used.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.data.truncate(count * self.len);
        if self.data.len() < self.data.capacity() / 2 {
            self.data.shrink_to_fit();
        }
    }

    pub(crate) fn record_mut(&mut self, at: usize) -> &mut [T] {
        &mut self.data[at * self.len..(at + 1) * self.len]
    }

    pub(crate) fn slice(&self, range: Range<usize>) -> &[T] {
        &self.data[range.start * self.len..range.end * self.len]
    }

    pub(crate) fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<T>()
    }

    /// Returns the most [`Self::bytes`] after `more` records.
    pub(crate) fn bytes_for(&self, more: usize) -> usize {
        let needed = self.data.len() + more * self.len;
        if needed <= self.data.capacity() {
            return self.bytes();
        }
        (needed + needed / 4 + self.len) * size_of::<T>()
    }
}

/// An element of records, little-endian.
pub(crate) trait ToBytes: Copy {
    fn put(self, out: &mut Vec<u8>);

    /// Returns the element with exactly these bytes.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! to_bytes {
    ($($ty:ty),*) => {
        $(impl ToBytes for $ty {
            fn put(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn get(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or(Self::default(), |bytes| Self::from_le_bytes(*bytes))
            }
        })*
    };
}

to_bytes!(u8, u16, f32);
