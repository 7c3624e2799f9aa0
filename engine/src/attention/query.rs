//! A query, validated and scaled once for all pieces it meets.

use super::kernel::PAD;
use super::shape::AttentionShape;
use crate::error::{Error, ErrorKind, Result};

/// A decode query `[q_heads, dk]` in the form that the kernels read: scaled, each head padded with zeros.
#[derive(Clone, Debug)]
pub struct Query {
    shape: AttentionShape,
    stride: usize,
    scaled: Vec<f32>,
}

impl Query {
    /// Validates `query` (`[q_heads, dk]`, row-major) for `shape`.
    ///
    /// # Errors
    /// `InvalidArgument`: wrong length; an element is NaN or infinite, or becomes so when scaled (the error names its head and index).
    pub fn new(shape: &AttentionShape, query: &[f32]) -> Result<Self> {
        let stride = shape.dk().next_multiple_of(PAD);
        let mut new = Self { shape: *shape, stride, scaled: vec![0.0; shape.q_heads() * stride] };
        new.set(query)?;
        Ok(new)
    }

    /// Takes the next query of the same shape, without allocating. After an error the content is unspecified (but valid).
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
            // x * 0 is NaN for NaN and the infinities, and the sum keeps it: one test per head.
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

    /// The shape it was made for.
    #[must_use]
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// The scaled query `[q_heads, stride]`.
    pub(super) fn scaled(&self) -> &[f32] {
        &self.scaled
    }

    /// Elements from one head to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}
