//! What prefill keeps of a prompt: the residual stream, and the keys and values of the layer that it computes.
//!
//! They grow with the prompt. Above [`MEMORY_BYTES`] each of them is kept in a file without a name, in the directory of
//! a cache that has one. The memory of prefill is then the same for prompts of any length. Reading gives back the bits
//! that were written: the residual stream is kept in f32, and keys and values are rounded to the cache's dtype before.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::kv::KvDType;

/// The most bytes that one kind of rows keeps in memory, if a directory for a file is known.
const MEMORY_BYTES: usize = 16 << 20;

/// A fixed number of elements, in memory or in a file.
pub(crate) enum PromptRows {
    /// In f32.
    Memory(Vec<f32>),
    /// In this type, little-endian.
    Spilled(File, KvDType),
}

impl PromptRows {
    /// Makes rows of `elements` zeros.
    ///
    /// # Errors
    /// Fails if the directory cannot hold a file.
    pub(crate) fn new(elements: usize, dtype: KvDType, dir: Option<&Path>) -> Result<Self> {
        match dir.filter(|_| elements > MEMORY_BYTES / size_of::<f32>()) {
            None => Ok(Self::Memory(vec![0.0; elements])),
            Some(dir) => {
                let what = || format!("cannot make a file for the rows of the prompt in {}", dir.display());
                let file = tempfile::tempfile_in(dir).with_context(what)?;
                file.set_len((elements * dtype.bytes()) as u64).with_context(what)?;
                Ok(Self::Spilled(file, dtype))
            }
        }
    }

    /// Replaces the elements from `first` on. They are values of the rows' type.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn write(&mut self, first: usize, rows: &[f32]) -> Result<()> {
        let (file, dtype) = match self {
            Self::Memory(all) => {
                all[first..first + rows.len()].copy_from_slice(rows);
                return Ok(());
            }
            Self::Spilled(file, dtype) => (file, *dtype),
        };
        let bytes: Vec<u8> = match dtype {
            KvDType::F32 => rows.iter().flat_map(|x| x.to_le_bytes()).collect(),
            KvDType::F16 => rows.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            KvDType::Bf16 => rows.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        };
        file.write_all_at(&bytes, (first * dtype.bytes()) as u64).context("cannot write rows of the prompt")
    }

    /// Reads the elements from `first` on.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub(crate) fn read(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let (file, dtype) = match self {
            Self::Memory(all) => {
                out.copy_from_slice(&all[first..first + out.len()]);
                return Ok(());
            }
            Self::Spilled(file, dtype) => (file, *dtype),
        };
        let mut bytes = vec![0; out.len() * dtype.bytes()];
        file.read_exact_at(&mut bytes, (first * dtype.bytes()) as u64).context("cannot read rows of the prompt")?;
        let halves = bytes.as_chunks::<2>().0.iter();
        match dtype {
            KvDType::F32 => {
                out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
            }
            KvDType::F16 => {
                let halves: Vec<f16> = halves.map(|bytes| f16::from_le_bytes(*bytes)).collect();
                halves.convert_to_f32_slice(out);
            }
            KvDType::Bf16 => {
                let halves: Vec<bf16> = halves.map(|bytes| bf16::from_le_bytes(*bytes)).collect();
                halves.convert_to_f32_slice(out);
            }
        }
        Ok(())
    }
}

/// The keys or the values of one layer, `[kv_heads, tokens, head_dim]`.
pub(crate) struct PromptPlane {
    rows: PromptRows,
    tokens: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl PromptPlane {
    /// Makes a plane of `tokens` tokens.
    ///
    /// # Errors
    /// Fails as [`PromptRows::new`] does.
    pub(crate) fn new(
        tokens: usize,
        (kv_heads, head_dim): (usize, usize),
        dtype: KvDType,
        dir: Option<&Path>,
    ) -> Result<Self> {
        let rows = PromptRows::new(tokens * kv_heads * head_dim, dtype, dir)?;
        Ok(Self { rows, tokens, kv_heads, head_dim })
    }

    /// Replaces tokens from `first` on by `[tokens, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn write(&mut self, first: usize, tokens: &[f32]) -> Result<()> {
        let mut own = Vec::with_capacity(tokens.len() / self.kv_heads.max(1));
        for head in 0..self.kv_heads {
            own.clear();
            for token in tokens.chunks_exact(self.kv_heads * self.head_dim) {
                own.extend_from_slice(&token[head * self.head_dim..][..self.head_dim]);
            }
            self.rows.write((head * self.tokens + first) * self.head_dim, &own)?;
        }
        Ok(())
    }

    /// Reads one head's rows of the tokens from `first` on, `[tokens, head_dim]`.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub(crate) fn read(&self, head: usize, first: usize, out: &mut [f32]) -> Result<()> {
        self.rows.read((head * self.tokens + first) * self.head_dim, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_in_a_file_give_back_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let (tokens, heads, dim) = (70_000, 2, 32);
        for dtype in [KvDType::F32, KvDType::F16, KvDType::Bf16] {
            let mut planes =
                [None, Some(dir.path())].map(|dir| PromptPlane::new(tokens, (heads, dim), dtype, dir).unwrap());
            assert!(matches!(planes[0].rows, PromptRows::Memory(_)));
            assert!(matches!(planes[1].rows, PromptRows::Spilled(..)));
            let mut random = fastrand::Rng::with_seed(7);
            for first in (0..tokens).step_by(10_000) {
                let mut rows: Vec<f32> = (0..10_000 * heads * dim).map(|_| 8.0 * random.f32() - 4.0).collect();
                dtype.round(&mut rows);
                planes.iter_mut().for_each(|plane| plane.write(first, &rows).unwrap());
            }
            for (head, first, count) in [(0, 0, 64), (1, 9_990, 64), (0, 69_936, 64), (1, 69_999, 1)] {
                let read = planes.each_ref().map(|plane| {
                    let mut out = vec![f32::NAN; count * dim];
                    plane.read(head, first, &mut out).unwrap();
                    out
                });
                assert_eq!(read[0], read[1], "{dtype:?}, head {head}, token {first}");
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the files have no name");
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        let missing = tempfile::tempdir().unwrap().path().join("missing");
        assert!(PromptRows::new(MEMORY_BYTES, KvDType::F32, Some(&missing)).is_err());
        assert!(PromptRows::new(8, KvDType::F32, Some(&missing)).is_ok(), "short prompts need no file");
    }
}
