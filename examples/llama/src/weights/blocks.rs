//! Quantised weights in a mapped file: conversion to f32, and products with candle's kernels.
//!
//! A product quantises each row of the input to 8 bits per element, as the kernel of the weights' type needs it. Rows
//! of weights are then multiplied four at a time. The weights are read from the mapping and are not copied.

use anyhow::{Result, bail, ensure};
use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K, BlockQ8_0,
};
use candle_core::quantized::{GgmlDType, GgmlType};
use rayon::prelude::*;

use super::mapping::{WeightBlock, blocks};

/// Outputs that one task computes. It is a multiple of four, because the kernels take four rows.
const TASK_OUTPUTS: usize = 32;

/// Calls a function with the block type of an element type as its type argument.
macro_rules! with_block {
    ($kind:expr, $call:ident($($argument:expr),*)) => {
        match $kind {
            GgmlDType::Q4_0 => $call::<BlockQ4_0>($($argument),*),
            GgmlDType::Q5_0 => $call::<BlockQ5_0>($($argument),*),
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

/// Computes `out[o][r] = weights[o] . x[r]` for rows of `columns` elements. `weights` has `out.len() / r` rows.
///
/// # Errors
/// Fails if a length does not fit the others.
pub(super) fn multiply(kind: GgmlDType, weights: &[u8], columns: usize, x: &[f32], out: &mut [f32]) -> Result<()> {
    with_block!(kind, multiply_blocks(weights, columns, x, out))
}

fn multiply_blocks<T: WeightBlock>(weights: &[u8], columns: usize, x: &[f32], out: &mut [f32]) -> Result<()> {
    let (weights, rows) = (blocks::<T>(weights)?, x.len() / columns.max(1));
    let fits = columns.is_multiple_of(T::BLCK_SIZE) && T::BLCK_SIZE == T::VecDotType::BLCK_SIZE;
    let row_blocks = columns / T::BLCK_SIZE;
    let outputs = weights.len() / row_blocks.max(1);
    ensure!(
        fits && row_blocks > 0 && x.len() == rows * columns && out.len() == outputs * rows && rows > 0,
        "a product of {} inputs with {} blocks in rows of {columns} elements has no {} outputs",
        x.len(),
        weights.len(),
        out.len()
    );
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

    const KINDS: [GgmlDType; 8] = [
        GgmlDType::Q4_0,
        GgmlDType::Q5_0,
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
        let (outputs, columns) = (71, 512);
        for kind in KINDS {
            let floats = Tensor::from_vec(noise(outputs * columns, 1), (outputs, columns), &Device::Cpu).unwrap();
            let stored = QTensor::quantize(&floats, kind).unwrap();
            let bytes = stored.data().unwrap();
            let mut widened = vec![0.0; outputs * columns];
            widen(kind, &bytes, &mut widened).unwrap();
            for rows in [1, 3] {
                let x = noise(rows * columns, 2);
                let mut out = vec![0.0; outputs * rows];
                multiply(kind, &bytes, columns, &x, &mut out).unwrap();
                for (index, got) in out.iter().enumerate() {
                    let (output, row) = (index / rows, index % rows);
                    let pairs = widened[output * columns..][..columns].iter().zip(&x[row * columns..]);
                    let expected: f32 = pairs.map(|(a, b)| a * b).sum();
                    // The input is rounded to 8 bits per element, which adds up to about 0.04 here.
                    assert!((got - expected).abs() < 0.1, "{kind:?} {output} {row}: {got} {expected}");
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
            let (x, mut out) = (vec![0.0; inputs], vec![0.0; outputs]);
            assert!(multiply(GgmlDType::Q8_0, &bytes, columns, &x, &mut out).is_err(), "{columns}");
        }
    }
}
