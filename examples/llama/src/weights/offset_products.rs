//! Products of Q4_1, Q5_0 and Q5_1 weights on processors with AVX2. candle has portable loops for these types.
//!
//! A block has 32 weights `scale * quant + offset`, whose quants have 4 or 5 bits without a sign. The input is rounded
//! to 8 bits per element, in blocks of 32. A product of two elements is at most `31 * 127`, so that sums of two fit
//! into 16 bits.

use std::arch::x86_64::__m256i;
use std::marker::PhantomData;

use candle_core::quantized::GgmlDType;
use pulp::x86::V3;
use pulp::{NullaryFnOnce, Simd};
use rayon::prelude::*;

use super::product::{ResultColumns, StoredRows};

/// Elements of a block.
const BLOCK: usize = 32;
/// Blocks whose scales are converted together.
const CONVERTED: usize = 4;
/// Outputs that one task computes.
const TASK_OUTPUTS: usize = 32;

/// 32 elements of the input: `x[i]` is about `scale * quants[i]`.
#[derive(Clone)]
struct RoundedBlock {
    quants: [i8; BLOCK],
    scale: f32,
    /// The sum of the rounded elements.
    sum: f32,
}

impl RoundedBlock {
    const ZERO: Self = Self { quants: [0; BLOCK], scale: 0.0, sum: 0.0 };

    #[inline(always)]
    fn new(x: &[f32]) -> Self {
        let largest = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        let (inverse, scale) = (if largest > 0.0 { 127.0 / largest } else { 0.0 }, largest / 127.0);
        let mut block = Self { scale, ..Self::ZERO };
        block.quants.iter_mut().zip(x).for_each(|(quant, x)| *quant = (x * inverse).round_ties_even() as i32 as i8);
        let sum: i32 = block.quants.iter().map(|&quant| i32::from(quant)).sum();
        block.sum = scale * sum as f32;
        block
    }
}

/// A type of quantised blocks: f16 numbers, then fifth bits if there are any, then nibbles.
trait OffsetBlocks: Send + Sync {
    /// True if the offset is stored after the scale. Otherwise elements are 5 bits minus 16.
    const STORED_OFFSET: bool;
    const FIVE_BITS: bool;
    /// The first byte of the quants.
    const NUMBERS: usize = if Self::STORED_OFFSET { 4 } else { 2 };
    /// Bytes of a block.
    const BYTES: usize = Self::NUMBERS + if Self::FIVE_BITS { 20 } else { 16 };

    /// Returns the bits of the scale, and of the offset if it is stored.
    #[inline(always)]
    fn numbers(block: &[u8]) -> [u16; 2] {
        let at = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        [at(0), if Self::STORED_OFFSET { at(2) } else { 0 }]
    }

    #[inline(always)]
    fn offset(scale: f32, stored: f32) -> f32 {
        if Self::STORED_OFFSET { stored } else { -16.0 * scale }
    }

    #[inline(always)]
    fn quants(block: &[u8]) -> [u8; BLOCK] {
        let bytes = &block[Self::NUMBERS..Self::BYTES];
        if Self::FIVE_BITS { five_bits(bytes) } else { nibbles(bytes) }
    }
}

struct Q41;
struct Q50;
struct Q51;

impl OffsetBlocks for Q41 {
    const STORED_OFFSET: bool = true;
    const FIVE_BITS: bool = false;
}

impl OffsetBlocks for Q50 {
    const STORED_OFFSET: bool = false;
    const FIVE_BITS: bool = true;
}

impl OffsetBlocks for Q51 {
    const STORED_OFFSET: bool = true;
    const FIVE_BITS: bool = true;
}

/// Splits 16 bytes. The low nibbles are the first 16 elements.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [u8; BLOCK] {
    let mut quants = [0; BLOCK];
    let (low, high) = quants.split_at_mut(16);
    low.iter_mut().zip(bytes).for_each(|(quant, byte)| *quant = byte & 15);
    high.iter_mut().zip(bytes).for_each(|(quant, byte)| *quant = byte >> 4);
    quants
}

/// Splits 4 bytes of fifth bits, and 16 bytes of nibbles.
#[inline(always)]
fn five_bits(bytes: &[u8]) -> [u8; BLOCK] {
    let mut quants = nibbles(&bytes[4..20]);
    for (eight, bits) in quants.as_chunks_mut::<8>().0.iter_mut().zip(&bytes[..4]) {
        eight.iter_mut().enumerate().for_each(|(at, quant)| *quant |= (bits >> at & 1) << 4);
    }
    quants
}

/// Returns f16 numbers, given as bits, in f32. A call for each vector would cost as much as the products of a block,
/// and `pulp` does not offer the instruction.
#[inline(always)]
fn widen<const N: usize>(halves: &[u16; N]) -> [f32; N] {
    // The exponent of f32 has a bias that is larger by 112, also for numbers below the smallest normal one.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    /// The exponent of numbers that are not finite.
    const NOT_FINITE: [u32; 2] = [0x7c00, 0x7f80_0000];
    let mut floats = [0.0; N];
    for i in 0..N {
        let bits = u32::from(halves[i]);
        let magnitude = (bits & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * REBIAS).to_bits();
        let is_finite = bits & NOT_FINITE[0] != NOT_FINITE[0];
        let magnitude = if is_finite { finite } else { magnitude | NOT_FINITE[1] };
        floats[i] = f32::from_bits(magnitude | (bits & 0x8000) << 16);
    }
    floats
}

/// Returns the instructions, if products of the type are computed with them.
pub(super) fn instructions(kind: GgmlDType) -> Option<V3> {
    if matches!(kind, GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1) { V3::try_new() } else { None }
}

/// Multiplies each row of `x` with each row of weights.
///
/// The caller has checked that `columns` are whole blocks, and that `bytes`, `x` and `y` have whole rows.
pub(super) fn multiply(simd: V3, weights: StoredRows<'_>, x: &[f32], to: &mut ResultColumns<'_>) {
    match weights.kind {
        GgmlDType::Q4_1 => multiply_blocks::<Q41>(simd, weights, x, to),
        GgmlDType::Q5_0 => multiply_blocks::<Q50>(simd, weights, x, to),
        _ => multiply_blocks::<Q51>(simd, weights, x, to),
    }
}

fn multiply_blocks<T: OffsetBlocks>(simd: V3, weights: StoredRows<'_>, x: &[f32], to: &mut ResultColumns<'_>) {
    let blocks = weights.columns / BLOCK;
    let (row_bytes, rows) = (blocks * T::BYTES, x.len() / weights.columns);
    let outputs = weights.bytes.len() / row_bytes;
    let mut inputs = vec![RoundedBlock::ZERO; rows * blocks];
    simd.vectorize(Rounding { inputs: &mut inputs, x });
    let mut turned = vec![0.0_f32; outputs * rows];
    let tasks = turned.par_chunks_mut(TASK_OUTPUTS * rows).zip(weights.bytes.par_chunks(TASK_OUTPUTS * row_bytes));
    tasks.for_each(|(out, bytes)| {
        simd.vectorize(OffsetProduct::<T> { simd, bytes, inputs: &inputs, blocks, out, kind: PhantomData });
    });
    to.put_turned(to.first, &turned, rows);
}

/// Rounds rows of input.
struct Rounding<'a> {
    inputs: &'a mut [RoundedBlock],
    x: &'a [f32],
}

impl NullaryFnOnce for Rounding<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (input, x) in self.inputs.iter_mut().zip(self.x.chunks_exact(BLOCK)) {
            *input = RoundedBlock::new(x);
        }
    }
}

/// Computes `[outputs, rows]` from stored blocks.
struct OffsetProduct<'a, T> {
    simd: V3,
    bytes: &'a [u8],
    inputs: &'a [RoundedBlock],
    blocks: usize,
    out: &'a mut [f32],
    kind: PhantomData<T>,
}

impl<T: OffsetBlocks> NullaryFnOnce for OffsetProduct<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.inputs.len() / self.blocks;
        let weights = self.bytes.chunks_exact(self.blocks * T::BYTES);
        for (out, weights) in self.out.chunks_exact_mut(rows).zip(weights) {
            for (out, inputs) in out.iter_mut().zip(self.inputs.chunks_exact(self.blocks)) {
                *out = row_product::<T>(self.simd, weights, inputs);
            }
        }
    }
}

#[inline(always)]
fn row_product<T: OffsetBlocks>(simd: V3, weights: &[u8], inputs: &[RoundedBlock]) -> f32 {
    let (avx, avx2, fma) = (simd.avx, simd.avx2, simd.fma);
    let ones: __m256i = bytemuck::cast([1_i16; 16]);
    let mut sums = avx._mm256_setzero_ps();
    let mut offsets = 0.0_f32;
    for (weights, inputs) in weights.chunks(CONVERTED * T::BYTES).zip(inputs.chunks(CONVERTED)) {
        let mut halves = [0; 2 * CONVERTED];
        for (pair, block) in halves.as_chunks_mut::<2>().0.iter_mut().zip(weights.chunks_exact(T::BYTES)) {
            *pair = T::numbers(block);
        }
        let floats = widen(&halves);
        let blocks = weights.chunks_exact(T::BYTES).zip(floats.as_chunks::<2>().0);
        for ((block, &[scale, stored]), input) in blocks.zip(inputs) {
            let quants: __m256i = bytemuck::cast(T::quants(block));
            let pairs = avx2._mm256_maddubs_epi16(quants, bytemuck::cast(input.quants));
            let fours = avx._mm256_cvtepi32_ps(avx2._mm256_madd_epi16(pairs, ones));
            sums = fma._mm256_fmadd_ps(fours, avx._mm256_set1_ps(scale * input.scale), sums);
            offsets += T::offset(scale, stored) * input.sum;
        }
    }
    simd.reduce_sum_f32s(bytemuck::cast(sums)) + offsets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_widened_to_its_own_bits() {
        for bits in 0..=u16::MAX {
            let [own, zero] = widen(&[bits, 0]);
            let expected = half::f16::from_bits(bits).to_f32();
            assert!(own.to_bits() == expected.to_bits() || own.is_nan() && expected.is_nan(), "{bits:#x} {own}");
            assert_eq!(zero.to_bits(), 0);
        }
    }
}
