//! Plain loops, compiled once more for the widest vectors of the processor they run on; and memory asked for ahead of its use.

/// `fn name(arguments) -> result = body;` makes a function that runs `body`, which takes the same arguments, as compiled for
/// the widest vectors that this processor has. `body` and the functions it calls in its loops must be `#[inline(always)]`: a
/// function that is merely called is compiled without them, a closure that holds the loops too. Results do not depend on the
/// width, for operations are neither reordered nor contracted.
macro_rules! widest {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? = $body:path;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[allow(unsafe_code, reason = "calls what was compiled for instructions that the processor has")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,f16c")]
                fn avx512($($arg: $type),*) $(-> $out)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,f16c")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    $body($($arg),*)
                }
                match $crate::simd::width() {
                    // SAFETY: the processor has all of these instructions.
                    $crate::simd::Width::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Width::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Width::Baseline => {}
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use widest;

/// What a processor has, of what [`widest`] compiles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg(target_arch = "x86_64")]
pub(crate) enum Width {
    Baseline,
    Avx2,
    Avx512,
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn width() -> Width {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (false, _) => Width::Baseline,
        (true, false) => Width::Avx2,
        (true, true) => Width::Avx512,
    }
}

/// Asks for the cache line that `value` begins in. Where many values are needed, one after the other, from memory that no cache
/// holds, each would otherwise be waited for.
#[inline(always)]
pub(crate) fn near<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "a prefetch is an intrinsic")]
    // SAFETY: a prefetch reads nothing and changes nothing, wherever it points.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
