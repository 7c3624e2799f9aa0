//! The CRC-64/NVME of a plane: its identity, then its bytes.
//!
//! Method of Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009),
//! with registers of 512 bits:
//!
//! 1. The identity has five words. Five independent products give the state after it.
//! 2. Four registers hold 256 bytes. Each step multiplies them by a power of x and adds the next 256 bytes.
//! 3. The registers are folded into 128 bits, and a Barrett reduction gives the state.
//! 4. The rest of the plane, less than 256 bytes, continues from that state in the format crate.
//!
//! The format crate computes the same checksum. It takes the identity and the bytes in two calls, each with a reduction
//! of its own, which costs a plane of 2 KiB as much as its bytes (ADR 0037).
//!
//! Bits are reflected: the lowest bit of a word is its highest power of x. The product of two reflected words, read as
//! 128 bits, is therefore the product of the polynomials times x.

use stratakv_format::{PayloadChecksum, PlaneIdentity};

/// Returns the checksum of `identity` and then `data`, like [`PayloadChecksum::compute`].
#[must_use]
pub fn plane_checksum(kind: PayloadChecksum, identity: &PlaneIdentity, data: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if kind == PayloadChecksum::Crc64Nvme
        && let Some(sum) = x86::crc64(identity, data)
    {
        return sum;
    }
    kind.compute(identity, data)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::PlaneIdentity;
    use crate::kernels::dispatch::{FeatureSet, has};
    use std::arch::x86_64::*;
    use stratakv_format::checksum::crc64_continue;
    use zerocopy::IntoBytes;

    /// Bytes of one step.
    const STEP: usize = 256;
    /// The polynomial of degree 64 without its highest term, reflected.
    const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
    /// Factors of the Barrett reduction. The first gives a quotient, and the second its product with the polynomial.
    const BARRETT: [u64; 2] = [inverse(), POLYNOMIAL << 1 | 1];
    /// Words of an identity.
    const IDENTITY_WORDS: usize = size_of::<PlaneIdentity>() / 8;

    /// Returns x to the power `n`, modulo the polynomial.
    const fn power(n: usize) -> u64 {
        let (mut word, mut i) = (1 << 63, 0);
        while i < n {
            word = (word >> 1) ^ ((word & 1) * POLYNOMIAL);
            i += 1;
        }
        word
    }

    /// Returns the word whose product with `POLYNOMIAL << 1 | 1` is 1 in the lowest 64 bits.
    const fn inverse() -> u64 {
        let factor = POLYNOMIAL << 1 | 1;
        let (mut product, mut inverse, mut i) = (factor, 1, 1);
        while i < 64 {
            if product >> i & 1 == 1 {
                inverse |= 1 << i;
                product ^= factor << i;
            }
            i += 1;
        }
        inverse
    }

    /// Returns the factors of the first and second word of 128 bits that move them by `bytes`.
    const fn shift(bytes: usize) -> [u64; 2] {
        [power(bytes * 8 + 63), power(bytes * 8 - 1)]
    }

    /// Returns the checksum, or `None` if the data is shorter than a step or the processor lacks the instructions.
    pub(super) fn crc64(identity: &PlaneIdentity, data: &[u8]) -> Option<u64> {
        let (steps, rest) = data.as_chunks::<STEP>();
        let (first, steps) = steps.split_first()?;
        if !has(FeatureSet::Avx512Clmul) {
            return None;
        }
        // SAFETY: the processor has the instructions.
        let state = unsafe { fold(identity, first, steps) };
        Some(if rest.is_empty() { !state } else { !crc64_continue(state, rest) })
    }

    /// Returns the state after the identity and all steps.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,pclmulqdq,vpclmulqdq,sse4.1")]
    fn fold(identity: &PlaneIdentity, first: &[u8; STEP], steps: &[[u8; STEP]]) -> u64 {
        const BY_STEP: [u64; 2] = shift(STEP);
        const BY_192: [u64; 2] = shift(192);
        const BY_128: [u64; 2] = shift(128);
        const BY_64: [u64; 2] = shift(64);
        let state = _mm_cvtsi64_si128(identity_state(identity) as i64);
        let [mut a, mut b, mut c, mut d] = load(first);
        a = _mm512_xor_si512(a, _mm512_zextsi128_si512(state));
        let by_step = in_all_lanes(BY_STEP);
        for step in steps {
            let next = load(step);
            a = move_and_add(a, by_step, next[0]);
            b = move_and_add(b, by_step, next[1]);
            c = move_and_add(c, by_step, next[2]);
            d = move_and_add(d, by_step, next[3]);
        }
        let a = move_and_add(a, in_all_lanes(BY_192), d);
        let b = move_and_add(b, in_all_lanes(BY_128), a);
        reduce_lanes(move_and_add(c, in_all_lanes(BY_64), b))
    }

    /// Returns the state after the identity. Word `i` is multiplied by x to the power of the bits from it to the end,
    /// and the last word is reduced as it is.
    #[inline]
    #[target_feature(enable = "pclmulqdq,sse4.1")]
    fn identity_state(identity: &PlaneIdentity) -> u64 {
        const FACTORS: [u64; 4] = [power(5 * 64 - 1), power(4 * 64 - 1), power(3 * 64 - 1), power(2 * 64 - 1)];
        const { assert!(IDENTITY_WORDS == FACTORS.len() + 1) };
        let mut words = [0; IDENTITY_WORDS];
        for (word, bytes) in words.iter_mut().zip(identity.as_bytes().as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        // The state begins as all ones.
        words[0] = !words[0];
        let mut sum = _mm_cvtsi64_si128(words[IDENTITY_WORDS - 1] as i64);
        for (word, factor) in words.iter().zip(FACTORS) {
            let product = _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(*word as i64), _mm_cvtsi64_si128(factor as i64));
            sum = _mm_xor_si128(sum, product);
        }
        barrett(sum)
    }

    /// Returns the four registers of a step.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(step: &[u8; STEP]) -> [__m512i; 4] {
        let at = step.as_ptr();
        // SAFETY: the four loads cover exactly the 256 bytes of the step. They need no alignment.
        unsafe {
            [
                _mm512_loadu_si512(at.cast()),
                _mm512_loadu_si512(at.add(64).cast()),
                _mm512_loadu_si512(at.add(128).cast()),
                _mm512_loadu_si512(at.add(192).cast()),
            ]
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn in_all_lanes([first, second]: [u64; 2]) -> __m512i {
        _mm512_broadcast_i32x4(_mm_set_epi64x(second as i64, first as i64))
    }

    /// Returns, for each 128 bits, `moved` times the power of x of `factors`, plus `added`.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn move_and_add(moved: __m512i, factors: __m512i, added: __m512i) -> __m512i {
        let first = _mm512_clmulepi64_epi128::<0x00>(moved, factors);
        let second = _mm512_clmulepi64_epi128::<0x11>(moved, factors);
        _mm512_ternarylogic_epi64::<0x96>(first, second, added)
    }

    /// Returns the state after the 64 bytes of a register.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512vl,pclmulqdq,vpclmulqdq,sse4.1")]
    fn reduce_lanes(lanes: __m512i) -> u64 {
        const BY_48: [u64; 2] = shift(48);
        const BY_32: [u64; 2] = shift(32);
        const BY_16: [u64; 2] = shift(16);
        const BY_8: u64 = power(8 * 8 + 63);
        const LAST_LANE: __mmask8 = 0b1100_0000;
        let factors = [BY_48, BY_32, BY_16, [0, 0]].map(|f| f.map(|word| word as i64));
        let [[a, b], [c, d], [e, f], [g, h]] = factors;
        let moved = move_and_add(lanes, _mm512_set_epi64(h, g, f, e, d, c, b, a), _mm512_setzero_si512());
        let moved = _mm512_mask_mov_epi64(moved, LAST_LANE, lanes);
        let half = _mm256_xor_si256(_mm512_castsi512_si256(moved), _mm512_extracti64x4_epi64::<1>(moved));
        let sum = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
        let first = _mm_clmulepi64_si128::<0>(sum, _mm_cvtsi64_si128(BY_8 as i64));
        barrett(_mm_xor_si128(first, _mm_srli_si128::<8>(sum)))
    }

    /// Returns a polynomial of degree below 128, modulo the polynomial of the checksum.
    #[inline]
    #[target_feature(enable = "pclmulqdq,sse4.1")]
    fn barrett(value: __m128i) -> u64 {
        let constants = _mm_set_epi64x(BARRETT[1] as i64, BARRETT[0] as i64);
        let quotient = _mm_clmulepi64_si128::<0x00>(value, constants);
        let product = _mm_clmulepi64_si128::<0x10>(quotient, constants);
        let sum = _mm_xor_si128(_mm_xor_si128(product, _mm_slli_si128::<8>(quotient)), value);
        _mm_extract_epi64::<1>(sum) as u64
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn factors_of_the_reduction_multiply_to_one() {
            let product = (0..64).filter(|i| BARRETT[0] >> i & 1 == 1).fold(0, |sum, i| sum ^ BARRETT[1] << i);
            assert_eq!(product, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stratakv_format::SequenceId;

    #[test]
    fn checksums_of_every_length_equal_those_of_the_format() {
        let bytes: Vec<u8> = (0..2100_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let identity = PlaneIdentity::new(u64::MAX - 7, SequenceId(91), 3, 17, 1 << 40, 64).with_plane(1);
        for kind in [PayloadChecksum::Crc64Nvme, PayloadChecksum::Crc32] {
            for (length, start) in (0..2049).zip((0..51).cycle()) {
                let data = &bytes[start..start + length];
                assert_eq!(plane_checksum(kind, &identity, data), kind.compute(&identity, data), "{length} at {start}");
            }
        }
    }

    proptest! {
        #[test]
        fn checksums_of_any_plane_equal_those_of_the_format(
            data in prop::collection::vec(any::<u8>(), 0..20_000),
            (nonce, sequence, token) in any::<(u64, u64, u64)>(),
            (tokens, layer, kind, plane) in any::<(u32, u16, u16, u16)>(),
        ) {
            let identity = PlaneIdentity::new(nonce, SequenceId(sequence), kind, layer, token, tokens);
            let identity = identity.with_plane(plane);
            let expected = PayloadChecksum::Crc64Nvme.compute(&identity, &data);
            prop_assert_eq!(plane_checksum(PayloadChecksum::Crc64Nvme, &identity, &data), expected);
        }
    }
}
