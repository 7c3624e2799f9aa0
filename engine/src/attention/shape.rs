//! [`AttentionShape`]: heads, dims, element type and scale of one layer.

use crate::error::{Error, ErrorKind, Result};
use stratakv_format::DType;

/// The most KV heads of a layer: the width of [`HeadMask`](super::HeadMask).
pub const MAX_KV_HEADS: usize = 128;
/// The most query heads of a layer.
pub const MAX_Q_HEADS: usize = 1024;
/// The largest `dk` or `dv`.
pub const MAX_HEAD_DIM: usize = 1024;
/// The most tokens of a group: the width of [`TokenMask`](super::TokenMask).
pub const MAX_GROUP_TOKENS: usize = 128;

/// Heads, dims, element type and scale of the attention of one layer. Every value is valid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    q_heads: usize,
    kv_heads: usize,
    dk: usize,
    dv: usize,
    value_dims: usize,
    scale: f32,
    dtype: DType,
}

impl AttentionShape {
    /// Returns the shape of `q_heads` query heads that share `kv_heads` KV heads (grouped-query attention).
    ///
    /// Query head `h` uses KV head `h / (q_heads / kv_heads)`. A key has `dk` elements and a value has `dv`. With `dv =
    /// 0` there is no V plane, and the value of a token is its key (see [`with_value_dims`](Self::with_value_dims)).
    /// The scale is `1 / sqrt(dk)`.
    ///
    /// # Errors
    /// `InvalidArgument`: a count is zero or over its maximum, or `q_heads` is not a multiple of `kv_heads`.
    pub fn new(q_heads: usize, kv_heads: usize, dk: usize, dv: usize, dtype: DType) -> Result<Self> {
        let invalid = |context: String| Err(Error::new(ErrorKind::InvalidArgument, context));
        if kv_heads == 0 || kv_heads > MAX_KV_HEADS {
            return invalid(format!("attention with {kv_heads} KV heads: it must have 1 to {MAX_KV_HEADS}"));
        }
        if q_heads == 0 || q_heads > MAX_Q_HEADS || !q_heads.is_multiple_of(kv_heads) {
            return invalid(format!(
                "attention with {q_heads} query heads: it needs a multiple of its {kv_heads} KV heads, at most \
                 {MAX_Q_HEADS}"
            ));
        }
        if dk == 0 || dk > MAX_HEAD_DIM || dv > MAX_HEAD_DIM {
            return invalid(format!(
                "attention with dk = {dk}, dv = {dv}: dk must be 1 to {MAX_HEAD_DIM}, dv 0 to {MAX_HEAD_DIM}"
            ));
        }
        let value_dims = if dv == 0 { dk } else { dv };
        Ok(Self { q_heads, kv_heads, dk, dv, value_dims, scale: 1.0 / (dk as f32).sqrt(), dtype })
    }

    /// Returns the same shape with another factor for the scores.
    ///
    /// # Errors
    /// `InvalidArgument` if `scale` is not finite and positive.
    pub fn with_scale(mut self, scale: f32) -> Result<Self> {
        if !scale.is_finite() || scale <= 0.0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("attention scale {scale}: it must be finite and above 0"),
            ));
        }
        self.scale = scale;
        Ok(self)
    }

    /// Returns the same shape with values that are the first `value_dims` elements of the keys, for `dv = 0`.
    ///
    /// Multi-head latent attention stores such keys: the latent vector, then the RoPE part. With `dv > 0` only
    /// `value_dims == dv` is accepted.
    ///
    /// # Errors
    /// `InvalidArgument` if `value_dims` is zero, exceeds `dk`, or differs from `dv > 0`.
    pub fn with_value_dims(mut self, value_dims: usize) -> Result<Self> {
        let fits = if self.dv == 0 { (1..=self.dk).contains(&value_dims) } else { value_dims == self.dv };
        if !fits {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "attention with {value_dims} value dims, dk = {}, dv = {}: they must be dv, or 1 to dk if dv is 0",
                    self.dk, self.dv
                ),
            ));
        }
        self.value_dims = value_dims;
        Ok(self)
    }

    /// Returns the number of query heads.
    #[must_use]
    pub fn q_heads(&self) -> usize {
        self.q_heads
    }

    /// Returns the number of KV heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Returns the number of query heads that share a KV head.
    #[must_use]
    pub fn group_heads(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Returns the elements of a key.
    #[must_use]
    pub fn dk(&self) -> usize {
        self.dk
    }

    /// Returns the elements of a stored value, or 0 if the value is part of the key.
    #[must_use]
    pub fn dv(&self) -> usize {
        self.dv
    }

    /// Returns the elements of a value, and of an output head.
    #[must_use]
    pub fn value_dims(&self) -> usize {
        self.value_dims
    }

    /// Returns the factor of the scores.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Returns the element type of keys and values.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the elements of a query `[q_heads, dk]`.
    #[must_use]
    pub fn query_len(&self) -> usize {
        self.q_heads * self.dk
    }

    /// Returns the elements of an output `[q_heads, value_dims]`.
    #[must_use]
    pub fn output_len(&self) -> usize {
        self.q_heads * self.value_dims
    }

    /// Returns the bytes of the K plane of a group of `group_tokens`.
    #[must_use]
    pub fn k_plane_bytes(&self, group_tokens: usize) -> usize {
        (self.kv_heads * self.dk * self.dtype.bytes()).saturating_mul(group_tokens)
    }

    /// Returns the bytes of the V plane of a group of `group_tokens`.
    #[must_use]
    pub fn v_plane_bytes(&self, group_tokens: usize) -> usize {
        (self.kv_heads * self.dv * self.dtype.bytes()).saturating_mul(group_tokens)
    }
}
