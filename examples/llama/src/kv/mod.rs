//! The KV cache as the runtime sees it: append per layer, attend per layer, commit per step.
//!
//! [`memory`] holds everything in memory: full attention, the reference of every accuracy figure, and the `window` policy;
//! [`grouped`] is how it attends in the groups and parts of a store.
//! [`store`] keeps them in a stratakv store, of which a step reads what it attends. [`backend`] turns command-line options into caches.

pub mod adapters;
pub mod backend;
pub mod grouped;
pub mod memory;
pub mod method;
pub mod probe;
pub mod store;

use anyhow::{Result, ensure};
use half::{bf16, f16};
use stratakv::Rope;
use stratakv::pipeline::PipelineReport;

pub use memory::MemoryKv;

/// Element type in which keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvDType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvDType {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Rounds to the nearest value of this type, ties to even: what reading back a stored value gives.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::F16 => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Bf16 => values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        }
    }
}

/// One layer's attention as the cache must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerGeometry {
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of one key and of one value.
    pub head_dim: usize,
    /// Sliding window: newest tokens a query sees, itself included; `None`: all.
    pub window: Option<usize>,
}

impl LayerGeometry {
    /// Elements of one token's keys (or values).
    #[must_use]
    pub const fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Everything about the model that a cache needs.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGeometry {
    /// One entry per layer.
    pub layers: Vec<LayerGeometry>,
    /// Query heads, a multiple of every layer's KV heads.
    pub query_heads: usize,
    /// Factor of `q . k` in front of the softmax.
    pub scale: f32,
    /// Element type of keys and values at rest.
    pub dtype: KvDType,
    /// How keys are rotated, where a store's layout is to say so: for methods that rebuild keys.
    pub rope: Option<Rope>,
}

impl KvGeometry {
    /// Bytes of one token's keys and values over all layers.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        self.layers.iter().map(|l| 2 * l.width() * self.dtype.bytes()).sum()
    }
}

/// What one cache has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Keys and values at rest, in bytes (on disk, or in memory for [`MemoryKv`]); headers and padding not counted.
    pub kv_bytes_total: u64,
    /// Bytes read from where keys and values rest, by decode steps: for a store what its devices completed, whole pages.
    pub bytes_read: u64,
    /// Decode steps, that is calls of [`KvCache::attend`] divided by the number of layers.
    pub steps: u64,
    /// Most bytes of keys, values and summaries held in memory at once; for a store all of its accounted memory, buffers
    /// and tables included, since it was opened.
    pub resident_bytes_peak: u64,
    /// What reading ahead did, where the cache does it.
    pub pipeline: Option<PipelineReport>,
}

impl KvStats {
    /// Mean of [`KvStats::bytes_read`] per decode step.
    #[must_use]
    pub fn bytes_read_per_step(&self) -> u64 {
        self.bytes_read.checked_div(self.steps).unwrap_or(0)
    }
}

/// Token ids and caller state of the last commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Ids of all tokens in the cache, oldest first.
    pub ids: Vec<u32>,
    /// The bytes given with the last commit.
    pub state: Vec<u8>,
}

/// Queries that a token will presumably have in the next layer, `[query_heads, head_dim]`.
pub type Predict<'a> = dyn Fn() -> Result<Vec<f32>> + 'a;

/// The keys and values of one token sequence.
///
/// Tensors are `f32`, token-major: keys and values `[tokens, kv_heads, head_dim]` (keys after RoPE), queries and outputs
/// `[query_heads, head_dim]` of one token. Keys and values given to [`append`](Self::append) are already rounded to the geometry's dtype.
pub trait KvCache {
    /// The geometry it was made with.
    fn geometry(&self) -> &KvGeometry;

    /// Tokens that are complete in every layer.
    fn len(&self) -> usize;

    /// True before the first token.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `tokens` tokens to one layer: a whole prompt in prefill, one token in decode.
    ///
    /// # Errors
    /// Lengths that do not fit the geometry, values that are not finite, and what the cache's medium reports.
    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()>;

    /// Comes before [`attend`](Self::attend) with the same queries: a cache that reads may begin to. `predict` gives the queries
    /// that the same token will presumably have in the next layer, none behind the last; what they choose may be read ahead.
    ///
    /// # Errors
    /// As [`attend`](Self::attend), and what `predict` reports.
    fn prepare(&mut self, _layer: usize, _queries: &[f32], _predict: Option<&Predict<'_>>) -> Result<()> {
        Ok(())
    }

    /// Attention of the newest token of this layer under the cache's policy; every attended token counts in its budget.
    ///
    /// # Errors
    /// Lengths that do not fit the geometry, an empty layer, and what the cache's medium reports.
    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()>;

    /// Sees the queries of prefill, `[tokens, query_heads, head_dim]`, when [`Wanted::Queries`](crate::model::Wanted) asks for them.
    fn observe(&mut self, _layer: usize, _queries: &[f32]) {}

    /// Makes everything appended so far durable, together with the ids of the tokens appended since the last commit and the caller's state.
    ///
    /// # Errors
    /// What the cache's medium reports; the commit is then indeterminate until the sequence is opened again.
    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()>;

    /// What the last commit left, `None` before the first.
    ///
    /// # Errors
    /// What the cache's medium reports.
    fn committed(&self) -> Result<Option<Committed>>;

    /// Figures since the cache was made.
    fn stats(&self) -> KvStats;

    /// Ends the use of the cache. Without `keep` a stored sequence is deleted; with it, what was committed stays.
    ///
    /// # Errors
    /// What the cache's medium reports.
    fn finish(self: Box<Self>, keep: bool) -> Result<()>;
}

impl<C: KvCache + ?Sized> KvCache for Box<C> {
    fn geometry(&self) -> &KvGeometry {
        (**self).geometry()
    }

    fn len(&self) -> usize {
        (**self).len()
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        (**self).append(layer, keys, values, tokens)
    }

    fn prepare(&mut self, layer: usize, queries: &[f32], predict: Option<&Predict<'_>>) -> Result<()> {
        (**self).prepare(layer, queries, predict)
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        (**self).attend(layer, queries, out)
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        (**self).commit(new_ids, state)
    }

    fn committed(&self) -> Result<Option<Committed>> {
        (**self).committed()
    }

    fn stats(&self) -> KvStats {
        (**self).stats()
    }

    fn finish(self: Box<Self>, keep: bool) -> Result<()> {
        // The inner box, unless the compiler were to pick this very method again.
        <C as KvCache>::finish(*self, keep)
    }
}

/// Checks an append against the geometry; for implementations of [`KvCache`].
///
/// # Errors
/// An unknown layer, lengths that differ from `tokens * kv_heads * head_dim`, values that are not finite.
pub fn check_append(geometry: &KvGeometry, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
    let shape = check_layer(geometry, layer)?;
    let expected = tokens * shape.width();
    for (name, data) in [("keys", keys), ("values", values)] {
        ensure!(
            data.len() == expected,
            "layer {layer}: {name} hold {} elements, {tokens} tokens of {} KV heads of {} need {expected}",
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

/// Checks the arguments of an attend against the geometry; for implementations of [`KvCache`].
///
/// # Errors
/// An unknown layer, lengths that differ from `query_heads * head_dim`.
pub fn check_attend(geometry: &KvGeometry, layer: usize, queries: &[f32], out: &[f32]) -> Result<()> {
    let shape = check_layer(geometry, layer)?;
    let expected = geometry.query_heads * shape.head_dim;
    ensure!(
        queries.len() == expected && out.len() == expected,
        "layer {layer}: queries hold {} and outputs {} elements, {} heads of {} need {expected}",
        queries.len(),
        out.len(),
        geometry.query_heads,
        shape.head_dim
    );
    Ok(())
}

/// A layer that the geometry has; for implementations of [`KvCache`].
///
/// # Errors
/// An unknown layer.
pub fn check_layer(geometry: &KvGeometry, layer: usize) -> Result<LayerGeometry> {
    let layers = geometry.layers.len();
    geometry.layers.get(layer).copied().ok_or_else(|| anyhow::anyhow!("layer {layer}: the model has {layers}"))
}
