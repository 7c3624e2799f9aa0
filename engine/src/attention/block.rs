//! [`KvBlock`]: the keys and values of one group in memory.

use super::mask::{HeadMask, TokenMask};
use super::shape::{AttentionShape, MAX_GROUP_TOKENS};
use crate::error::{Error, ErrorKind, Result};

/// The keys and values of one group in memory, and the heads and tokens of it that take part.
///
/// Elements are little-endian, of the dtype of the shape. No alignment is needed.
#[derive(Clone, Copy, Debug)]
pub struct KvBlock<'a> {
    /// The K plane `[kv_heads, group_tokens, dk]`, or `[group_tokens, dk]` of one head. It may be longer (padding).
    pub k: &'a [u8],
    /// The V plane, likewise with `dv`. It may be longer. It is unused if `dv = 0`.
    pub v: &'a [u8],
    /// The token slots of a head, 1 to 128. The stride between heads is `group_tokens` rows.
    pub group_tokens: usize,
    /// The valid slots of each head: the first `tokens <= group_tokens`.
    pub tokens: usize,
    /// The KV heads that take part. They must be heads of the layer.
    pub heads: HeadMask,
    /// The valid tokens that take part, or `None` for all of them.
    pub positions: Option<TokenMask>,
    /// True if the planes hold the rows of one head. `heads` is that head then.
    pub one_head: bool,
}

impl KvBlock<'_> {
    /// Returns the tokens that take part.
    pub(super) fn selected_tokens(&self) -> TokenMask {
        let valid = TokenMask::all(self.tokens);
        self.positions.map_or(valid, |positions| positions.intersection(valid))
    }

    /// Checks lengths and masks against the shape.
    ///
    /// # Errors
    /// `InvalidArgument`: the slots, a plane, a head or a token does not fit.
    pub(super) fn check(&self, shape: &AttentionShape) -> Result<()> {
        let invalid = |context: String| Err(Error::new(ErrorKind::InvalidArgument, context));
        let slots = self.group_tokens;
        if slots == 0 || slots > MAX_GROUP_TOKENS || self.tokens > slots {
            return invalid(format!(
                "block of {} tokens in {slots} slots: it needs 1 to {MAX_GROUP_TOKENS} slots and at most as many \
                 tokens",
                self.tokens
            ));
        }
        if self.one_head && self.heads.len() > 1 {
            return invalid(format!("block with the rows of one head for {} heads", self.heads.len()));
        }
        let stored = if self.one_head { shape.kv_heads() } else { 1 };
        let (k_bytes, v_bytes) = (shape.k_plane_bytes(slots) / stored, shape.v_plane_bytes(slots) / stored);
        if self.k.len() < k_bytes || self.v.len() < v_bytes {
            return invalid(format!(
                "block with planes of {} and {} bytes: {k_bytes} and {v_bytes} are needed",
                self.k.len(),
                self.v.len()
            ));
        }
        if let Some(head) = self.heads.difference(HeadMask::all(shape.kv_heads())).iter().next() {
            return invalid(format!("block with KV head {head}: the layer has {}", shape.kv_heads()));
        }
        if let Some(token) = self.positions.and_then(|p| p.difference(TokenMask::all(self.tokens)).iter().next()) {
            return invalid(format!("block with token {token}: the group has {}", self.tokens));
        }
        Ok(())
    }
}
