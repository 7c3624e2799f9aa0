//! Blocks with encoded planes: encoding and decoding between the stored and the plain geometry of a layer.

use super::{Codec, PlaneKind, PlaneShape, damaged, decode, quantise};
use crate::error::Result;
use crate::layout::KvLayout;
use stratakv_format::codec::ENCODED_ELEMENT_MAX;
use stratakv_format::layout::BlockGeometry;
use stratakv_format::{DType, PlaneCodec};

impl From<PlaneCodec> for Codec {
    fn from(codec: PlaneCodec) -> Self {
        match codec {
            PlaneCodec::Raw => Self::Raw,
            PlaneCodec::Int8 => Self::Int8,
            PlaneCodec::Int4 => Self::Int4,
        }
    }
}

/// The encoder and decoder for the blocks of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockCoder {
    planes: [(PlaneCodec, PlaneShape); 2],
    stored: BlockGeometry,
    plain: BlockGeometry,
}

impl BlockCoder {
    /// Returns the coder of a layer, or `None` if both of its planes are raw.
    pub(crate) fn of(layout: &KvLayout, layer: usize) -> Option<Self> {
        let raw = layout.raw();
        let geometry = raw.layers.get(layer).filter(|geometry| geometry.is_encoded())?;
        let plane = |plane: usize| {
            let shape = raw.plane_shape(geometry, plane);
            let kind = [PlaneKind::Keys, PlaneKind::Values][plane];
            let (heads, tokens, dims) = (shape.heads, shape.tokens, shape.dims);
            (geometry.codecs[plane], PlaneShape { kind, heads, tokens, dims, dtype: shape.dtype })
        };
        Some(Self { planes: [plane(0), plane(1)], stored: *layout.block(layer), plain: *layout.plain_block(layer) })
    }

    /// Encodes a whole block to `stored`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corruption`]: an element is not finite or far above [`ENCODED_ELEMENT_MAX`]. Appended
    /// elements are neither, but a damaged tail may have one.
    pub(crate) fn encode(&self, plain: &[u8], stored: &mut [u8]) -> Result<()> {
        for (plane, (codec, shape)) in self.planes.iter().enumerate() {
            let ((from, len), (to, room)) = (self.plain.plane(plane), self.stored.plane(plane));
            let (plain, out) = (&plain[from..from + len], &mut stored[to..to + room]);
            debug_assert_eq!(room, codec.bytes(&shape.stored()), "the room of a plane");
            let encoded = match codec {
                PlaneCodec::Raw => {
                    out.copy_from_slice(plain);
                    true
                }
                PlaneCodec::Int8 => quantise::encode_8(shape, plain, out),
                PlaneCodec::Int4 => quantise::encode_4(shape, plain, out),
            };
            if !encoded {
                // Later groups of the page may be written, so no partial block may remain.
                stored.fill(0);
                return Err(damaged("an element that fits no range".into()));
            }
        }
        Ok(())
    }

    /// Decodes a whole block to `plain`. Bytes between the planes stay unchanged.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corruption`]: `stored` is not such a block.
    pub(crate) fn decode(&self, stored: &[u8], plain: &mut [u8]) -> Result<()> {
        for plane in 0..2 {
            let ((from, len), (to, room)) = (self.stored.plane(plane), self.plain.plane(plane));
            let bytes = stored.get(from..from + len).unwrap_or_default();
            self.decode_plane(plane, bytes, &mut plain[to..to + room])?;
        }
        Ok(())
    }

    /// Returns the decoded block of a group that a cut goes through, as elements of a tail.
    ///
    /// A decoded element may exceed [`ENCODED_ELEMENT_MAX`] by the rounding of a step. The element is clamped, so that
    /// it can be encoded again.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(crate) fn decoded_tail(&self, stored: &[u8]) -> Result<Vec<u8>> {
        let mut plain = vec![0; self.plain.block_bytes];
        self.decode(stored, &mut plain)?;
        clamp_elements(self.planes[0].1.dtype, &mut plain);
        Ok(plain)
    }

    /// Decodes plane 0 (keys) or 1 (values) to `plain`, which must have the plane's length.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(crate) fn decode_plane(&self, plane: usize, stored: &[u8], plain: &mut [u8]) -> Result<()> {
        let (codec, shape) = &self.planes[plane];
        if plain.is_empty() && stored.is_empty() {
            return Ok(());
        }
        decode((*codec).into(), shape, stored, plain)
    }

    /// Returns whether plane 0 (keys) or 1 (values) is encoded.
    pub(crate) fn encodes(&self, plane: usize) -> bool {
        self.planes[plane].0 != PlaneCodec::Raw
    }

    /// Returns the bytes of a decoded plane.
    pub(crate) fn plain_bytes(&self, plane: usize) -> usize {
        self.plain.plane(plane).1
    }

    /// Returns the offset in a stored plane of the first range that is not finite, if there is one. The elements of a
    /// raw plane are not looked at.
    pub(crate) fn first_bad(&self, plane: usize, stored: &[u8]) -> Option<usize> {
        let (codec, shape) = &self.planes[plane];
        codec.first_bad(&shape.stored(), stored)
    }

    /// Returns whether a stored plane has its length, and all of its numbers are finite: the ranges of an encoded
    /// plane, or the elements of a raw one.
    pub(crate) fn is_finite(&self, plane: usize, stored: &[u8]) -> bool {
        let is_raw = !self.encodes(plane);
        let elements = if is_raw { self.planes[plane].1.dtype.first_not_finite(stored) } else { None };
        elements.is_none() && self.first_bad(plane, stored).is_none()
    }
}

/// Clamps elements to [`ENCODED_ELEMENT_MAX`]. No f16 number exceeds it.
fn clamp_elements(dtype: DType, elements: &mut [u8]) {
    let Some(first) = dtype.first_not_encodable(elements) else { return };
    for element in elements[first..].chunks_exact_mut(dtype.bytes()) {
        if dtype.first_not_encodable(element).is_some() {
            // Both f32 and bf16 have the limit in their upper two bytes.
            let (upper, sign) = (element.len() - 2, element[element.len() - 1] & 0x80);
            element.fill(0);
            element[upper..].copy_from_slice(&((ENCODED_ELEMENT_MAX.to_bits() >> 16) as u16).to_le_bytes());
            element[upper + 1] |= sign;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn only_elements_above_the_limit_are_clamped() {
        let (limit, above) = (ENCODED_ELEMENT_MAX, ENCODED_ELEMENT_MAX.next_up());
        let values = [1.0, limit, -limit, above, -above, f32::MAX, f32::NEG_INFINITY, -0.0];
        let clamped = values.map(|x: f32| x.clamp(-limit, limit));
        let mut elements: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        clamp_elements(DType::F32, &mut elements);
        assert_eq!(elements, clamped.map(f32::to_le_bytes).concat());
        let rounded = |values: [f32; 8]| values.map(|x| bf16::from_f32(x).to_le_bytes()).concat();
        let mut elements = rounded(values.map(|x| x * 1.01));
        clamp_elements(DType::Bf16, &mut elements);
        assert_eq!(elements, rounded(values.map(|x| bf16::from_f32(x * 1.01).to_f32().clamp(-limit, limit))));
    }
}
