//! Blocks with encoded planes: encoding and decoding between the stored and the plain geometry of a layer.

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
    /// [`crate::ErrorKind::Corruption`]: an element fits no range. The check against [`Self::largest`] prevents this.
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

    /// Returns the largest magnitude that every codec accepts. The range between two such elements is finite.
    pub(crate) const fn largest() -> f32 {
        // 2^126.
        f32::from_bits(0x7e80_0000)
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

    /// Returns the decoded block. It differs from the original only by rounding.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(crate) fn decoded(&self, stored: &[u8]) -> Result<Vec<u8>> {
        let mut plain = vec![0; self.plain.block_bytes];
        self.decode(stored, &mut plain)?;
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

    /// Returns the offset in a stored plane of the first range that is not finite, if there is one.
    pub(crate) fn first_bad(&self, plane: usize, stored: &[u8]) -> Option<usize> {
        let (codec, shape) = &self.planes[plane];
        codec.first_bad(&shape.stored(), stored)
    }
}
