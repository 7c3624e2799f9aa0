//! Vector kernels of attention and of the MLP. `pulp` picks the processor's vector width at run time.

use pulp::{Simd, WithSimd};

/// Vectors per panel of the dense kernels. A panel's accumulators for one block then fit into the registers.
pub(crate) const PANEL_VECTORS: usize = 3;

/// Computes `2^x` per lane with a relative error below 3e-7. It is 0 for x < -126, so that a masked score of minus
/// infinity has no weight.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let low = simd.splat_f32s(-126.0);
    let underflow = simd.less_than_f32s(x, low);
    let x = simd.max_f32s(x, low);
    // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits of the mantissa.
    let magic = simd.splat_f32s(12_582_912.0);
    let shifted = simd.add_f32s(x, magic);
    let fraction = simd.sub_f32s(x, simd.sub_f32s(shifted, magic));
    let mut p = simd.splat_f32s(1.540_353e-4);
    for c in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 0.240_226_5, std::f32::consts::LN_2, 1.0] {
        p = simd.mul_add_f32s(p, fraction, simd.splat_f32s(c));
    }
    let exponent = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let scaled = simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(p), exponent));
    simd.select_f32s(underflow, simd.splat_f32s(0.0), scaled)
}

/// Computes `out[b][row] = sum_k left[b * k_len + k] * panel[k][row]` for `B` rows of `left` and one panel.
#[inline(always)]
pub(crate) fn dot_block<S: Simd, const B: usize>(
    simd: S,
    left: &[f32],
    k_len: usize,
    panel: &[S::f32s],
    out: &mut [S::f32s],
) {
    let mut acc = [[simd.splat_f32s(0.0); PANEL_VECTORS]; B];
    let panel = &panel[..k_len * PANEL_VECTORS];
    let left = &left[..B * k_len];
    for k in 0..k_len {
        let v = [panel[k * PANEL_VECTORS], panel[k * PANEL_VECTORS + 1], panel[k * PANEL_VECTORS + 2]];
        for b in 0..B {
            let a = simd.splat_f32s(left[b * k_len + k]);
            for i in 0..PANEL_VECTORS {
                acc[b][i] = simd.mul_add_f32s(a, v[i], acc[b][i]);
            }
        }
    }
    for b in 0..B {
        for i in 0..PANEL_VECTORS {
            out[b * PANEL_VECTORS + i] = acc[b][i];
        }
    }
}

/// Computes `out[b][row] += sum_t right[t * stride + column + b] * panel[t][row]` for `B` columns of `right`.
#[inline(always)]
pub(crate) fn accumulate_block<S: Simd, const B: usize>(
    simd: S,
    right: &[f32],
    stride: usize,
    column: usize,
    panel: &[S::f32s],
    out: &mut [S::f32s],
) {
    let mut acc = [[simd.splat_f32s(0.0); PANEL_VECTORS]; B];
    for b in 0..B {
        for i in 0..PANEL_VECTORS {
            acc[b][i] = out[b * PANEL_VECTORS + i];
        }
    }
    for (v, row) in panel.chunks_exact(PANEL_VECTORS).zip(right.chunks_exact(stride)) {
        let row = &row[column..column + B];
        for b in 0..B {
            let a = simd.splat_f32s(row[b]);
            for i in 0..PANEL_VECTORS {
                acc[b][i] = simd.mul_add_f32s(a, v[i], acc[b][i]);
            }
        }
    }
    for b in 0..B {
        for i in 0..PANEL_VECTORS {
            out[b * PANEL_VECTORS + i] = acc[b][i];
        }
    }
}

/// Computes `scores[t] = keys[t] . query`. `keys` is `[tokens, stride]`, and each row begins with the head's elements.
pub(crate) struct Dots<'a> {
    pub(crate) query: &'a [f32],
    pub(crate) keys: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) scores: &'a mut [f32],
}

impl WithSimd for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (query, query_rest) = S::as_simd_f32s(self.query);
        for (score, row) in self.scores.iter_mut().zip(self.keys.chunks(self.stride)) {
            let (key, key_rest) = S::as_simd_f32s(&row[..self.query.len()]);
            let mut acc = simd.splat_f32s(0.0);
            for (&a, &b) in query.iter().zip(key) {
                acc = simd.mul_add_f32s(a, b, acc);
            }
            let mut sum = simd.reduce_sum_f32s(acc);
            for (a, b) in query_rest.iter().zip(key_rest) {
                sum += a * b;
            }
            *score = sum;
        }
    }
}

/// Computes `out += sum_t weights[t] * values[t]`. `values` is `[tokens, stride]`, and each row begins with the
/// head's elements.
pub(crate) struct WeightedSum<'a> {
    pub(crate) weights: &'a [f32],
    pub(crate) values: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) out: &'a mut [f32],
}

impl WithSimd for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let dim = self.out.len();
        let (out, out_rest) = S::as_mut_simd_f32s(self.out);
        for (&weight, row) in self.weights.iter().zip(self.values.chunks(self.stride)) {
            let (value, value_rest) = S::as_simd_f32s(&row[..dim]);
            let w = simd.splat_f32s(weight);
            for (o, &v) in out.iter_mut().zip(value) {
                *o = simd.mul_add_f32s(w, v, *o);
            }
            for (o, v) in out_rest.iter_mut().zip(value_rest) {
                *o += weight * v;
            }
        }
    }
}

/// Replaces base-2 scores with their softmax weights before the division, and returns the sum of the weights. The
/// maximum is subtracted first.
pub(crate) struct ExpScores<'a> {
    pub(crate) scores: &'a mut [f32],
}

impl WithSimd for ExpScores<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let max = self.scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (body, rest) = S::as_mut_simd_f32s(self.scores);
        let shift = simd.splat_f32s(max);
        let mut sums = simd.splat_f32s(0.0);
        for s in body {
            *s = exp2(simd, simd.sub_f32s(*s, shift));
            sums = simd.add_f32s(sums, *s);
        }
        let mut sum = simd.reduce_sum_f32s(sums);
        for s in rest {
            *s = (*s - max).exp2();
            sum += *s;
        }
        sum
    }
}

/// Computes `gate = silu(gate) * up`, element by element.
pub(crate) struct SiluMul<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl WithSimd for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (gate, gate_rest) = S::as_mut_simd_f32s(self.gate);
        let (up, up_rest) = S::as_simd_f32s(self.up);
        let one = simd.splat_f32s(1.0);
        // The exponent is limited to 126, so that the exponential stays finite. silu is almost 0 there.
        let limit = simd.splat_f32s(126.0);
        for (g, &u) in gate.iter_mut().zip(up) {
            let t = simd.min_f32s(simd.mul_f32s(*g, simd.splat_f32s(-std::f32::consts::LOG2_E)), limit);
            let silu = simd.div_f32s(*g, simd.add_f32s(one, exp2(simd, t)));
            *g = simd.mul_f32s(silu, u);
        }
        for (g, u) in gate_rest.iter_mut().zip(up_rest) {
            *g = *g / (1.0 + (-*g).exp()) * u;
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    /// Without a feature of `pulp`, loops would be compiled for the baseline, and each `mul_add` would be a call.
    #[test]
    fn processors_with_avx2_or_avx512_use_it() {
        let (arch, wide) = (pulp::Arch::new(), pulp::x86::V3::try_new().is_some());
        assert_eq!(matches!(arch, pulp::Arch::Scalar), !wide, "{arch:?}");
    }
}
