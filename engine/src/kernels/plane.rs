//! The K or V plane that a pass of attention reads, and the sizes that all passes share.

use stratakv_format::DType;

/// Rows of f32 (query, accumulator, scores) are padded to a multiple of this: the lanes of the widest vector.
pub(crate) const PAD: usize = 16;

/// Elements of the scratch buffer, which holds widened rows that many query heads read.
pub(crate) const SCRATCH: usize = 8192;

/// A plane of one run of blocks, and the rows, heads and elements of it that take part.
#[derive(Clone, Copy)]
pub(crate) struct Plane<'a> {
    /// For each token that takes part, the bytes of the plane from its row of head 0 on.
    pub(crate) rows: &'a [&'a [u8]],
    /// Bytes from one head to the next.
    pub(crate) head_stride: usize,
    /// The KV heads that take part, in ascending order.
    pub(crate) heads: &'a [u8],
    /// The type of the stored elements.
    pub(crate) dtype: DType,
    /// Elements used of each row.
    pub(crate) take: usize,
}

impl Plane<'_> {
    /// Returns the bytes used of each row.
    pub(super) fn row_bytes(&self) -> usize {
        self.take * self.dtype.bytes()
    }

    /// Returns whether the rows contain every element that a kernel reads. The last head decides, because heads ascend.
    pub(super) fn in_bounds(&self) -> bool {
        debug_assert!(self.heads.is_sorted());
        let Some(&head) = self.heads.last() else { return true };
        let Some(end) = usize::from(head).checked_mul(self.head_stride).and_then(|at| at.checked_add(self.row_bytes()))
        else {
            return false;
        };
        self.rows.iter().all(|row| end <= row.len())
    }
}
