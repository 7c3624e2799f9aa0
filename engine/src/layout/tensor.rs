//! Strided views of the caller's keys and values, in the caller's element type.
//!
//! [`TensorView::check`] verifies shape, bounds and finiteness once. [`TensorView::write_row`] then converts row by
//! row.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{CallerElements, StridedRows, first_larger, first_not_finite};
use half::{bf16, f16};
use stratakv_format::DType;

#[cfg(target_endian = "big")]
compile_error!("stratakv stores little-endian elements and runs on little-endian machines only");

/// A slice that may be viewed as keys or values: `f32`, [`half::f16`] or [`half::bf16`].
pub trait Element: Sized + sealed::Sealed {
    #[doc(hidden)]
    fn view(elements: &[Self], tokens: usize, heads: usize, dim: usize, strides: (usize, usize)) -> TensorView<'_>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

macro_rules! element {
    ($type:ty, $variant:ident) => {
        impl Element for $type {
            fn view(
                elements: &[Self],
                tokens: usize,
                heads: usize,
                dim: usize,
                strides: (usize, usize),
            ) -> TensorView<'_> {
                let (token_stride, head_stride) = strides;
                let elements = CallerElements::$variant(elements);
                TensorView { rows: StridedRows { elements, tokens, heads, dim, token_stride, head_stride } }
            }
        }
    };
}

element!(f32, F32);
element!(f16, F16);
element!(bf16, Bf16);

/// Keys or values of tokens of one layer, `[tokens, kv_heads, head_dim]` with any strides between tokens and heads.
///
/// The elements of one head of one token must be contiguous.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    rows: StridedRows<'a>,
}

impl<'a> TensorView<'a> {
    /// Returns a view of contiguous elements of shape `[tokens, heads, dim]`.
    #[must_use]
    pub fn token_major<E: Element>(elements: &'a [E], tokens: usize, heads: usize, dim: usize) -> Self {
        E::view(elements, tokens, heads, dim, (heads.saturating_mul(dim), dim))
    }

    /// Returns a view of contiguous elements of shape `[heads, tokens, dim]`.
    #[must_use]
    pub fn head_major<E: Element>(elements: &'a [E], tokens: usize, heads: usize, dim: usize) -> Self {
        E::view(elements, tokens, heads, dim, (dim, tokens.saturating_mul(dim)))
    }

    /// Returns a view with strides in elements. Head `h` of token `t` starts at `t * token_stride + h * head_stride`.
    #[must_use]
    pub fn strided<E: Element>(
        elements: &'a [E],
        tokens: usize,
        heads: usize,
        dim: usize,
        token_stride: usize,
        head_stride: usize,
    ) -> Self {
        E::view(elements, tokens, heads, dim, (token_stride, head_stride))
    }

    /// Returns a view without values, for layouts whose values are a prefix of the keys.
    #[must_use]
    pub fn empty(tokens: usize) -> Self {
        f32::view(&[], tokens, 0, 0, (0, 0))
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.rows.tokens
    }

    /// Checks shape and bounds, and that every element is finite in `dtype`.
    pub(crate) fn check(&self, what: &str, heads: usize, dim: usize, dtype: DType) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::InvalidArgument, format!("{what}: {text}")));
        let StridedRows { tokens, heads: own_heads, dim: own_dim, token_stride, head_stride, .. } = self.rows;
        if own_dim != dim || (dim > 0 && own_heads != heads) {
            return wrong(format!(
                "shape [{tokens}, {own_heads}, {own_dim}], but the layout has [tokens, {heads}, {dim}]"
            ));
        }
        if dim == 0 || tokens == 0 {
            return Ok(());
        }
        let end = (tokens - 1)
            .checked_mul(token_stride)
            .and_then(|t| (heads - 1).checked_mul(head_stride).and_then(|h| t.checked_add(h)))
            .and_then(|start| start.checked_add(dim));
        let len = self.rows.element_count();
        match end {
            Some(end) if end <= len => {}
            _ => {
                return wrong(format!(
                    "shape [{tokens}, {heads}, {dim}] with strides {token_stride} and {head_stride} does not fit in \
                     {len} elements"
                ));
            }
        }
        let Some(found) = first_not_finite(&self.rows, dtype) else { return Ok(()) };
        let ((token, head, index), value, dtype) = (found, self.rows.value(found), dtype.name());
        wrong(format!(
            "element {index} of head {head} of token {token} is {value}, which {dtype} cannot hold as a finite number"
        ))
    }

    /// Checks that no element of a checked view exceeds `largest` in magnitude.
    pub(crate) fn check_magnitude(&self, what: &str, largest: f32) -> Result<()> {
        // No f16 number exceeds the limit.
        if matches!(self.rows.elements, CallerElements::F16(_)) || self.rows.dim == 0 {
            return Ok(());
        }
        let Some(found) = first_larger(&self.rows, largest) else { return Ok(()) };
        let ((token, head, index), value) = (found, self.rows.value(found));
        let text = format!(
            "{what}: element {index} of head {head} of token {token} is {value}; \
             the layer's codec allows at most {largest}"
        );
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }

    /// Writes one head of one token to `out`, as `dim` elements of `dtype`. The view must have been checked.
    pub(crate) fn write_row(&self, token: usize, head: usize, dtype: DType, out: &mut [u8]) {
        self.rows.write_row(token, head, dtype, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_stride_are_the_same_rows() {
        let (tokens, heads, dim) = (5, 3, 4);
        let value = |t: usize, h: usize, i: usize| (t * 100 + h * 10 + i) as f32;
        let mut token_major = vec![0.0; tokens * heads * dim];
        let mut head_major = token_major.clone();
        for t in 0..tokens {
            for h in 0..heads {
                for i in 0..dim {
                    token_major[(t * heads + h) * dim + i] = value(t, h, i);
                    head_major[(h * tokens + t) * dim + i] = value(t, h, i);
                }
            }
        }
        let a = TensorView::token_major(&token_major, tokens, heads, dim);
        let b = TensorView::head_major(&head_major, tokens, heads, dim);
        for view in [a, b] {
            view.check("keys", heads, dim, DType::F16).unwrap();
        }
        let mut left = vec![0; dim * 2];
        let mut right = left.clone();
        for t in 0..tokens {
            for h in 0..heads {
                a.write_row(t, h, DType::F16, &mut left);
                b.write_row(t, h, DType::F16, &mut right);
                assert_eq!(left, right);
                assert_eq!(f16::from_le_bytes([left[2], left[3]]).to_f32(), value(t, h, 1));
            }
        }
    }

    #[test]
    fn wrong_shapes_and_values_are_named() {
        let data = vec![0.0_f32; 24];
        let error = |view: TensorView<'_>| view.check("keys", 3, 4, DType::F16).unwrap_err().to_string();
        assert!(error(TensorView::token_major(&data, 2, 3, 5)).contains("shape [2, 3, 5]"));
        assert!(error(TensorView::token_major(&data, 3, 3, 4)).contains("does not fit in 24"));
        assert!(error(TensorView::strided(&data, 2, 3, 4, usize::MAX, 4)).contains("does not fit"));
        for bad in [f32::NAN, f32::INFINITY, 65520.0] {
            let mut data = data.clone();
            data[17] = bad;
            let text = error(TensorView::token_major(&data, 2, 3, 4));
            assert!(text.contains("element 1 of head 1 of token 1"), "{text}");
        }
        let mut data = data;
        data[0] = 65519.0;
        TensorView::token_major(&data, 2, 3, 4).check("keys", 3, 4, DType::F16).unwrap();
    }
}
