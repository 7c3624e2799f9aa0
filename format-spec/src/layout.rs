//! The layout of a sequence: geometry per layer. It stands in the manifest and in every frame header.

use crate::codec::{PlaneCodec, PlaneShape};
use crate::dtype::DType;
use crate::error::{FormatError, FormatErrorCode};
use crate::page::{PAGE_BYTES, round_up_to_page};
use crate::rope::{ROPES_MAX, RawRope, Rope};
use crate::verify::check_zeros;
use alloc::vec::Vec;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most layers.
pub const LAYERS_MAX: usize = 1024;
/// The most KV heads of a layer.
pub const KV_HEADS_MAX: u16 = 128;
/// The largest head dim of keys or values.
pub const HEAD_DIM_MAX: u16 = 1024;
/// The most tokens of a group.
pub const GROUP_TOKENS_MAX: u16 = 128;
/// The largest block in bytes.
pub const BLOCK_BYTES_MAX: usize = 1 << 20;

/// Layer kind: no keys and values at all.
pub const LAYER_NONE: u8 = 0;
/// Layer kind: attends to every earlier token.
pub const LAYER_FULL: u8 = 1;
/// Layer kind: attends to the newest `window` tokens.
pub const LAYER_SLIDING: u8 = 2;

/// Layout flag: each plane starts on a page of its own, so that V can be read alone.
pub const FLAG_PADDED_PLANES: u8 = 1;
/// Layout flag: records of rotations stand behind the layers.
pub const FLAG_ROPE: u8 = 2;
/// Layout flag: codecs of the layers stand behind the rotations.
pub const FLAG_CODECS: u8 = 4;

/// Front of an encoded layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLayoutHeader {
    /// Bytes of the encoded layout, this header included.
    pub bytes: U32,
    /// Layers.
    pub layers: U16,
    /// Tokens of a group, G.
    pub group_tokens: U16,
    /// [`DType`].
    pub dtype: u8,
    /// [`FLAG_PADDED_PLANES`], [`FLAG_ROPE`], [`FLAG_CODECS`].
    pub flags: u8,
    /// Records of rotations; 0 without [`FLAG_ROPE`].
    pub ropes: u8,
    /// Zero.
    pub reserved: [u8; 5],
    /// Fingerprint of model, weights and positional encoding, by the embedder.
    pub fingerprint: [u8; 32],
}

/// One layer of an encoded layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLayer {
    /// KV heads.
    pub kv_heads: U16,
    /// Head dim of keys.
    pub key_dim: U16,
    /// Head dim of values; 0 where values are a prefix of the keys (MLA).
    pub value_dim: U16,
    /// [`LAYER_NONE`], [`LAYER_FULL`] or [`LAYER_SLIDING`].
    pub kind: u8,
    /// Number of the rotation of its keys, from 1; 0 where the layout does not say.
    pub rope: u8,
    /// Window of a sliding layer in tokens, else 0.
    pub window: U32,
}

/// How the planes of one layer's groups are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawCodecs {
    /// [`PlaneCodec`] of K planes.
    pub keys: u8,
    /// [`PlaneCodec`] of V planes; raw where there are none.
    pub values: u8,
}

const _: () = assert!(size_of::<RawLayoutHeader>() == 48);
const _: () = assert!(size_of::<RawCodecs>() == 2);
const _: () = assert!(size_of::<RawLayer>() == 12);

/// Geometry of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGeometry {
    /// KV heads; 0 for a layer without KV.
    pub kv_heads: u16,
    /// Head dim of keys, elements.
    pub key_dim: u16,
    /// Head dim of values, elements; 0 where values are a prefix of the keys.
    pub value_dim: u16,
    /// Window of a sliding layer, tokens.
    pub window: Option<u32>,
    /// How its keys were rotated, where the layout says so.
    pub rope: Option<Rope>,
    /// How the K and the V plane of its groups are stored.
    pub codecs: [PlaneCodec; 2],
}

/// No codec: both planes as they are.
pub const RAW_PLANES: [PlaneCodec; 2] = [PlaneCodec::Raw; 2];

impl LayerGeometry {
    /// Whether the layer has keys and values at all.
    #[must_use]
    pub const fn has_kv(&self) -> bool {
        self.kv_heads > 0
    }

    /// Elements of one token's keys, all heads.
    #[must_use]
    pub const fn key_elements(&self) -> usize {
        self.kv_heads as usize * self.key_dim as usize
    }

    /// Elements of one token's values, all heads.
    #[must_use]
    pub const fn value_elements(&self) -> usize {
        self.kv_heads as usize * self.value_dim as usize
    }

    /// Whether a plane of its groups is stored otherwise than as it is.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.codecs != RAW_PLANES
    }

    /// The codecs as a descriptor of its groups says them.
    #[must_use]
    pub const fn codec_code(&self) -> u16 {
        self.codecs[0].code() as u16 | (self.codecs[1].code() as u16) << 8
    }

    /// Planes of a block: K and V, or K alone.
    #[must_use]
    pub const fn planes(&self) -> usize {
        if self.value_dim == 0 { 1 } else { 2 }
    }
}

/// A layout: what the bytes of a sequence mean. Two sequences are compatible when their layouts are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Element type.
    pub dtype: DType,
    /// Tokens of a group, G.
    pub group_tokens: u16,
    /// Each plane on pages of its own.
    pub padded_planes: bool,
    /// Fingerprint of model, weights and positional encoding.
    pub fingerprint: [u8; 32],
    /// Geometry per layer.
    pub layers: Vec<LayerGeometry>,
}

/// Where the blocks of one layer lie inside an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGeometry {
    /// Bytes of the K plane.
    pub key_bytes: usize,
    /// Bytes of the V plane.
    pub value_bytes: usize,
    /// Offset of the V plane in the block.
    pub value_offset: usize,
    /// Bytes a block takes, planes and the padding between them.
    pub block_bytes: usize,
    /// Blocks that share a page; 0 where a block takes a page or more.
    pub blocks_per_page: usize,
}

impl BlockGeometry {
    /// Byte offset of block `index` from the start of its extent.
    #[must_use]
    pub const fn block_offset(&self, index: usize) -> usize {
        match index.checked_div(self.blocks_per_page) {
            None => index * round_up_to_page(self.block_bytes),
            Some(page) => page * PAGE_BYTES + index % self.blocks_per_page * self.block_bytes,
        }
    }

    /// Bytes an extent of `blocks` takes, whole pages.
    #[must_use]
    pub const fn extent_bytes(&self, blocks: usize) -> usize {
        if self.blocks_per_page == 0 {
            blocks * round_up_to_page(self.block_bytes)
        } else {
            blocks.div_ceil(self.blocks_per_page) * PAGE_BYTES
        }
    }

    /// Bytes and offset in the block of a plane: 0 = K, 1 = V.
    #[must_use]
    pub const fn plane(&self, plane: usize) -> (usize, usize) {
        if plane == 0 { (0, self.key_bytes) } else { (self.value_offset, self.value_bytes) }
    }
}

impl Layout {
    /// The shape of a plane of a layer's groups: 0 = K, 1 = V.
    #[must_use]
    pub fn plane_shape(&self, layer: &LayerGeometry, plane: usize) -> PlaneShape {
        let dims = usize::from(if plane == 0 { layer.key_dim } else { layer.value_dim });
        let (heads, tokens) = (usize::from(layer.kv_heads), usize::from(self.group_tokens));
        PlaneShape { plane, heads, tokens, dims, dtype: self.dtype }
    }

    /// Whether a plane of some layer is stored otherwise than as it is.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.layers.iter().any(LayerGeometry::is_encoded)
    }

    /// Block geometry of a layer with KV, as its groups are stored.
    #[must_use]
    pub fn block(&self, layer: &LayerGeometry) -> BlockGeometry {
        let [key_bytes, value_bytes] = [0, 1].map(|plane| layer.codecs[plane].bytes(&self.plane_shape(layer, plane)));
        self.geometry(key_bytes, value_bytes)
    }

    /// Block geometry of a layer with KV whose planes are as they are: what [`Self::block`] is without codecs.
    #[must_use]
    pub fn plain_block(&self, layer: &LayerGeometry) -> BlockGeometry {
        let [key_bytes, value_bytes] = [0, 1].map(|plane| self.plane_shape(layer, plane).bytes());
        self.geometry(key_bytes, value_bytes)
    }

    fn geometry(&self, key_bytes: usize, value_bytes: usize) -> BlockGeometry {
        let value_offset = if self.padded_planes && value_bytes > 0 { round_up_to_page(key_bytes) } else { key_bytes };
        let block_bytes = value_offset + value_bytes;
        let blocks_per_page = if block_bytes < PAGE_BYTES && block_bytes > 0 { PAGE_BYTES / block_bytes } else { 0 };
        BlockGeometry { key_bytes, value_bytes, value_offset, block_bytes, blocks_per_page }
    }

    /// Checks every range of this layout.
    ///
    /// # Errors
    /// The first field out of range, with its bound.
    pub fn check(&self) -> Result<(), FormatError> {
        let layers = self.layers.len();
        if layers == 0 || layers > LAYERS_MAX {
            return Err(FormatError::range("layers", 4, LAYERS_MAX as u64, layers as u64));
        }
        if self.group_tokens == 0 || self.group_tokens > GROUP_TOKENS_MAX {
            return Err(FormatError::range(
                "group tokens",
                6,
                u64::from(GROUP_TOKENS_MAX),
                u64::from(self.group_tokens),
            ));
        }
        if !self.layers.iter().any(LayerGeometry::has_kv) {
            return Err(FormatError::range("layers with KV", 4, 1, 0));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let at = size_of::<RawLayoutHeader>() + index * size_of::<RawLayer>();
            if layer.kv_heads > KV_HEADS_MAX {
                return Err(FormatError::range("KV heads", at, u64::from(KV_HEADS_MAX), u64::from(layer.kv_heads)));
            }
            if !layer.has_kv() {
                if layer.key_dim != 0 || layer.value_dim != 0 || layer.window.is_some() || layer.rope.is_some() {
                    return Err(FormatError::range("head dim of a layer without KV", at, 0, u64::from(layer.key_dim)));
                }
                if layer.is_encoded() {
                    return Err(FormatError::range(
                        "codec of a layer without KV",
                        at,
                        0,
                        u64::from(layer.codec_code()),
                    ));
                }
                continue;
            }
            if layer.key_dim == 0 || layer.key_dim > HEAD_DIM_MAX {
                return Err(FormatError::range("key dim", at + 2, u64::from(HEAD_DIM_MAX), u64::from(layer.key_dim)));
            }
            if layer.value_dim > HEAD_DIM_MAX {
                let dim = u64::from(layer.value_dim);
                return Err(FormatError::range("value dim", at + 4, u64::from(HEAD_DIM_MAX), dim));
            }
            if layer.window == Some(0) {
                return Err(FormatError::range("window", at + 8, 1, 0));
            }
            if let Some(rope) = &layer.rope {
                rope.check(at)?;
                if rope.first() + rope.dims() > usize::from(layer.key_dim) {
                    let end = (rope.first() + rope.dims()) as u64;
                    return Err(FormatError::range("rotated dims", at + 7, u64::from(layer.key_dim), end));
                }
            }
            // As it is in memory: no codec makes it longer.
            let bytes = self.plain_block(layer).block_bytes;
            if bytes > BLOCK_BYTES_MAX {
                return Err(FormatError::range("block bytes", at, BLOCK_BYTES_MAX as u64, bytes as u64));
            }
            for plane in 0..2 {
                let (codec, shape) = (layer.codecs[plane], self.plane_shape(layer, plane));
                if !codec.suits(&shape) {
                    let (bound, found) = (shape.bytes() / 20 * 19, codec.bytes(&shape));
                    return Err(FormatError::range(
                        "codec of a plane that it does not shrink",
                        at,
                        bound as u64,
                        found as u64,
                    ));
                }
            }
        }
        let ropes = self.ropes().len();
        if ropes > ROPES_MAX {
            return Err(FormatError::range("rotations", 10, ROPES_MAX as u64, ropes as u64));
        }
        Ok(())
    }

    /// The rotations of its layers, each once, in the order of the first layer with it.
    #[must_use]
    pub fn ropes(&self) -> Vec<Rope> {
        let mut ropes = Vec::new();
        for rope in self.layers.iter().filter_map(|layer| layer.rope) {
            if !ropes.contains(&rope) {
                ropes.push(rope);
            }
        }
        ropes
    }

    /// Bytes of the encoded layout.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        encoded_bytes(self.layers.len(), self.ropes().len(), self.is_encoded())
    }

    /// Appends the encoded layout. The layout must pass [`Layout::check`]; fields beyond their type are cut.
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
            let kind = match (layer.has_kv(), layer.window) {
                (false, _) => LAYER_NONE,
                (true, None) => LAYER_FULL,
                (true, Some(_)) => LAYER_SLIDING,
            };
            let raw = RawLayer {
                kv_heads: U16::new(layer.kv_heads),
                key_dim: U16::new(layer.key_dim),
                value_dim: U16::new(layer.value_dim),
                kind,
                rope: ropes.iter().position(|rope| layer.rope == Some(*rope)).map_or(0, |at| at as u8 + 1),
                window: U32::new(layer.window.unwrap_or(0)),
            };
            out.extend_from_slice(raw.as_bytes());
        }
        for rope in ropes {
            out.extend_from_slice(rope.to_raw().as_bytes());
        }
        if self.is_encoded() {
            out.extend(self.layers.iter().flat_map(|layer| layer.codecs.map(PlaneCodec::code)));
        }
    }

    /// Reads the layout at the front of `bytes`.
    ///
    /// # Errors
    /// Too few bytes, an unknown dtype, flag, layer kind, pairing, scaling or codec, or a value out of range.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let Ok((header, rest)) = RawLayoutHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("layout", size_of::<RawLayoutHeader>(), bytes.len()));
        };
        // What a later version may add comes first: with an unknown flag the rest means something else.
        let Some(dtype) = DType::from_code(header.dtype) else {
            return Err(FormatError::new(FormatErrorCode::Unsupported, "dtype", 8, 3, u64::from(header.dtype)));
        };
        if header.flags & !(FLAG_PADDED_PLANES | FLAG_ROPE | FLAG_CODECS) != 0 {
            let flags = u64::from(header.flags);
            return Err(FormatError::new(FormatErrorCode::Unsupported, "layout flags", 9, 7, flags));
        }
        let (count, rope_count) = (usize::from(header.layers.get()), usize::from(header.ropes));
        if (header.flags & FLAG_ROPE != 0) != (rope_count > 0) {
            return Err(FormatError::range("rotations", 10, 0, rope_count as u64));
        }
        let has_codecs = header.flags & FLAG_CODECS != 0;
        let expected = encoded_bytes(count, rope_count, has_codecs);
        if header.bytes.get() as usize != expected {
            return Err(FormatError::range("layout bytes", 0, expected as u64, u64::from(header.bytes.get())));
        }
        check_zeros(&header.reserved, "layout", 11)?;
        let Ok((raw, rest)) = <[RawLayer]>::ref_from_prefix_with_elems(rest, count) else {
            return Err(FormatError::truncated("layout", expected, bytes.len()));
        };
        let ropes = decode_ropes(rest, rope_count, encoded_bytes(count, 0, false))?;
        let codecs_at = encoded_bytes(count, rope_count, false);
        let codecs = if has_codecs { decode_codecs(bytes, count, codecs_at)? } else { Vec::new() };
        // Rotations stand once, in the order of the first layer with them: equal layouts are equal bytes.
        let mut seen = 0;
        let mut layers = Vec::with_capacity(count);
        for (index, layer) in raw.iter().enumerate() {
            let at = size_of::<RawLayoutHeader>() + index * size_of::<RawLayer>();
            let window = layer.window.get();
            if layer.kind > LAYER_SLIDING {
                let kind = u64::from(layer.kind);
                return Err(FormatError::new(FormatErrorCode::Unsupported, "layer kind", at + 6, 2, kind));
            }
            if (layer.kind == LAYER_NONE) != (layer.kv_heads.get() == 0) {
                return Err(FormatError::range("KV heads of the layer kind", at, 0, u64::from(layer.kv_heads.get())));
            }
            if (layer.kind == LAYER_SLIDING) != (window > 0) {
                return Err(FormatError::range("window of the layer kind", at + 8, 0, u64::from(window)));
            }
            let window = (layer.kind == LAYER_SLIDING).then_some(window);
            let rope = usize::from(layer.rope);
            if rope > seen + 1 || rope > rope_count {
                return Err(FormatError::range("rotation of a layer", at + 7, seen as u64 + 1, rope as u64));
            }
            seen = seen.max(rope);
            layers.push(LayerGeometry {
                kv_heads: layer.kv_heads.get(),
                key_dim: layer.key_dim.get(),
                value_dim: layer.value_dim.get(),
                window,
                rope: rope.checked_sub(1).map(|at| ropes[at]),
                codecs: codecs.get(index).copied().unwrap_or(RAW_PLANES),
            });
        }
        if seen != rope_count {
            return Err(FormatError::range("rotations", 10, seen as u64, rope_count as u64));
        }
        let layout = Self {
            dtype,
            group_tokens: header.group_tokens.get(),
            padded_planes: header.flags & FLAG_PADDED_PLANES != 0,
            fingerprint: header.fingerprint,
            layers,
        };
        if has_codecs && !layout.is_encoded() {
            return Err(FormatError::range("codecs", codecs_at, 1, 0));
        }
        layout.check()?;
        Ok(layout)
    }
}

/// Bytes of an encoded layout.
const fn encoded_bytes(layers: usize, ropes: usize, codecs: bool) -> usize {
    let codecs = if codecs { layers * size_of::<RawCodecs>() } else { 0 };
    size_of::<RawLayoutHeader>() + layers * size_of::<RawLayer>() + ropes * size_of::<RawRope>() + codecs
}

/// The codecs of the layers, which stand from `base` on.
fn decode_codecs(bytes: &[u8], count: usize, base: usize) -> Result<Vec<[PlaneCodec; 2]>, FormatError> {
    let there = bytes.get(base..).and_then(|rest| <[RawCodecs]>::ref_from_prefix_with_elems(rest, count).ok());
    let Some((raw, _)) = there else {
        return Err(FormatError::truncated("layout", base + count * size_of::<RawCodecs>(), bytes.len()));
    };
    let known = |(index, raw): (usize, &RawCodecs)| {
        let codec = |code: u8, at: usize| {
            let at = base + index * size_of::<RawCodecs>() + at;
            PlaneCodec::from_code(code)
                .ok_or_else(|| FormatError::new(FormatErrorCode::Unsupported, "codec", at, 2, u64::from(code)))
        };
        Ok([codec(raw.keys, 0)?, codec(raw.values, 1)?])
    };
    raw.iter().enumerate().map(known).collect()
}

/// The records of rotations at the front of `bytes`, which stand from `base` on; no two are equal.
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
