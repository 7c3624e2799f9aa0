//! The structures of an encoded layout.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Layer kind: no keys and values.
pub const LAYER_NONE: u8 = 0;
/// Layer kind: attends to every earlier token.
pub const LAYER_FULL: u8 = 1;
/// Layer kind: attends to the newest `window` tokens.
pub const LAYER_SLIDING: u8 = 2;

/// Layout flag: each plane starts on a page, so that V can be read alone.
pub const FLAG_PADDED_PLANES: u8 = 1;
/// Layout flag: rotation entries follow the layers.
pub const FLAG_ROPE: u8 = 2;
/// Layout flag: the codecs of the layers follow the rotation entries.
pub const FLAG_CODECS: u8 = 4;

/// The header of an encoded layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLayoutHeader {
    /// Bytes of the encoded layout, this header included.
    pub bytes: U32,
    /// The number of layers.
    pub layers: U16,
    /// The tokens of a group, G.
    pub group_tokens: U16,
    /// [`DType`](crate::DType).
    pub dtype: u8,
    /// [`FLAG_PADDED_PLANES`], [`FLAG_ROPE`], [`FLAG_CODECS`].
    pub flags: u8,
    /// The number of rotation entries, 0 without [`FLAG_ROPE`].
    pub ropes: u8,
    /// Zero.
    pub reserved: [u8; 5],
    /// The fingerprint of model, weights and positional encoding, chosen by the embedder.
    pub fingerprint: [u8; 32],
}

/// One layer of an encoded layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLayer {
    /// The number of KV heads.
    pub kv_heads: U16,
    /// The head dim of keys.
    pub key_dim: U16,
    /// The head dim of values. 0 if values are a prefix of the keys (MLA).
    pub value_dim: U16,
    /// [`LAYER_NONE`], [`LAYER_FULL`] or [`LAYER_SLIDING`].
    pub kind: u8,
    /// The number of the rotation of its keys, from 1. 0 if the layout does not state it.
    pub rope: u8,
    /// The window of a sliding layer in tokens, else 0.
    pub window: U32,
}

/// The codecs of the planes of one layer's groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawCodecs {
    /// [`PlaneCodec`](crate::PlaneCodec) of K planes.
    pub keys: u8,
    /// [`PlaneCodec`](crate::PlaneCodec) of V planes. Raw if the layer has none.
    pub values: u8,
}

const _: () = assert!(size_of::<RawLayoutHeader>() == 48);
const _: () = assert!(size_of::<RawCodecs>() == 2);
const _: () = assert!(size_of::<RawLayer>() == 12);
