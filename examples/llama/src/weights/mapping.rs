//! Maps a weight file into memory and names the blocks of its tensors: the one place of this crate with `unsafe` code.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::GgmlType;
use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
};
use memmap2::Mmap;

/// Maps a regular file read-only. Its pages are read when they are first used, and the kernel may drop them again.
///
/// The file must not be changed while it is mapped. If another process truncates it, reading past its new end ends
/// this process with SIGBUS.
///
/// # Errors
/// Fails if the file cannot be opened or mapped, or if it is not a regular file.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let place = || format!("cannot read weights from {}", path.display());
    // Opening a pipe would wait for its writer, so the kind of the file is checked first.
    let regular = std::fs::metadata(path).with_context(place)?.is_file();
    ensure!(regular, "{}: it is not a regular file", place());
    let file = File::open(path).with_context(place)?;
    // SAFETY: the mapping is read-only and nothing in this process writes to the file. If another process writes to it,
    // the bytes change but every byte pattern is a valid `u8`. The header is parsed once, and all later reads use the
    // ranges checked then, so changed bytes give wrong weights and never a read outside of the mapping.
    #[expect(unsafe_code, reason = "mapping a file is unsafe in Rust, because other processes may change the file")]
    let mapping = unsafe { Mmap::map(&file) };
    mapping.with_context(place)
}

mod sealed {
    /// Types for which [`blocks`](super::blocks) is sound.
    pub(crate) trait PlainBytes {}
}

/// A block of quantised weights whose every byte pattern is a value.
pub(super) trait WeightBlock: GgmlType + sealed::PlainBytes {}

macro_rules! weight_blocks {
    ($($block:ty),*) => {
        $(
            impl sealed::PlainBytes for $block {}
            impl WeightBlock for $block {}
            // Two bytes is the alignment of the f16 scale, and a block without padding is as long as its fields.
            const _: () = assert!(align_of::<$block>() <= 2);
        )*
    };
}

// candle declares these types `repr(C)`, with fields of f16, u8 and i8 alone. It asserts that their sizes are the sums
// of their fields, so that they have no padding.
weight_blocks!(BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K);

/// Returns bytes as blocks, without a copy.
///
/// # Errors
/// Fails if the bytes are not whole blocks, or if they begin at an address that is not aligned.
pub(super) fn blocks<T: WeightBlock>(bytes: &[u8]) -> Result<&[T]> {
    // SAFETY: `WeightBlock` is sealed. Its types consist of integers and of f16. They have no padding and take every
    // byte pattern. `align_to` gives the middle part only where address and length suit the type.
    #[expect(unsafe_code, reason = "candle's block types do not implement a trait for safe conversions")]
    let (before, blocks, after) = unsafe { bytes.align_to::<T>() };
    ensure!(
        before.is_empty() && after.is_empty(),
        "{} bytes are not whole aligned blocks of {:?}",
        bytes.len(),
        T::DTYPE
    );
    Ok(blocks)
}
