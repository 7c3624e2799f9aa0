//! Projections and RMS norm.
//!
//! A projection is candle's matrix product. Quantised weights are multiplied as they are with few rows, and with any
//! number of rows if the processor has a kernel for them ([`WeightMatrix::multiply`]). Other mapped weights, and other
//! quantised ones with many rows, are multiplied in tiles of outputs:
//!
//! 1. The rows of a tile are converted to f32, 4 MiB at a time.
//! 2. The tile's product is computed in f32 and copied to its columns of the result.
//!
//! The result equals one product over the whole matrix to the bit:
//!
//! - An output is a sum over the inputs of its own row. A tile has whole rows.
//! - The order of that sum depends on the number of inputs and on the kernel that the `gemm` crate chooses.
//! - The choice depends on the number of results only up to `SMALL_PRODUCT`, and every tile is larger.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::weights::{WeightMatrix, Weights};

/// Products with at most this many results use another kernel of the `gemm` crate, which adds in another order.
/// Every tile has more outputs than this, so that it uses the kernel that the whole matrix would.
const SMALL_PRODUCT: usize = 16 * 16;
/// Elements of a tile: 4 MiB as f32.
const TILE_ELEMENTS: usize = 1 << 20;
/// Rows from which on quantised weights without a kernel for many rows are converted. The product in f32 then costs
/// less than products in blocks.
const CONVERTED_ROWS: usize = 16;

/// `y = x W^T + b`.
pub(crate) struct Linear {
    /// `[out, in]`.
    weight: Arc<WeightMatrix>,
    bias: Option<Vec<f32>>,
    /// Outputs of a tile.
    tile: usize,
}

impl Linear {
    /// Loads projections of the same input, to be computed as one; `parts` are names without `.weight` and outputs.
    pub(crate) fn load(weights: &mut Weights, parts: &[(String, usize)], inputs: usize, bias: bool) -> Result<Self> {
        let mut biases = Vec::new();
        for (name, outputs) in parts.iter().filter(|_| bias) {
            biases.extend(weights.vector(&format!("{name}.bias"), *outputs)?);
        }
        let parts: Vec<_> = parts.iter().map(|(name, outputs)| (format!("{name}.weight"), *outputs)).collect();
        let linear = Self::from_weight(Arc::new(weights.matrix(&parts, inputs)?));
        Ok(Self { bias: bias.then_some(biases), ..linear })
    }

    /// Projects by a matrix that something else uses too (a tied head).
    pub(crate) fn from_weight(weight: Arc<WeightMatrix>) -> Self {
        let tile = (TILE_ELEMENTS / weight.columns()).max(SMALL_PRODUCT + 1);
        Self { weight, bias: None, tile }
    }

    pub(crate) fn outputs(&self) -> usize {
        self.weight.rows()
    }

    /// Projects `x`, `[rows, in]`, to `[rows, out]`.
    pub(crate) fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.forward_part(x, 0..self.outputs())
    }

    /// Computes only the outputs `part`: `[rows, part.len()]`.
    pub(crate) fn forward_part(&self, x: &[f32], part: Range<usize>) -> Result<Vec<f32>> {
        let inputs = self.weight.columns();
        ensure!(x.len().is_multiple_of(inputs), "{} elements are not rows of {inputs}", x.len());
        let rows = x.len() / inputs;
        let multiplied = self.weight.is_multiplied() || self.weight.is_quantised() && rows < CONVERTED_ROWS;
        let mut y = if multiplied { self.weight.multiply(x, part.clone())? } else { self.tiled(x, rows, &part)? };
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(part.len()) {
                row.iter_mut().zip(&bias[part.clone()]).for_each(|(y, b)| *y += b);
            }
        }
        Ok(y)
    }

    /// Multiplies in f32, in tiles of outputs.
    fn tiled(&self, x: &[f32], rows: usize, part: &Range<usize>) -> Result<Vec<f32>> {
        let x = Tensor::from_slice(x, (rows, self.weight.columns()), &Device::Cpu)?;
        let tiles = self.tiles(part.clone());
        if let [tile] = &tiles[..] {
            return self.product(&x, tile);
        }
        if rows == 1 {
            // One row is a product of vectors, which candle computes on one thread.
            return Ok(tiles.par_iter().map(|tile| self.product(&x, tile)).collect::<Result<Vec<_>>>()?.concat());
        }
        let mut y = vec![0.0f32; rows * part.len()];
        for tile in tiles {
            let product = self.product(&x, &tile)?;
            let columns = tile.start - part.start..tile.end - part.start;
            for (y, product) in y.chunks_exact_mut(part.len()).zip(product.chunks_exact(tile.len())) {
                y[columns.clone()].copy_from_slice(product);
            }
        }
        Ok(y)
    }

    /// Cuts outputs into tiles; weights that need no conversion are one tile.
    fn tiles(&self, part: Range<usize>) -> Vec<Range<usize>> {
        let count = if self.weight.is_mapped() { (part.len() / self.tile).max(1) } else { 1 };
        let start = |tile: usize| part.start + tile * self.tile;
        // The last tile takes the outputs that do not fill one.
        (0..count).map(|tile| start(tile)..if tile + 1 == count { part.end } else { start(tile + 1) }).collect()
    }

    fn product(&self, x: &Tensor, outputs: &Range<usize>) -> Result<Vec<f32>> {
        let weight = self.weight.block(outputs.clone())?;
        Ok(x.matmul(&weight.t()?)?.flatten_all()?.to_vec1::<f32>()?)
    }
}

/// RMS norm with a learnt factor per element (Zhang and Sennrich 2019).
pub(crate) struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    pub(crate) fn load(weights: &mut Weights, name: &str, width: usize, eps: f32) -> Result<Self> {
        Ok(Self { weight: weights.vector(&format!("{name}.weight"), width)?, eps })
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

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    /// Values between -1 and 1 that bf16 and f16 hold exactly: seven bits of mantissa.
    fn values(count: usize, seed: u64) -> Vec<f32> {
        let mix = |i: u64| (seed << 40 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        (0..count as u64).map(|i| (mix(i) as f32 - 128.0) / 128.0).collect()
    }

    /// A projection whose two parts are stored in `dtype`, in a file of their own.
    fn linear(parts: [usize; 2], inputs: usize, dtype: Dtype) -> Linear {
        let encode = |part: usize| -> Vec<u8> {
            let values = values(parts[part] * inputs, part as u64 + 1);
            match dtype {
                Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            }
        };
        let data = [encode(0), encode(1)];
        let views = ["a", "b"].into_iter().zip(&data).zip(parts).map(|((name, data), outputs)| {
            (format!("{name}.weight"), TensorView::new(dtype, vec![outputs, inputs], data).unwrap())
        });
        let dir = tempfile::tempdir().unwrap();
        safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
        let mut weights = Weights::load(dir.path()).unwrap();
        let parts = [("a".to_owned(), parts[0]), ("b".to_owned(), parts[1])];
        Linear::load(&mut weights, &parts, inputs, false).unwrap()
    }

    #[test]
    fn tiles_of_mapped_weights_give_the_bits_of_one_product_in_f32() {
        // The gemm crate splits sums over more than 512 inputs. Some lengths here fill no vector.
        for (parts, inputs) in [([300, 301], 96), ([900, 263], 601), ([257, 257], 1300), ([40, 24], 600), ([1, 0], 33)]
        {
            let whole = linear(parts, inputs, Dtype::F32);
            assert!(!whole.weight.is_mapped());
            for dtype in [Dtype::F16, Dtype::BF16] {
                let mut tiled = linear(parts, inputs, dtype);
                assert!(tiled.weight.is_mapped());
                tiled.tile = SMALL_PRODUCT + 1;
                for rows in [1, 2, 7, 70, 300] {
                    // Thirds fill the mantissa, so that another order of additions would round differently.
                    let x: Vec<f32> = values(rows * inputs, 9).into_iter().map(|x| x / 3.0).collect();
                    for part in [0..tiled.outputs(), 0..parts[0], parts[0] / 2..tiled.outputs()] {
                        let (expected, got) = (whole.forward_part(&x, part.clone()), tiled.forward_part(&x, part));
                        let bits = |y: Result<Vec<f32>>| y.unwrap().iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(expected), bits(got), "{parts:?} of {inputs} as {dtype:?}, {rows} rows");
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_cover_the_outputs_and_none_is_small() {
        let mut linear = linear([700, 600], 3, Dtype::BF16);
        linear.tile = 257;
        for part in [0..1300, 5..262, 5..518, 5..519, 0..1, 700..1300] {
            let tiles = linear.tiles(part.clone());
            assert_eq!((tiles[0].start, tiles[tiles.len() - 1].end), (part.start, part.end));
            assert!(tiles.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(tiles.len() == 1 || tiles.iter().all(|tile| tile.len() > SMALL_PRODUCT), "{tiles:?}");
        }
    }
}
