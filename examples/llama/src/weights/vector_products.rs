//! Products of Q4_K and Q6_K weights on processors with AVX-512. `vector_blocks.rs` multiplies single blocks.
//!
//! The input is rounded to 8 bits per element, in blocks of 256 like the weights. `pulp` offers the instructions to
//! safe code. There are two loops:
//!
//! - **By rows**, for few rows of input. Each block of weights is multiplied as it is stored. A thread reads the
//!   mapping once, in order.
//! - **By tiles**, for many rows of input. Blocks of 16 weight rows are unpacked to one output per lane. Each unpacked
//!   tile is then multiplied with every row of input, four rows at a time.

use std::arch::x86_64::__m512i;

use candle_core::quantized::GgmlDType;
use pulp::x86::V4;
use pulp::{NullaryFnOnce, Simd};
use rayon::prelude::*;

use super::product::{ResultColumns, StoredRows};
use super::vector_blocks::{BLOCK, Blocks, GROUPS, InputBlock, LANES, Q4K, Q6K, WeightTile};

/// Rows of input that share each load of a tile.
const TILE_ROWS: usize = 4;
/// Rows of input from which on tiles cost less than rows of weights, although they are unpacked.
const TILED_ROWS: usize = 8;
/// Outputs that one task computes by rows.
const TASK_OUTPUTS: usize = 32;
/// Outputs whose tiles are computed together, before they are copied to the result.
const COPIED_OUTPUTS: usize = 2048;

/// Returns the instructions, if products of the type are computed with them.
pub(super) fn instructions(kind: GgmlDType) -> Option<V4> {
    if matches!(kind, GgmlDType::Q4K | GgmlDType::Q6K) { V4::try_new() } else { None }
}

/// Multiplies each row of `x` with each row of weights.
///
/// The caller has checked that `columns` are whole blocks, and that `bytes`, `x` and `y` have whole rows.
pub(super) fn multiply(simd: V4, weights: StoredRows<'_>, x: &[f32], to: &mut ResultColumns<'_>) {
    match weights.kind {
        GgmlDType::Q4K => multiply_blocks::<Q4K>(simd, weights, x, to),
        _ => multiply_blocks::<Q6K>(simd, weights, x, to),
    }
}

fn multiply_blocks<T: Blocks>(simd: V4, weights: StoredRows<'_>, x: &[f32], to: &mut ResultColumns<'_>) {
    let blocks = weights.columns / BLOCK;
    let rows = x.len() / weights.columns;
    let mut inputs = vec![InputBlock::ZERO; rows * blocks];
    inputs.par_chunks_mut(blocks).zip(x.par_chunks(weights.columns)).with_min_len(4).for_each(|(inputs, x)| {
        simd.vectorize(Quantise { inputs, x });
    });
    let row_bytes = blocks * T::BYTES;
    let outputs = weights.bytes.len() / row_bytes;
    let whole = if rows >= TILED_ROWS { outputs / LANES * LANES } else { 0 };
    let (tiles, rest) = weights.bytes.split_at(whole * row_bytes);
    for (at, bytes) in tiles.chunks(COPIED_OUTPUTS * row_bytes).enumerate() {
        let mut buffer = vec![[0.0_f32; LANES]; bytes.len() / row_bytes / LANES * rows];
        buffer.par_chunks_mut(rows).zip(bytes.par_chunks(LANES * row_bytes)).for_each(|(out, bytes)| {
            simd.vectorize(TileProduct::<T> {
                simd,
                bytes,
                inputs: &inputs,
                blocks,
                out,
                kind: std::marker::PhantomData,
            });
        });
        let first = to.first + at * COPIED_OUTPUTS;
        to.y.par_chunks_mut(to.width).enumerate().with_min_len(16).for_each(|(row, y)| {
            let tiles = buffer.iter().skip(row).step_by(rows);
            y[first..].as_chunks_mut::<LANES>().0.iter_mut().zip(tiles).for_each(|(y, tile)| *y = *tile);
        });
    }
    if !rest.is_empty() {
        by_rows::<T>(simd, rest, &inputs, blocks, to, to.first + whole);
    }
}

/// Multiplies rows of stored weights, from column `first` of the result on.
fn by_rows<T: Blocks>(
    simd: V4,
    bytes: &[u8],
    inputs: &[InputBlock],
    blocks: usize,
    to: &mut ResultColumns<'_>,
    first: usize,
) {
    let row_bytes = blocks * T::BYTES;
    let (outputs, rows) = (bytes.len() / row_bytes, inputs.len() / blocks);
    let constants = T::constants();
    let run = |out: &mut [f32], bytes: &[u8]| {
        simd.vectorize(RowProduct::<T> { simd, bytes, inputs, blocks, constants: &constants, out });
    };
    if rows == 1 {
        let out = &mut to.y[first..first + outputs];
        let tasks = out.par_chunks_mut(TASK_OUTPUTS).zip(bytes.par_chunks(TASK_OUTPUTS * row_bytes));
        tasks.for_each(|(out, bytes)| run(out, bytes));
        return;
    }
    let mut turned = vec![0.0_f32; outputs * rows];
    let tasks = turned.par_chunks_mut(TASK_OUTPUTS * rows).zip(bytes.par_chunks(TASK_OUTPUTS * row_bytes));
    tasks.for_each(|(out, bytes)| run(out, bytes));
    to.put_turned(first, &turned, rows);
}

/// Rounds a row of input.
struct Quantise<'a> {
    inputs: &'a mut [InputBlock],
    x: &'a [f32],
}

impl NullaryFnOnce for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (input, x) in self.inputs.iter_mut().zip(self.x.chunks_exact(BLOCK)) {
            *input = InputBlock::new(x);
        }
    }
}

/// Computes `[outputs, rows]` from stored blocks.
struct RowProduct<'a, T: Blocks> {
    simd: V4,
    bytes: &'a [u8],
    inputs: &'a [InputBlock],
    blocks: usize,
    constants: &'a T::Constants,
    out: &'a mut [f32],
}

impl<T: Blocks> NullaryFnOnce for RowProduct<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.inputs.len() / self.blocks;
        let weights = self.bytes.chunks_exact(self.blocks * T::BYTES);
        for (out, weights) in self.out.chunks_exact_mut(rows).zip(weights) {
            for (out, inputs) in out.iter_mut().zip(self.inputs.chunks_exact(self.blocks)) {
                let mut sums = self.simd.avx512f._mm512_setzero_ps();
                for (block, input) in weights.chunks_exact(T::BYTES).zip(inputs) {
                    sums = T::multiply(self.simd, self.constants, block, input, sums);
                }
                *out = self.simd.reduce_sum_f32s(bytemuck::cast(sums));
            }
        }
    }
}

/// Computes `[rows][16 outputs]` from the blocks of 16 rows of weights.
struct TileProduct<'a, T: Blocks> {
    simd: V4,
    bytes: &'a [u8],
    inputs: &'a [InputBlock],
    blocks: usize,
    out: &'a mut [[f32; LANES]],
    kind: std::marker::PhantomData<T>,
}

impl<T: Blocks> NullaryFnOnce for TileProduct<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut tile = WeightTile::ZERO;
        for at in 0..self.blocks {
            for (lane, row) in self.bytes.chunks_exact(self.blocks * T::BYTES).enumerate() {
                T::unpack(&row[at * T::BYTES..][..T::BYTES], lane, &mut tile);
            }
            let (out, rest) = self.out.as_chunks_mut::<TILE_ROWS>();
            let count = out.len();
            for (nth, out) in out.iter_mut().enumerate() {
                let row = |row: usize| &self.inputs[(TILE_ROWS * nth + row) * self.blocks + at];
                multiply_tile::<T, TILE_ROWS>(self.simd, &tile, std::array::from_fn(row), out);
            }
            for (nth, out) in rest.iter_mut().enumerate() {
                let input = &self.inputs[(TILE_ROWS * count + nth) * self.blocks + at];
                multiply_tile::<T, 1>(self.simd, &tile, [input], std::array::from_mut(out));
            }
        }
    }
}

/// Adds the products of a tile with `N` blocks of input to `out`.
#[inline(always)]
fn multiply_tile<T: Blocks, const N: usize>(
    simd: V4,
    tile: &WeightTile,
    inputs: [&InputBlock; N],
    out: &mut [[f32; LANES]; N],
) {
    let (f, bw) = (simd.avx512f, simd.avx512bw);
    let mut totals = [f._mm512_setzero_si512(); N];
    for first in (0..GROUPS).step_by(T::ADDED) {
        let scale: __m512i = bytemuck::cast(tile.scales[first * 4 / T::SCALED]);
        let mut products = [f._mm512_setzero_si512(); N];
        for group in first..first + T::ADDED {
            let weights: __m512i = bytemuck::cast(tile.quants[group]);
            for (products, input) in products.iter_mut().zip(inputs) {
                let four = f._mm512_set1_epi32(input.quants[group]);
                *products = bw._mm512_add_epi16(*products, bw._mm512_maddubs_epi16(weights, four));
            }
        }
        for (total, products) in totals.iter_mut().zip(products) {
            *total = f._mm512_add_epi32(*total, bw._mm512_madd_epi16(products, scale));
        }
    }
    let pairs = BLOCK / T::SCALED / 2;
    for ((out, input), total) in out.iter_mut().zip(inputs).zip(totals) {
        let mut offset = f._mm512_setzero_si512();
        for (&sums, &factors) in T::sums(input).iter().zip(&tile.offsets).take(pairs) {
            let products = bw._mm512_madd_epi16(bytemuck::cast(factors), f._mm512_set1_epi32(sums));
            offset = f._mm512_add_epi32(offset, products);
        }
        let input_scale = f._mm512_set1_ps(input.scale);
        let scale = f._mm512_mul_ps(bytemuck::cast(tile.scale), input_scale);
        let offset_scale = f._mm512_mul_ps(bytemuck::cast(tile.offset_scale), input_scale);
        let sums = f._mm512_fmadd_ps(f._mm512_cvtepi32_ps(total), scale, bytemuck::cast(*out));
        let sums = f._mm512_fnmadd_ps(f._mm512_cvtepi32_ps(offset), offset_scale, sums);
        *out = bytemuck::cast(sums);
    }
}
