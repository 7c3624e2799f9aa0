//! Strided views of the caller's keys and values, in the caller's element type.
//!
//! [`TensorView::check`] verifies shape, bounds and finiteness once. [`TensorView::write_row`] then converts row by
//! row.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::multiversion;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use stratakv_format::DType;

#[cfg(target_endian = "big")]
compile_error!("stratakv stores little-endian elements and runs on little-endian machines only");

/// The elements of a view, in the caller's type.
#[derive(Clone, Copy, Debug)]
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

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
                TensorView { elements: Elements::$variant(elements), tokens, heads, dim, token_stride, head_stride }
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
    elements: Elements<'a>,
    tokens: usize,
    heads: usize,
    dim: usize,
    token_stride: usize,
    head_stride: usize,
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
        self.tokens
    }

    /// Checks shape and bounds, and that every element is finite in `dtype`.
    pub(crate) fn check(&self, what: &str, heads: usize, dim: usize, dtype: DType) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::InvalidArgument, format!("{what}: {text}")));
        let shape_heads = if dim == 0 { self.heads } else { heads };
        if self.dim != dim || (self.heads != shape_heads) {
            return wrong(format!(
                "shape [{}, {}, {}], but the layout has [tokens, {heads}, {dim}]",
                self.tokens, self.heads, self.dim
            ));
        }
        if dim == 0 || self.tokens == 0 {
            return Ok(());
        }
        let end = (self.tokens - 1)
            .checked_mul(self.token_stride)
            .and_then(|t| (self.heads - 1).checked_mul(self.head_stride).and_then(|h| t.checked_add(h)))
            .and_then(|start| start.checked_add(dim));
        let len = match self.elements {
            Elements::F32(e) => e.len(),
            Elements::F16(e) => e.len(),
            Elements::Bf16(e) => e.len(),
        };
        match end {
            Some(end) if end <= len => {}
            _ => {
                return wrong(format!(
                    "shape [{}, {heads}, {dim}] with strides {} and {} does not fit in {len} elements",
                    self.tokens, self.token_stride, self.head_stride
                ));
            }
        }
        let Some((token, head, index)) = first_unfit(self, dtype) else { return Ok(()) };
        let (value, dtype) = (self.value(token, head, index), dtype.name());
        wrong(format!(
            "element {index} of head {head} of token {token} is {value}, which {dtype} cannot hold as a finite number"
        ))
    }

    /// Checks that no element of a checked view exceeds `largest` in magnitude.
    pub(crate) fn check_magnitude(&self, what: &str, largest: f32) -> Result<()> {
        // No f16 number exceeds the limit.
        if matches!(self.elements, Elements::F16(_)) || self.dim == 0 {
            return Ok(());
        }
        let Some((token, head, index)) = first_larger(self, largest) else { return Ok(()) };
        let value = self.value(token, head, index);
        let text = format!(
            "{what}: element {index} of head {head} of token {token} is {value}; \
             the layer's codec allows at most {largest}"
        );
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }

    /// Returns the first element for which `bad` is true.
    #[inline(always)]
    fn first_bad<T: Copy>(&self, elements: &[T], bad: impl Fn(T) -> bool) -> Option<Place> {
        for token in 0..self.tokens {
            for head in 0..self.heads {
                let row = self.row(elements, token, head);
                // The whole row is tested first, so the common case has no branch per element.
                if row.iter().fold(false, |any, &x| any | bad(x)) {
                    return row.iter().position(|&x| bad(x)).map(|at| (token, head, at));
                }
            }
        }
        None
    }

    #[inline(always)]
    fn start(&self, token: usize, head: usize) -> usize {
        token * self.token_stride + head * self.head_stride
    }

    #[inline(always)]
    fn row<'e, T>(&self, elements: &'e [T], token: usize, head: usize) -> &'e [T] {
        let start = self.start(token, head);
        &elements[start..start + self.dim]
    }

    fn value(&self, token: usize, head: usize, index: usize) -> f32 {
        let at = self.start(token, head) + index;
        match self.elements {
            Elements::F32(e) => e[at],
            Elements::F16(e) => e[at].to_f32(),
            Elements::Bf16(e) => e[at].to_f32(),
        }
    }

    /// Writes one head of one token to `out`, as `dim` elements of `dtype`. The view must have been checked.
    pub(crate) fn write_row(&self, token: usize, head: usize, dtype: DType, out: &mut [u8]) {
        match (self.elements, dtype) {
            (Elements::F32(e), DType::F32) => out.copy_from_slice(bytemuck::cast_slice(self.row(e, token, head))),
            (Elements::F16(e), DType::F16) => out.copy_from_slice(bytemuck::cast_slice(self.row(e, token, head))),
            (Elements::Bf16(e), DType::Bf16) => out.copy_from_slice(bytemuck::cast_slice(self.row(e, token, head))),
            (Elements::F32(e), _) => narrow(self.row(e, token, head), dtype, out),
            _ => {
                let row: Vec<f32> = (0..self.dim).map(|index| self.value(token, head, index)).collect();
                narrow(&row, dtype, out);
            }
        }
    }
}

/// The token, head and index in the row of an element.
type Place = (usize, usize, usize);

multiversion! {
    /// Returns the first element that is not finite in `dtype`.
    fn first_unfit(view: &TensorView<'_>, dtype: DType) -> Option<Place> = unfit_of_rows;
}

#[inline(always)]
fn unfit_of_rows(view: &TensorView<'_>, dtype: DType) -> Option<Place> {
    match view.elements {
        Elements::F32(e) => view.first_bad(e, |x| !stays_finite(x, dtype)),
        Elements::F16(e) => view.first_bad(e, |x| x.to_bits() & 0x7fff >= f16::INFINITY.to_bits()),
        Elements::Bf16(e) => view.first_bad(e, |x| !stays_finite(wide(x), dtype)),
    }
}

multiversion! {
    /// Returns the first element that exceeds `largest` in magnitude.
    fn first_larger(view: &TensorView<'_>, largest: f32) -> Option<Place> = larger_of_rows;
}

#[inline(always)]
fn larger_of_rows(view: &TensorView<'_>, largest: f32) -> Option<Place> {
    match view.elements {
        Elements::F32(e) => view.first_bad(e, |x| x.abs() > largest),
        Elements::F16(_) => None,
        Elements::Bf16(e) => view.first_bad(e, |x| wide(x).abs() > largest),
    }
}

#[inline(always)]
fn wide(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[inline(always)]
fn stays_finite(x: f32, dtype: DType) -> bool {
    // The first value that rounds to infinity is half a step above the largest finite one.
    let limit = match dtype {
        DType::F32 => return x.is_finite(),
        DType::F16 => 65520.0,
        DType::Bf16 => f32::from_bits(0x7f7f_8000),
    };
    x.abs() < limit
}

/// Converts a row to little-endian elements of `dtype`.
pub(crate) fn narrow(row: &[f32], dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(row)),
        DType::F16 => match bytemuck::try_cast_slice_mut::<u8, f16>(out) {
            Ok(out) => out.convert_from_f32_slice(row),
            Err(_) => {
                for (out, &x) in out.chunks_exact_mut(2).zip(row) {
                    out.copy_from_slice(&f16::from_f32(x).to_le_bytes());
                }
            }
        },
        DType::Bf16 => match bytemuck::try_cast_slice_mut::<u8, bf16>(out) {
            Ok(out) => out.convert_from_f32_slice(row),
            Err(_) => {
                for (out, &x) in out.chunks_exact_mut(2).zip(row) {
                    out.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                }
            }
        },
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

    #[test]
    fn limits_are_where_rounding_reaches_infinity() {
        for (dtype, finite) in [(DType::F16, 65519.996_f32), (DType::Bf16, f32::from_bits(0x7f7f_7fff))] {
            assert!(stays_finite(finite, dtype) && !stays_finite(f32::from_bits(finite.to_bits() + 1), dtype));
        }
        assert!(f16::from_f32(65519.996).is_finite() && !f16::from_f32(65520.0).is_finite());
        assert!(bf16::from_f32(f32::from_bits(0x7f7f_7fff)).is_finite());
        assert!(!bf16::from_f32(f32::from_bits(0x7f7f_8000)).is_finite());
    }
}
