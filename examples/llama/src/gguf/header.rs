//! The header of a GGUF file: metadata and tensor descriptions, all checked against the length of the file.
//!
//! Layout of versions 2 and 3, little-endian (ggml's `docs/gguf.md`):
//!
//! 1. `GGUF`, the version, the number of tensors, the number of metadata entries.
//! 2. The metadata: names and values.
//! 3. Per tensor: name, dimensions (columns first), element type, offset in the data.
//! 4. The data, from the next multiple of `general.alignment` on.
//!
//! Invariants:
//! - A count in the file never decides an allocation. Entries are added one by one, and each takes bytes of the file.
//! - Every tensor's range is inside of the file, aligned, and disjoint from the others.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::GgmlDType;

use super::cursor::Cursor;
use super::kind::kind_of;
use super::value::{MetaList, MetaValue};

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// The alignment of tensors if the metadata has none.
pub(super) const ALIGNMENT: u64 = 32;
/// The largest alignment that is accepted.
const ALIGNMENT_MAX: u64 = 1 << 16;
const DIMENSIONS_MAX: u32 = 4;

/// The description of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// The element type.
    pub kind: GgmlDType,
    /// The shape with rows first, as `[rows, columns]`.
    pub shape: Vec<usize>,
    /// The tensor's bytes in the file.
    pub bytes: Range<usize>,
}

/// The metadata and the tensors of a file.
#[derive(Clone, Debug)]
pub struct GgufHeader<'a> {
    metadata: BTreeMap<&'a str, MetaValue<'a>>,
    tensors: BTreeMap<&'a str, TensorEntry>,
    data: usize,
}

impl<'a> GgufHeader<'a> {
    /// Reads the header at the beginning of a file's bytes.
    ///
    /// # Errors
    /// Fails if the bytes are not a complete GGUF file of version 2 or 3, or if a tensor has an unsupported type. The
    /// error names the byte, the metadata entry or the tensor.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut cursor = Cursor::new(bytes);
        ensure!(cursor.take(4).is_ok_and(|magic| magic == MAGIC), "byte 0: a GGUF file begins with \"GGUF\"");
        let version = cursor.u32()?;
        if (2..=3).contains(&version.swap_bytes()) {
            bail!("byte 4: the file is big-endian; only little-endian files are supported");
        }
        ensure!((2..=3).contains(&version), "byte 4: version {version} is not supported; 2 and 3 are");
        let (tensor_count, entry_count) = (cursor.u64()?, cursor.u64()?);
        let mut metadata = BTreeMap::new();
        for index in 0..entry_count {
            let name = name(&mut cursor).with_context(|| format!("metadata entry {index} of {entry_count}"))?;
            let value = MetaValue::read(&mut cursor).with_context(|| format!("metadata entry {name:?}"))?;
            ensure!(metadata.insert(name, value).is_none(), "metadata entry {name:?} is there twice");
        }
        let mut found = Vec::new();
        for index in 0..tensor_count {
            let name = name(&mut cursor).with_context(|| format!("tensor {index} of {tensor_count}"))?;
            let tensor = Described::read(&mut cursor).with_context(|| format!("tensor {name}"))?;
            found.push((name, tensor));
        }
        let alignment = match metadata.get("general.alignment") {
            Some(value) => value.count().context("general.alignment is not a count")?,
            None => ALIGNMENT,
        };
        ensure!(
            alignment.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&alignment),
            "general.alignment is {alignment}; it must be a power of 2 from 8 to {ALIGNMENT_MAX}"
        );
        let data = (cursor.position() as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, tensor) in found {
            let entry = tensor.place(data, alignment, bytes.len() as u64).with_context(|| format!("tensor {name}"))?;
            ensure!(tensors.insert(name, entry).is_none(), "tensor {name} is there twice");
        }
        check_disjoint(&tensors)?;
        Ok(Self { metadata, tensors, data: usize::try_from(data)?.min(bytes.len()) })
    }

    /// Returns the metadata by name.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<&'a str, MetaValue<'a>> {
        &self.metadata
    }

    /// Returns the tensors by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<&'a str, TensorEntry> {
        &self.tensors
    }

    /// Returns where the data begins: all bytes before it are the header.
    #[must_use]
    pub fn data_start(&self) -> usize {
        self.data
    }

    /// Returns a count of the metadata, or `None` if there is no such entry.
    ///
    /// # Errors
    /// Fails if the value is not an integer that is 0 or more.
    pub fn count(&self, name: &str) -> Result<Option<u64>> {
        let Some(value) = self.metadata.get(name) else { return Ok(None) };
        value.count().with_context(|| format!("metadata entry {name:?} is not a count")).map(Some)
    }

    /// Returns a number of the metadata, or `None` if there is no such entry.
    ///
    /// # Errors
    /// Fails if the value is not a finite number.
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.metadata.get(name) else { return Ok(None) };
        let number = value.number().filter(|number| number.is_finite());
        number.with_context(|| format!("metadata entry {name:?} is not a finite number")).map(Some)
    }

    /// Returns a text of the metadata, or `None` if there is no such entry.
    ///
    /// # Errors
    /// Fails if the value is not a text.
    pub fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(value) = self.metadata.get(name) else { return Ok(None) };
        value.text().with_context(|| format!("metadata entry {name:?} is not a text")).map(|text| Some(text.into()))
    }

    /// Returns a list of the metadata, or `None` if there is no such entry.
    ///
    /// # Errors
    /// Fails if the value is not a list.
    pub fn list(&self, name: &str) -> Result<Option<MetaList<'a>>> {
        match self.metadata.get(name) {
            None => Ok(None),
            Some(MetaValue::List(list)) => Ok(Some(*list)),
            Some(_) => bail!("metadata entry {name:?} is not a list"),
        }
    }
}

/// A tensor's description before its range is checked.
struct Described {
    kind: GgmlDType,
    /// Rows first.
    shape: Vec<usize>,
    offset: u64,
}

impl Described {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let dimensions = cursor.u32()?;
        ensure!(
            (1..=DIMENSIONS_MAX).contains(&dimensions),
            "{dimensions} dimensions; from 1 to {DIMENSIONS_MAX} are supported"
        );
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.insert(0, usize::try_from(cursor.u64()?)?);
        }
        let kind = kind_of(cursor.u32()?)?;
        Ok(Self { kind, shape, offset: cursor.u64()? })
    }

    /// Returns the tensor's range in a file of `total` bytes whose data begins at `data`.
    fn place(self, data: u64, alignment: u64, total: u64) -> Result<TensorEntry> {
        let Self { kind, shape, offset } = self;
        let (block, size) = (kind.block_size(), kind.type_size() as u64);
        let elements = shape.iter().try_fold(1_usize, |all, &n| all.checked_mul(n)).filter(|&all| all > 0);
        let elements = elements.with_context(|| format!("the shape {shape:?} has no elements, or too many"))?;
        let columns = shape[shape.len() - 1];
        ensure!(columns.is_multiple_of(block), "rows of {columns} elements are not whole blocks of {block} ({kind:?})");
        ensure!(offset.is_multiple_of(alignment), "the offset {offset} is not a multiple of {alignment}");
        let length = ((elements / block) as u64).checked_mul(size);
        let begin = data.checked_add(offset);
        let end = begin.zip(length).and_then(|(begin, length)| begin.checked_add(length));
        let (Some(begin), Some(end)) = (begin, end) else { bail!("the range from {offset} on does not fit 64 bits") };
        ensure!(end <= total, "bytes {begin} to {end} are needed, but the file ends at byte {total}");
        Ok(TensorEntry { kind, shape, bytes: begin as usize..end as usize })
    }
}

/// Checks that no byte belongs to two tensors.
fn check_disjoint(tensors: &BTreeMap<&str, TensorEntry>) -> Result<()> {
    let mut ranges: Vec<_> = tensors.iter().map(|(name, entry)| (entry.bytes.start, entry.bytes.end, name)).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((_, end, first), (begin, _, second)) = (pair[0], pair[1]);
        ensure!(end <= begin, "tensors {first} and {second} share bytes");
    }
    Ok(())
}

/// Reads a name, which must be UTF-8.
fn name<'a>(cursor: &mut Cursor<'a>) -> Result<&'a str> {
    let at = cursor.position();
    let bytes = cursor.text()?;
    std::str::from_utf8(bytes).with_context(|| format!("byte {at}: the name is not UTF-8"))
}
