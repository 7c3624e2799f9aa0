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
    /// Quantises tables as [`look_up`] takes them, less the middle of the range of each table.
    ///
    /// The middles add the same to all tokens, so that the order of the tokens is kept. A sum is wrong by at most
    /// half a step for each code byte, and its magnitude is at most 32511 steps.
    pub(crate) fn new(tables: &[f32], code_bytes: usize, lanes: usize) -> Self {
        let mut quantised = Self { tables: vec![0; tables.len()], steps: vec![0.0; lanes], code_bytes };
        let mut middles = vec![0.0; code_bytes * lanes];
        middles_of(tables, &mut middles, &mut quantised.steps);
        let per_unit: Vec<f32> = quantised.steps.iter().map(|step| step.max(f32::MIN_POSITIVE).recip()).collect();
        in_steps(tables, &middles, &per_unit, &mut quantised.tables);
        quantised
    }

    /// Writes `out[token][lane] = sum_b tables[b][codes[token][b]][lane]`, less a number that all tokens share.
    pub(crate) fn look_up(&self, codes: &[u8], out: &mut [f32]) {
        look_up_quantised(codes, &self.tables, &self.steps, self.code_bytes, out);
    }
}

/// The largest magnitude of an exact sum, in steps. It leaves half a step of error for each of 256 code bytes.
const STEPS: f32 = (i16::MAX - 256) as f32;

/// Added to a number of at most 2^22 in magnitude, it leaves the nearest integer in the low bits of the sum.
const TO_INTEGER: f32 = (3 << 22) as f32;

multiversion! {
    /// Writes the middles `[code_bytes, lanes]` of the ranges of the tables, and adds to `steps` a [`STEPS`]th of the
    /// larger half of each range.
    fn middles_of(tables: &[f32], middles: &mut [f32], steps: &mut [f32]) = middles_of_lanes;
}

#[inline(always)]
fn middles_of_lanes(tables: &[f32], middles: &mut [f32], steps: &mut [f32]) {
    match steps.len() {
        lanes if lanes.is_multiple_of(16) => middles_by::<16>(tables, middles, steps),
        _ => middles_by::<8>(tables, middles, steps),
    }
}

/// [`middles_of`] with `N` lanes at a time. `N` divides the number of lanes.
#[inline(always)]
fn middles_by<const N: usize>(tables: &[f32], middles: &mut [f32], steps: &mut [f32]) {
    let (middles, steps) = (middles.as_chunks_mut::<N>().0, steps.as_chunks_mut::<N>().0);
    let runs = steps.len().max(1);
    let tables = tables.as_chunks::<N>().0.chunks_exact(256 * runs);
    for (table, middles) in tables.zip(middles.chunks_exact_mut(runs)) {
        for (at, (middles, steps)) in middles.iter_mut().zip(steps.iter_mut()).enumerate() {
            let (mut low, mut high) = ([f32::MAX; N], [f32::MIN; N]);
            for row in table.iter().skip(at).step_by(runs) {
                for i in 0..N {
                    low[i] = if row[i] < low[i] { row[i] } else { low[i] };
                    high[i] = if row[i] > high[i] { row[i] } else { high[i] };
                }
            }
            for i in 0..N {
                // Each end is halved first, because the sum of both may be infinite.
                let middle = low[i] * 0.5 + high[i] * 0.5;
                middles[i] = middle;
                // Rounding may have moved the middle towards one end.
                let (up, down) = (high[i] - middle, middle - low[i]);
                steps[i] += (if up > down { up } else { down }) / STEPS;
            }
        }
    }
}

multiversion! {
    /// Writes the tables less their middles, in whole steps. `per_unit` has the steps of each lane in 1.
    fn in_steps(tables: &[f32], middles: &[f32], per_unit: &[f32], whole: &mut [i16]) = in_steps_of_lanes;
}

#[inline(always)]
fn in_steps_of_lanes(tables: &[f32], middles: &[f32], per_unit: &[f32], whole: &mut [i16]) {
    match per_unit.len() {
        lanes if lanes.is_multiple_of(16) => in_steps_by::<16>(tables, middles, per_unit, whole),
        _ => in_steps_by::<8>(tables, middles, per_unit, whole),
    }
}

/// [`in_steps`] with `N` lanes at a time. `N` divides the number of lanes.
#[inline(always)]
fn in_steps_by<const N: usize>(tables: &[f32], middles: &[f32], per_unit: &[f32], whole: &mut [i16]) {
    let (middles, per_unit) = (middles.as_chunks::<N>().0, per_unit.as_chunks::<N>().0);
    let runs = per_unit.len().max(1);
    let tables = tables.as_chunks::<N>().0.chunks_exact(256 * runs);
    let whole = whole.as_chunks_mut::<N>().0.chunks_exact_mut(256 * runs);
    for ((table, whole), middles) in tables.zip(whole).zip(middles.chunks_exact(runs)) {
        for (at, (middles, per_unit)) in middles.iter().zip(per_unit).enumerate() {
            let rows = table.iter().skip(at).step_by(runs);
            for (row, whole) in rows.zip(whole.iter_mut().skip(at).step_by(runs)) {
                for i in 0..N {
                    whole[i] = ((row[i] - middles[i]) * per_unit[i] + TO_INTEGER).to_bits() as i16;
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
            let high = low.next_up();
            let tables: Vec<f32> = (0..256 * 8).map(|i| if i / 8 < 128 { low } else { high }).collect();
            let (tables, mut out) = (QuantisedTables::new(&tables, 1, 8), vec![0.0; 16]);
            tables.look_up(&[0, 255], &mut out);
            assert!((0..8).all(|lane| out[lane] < out[8 + lane]), "{low}: {out:?}");
        }
    }

    proptest! {
        #[test]
        fn quantised_tables_are_as_exact_as_documented(
            (bytes, lanes) in (1_usize..6, prop::sample::select(vec![8_usize, 16, 32, 48, 64])),
            size in -12_i32..12, tokens in 0_usize..20, seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move || 2.0 * rng.f32() - 1.0;
            let size = 2.0_f32.powi(size);
            let sizes: Vec<f32> = (0..bytes * lanes).map(|_| size * random()).collect();
            let table = |i: usize| &sizes[i / (256 * lanes) * lanes..][i % lanes];
            let tables: Vec<f32> = (0..bytes * 256 * lanes).map(|i| table(i) * random()).collect();
            let codes: Vec<u8> = (0..tokens * bytes).map(|_| (random() * 127.0 + 128.0) as u8).collect();
            let (mut expected, mut found) = (vec![0.0; tokens * lanes], vec![7.0; tokens * lanes]);
            look_up(&codes, &tables, bytes, lanes, &mut expected);
            let quantised = QuantisedTables::new(&tables, bytes, lanes);
            quantised.look_up(&codes, &mut found);
            for lane in 0..lanes {
                let entries = |b: usize| tables[b * 256 * lanes..][..256 * lanes].iter().skip(lane).step_by(lanes);
                let ends = |b| entries(b).fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
                let middle: f32 = (0..bytes).map(|b| (ends(b).0 + ends(b).1) / 2.0).sum();
                let range: f32 = (0..bytes).map(|b| (ends(b).1 - ends(b).0) / 2.0).sum();
                for token in 0..tokens {
                    let (found, expected) = (found[token * lanes + lane], expected[token * lanes + lane] - middle);
                    let error = bytes as f32 / 2.0 * range / STEPS;
                    prop_assert!((found - expected).abs() <= 1.01 * error + 1e-5 * size, "{found} {expected}");
                }
            }
        }
    }
}
