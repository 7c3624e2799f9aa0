//! [`RowQuery`]: query vectors laid out for [`row_scores`](super::row_scores), and their scores over records.
//!
//! 1. [`RowQuery::new`] lays the query vectors out as rows, or transposed if there are many for one head.
//! 2. [`RowQuery::put`] writes the scores of one slice of records.
//! 3. [`RowQuery::add_slices`] adds the scores of several slices to what the output holds, tile by tile.
//!
//! Invariant: the cut of records into slices changes no bit, because each score depends on one record alone.

use super::kernel::Kernel;
use super::plane::{PAD, SCRATCH};
use super::row_scores::{RecordElement, RecordRun};
use stratakv_format::DType;

/// Scores of a tile.
const TILE: usize = 2048;
/// The most query vectors of one head that are laid out as rows. More are transposed.
const MOST_ROWS: usize = 8;

/// Query vectors in the layout that the kernels read.
#[derive(Clone, Debug)]
pub(crate) struct RowQuery {
    /// `[heads * per_head, dim]` with padded rows, or `[dim, columns]` if `transposed`.
    query: Vec<f32>,
    transposed: bool,
    heads: usize,
    per_head: usize,
    dim: usize,
    /// The scores of a tile. Kept between calls, because a call may be for two records only.
    tile: Vec<f32>,
    /// The widened records of a block.
    scratch: Box<[f32; SCRATCH]>,
}

impl RowQuery {
    /// Lays out `query`, `[heads, per_head, dim]`. The vectors of head `h` meet the elements `h * dim..(h + 1) * dim`
    /// of a record.
    pub(crate) fn new(query: &[f32], heads: usize, dim: usize) -> Self {
        debug_assert!(heads > 0 && dim > 0);
        let per_head = query.len() / (heads * dim).max(1);
        let stride = dim.next_multiple_of(PAD);
        let transposed = heads == 1 && per_head > MOST_ROWS && stride <= SCRATCH / 8;
        let mut laid = Vec::new();
        if transposed {
            let columns = per_head.next_multiple_of(PAD);
            laid.resize(dim * columns, 0.0);
            for (i, row) in query.chunks_exact(dim).enumerate() {
                row.iter().enumerate().for_each(|(d, q)| laid[d * columns + i] = *q);
            }
        } else {
            laid.resize(heads * per_head * stride, 0.0);
            for (to, row) in laid.chunks_exact_mut(stride).zip(query.chunks_exact(dim)) {
                to[..dim].copy_from_slice(row);
            }
        }
        Self { query: laid, transposed, heads, per_head, dim, tile: Vec::new(), scratch: Box::new([0.0; SCRATCH]) }
    }

    /// Returns the most bytes of `count` query vectors of one head, with the scratch of [`Self::put`].
    pub(crate) fn bytes_for(count: usize, dim: usize) -> usize {
        let elements = count.next_multiple_of(PAD).saturating_mul(dim.next_multiple_of(PAD));
        elements.saturating_add(SCRATCH).saturating_mul(size_of::<f32>())
    }

    fn run<'a>(&self, records: &'a [u8], (record, offset): (usize, usize), element: RecordElement) -> RecordRun<'a> {
        let &Self { transposed, heads, per_head, dim, .. } = self;
        let columns = if transposed { per_head.next_multiple_of(PAD) } else { heads * per_head };
        RecordRun { records, record, offset, heads, per_head, dim, element, columns, transposed }
    }

    /// Writes to `out`, `[records, columns]`, the dot products with the elements from `offset` on of each record.
    ///
    /// A record has `record` elements of `dtype`, which has 16 bits. Query vector `i` goes to column `i`. Further
    /// columns are padding of any value.
    pub(crate) fn put(
        &mut self,
        records: &[u16],
        (record, offset): (usize, usize),
        dtype: DType,
        out: &mut [f32],
        columns: usize,
    ) {
        self.put_elements(bytemuck::cast_slice(records), (record, offset), halves(dtype), out, columns);
    }

    /// Writes the dot products with records of `record` f16 in little-endian bytes, as [`Self::put`] does.
    pub(crate) fn put_half_bytes(
        &mut self,
        records: &[u8],
        (record, offset): (usize, usize),
        out: &mut [f32],
        columns: usize,
    ) {
        self.put_elements(records, (record, offset), RecordElement::F16, out, columns);
    }

    /// Writes the dot products with records of `record` signed bytes, as [`Self::put`] does.
    pub(crate) fn put_bytes(
        &mut self,
        records: &[i8],
        (record, offset): (usize, usize),
        out: &mut [f32],
        columns: usize,
    ) {
        self.put_elements(bytemuck::cast_slice(records), (record, offset), RecordElement::Int8, out, columns);
    }

    fn put_elements(
        &mut self,
        records: &[u8],
        (record, offset): (usize, usize),
        element: RecordElement,
        out: &mut [f32],
        columns: usize,
    ) {
        let mut run = self.run(records, (record, offset), element);
        if run.columns == columns || !run.transposed && run.columns < columns {
            run.columns = columns;
            Kernel::best().row_scores(&run, &self.query, out, &mut self.scratch);
        } else {
            out.fill(0.0);
            self.add_elements(std::iter::once(records), (record, offset), element, out, columns);
        }
    }

    /// Adds the dot products with the records of all slices, as if they were one slice, where [`Self::put`] writes
    /// them.
    pub(crate) fn add_slices<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a [u16]>,
        (record, offset): (usize, usize),
        dtype: DType,
        out: &mut [f32],
        columns: usize,
    ) {
        self.add_elements(slices.map(bytemuck::cast_slice), (record, offset), halves(dtype), out, columns);
    }

    fn add_elements<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a [u8]>,
        (record, offset): (usize, usize),
        element: RecordElement,
        out: &mut [f32],
        columns: usize,
    ) {
        let count = self.heads * self.per_head;
        let mut out = out.chunks_exact_mut(columns);
        for slice in slices {
            let tile = (TILE / count).max(1).next_multiple_of(8);
            for records in slice.chunks(tile * record * element.bytes()) {
                let run = self.run(records, (record, offset), element);
                self.tile.resize(tile * run.columns, 0.0);
                Kernel::best().row_scores(&run, &self.query, &mut self.tile, &mut self.scratch);
                for (found, out) in self.tile.chunks_exact(run.columns).take(run.count()).zip(&mut out) {
                    out.iter_mut().zip(&found[..count]).for_each(|(out, found)| *out += found);
                }
            }
        }
    }
}

/// Returns the element of records of a type of 16 bits.
fn halves(dtype: DType) -> RecordElement {
    debug_assert_eq!(dtype.bytes(), 2);
    if dtype == DType::Bf16 { RecordElement::Bf16 } else { RecordElement::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn row_scores_are_the_dot_products(
            (heads, per_head, dim) in prop_oneof![
                (1_usize..5, 1_usize..9, 1_usize..70), (Just(1), 9_usize..40, 1_usize..70),
                (2_usize..4, 9_usize..12, 1_usize..40), (Just(8), Just(1), prop::sample::select(vec![16_usize, 32])),
                (Just(1), Just(1), 16_usize..300), Just((1, 3, 1500)), Just((1, 9, 1024)), Just((1, 2056, 2)),
            ],
            count in 0_usize..150, (offset, rest) in prop_oneof![Just((0, 0)), (0_usize..3, 0_usize..3)],
            bf in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = || 2.0 * rng.f32() - 1.0;
            let query: Vec<f32> = (0..heads * per_head * dim).map(|_| random()).collect();
            let record = offset + heads * dim + rest;
            let dtype = if bf { DType::Bf16 } else { DType::F16 };
            let narrow = |x: f32| if bf { bf16::from_f32(x).to_bits() } else { f16::from_f32(x).to_bits() };
            let wide = |b: u16| if bf { bf16::from_bits(b).to_f32() } else { f16::from_bits(b).to_f32() };
            let records: Vec<u16> = (0..count * record).map(|_| narrow(random())).collect();
            let columns = (heads * per_head).next_multiple_of(8);
            let mut out = vec![0.5; count * columns];
            let mut rows = RowQuery::new(&query, heads, dim);
            rows.add_slices(records.chunks(3 * record), (record, offset), dtype, &mut out, columns);
            // Every kernel writes the same scores up to rounding.
            for kernel in Kernel::available() {
                let mut run = rows.run(bytemuck::cast_slice(&records), (record, offset), halves(dtype));
                if !run.transposed {
                    run.columns = columns;
                }
                let mut put = vec![7.0; count * run.columns];
                kernel.row_scores(&run, &rows.query, &mut put, &mut rows.scratch);
                for (put, out) in put.chunks_exact(run.columns).zip(out.chunks_exact(columns)) {
                    for (put, out) in put.iter().zip(out).take(heads * per_head) {
                        let close = (put + 0.5 - out).abs() < 1e-4 * (dim as f32).max(1.0);
                        prop_assert!(close, "{}: {put} {out}", kernel.name());
                    }
                }
            }
            let mut put = vec![7.0; count * columns];
            rows.put(&records, (record, offset), dtype, &mut put, columns);
            for (put, out) in put.chunks_exact(columns).zip(out.chunks_exact(columns)) {
                for (put, out) in put.iter().zip(out).take(heads * per_head) {
                    prop_assert!((put + 0.5 - out).abs() < 1e-4 * (dim as f32).max(1.0), "{put} {out}");
                }
            }
            for (row, out) in records.chunks_exact(record).zip(out.chunks_exact(columns)) {
                for (i, out) in out.iter().enumerate() {
                    let Some(q) = query.get(i * dim..(i + 1) * dim) else { prop_assert_eq!(*out, 0.5); continue };
                    let key = &row[offset + i / per_head * dim..][..dim];
                    let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(wide(*k))).sum();
                    prop_assert!((f64::from(*out) - 0.5 - dot).abs() < 1e-4 * (dim as f64).max(1.0), "{out} {dot}");
                }
            }
        }

        #[test]
        fn scores_of_bytes_are_exact_for_integers(
            (heads, per_head, dim) in prop_oneof![
                (1_usize..5, 1_usize..9, 1_usize..70), (Just(1), 9_usize..40, 1_usize..70),
                (Just(8), Just(1), prop::sample::select(vec![16_usize, 32])), Just((1, 1, 300)), Just((1, 16, 128)),
            ],
            count in 0_usize..70, (offset, rest) in prop_oneof![Just((0, 0)), (0_usize..3, 0_usize..3)],
            seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let query: Vec<f32> = (0..heads * per_head * dim).map(|_| f32::from(rng.i8(-9..9))).collect();
            let record = offset + heads * dim + rest;
            let records: Vec<i8> = (0..count * record).map(|_| rng.i8(..)).collect();
            let (own, wide) = (heads * per_head, (heads * per_head).next_multiple_of(8) + 8);
            let mut rows = RowQuery::new(&query, heads, dim);
            let exact = |row: &[i8], i: usize| {
                let key = &row[offset + i / per_head * dim..][..dim];
                query[i * dim..][..dim].iter().zip(key).map(|(q, k)| q * f32::from(*k)).sum::<f32>()
            };
            for columns in [own, wide] {
                let mut put = vec![7.0; count * columns];
                rows.put_bytes(&records, (record, offset), &mut put, columns);
                for (row, put) in records.chunks_exact(record).zip(put.chunks_exact(columns)) {
                    prop_assert!((0..own).all(|i| put[i] == exact(row, i)), "{put:?}");
                }
            }
            for kernel in Kernel::available() {
                let run = rows.run(bytemuck::cast_slice(&records), (record, offset), RecordElement::Int8);
                let mut put = vec![7.0; count * run.columns];
                kernel.row_scores(&run, &rows.query, &mut put, &mut rows.scratch);
                for (row, put) in records.chunks_exact(record).zip(put.chunks_exact(run.columns)) {
                    prop_assert!((0..own).all(|i| put[i] == exact(row, i)), "{}: {put:?}", kernel.name());
                }
            }
        }
    }
}
