//! Asks the processor which instruction sets it has. No other file asks.
//!
//! Two kinds of kernel depend on the answer:
//! 1. Kernels written with intrinsics name a [`FeatureSet`]. [`has`] says whether the processor has all of it.
//! 2. Plain loops are wrapped by [`multiversion!`], which compiles them three times and runs the widest version.
//!
//! Invariant: each `target_feature` attribute of this module enables exactly the extensions of one [`FeatureSet`] or
//! one [`VectorWidth`]. A function with such an attribute is called only after [`has`] or [`vector_width`] named that
//! set.

/// The extensions that a kernel with intrinsics is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) enum FeatureSet {
    /// `avx2,fma,f16c`.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// `avx512f,avx2,fma,f16c`.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// `avx512f`.
    #[cfg(target_arch = "x86_64")]
    Avx512F,
    /// `avx512f,avx512bw`.
    #[cfg(target_arch = "x86_64")]
    Avx512Bytes,
    /// `avx512f,avx512dq,avx512bf16`.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// `avx512f,avx512dq,avx512vl,pclmulqdq,vpclmulqdq,sse4.1`.
    #[cfg(target_arch = "x86_64")]
    Avx512Clmul,
    /// `avx512f,avx512vnni`.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// `avx512f,avx512vpopcntdq`.
    #[cfg(target_arch = "x86_64")]
    Avx512Popcount,
    /// `neon`.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// Returns whether the processor has every extension of `set`.
#[cfg(target_arch = "x86_64")]
pub(super) fn has(set: FeatureSet) -> bool {
    let avx512f = || is_x86_feature_detected!("avx512f");
    let avx2 =
        || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    match set {
        FeatureSet::Avx2 => avx2(),
        FeatureSet::Avx512 => avx512f() && avx2(),
        FeatureSet::Avx512F => avx512f(),
        FeatureSet::Avx512Bytes => avx512f() && is_x86_feature_detected!("avx512bw"),
        FeatureSet::Avx512Bf16 => {
            avx512f() && is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512bf16")
        }
        FeatureSet::Avx512Clmul => {
            avx512f()
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("pclmulqdq")
                && is_x86_feature_detected!("vpclmulqdq")
                && is_x86_feature_detected!("sse4.1")
        }
        FeatureSet::Avx512Vnni => avx512f() && is_x86_feature_detected!("avx512vnni"),
        FeatureSet::Avx512Popcount => avx512f() && is_x86_feature_detected!("avx512vpopcntdq"),
    }
}

/// Returns whether the processor has every extension of `set`.
#[cfg(target_arch = "aarch64")]
pub(super) fn has(set: FeatureSet) -> bool {
    match set {
        FeatureSet::Neon => std::arch::is_aarch64_feature_detected!("neon"),
    }
}

/// The version of a [`multiversion!`] function that the processor runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg(target_arch = "x86_64")]
pub(crate) enum VectorWidth {
    /// The instructions that every processor of this architecture has.
    Baseline,
    /// `avx2,f16c`.
    Avx2,
    /// `avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,f16c`.
    Avx512,
}

/// Returns the widest version that the processor can run.
#[cfg(target_arch = "x86_64")]
pub(crate) fn vector_width() -> VectorWidth {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (false, _) => VectorWidth::Baseline,
        (true, false) => VectorWidth::Avx2,
        (true, true) => VectorWidth::Avx512,
    }
}

/// Makes a function that runs a plain loop compiled for the widest vectors of the processor.
///
/// `fn name(arguments) -> result = body;` defines `name`, which calls the function `body` with the same arguments. All
/// versions give the same bits, because the compiler neither reorders nor contracts floating-point operations.
///
/// `body`, and every function that it calls in its loops, must be `#[inline(always)]`. A function that stays a call is
/// compiled for the baseline. A closure that contains a loop has the same defect.
///
/// The crate `multiversion` generates the same dispatch. This macro stays, because it reuses the detection above and
/// needs no procedural macro.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? = $body:path;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[allow(unsafe_code, reason = "calls a version for instructions that the processor has")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,f16c")]
                fn avx512($($arg: $type),*) $(-> $out)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,f16c")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    $body($($arg),*)
                }
                match $crate::kernels::dispatch::vector_width() {
                    // SAFETY: the processor has all of these extensions.
                    $crate::kernels::dispatch::VectorWidth::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::kernels::dispatch::VectorWidth::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::kernels::dispatch::VectorWidth::Baseline => {}
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use multiversion;
