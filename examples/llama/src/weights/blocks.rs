//! Quantised weights in a mapped file: conversion to f32, and products with candle's kernels.
//!
//! A product quantises each row of the input to 8 bits per element, as the kernel of the weights' type needs it. Rows
//! of weights are then multiplied four at a time. The weights are read from the mapping and are not copied.

use anyhow::{Result, bail, ensure};
use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
};
use candle_core::quantized::{GgmlDType, GgmlType};
use rayon::prelude::*;

use super::mapping::{WeightBlock, blocks};
use super::product::{ResultColumns, StoredRows};
#[cfg(target_arch = "x86_64")]
use super::{offset_products, vector_products};

/// Outputs that one task computes. It is a multiple of four, because the kernels take four rows.
const TASK_OUTPUTS: usize = 32;

/// Calls a function with the block type of an element type as its type argument.
macro_rules! with_block {
    ($kind:expr, $call:ident($($argument:expr),*)) => {
        match $kind {
            GgmlDType::Q4_0 => $call::<BlockQ4_0>($($argument),*),
            GgmlDType::Q4_1 => $call::<BlockQ4_1>($($argument),*),
            GgmlDType::Q5_0 => $call::<BlockQ5_0>($($argument),*),
            GgmlDType::Q5_1 => $call::<BlockQ5_1>($($argument),*),
            GgmlDType::Q8_0 => $call::<BlockQ8_0>($($argument),*),
            GgmlDType::Q2K => $call::<BlockQ2K>($($argument),*),
            GgmlDType::Q3K => $call::<BlockQ3K>($($argument),*),
            GgmlDType::Q4K => $call::<BlockQ4K>($($argument),*),
            GgmlDType::Q5K => $call::<BlockQ5K>($($argument),*),
            GgmlDType::Q6K => $call::<BlockQ6K>($($argument),*),
            other => bail!("weights of type {other:?} have no product"),
        }
    };
}

/// Converts whole blocks to f32. `out` has one element per weight.
///
/// # Errors
/// Fails if the bytes are not aligned blocks of this type, or if `out` has another length.
pub(super) fn widen(kind: GgmlDType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    with_block!(kind, widen_blocks(bytes, out))
}

fn widen_blocks<T: WeightBlock>(bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let blocks = blocks::<T>(bytes)?;
    ensure!(blocks.len() * T::BLCK_SIZE == out.len(), "{} elements do not fill {} blocks", out.len(), blocks.len());
    T::to_float(blocks, out);
    Ok(())
}

/// Returns whether this processor multiplies the type without a conversion, for any number of rows of input.
pub(super) fn is_fast(kind: GgmlDType) -> bool {
    #[cfg(target_arch = "x86_64")]
    let fast = vector_products::instructions(kind).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    let fast = false;
    fast
}

/// Computes `y[r][first + o] = weights[o] . x[r]`.
///
/// # Errors
/// Fails if a length does not fit the others.
pub(super) fn multiply(weights: StoredRows<'_>, x: &[f32], to: &mut ResultColumns<'_>) -> Result<()> {
    let (kind, columns) = (weights.kind, weights.columns);
    let (rows, row_blocks) = (x.len() / columns.max(1), columns / kind.block_size());
    let outputs = weights.bytes.len() / kind.type_size() / row_blocks.max(1);
    ensure!(
        columns.is_multiple_of(kind.block_size())
            && row_blocks > 0
            && rows > 0
            && x.len() == rows * columns
            && weights.bytes.len() == outputs * row_blocks * kind.type_size()
            && to.y.len() == rows * to.width
            && to.first + outputs <= to.width,
        "a product of {} inputs with {} bytes of {kind:?} in rows of {columns} elements has no {} outputs",
        x.len(),
        weights.bytes.len(),
        to.y.len()
    );
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = vector_products::instructions(kind) {
        vector_products::multiply(simd, weights, x, to);
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = offset_products::instructions(kind) {
        offset_products::multiply(simd, weights, x, to);
        return Ok(());
    }
    let mut turned = vec![0.0f32; outputs * rows];
    with_block!(kind, multiply_blocks(weights, x, &mut turned))?;
    to.put_turned(to.first, &turned, rows);
    Ok(())
}

/// Computes `out[o][r] = weights[o] . x[r]`.
fn multiply_blocks<T: WeightBlock>(weights: StoredRows<'_>, x: &[f32], out: &mut [f32]) -> Result<()> {
    let columns = weights.columns;
    let (weights, rows, row_blocks) = (blocks::<T>(weights.bytes)?, x.len() / columns, columns / T::BLCK_SIZE);
    ensure!(T::BLCK_SIZE == T::VecDotType::BLCK_SIZE, "blocks of {:?} have no product", T::DTYPE);
    let mut inputs = vec![T::VecDotType::zeros(); rows * row_blocks];
    for (x, input) in x.chunks_exact(columns).zip(inputs.chunks_exact_mut(row_blocks)) {
        T::VecDotType::from_float(x, input);
    }
    let task = |(out, weights): (&mut [f32], &[T])| {
        for (out, weights) in out.chunks_mut(4 * rows).zip(weights.chunks(4 * row_blocks)) {
            for (row, input) in inputs.chunks_exact(row_blocks).enumerate() {
                multiply_four(columns, weights, input, &mut out[row..], rows);
            }
        }
    };
    out.par_chunks_mut(TASK_OUTPUTS * rows).zip(weights.par_chunks(TASK_OUTPUTS * row_blocks)).for_each(task);
    Ok(())
}

/// Multiplies up to four rows of weights with one input. The results are `stride` elements apart.
fn multiply_four<T: WeightBlock>(
    columns: usize,
    weights: &[T],
    input: &[T::VecDotType],
    out: &mut [f32],
    stride: usize,
) {
    let row_blocks = input.len();
    if weights.len() == 4 * row_blocks {
        let (low, high) = weights.split_at(2 * row_blocks);
        let ((a, b), (c, d)) = (low.split_at(row_blocks), high.split_at(row_blocks));
        let (a, b, c, d) = T::vec_dot_4(columns, a, b, c, d, input);
        for (at, dot) in [a, b, c, d].into_iter().enumerate() {
            out[at * stride] = dot;
        }
        return;
    }
    for (at, row) in weights.chunks_exact(row_blocks).enumerate() {
        out[at * stride] = T::vec_dot(columns, row, input);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::QTensor;
    use candle_core::{Device, Tensor};

    const KINDS: [GgmlDType; 10] = [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];

    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..count).map(|_| random.f32() - 0.5).collect()
    }

    #[test]
    fn products_of_every_type_are_those_of_the_widened_weights() {
        let columns = 512;
        for (kind, outputs) in KINDS.into_iter().flat_map(|kind| [(kind, 71), (kind, 64)]) {
            let floats = Tensor::from_vec(noise(outputs * columns, 1), (outputs, columns), &Device::Cpu).unwrap();
            let stored = QTensor::quantize(&floats, kind).unwrap();
            let bytes = stored.data().unwrap();
            let mut widened = vec![0.0; outputs * columns];
            widen(kind, &bytes, &mut widened).unwrap();
            // With AVX-512, eight rows and more are multiplied by tiles of 16 outputs.
            for rows in [1, 3, 8, 21] {
                let x = noise(rows * columns, 2);
                let (width, first) = (outputs + 5, 2);
                let mut y = vec![7.0; width * rows];
                let weights = StoredRows { kind, bytes: &bytes, columns };
                multiply(weights, &x, &mut ResultColumns { y: &mut y, width, first }).unwrap();
                for (index, got) in y.iter().enumerate() {
                    let (output, row) = (index % width, index / width);
                    if output < first || output >= first + outputs {
                        assert_eq!(*got, 7.0, "a column beside the product");
                        continue;
                    }
                    let weights = &widened[(output - first) * columns..][..columns];
                    let expected: f32 = weights.iter().zip(&x[row * columns..]).map(|(a, b)| a * b).sum();
                    // The input is rounded to 8 bits per element, which adds up to about 0.04 here.
                    assert!((got - expected).abs() < 0.1, "{kind:?} {output} {row}: {got} {expected}");
                }
            }
        }
    }

    /// Sums of integers must not overflow, whatever the bytes of a block are.
    #[test]
    fn products_of_any_bytes_are_exact_but_for_one_rounding() {
        let columns = 512;
        for (kind, scales) in [(GgmlDType::Q4K, vec![0, 2]), (GgmlDType::Q6K, vec![208])] {
            let mut random = fastrand::Rng::with_seed(3);
            let size = kind.type_size();
            for byte in [Some(0x00), Some(0x7f), Some(0x80), Some(0xff), None] {
                let mut bytes: Vec<u8> = (0..34 * size).map(|_| byte.unwrap_or_else(|| random.u8(..))).collect();
                for block in bytes.chunks_exact_mut(size) {
                    for &at in &scales {
                        block[at..at + 2].copy_from_slice(&half::f16::from_f32(0.25).to_le_bytes());
                    }
                }
                let mut widened = vec![0.0; 17 * columns];
                widen(kind, &bytes, &mut widened).unwrap();
                for rows in [1, 9] {
                    // Whole numbers up to 127 are not rounded. The second row has the largest sums.
                    let mut x: Vec<f32> = (0..rows * columns).map(|_| random.i8(-127..=127).into()).collect();
                    x.iter_mut().step_by(256).for_each(|x| *x = 127.0);
                    x.iter_mut().skip(columns).take(columns).for_each(|x| *x = 127.0);
                    let mut y = vec![0.0; 17 * rows];
                    let weights = StoredRows { kind, bytes: &bytes, columns };
                    multiply(weights, &x, &mut ResultColumns { y: &mut y, width: 17, first: 0 }).unwrap();
                    for (index, got) in y.iter().enumerate() {
                        let pairs = widened[index % 17 * columns..].iter().zip(&x[index / 17 * columns..][..columns]);
                        let (mut expected, mut size) = (0.0, 0.0);
                        for (a, b) in pairs {
                            expected += f64::from(*a) * f64::from(*b);
                            size += (f64::from(*a) * f64::from(*b)).abs();
                        }
                        let off = (f64::from(*got) - expected).abs();
                        assert!(off <= 1e-5 * size.max(1.0), "{kind:?} {byte:?} {index}: {got} {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        let bytes = vec![0; 34 * 4];
        assert!(widen(GgmlDType::Q8_0, &bytes, &mut [0.0; 127]).is_err());
        assert!(widen(GgmlDType::Q8_0, &bytes[..35], &mut [0.0; 32]).is_err());
        assert!(widen(GgmlDType::F32, &bytes, &mut [0.0; 34]).is_err());
        for (columns, inputs, outputs) in [(0, 0, 0), (32, 32, 3), (64, 32, 2), (31, 31, 4), (128, 0, 0)] {
            let (x, mut y) = (vec![0.0; inputs], vec![0.0; outputs]);
            let weights = StoredRows { kind: GgmlDType::Q8_0, bytes: &bytes, columns };
            let mut to = ResultColumns { y: &mut y, width: outputs, first: 0 };
            assert!(multiply(weights, &x, &mut to).is_err(), "{columns}");
        }
    }
}
