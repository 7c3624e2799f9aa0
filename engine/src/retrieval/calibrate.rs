//! Calibration: it fits adapters and codebooks to the keys and queries of a model.
//!
//! 1. [`Calibrator::keys`] and [`Calibrator::queries`] add up second moments per layer, in one pass, and keep a random
//!    sample of the keys.
//! 2. [`Calibrator::low_rank`] and [`Calibrator::per_head`] take the strongest eigenvectors of the keys' moments.
//! 3. [`Calibrator::codes`] fits a codebook in five steps:
//!    1. Weight the keys' covariance by the square root of the queries' moments, so that errors count as they change
//!       `q . k`, and take its eigenvectors as the transform.
//!    2. Give bits one by one to the dimension where a bit saves most error.
//!    3. Pack the dimensions into bytes.
//!    4. Fit the quantiser levels of each dimension to the sample.
//!    5. Measure the mean squared error over the sample.
//!
//! Invariant: equal inputs give equal adapters, because the sample's random numbers have a fixed seed.
//!
//! Sources: KVSwap for the low-rank adapter, Max (1960) and Lloyd (1982) for the quantiser.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::{Adapter, LayerAdapter, LowRankAdapter};
use crate::retrieval::transform_coded::codebook::{Codebook, transform};
use nalgebra::{DMatrix, DVector, SymmetricEigen};

/// The most keys of a layer in the sample.
const SAMPLE: usize = 8192;
/// Mean squared error of the Lloyd-Max quantiser of a unit Gaussian, by bits (Max 1960). Beyond 5 bits it is estimated
/// by 2.73 / 4^b.
const DISTORTION: [f64; 9] = [1.0, 0.3634, 0.1175, 0.03454, 0.009_497, 0.002_499, 6.67e-4, 1.67e-4, 4.2e-5];

/// Options of fitting transform-coded keys.
#[derive(Clone, Copy, Debug)]
pub struct CodeOptions {
    /// Bits per token and layer, a multiple of 8 from 8 to 2048.
    pub bits: usize,
    /// The most bits of a dimension, 1 to 8.
    pub dimension_bits_max: u32,
    /// True if only the queries of decode steps weight the keys. Otherwise queries of prompts weight them as well.
    pub decode_only: bool,
}

/// The moments of keys and queries of every layer.
pub struct Calibrator {
    layers: Vec<Moments>,
}

struct Moments {
    heads: usize,
    dim: usize,
    tokens: u64,
    sum: Vec<f64>,
    /// `[width, width]`, uncentred.
    second: Vec<f64>,
    /// The moments of queries, of prompts and of decode steps, each `[kv_heads, key_dim, key_dim]`.
    queries: [Vec<f64>; 2],
    sample: Vec<f32>,
    random: u64,
}

impl Calibrator {
    /// Returns a calibrator for layers of `(kv_heads, key_dim)`.
    #[must_use]
    pub fn new(layers: &[(usize, usize)]) -> Self {
        let layers = layers.iter().map(|&(heads, dim)| Moments {
            heads,
            dim,
            tokens: 0,
            sum: vec![0.0; heads * dim],
            second: vec![0.0; (heads * dim).pow(2)],
            queries: [vec![0.0; heads * dim * dim], vec![0.0; heads * dim * dim]],
            sample: Vec::new(),
            random: 0x2545_f491_4f6c_dd1d,
        });
        Self { layers: layers.collect() }
    }

    /// Adds keys `[tokens, kv_heads, key_dim]` of a layer as they will be stored, after RoPE. Ignores the rest after
    /// the last whole token.
    pub fn keys(&mut self, layer: usize, keys: &[f32]) {
        let Some(moments) = self.layers.get_mut(layer) else { return };
        let width = moments.width();
        if width == 0 {
            return;
        }
        for key in keys.chunks_exact(width) {
            moments.tokens += 1;
            moments.sum.iter_mut().zip(key).for_each(|(sum, k)| *sum += f64::from(*k));
            outer(&mut moments.second, key);
            // Reservoir sampling: every key has the same chance to be in the sample.
            moments.random ^= moments.random << 13;
            moments.random ^= moments.random >> 7;
            moments.random ^= moments.random << 17;
            if moments.sample.len() < SAMPLE * width {
                moments.sample.extend_from_slice(key);
            } else if let Some(slot) = Some((moments.random % moments.tokens) as usize).filter(|slot| *slot < SAMPLE) {
                moments.sample[slot * width..(slot + 1) * width].copy_from_slice(key);
            }
        }
    }

    /// Adds queries `[tokens, q_heads, key_dim]` of a layer, of decode steps or of a prompt. Ignores them if the layer
    /// has no keys or `q_heads` is 0.
    pub fn queries(&mut self, layer: usize, queries: &[f32], q_heads: usize, decode: bool) {
        let Some(moments) = self.layers.get_mut(layer).filter(|moments| moments.width() > 0 && q_heads > 0) else {
            return;
        };
        let (dim, ratio) = (moments.dim, (q_heads / moments.heads).max(1));
        for token in queries.chunks_exact(q_heads.saturating_mul(dim)) {
            for (head, query) in token.chunks_exact(dim).enumerate() {
                let start = (head / ratio).min(moments.heads - 1) * dim * dim;
                outer(&mut moments.queries[usize::from(decode)][start..start + dim * dim], query);
            }
        }
    }

    /// Fits KVSwap's adapter: the `rank` strongest right singular vectors of the joint keys.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there are no keys yet, or the rank is 0 or above the joint dimensions.
    pub fn low_rank(&self, name: &str, version: u32, rank: usize) -> Result<Adapter> {
        self.adapter(name, version, |moments| {
            let width = moments.width();
            moments.check(rank >= 1 && rank <= width, "rank")?;
            let (_, vectors) = eigen(&DMatrix::from_row_slice(width, width, &moments.second));
            let matrix = (0..width).flat_map(|i| (0..rank).map(move |j| (i, j)));
            let matrix = matrix.map(|at| vectors[at] as f32).collect();
            LowRankAdapter::new(width, rank, matrix).map(LayerAdapter::from)
        })
    }

    /// Fits an adapter per KV head: `rank` columns in all, equally many for each head.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there are no keys yet, or the rank is above the joint dimensions or not a
    /// multiple of the KV heads.
    pub fn per_head(&self, name: &str, version: u32, rank: usize) -> Result<Adapter> {
        self.adapter(name, version, |moments| {
            let (heads, dim, width) = (moments.heads, moments.dim, moments.width());
            moments.check(rank >= heads && rank <= width && rank.is_multiple_of(heads), "rank")?;
            let mut matrix = vec![0.0_f32; width * rank];
            for head in 0..heads {
                let start = head * dim;
                let (_, vectors) =
                    eigen(&DMatrix::from_fn(dim, dim, |i, j| moments.second[(start + i) * width + start + j]));
                for i in 0..dim {
                    for j in 0..rank / heads {
                        matrix[(start + i) * rank + head * (rank / heads) + j] = vectors[(i, j)] as f32;
                    }
                }
            }
            LowRankAdapter::new(width, rank, matrix).map(LayerAdapter::from)
        })
    }

    /// Fits transform-coded keys: the transform that concentrates the error of `q . k`, the bits of each dimension, and
    /// Lloyd-Max levels.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there are no keys or no queries yet, or `options` has bits out of range.
    pub fn codes(&self, name: &str, version: u32, options: CodeOptions) -> Result<Adapter> {
        self.adapter(name, version, |moments| {
            let bits = options.bits;
            moments.check(bits.is_multiple_of(8) && (8..=2048).contains(&bits), "bits")?;
            moments.check((1..=8).contains(&options.dimension_bits_max), "bits of a dimension")?;
            moments.codebook(options).map(LayerAdapter::from)
        })
    }

    fn adapter(&self, name: &str, version: u32, fit: impl Fn(&Moments) -> Result<LayerAdapter>) -> Result<Adapter> {
        let layers = self.layers.iter().enumerate().map(|(index, moments)| match moments.width() {
            0 => Ok(LayerAdapter::None),
            _ => fit(moments).map_err(|e| e.during(format!("calibration of layer {index}"))),
        });
        Adapter::new(name, version, layers.collect::<Result<_>>()?)
    }
}

impl Moments {
    fn width(&self) -> usize {
        self.heads * self.dim
    }

    fn check(&self, right: bool, what: &str) -> Result<()> {
        if right && self.tokens > 0 {
            return Ok(());
        }
        let text =
            if self.tokens == 0 { "calibrate: no keys were added".into() } else { format!("{what} out of range") };
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }

    /// Returns the square root and the inverse square root of the query moments, block diagonal over KV heads.
    fn weights(&self, decode_only: bool) -> Result<(DMatrix<f64>, DMatrix<f64>)> {
        let (dim, width) = (self.dim, self.width());
        let (mut root, mut inverse) = (DMatrix::zeros(width, width), DMatrix::zeros(width, width));
        for head in 0..self.heads {
            let mut moment = DMatrix::<f64>::zeros(dim, dim);
            for kind in if decode_only { 1..2 } else { 0..2 } {
                let part = &self.queries[kind][head * dim * dim..(head + 1) * dim * dim];
                let part = DMatrix::from_row_slice(dim, dim, part);
                // Both parts get the same trace, because prompts have many more queries.
                if part.trace() > 0.0 {
                    moment += &part / part.trace();
                }
            }
            self.check(moment.trace() > 0.0, "queries")?;
            let ridge = 1e-3 * moment.trace() / dim as f64;
            let (values, vectors) = eigen(&moment);
            let power = |p: f64| {
                let values = values.iter().map(|v| (v.max(0.0) + ridge).powf(p));
                &vectors * DMatrix::from_diagonal(&DVector::from_iterator(dim, values)) * vectors.transpose()
            };
            root.view_mut((head * dim, head * dim), (dim, dim)).copy_from(&power(0.5));
            inverse.view_mut((head * dim, head * dim), (dim, dim)).copy_from(&power(-0.5));
        }
        Ok((root, inverse))
    }

    fn codebook(&self, options: CodeOptions) -> Result<Codebook> {
        let width = self.width();
        let (root, inverse) = self.weights(options.decode_only)?;
        let mean = DVector::from_iterator(width, self.sum.iter().map(|s| s / self.tokens as f64));
        let second = DMatrix::from_row_slice(width, width, &self.second) / self.tokens as f64;
        let covariance = second - &mean * mean.transpose();
        let (values, vectors) = eigen(&(&root * covariance * &root));
        let bits = allocate(values.as_slice(), options);
        let packing = pack(&bits, options.bits / 8);
        // Only dimensions that were packed count, in packing order.
        let mut dims = Vec::new();
        let mut numbered = Vec::new();
        for byte in &packing {
            numbered.push(byte.iter().map(|_| dims.len() as u32).enumerate().map(|(i, n)| n + i as u32).collect());
            dims.extend(byte.iter().copied());
        }
        let (forward, query) = (&root * &vectors, &inverse * &vectors);
        let pick = |from: &DMatrix<f64>| -> Vec<f32> {
            (0..width).flat_map(|i| dims.iter().map(move |(dim, _)| from[(i, *dim)] as f32)).collect()
        };
        let (forward, query) = (pick(&forward), pick(&query));
        let mean: Vec<f32> = mean.iter().map(|x| *x as f32).collect();
        let transformed = transform(&self.sample, &mean, &forward);
        let mut columns = vec![vec![0.0; transformed.len() / dims.len()]; dims.len()];
        for (at, key) in transformed.chunks_exact(dims.len()).enumerate() {
            columns.iter_mut().zip(key).for_each(|(column, x)| column[at] = *x);
        }
        let levels: Vec<Vec<f32>> =
            columns.iter_mut().zip(&dims).map(|(values, (_, bits))| lloyd_max(values, 1 << bits)).collect();
        let fitted =
            Codebook::new(mean.clone(), forward.clone(), query.clone(), numbered.clone(), levels.clone(), 0.0)?;
        let tokens = self.sample.len() / width;
        let error = fitted.encode_transformed(&transformed, &mut vec![0; tokens * fitted.code_bytes()]);
        let distortion = error / tokens.max(1) as f64;
        Codebook::new(mean, forward, query, numbered, levels, distortion as f32)
    }
}

fn outer(sums: &mut [f64], x: &[f32]) {
    for (row, a) in sums.chunks_exact_mut(x.len()).zip(x) {
        row.iter_mut().zip(x).for_each(|(sum, b)| *sum += f64::from(a * b));
    }
}

/// Returns the eigenvalues from the largest on, and their vectors as columns. The largest element of each vector is
/// positive.
fn eigen(matrix: &DMatrix<f64>) -> (DVector<f64>, DMatrix<f64>) {
    let n = matrix.nrows();
    let found = SymmetricEigen::new((matrix + matrix.transpose()) * 0.5);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| found.eigenvalues[*b].total_cmp(&found.eigenvalues[*a]));
    let values = DVector::from_iterator(n, order.iter().map(|i| found.eigenvalues[*i]));
    let mut vectors = DMatrix::zeros(n, n);
    for (to, from) in order.into_iter().enumerate() {
        let column = found.eigenvectors.column(from);
        let sign = if column[column.iamax()] < 0.0 { -1.0 } else { 1.0 };
        vectors.set_column(to, &(column * sign));
    }
    (values, vectors)
}

/// Returns the bits of each dimension. Each bit is given to the dimension where it saves most error.
fn allocate(values: &[f64], options: CodeOptions) -> Vec<u32> {
    let mut bits = vec![0_u32; values.len()];
    let saved = |value: f64, bits: u32| value.max(0.0) * (DISTORTION[bits as usize] - DISTORTION[bits as usize + 1]);
    for _ in 0..options.bits {
        let open = (0..values.len()).filter(|i| bits[*i] < options.dimension_bits_max);
        let best = open.max_by(|a, b| saved(values[*a], bits[*a]).total_cmp(&saved(values[*b], bits[*b])));
        let Some(best) = best else { break };
        bits[best] += 1;
    }
    bits
}

/// Packs dimensions, with their bits, into bytes. A dimension does not cross the end of a byte.
///
/// The dimensions with the most bits are packed first. A dimension that fits in no byte gets the bits that are left in
/// the emptiest one.
fn pack(bits: &[u32], bytes: usize) -> Vec<Vec<(usize, u32)>> {
    let mut order: Vec<usize> = (0..bits.len()).filter(|i| bits[*i] > 0).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(bits[*i]), *i));
    let mut packed: Vec<Vec<(usize, u32)>> = vec![Vec::new(); bytes];
    let mut room = vec![8_u32; bytes];
    for dim in order {
        let fits = (0..bytes).find(|byte| room[*byte] >= bits[dim]);
        let Some(byte) = fits.or_else(|| (0..bytes).max_by_key(|byte| room[*byte]).filter(|byte| room[*byte] > 0))
        else {
            continue;
        };
        let taken = bits[dim].min(room[byte]);
        room[byte] -= taken;
        packed[byte].push((dim, taken));
    }
    packed.retain(|byte| !byte.is_empty());
    packed
}

/// Returns rising levels of least squared error for these values (Lloyd 1982). The iteration starts from quantiles.
fn lloyd_max(values: &mut [f32], count: usize) -> Vec<f32> {
    values.sort_by(f32::total_cmp);
    let n = values.len();
    let mut levels: Vec<f32> = (0..count).map(|i| values[((2 * i + 1) * n / (2 * count)).min(n - 1)]).collect();
    for _ in 0..60 {
        let mut start = 0;
        for at in 0..count {
            let limit = levels.get(at + 1).map(|next| (levels[at] + next) / 2.0);
            let end = limit.map_or(n, |limit| values.partition_point(|x| *x <= limit)).max(start);
            if end > start {
                levels[at] = values[start..end].iter().sum::<f32>() / (end - start) as f32;
            }
            start = end;
        }
        levels.sort_by(f32::total_cmp);
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quantiser_of_a_gaussian_has_the_error_of_the_table() {
        // The sum of twelve uniform numbers is nearly a Gaussian.
        let mut random = fastrand::Rng::with_seed(1);
        let values: Vec<f32> = (0..20_000).map(|_| (0..12).map(|_| random.f32()).sum::<f32>() - 6.0).collect();
        for (bits, expected) in DISTORTION.iter().enumerate().take(5).skip(1) {
            let levels = lloyd_max(&mut values.clone(), 1 << bits);
            let error = |x: &f32| levels.iter().map(|l| (l - x) * (l - x)).fold(f32::MAX, f32::min);
            let mean = values.iter().map(error).sum::<f32>() / values.len() as f32;
            let expected = *expected as f32;
            assert!((mean / expected - 1.0).abs() < 0.12, "{bits} bits: {mean}, {expected}");
        }
    }

    #[test]
    fn packing_keeps_every_bit_that_fits() {
        let bits = [4, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1];
        let packed = pack(&bits, 3);
        let total: u32 = packed.iter().flatten().map(|(_, bits)| bits).sum();
        assert_eq!(total, 24);
        assert!(packed.iter().all(|byte| byte.iter().map(|(_, bits)| bits).sum::<u32>() <= 8));
    }

    #[test]
    fn a_calibrator_without_keys_is_an_error() {
        let calibrator = Calibrator::new(&[(2, 4)]);
        assert_eq!(calibrator.low_rank("a", 1, 2).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
