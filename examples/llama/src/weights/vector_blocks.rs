//! Blocks of Q4_K and Q6_K weights for AVX-512: products of one block, and tiles of 16 unpacked blocks.
//!
//! Products of integers are exact, and one sum per block is scaled in f32. Sums of 16 bits do not overflow:
//!
//! - Q4_K: a product of two elements is at most `2 * 15 * 127`, of which 8 are added.
//! - Q6_K: it is at most `2 * 63 * 127`, of which 2 are added. Elements are 6 bits minus 32. The sums of the input,
//!   multiplied with the scales, make up for the 32.

use std::arch::x86_64::{__m256i, __m512, __m512i};

use half::f16;
use pulp::x86::V4;

/// Elements of a block, of weights and of the input.
pub(super) const BLOCK: usize = 256;
/// Outputs of a tile: the lanes of a vector.
pub(super) const LANES: usize = 16;
/// Groups of four elements in a block. A lane holds one group.
pub(super) const GROUPS: usize = BLOCK / 4;

/// 256 elements of the input: `x[i]` is about `scale * quants[i]`.
#[derive(Clone)]
pub(super) struct InputBlock {
    /// Bytes of four elements each.
    pub(super) quants: [i32; GROUPS],
    /// Sums of 16 neighbouring elements.
    pub(super) sums: [i16; 16],
    /// Sums of 32 neighbouring elements.
    pub(super) wide_sums: [i16; 8],
    pub(super) scale: f32,
}

impl InputBlock {
    pub(super) const ZERO: Self = Self { quants: [0; GROUPS], sums: [0; 16], wide_sums: [0; 8], scale: 0.0 };

    #[inline(always)]
    pub(super) fn new(x: &[f32]) -> Self {
        let mut maxima = [0.0_f32; LANES];
        for x in x.chunks_exact(LANES) {
            maxima.iter_mut().zip(x).for_each(|(max, x)| *max = max.max(x.abs()));
        }
        let largest = maxima.into_iter().fold(0.0, f32::max);
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let mut bytes = [0_i8; BLOCK];
        bytes.iter_mut().zip(x).for_each(|(byte, x)| *byte = (x * inverse).round_ties_even() as i32 as i8);
        let sum = |bytes: &[i8]| bytes.iter().map(|&byte| i16::from(byte)).sum::<i16>();
        let mut block = Self { quants: bytemuck::cast(bytes), scale: largest / 127.0, ..Self::ZERO };
        block.sums.iter_mut().zip(bytes.chunks_exact(16)).for_each(|(to, bytes)| *to = sum(bytes));
        block.wide_sums.iter_mut().zip(bytes.chunks_exact(32)).for_each(|(to, bytes)| *to = sum(bytes));
        block
    }
}

/// Sixteen unpacked blocks, one per lane.
pub(super) struct WeightTile {
    /// Weights without their signs.
    pub(super) quants: [[u8; 4 * LANES]; GROUPS],
    /// The scale of each group of elements, twice per lane. Q4_K uses 8 of them, Q6_K 16.
    pub(super) scales: [[[i16; 2]; LANES]; 16],
    /// Factors of neighbouring sums of the input. They make up for minima and for missing signs.
    pub(super) offsets: [[[i16; 2]; LANES]; 8],
    pub(super) scale: [f32; LANES],
    pub(super) offset_scale: [f32; LANES],
}

impl WeightTile {
    pub(super) const ZERO: Self = Self {
        quants: [[0; 4 * LANES]; GROUPS],
        scales: [[[0; 2]; LANES]; 16],
        offsets: [[[0; 2]; LANES]; 8],
        scale: [0.0; LANES],
        offset_scale: [0.0; LANES],
    };
}

/// A type of quantised blocks.
pub(super) trait Blocks: Copy + Send + Sync {
    /// Bytes of a block.
    const BYTES: usize;
    /// Elements that share a scale.
    const SCALED: usize;
    /// Groups whose products fit into a sum of 16 bits.
    const ADDED: usize;
    /// The constants of [`Blocks::multiply`].
    type Constants: Copy + Send + Sync;

    fn constants() -> Self::Constants;

    /// Unpacks a block to a lane of a tile.
    fn unpack(block: &[u8], lane: usize, tile: &mut WeightTile);

    /// Returns the input's sums as factors of a tile's offsets.
    fn sums(input: &InputBlock) -> [i32; 8];

    /// Returns partial sums of a block's product, added to `sums`.
    fn multiply(simd: V4, constants: &Self::Constants, block: &[u8], input: &InputBlock, sums: __m512) -> __m512;
}

#[derive(Clone, Copy)]
pub(super) struct Q4K;

#[derive(Clone, Copy)]
pub(super) struct Q6K;

/// Splits the packed scales of a Q4_K block. Returns 8 scales, then 8 minima.
#[inline(always)]
fn q4k_scales(bytes: &[u8]) -> [u32; 4] {
    let [a, b, c] = [0, 4, 8].map(|at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
    let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303);
    [a & six, c & four | (a >> 6 & two) << 4, b & six, c >> 4 & four | (b >> 6 & two) << 4]
}

/// Reads 64 bytes.
#[inline(always)]
fn load(bytes: &[u8]) -> __m512i {
    bytemuck::pod_read_unaligned(&bytes[..64])
}

/// Returns an index per 16-bit lane: lane `i` takes `of(i)`.
fn indices(of: impl Fn(usize) -> usize) -> __m512i {
    bytemuck::cast::<[i16; 32], _>(std::array::from_fn(|lane| of(lane) as i16))
}

/// Returns a block's f16 number at `at`.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Returns the f16 numbers in the low bytes of `numbers`, times `factor`.
#[inline(always)]
fn halves(simd: V4, numbers: [u16; 2], factor: f32) -> __m512 {
    let mut wide = [0_u16; 16];
    wide[..2].copy_from_slice(&numbers);
    let floats = simd.avx512f._mm512_cvtph_ps(bytemuck::cast::<_, __m256i>(wide));
    simd.avx512f._mm512_mul_ps(floats, simd.avx512f._mm512_set1_ps(factor))
}

/// The block is 2 f16 scales, 12 bytes of packed scales and minima, and 128 bytes of nibbles. Of each 32 bytes, the low
/// nibbles are 32 elements and the high nibbles the next 32.
impl Blocks for Q4K {
    const BYTES: usize = 144;
    const SCALED: usize = 32;
    const ADDED: usize = 8;
    /// The scale of each lane, for the four vectors of elements.
    type Constants = [__m512i; 4];

    fn constants() -> Self::Constants {
        // The low nibbles of 64 bytes are the elements that scales 0 and 2 belong to, the high ones those of 1 and 3.
        [0, 1, 4, 5].map(|first| indices(|lane| first + lane / 16 * 2))
    }

    #[inline(always)]
    fn unpack(block: &[u8], lane: usize, tile: &mut WeightTile) {
        tile.scale[lane] = half_at(block, 0);
        tile.offset_scale[lane] = half_at(block, 2);
        let packed: [u8; 16] = bytemuck::cast(q4k_scales(&block[4..16]));
        for part in 0..8 {
            tile.scales[part][lane] = [i16::from(packed[part]); 2];
            tile.offsets[part / 2][lane][part % 2] = i16::from(packed[8 + part]);
        }
        for (at, four) in block[16..144].as_chunks::<4>().0.iter().enumerate() {
            let (group, lanes) = (at / 8 * 16 + at % 8, 4 * lane..4 * lane + 4);
            tile.quants[group][lanes.clone()].copy_from_slice(&four.map(|byte| byte & 15));
            tile.quants[group + 8][lanes].copy_from_slice(&four.map(|byte| byte >> 4));
        }
    }

    #[inline(always)]
    fn sums(input: &InputBlock) -> [i32; 8] {
        let pairs: [i32; 4] = bytemuck::cast(input.wide_sums);
        [pairs[0], pairs[1], pairs[2], pairs[3], 0, 0, 0, 0]
    }

    #[inline(always)]
    fn multiply(simd: V4, constants: &Self::Constants, block: &[u8], input: &InputBlock, sums: __m512) -> __m512 {
        let (f, bw) = (simd.avx512f, simd.avx512bw);
        let [a, b, c, d] = q4k_scales(&block[4..16]);
        let scales = bw._mm512_cvtepu8_epi16(bytemuck::cast::<_, __m256i>([a, b, c, d, 0, 0, 0, 0]));
        let quants: &[u8; BLOCK] = bytemuck::cast_ref(&input.quants);
        let low = f._mm512_set1_epi32(0x0f0f_0f0f);
        let mut total = f._mm512_setzero_si512();
        for half in 0..2 {
            let bytes = load(&block[16 + 64 * half..]);
            let high = bw._mm512_srli_epi16::<4>(bytes);
            let nibbles = [f._mm512_and_si512(bytes, low), f._mm512_and_si512(high, low)];
            // Elements in natural order: the 64 of the first two scales, then those of the next two.
            let (x, y) = (load(&quants[128 * half..]), load(&quants[128 * half + 64..]));
            let inputs = [f._mm512_shuffle_i64x2::<0b01_00_01_00>(x, y), f._mm512_shuffle_i64x2::<0b11_10_11_10>(x, y)];
            for (at, (nibbles, input)) in nibbles.into_iter().zip(inputs).enumerate() {
                let scale = bw._mm512_permutexvar_epi16(constants[2 * half + at], scales);
                let products = bw._mm512_madd_epi16(bw._mm512_maddubs_epi16(nibbles, input), scale);
                total = f._mm512_add_epi32(total, products);
            }
        }
        let mut padded = [0_i16; 32];
        padded[8..16].copy_from_slice(&input.wide_sums);
        let minima = bw._mm512_madd_epi16(scales, bytemuck::cast::<[i16; 32], __m512i>(padded));
        let factors = halves(
            simd,
            [u16::from_le_bytes([block[0], block[1]]), u16::from_le_bytes([block[2], block[3]])],
            input.scale,
        );
        let scale = f._mm512_permutexvar_ps(f._mm512_setzero_si512(), factors);
        let offset = f._mm512_permutexvar_ps(f._mm512_set1_epi32(1), factors);
        let sums = f._mm512_fmadd_ps(f._mm512_cvtepi32_ps(total), scale, sums);
        f._mm512_fnmadd_ps(f._mm512_cvtepi32_ps(minima), offset, sums)
    }
}

/// The block is 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 scales and an f16 scale. Elements are 6 bits
/// minus 32.
impl Blocks for Q6K {
    const BYTES: usize = 210;
    const SCALED: usize = 16;
    const ADDED: usize = 2;
    /// The scale of each lane, for the four vectors of elements. Then the shifts of the bit pairs.
    type Constants = ([__m512i; 4], [__m512i; 2]);

    fn constants() -> Self::Constants {
        let scales = [0, 4, 8, 12].map(|first| indices(|lane| first + lane / 8));
        (scales, [0, 4].map(|first| indices(|lane| first + lane / 16 * 2)))
    }

    #[inline(always)]
    fn unpack(block: &[u8], lane: usize, tile: &mut WeightTile) {
        tile.scale[lane] = half_at(block, 208);
        tile.offset_scale[lane] = tile.scale[lane];
        for (part, &scale) in block[192..208].iter().enumerate() {
            let scale = i16::from(scale as i8);
            tile.scales[part][lane] = [scale; 2];
            tile.offsets[part / 2][lane][part % 2] = 32 * scale;
        }
        let (low, high) = block[..192].split_at(128);
        for half in 0..2 {
            for quarter in 0..4 {
                let nibbles = &low[64 * half + quarter % 2 * 32..][..32];
                let pairs = &high[32 * half..][..32];
                for (at, (nibbles, pairs)) in
                    nibbles.as_chunks::<4>().0.iter().zip(pairs.as_chunks::<4>().0).enumerate()
                {
                    let group = 32 * half + 8 * quarter + at;
                    let bytes: [u8; 4] = std::array::from_fn(|i| {
                        (nibbles[i] >> (quarter / 2 * 4)) & 15 | ((pairs[i] >> (2 * quarter)) & 3) << 4
                    });
                    tile.quants[group][4 * lane..4 * lane + 4].copy_from_slice(&bytes);
                }
            }
        }
    }

    #[inline(always)]
    fn sums(input: &InputBlock) -> [i32; 8] {
        bytemuck::cast(input.sums)
    }

    #[inline(always)]
    fn multiply(simd: V4, constants: &Self::Constants, block: &[u8], input: &InputBlock, sums: __m512) -> __m512 {
        let (f, bw) = (simd.avx512f, simd.avx512bw);
        let mut scales = [0_u8; 32];
        scales[..16].copy_from_slice(&block[192..208]);
        let scales = bw._mm512_cvtepi8_epi16(bytemuck::cast::<_, __m256i>(scales));
        let quants: &[u8; BLOCK] = bytemuck::cast_ref(&input.quants);
        let (low, two) = (f._mm512_set1_epi32(0x0f0f_0f0f), f._mm512_set1_epi32(0x0303_0303));
        let pairs = load(&block[128..]);
        let pairs = [
            f._mm512_shuffle_i64x2::<0b01_00_01_00>(pairs, pairs),
            f._mm512_shuffle_i64x2::<0b11_10_11_10>(pairs, pairs),
        ];
        let mut total = f._mm512_setzero_si512();
        for (half, pairs) in pairs.into_iter().enumerate() {
            let bytes = load(&block[64 * half..]);
            let nibbles = [bytes, bw._mm512_srli_epi16::<4>(bytes)];
            for (at, nibbles) in nibbles.into_iter().enumerate() {
                let pairs = f._mm512_and_si512(bw._mm512_srlv_epi16(pairs, constants.1[at]), two);
                let nibbles = f._mm512_and_si512(nibbles, low);
                let elements = f._mm512_or_si512(nibbles, bw._mm512_slli_epi16::<4>(pairs));
                let products = bw._mm512_maddubs_epi16(elements, load(&quants[128 * half + 64 * at..]));
                let scale = bw._mm512_permutexvar_epi16(constants.0[2 * half + at], scales);
                total = f._mm512_add_epi32(total, bw._mm512_madd_epi16(products, scale));
            }
        }
        let mut padded = [0_i16; 32];
        padded[..16].copy_from_slice(&input.sums);
        let offsets = bw._mm512_madd_epi16(scales, bytemuck::cast::<[i16; 32], __m512i>(padded));
        let total = f._mm512_sub_epi32(total, f._mm512_slli_epi32::<5>(offsets));
        let factor = halves(simd, [u16::from_le_bytes([block[208], block[209]]), 0], input.scale);
        let factor = f._mm512_permutexvar_ps(f._mm512_setzero_si512(), factor);
        f._mm512_fmadd_ps(f._mm512_cvtepi32_ps(total), factor, sums)
    }
}
