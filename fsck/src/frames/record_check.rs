//! Landmarks and signs, computed from keys and compared with stored records (SPEC.md chapter 11).
//!
//! A writer computes both in binary32, in an order that the format does not fix. Values are therefore computed in
//! binary64 here, and compared within the rounding of a writer.

use crate::planes::element;
use half::f16;
use stratakv_format::DType;
use stratakv_format::frame::sign_dims;
use stratakv_format::layout::{LayerGeometry, Layout};

/// The relative error of a sum that a writer computes in binary32: that of 256 roundings.
const SUM_ERROR: f64 = 1.6e-5;
/// The relative error of a number rounded to f16, with the error of the sum before it.
const F16_ERROR: f64 = 1.0 / 1024.0;
/// The smallest positive f16.
const F16_STEP: f64 = 5.97e-8;
const F16_MAX: f64 = 65504.0;
/// Keys above this length overflow in binary32, so that their summaries are not compared.
const LENGTH_MAX: f64 = 1e15;
/// Products of squared lengths below this value underflow in binary32.
const SQUARES_MIN: f64 = 1e-30;

/// Returns the rows `[G][key_dim]` of each head, as binary64.
fn heads(keys: &[u8], layer: &LayerGeometry, layout: &Layout) -> Vec<Vec<Vec<f64>>> {
    let (dim, tokens) = (usize::from(layer.key_dim), usize::from(layout.group_tokens));
    let at = |nth: usize| f64::from(element(layout.dtype, keys, nth));
    let row = |start: usize| (start..start + dim).map(at).collect();
    let head = |head: usize| (0..tokens).map(|token| row((head * tokens + token) * dim)).collect();
    (0..usize::from(layer.kv_heads)).map(head).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn length(row: &[f64]) -> f64 {
    dot(row, row).sqrt()
}

/// Returns whether a key overflows in binary32, or is not finite.
fn is_too_long(length: f64) -> bool {
    length > LENGTH_MAX || length.is_nan()
}

/// Returns whether the f16 at `stored` is `value` clamped and rounded, where a writer's sum may differ by `error`.
fn is_rounded(stored: &[u8], value: f64, error: f64) -> bool {
    let stored = f16::from_le_bytes([stored[0], stored[1]]).to_f64().clamp(-F16_MAX, F16_MAX);
    let value = value.clamp(-F16_MAX, F16_MAX);
    (stored - value).abs() <= value.abs() * F16_ERROR + F16_STEP + error
}

/// Returns whether a record is the landmark of keys `[kv_heads, G, key_dim]`: their mean, and the lowest cosine between
/// a head of a key and the same head of the mean.
pub(super) fn is_landmark(record: &[u8], keys: &[u8], layer: &LayerGeometry, layout: &Layout) -> bool {
    let heads = heads(keys, layer, layout);
    if heads.iter().flatten().any(|key| is_too_long(length(key))) {
        return true;
    }
    let (means, lowest) = record.split_at(record.len() - 4);
    // The interval of the lowest cosine that a writer may have computed.
    let (mut least, mut most) = (1.0_f64, 1.0_f64);
    for (head, stored) in heads.iter().zip(means.chunks_exact(2 * usize::from(layer.key_dim))) {
        let longest = head.iter().map(|key| length(key)).fold(0.0, f64::max);
        let sum = |at: usize| head.iter().map(|key| key[at]).sum::<f64>();
        let mean: Vec<f64> = (0..usize::from(layer.key_dim)).map(|at| sum(at) / head.len() as f64).collect();
        let is_mean = |(stored, mean): (&[u8], &f64)| is_rounded(stored, *mean, longest * SUM_ERROR);
        if !stored.chunks_exact(2).zip(&mean).all(is_mean) {
            return false;
        }
        for key in head {
            let squares = dot(key, key) * dot(&mean, &mean);
            let is_certain = squares > SQUARES_MIN && dot(key, key) > SQUARES_MIN && dot(&mean, &mean) > SQUARES_MIN;
            let (cosine, error) = match is_certain {
                true => (dot(key, &mean) / squares.sqrt(), 4.0 * SUM_ERROR * (1.0 + longest / length(&mean))),
                false => (0.0, f64::INFINITY),
            };
            (least, most) = (least.min(cosine - error), most.min(cosine + error));
        }
    }
    let lowest = f64::from(element(DType::F32, lowest, 0));
    least <= lowest && lowest <= most
}

/// Rotates a row whose length is a power of two.
fn rotate(row: &mut [f64]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for x in row.iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if state >> 40 & 1 == 1 {
            *x = -*x;
        }
    }
    let mut half = 1;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            low.iter_mut().zip(high).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        half *= 2;
    }
    let scale = (row.len() as f64).sqrt();
    row.iter_mut().for_each(|x| *x /= scale);
}

/// Returns whether a record holds the signs and lengths of keys `[kv_heads, G, key_dim]` after their rotation.
pub(super) fn is_signs(record: &[u8], keys: &[u8], layer: &LayerGeometry, layout: &Layout) -> bool {
    let dims = sign_dims(usize::from(layer.key_dim));
    let keys = heads(keys, layer, layout).into_iter().flatten();
    let count = usize::from(layer.kv_heads) * usize::from(layout.group_tokens);
    let (signs, lengths) = record.split_at(count * dims / 8);
    let mut stored = signs.chunks_exact(dims / 8).zip(lengths.chunks_exact(2));
    keys.zip(&mut stored).all(|(mut key, (signs, stored))| {
        let length = length(&key);
        if is_too_long(length) {
            return true;
        }
        key.resize(dims, 0.0);
        rotate(&mut key);
        let is_sign = |(at, x): (usize, &f64)| {
            let is_set = signs[at / 8] >> (at % 8) & 1 == 1;
            x.abs() <= length * SUM_ERROR || is_set == (*x > 0.0)
        };
        is_rounded(stored, length, 0.0) && key.iter().enumerate().all(is_sign)
    })
}
