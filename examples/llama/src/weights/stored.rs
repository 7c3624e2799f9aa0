//! One tensor of a mapped file, read as f32.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use candle_core::quantized::GgmlDType;
use half::f16;
use half::slice::HalfFloatSliceExt;
use memmap2::Mmap;

use super::blocks;

/// Elements that are converted from f16 at a time, through a buffer on the stack.
const F16_BLOCK: usize = 512;

/// The element type of a stored weight. Reading it as f32 is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightDType {
    F32,
    F16,
    Bf16,
    /// Blocks of quantised elements. The tensor begins at an even address.
    Blocks(GgmlDType),
}

impl WeightDType {
    /// Returns the bytes of a number of elements, which are whole blocks.
    pub(crate) fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => 4 * elements,
            Self::F16 | Self::Bf16 => 2 * elements,
            Self::Blocks(kind) => elements / kind.block_size() * kind.type_size(),
        }
    }

    /// Returns the elements in a number of bytes.
    fn elements(self, bytes: usize) -> usize {
        match self {
            Self::F32 => bytes / 4,
            Self::F16 | Self::Bf16 => bytes / 2,
            Self::Blocks(kind) => bytes / kind.type_size() * kind.block_size(),
        }
    }
}

/// A range of a mapped file that holds the little-endian elements of one tensor.
#[derive(Clone)]
pub(crate) struct StoredTensor {
    file: Arc<Mmap>,
    bytes: Range<usize>,
    dtype: WeightDType,
}

impl StoredTensor {
    /// Names the tensor in `bytes` of `file`. The range must be inside of the file.
    pub(super) fn new(file: Arc<Mmap>, bytes: Range<usize>, dtype: WeightDType) -> Self {
        Self { file, bytes, dtype }
    }

    pub(crate) fn dtype(&self) -> WeightDType {
        self.dtype
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.dtype.elements(self.bytes.len())
    }

    /// Returns the bytes of the elements `first..first + count`, which are whole blocks.
    pub(super) fn slice(&self, first: usize, count: usize) -> &[u8] {
        &self.file[self.bytes.clone()][self.dtype.bytes(first)..][..self.dtype.bytes(count)]
    }

    /// Converts the elements `first..first + out.len()` to f32. They are whole blocks.
    ///
    /// # Errors
    /// Fails if quantised elements are not whole blocks.
    pub(crate) fn read(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let bytes = self.slice(first, out.len());
        match self.dtype {
            WeightDType::Blocks(kind) => return blocks::widen(kind, bytes, out),
            WeightDType::F32 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
            // The tensor may start at an odd address: elements are assembled from bytes.
            WeightDType::F16 => {
                let mut block = [f16::ZERO; F16_BLOCK];
                for (out, bytes) in out.chunks_mut(F16_BLOCK).zip(bytes.chunks(2 * F16_BLOCK)) {
                    let block = &mut block[..out.len()];
                    for (half, bytes) in block.iter_mut().zip(bytes.as_chunks::<2>().0) {
                        *half = f16::from_le_bytes(*bytes);
                    }
                    block.convert_to_f32_slice(out);
                }
            }
            // bfloat16 is the upper half of an f32.
            WeightDType::Bf16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
        }
        Ok(())
    }
}
