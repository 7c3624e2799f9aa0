//! Sums of table entries by code bytes for one query vector, sixteen tokens at a time: for selection, as
//! [`RowQuery`](super::RowQuery) is.
#![allow(unsafe_code)]

/// The tables of one code byte as two of 32 entries that a vector register pair holds each: the entry of a byte's value is that of
/// its low five bits plus that of what is left of it after a shift, of which the low five bits count.
#[derive(Clone, Debug)]
pub(crate) struct HalfTables {
    pub(crate) low: [f32; 32],
    pub(crate) high: [f32; 32],
    pub(crate) shift: u32,
}

/// Of the code bytes of tokens, `[tokens, tables]`, the sums of entries per token. Fast for four or eight bytes.
pub(crate) type CodeSums = fn(&[u8], &[HalfTables], &mut [f32]);

/// The fastest for this CPU; none where no vector registers hold a table.
pub(crate) fn code_sums() -> Option<CodeSums> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has what the function is compiled for.
            return Some(|codes, tables, out| unsafe { x86::sums(codes, tables, out) });
        }
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::HalfTables;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn sums(codes: &[u8], tables: &[HalfTables], out: &mut [f32]) {
        let bytes = tables.len().max(1);
        for (codes, out) in codes.chunks(16 * bytes).zip(out.chunks_mut(16)) {
            let mut sums = [_mm512_setzero_ps(); 2];
            for (at, tables) in tables.chunks(4).enumerate() {
                let mut words = words(codes, bytes, at);
                for tables in tables {
                    let high = _mm512_srl_epi32(words, _mm_cvtsi32_si128(tables.shift as i32));
                    // Higher bits of an index do not count.
                    sums[0] = _mm512_add_ps(sums[0], entries(&tables.low, words));
                    sums[1] = _mm512_add_ps(sums[1], entries(&tables.high, high));
                    words = _mm512_srli_epi32::<8>(words);
                }
            }
            let mut sum = [0.0; 16];
            // SAFETY: an array of 16 numbers.
            unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_add_ps(sums[0], sums[1])) };
            match out.first_chunk_mut::<16>() {
                Some(out) => *out = sum,
                None => out.copy_from_slice(&sum[..out.len()]),
            }
        }
    }

    /// Bytes `4 * at..4 * at + 4` of the codes of sixteen tokens, as far as there are any.
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
                // SAFETY: an array of 64 bytes.
                unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
            }
        }
    }

    /// 64 bytes, of which there are as many.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(codes: &[u8], from: usize) -> __m512i {
        match codes[from..].first_chunk::<64>() {
            // SAFETY: an array of 64 bytes; the load needs no alignment.
            Some(codes) => unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) },
            None => _mm512_setzero_si512(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn entries(table: &[f32; 32], index: __m512i) -> __m512 {
        // SAFETY: an array of 32 numbers.
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
        fn are_sums_of_table_entries(
            tokens in 0_usize..70, bytes in 1_usize..13,
            codes in prop::collection::vec(any::<u8>(), 70 * 13),
            entries in prop::collection::vec(-1.0_f32..1.0, 13 * 64),
            shifts in prop::collection::vec(3_u32..6, 13),
        ) {
            let Some(sums) = code_sums() else { return Ok(()) };
            // Bits of a byte that belong to the other half, or to the next byte, do not count.
            let table = |(entries, shift): (&[f32], &u32)| HalfTables {
                low: std::array::from_fn(|i| entries[i & ((1 << shift) - 1)]),
                high: std::array::from_fn(|i| entries[32 + (i & ((1 << (8 - shift)) - 1))]),
                shift: *shift,
            };
            let tables: Vec<HalfTables> = entries.chunks(64).zip(&shifts).take(bytes).map(table).collect();
            let mut out = vec![7.0; tokens];
            sums(&codes[..tokens * bytes], &tables, &mut out);
            for (code, found) in codes.chunks(bytes).zip(&out) {
                let entry = |(byte, tables): (&u8, &HalfTables)| {
                    tables.low[usize::from(byte & 31)] + tables.high[usize::from(byte >> tables.shift)]
                };
                let expected: f32 = code.iter().zip(&tables).map(entry).sum();
                prop_assert!((found - expected).abs() < 1e-4, "{found} {expected}");
            }
        }
    }
}
