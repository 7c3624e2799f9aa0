//! The shape of a KV cache, and the checks that every cache makes with it.

use anyhow::{Result, ensure};
use half::{bf16, f16};
use stratakv::layout::Rope;

/// The element type in which keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvDType {
    /// IEEE 754 binary32
    F32,
    /// IEEE 754 binary16
    F16,
    /// bfloat16
    Bf16,
}

impl KvDType {
    /// Returns the bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Rounds to the nearest value of this type, ties to even. A stored value reads back as its rounded value.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::F16 => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Bf16 => values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        }
    }
}

/// The shape of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerGeometry {
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of one key, and of one value.
    pub head_dim: usize,
    /// The sliding window: how many of the newest tokens a query sees, its own included. `None` means all tokens.
    pub window: Option<usize>,
}

impl LayerGeometry {
    /// Returns the elements of one token's keys, which is also the number of its values.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// The properties of a model that a cache needs.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGeometry {
    /// One entry per layer.
    pub layers: Vec<LayerGeometry>,
    /// Query heads, a multiple of every layer's KV heads.
    pub query_heads: usize,
    /// The factor of `q . k` before the softmax.
    pub scale: f32,
    /// The element type of stored keys and values.
    pub dtype: KvDType,
    /// The rotation of keys. A store's layout holds it only if a method reconstructs keys.
    pub rope: Option<Rope>,
}

impl KvGeometry {
    /// Returns the bytes of one token's keys and values over all layers.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        self.layers.iter().map(|l| 2 * l.width() * self.dtype.bytes()).sum()
    }

    /// Returns the geometry of a layer.
    ///
    /// # Errors
    /// Fails if the model has no such layer.
    pub fn layer(&self, layer: usize) -> Result<LayerGeometry> {
        let layers = self.layers.len();
        self.layers.get(layer).copied().ok_or_else(|| anyhow::anyhow!("layer {layer}: the model has {layers} layers"))
    }

    /// Checks the arguments of an append, for implementations of [`KvCache`](super::KvCache).
    ///
    /// # Errors
    /// Fails if the layer does not exist, if a length differs from `tokens * kv_heads * head_dim`, or if a value is not
    /// finite.
    pub fn check_append(&self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        let shape = self.layer(layer)?;
        let expected = tokens * shape.width();
        for (name, data) in [("keys", keys), ("values", values)] {
            ensure!(
                data.len() == expected,
                "layer {layer}: {name} hold {} elements, but {tokens} tokens of {} KV heads of {} need {expected}",
                data.len(),
                shape.kv_heads,
                shape.head_dim
            );
            if let Some(i) = data.iter().position(|x| !x.is_finite()) {
                let token = i / shape.width();
                anyhow::bail!("layer {layer}: {name} of appended token {token} hold {}, which is not finite", data[i]);
            }
        }
        Ok(())
    }

    /// Checks the arguments of an attend, for implementations of [`KvCache`](super::KvCache).
    ///
    /// # Errors
    /// Fails if the layer does not exist, or if a length differs from `query_heads * head_dim`.
    pub fn check_attend(&self, layer: usize, queries: &[f32], out: &[f32]) -> Result<()> {
        let shape = self.layer(layer)?;
        let expected = self.query_heads * shape.head_dim;
        ensure!(
            queries.len() == expected && out.len() == expected,
            "layer {layer}: queries hold {} elements and outputs {}, but {} heads of {} need {expected}",
            queries.len(),
            out.len(),
            self.query_heads,
            shape.head_dim
        );
        Ok(())
    }
}
