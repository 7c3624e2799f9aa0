//! What a product of quantised weights reads and writes.

use candle_core::quantized::GgmlDType;

/// Quantised weights of whole rows, as they are stored.
#[derive(Clone, Copy)]
pub(super) struct StoredRows<'a> {
    pub(super) kind: GgmlDType,
    pub(super) bytes: &'a [u8],
    /// Elements of a row.
    pub(super) columns: usize,
}

/// The columns of a row-major result that a product writes, from `first` on.
pub(super) struct ResultColumns<'a> {
    pub(super) y: &'a mut [f32],
    /// Elements of a row of `y`.
    pub(super) width: usize,
    pub(super) first: usize,
}

impl ResultColumns<'_> {
    /// Writes products `[outputs, rows]` to the columns from `first` on.
    pub(super) fn put_turned(&mut self, first: usize, turned: &[f32], rows: usize) {
        for (row, y) in self.y.chunks_exact_mut(self.width).enumerate() {
            y[first..].iter_mut().zip(turned[row..].iter().step_by(rows)).for_each(|(y, x)| *y = *x);
        }
    }
}
