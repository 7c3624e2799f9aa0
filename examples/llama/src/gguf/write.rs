//! Writes GGUF files, version 3.

use std::io::Write;

use anyhow::{Result, ensure};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use super::header::{ALIGNMENT, MAGIC};
use super::kind::number_and_name;

const VERSION: u32 = 3;

/// A value of the metadata to write.
#[derive(Clone, Debug, PartialEq)]
pub enum NewValue {
    /// 32 bits without sign.
    Count(u32),
    /// A number in f32.
    Number(f32),
    /// A truth value.
    Flag(bool),
    /// A text.
    Text(String),
    /// A list of truth values.
    Flags(Vec<bool>),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of numbers in f32.
    Numbers(Vec<f32>),
    /// A list of counts of 32 bits.
    Counts(Vec<u32>),
}

/// A tensor to write.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTensor {
    /// The name.
    pub name: String,
    /// The shape with rows first.
    pub shape: Vec<usize>,
    /// The element type.
    pub kind: GgmlDType,
}

impl NewTensor {
    /// Returns the bytes of the tensor's data.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() / self.kind.block_size() * self.kind.type_size()
    }
}

impl NewValue {
    fn put(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, kind: u32, count: usize| {
            out.extend(9_u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((count as u64).to_le_bytes());
        };
        match self {
            Self::Count(n) => out.extend([4_u32.to_le_bytes(), n.to_le_bytes()].concat()),
            Self::Number(x) => out.extend([6_u32.to_le_bytes(), x.to_le_bytes()].concat()),
            Self::Flag(on) => {
                out.extend(7_u32.to_le_bytes());
                out.push(u8::from(*on));
            }
            Self::Text(text) => {
                out.extend(8_u32.to_le_bytes());
                put_text(text, out);
            }
            Self::Flags(flags) => {
                list(out, 7, flags.len());
                out.extend(flags.iter().map(|on| u8::from(*on)));
            }
            Self::Texts(texts) => {
                list(out, 8, texts.len());
                texts.iter().for_each(|text| put_text(text, out));
            }
            Self::Numbers(numbers) => {
                list(out, 6, numbers.len());
                out.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
            }
            Self::Counts(counts) => {
                list(out, 4, counts.len());
                out.extend(counts.iter().flat_map(|n| n.to_le_bytes()));
            }
        }
    }
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Returns the bytes of a file before its data: the header, filled up to the alignment.
///
/// # Errors
/// Fails if a tensor has a type that is not one of weights, or rows that are not whole blocks.
pub fn header(metadata: &[(String, NewValue)], tensors: &[NewTensor]) -> Result<Vec<u8>> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (name, value) in metadata {
        put_text(name, &mut out);
        value.put(&mut out);
    }
    let mut offset = 0_u64;
    for tensor in tensors {
        let NewTensor { name, shape, kind } = tensor;
        let whole = shape.last().is_some_and(|columns| columns.is_multiple_of(kind.block_size()));
        ensure!(whole, "tensor {name} of shape {shape:?} has no whole blocks of {kind:?}");
        put_text(name, &mut out);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&n| out.extend((n as u64).to_le_bytes()));
        out.extend(number_and_name(*kind)?.0.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += (tensor.bytes() as u64).next_multiple_of(ALIGNMENT);
    }
    let length = out.len();
    pad_tensor(&mut out, length)?;
    Ok(out)
}

/// Writes the zeros that follow a tensor or a header of `bytes` bytes.
///
/// # Errors
/// Fails if the writer fails.
pub fn pad_tensor(out: &mut impl Write, bytes: usize) -> Result<()> {
    let zeros = bytes.next_multiple_of(ALIGNMENT as usize) - bytes;
    out.write_all(&[0; ALIGNMENT as usize][..zeros])?;
    Ok(())
}

/// Returns whole rows of `columns` elements as bytes of this type.
///
/// # Errors
/// Fails if the rows are not whole blocks of the type.
pub(crate) fn quantise(floats: Vec<f32>, columns: usize, kind: GgmlDType) -> Result<Vec<u8>> {
    let shape = (floats.len() / columns, columns);
    let tensor = Tensor::from_vec(floats, shape, &Device::Cpu)?;
    Ok(QTensor::quantize(&tensor, kind)?.data()?.into_owned())
}
