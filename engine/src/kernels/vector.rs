//! [`Vector`]: the vector operations that the kernels are written over.
//!
//! Each instruction set of [`isa`](super::isa) implements the trait. A kernel is a generic function over it, marked
//! `inline(always)`, so that its code is compiled inside a `target_feature` function of that instruction set.

/// Vector operations of one instruction set, on f32 lanes.
///
/// # Safety
/// Implementors: `LANES` divides [`PAD`](super::plane::PAD) and is the number of f32 in `V`. Loads and stores access
/// exactly `LANES` elements from the pointer on, at any alignment.
///
/// Callers of every method: the processor has the instruction set, and the pointer is valid for `LANES` elements.
pub(super) unsafe trait Vector: Copy {
    /// A register.
    type V: Copy;
    /// Lanes of a register.
    const LANES: usize;
    /// True if the processor has 32 vector registers. Blocks then have 16 accumulators. Otherwise it has 16 registers,
    /// and blocks have 8 accumulators.
    const WIDE: bool;

    /// Returns `x` in every lane.
    unsafe fn splat(x: f32) -> Self::V;
    /// Loads f32 elements.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Loads f16 elements and widens them.
    unsafe fn load_f16(from: *const u8) -> Self::V;
    /// Loads bf16 elements and widens them.
    unsafe fn load_bf16(from: *const u8) -> Self::V;
    /// Loads signed bytes and widens them.
    unsafe fn load_i8(from: *const u8) -> Self::V;
    /// Stores f32 elements.
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Returns `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a - b`.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// Returns the larger lane of `a` and `b`.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns the sum of the lanes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has an instance of `dot`"))]
    unsafe fn sum(v: Self::V) -> f32;
    /// Returns, for each of four registers, the sum of its lanes.
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4];
    /// Returns, for each of sixteen registers, the sum of its lanes.
    #[inline(always)]
    unsafe fn sum16([a, b, c, d]: [[Self::V; 4]; 4]) -> [[f32; 4]; 4] {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { [Self::sum4(a), Self::sum4(b), Self::sum4(c), Self::sum4(d)] }
    }
    /// Returns whether any lane is NaN.
    unsafe fn any_nan(v: Self::V) -> bool;
    /// Adds the integer in the low bits of `n` to the exponent of `v`.
    unsafe fn add_exponent(v: Self::V, n: Self::V) -> Self::V;
    /// Returns `v` where `x >= limit`, else 0.
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// Hints that the cache line at `at` is needed soon. Any address is allowed. The target is the L2 cache, because it
    /// measured faster than L1 on Zen 4.
    unsafe fn prefetch(at: *const u8);
}
