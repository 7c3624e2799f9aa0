//! [`KeyGroup`]: the keys of a sealed group, which summaries are built from.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::widen;
use crate::retrieval::clusters::MAX_KEY_MAGNITUDE;
use crate::retrieval::key_shape::KeyShape;

/// The keys of one sealed group: all of its tokens are valid.
#[derive(Clone, Copy, Debug)]
pub struct KeyGroup<'a> {
    shape: KeyShape,
    plane: &'a [u8],
    index: u64,
}

impl<'a> KeyGroup<'a> {
    /// Returns group `index` with its K plane, `[kv_heads, group_tokens, key_dim]`, little-endian.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the plane has another length.
    pub fn new(shape: KeyShape, plane: &'a [u8], index: u64) -> Result<Self> {
        let expected = shape.width() * shape.group_tokens * shape.dtype.bytes();
        if plane.len() != expected || expected == 0 {
            let text = format!("group of keys: the K plane has {} bytes, and its shape needs {expected}", plane.len());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(Self { shape, plane, index })
    }

    /// Returns the shape of the keys.
    #[must_use]
    pub fn shape(&self) -> &KeyShape {
        &self.shape
    }

    /// Returns the group's index within its layer.
    #[must_use]
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Returns the K plane, `[kv_heads, group_tokens, key_dim]` in the layout's element type.
    #[must_use]
    pub fn plane(&self) -> &'a [u8] {
        self.plane
    }

    /// Writes the key of a token of the group, of one KV head or of all heads. Elements whose magnitude is above the
    /// limit of clusters are lowered to it.
    pub(crate) fn row(&self, token: usize, head: Option<usize>, key: &mut [f32]) {
        let KeyShape { kv_heads, key_dim, group_tokens, dtype } = self.shape;
        let row = key_dim * dtype.bytes();
        let heads = head.map_or(0..kv_heads, |head| head..head + 1);
        for (head, key) in heads.zip(key.chunks_exact_mut(key_dim)) {
            widen(&self.plane[(head * group_tokens + token) * row..][..row], dtype, key);
            key.iter_mut().for_each(|x| *x = x.clamp(-MAX_KEY_MAGNITUDE, MAX_KEY_MAGNITUDE));
        }
    }

    /// Returns the keys token by token, `[group_tokens, kv_heads, key_dim]`.
    #[must_use]
    pub fn tokens(&self) -> Vec<f32> {
        let KeyShape { kv_heads, key_dim, group_tokens, dtype } = self.shape;
        let mut out = vec![0.0; kv_heads * key_dim * group_tokens];
        let row = key_dim * dtype.bytes();
        for head in 0..kv_heads {
            for token in 0..group_tokens {
                let bytes = &self.plane[(head * group_tokens + token) * row..][..row];
                widen(bytes, dtype, &mut out[(token * kv_heads + head) * key_dim..][..key_dim]);
            }
        }
        out
    }
}
