//! Projections (candle's matrix product) and RMS norm.

use std::ops::Range;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::weights::Weights;

/// `y = x W^T + b`.
pub(crate) struct Linear {
    /// `[out, in]`.
    weight: Tensor,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
}

impl Linear {
    /// Projections of the same input, computed as one; `parts` are names without `.weight` and their outputs.
    pub(crate) fn load(weights: &mut Weights, parts: &[(String, usize)], inputs: usize, bias: bool) -> Result<Self> {
        let mut tensors = Vec::with_capacity(parts.len());
        let mut biases = Vec::new();
        for (name, outputs) in parts {
            tensors.push(weights.take(&format!("{name}.weight"), &[*outputs, inputs])?);
            if bias {
                biases.extend(weights.take(&format!("{name}.bias"), &[*outputs])?.to_vec1::<f32>()?);
            }
        }
        let weight = if tensors.len() == 1 { tensors.swap_remove(0) } else { Tensor::cat(&tensors, 0)? };
        Ok(Self { outputs: weight.dim(0)?, weight, bias: bias.then_some(biases), inputs })
    }

    /// A projection by a matrix that is already there (a tied head).
    pub(crate) fn from_weight(weight: Tensor) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        Ok(Self { weight, bias: None, inputs, outputs })
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// `x` is `[rows, in]`; the result `[rows, out]`.
    pub(crate) fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.forward_part(x, 0..self.outputs)
    }

    /// Some of the outputs only: `[rows, part.len()]`.
    pub(crate) fn forward_part(&self, x: &[f32], part: Range<usize>) -> Result<Vec<f32>> {
        ensure!(x.len().is_multiple_of(self.inputs), "{} elements are no rows of {}", x.len(), self.inputs);
        let rows = x.len() / self.inputs;
        let x = Tensor::from_slice(x, (rows, self.inputs), &Device::Cpu)?;
        let weight = self.weight.narrow(0, part.start, part.len())?;
        let mut y = x.matmul(&weight.t()?)?.flatten_all()?.to_vec1::<f32>()?;
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(part.len()) {
                row.iter_mut().zip(&bias[part.clone()]).for_each(|(y, b)| *y += b);
            }
        }
        Ok(y)
    }
}

/// RMS norm with a learnt factor per element (Zhang and Sennrich 2019).
pub(crate) struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    pub(crate) fn load(weights: &mut Weights, name: &str, width: usize, eps: f32) -> Result<Self> {
        Ok(Self { weight: weights.take(&format!("{name}.weight"), &[width])?.to_vec1()?, eps })
    }

    /// Normalises one row in place.
    pub(crate) fn row(&self, row: &mut [f32]) {
        // Eight partial sums: the order is fixed, and the compiler may keep them in one vector.
        let mut sums = [0.0f32; 8];
        let chunks = row.chunks_exact(8);
        let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
        for chunk in chunks {
            for (s, x) in sums.iter_mut().zip(chunk) {
                *s += x * x;
            }
        }
        let mean = (sums.iter().sum::<f32>() + rest) / row.len() as f32;
        let factor = 1.0 / (mean + self.eps).sqrt();
        for (x, w) in row.iter_mut().zip(&self.weight) {
            *x = *x * factor * w;
        }
    }

    /// Normalised copy of all rows.
    pub(crate) fn rows(&self, x: &[f32]) -> Vec<f32> {
        let mut y = x.to_vec();
        y.par_chunks_exact_mut(self.weight.len()).with_min_len(64).for_each(|row| self.row(row));
        y
    }
}
