//! The vector types: one [`Vector`](super::vector::Vector) per instruction set, one line of intrinsics per operation.
//!
//! [`portable`] needs no instruction set. It is the fallback, and the reference that the others are tested against.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod portable;
