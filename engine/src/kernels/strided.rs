//! [`StridedRows`]: rows of elements in the type and the strides of the caller, checked and converted.

use super::convert::{Bf16, HalfElement, f16_to_f32, narrow, stays_finite};
use super::dispatch::multiversion;
use half::{bf16, f16};
use stratakv_format::DType;

/// Elements in the type of the caller.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallerElements<'a> {
    /// f32.
    F32(&'a [f32]),
    /// f16.
    F16(&'a [f16]),
    /// bf16.
    Bf16(&'a [bf16]),
}

/// A tensor `[tokens, heads, dim]`. Row `(token, head)` starts at `token * token_stride + head * head_stride`, and its
/// elements are contiguous.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StridedRows<'a> {
    /// All elements.
    pub(crate) elements: CallerElements<'a>,
    /// Tokens.
    pub(crate) tokens: usize,
    /// Heads.
    pub(crate) heads: usize,
    /// Elements of a row.
    pub(crate) dim: usize,
    /// Elements from one token to the next.
    pub(crate) token_stride: usize,
    /// Elements from one head to the next.
    pub(crate) head_stride: usize,
}

/// The token, the head and the index in its row of an element.
pub(crate) type ElementIndex = (usize, usize, usize);

impl StridedRows<'_> {
    /// Returns the first element for which `bad` holds.
    #[inline(always)]
    fn first_bad<T: Copy>(&self, elements: &[T], bad: impl Fn(T) -> bool) -> Option<ElementIndex> {
        for token in 0..self.tokens {
            for head in 0..self.heads {
                let row = self.row(elements, token, head);
                // The whole row is tested first, because that loop has no branch.
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

    /// Returns the number of all elements, those between rows included.
    pub(crate) fn element_count(&self) -> usize {
        match self.elements {
            CallerElements::F32(e) => e.len(),
            CallerElements::F16(e) => e.len(),
            CallerElements::Bf16(e) => e.len(),
        }
    }

    /// Returns the value of an element.
    #[inline]
    pub(crate) fn value(&self, (token, head, index): ElementIndex) -> f32 {
        let at = self.start(token, head) + index;
        match self.elements {
            CallerElements::F32(e) => e[at],
            CallerElements::F16(e) => f16_to_f32(e[at].to_bits()),
            CallerElements::Bf16(e) => Bf16::widen_bits(e[at].to_bits()),
        }
    }

    /// Writes one row in `dtype` to `out`, which has `dim` elements. All rows are in bounds.
    #[inline]
    pub(crate) fn write_row(&self, token: usize, head: usize, dtype: DType, out: &mut [u8]) {
        match (self.elements, dtype) {
            (CallerElements::F32(e), DType::F32) => out.copy_from_slice(bytemuck::cast_slice(self.row(e, token, head))),
            (CallerElements::F16(e), DType::F16) => out.copy_from_slice(bytemuck::cast_slice(self.row(e, token, head))),
            (CallerElements::Bf16(e), DType::Bf16) => {
                out.copy_from_slice(bytemuck::cast_slice(self.row(e, token, head)));
            }
            (CallerElements::F32(e), _) => narrow(self.row(e, token, head), dtype, out),
            _ => {
                let row: Vec<f32> = (0..self.dim).map(|index| self.value((token, head, index))).collect();
                narrow(&row, dtype, out);
            }
        }
    }
}

multiversion! {
    /// Returns the first element that is not finite in `dtype`. All rows are in bounds.
    pub(crate) fn first_not_finite(rows: &StridedRows<'_>, dtype: DType) -> Option<ElementIndex> = not_finite_of_rows;
}

#[inline(always)]
fn not_finite_of_rows(rows: &StridedRows<'_>, dtype: DType) -> Option<ElementIndex> {
    match rows.elements {
        CallerElements::F32(e) => rows.first_bad(e, |x| !stays_finite(x, dtype)),
        CallerElements::F16(e) => rows.first_bad(e, |x| x.to_bits() & 0x7fff >= f16::INFINITY.to_bits()),
        CallerElements::Bf16(e) => rows.first_bad(e, |x| !stays_finite(Bf16::widen_bits(x.to_bits()), dtype)),
    }
}

multiversion! {
    /// Returns the first element whose magnitude is above `largest`. All rows are in bounds. f16 elements are not
    /// searched, because `largest` is beyond their range.
    pub(crate) fn first_larger(rows: &StridedRows<'_>, largest: f32) -> Option<ElementIndex> = larger_of_rows;
}

#[inline(always)]
fn larger_of_rows(rows: &StridedRows<'_>, largest: f32) -> Option<ElementIndex> {
    match rows.elements {
        CallerElements::F32(e) => rows.first_bad(e, |x| x.abs() > largest),
        CallerElements::F16(_) => None,
        CallerElements::Bf16(e) => rows.first_bad(e, |x| Bf16::widen_bits(x.to_bits()).abs() > largest),
    }
}
