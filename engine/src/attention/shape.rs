//! The tensor geometry that attention works on.

use crate::error::{Error, ErrorKind, Result};
use stratakv_format::DType;

/// Most KV heads of a layer (the width of [`HeadMask`](super::HeadMask)).
pub const MAX_KV_HEADS: usize = 128;
/// Most query heads of a layer.
pub const MAX_Q_HEADS: usize = 1024;
/// Largest `dk` or `dv`.
pub const MAX_HEAD_DIM: usize = 1024;
/// Most tokens of a group (the width of [`TokenMask`](super::TokenMask)).
pub const MAX_GROUP_TOKENS: usize = 128;

/// Heads, dims, element type and scale of one layer's attention. Valid by construction.
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
    /// `q_heads` query heads share `kv_heads` KV heads (grouped-query attention: query head `h` uses KV head
    /// `h / (q_heads / kv_heads)`). A key has `dk` elements, a value `dv`. With `dv = 0` there is no V plane and the value of a
    /// token is its key (see [`with_value_dims`](Self::with_value_dims)). The scale is `1 / sqrt(dk)`.
    ///
    /// # Errors
    /// `InvalidArgument`: a count is zero or over its maximum, or `q_heads` is no multiple of `kv_heads`.
    pub fn new(q_heads: usize, kv_heads: usize, dk: usize, dv: usize, dtype: DType) -> Result<Self> {
        let invalid = |context: String| Err(Error::new(ErrorKind::InvalidArgument, context));
        if kv_heads == 0 || kv_heads > MAX_KV_HEADS {
            return invalid(format!("attention with {kv_heads} KV heads: 1 to {MAX_KV_HEADS} are possible"));
        }
        if q_heads == 0 || q_heads > MAX_Q_HEADS || !q_heads.is_multiple_of(kv_heads) {
            return invalid(format!(
                "attention with {q_heads} query heads: a multiple of the {kv_heads} KV heads up to {MAX_Q_HEADS} is needed"
            ));
        }
        if dk == 0 || dk > MAX_HEAD_DIM || dv > MAX_HEAD_DIM {
            return invalid(format!(
                "attention with dk = {dk}, dv = {dv}: dk 1 to {MAX_HEAD_DIM}, dv 0 to {MAX_HEAD_DIM} are possible"
            ));
        }
        let value_dims = if dv == 0 { dk } else { dv };
        Ok(Self { q_heads, kv_heads, dk, dv, value_dims, scale: 1.0 / (dk as f32).sqrt(), dtype })
    }

    /// The same shape with another factor for the scores.
    ///
    /// # Errors
    /// `InvalidArgument` where `scale` is not finite and positive.
    pub fn with_scale(mut self, scale: f32) -> Result<Self> {
        if !scale.is_finite() || scale <= 0.0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("attention scale {scale}: must be finite and above 0"),
            ));
        }
        self.scale = scale;
        Ok(self)
    }

    /// For `dv = 0` (multi-head latent attention: the key is the latent vector and then the RoPE part): the value of a token is
    /// the first `value_dims` elements of its key. With `dv > 0` only `value_dims == dv` is accepted.
    ///
    /// # Errors
    /// `InvalidArgument` where `value_dims` is zero, exceeds `dk`, or differs from `dv > 0`.
    pub fn with_value_dims(mut self, value_dims: usize) -> Result<Self> {
        let fits = if self.dv == 0 { (1..=self.dk).contains(&value_dims) } else { value_dims == self.dv };
        if !fits {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("attention with {value_dims} value dims: dk = {}, dv = {}", self.dk, self.dv),
            ));
        }
        self.value_dims = value_dims;
        Ok(self)
    }

    /// Query heads.
    #[must_use]
    pub fn q_heads(&self) -> usize {
        self.q_heads
    }

    /// KV heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Query heads that share a KV head.
    #[must_use]
    pub fn group_heads(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Elements of a key.
    #[must_use]
    pub fn dk(&self) -> usize {
        self.dk
    }

    /// Elements of a stored value; 0 where the value is part of the key.
    #[must_use]
    pub fn dv(&self) -> usize {
        self.dv
    }

    /// Elements of a value, and of an output head.
    #[must_use]
    pub fn value_dims(&self) -> usize {
        self.value_dims
    }

    /// Factor of the scores.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Element type of keys and values.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements of a query `[q_heads, dk]`.
    #[must_use]
    pub fn query_len(&self) -> usize {
        self.q_heads * self.dk
    }

    /// Elements of an output `[q_heads, value_dims]`.
    #[must_use]
    pub fn output_len(&self) -> usize {
        self.q_heads * self.value_dims
    }

    /// Bytes of the K plane of a group of `group_tokens`.
    #[must_use]
    pub fn k_plane_bytes(&self, group_tokens: usize) -> usize {
        (self.kv_heads * self.dk * self.dtype.bytes()).saturating_mul(group_tokens)
    }

    /// Bytes of the V plane of a group of `group_tokens`.
    #[must_use]
    pub fn v_plane_bytes(&self, group_tokens: usize) -> usize {
        (self.kv_heads * self.dv * self.dtype.bytes()).saturating_mul(group_tokens)
    }
}
