//! Adapters: the result of calibration for each layer of a model, with a name and a version.
//!
//! The bytes of an adapter come from files, so every number is checked when they are read.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::encoding::{Reader, check_matrix, crc, put, put_all};
use crate::retrieval::summary::KeyShape;
use crate::retrieval::transform_coded::codebook::Codebook;
use std::sync::Arc;
use stratakv_format::checksum::crc64;

const MAGIC: &[u8; 8] = b"SKVADAPT";

/// A projection of joint keys: `[kv_heads * key_dim, rank]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRankAdapter {
    width: usize,
    rank: usize,
    matrix: Vec<f32>,
}

impl LowRankAdapter {
    /// Returns the projection with this matrix `[width, rank]`, row-major.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the matrix is empty, has another number of elements, or has one that is not
    /// finite.
    pub fn new(width: usize, rank: usize, matrix: Vec<f32>) -> Result<Self> {
        check_matrix("low-rank matrix", &matrix, width, rank)?;
        Ok(Self { width, rank, matrix })
    }

    /// Returns the numbers kept per token.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the matrix `[width, rank]`, row-major.
    #[must_use]
    pub fn matrix(&self) -> &[f32] {
        &self.matrix
    }
}

/// The part of an adapter for one layer. Clones and summaries share its numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerAdapter {
    /// No part for this layer.
    None,
    /// A projection.
    LowRank(Arc<LowRankAdapter>),
    /// A transform with codebooks.
    Codes(Arc<Codebook>),
}

impl From<LowRankAdapter> for LayerAdapter {
    fn from(low: LowRankAdapter) -> Self {
        Self::LowRank(Arc::new(low))
    }
}

impl From<Codebook> for LayerAdapter {
    fn from(book: Codebook) -> Self {
        Self::Codes(Arc::new(book))
    }
}

impl LayerAdapter {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => put(out, 0),
            Self::LowRank(low) => {
                put(out, 1);
                put(out, low.width as u32);
                put(out, low.rank as u32);
                put_all(out, &low.matrix);
            }
            Self::Codes(book) => {
                put(out, 2);
                book.write(out);
            }
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let damaged = || Error::new(ErrorKind::Corruption, "adapter: the bytes are not an adapter");
        Ok(match reader.number()? {
            0 => Self::None,
            1 => {
                let (width, rank) = (reader.number()?, reader.number()?);
                let matrix = reader.floats(width.checked_mul(rank).ok_or_else(damaged)?)?;
                Self::from(LowRankAdapter::new(width, rank, matrix).map_err(|_| damaged())?)
            }
            2 => Self::from(Codebook::read(reader)?),
            _ => return Err(damaged()),
        })
    }

    /// Returns its bytes in memory.
    fn bytes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::LowRank(low) => low.matrix.len() * size_of::<f32>(),
            Self::Codes(book) => book.bytes(),
        }
    }

    /// Returns its bytes as stored: the kind, then its numbers.
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    /// Reads it from exactly these bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: the bytes are not an adapter.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader(bytes);
        let layer = Self::read(&mut reader)?;
        match reader.0.is_empty() {
            true => Ok(layer),
            false => Err(Error::new(ErrorKind::Corruption, "adapter: bytes follow its end")),
        }
    }
}

/// A named, versioned set of [`LayerAdapter`]s for the layers of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    name: String,
    version: u32,
    layers: Vec<LayerAdapter>,
    checksum: u64,
}

impl Adapter {
    /// Makes an adapter of a name (1 to 255 bytes), a version and layers.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the name has another length, or there are more than 65535 layers.
    pub fn new(name: impl Into<String>, version: u32, layers: Vec<LayerAdapter>) -> Result<Self> {
        let name = name.into();
        if name.is_empty() || name.len() > 255 || layers.len() > usize::from(u16::MAX) {
            let text = format!(
                "adapter: name {name:?} and {} layers; 1 to 255 bytes and at most 65535 layers are possible",
                layers.len()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let checksum = crc64(&Self::encode_layers(&layers).concat());
        Ok(Self { name, version, layers, checksum })
    }

    /// Returns the bytes of each layer as stored, empty for layers without a part.
    pub(crate) fn layer_bytes(&self) -> Vec<Vec<u8>> {
        Self::encode_layers(&self.layers)
    }

    fn encode_layers(layers: &[LayerAdapter]) -> Vec<Vec<u8>> {
        let bytes = |layer: &LayerAdapter| match layer {
            LayerAdapter::None => Vec::new(),
            layer => layer.to_bytes(),
        };
        layers.iter().map(bytes).collect()
    }

    /// Returns the CRC-64/NVME of its numbers. Summaries on devices name the adapter by it.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its version.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns its layers.
    #[must_use]
    pub fn layers(&self) -> &[LayerAdapter] {
        &self.layers
    }

    /// Returns the bytes of its numbers in memory. The store accounts for them once, while any selector with it is
    /// attached.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes() as u64).sum()
    }

    /// Returns its name and version as `name/version`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}/{}", self.name, self.version)
    }

    /// Returns its part for `layer`, whose keys have this shape.
    pub(crate) fn layer(&self, layer: usize, shape: &KeyShape) -> Result<&LayerAdapter> {
        let found = self.layers.get(layer).ok_or_else(|| self.wrong(layer, "layer"))?;
        let width = match found {
            LayerAdapter::None => shape.width(),
            LayerAdapter::LowRank(matrix) => matrix.width,
            LayerAdapter::Codes(book) => book.width(),
        };
        if width != shape.width() {
            let text = format!("adapter {} has {width} joint key dimensions, the layer {}", self.id(), shape.width());
            return Err(Error::new(ErrorKind::LayoutMismatch, text));
        }
        Ok(found)
    }

    pub(crate) fn wrong(&self, layer: usize, what: &str) -> Error {
        Error::new(ErrorKind::InvalidArgument, format!("adapter {} has no {what} for layer {layer}", self.id()))
    }

    /// Returns its bytes, little-endian: magic, version, name, a kind and numbers per layer, and a CRC-32.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        put(&mut out, self.version);
        put(&mut out, self.layers.len() as u32);
        put(&mut out, self.name.len() as u32);
        out.extend_from_slice(self.name.as_bytes());
        self.layers.iter().for_each(|layer| layer.write(&mut out));
        let crc = crc(&out);
        put(&mut out, crc);
        out
    }

    /// Reads it from bytes. It accepts exactly what [`Self::to_bytes`] returns.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: the bytes are not an adapter.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let damaged =
            || Error::new(ErrorKind::Corruption, "adapter: the bytes are not an adapter, or they are damaged");
        let (body, end) = bytes.split_last_chunk::<4>().ok_or_else(damaged)?;
        if crc(body) != u32::from_le_bytes(*end) {
            return Err(damaged());
        }
        let mut reader = Reader(body);
        if reader.take(8)? != MAGIC {
            return Err(damaged());
        }
        let (version, layers, name) = (reader.number()?, reader.number()?, reader.number()?);
        let name = std::str::from_utf8(reader.take(name)?).map_err(|_| damaged())?.to_owned();
        let mut list = Vec::new();
        for _ in 0..layers {
            list.push(LayerAdapter::read(&mut reader)?);
        }
        if !reader.0.is_empty() {
            return Err(damaged());
        }
        Self::new(name, version as u32, list).map_err(|_| damaged())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter() -> Adapter {
        let low = LowRankAdapter::new(4, 2, (0..8).map(|i| i as f32).collect()).unwrap();
        let book = Codebook::new(
            vec![0.5; 4],
            vec![1.0; 12],
            vec![2.0; 12],
            vec![vec![0], vec![1, 2]],
            vec![vec![-1.0, 1.0], vec![-1.0, -0.5, 0.5, 1.0], vec![0.0, 3.0]],
            0.25,
        );
        let layers = vec![LayerAdapter::None, low.into(), book.unwrap().into()];
        Adapter::new("name", 7, layers).unwrap()
    }

    #[test]
    fn bytes_give_back_the_adapter_and_any_other_byte_is_refused() {
        let adapter = adapter();
        let bytes = adapter.to_bytes();
        assert_eq!(Adapter::from_bytes(&bytes).unwrap(), adapter);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            assert_eq!(Adapter::from_bytes(&other).unwrap_err().kind(), ErrorKind::Corruption, "byte {at}");
            assert!(Adapter::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn right_checksums_do_not_make_wrong_numbers_right() {
        let bytes = adapter().to_bytes();
        for at in 8..bytes.len() - 4 {
            for value in [0xff, 0x00, 0x7f] {
                let mut other = bytes[..bytes.len() - 4].to_vec();
                other[at] = value;
                let crc = crc(&other);
                put(&mut other, crc);
                // Any bytes give an adapter or an error.
                if let Ok(read) = Adapter::from_bytes(&other) {
                    assert_eq!(read.to_bytes(), other);
                }
            }
        }
    }
}
