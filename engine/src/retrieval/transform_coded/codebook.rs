//! The codebook of transform-coded keys: a linear transform, bits per dimension, and quantiser levels.
//!
//! Calibration fits the transform to queries and keys. A code is scored by look-ups in tables of 256 entries per byte.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{HalfPrecisionTables, QuantisedTables, multiply_add, pack_levels};
use crate::retrieval::encoding::{Reader, check_matrix, put, put_all};

/// The most bits of one dimension.
pub(crate) const BITS_MAX: u32 = 8;

/// The transform, levels and packing of one layer.
///
/// - A joint key `k` `[width]` becomes `(k - mean) * forward`, `[dims]`.
/// - Each dimension is replaced by the nearest of its levels.
/// - The level numbers of a code byte's dimensions are packed from the lowest bit on.
/// - A query `q` becomes `q * query`, `[dims]`. The sum over dimensions of that times the level approximates `q . (k -
///   mean)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Codebook {
    width: usize,
    mean: Vec<f32>,
    /// `[width, dims]`.
    forward: Vec<f32>,
    /// `[width, dims]`.
    query: Vec<f32>,
    /// The dimensions of each code byte.
    packing: Vec<Vec<u32>>,
    /// The rising levels of each dimension. Their number is a power of two.
    levels: Vec<Vec<f32>>,
    distortion: f32,
}

impl Codebook {
    /// Makes a codebook from its parts.
    ///
    /// - `mean` is `[width]`. `forward` and `query` are `[width, dims]`.
    /// - `packing` has the dimensions of each code byte.
    /// - `levels` has 2, 4, ... 256 rising levels per dimension.
    /// - `distortion` is the mean squared error per token in the transformed space, as calibration measured it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: parts that do not fit together, or numbers that are not finite.
    pub fn new(
        mean: Vec<f32>,
        forward: Vec<f32>,
        query: Vec<f32>,
        packing: Vec<Vec<u32>>,
        levels: Vec<Vec<f32>>,
        distortion: f32,
    ) -> Result<Self> {
        let (width, dims) = (mean.len(), levels.len());
        check_matrix("mean", &mean, width, 1)?;
        check_matrix("forward transform", &forward, width, dims)?;
        check_matrix("query transform", &query, width, dims)?;
        let wrong = |text: &str| Err(Error::new(ErrorKind::InvalidArgument, format!("codebook: {text}")));
        let mut seen = vec![false; dims];
        if packing.is_empty() || packing.len() > 256 {
            return wrong("the code must have 1 to 256 bytes");
        }
        for byte in &packing {
            let mut bits = 0;
            for &dim in byte {
                let Some(levels) = levels.get(dim as usize) else { return wrong("a code byte names no dimension") };
                if std::mem::replace(&mut seen[dim as usize], true) {
                    return wrong("a dimension is packed twice");
                }
                let power = levels.len().is_power_of_two() && (2..=1 << BITS_MAX).contains(&levels.len());
                let rising = levels.windows(2).all(|w| w[0] <= w[1]) && levels.iter().all(|x| x.is_finite());
                if !power || !rising {
                    return wrong("the levels of a dimension must be 2, 4, ... 256 rising finite numbers");
                }
                bits += levels.len().ilog2();
            }
            if bits > 8 || byte.is_empty() {
                return wrong("a code byte must hold 1 to 8 bits");
            }
        }
        if seen.contains(&false) || !distortion.is_finite() || distortion < 0.0 {
            return wrong("every dimension needs bits, and the error must be finite and not negative");
        }
        Ok(Self { width, mean, forward, query, packing, levels, distortion })
    }

    /// Returns its bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let floats = self.mean.len() + self.forward.len() + self.query.len();
        let lists = self.levels.iter().map(Vec::len).chain(self.packing.iter().map(Vec::len));
        (floats + lists.sum::<usize>()) * size_of::<f32>()
            + (self.levels.len() + self.packing.len()) * size_of::<Vec<f32>>()
    }

    /// Returns the joint key dimensions.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the dimensions that have bits.
    #[must_use]
    pub fn dims(&self) -> usize {
        self.levels.len()
    }

    /// Returns the bytes of a token's code.
    #[must_use]
    pub fn code_bytes(&self) -> usize {
        self.packing.len()
    }

    /// Returns the mean squared error per token in the transformed space, as calibration measured it.
    #[must_use]
    pub fn distortion(&self) -> f32 {
        self.distortion
    }

    /// Returns the mean that is subtracted from a key, `[width]`.
    #[must_use]
    pub fn mean(&self) -> &[f32] {
        &self.mean
    }

    /// Returns the transform of keys, `[width, dims]`.
    #[must_use]
    pub fn forward(&self) -> &[f32] {
        &self.forward
    }

    /// Returns the transform of queries, `[width, dims]`.
    #[must_use]
    pub fn query(&self) -> &[f32] {
        &self.query
    }

    /// Returns the dimensions of each code byte, from its lowest bit on.
    #[must_use]
    pub fn packing(&self) -> &[Vec<u32>] {
        &self.packing
    }

    /// Returns the rising levels of each dimension.
    #[must_use]
    pub fn levels(&self) -> &[Vec<f32>] {
        &self.levels
    }

    /// Writes the codes of keys `[tokens, width]`, `[tokens, code_bytes]`. Returns the sum of their squared errors in
    /// the transformed space.
    pub(crate) fn encode(&self, keys: &[f32], codes: &mut [u8]) -> f64 {
        self.encode_transformed(&transform(keys, &self.mean, &self.forward), codes)
    }

    /// Writes the codes of keys that are [transformed](transform), as [`Self::encode`] does.
    pub(crate) fn encode_transformed(&self, keys: &[f32], codes: &mut [u8]) -> f64 {
        let mut errors = vec![0.0; keys.len() / self.dims()];
        pack_levels(keys, &self.packing, &self.levels, codes, &mut errors);
        errors.into_iter().map(f64::from).sum()
    }

    /// Returns the sums of weighted levels for each value of each code byte, `[code_bytes, 256]`, from one weight for
    /// each dimension.
    pub(crate) fn tables(&self, weights: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.code_bytes() * 256];
        for (byte, table) in self.packing.iter().zip(out.chunks_exact_mut(256)) {
            let mut filled = 1;
            for &dim in byte {
                let (levels, weight) = (&self.levels[dim as usize], weights[dim as usize]);
                // The values of the bits so far, once per level of the next dimension. The first level is written last,
                // because it is the source.
                for (index, level) in levels.iter().enumerate().rev() {
                    let (source, rest) = table.split_at_mut(filled);
                    match index.checked_sub(1) {
                        Some(index) => {
                            let to = rest[index * filled..][..filled].iter_mut();
                            to.zip(source).for_each(|(to, from)| *to = *from + level * weight);
                        }
                        None => source.iter_mut().for_each(|x| *x += level * weight),
                    }
                }
                filled *= levels.len();
            }
        }
        out
    }

    /// Returns the tables of several lanes in whole steps, from weights `[dims, lanes]`.
    pub(crate) fn quantised_tables(&self, weights: &[f32], lanes: usize) -> QuantisedTables {
        QuantisedTables::new(&self.packing, &self.levels, weights, lanes)
    }

    /// Returns [tables](Self::tables), each as the sum of two tables of at most five bits. Returns none if every cut
    /// divides a dimension.
    pub(crate) fn halves(&self, tables: &[f32]) -> Option<Vec<HalfPrecisionTables>> {
        let half = |(byte, table): (&Vec<u32>, &[f32])| {
            let ends = byte.iter().scan(0, |bits, dim| {
                *bits += self.levels[*dim as usize].len().ilog2();
                Some(*bits)
            });
            let ends: Vec<u32> = ends.collect();
            let cuts = |shift: &u32| ends.iter().all(|end| end < shift) || ends.contains(shift);
            let shift = [4, 3, 5].into_iter().find(cuts)?;
            Some(HalfPrecisionTables {
                low: std::array::from_fn(|i| table[i & ((1 << shift) - 1)]),
                high: std::array::from_fn(|i| table[(i << shift) & 255] - table[0]),
                shift,
            })
        };
        self.packing.iter().zip(tables.chunks_exact(256)).map(half).collect()
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        put(out, self.width as u32);
        put(out, self.dims() as u32);
        put(out, self.packing.len() as u32);
        put_all(out, &[self.distortion]);
        put_all(out, &self.mean);
        put_all(out, &self.forward);
        put_all(out, &self.query);
        for levels in &self.levels {
            put(out, levels.len() as u32);
            put_all(out, levels);
        }
        for byte in &self.packing {
            put(out, byte.len() as u32);
            byte.iter().for_each(|dim| put(out, *dim));
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let damaged = || Error::new(ErrorKind::Corruption, "adapter: a codebook in it is damaged");
        let (width, dims, bytes) = (reader.number()?, reader.number()?, reader.number()?);
        let distortion = reader.floats(1)?[0];
        let elements = width.checked_mul(dims).ok_or_else(damaged)?;
        let (mean, forward, query) = (reader.floats(width)?, reader.floats(elements)?, reader.floats(elements)?);
        let mut levels = Vec::new();
        for _ in 0..dims {
            let count = reader.number()?;
            levels.push(reader.floats(count)?);
        }
        let mut packing = Vec::new();
        for _ in 0..bytes {
            let count = reader.number()?;
            let numbers = (0..count.min(9)).map(|_| reader.number().map(|n| n as u32));
            packing.push(numbers.collect::<Result<Vec<u32>>>()?);
        }
        Self::new(mean, forward, query, packing, levels, distortion).map_err(|_| damaged())
    }
}

/// Returns `(keys - mean) * forward`: keys `[tokens, width]` in the transformed space, `[tokens, dims]`. `forward` is
/// `[width, dims]`.
pub(crate) fn transform(keys: &[f32], mean: &[f32], forward: &[f32]) -> Vec<f32> {
    let (width, tokens) = (mean.len(), keys.len() / mean.len());
    let dims = forward.len() / width;
    let centred: Vec<f32> =
        keys.chunks_exact(width).flat_map(|key| key.iter().zip(mean).map(|(k, mean)| k - mean)).collect();
    let mut out = vec![0.0; tokens * dims];
    multiply_add(&mut out, &centred, forward, width, dims);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The look-up tables give the same sums as the levels.
        #[test]
        fn tables_are_sums_of_weighted_levels(seed in any::<u64>(), bits in prop::collection::vec(1_u32..5, 1..9)) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = || 2.0 * rng.f32() - 1.0;
            let mut packing: Vec<Vec<u32>> = vec![vec![]];
            let mut used = 0;
            let mut levels = Vec::new();
            for (dim, bits) in bits.iter().enumerate() {
                if used + bits > 8 { packing.push(vec![]); used = 0; }
                used += bits;
                packing.last_mut().unwrap().push(dim as u32);
                let mut of: Vec<f32> = (0..1 << bits).map(|_| random()).collect();
                of.sort_by(f32::total_cmp);
                levels.push(of);
            }
            let (dims, width) = (bits.len(), bits.len());
            let mut identity = vec![0.0; width * dims];
            (0..dims).for_each(|i| identity[i * dims + i] = 1.0);
            let mean = vec![0.0; width];
            let book = Codebook::new(mean, identity.clone(), identity, packing, levels.clone(), 0.0).unwrap();
            let key: Vec<f32> = (0..width).map(|_| random()).collect();
            let mut code = vec![0; book.code_bytes()];
            let error = book.encode(&key, &mut code) as f32;
            let weights: Vec<f32> = (0..dims).map(|_| random()).collect();
            let tables = book.tables(&weights);
            let (mut expected_error, mut expected) = (0.0, 0.0);
            for (dim, k) in key.iter().enumerate() {
                let level = levels[dim].iter().copied().min_by(|a, b| (a - k).abs().total_cmp(&(b - k).abs())).unwrap();
                expected_error += (level - k) * (level - k);
                expected += level * weights[dim];
            }
            prop_assert!((error - expected_error).abs() < 1e-4);
            let mut one = [7.0];
            crate::kernels::look_up(&code, &tables, code.len(), 1, &mut one);
            prop_assert!((one[0] - expected).abs() < 1e-4, "{} {expected}", one[0]);
            if let (Some(halves), Some(sums)) = (&book.halves(&tables), crate::kernels::code_sums()) {
                sums(&code, halves, &mut one);
                prop_assert!((one[0] - expected).abs() < 1e-4, "{} {expected}", one[0]);
            }
        }
    }
}
