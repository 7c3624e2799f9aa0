//! [`Query`]: a decode query, validated and scaled once for all blocks.

use super::shape::AttentionShape;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::PAD;

/// A decode query `[q_heads, dk]` in the form that the kernels read: scaled, and each head padded with zeros.
#[derive(Clone, Debug)]
pub struct Query {
    shape: AttentionShape,
    /// Elements from one head to the next.
    stride: usize,
    scaled: Vec<f32>,
}

impl Query {
    /// Validates `query` (`[q_heads, dk]`, row-major) for `shape`, and scales it.
    ///
    /// # Errors
    /// `InvalidArgument`: the length is wrong, or an element is NaN or infinite, or becomes so when it is scaled. The
    /// error names head and index.
    pub fn new(shape: &AttentionShape, query: &[f32]) -> Result<Self> {
        let stride = shape.dk().next_multiple_of(PAD);
        let mut new = Self { shape: *shape, stride, scaled: vec![0.0; shape.q_heads() * stride] };
        new.set(query)?;
        Ok(new)
    }

    /// Replaces the query by another one of the same shape, without allocation. After an error its elements are
    /// unspecified, but finite.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn set(&mut self, query: &[f32]) -> Result<()> {
        let (shape, scale) = (&self.shape, self.shape.scale());
        if query.len() != shape.query_len() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("query of {} elements: {} heads of {} are needed", query.len(), shape.q_heads(), shape.dk()),
            ));
        }
        for (head, (to, from)) in
            self.scaled.chunks_exact_mut(self.stride).zip(query.chunks_exact(shape.dk())).enumerate()
        {
            // x * 0 is NaN if x is NaN or infinite, and the sum stays NaN. One test per head is enough.
            let mut finite = 0.0;
            for (to, &from) in to.iter_mut().zip(from) {
                let scaled = from * scale;
                finite += scaled * 0.0;
                *to = if scaled.is_finite() { scaled } else { 0.0 };
            }
            if finite != 0.0 {
                let bad = from.iter().enumerate().find(|(_, x)| !(**x * scale).is_finite());
                let (index, value) = bad.map_or((0, f32::NAN), |(index, x)| (index, *x));
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("query head {head}, index {index}: {value} (scale {scale}) is not finite"),
                ));
            }
        }
        Ok(())
    }

    /// Returns the shape of the query.
    #[must_use]
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Returns the scaled query `[q_heads, stride]`.
    pub(super) fn scaled(&self) -> &[f32] {
        &self.scaled
    }

    /// Returns the elements from one head to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}
