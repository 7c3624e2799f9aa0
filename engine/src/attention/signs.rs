//! Sums of weights by sign bits, sixteen tokens at a time: for selection, as [`RowQuery`](super::RowQuery) is.
#![allow(unsafe_code)]

/// Bytes of the signs of a token that these sums are for.
pub(crate) const SIGN_BYTES: usize = 16;
/// Tables of one query vector: one for every four bits.
pub(crate) const SIGN_TABLES: usize = 2 * SIGN_BYTES;

/// Of four times four tokens' signs, the sums over the query vectors' tables (one vector, or four), times the tokens' lengths
/// in f16: `[16, vectors]`.
pub(crate) type SignSums = fn([&[u8; 4 * SIGN_BYTES]; 4], &[u16; 16], &[[f32; 16]], &mut [[f32; 16]]);

/// The fastest for this CPU; none where no vector register holds a table.
pub(crate) fn sign_sums() -> Option<SignSums> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has what the function is compiled for.
            return Some(|signs, lengths, tables, out| unsafe { x86::sums(signs, lengths, tables, out) });
        }
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{SIGN_BYTES, SIGN_TABLES};
    use std::arch::x86_64::*;

    /// How far ahead signs are asked for, in bytes.
    const AHEAD: usize = 8192;

    #[target_feature(enable = "avx512f")]
    pub(super) fn sums(
        signs: [&[u8; 4 * SIGN_BYTES]; 4],
        lengths: &[u16; 16],
        tables: &[[f32; 16]],
        out: &mut [[f32; 16]],
    ) {
        // Each 128-bit lane holds the signs of a token.
        // SAFETY: arrays of 64 bytes; the loads need no alignment.
        let load = |signs: &[u8; 4 * SIGN_BYTES]| unsafe { _mm512_loadu_si512(signs.as_ptr().cast()) };
        for signs in signs {
            _mm_prefetch::<_MM_HINT_T0>(signs.as_ptr().wrapping_add(AHEAD).cast());
        }
        let [a, b, c, d] = signs;
        let words = transposed([load(a), load(b), load(c), load(d)]);
        // SAFETY: an array of 32 bytes.
        let lengths = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(lengths.as_ptr().cast()) });
        let (vectors, rest) = tables.as_chunks::<SIGN_TABLES>();
        debug_assert!(rest.is_empty());
        match (vectors, out) {
            ([a, b, c, d], [to_a, to_b, to_c, to_d]) => {
                let sums = of_words(words, [a, b, c, d]);
                // Now each 128-bit lane holds the four sums of a token.
                let [a, b, c, d] = sums;
                let sums = transposed([
                    _mm512_castps_si512(a),
                    _mm512_castps_si512(b),
                    _mm512_castps_si512(c),
                    _mm512_castps_si512(d),
                ]);
                for (i, (sums, to)) in sums.into_iter().zip([to_a, to_b, to_c, to_d]).enumerate() {
                    let sums = _mm512_castsi512_ps(sums);
                    let first = _mm512_set1_epi32(4 * i as i32);
                    let each =
                        _mm512_add_epi32(first, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
                    store(to, _mm512_mul_ps(sums, _mm512_permutexvar_ps(each, lengths)));
                }
            }
            ([one], [to]) => {
                let [sums] = of_words(words, [one]);
                let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                store(to, _mm512_mul_ps(_mm512_permutexvar_ps(order, sums), lengths));
            }
            _ => debug_assert!(false, "one query vector or four"),
        }
    }

    /// The sums of the table entries that the bits name, four at a time, least significant first; for each token.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn of_words<const N: usize>(mut words: [__m512i; 4], tables: [&[[f32; 16]; SIGN_TABLES]; N]) -> [__m512; N] {
        let mut sums = [[_mm512_setzero_ps(); 4]; N];
        for shift in 0..8 {
            for (at, word) in words.iter_mut().enumerate() {
                for (tables, sums) in tables.iter().zip(&mut sums) {
                    // SAFETY: an array of 16 numbers.
                    let table = unsafe { _mm512_loadu_ps(tables[8 * at + shift].as_ptr()) };
                    // Higher bits of an index do not count.
                    sums[at] = _mm512_add_ps(sums[at], _mm512_permutexvar_ps(*word, table));
                }
                *word = _mm512_srli_epi32::<4>(*word);
            }
        }
        let mut out = [_mm512_setzero_ps(); N];
        for (out, &[a, b, c, d]) in out.iter_mut().zip(&sums) {
            *out = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
        }
        out
    }

    /// In every 128-bit lane: element `i` of vector `j` becomes element `j` of vector `i`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transposed([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (high_ab, high_cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(high_ab, high_cd),
            _mm512_unpackhi_epi64(high_ab, high_cd),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(to: &mut [f32; 16], x: __m512) {
        // SAFETY: an array of 16 numbers.
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
        fn are_sums_of_table_entries(
            signs in prop::collection::vec(any::<u8>(), 16 * SIGN_BYTES),
            lengths in prop::collection::vec(0.0_f32..8.0, 16),
            tables in prop::collection::vec(prop::array::uniform16(-1.0_f32..1.0), 4 * SIGN_TABLES),
            vectors in prop::sample::select(vec![1_usize, 4]),
        ) {
            let Some(sums) = sign_sums() else { return Ok(()) };
            let quads: Vec<&[u8; 4 * SIGN_BYTES]> = signs.as_chunks().0.iter().collect();
            let bits: Vec<u16> = lengths.iter().map(|x| f16::from_f32(*x).to_bits()).collect();
            let mut out = vec![[0.0; 16]; vectors];
            let (quads, bits) = (quads.try_into().unwrap(), bits.try_into().unwrap());
            sums(quads, &bits, &tables[..vectors * SIGN_TABLES], &mut out);
            for (token, signs) in signs.chunks(SIGN_BYTES).enumerate() {
                for (vector, tables) in tables.chunks(SIGN_TABLES).take(vectors).enumerate() {
                    let nibbles = signs.iter().flat_map(|byte| [byte & 15, byte >> 4]);
                    let sum: f32 = nibbles.zip(tables).map(|(nibble, table)| table[usize::from(nibble)]).sum();
                    let found = out.as_flattened()[token * vectors + vector];
                    let expected = sum * f16::from_bits(bits[token]).to_f32();
                    prop_assert!((found - expected).abs() < 1e-3, "{found} {expected}");
                }
            }
        }
    }
}
