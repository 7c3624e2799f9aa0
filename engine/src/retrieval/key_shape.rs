//! The shape of the keys that summaries describe.

use stratakv_format::DType;

/// The shape of the keys of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyShape {
    /// The number of KV heads.
    pub kv_heads: usize,
    /// The elements of a key of one head.
    pub key_dim: usize,
    /// The tokens of a group.
    pub group_tokens: usize,
    /// The element type.
    pub dtype: DType,
}

impl KeyShape {
    /// Returns the elements of a token's keys, over all KV heads.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.kv_heads * self.key_dim
    }
}
