//! Layouts and extents that several golden stores have in common.

use super::{Extent, ExtentPlane, FINGERPRINT, descriptor};
use stratakv_format::DType;
use stratakv_format::frame::{Descriptor, KIND_GROUPS, KIND_TAIL};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};

/// Returns a layer without window and rotation, with raw planes.
pub(crate) fn layer(kv_heads: u16, key_dim: u16, value_dim: u16) -> LayerGeometry {
    LayerGeometry { kv_heads, key_dim, value_dim, window: None, rope: None, codecs: RAW_PLANES }
}

/// Returns a layout of f16 with groups of four tokens.
pub(crate) fn layout_of(layers: Vec<LayerGeometry>) -> Layout {
    Layout { dtype: DType::F16, group_tokens: 4, padded_planes: false, fingerprint: FINGERPRINT, layers }
}

pub(crate) fn f16(x: f32) -> [u8; 2] {
    half::f16::from_f32(x).to_le_bytes()
}

/// Returns the first two groups of a layer. `plane` gives the bytes of a group's plane: 0 is K, 1 is V.
pub(crate) fn two_groups(layout: &Layout, layer: u16, plane: impl Fn(usize, usize) -> Vec<u8>) -> Extent {
    let geometry = layout.layers[usize::from(layer)];
    let (block, tokens) = (layout.block(&geometry), u32::from(layout.group_tokens));
    let mut planes = Vec::new();
    for group in 0..2_usize {
        for index in 0..geometry.planes() {
            let offset = block.block_offset(group) + block.plane(index).0;
            let (first_token, bytes) = (group as u64 * u64::from(tokens), plane(group, index));
            planes.push(ExtentPlane { first_token, tokens, plane: index as u16, offset, bytes });
        }
    }
    let descriptor = descriptor(KIND_GROUPS, layer, 0, 2 * tokens, 2);
    Extent { descriptor, planes, bytes: block.extent_bytes(2) as u64 }
}

/// Returns tokens of a layer outside groups, whose planes follow each other.
pub(crate) fn tail_of(layer: u16, first_token: u64, tokens: u32, planes: Vec<Vec<u8>>) -> Extent {
    let mut offset = 0;
    let place = |(bytes, plane): (Vec<u8>, u16)| {
        let own = ExtentPlane { first_token, tokens, plane, offset, bytes };
        offset += own.bytes.len();
        own
    };
    let planes = planes.into_iter().zip(0..).map(place).collect();
    Extent { descriptor: descriptor(KIND_TAIL, layer, first_token, tokens, 1), planes, bytes: offset as u64 }
}

/// Returns an extent of one plane that its descriptor covers completely.
pub(crate) fn single_plane(descriptor: Descriptor, bytes: Vec<u8>) -> Extent {
    let (first_token, tokens) = (descriptor.first_token.get(), descriptor.tokens.get());
    let length = bytes.len() as u64;
    Extent { descriptor, planes: vec![ExtentPlane { first_token, tokens, plane: 0, offset: 0, bytes }], bytes: length }
}
