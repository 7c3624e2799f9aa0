//! One group of keys and values in memory.

use super::mask::{HeadMask, TokenMask};
use super::shape::{AttentionShape, MAX_GROUP_TOKENS};
use crate::error::{Error, ErrorKind, Result};

/// One group of keys and values in memory, and what of it takes part. Little-endian elements of the shape's dtype, at any
/// address (no alignment is needed).
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// K plane `[kv_heads, group_tokens, dk]`; longer is allowed (padding).
    pub k: &'a [u8],
    /// V plane `[kv_heads, group_tokens, dv]`; longer is allowed; unused where `dv = 0`.
    pub v: &'a [u8],
    /// Token slots per head: the stride between heads is `group_tokens` rows. 1 to 128.
    pub group_tokens: usize,
    /// The first `tokens <= group_tokens` slots of each head are valid.
    pub tokens: usize,
    /// KV heads that take part; must be heads of the layer.
    pub heads: HeadMask,
    /// Tokens of the group that take part, out of the valid ones; all of them if `None`.
    pub positions: Option<TokenMask>,
}

impl Piece<'_> {
    /// The tokens that take part.
    pub(super) fn selected_tokens(&self) -> TokenMask {
        let valid = TokenMask::all(self.tokens);
        self.positions.map_or(valid, |positions| positions.intersection(valid))
    }

    /// Checks lengths and masks against the shape.
    pub(super) fn check(&self, shape: &AttentionShape) -> Result<()> {
        let invalid = |context: String| Err(Error::new(ErrorKind::InvalidArgument, context));
        let slots = self.group_tokens;
        if slots == 0 || slots > MAX_GROUP_TOKENS || self.tokens > slots {
            return invalid(format!(
                "piece of {} tokens in {slots} slots: 1 to {MAX_GROUP_TOKENS} slots, at most all of them valid",
                self.tokens
            ));
        }
        let (k_bytes, v_bytes) = (shape.k_plane_bytes(slots), shape.v_plane_bytes(slots));
        if self.k.len() < k_bytes || self.v.len() < v_bytes {
            return invalid(format!(
                "piece with planes of {} and {} bytes: {k_bytes} and {v_bytes} are needed",
                self.k.len(),
                self.v.len()
            ));
        }
        if let Some(head) = self.heads.difference(HeadMask::all(shape.kv_heads())).iter().next() {
            return invalid(format!("piece with KV head {head}: the layer has {}", shape.kv_heads()));
        }
        if let Some(token) = self.positions.and_then(|p| p.difference(TokenMask::all(self.tokens)).iter().next()) {
            return invalid(format!("piece with token {token}: the group has {}", self.tokens));
        }
        Ok(())
    }
}
