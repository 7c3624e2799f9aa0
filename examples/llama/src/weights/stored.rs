//! One tensor of a mapped safetensors file, read as f32.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;
use memmap2::Mmap;

/// Elements that are converted from f16 at a time, through a buffer on the stack.
const F16_BLOCK: usize = 512;

/// The element type of a stored weight. Reading it as f32 is exact for all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightDType {
    F32,
    F16,
    Bf16,
}

impl WeightDType {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
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
        self.bytes.len() / self.dtype.bytes()
    }

    /// Converts the elements `first..first + out.len()` to f32.
    pub(crate) fn read(&self, first: usize, out: &mut [f32]) {
        let size = self.dtype.bytes();
        let bytes = &self.file[self.bytes.clone()][first * size..][..out.len() * size];
        match self.dtype {
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
    }
}
