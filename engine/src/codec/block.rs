//! Blocks of a layer whose planes are stored under a codec: the geometry that the layout says, both ways.

use super::{Codec, PlaneKind, PlaneShape, damaged, decode, quantise};
use crate::error::Result;
use crate::layout::KvLayout;
use stratakv_format::PlaneCodec;
use stratakv_format::layout::BlockGeometry;

impl From<PlaneCodec> for Codec {
    fn from(codec: PlaneCodec) -> Self {
        match codec {
            PlaneCodec::Raw => Self::Raw,
            PlaneCodec::Int8 => Self::Int8,
            PlaneCodec::Int4 => Self::Int4,
        }
    }
}

/// How the blocks of a layer are stored, where not as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockCoder {
    planes: [(PlaneCodec, PlaneShape); 2],
    stored: BlockGeometry,
    plain: BlockGeometry,
}

impl BlockCoder {
    /// That of a layer, which exists; none where its blocks are as they are.
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

    /// Encodes a block to `stored`; both whole.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corruption`]: an element that no range holds, which [`Self::largest`] keeps out.
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
                // Nothing of it reaches a device behind other groups of its page.
                stored.fill(0);
                return Err(damaged("elements that no range holds".into()));
            }
        }
        Ok(())
    }

    /// The largest magnitude of an element that every codec holds beside any other: the range of two of them is a finite number.
    pub(crate) const fn largest() -> f32 {
        // 2^126.
        f32::from_bits(0x7e80_0000)
    }

    /// Decodes a block to `plain`; both whole. What lies between the planes stays as it is.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corruption`]: it is no such block.
    pub(crate) fn decode(&self, stored: &[u8], plain: &mut [u8]) -> Result<()> {
        for plane in 0..2 {
            let ((from, len), (to, room)) = (self.stored.plane(plane), self.plain.plane(plane));
            let bytes = stored.get(from..from + len).unwrap_or_default();
            self.decode_plane(plane, bytes, &mut plain[to..to + room])?;
        }
        Ok(())
    }

    /// A block as it was before it was encoded, but for rounding.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(crate) fn decoded(&self, stored: &[u8]) -> Result<Vec<u8>> {
        let mut plain = vec![0; self.plain.block_bytes];
        self.decode(stored, &mut plain)?;
        Ok(plain)
    }

    /// Decodes a plane, 0 = K, 1 = V, to `plain`, which has its bytes.
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

    /// Whether plane 0 = K or 1 = V is stored otherwise than as it is.
    pub(crate) fn encodes(&self, plane: usize) -> bool {
        self.planes[plane].0 != PlaneCodec::Raw
    }

    /// Bytes of a plane as it is.
    pub(crate) fn plain_bytes(&self, plane: usize) -> usize {
        self.plain.plane(plane).1
    }

    /// The offset in a stored plane of what makes it none, if anything does: a range that is not finite.
    pub(crate) fn first_bad(&self, plane: usize, stored: &[u8]) -> Option<usize> {
        let (codec, shape) = &self.planes[plane];
        codec.first_bad(&shape.stored(), stored)
    }
}
