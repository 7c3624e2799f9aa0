//! Conversion between [`Layout`] and its bytes.
//!
//! An encoded layout is a header, one entry per layer, the rotation entries and the codecs of each layer. It is decoded
//! in these steps:
//!
//! 1. Check dtype and flags, because an unknown flag changes the meaning of all other bytes.
//! 2. Compare the length with the numbers of layers and rotations.
//! 3. Decode the rotations and the codecs, then the layers, which refer to both.
//! 4. Check the ranges of the layout.
//!
//! Equal layouts have equal bytes. Each rotation has one entry, in the order of the first layer that names it. The
//! codecs are present only if one of them is not raw.

use super::raw::{
    FLAG_CODECS, FLAG_PADDED_PLANES, FLAG_ROPE, LAYER_FULL, LAYER_NONE, LAYER_SLIDING, RawCodecs, RawLayer,
    RawLayoutHeader,
};
use super::{LayerGeometry, Layout, RAW_PLANES};
use crate::codec::PlaneCodec;
use crate::dtype::DType;
use crate::error::FormatError;
use crate::rope::{RawRope, Rope};
use crate::verify::check_zeros;
use alloc::vec::Vec;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

impl Layout {
    /// Returns the bytes of the encoded layout.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        encoded_bytes(self.layers.len(), self.ropes().len(), self.is_encoded())
    }

    /// Appends the encoded layout to `out`.
    ///
    /// The layout must pass [`Layout::check`], because greater values are truncated.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let ropes = self.ropes();
        let header = RawLayoutHeader {
            bytes: U32::new(self.encoded_bytes() as u32),
            layers: U16::new(self.layers.len() as u16),
            group_tokens: U16::new(self.group_tokens),
            dtype: self.dtype.code(),
            flags: if self.padded_planes { FLAG_PADDED_PLANES } else { 0 }
                | if ropes.is_empty() { 0 } else { FLAG_ROPE }
                | if self.is_encoded() { FLAG_CODECS } else { 0 },
            ropes: ropes.len() as u8,
            reserved: [0; 5],
            fingerprint: self.fingerprint,
        };
        out.extend_from_slice(header.as_bytes());
        for layer in &self.layers {
            out.extend_from_slice(layer.to_raw(&ropes).as_bytes());
        }
        for rope in ropes {
            out.extend_from_slice(rope.to_raw().as_bytes());
        }
        if self.is_encoded() {
            out.extend(self.layers.iter().flat_map(|layer| layer.codecs.map(PlaneCodec::code)));
        }
    }

    /// Decodes the layout at the start of `bytes`.
    ///
    /// # Errors
    /// There are too few bytes, a value is out of range, or the dtype, a flag, layer kind, pairing, scaling or codec is
    /// unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let Ok((header, rest)) = RawLayoutHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("layout", size_of::<RawLayoutHeader>(), bytes.len()));
        };
        let Some(dtype) = DType::from_code(header.dtype) else {
            return Err(FormatError::unsupported("dtype", 8, 3, u64::from(header.dtype)));
        };
        let (count, rope_count) = (usize::from(header.layers.get()), usize::from(header.ropes));
        let has_codecs = header.flags & FLAG_CODECS != 0;
        let expected = header.check()?;
        let Ok((raw, rest)) = <[RawLayer]>::ref_from_prefix_with_elems(rest, count) else {
            return Err(FormatError::truncated("layout", expected, bytes.len()));
        };
        let ropes = decode_ropes(rest, rope_count, encoded_bytes(count, 0, false))?;
        let codecs_at = encoded_bytes(count, rope_count, false);
        let codecs = if has_codecs { decode_codecs(bytes, count, codecs_at)? } else { Vec::new() };
        let layout = Self {
            dtype,
            group_tokens: header.group_tokens.get(),
            padded_planes: header.flags & FLAG_PADDED_PLANES != 0,
            fingerprint: header.fingerprint,
            layers: decode_layers(raw, &ropes, &codecs)?,
        };
        if has_codecs && !layout.is_encoded() {
            return Err(FormatError::range("codecs", codecs_at, 1, 0));
        }
        layout.check()?;
        Ok(layout)
    }
}

impl RawLayoutHeader {
    /// Checks flags, lengths and reserved bytes. Returns the bytes of the encoded layout.
    fn check(&self) -> Result<usize, FormatError> {
        if self.flags & !(FLAG_PADDED_PLANES | FLAG_ROPE | FLAG_CODECS) != 0 {
            return Err(FormatError::unsupported("layout flags", 9, 7, u64::from(self.flags)));
        }
        let ropes = usize::from(self.ropes);
        if (self.flags & FLAG_ROPE != 0) != (ropes > 0) {
            return Err(FormatError::range("rotations", 10, 0, ropes as u64));
        }
        let expected = encoded_bytes(usize::from(self.layers.get()), ropes, self.flags & FLAG_CODECS != 0);
        if self.bytes.get() as usize != expected {
            return Err(FormatError::range("layout bytes", 0, expected as u64, u64::from(self.bytes.get())));
        }
        check_zeros(&self.reserved, "layout", 11)?;
        Ok(expected)
    }
}

impl LayerGeometry {
    /// Returns the entry of the layer. `ropes` are the rotations of the layout.
    fn to_raw(self, ropes: &[Rope]) -> RawLayer {
        RawLayer {
            kv_heads: U16::new(self.kv_heads),
            key_dim: U16::new(self.key_dim),
            value_dim: U16::new(self.value_dim),
            kind: match (self.has_kv(), self.window) {
                (false, _) => LAYER_NONE,
                (true, None) => LAYER_FULL,
                (true, Some(_)) => LAYER_SLIDING,
            },
            rope: ropes.iter().position(|rope| self.rope == Some(*rope)).map_or(0, |at| at as u8 + 1),
            window: U32::new(self.window.unwrap_or(0)),
        }
    }
}

impl RawLayer {
    /// Checks that heads and window fit the kind of the layer, which is at offset `at`.
    fn check_kind(&self, at: usize) -> Result<(), FormatError> {
        if self.kind > LAYER_SLIDING {
            return Err(FormatError::unsupported("layer kind", at + 6, 2, u64::from(self.kind)));
        }
        if (self.kind == LAYER_NONE) != (self.kv_heads.get() == 0) {
            return Err(FormatError::range("KV heads of the layer kind", at, 0, u64::from(self.kv_heads.get())));
        }
        let window = self.window.get();
        if (self.kind == LAYER_SLIDING) != (window > 0) {
            return Err(FormatError::range("window of the layer kind", at + 8, 0, u64::from(window)));
        }
        Ok(())
    }
}

/// Returns the bytes of an encoded layout.
pub(super) const fn encoded_bytes(layers: usize, ropes: usize, codecs: bool) -> usize {
    let codecs = if codecs { layers * size_of::<RawCodecs>() } else { 0 };
    size_of::<RawLayoutHeader>() + layers * size_of::<RawLayer>() + ropes * size_of::<RawRope>() + codecs
}

/// Decodes the layers. They must name all `ropes`, in order. `codecs` is empty if all planes are raw.
fn decode_layers(
    raw: &[RawLayer],
    ropes: &[Rope],
    codecs: &[[PlaneCodec; 2]],
) -> Result<Vec<LayerGeometry>, FormatError> {
    let mut seen = 0;
    let mut layers = Vec::with_capacity(raw.len());
    for (index, layer) in raw.iter().enumerate() {
        let at = size_of::<RawLayoutHeader>() + index * size_of::<RawLayer>();
        layer.check_kind(at)?;
        let rope = usize::from(layer.rope);
        if rope > seen + 1 || rope > ropes.len() {
            return Err(FormatError::range("rotation of a layer", at + 7, seen as u64 + 1, rope as u64));
        }
        seen = seen.max(rope);
        layers.push(LayerGeometry {
            kv_heads: layer.kv_heads.get(),
            key_dim: layer.key_dim.get(),
            value_dim: layer.value_dim.get(),
            window: (layer.kind == LAYER_SLIDING).then_some(layer.window.get()),
            rope: rope.checked_sub(1).map(|at| ropes[at]),
            codecs: codecs.get(index).copied().unwrap_or(RAW_PLANES),
        });
    }
    if seen != ropes.len() {
        return Err(FormatError::range("rotations", 10, seen as u64, ropes.len() as u64));
    }
    Ok(layers)
}

/// Decodes the codecs of `count` layers at offset `base` of the encoded layout.
fn decode_codecs(bytes: &[u8], count: usize, base: usize) -> Result<Vec<[PlaneCodec; 2]>, FormatError> {
    let entries = bytes.get(base..).and_then(|rest| <[RawCodecs]>::ref_from_prefix_with_elems(rest, count).ok());
    let Some((raw, _)) = entries else {
        return Err(FormatError::truncated("layout", base + count * size_of::<RawCodecs>(), bytes.len()));
    };
    let decode = |(index, raw): (usize, &RawCodecs)| {
        let codec = |code: u8, at: usize| {
            let at = base + index * size_of::<RawCodecs>() + at;
            PlaneCodec::from_code(code).ok_or_else(|| FormatError::unsupported("codec", at, 2, u64::from(code)))
        };
        Ok([codec(raw.keys, 0)?, codec(raw.values, 1)?])
    };
    raw.iter().enumerate().map(decode).collect()
}

/// Decodes `count` distinct rotation entries at the start of `bytes`, which is offset `base` of the encoded layout.
fn decode_ropes(bytes: &[u8], count: usize, base: usize) -> Result<Vec<Rope>, FormatError> {
    let Ok((raw, _)) = <[RawRope]>::ref_from_prefix_with_elems(bytes, count) else {
        return Err(FormatError::truncated("layout", count * size_of::<RawRope>(), bytes.len()));
    };
    let mut ropes = Vec::with_capacity(count);
    for (index, raw) in raw.iter().enumerate() {
        let at = base + index * size_of::<RawRope>();
        let rope = Rope::from_raw(raw, at)?;
        if ropes.contains(&rope) {
            return Err(FormatError::range("rotations that differ", at, index as u64, index as u64 + 1));
        }
        ropes.push(rope);
    }
    Ok(ropes)
}
