//! Sums of weights by sign bits, 64 tokens at a time, for selection.
//!
//! A token has 128 sign bits per head. Its score is `length * sum_i (bit i set ? w_i : -w_i)` for the weights `w` of a
//! rotated query.
//! 1. [`SignTables`] has a table of 16 entries for every four bits: the sum of their signed weights, in steps of 8
//!    bits.
//! 2. The signs of 64 tokens are transposed, so that a register holds one byte of each token.
//! 3. Each half byte indexes its table by a byte shuffle. Four entries fit 8 bits and all 32 fit 16 bits.
//! 4. The sums are widened, multiplied by step and length, and stored in the order of the tokens.
//!
//! Without AVX-512BW the caller looks up f32 tables of eight bits instead.

/// Writes the signs of a vector, one bit per element, the first in the lowest bit. A set bit is a positive element.
pub(crate) fn pack_signs(x: &[f32], out: &mut [u8]) {
    for (out, run) in out.iter_mut().zip(x.chunks_exact(8)) {
        *out = run.iter().enumerate().fold(0, |bits, (i, x)| bits | u8::from(*x > 0.0) << i);
    }
}

/// Returns the sum of signed weights. Bit `i` of `value` adds weight `i` if it is set, and subtracts it if not.
pub(crate) fn signed_sum(weights: &[f32], value: usize) -> f32 {
    weights.iter().enumerate().map(|(i, w)| if value >> i & 1 == 1 { *w } else { -w }).sum()
}

/// Bytes of the signs of a token. Other lengths have no such sums.
pub(crate) const SIGN_BYTES: usize = 16;
/// The signs of four consecutive tokens.
pub(crate) type SignQuad = [u8; 4 * SIGN_BYTES];

/// The sums of weights of a query vector, for each value of every four bits, in whole steps.
#[derive(Clone)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has an instance"))]
pub(crate) struct SignTables {
    /// Each entry is between 0 and 63, so that four of them fit 8 bits.
    entries: [[u8; 16]; 2 * SIGN_BYTES],
    /// The weight of one step.
    step: f32,
}

/// The number that is added to every entry, so that entries are positive.
const MIDDLE: u8 = 32;
/// The largest magnitude of an entry, in steps.
const STEPS: f32 = 31.0;

impl SignTables {
    /// Returns the tables of `weights`. A set bit adds its weight, and a clear bit subtracts it.
    ///
    /// A sum is wrong by at most half a step for each table. A step is the largest entry divided by [`STEPS`].
    pub(crate) fn new(weights: &[f32; 8 * SIGN_BYTES]) -> Self {
        let fours = weights.as_chunks::<4>().0;
        let largest = fours.iter().map(|four| four.iter().map(|w| w.abs()).sum::<f32>()).fold(0.0, f32::max);
        let step = (largest / STEPS).max(f32::MIN_POSITIVE);
        let mut entries = [[MIDDLE; 16]; 2 * SIGN_BYTES];
        for (entries, four) in entries.iter_mut().zip(fours) {
            for (value, entry) in entries.iter_mut().enumerate() {
                *entry = (signed_sum(four, value) / step + f32::from(MIDDLE)).round() as u8;
            }
        }
        Self { entries, step }
    }

    /// Returns tables whose sums are zero.
    pub(crate) fn zero() -> Self {
        Self { entries: [[MIDDLE; 16]; 2 * SIGN_BYTES], step: 0.0 }
    }
}

/// Writes, for the signs of 64 tokens and their lengths in f16, the sums over the tables of one or four query vectors
/// times the lengths: `[64, vectors]`.
pub(crate) type SignSums = fn(&[&SignQuad; 16], &[u16; 64], &[SignTables], &mut [[f32; 16]]);

/// Returns the instance of this processor, or none without byte shuffles of 64 bytes.
pub(crate) fn sign_sums() -> Option<SignSums> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::dispatch::{FeatureSet, has};
        if has(FeatureSet::Avx512Bytes) {
            // SAFETY: the processor has what the function is compiled for.
            return Some(|signs, lengths, tables, out| unsafe { x86::sums(signs, lengths, tables, out) });
        }
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{MIDDLE, SIGN_BYTES, SignQuad, SignTables};
    use std::arch::x86_64::*;

    /// Bytes between the signs in work and the signs that are prefetched. The prefetches go to L2 and are spread over
    /// the work, because L1, or all at once, measured slower on Zen 4.
    const AHEAD: usize = 16384;

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn sums(signs: &[&SignQuad; 16], lengths: &[u16; 64], tables: &[SignTables], out: &mut [[f32; 16]]) {
        let bytes = transposed(signs);
        match (tables, out.as_chunks_mut::<4>()) {
            ([one], ([out], [])) => {
                let [sums] = of_bytes(signs, &bytes, [one]);
                let lengths = lengths.as_chunks::<16>().0;
                for ((sums, lengths), to) in sums.into_iter().zip(lengths).zip(out) {
                    store(to, _mm512_permutexvar_ps(order(), scaled(sums, one.step, lengths)));
                }
            }
            ([a, b, c, d], (out @ [_, _, _, _], [])) => {
                let sums = of_bytes(signs, &bytes, [a, b, c, d]);
                let lengths = lengths.as_chunks::<16>().0;
                for (at, (lengths, out)) in lengths.iter().zip(out).enumerate() {
                    let scaled = |i: usize, table: &SignTables| scaled(sums[i][at], table.step, lengths);
                    // Each 128-bit lane of the result holds the four sums of a token.
                    let each = [scaled(0, a), scaled(1, b), scaled(2, c), scaled(3, d)];
                    for (sums, to) in by_token(each).into_iter().zip(out) {
                        store(to, sums);
                    }
                }
            }
            _ => debug_assert!(false, "there are one or four query vectors, and the output has their size"),
        }
    }

    /// Returns the permutation that moves element `4 * i + j` to element `4 * j + i`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn order() -> __m512i {
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
    }

    /// Returns the sums of sixteen tokens, in the order of [`transposed`], times step and length.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn scaled(sums: __m512i, step: f32, lengths: &[u16; 16]) -> __m512 {
        // SAFETY: the array has 32 bytes.
        let lengths = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(lengths.as_ptr().cast()) });
        let lengths = _mm512_permutexvar_ps(order(), _mm512_mul_ps(lengths, _mm512_set1_ps(step)));
        let middle = _mm512_set1_epi32(i32::from(MIDDLE) * 2 * SIGN_BYTES as i32);
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, middle)), lengths)
    }

    /// Transposes the signs: byte `i` of 128-bit lane `l` of register `j` is byte `j` of token `4 * i + l`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn transposed(signs: &[&SignQuad; 16]) -> [__m512i; SIGN_BYTES] {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *signs;
        let v = [
            load(a),
            load(b),
            load(c),
            load(d),
            load(e),
            load(f),
            load(g),
            load(h),
            load(i),
            load(j),
            load(k),
            load(l),
            load(m),
            load(n),
            load(o),
            load(p),
        ];
        // Each step is a perfect shuffle: it interleaves the bytes of registers that are 8 apart.
        shuffled(shuffled(shuffled(shuffled(v))))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load(signs: &SignQuad) -> __m512i {
        // SAFETY: the array has 64 bytes, and the load needs no alignment.
        unsafe { _mm512_loadu_si512(signs.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn shuffled([a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]: [__m512i; 16]) -> [__m512i; 16] {
        let ([ai, high_ai], [bj, high_bj]) = (woven(a, i), woven(b, j));
        let ([ck, high_ck], [dl, high_dl]) = (woven(c, k), woven(d, l));
        let ([em, high_em], [fn_, high_fn]) = (woven(e, m), woven(f, n));
        let ([go, high_go], [hp, high_hp]) = (woven(g, o), woven(h, p));
        [ai, high_ai, bj, high_bj, ck, high_ck, dl, high_dl, em, high_em, fn_, high_fn, go, high_go, hp, high_hp]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn woven(a: __m512i, b: __m512i) -> [__m512i; 2] {
        [_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)]
    }

    /// Returns, for each query vector, the sums of the entries that the bits index, in four registers of sixteen
    /// tokens.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn of_bytes<const N: usize>(
        signs: &[&SignQuad; 16],
        bytes: &[__m512i; SIGN_BYTES],
        tables: [&SignTables; N],
    ) -> [[__m512i; 4]; N] {
        let zero = _mm512_setzero_si512();
        let low = _mm512_set1_epi8(15);
        // `odd` holds the sums of odd bytes. `both` holds the sums of even bytes plus 256 times the sums of odd
        // bytes.
        let (mut odd, mut both) = ([zero; N], [zero; N]);
        for (at, (pair, signs)) in bytes.as_chunks::<2>().0.iter().zip(signs.as_chunks::<2>().0).enumerate() {
            for signs in signs {
                _mm_prefetch::<_MM_HINT_T1>(signs.as_ptr().wrapping_add(AHEAD).cast());
            }
            let [a, b] = *pair;
            let fours = [
                _mm512_and_si512(a, low),
                _mm512_and_si512(_mm512_srli_epi16::<4>(a), low),
                _mm512_and_si512(b, low),
                _mm512_and_si512(_mm512_srli_epi16::<4>(b), low),
            ];
            for i in 0..N {
                let entry = |j: usize| {
                    // SAFETY: the array has 16 bytes.
                    let table = unsafe { _mm_loadu_si128(tables[i].entries[4 * at + j].as_ptr().cast()) };
                    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), fours[j])
                };
                let sum = _mm512_add_epi8(_mm512_add_epi8(entry(0), entry(1)), _mm512_add_epi8(entry(2), entry(3)));
                both[i] = _mm512_add_epi16(both[i], sum);
                odd[i] = _mm512_add_epi16(odd[i], _mm512_srli_epi16::<8>(sum));
            }
        }
        let mut out = [[zero; 4]; N];
        for i in 0..N {
            let even = _mm512_sub_epi16(both[i], _mm512_slli_epi16::<8>(odd[i]));
            let (first, last) = (_mm512_unpacklo_epi16(even, odd[i]), _mm512_unpackhi_epi16(even, odd[i]));
            out[i] = [
                _mm512_unpacklo_epi16(first, zero),
                _mm512_unpackhi_epi16(first, zero),
                _mm512_unpacklo_epi16(last, zero),
                _mm512_unpackhi_epi16(last, zero),
            ];
        }
        out
    }

    /// Transposes each 128-bit lane: element `i` of register `j` becomes element `j` of register `i`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn by_token([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
        let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
        let (high_ab, high_cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
        [
            _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd),
            _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd),
            _mm512_shuffle_ps::<0b01_00_01_00>(high_ab, high_cd),
            _mm512_shuffle_ps::<0b11_10_11_10>(high_ab, high_cd),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn store(to: &mut [f32; 16], x: __m512) {
        // SAFETY: the array has 16 f32.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sign_sums_are_sums_of_table_entries(
            signs in prop::collection::vec(any::<u8>(), 64 * SIGN_BYTES),
            lengths in prop::collection::vec(0.0_f32..8.0, 64),
            weights in prop::collection::vec(-1.0_f32..1.0, 4 * 8 * SIGN_BYTES),
            vectors in prop::sample::select(vec![1_usize, 4]),
        ) {
            let tables: Vec<SignTables> = weights.as_chunks().0.iter().take(vectors).map(SignTables::new).collect();
            let quads: Vec<&SignQuad> = signs.as_chunks().0.iter().collect();
            let bits: Vec<u16> = lengths.iter().map(|x| f16::from_f32(*x).to_bits()).collect();
            let mut out = vec![[7.0; 16]; 4 * vectors];
            let sums = sign_sums();
            if let Some(sums) = sums {
                sums(&quads.try_into().unwrap(), &bits.clone().try_into().unwrap(), &tables, &mut out);
            }
            for (token, signs) in signs.chunks(SIGN_BYTES).enumerate() {
                let length = f16::from_bits(bits[token]).to_f32();
                for (vector, tables) in tables.iter().enumerate() {
                    let nibbles = signs.iter().flat_map(|byte| [byte & 15, byte >> 4]);
                    let entry = |(nibble, entries): (u8, &[u8; 16])| i32::from(entries[usize::from(nibble)]);
                    let entries = nibbles.zip(&tables.entries).map(entry);
                    let whole = entries.sum::<i32>() - i32::from(MIDDLE) * 2 * SIGN_BYTES as i32;
                    let by_entries = whole as f32 * tables.step * length;
                    let weights = &weights[vector * 8 * SIGN_BYTES..][..8 * SIGN_BYTES];
                    let bit = |i: usize| signs[i / 8] >> (i % 8) & 1 == 1;
                    let exact: f32 = weights.iter().enumerate().map(|(i, w)| if bit(i) { *w } else { -w }).sum();
                    let error = length * tables.step * SIGN_BYTES as f32;
                    prop_assert!((by_entries - length * exact).abs() <= error + 1e-4, "{by_entries} {exact}");
                    if sums.is_some() {
                        let found = out.as_flattened()[token * vectors + vector];
                        prop_assert!((found - by_entries).abs() <= 1e-5 * by_entries.abs(), "{found} {by_entries}");
                    }
                }
            }
        }
    }
}
