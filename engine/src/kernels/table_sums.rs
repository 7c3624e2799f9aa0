//! Sums of table entries by code bytes, for one or many lanes.
//!
//! A token has a few code bytes. Each selects a row of a table of 256 rows, and the rows are added lane by lane. A
//! lane is a query head.
//! - [`look_up`] reads tables of f32.
//! - [`QuantisedTables`] have 16-bit integers, for many lanes whose tables would not fit the caches.
//!
//! [`code_sums`](super::code_sums) is the variant for one lane in registers.
//!
//! Addition order: the code bytes of a token in ascending order.

use super::dispatch::multiversion;

multiversion! {
    /// Writes `out[token][lane] = sum_b tables[b][codes[token][b]][lane]`. Codes are `[tokens, code_bytes]` and tables
    /// `[code_bytes, 256, lanes]`.
    pub(crate) fn look_up(codes: &[u8], tables: &[f32], code_bytes: usize, lanes: usize, out: &mut [f32]) = look_up_any;
}

#[inline(always)]
fn look_up_any(codes: &[u8], tables: &[f32], code_bytes: usize, lanes: usize, out: &mut [f32]) {
    match lanes {
        1 => look_up_inner::<1>(codes, tables, code_bytes, out),
        4 => look_up_inner::<4>(codes, tables, code_bytes, out),
        8 => look_up_inner::<8>(codes, tables, code_bytes, out),
        _ => look_up_wide(codes, tables, code_bytes, lanes, out),
    }
}

#[inline(always)]
fn look_up_inner<const LANES: usize>(codes: &[u8], tables: &[f32], code_bytes: usize, out: &mut [f32]) {
    let tables = tables.as_chunks::<LANES>().0.as_chunks::<256>().0;
    for (codes, out) in codes.chunks_exact(code_bytes).zip(out.as_chunks_mut::<LANES>().0) {
        let mut sums = [0.0_f32; LANES];
        for (table, &code) in tables.iter().zip(codes) {
            let row = &table[usize::from(code)];
            for i in 0..LANES {
                sums[i] += row[i];
            }
        }
        *out = sums;
    }
}

#[inline(always)]
fn look_up_wide(codes: &[u8], tables: &[f32], code_bytes: usize, lanes: usize, out: &mut [f32]) {
    for (codes, out) in codes.chunks_exact(code_bytes).zip(out.chunks_exact_mut(lanes)) {
        out.fill(0.0);
        for (b, &code) in codes.iter().enumerate() {
            let row = &tables[(b * 256 + usize::from(code)) * lanes..][..lanes];
            out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
}

/// Tables of 16-bit integers, in steps of each lane. A look-up reads half the bytes that [`look_up`] reads.
pub(crate) struct QuantisedTables {
    /// `[code_bytes, 256, lanes]`.
    tables: Vec<i16>,
    /// The step of each lane.
    steps: Vec<f32>,
    code_bytes: usize,
}

impl QuantisedTables {
    /// Makes the tables of weighted levels, less the middle of each dimension's range.
    ///
    /// `packing` has the dimensions of each code byte, the first one in its lowest bits. `levels` has the rising levels
    /// of each dimension, and `weights` is `[dims, lanes]`.
    ///
    /// The middles add the same to all tokens, so that the order of the tokens is kept. A sum is wrong by at most
    /// half a step for each code byte, and its magnitude is at most 32511 steps.
    pub(crate) fn new(packing: &[Vec<u32>], levels: &[Vec<f32>], weights: &[f32], lanes: usize) -> Self {
        let dimension =
            |dim: u32| -> WeightedLevels<'_> { (&levels[dim as usize], &weights[dim as usize * lanes..][..lanes]) };
        let mut steps = vec![0.0; lanes];
        for (levels, weights) in packing.iter().flatten().map(|dim| dimension(*dim)) {
            for (step, weight) in steps.iter_mut().zip(weights) {
                let (low, high, middle) = range(levels, *weight);
                // Rounding may have moved the middle towards one end.
                *step += (low - middle).abs().max((high - middle).abs()) / STEPS;
            }
        }
        let per_unit: Vec<f32> = steps.iter().map(|step: &f32| step.max(f32::MIN_POSITIVE).recip()).collect();
        let mut tables = vec![0; packing.len() * 256 * lanes];
        let (mut low, mut high) = (Vec::new(), Vec::new());
        for (byte, table) in packing.iter().zip(tables.chunks_exact_mut(256 * lanes)) {
            let (low_dims, high_dims) = byte.split_at(half_of(byte, levels));
            sums_in_steps(low_dims.iter().map(|dim| dimension(*dim)), &per_unit, &mut low);
            sums_in_steps(high_dims.iter().map(|dim| dimension(*dim)), &per_unit, &mut high);
            add_pairs(&low, &high, lanes, table);
        }
        Self { tables, steps, code_bytes: packing.len() }
    }

    /// Returns the most bytes that [`Self::new`] allocates.
    pub(crate) fn bytes_for(code_bytes: usize, lanes: usize) -> usize {
        // The rows of a byte's halves, twice while they grow.
        let rows = 4 * 256 * size_of::<f32>();
        lanes.saturating_mul(code_bytes * 256 * size_of::<i16>() + rows + 2 * size_of::<f32>())
    }

    /// Writes `out[token][lane] = sum_b tables[b][codes[token][b]][lane]`, less a number that all tokens share.
    pub(crate) fn look_up(&self, codes: &[u8], out: &mut [f32]) {
        look_up_quantised(codes, &self.tables, &self.steps, self.code_bytes, out);
    }
}

/// The levels of a dimension, and the weight of each lane.
type WeightedLevels<'a> = (&'a [f32], &'a [f32]);

/// The largest magnitude of an exact sum, in steps. It leaves half a step of error for each of 256 code bytes.
const STEPS: f32 = (i16::MAX - 256) as f32;

/// Added to a number of at most 2^22 in magnitude, it leaves the nearest integer in the low bits of the sum.
const TO_INTEGER: f32 = (3 << 22) as f32;

/// Returns the weighted first level, the last one, and the middle between them.
fn range(levels: &[f32], weight: f32) -> (f32, f32, f32) {
    let end = |level: Option<&f32>| level.map_or(0.0, |level| level * weight);
    let (low, high) = (end(levels.first()), end(levels.last()));
    // Each end is halved first, because the sum of both may be infinite.
    (low, high, low * 0.5 + high * 0.5)
}

/// Returns how many dimensions of a code byte are in its lowest four bits.
fn half_of(byte: &[u32], levels: &[Vec<f32>]) -> usize {
    let mut bits = 0;
    let fits = |dim: &&u32| {
        bits += levels[**dim as usize].len().ilog2();
        bits <= 4
    };
    byte.iter().take_while(fits).count()
}

/// Writes the sums of the levels of some dimensions, less their middles and in steps, `[values, lanes]`.
fn sums_in_steps<'a>(dims: impl Iterator<Item = WeightedLevels<'a>>, per_unit: &[f32], sums: &mut Vec<f32>) {
    let lanes = per_unit.len();
    sums.clear();
    sums.resize(lanes, 0.0);
    for (levels, weights) in dims {
        let filled = sums.len();
        // The values of the bits so far, once per level of this dimension. The first level is added last, because its
        // rows are the source.
        for level in levels.iter().skip(1).chain(levels.first()) {
            let is_first = sums.len() == filled * levels.len();
            let start = if is_first { 0 } else { sums.len() };
            if !is_first {
                sums.extend_from_within(..filled);
            }
            for row in sums[start..start + filled].chunks_exact_mut(lanes) {
                for ((sum, weight), per_unit) in row.iter_mut().zip(weights).zip(per_unit) {
                    *sum += (level * weight - range(levels, *weight).2) * per_unit;
                }
            }
        }
    }
}

multiversion! {
    /// Writes the whole steps of all pairs of rows, `[high, low, lanes]`, to the start of `whole`.
    fn add_pairs(low: &[f32], high: &[f32], lanes: usize, whole: &mut [i16]) = add_pairs_of_lanes;
}

#[inline(always)]
fn add_pairs_of_lanes(low: &[f32], high: &[f32], lanes: usize, whole: &mut [i16]) {
    match lanes {
        lanes if lanes.is_multiple_of(16) => add_pairs_by::<16>(low, high, lanes, whole),
        _ => add_pairs_by::<8>(low, high, lanes, whole),
    }
}

/// [`add_pairs`] with `N` lanes at a time. `N` divides the number of lanes.
#[inline(always)]
fn add_pairs_by<const N: usize>(low: &[f32], high: &[f32], lanes: usize, whole: &mut [i16]) {
    let runs = (lanes / N).max(1);
    let (low, high) = (low.as_chunks::<N>().0, high.as_chunks::<N>().0);
    let whole = whole.as_chunks_mut::<N>().0.chunks_exact_mut(low.len().max(1));
    for (high, whole) in high.chunks_exact(runs).zip(whole) {
        for (low, whole) in low.chunks_exact(runs).zip(whole.chunks_exact_mut(runs)) {
            for ((low, high), whole) in low.iter().zip(high).zip(whole) {
                for i in 0..N {
                    whole[i] = (low[i] + high[i] + TO_INTEGER).to_bits() as i16;
                }
            }
        }
    }
}

multiversion! {
    /// [`QuantisedTables::look_up`].
    fn look_up_quantised(codes: &[u8], tables: &[i16], steps: &[f32], code_bytes: usize, out: &mut [f32])
        = look_up_quantised_any;
}

#[inline(always)]
fn look_up_quantised_any(codes: &[u8], tables: &[i16], steps: &[f32], code_bytes: usize, out: &mut [f32]) {
    match steps.len() {
        8 => look_up_quantised_by::<8>(codes, tables, steps, code_bytes, out),
        16 => look_up_quantised_by::<16>(codes, tables, steps, code_bytes, out),
        lanes if lanes.is_multiple_of(32) => look_up_quantised_by::<32>(codes, tables, steps, code_bytes, out),
        _ => look_up_quantised_by::<16>(codes, tables, steps, code_bytes, out),
    }
}

/// Looks up `N` lanes at a time. `N` divides the number of lanes.
#[inline(always)]
fn look_up_quantised_by<const N: usize>(
    codes: &[u8],
    tables: &[i16],
    steps: &[f32],
    code_bytes: usize,
    out: &mut [f32],
) {
    let runs = (steps.len() / N).max(1);
    let tables = tables.as_chunks::<N>().0;
    for (at, steps) in steps.as_chunks::<N>().0.iter().enumerate() {
        let out = out.as_chunks_mut::<N>().0.chunks_exact_mut(runs);
        for (codes, out) in codes.chunks_exact(code_bytes).zip(out) {
            let mut sums = [0_i16; N];
            for (table, &code) in tables.chunks_exact(256 * runs).zip(codes) {
                let row = &table[usize::from(code) * runs + at];
                for i in 0..N {
                    sums[i] = sums[i].wrapping_add(row[i]);
                }
            }
            for i in 0..N {
                out[at][i] = f32::from(sums[i]) * steps[i];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The middle of a range of one last bit is one of its ends.
    #[test]
    fn quantised_tables_keep_neighbouring_numbers_in_order() {
        for low in [1.0_f32, 1.000_000_2, -3.0, 1e-30] {
            let levels = vec![vec![low, low.next_up()]];
            let (tables, mut out) = (QuantisedTables::new(&[vec![0]], &levels, &[1.0; 8], 8), vec![0.0; 16]);
            tables.look_up(&[0, 1], &mut out);
            assert!((0..8).all(|lane| out[lane] < out[8 + lane]), "{low}: {out:?}");
        }
    }

    /// Code bytes with up to eight bits of dimensions, drawn from `bits`.
    fn packed(bits: &[u32]) -> Vec<Vec<u32>> {
        let (mut packing, mut used): (Vec<Vec<u32>>, u32) = (vec![Vec::new()], 0);
        for (dim, bits) in (0..).zip(bits) {
            if used + bits > 8 {
                packing.push(Vec::new());
                used = 0;
            }
            used += bits;
            packing.last_mut().unwrap().push(dim);
        }
        packing
    }

    proptest! {
        #[test]
        fn quantised_tables_are_as_exact_as_documented(
            bits in prop::collection::vec(1_u32..9, 1..14),
            lanes in prop::sample::select(vec![8_usize, 16, 32, 48, 64]),
            size in -12_i32..12, tokens in 0_usize..20, seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move || 2.0 * rng.f32() - 1.0;
            let size = 2.0_f32.powi(size);
            let weights: Vec<f32> = (0..bits.len() * lanes).map(|_| size * random()).collect();
            let mut rising = |bits: &u32| {
                let mut levels: Vec<f32> = (0..1 << bits).map(|_| random()).collect();
                levels.sort_by(f32::total_cmp);
                levels
            };
            let levels: Vec<Vec<f32>> = bits.iter().map(&mut rising).collect();
            let packing = packed(&bits);
            let mut one_of = |levels: &Vec<f32>| ((random() + 1.0) / 2.0 * levels.len() as f32) as usize % levels.len();
            let chosen: Vec<Vec<usize>> = (0..tokens).map(|_| levels.iter().map(&mut one_of).collect()).collect();
            let mut codes = Vec::new();
            for (token, byte) in chosen.iter().flat_map(|token| packing.iter().map(move |byte| (token, byte))) {
                let add = |(code, shift): (usize, u32), dim: &u32| {
                    (code | token[*dim as usize] << shift, shift + bits[*dim as usize])
                };
                codes.push(byte.iter().fold((0, 0), add).0 as u8);
            }
            let quantised = QuantisedTables::new(&packing, &levels, &weights, lanes);
            prop_assert!(quantised.tables.len() * size_of::<i16>() < QuantisedTables::bytes_for(packing.len(), lanes));
            let mut found = vec![7.0; tokens * lanes];
            quantised.look_up(&codes, &mut found);
            for lane in 0..lanes {
                let weight = |dim: usize| weights[dim * lanes + lane];
                let ranges = || (0..bits.len()).map(|dim| range(&levels[dim], weight(dim)));
                let middle: f32 = ranges().map(|(_, _, middle)| middle).sum();
                let half: f32 = ranges().map(|(low, high, _)| (high - low).abs() / 2.0).sum();
                for (token, chosen) in chosen.iter().enumerate() {
                    let expected: f32 = chosen.iter().enumerate().map(|(dim, at)| levels[dim][*at] * weight(dim)).sum();
                    let (found, expected) = (found[token * lanes + lane], expected - middle);
                    let error = packing.len() as f32 / 2.0 * half / STEPS;
                    prop_assert!((found - expected).abs() <= 1.01 * error + 1e-5 * size, "{found} {expected}");
                }
            }
        }
    }
}
