//! A weight matrix `[rows, columns]`: f32 in memory, or other element types in mapped files.
//!
//! A mapped matrix takes no memory of its own. Its rows are converted to f32 when they are used, a block at a time.
//! Quantised rows are also multiplied as they are.

use std::ops::Range;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::blocks;
use super::product::{ResultColumns, StoredRows};
use super::stored::{StoredTensor, WeightDType};

/// Elements that one task converts.
const TASK_ELEMENTS: usize = 1 << 15;

/// The rows of one or several stored tensors, one after the other.
pub(crate) struct WeightMatrix {
    source: Source,
    rows: usize,
    columns: usize,
}

enum Source {
    /// `[rows, columns]` in f32.
    Memory(Tensor),
    /// Tensors of whole rows.
    Mapped(Vec<StoredTensor>),
}

impl WeightMatrix {
    /// Joins tensors of whole rows. They stay mapped unless all of them are f32. Rows of f32 are copied into memory,
    /// because candle can multiply them only from there, and a copy for every use would be slow.
    ///
    /// # Errors
    /// Fails if candle refuses the tensor.
    pub(super) fn new(parts: Vec<StoredTensor>, columns: usize) -> Result<Self> {
        let rows = parts.iter().map(|part| part.len() / columns).sum();
        let keep = parts.iter().any(|part| part.dtype() != WeightDType::F32);
        let matrix = Self { source: Source::Mapped(parts), rows, columns };
        if keep {
            return Ok(matrix);
        }
        let tensor = matrix.block(0..rows)?;
        Ok(Self { source: Source::Memory(tensor), ..matrix })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Returns whether every use converts the rows it needs.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.source, Source::Mapped(_))
    }

    /// Returns whether all rows are quantised, so that [`Self::multiply`] computes products.
    pub(crate) fn is_quantised(&self) -> bool {
        let quantised = |part: &StoredTensor| matches!(part.dtype(), WeightDType::Blocks(_));
        matches!(&self.source, Source::Mapped(parts) if parts.iter().all(quantised))
    }

    /// Multiplies rows of `x` with the matrix's rows `outputs`, without converting these. Returns `[rows, outputs]`.
    ///
    /// The rows of `x` are rounded to 8 bits per element.
    ///
    /// # Errors
    /// Fails if the matrix is not quantised, or if `x` has no whole rows.
    pub(crate) fn multiply(&self, x: &[f32], outputs: Range<usize>) -> Result<Vec<f32>> {
        let Source::Mapped(parts) = &self.source else { bail!("the matrix is not quantised") };
        let mut y = vec![0.0f32; x.len() / self.columns * outputs.len()];
        let mut part_begin = 0;
        for part in parts {
            let WeightDType::Blocks(kind) = part.dtype() else { bail!("a part of the matrix is not quantised") };
            let part_end = part_begin + part.len() / self.columns;
            let (from, to) = (outputs.start.max(part_begin), outputs.end.min(part_end));
            if from < to {
                let bytes = part.slice((from - part_begin) * self.columns, (to - from) * self.columns);
                let rows = StoredRows { kind, bytes, columns: self.columns };
                let first = from - outputs.start;
                blocks::multiply(rows, x, &mut ResultColumns { y: &mut y, width: outputs.len(), first })?;
            }
            part_begin = part_end;
        }
        Ok(y)
    }

    /// Returns whether [`Self::multiply`] costs less than a conversion for any number of rows.
    pub(crate) fn is_multiplied(&self) -> bool {
        let fast = |part: &StoredTensor| matches!(part.dtype(), WeightDType::Blocks(kind) if blocks::is_fast(kind));
        matches!(&self.source, Source::Mapped(parts) if parts.iter().all(fast))
    }

    /// Returns consecutive rows in f32, `[rows.len(), columns]`.
    ///
    /// # Errors
    /// Fails if candle refuses the tensor.
    pub(crate) fn block(&self, rows: Range<usize>) -> Result<Tensor> {
        let parts = match &self.source {
            Source::Memory(tensor) => return Ok(tensor.narrow(0, rows.start, rows.len())?),
            Source::Mapped(parts) => parts,
        };
        let mut block = vec![0.0f32; rows.len() * self.columns];
        let task_rows = (TASK_ELEMENTS / self.columns).max(1);
        let tasks = block.par_chunks_mut(task_rows * self.columns).enumerate();
        tasks.try_for_each(|(task, out)| self.convert(parts, rows.start + task * task_rows, out))?;
        Ok(Tensor::from_vec(block, (rows.len(), self.columns), &Device::Cpu)?)
    }

    /// Returns the rows `ids` in f32, `[ids.len(), columns]`.
    ///
    /// # Errors
    /// Fails if a row does not exist.
    pub(crate) fn gather(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let parts = match &self.source {
            Source::Memory(tensor) => {
                let ids = Tensor::from_slice(ids, ids.len(), &Device::Cpu)?;
                return Ok(tensor.index_select(&ids, 0)?.flatten_all()?.to_vec1()?);
            }
            Source::Mapped(parts) => parts,
        };
        anyhow::ensure!(ids.iter().all(|&id| (id as usize) < self.rows), "a row of {ids:?} is not below {}", self.rows);
        let mut out = vec![0.0f32; ids.len() * self.columns];
        for (out, &id) in out.chunks_exact_mut(self.columns).zip(ids) {
            self.convert(parts, id as usize, out)?;
        }
        Ok(out)
    }

    /// Converts the rows from `first` on that fit into `out`.
    fn convert(&self, parts: &[StoredTensor], first: usize, out: &mut [f32]) -> Result<()> {
        let (begin, end) = (first * self.columns, first * self.columns + out.len());
        let mut part_begin = 0;
        for part in parts {
            let part_end = part_begin + part.len();
            let (from, to) = (begin.max(part_begin), end.min(part_end));
            if from < to {
                part.read(from - part_begin, &mut out[from - begin..to - begin])?;
            }
            part_begin = part_end;
        }
        Ok(())
    }
}
