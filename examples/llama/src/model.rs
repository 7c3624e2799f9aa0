//! The decoder: prefill of a whole prompt, and single decode steps through a [`KvCache`].
//!
//! Prefill works layer by layer, in chunks of tokens:
//!
//! 1. The layer's queries, keys and values are computed and rotated. Keys and values are rounded to the caches'
//!    dtype, so that prefill and decode attend to the same numbers.
//! 2. Dense attention (`attention.rs`) and the MLP update the residual stream.
//! 3. Keys and values go to every cache. The layer's own copy of them, and the residual stream, are kept in files if
//!    the prompt is long (`prompt_rows.rs`).
//!
//! A decode step works layer by layer, for one token:
//!
//! 1. Queries, keys and values are computed, and the cache gets the keys and values ([`KvCache::append`]).
//! 2. The cache prepares to read ([`KvCache::prepare`]). It receives a function that predicts the next layer's
//!    queries from this layer's input, because the input changes little from layer to layer (KVSwap).
//! 3. The cache attends ([`KvCache::attend`]), and the MLP updates the residual stream.
//!
//! Several tokens that follow others, such as a second message of a chat, also go layer by layer. All of them are
//! projected at once, so that each weight is read once per chunk. The cache attends for one token after the other.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rayon::prelude::*;

use crate::attention::{self, Shape};
use crate::awake::with_threads_awake;
use crate::config::ModelConfig;
use crate::kv::{KvCache, KvDType, KvGeometry, Predict};
use crate::linear::{Linear, RmsNorm};
use crate::prompt_rows::{PromptPlane, PromptRows};
use crate::rope::{RotaryFrequencies, Rotation};
use crate::simd::SiluMul;
use crate::weights::{WeightMatrix, Weights, open_gguf};

/// The f32 elements that the activations of one chunk of prefill may have: 64 MiB.
const CHUNK_ELEMENTS: usize = 16 << 20;

/// The positions whose logits prefill computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitPositions {
    /// No position, because a decode step follows. The last layer then ends at its keys and values.
    Nothing,
    /// The last position.
    Last,
    /// No position. The caches receive the queries of every position and layer.
    Queries,
    /// Every position, `[tokens, vocab]`.
    All,
}

/// A loaded model.
pub struct Model {
    config: ModelConfig,
    embedding: Arc<WeightMatrix>,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    head: Linear,
    rope: RotaryFrequencies,
}

struct DecoderLayer {
    attention_norm: RmsNorm,
    /// Queries, keys and values, as one projection.
    qkv: Linear,
    head_norms: Option<(RmsNorm, RmsNorm)>,
    output: Linear,
    mlp_norm: RmsNorm,
    /// Gate and up, as one projection.
    gate_up: Linear,
    down: Linear,
}

/// The rows of a prompt during prefill.
struct PrefillState {
    /// The residual stream, `[tokens, hidden_size]`.
    hidden: PromptRows,
    /// The keys and values of the layer that is computed.
    keys: PromptPlane,
    values: PromptPlane,
}

/// A layer during prefill.
struct PrefillLayer<'a> {
    index: usize,
    /// The first tokens, whose output nothing uses.
    unused: usize,
    /// True if the caches receive queries.
    observed: bool,
    geometry: &'a KvGeometry,
}

/// The rotated queries, the rotated keys and the values of some tokens.
struct Qkv {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Model {
    /// Loads the configuration and maps the weights of a GGUF file, or of a Hugging Face model directory. The files
    /// must not be changed while the model is in use.
    ///
    /// # Errors
    /// Fails as [`open_gguf`], [`ModelConfig::load`] and [`Weights::load`] do, and if a tensor is missing or has
    /// another shape than the configuration implies.
    pub fn load(path: &Path) -> Result<Self> {
        let (config, mut weights) =
            if path.is_file() { open_gguf(path)? } else { (ModelConfig::load(path)?, Weights::load(path)?) };
        Self::build(config, &mut weights).with_context(|| format!("cannot load the model in {}", path.display()))
    }

    fn build(config: ModelConfig, weights: &mut Weights) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.norm_eps);
        let embedding = weights.matrix(&[("model.embed_tokens.weight".to_owned(), config.vocab_size)], hidden)?;
        let embedding = Arc::new(embedding);
        let layers = (0..config.layers()).map(|i| DecoderLayer::load(&config, weights, i)).collect::<Result<_>>()?;
        let norm = RmsNorm::load(weights, "model.norm", hidden, eps)?;
        let head = if config.tied_head {
            Linear::from_weight(Arc::clone(&embedding))
        } else {
            Linear::load(weights, &[("lm_head".to_owned(), config.vocab_size)], hidden, false)?
        };
        Ok(Self { rope: RotaryFrequencies::new(&config), config, embedding, layers, norm, head })
    }

    /// Returns the model's shape and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Adds a token id that ends a text.
    pub fn end_at(&mut self, id: u32) {
        if !self.config.eos.contains(&id) {
            self.config.eos.push(id);
        }
    }

    /// Returns the geometry of a KV cache for this model.
    #[must_use]
    pub fn kv_geometry(&self, dtype: KvDType) -> KvGeometry {
        self.config.kv_geometry(dtype)
    }

    /// Runs a prompt through the model with dense attention. Keys and values go to all `caches`, layer by layer, in
    /// chunks of tokens. Returns the logits that `wanted` asks for.
    ///
    /// If a cache has a [directory](KvCache::spill_dir), the memory that this needs does not grow with the prompt, but
    /// for [`LogitPositions::All`].
    ///
    /// `progress` receives the number of tokens that passed one more layer.
    ///
    /// # Errors
    /// Fails if the prompt is empty or too long, if a token id is unknown, or if a cache is not empty or has another
    /// geometry.
    pub fn prefill(
        &self,
        ids: &[u32],
        caches: &mut [&mut dyn KvCache],
        wanted: LogitPositions,
        progress: &dyn Fn(usize),
    ) -> Result<Vec<f32>> {
        self.check(ids, 0)?;
        let dtype = caches.first().map_or(KvDType::F32, |c| c.geometry().dtype);
        let geometry = self.kv_geometry(dtype);
        for cache in caches.iter() {
            ensure!(cache.is_empty(), "prefill needs an empty cache, this one holds {} tokens", cache.len());
            ensure!(
                *cache.geometry() == geometry,
                "prefill: a cache differs in geometry from the model, or in dtype from the first cache"
            );
        }
        let observed = wanted == LogitPositions::Queries || caches.iter().any(|cache| cache.wants_queries());
        let dir = caches.iter().find_map(|cache| cache.spill_dir()).map(Path::to_path_buf);
        let mut prompt = self.prompt(ids, dtype, dir.as_deref())?;
        let last = self.layers.len() - 1;
        for index in 0..self.layers.len() {
            // The output of the last layer is used for the wanted logits only.
            let unused = match wanted {
                LogitPositions::Nothing | LogitPositions::Queries if index == last => ids.len(),
                LogitPositions::Last if index == last => ids.len() - 1,
                _ => 0,
            };
            let layer = PrefillLayer { index, unused, observed, geometry: &geometry };
            for start in (0..ids.len()).step_by(self.chunk_tokens()) {
                let tokens = start..ids.len().min(start + self.chunk_tokens());
                let done = tokens.len();
                self.prefill_chunk(&layer, tokens, &mut prompt, caches)?;
                progress(done);
            }
        }
        let first = match wanted {
            LogitPositions::Nothing | LogitPositions::Queries => return Ok(Vec::new()),
            LogitPositions::Last => ids.len() - 1,
            LogitPositions::All => 0,
        };
        let mut hidden = vec![0.0; (ids.len() - first) * self.config.hidden_size];
        prompt.hidden.read(first * self.config.hidden_size, &mut hidden)?;
        self.logits(&hidden)
    }

    /// Returns the rows of a prompt before the first layer.
    fn prompt(&self, ids: &[u32], dtype: KvDType, dir: Option<&Path>) -> Result<PrefillState> {
        let (c, chunk) = (&self.config, self.chunk_tokens());
        let mut hidden = PromptRows::new(ids.len() * c.hidden_size, KvDType::F32, dir)?;
        for (nth, ids) in ids.chunks(chunk).enumerate() {
            hidden.write(nth * chunk * c.hidden_size, &self.embed(ids)?)?;
        }
        let plane = || PromptPlane::new(ids.len(), (c.kv_heads, c.head_dim), dtype, dir);
        Ok(PrefillState { hidden, keys: plane()?, values: plane()? })
    }

    /// Computes one layer of some tokens of a prompt. The layer has computed the tokens before them.
    fn prefill_chunk(
        &self,
        of: &PrefillLayer<'_>,
        tokens: Range<usize>,
        prompt: &mut PrefillState,
        caches: &mut [&mut dyn KvCache],
    ) -> Result<()> {
        let (layer, row) = (&self.layers[of.index], self.config.hidden_size);
        let mut hidden = vec![0.0; tokens.len() * row];
        prompt.hidden.read(tokens.start * row, &mut hidden)?;
        let tail = of.unused.clamp(tokens.start, tokens.end);
        let first_query = if of.observed { tokens.start } else { tail };
        let rotation = self.rope.rotation(tokens.start, tokens.len());
        let x = layer.attention_norm.rows(&hidden);
        let qkv = self.project(layer, &x, &rotation, first_query - tokens.start, of.geometry.dtype)?;
        prompt.keys.write(tokens.start, &qkv.keys)?;
        prompt.values.write(tokens.start, &qkv.values)?;
        for cache in caches.iter_mut() {
            if of.observed {
                cache.observe(of.index, &qkv.queries);
            }
            cache.append(of.index, &qkv.keys, &qkv.values, tokens.len())?;
        }
        if tail < tokens.end {
            let shape = self.shape(of.index, of.geometry);
            let queries = &qkv.queries[(tail - first_query) * shape.query_heads * shape.head_dim..];
            let mut attended = vec![0.0; queries.len()];
            attention::causal(shape, tail, queries, (&prompt.keys, &prompt.values), &mut attended)?;
            let rows = &mut hidden[(tail - tokens.start) * row..];
            layer.finish(rows, &attended)?;
            prompt.hidden.write(tail * row, rows)?;
        }
        Ok(())
    }

    /// Feeds one token, attends through the cache and returns the logits of the next token, `[vocab]`.
    ///
    /// # Errors
    /// Fails if the token id is unknown, if the sequence is too long for the model, if the cache has another
    /// geometry, or if the cache fails.
    pub fn decode(&self, id: u32, cache: &mut dyn KvCache) -> Result<Vec<f32>> {
        let position = cache.len();
        self.check(&[id], position)?;
        let dtype = cache.geometry().dtype;
        ensure!(*cache.geometry() == self.kv_geometry(dtype), "decode: the cache differs in geometry from the model");
        let rotation = self.rope.rotation(position, 1);
        let mut hidden = self.embed(&[id])?;
        let mut attended = vec![0.0; self.config.heads * self.config.head_dim];
        for (i, layer) in self.layers.iter().enumerate() {
            let x = layer.attention_norm.rows(&hidden);
            let qkv = self.project(layer, &x, &rotation, 0, dtype)?;
            cache.append(i, &qkv.keys, &qkv.values, 1)?;
            let next = self.layers.get(i + 1);
            let predict = next.map(|next| || self.queries(next, &next.attention_norm.rows(&hidden), &rotation, 0));
            let predict = predict.as_ref().map(|predict| predict as &Predict<'_>);
            with_threads_awake(|| {
                cache.prepare(i, &qkv.queries, predict)?;
                cache.attend(i, &qkv.queries, &mut attended)
            })?;
            layer.finish(&mut hidden, &attended)?;
        }
        self.logits(&hidden)
    }

    /// Feeds several tokens to a cache that holds others already. Each attends under the cache's policy, as in
    /// [`Self::decode`]. Returns the logits after the last one, `[vocab]`.
    ///
    /// `progress` receives the number of tokens that passed one more layer.
    ///
    /// # Errors
    /// Fails as [`Self::decode`] does, and if there are no tokens.
    pub fn extend(&self, ids: &[u32], cache: &mut dyn KvCache, progress: &dyn Fn(usize)) -> Result<Vec<f32>> {
        let (first, c) = (cache.len(), &self.config);
        self.check(ids, first)?;
        let dtype = cache.geometry().dtype;
        ensure!(*cache.geometry() == self.kv_geometry(dtype), "extend: the cache differs in geometry from the model");
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut hidden = Vec::new();
        for (nth, ids) in ids.chunks(self.chunk_tokens()).enumerate() {
            let rotation = self.rope.rotation(first + nth * self.chunk_tokens(), ids.len());
            hidden = self.embed(ids)?;
            let mut attended = vec![0.0; ids.len() * q];
            for (i, layer) in self.layers.iter().enumerate() {
                let qkv = self.project(layer, &layer.attention_norm.rows(&hidden), &rotation, 0, dtype)?;
                let new = qkv.keys.chunks_exact(kv).zip(qkv.values.chunks_exact(kv));
                let asked = qkv.queries.chunks_exact(q).zip(attended.chunks_exact_mut(q));
                for ((keys, values), (queries, attended)) in new.zip(asked) {
                    cache.append(i, keys, values, 1)?;
                    cache.attend(i, queries, attended)?;
                }
                layer.finish(&mut hidden, &attended)?;
                progress(ids.len());
            }
        }
        self.logits(&hidden[hidden.len() - c.hidden_size..])
    }

    /// Checks that the token ids exist, and that their positions from `first` on are within the model's limit.
    fn check(&self, ids: &[u32], first: usize) -> Result<()> {
        ensure!(!ids.is_empty(), "the prompt is empty");
        let (length, limit) = (first + ids.len(), self.config.max_positions);
        ensure!(length <= limit, "{length} tokens are more than the model's {limit} (max_position_embeddings)");
        let vocab = self.config.vocab_size;
        if let Some(i) = ids.iter().position(|&id| id as usize >= vocab) {
            anyhow::bail!("token id {} at position {} must be below the vocabulary size {vocab}", ids[i], first + i);
        }
        Ok(())
    }

    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>> {
        self.embedding.gather(ids)
    }

    fn logits(&self, hidden: &[f32]) -> Result<Vec<f32>> {
        self.head.forward(&self.norm.rows(hidden))
    }

    fn shape(&self, layer: usize, geometry: &KvGeometry) -> Shape {
        let kv = geometry.layers[layer];
        Shape {
            query_heads: geometry.query_heads,
            kv_heads: kv.kv_heads,
            head_dim: kv.head_dim,
            scale: geometry.scale,
            window: kv.window,
        }
    }

    fn chunk_tokens(&self) -> usize {
        let c = &self.config;
        let per_token = 3 * c.intermediate_size + 4 * c.heads * c.head_dim + 4 * c.hidden_size;
        (CHUNK_ELEMENTS / per_token).clamp(64, 1024)
    }

    /// Projects normalised rows to keys and values, and the rows from `first_query` on to queries.
    fn project(
        &self,
        layer: &DecoderLayer,
        x: &[f32],
        rotation: &Rotation,
        first_query: usize,
        dtype: KvDType,
    ) -> Result<Qkv> {
        let c = &self.config;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let tokens = x.len() / c.hidden_size;
        let queries = self.queries(layer, &x[first_query * c.hidden_size..], rotation, first_query)?;
        let both = layer.qkv.forward_part(x, q..q + 2 * kv)?;
        let norms = layer.head_norms.as_ref();
        let (mut keys, mut values) = (Vec::with_capacity(tokens * kv), Vec::with_capacity(tokens * kv));
        for row in both.chunks_exact(2 * kv) {
            keys.extend_from_slice(&row[..kv]);
            values.extend_from_slice(&row[kv..]);
        }
        keys.par_chunks_exact_mut(kv).with_min_len(16).enumerate().for_each(|(t, heads)| {
            self.unpair(heads);
            if let Some((_, norm)) = norms {
                heads.chunks_exact_mut(c.head_dim).for_each(|head| norm.row(head));
            }
            rotation.apply(t, heads);
            dtype.round(heads);
        });
        dtype.round(&mut values);
        Ok(Qkv { queries, keys, values })
    }

    /// Moves the elements that RoPE rotates together from neighbouring places to half a head apart.
    fn unpair(&self, heads: &mut [f32]) {
        if !self.config.paired_heads {
            return;
        }
        let mut halves = Vec::with_capacity(self.config.head_dim);
        for head in heads.chunks_exact_mut(self.config.head_dim) {
            halves.clear();
            halves.extend(head.iter().step_by(2).chain(head.iter().skip(1).step_by(2)));
            head.copy_from_slice(&halves);
        }
    }

    /// Projects normalised rows to queries. The first row is token `first` of the rotation.
    fn queries(&self, layer: &DecoderLayer, x: &[f32], rotation: &Rotation, first: usize) -> Result<Vec<f32>> {
        let c = &self.config;
        let q = c.heads * c.head_dim;
        if x.is_empty() {
            return Ok(Vec::new());
        }
        let mut queries = layer.qkv.forward_part(x, 0..q)?;
        queries.par_chunks_exact_mut(q).with_min_len(16).enumerate().for_each(|(t, heads)| {
            self.unpair(heads);
            if let Some((norm, _)) = &layer.head_norms {
                heads.chunks_exact_mut(c.head_dim).for_each(|head| norm.row(head));
            }
            rotation.apply(first + t, heads);
        });
        Ok(queries)
    }
}

impl DecoderLayer {
    fn load(config: &ModelConfig, weights: &mut Weights, index: usize) -> Result<Self> {
        let c = config;
        let (hidden, eps, wide) = (c.hidden_size, c.norm_eps, c.intermediate_size);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let qkv = [(name("self_attn.q_proj"), q), (name("self_attn.k_proj"), kv), (name("self_attn.v_proj"), kv)];
        let gate_up = [(name("mlp.gate_proj"), wide), (name("mlp.up_proj"), wide)];
        let head_norms = if c.qk_norm {
            Some((
                RmsNorm::load(weights, &name("self_attn.q_norm"), c.head_dim, eps)?,
                RmsNorm::load(weights, &name("self_attn.k_norm"), c.head_dim, eps)?,
            ))
        } else {
            None
        };
        Ok(Self {
            attention_norm: RmsNorm::load(weights, &name("input_layernorm"), hidden, eps)?,
            qkv: Linear::load(weights, &qkv, hidden, c.qkv_bias)?,
            head_norms,
            output: Linear::load(weights, &[(name("self_attn.o_proj"), hidden)], q, c.output_bias)?,
            mlp_norm: RmsNorm::load(weights, &name("post_attention_layernorm"), hidden, eps)?,
            gate_up: Linear::load(weights, &gate_up, hidden, c.mlp_bias)?,
            down: Linear::load(weights, &[(name("mlp.down_proj"), hidden)], wide, c.mlp_bias)?,
        })
    }

    /// Applies the output projection, the MLP and both residual additions.
    fn finish(&self, hidden: &mut [f32], attended: &[f32]) -> Result<()> {
        add(hidden, &self.output.forward(attended)?);
        let both = self.gate_up.forward(&self.mlp_norm.rows(hidden))?;
        let wide = self.gate_up.outputs() / 2;
        let arch = pulp::Arch::new();
        let mut inner = vec![0.0f32; both.len() / 2];
        inner.par_chunks_exact_mut(wide).with_min_len(16).zip(both.par_chunks_exact(2 * wide)).for_each(
            |(gate, both)| {
                gate.copy_from_slice(&both[..wide]);
                arch.dispatch(SiluMul { gate, up: &both[wide..] });
            },
        );
        add(hidden, &self.down.forward(&inner)?);
        Ok(())
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(a, b)| *a += b);
}

/// Returns the index of the largest logit, or the first of equal ones. It is `None` if there are no logits.
#[must_use]
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &x) in logits.iter().enumerate() {
        if best.is_none_or(|(_, b)| x > b) {
            best = Some((i, x));
        }
    }
    best.map(|(i, _)| i as u32)
}
