//! Sums of table entries by code bytes for one query vector, sixteen tokens at a time, for selection.
//!
//! 1. A code byte selects an entry of a table of 256. The caller splits each table into two of at most 32 entries whose
//!    sums it is ([`HalfPrecisionTables`]), because a pair of AVX-512 registers holds 32 entries.
//! 2. The code bytes of sixteen tokens are gathered into a register, four bytes per token at a time.
//! 3. Each byte indexes both tables. The entries of the low halves and of the high halves are added in two sums.
//!
//! Without AVX-512 the caller looks up the tables of 256 entries instead.

/// The two tables of one code byte. The entry of a byte is `low[byte & 31] + high[(byte >> shift) & 31]`.
#[derive(Clone, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has an instance"))]
pub(crate) struct HalfPrecisionTables {
    /// The entries by the low five bits.
    pub(crate) low: [f32; 32],
    /// The entries by the five bits from bit `shift` on.
    pub(crate) high: [f32; 32],
    /// The first bit that indexes `high`.
    pub(crate) shift: u32,
}

/// Writes, for code bytes `[tokens, tables]`, the sum of entries of each token. It is fast for four or eight tables.
pub(crate) type CodeSums = fn(&[u8], &[HalfPrecisionTables], &mut [f32]);

/// Returns the instance of this processor, or none without registers that hold a table.
pub(crate) fn code_sums() -> Option<CodeSums> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::dispatch::{FeatureSet, has};
        if has(FeatureSet::Avx512F) {
            // SAFETY: the processor has what the function is compiled for.
            return Some(|codes, tables, out| unsafe { x86::sums(codes, tables, out) });
        }
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::HalfPrecisionTables;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn sums(codes: &[u8], tables: &[HalfPrecisionTables], out: &mut [f32]) {
        let bytes = tables.len().max(1);
        for (codes, out) in codes.chunks(16 * bytes).zip(out.chunks_mut(16)) {
            let mut sums = [_mm512_setzero_ps(); 2];
            for (at, tables) in tables.chunks(4).enumerate() {
                let mut words = words(codes, bytes, at);
                for tables in tables {
                    let high = _mm512_srl_epi32(words, _mm_cvtsi32_si128(tables.shift as i32));
                    // The permutation ignores higher bits of an index.
                    sums[0] = _mm512_add_ps(sums[0], entries(&tables.low, words));
                    sums[1] = _mm512_add_ps(sums[1], entries(&tables.high, high));
                    words = _mm512_srli_epi32::<8>(words);
                }
            }
            let mut sum = [0.0; 16];
            // SAFETY: the array has 16 f32.
            unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_add_ps(sums[0], sums[1])) };
            match out.first_chunk_mut::<16>() {
                Some(out) => *out = sum,
                None => out.copy_from_slice(&sum[..out.len()]),
            }
        }
    }

    /// Returns bytes `4 * at..4 * at + 4` of the codes of sixteen tokens. Bytes and tokens beyond the end are zero.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn words(codes: &[u8], bytes: usize, at: usize) -> __m512i {
        match (bytes, codes.len()) {
            (4, 64) => load(codes, 0),
            (8, 128) => {
                let first = at as i32;
                let pairs = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                let pairs = _mm512_add_epi32(pairs, _mm512_set1_epi32(first));
                _mm512_permutex2var_epi32(load(codes, 0), pairs, load(codes, 64))
            }
            _ => {
                let mut words = [0_u32; 16];
                for (word, code) in words.iter_mut().zip(codes.chunks(bytes)) {
                    let of = code.get(4 * at..).unwrap_or_default();
                    *word = match of.first_chunk() {
                        Some(four) => u32::from_le_bytes(*four),
                        None => of.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte)),
                    };
                }
                // SAFETY: the array has 64 bytes.
                unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
            }
        }
    }

    /// Loads the 64 bytes from `from` on, which exist.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(codes: &[u8], from: usize) -> __m512i {
        match codes[from..].first_chunk::<64>() {
            // SAFETY: the array has 64 bytes, and the load needs no alignment.
            Some(codes) => unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) },
            None => _mm512_setzero_si512(),
        }
    }

    /// Returns the entries that the low five bits of each index name.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn entries(table: &[f32; 32], index: __m512i) -> __m512 {
        // SAFETY: the array has 32 f32.
        let (a, b) = unsafe { (_mm512_loadu_ps(table.as_ptr()), _mm512_loadu_ps(table.as_ptr().add(16))) };
        _mm512_permutex2var_ps(a, index, b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn code_sums_are_sums_of_table_entries(
            tokens in 0_usize..70, bytes in 1_usize..13,
            codes in prop::collection::vec(any::<u8>(), 70 * 13),
            entries in prop::collection::vec(-1.0_f32..1.0, 13 * 64),
            shifts in prop::collection::vec(3_u32..6, 13),
        ) {
            let Some(sums) = code_sums() else { return Ok(()) };
            // Bits that belong to the other table, or to the next byte, do not count.
            let table = |(entries, shift): (&[f32], &u32)| HalfPrecisionTables {
                low: std::array::from_fn(|i| entries[i & ((1 << shift) - 1)]),
                high: std::array::from_fn(|i| entries[32 + (i & ((1 << (8 - shift)) - 1))]),
                shift: *shift,
            };
            let tables: Vec<HalfPrecisionTables> = entries.chunks(64).zip(&shifts).take(bytes).map(table).collect();
            let mut out = vec![7.0; tokens];
            sums(&codes[..tokens * bytes], &tables, &mut out);
            for (code, found) in codes.chunks(bytes).zip(&out) {
                let entry = |(byte, tables): (&u8, &HalfPrecisionTables)| {
                    tables.low[usize::from(byte & 31)] + tables.high[usize::from(byte >> tables.shift)]
                };
                let expected: f32 = code.iter().zip(&tables).map(entry).sum();
                prop_assert!((found - expected).abs() < 1e-4, "{found} {expected}");
            }
        }
    }
}
