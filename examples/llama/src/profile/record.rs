//! Runs one prompt with full attention and records which entries its queries activate.
//!
//! 1. [`fill`] fills a cache with the tokens before the question. The recorder around the cache sees every query of
//!    prefill and of decode steps.
//! 2. The prompt's own question is asked for [`QuerySource::Decode`]. For [`QuerySource::Questions`] the questions of
//!    the profile half are asked, each from a copy of the cache.
//! 3. For each recorded query every head has its exact softmax over all tokens that the query sees. The weight of an
//!    entry is the sum over the heads.
//!
//! Queries of prefill are kept until the layer's keys are appended, because prefill appends whole layers.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use rayon::prelude::*;
use stratakv::retrieval::clusters::ActivationRule;

use super::{Profile, ProfileAbout, ProfileLayer};
use crate::kv::memory::MemoryPolicy;
use crate::kv::{Committed, KvCache, KvDType, KvGeometry, KvStats, MemoryKv, engine_error};
use crate::model::{LogitPositions, Model};
use crate::recall::{Half, Prompt, answer, fill, questions};

/// Which queries a profile records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuerySource {
    /// The queries of the newest tokens before the question.
    Last(usize),
    /// The queries of decode steps: tokens behind a short prefill, the prompt's own question, and its answer.
    Decode,
    /// The queries of questions about the haystack.
    Questions,
}

impl FromStr for QuerySource {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match (text, text.strip_prefix("last:").map(str::parse)) {
            ("decode", _) => Ok(Self::Decode),
            ("questions", _) => Ok(Self::Questions),
            (_, Some(Ok(tokens))) if tokens > 0 => Ok(Self::Last(tokens)),
            _ => bail!("{text:?} names no queries; give last:N with N from 1 on, decode or questions"),
        }
    }
}

impl fmt::Display for QuerySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Last(tokens) => write!(f, "last:{tokens}"),
            Self::Decode => write!(f, "decode"),
            Self::Questions => write!(f, "questions"),
        }
    }
}

/// The options of [`record`].
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// Which queries are recorded.
    pub source: QuerySource,
    /// The rule of activation.
    pub rule: ActivationRule,
    /// The tokens that prefill computes. The others up to the question are decode steps. `None` means all.
    pub prefill: Option<usize>,
    /// The number of questions, of which half are recorded, for [`QuerySource::Questions`].
    pub questions: usize,
    /// The element type of keys and values.
    pub dtype: KvDType,
    /// The hash of the model's weights, in hexadecimal digits.
    pub model: String,
}

/// Records a profile of one prompt. `progress` receives numbers of finished tokens before the question.
///
/// # Errors
/// Fails if an option is out of range for the prompt, and as [`fill`], [`questions`] and [`answer`] do.
pub fn record(model: &Model, prompt: &Prompt, options: &ProfileOptions, progress: &dyn Fn(usize)) -> Result<Profile> {
    let entries = prompt.query_start;
    let ActivationRule { sinks, window, .. } = options.rule;
    ensure!(
        sinks.saturating_add(window) < entries,
        "profile: {sinks} sinks and {window} newest tokens leave none of {entries} tokens; lower --sinks or --newest"
    );
    let geometry = model.kv_geometry(options.dtype);
    let asked = match options.source {
        QuerySource::Questions => questions(prompt, options.questions)?,
        _ => Vec::new(),
    };
    let from = match options.source {
        QuerySource::Last(tokens) => {
            ensure!(tokens <= entries, "last:{tokens} is more than the {entries} tokens before the question");
            entries - tokens
        }
        QuerySource::Decode => options.prefill.unwrap_or(entries),
        QuerySource::Questions => entries,
    };
    let mut recorder = Recorder::new(geometry.clone(), options.rule, entries, from);
    fill(model, &prompt.prompt[..entries], options.prefill, &mut [&mut recorder], LogitPositions::Queries, progress)?;
    if options.source == QuerySource::Decode {
        answer(model, prompt, &mut recorder)?;
    }
    let held = recorder.inner.clone();
    let profiled = asked.iter().filter(|question| question.half == Some(Half::Profile));
    for (number, question) in profiled.enumerate() {
        recorder.ask(number as u32 + 1, held.clone(), entries);
        answer(model, question, &mut recorder)?;
    }
    let mut layers = recorder.layers;
    for (index, layer) in layers.iter_mut().enumerate() {
        layer.keys = held.keys(index, 0..entries)?;
    }
    let about = ProfileAbout {
        prompt: prompt.id.clone(),
        entries,
        source: options.source.to_string(),
        rule: options.rule,
        query_heads: geometry.query_heads,
        scale: geometry.scale,
        model: options.model.clone(),
    };
    let (positions, questions) = recorder.places.into_iter().unzip();
    Ok(Profile { about, dtype: options.dtype, positions, questions, layers })
}

/// A cache in memory with full attention that records queries.
struct Recorder {
    inner: MemoryKv,
    rule: ActivationRule,
    /// The tokens that may be activated.
    entries: usize,
    /// Queries at this position and behind it are recorded.
    from: usize,
    /// The tokens that each layer holds.
    held: Vec<usize>,
    /// The tokens whose queries each layer showed in prefill.
    observed: Vec<usize>,
    /// Positions and queries of the layer whose keys prefill appends next.
    pending: Vec<(usize, Vec<f32>)>,
    /// The number of the question that is asked, or 0.
    question: u32,
    /// The position and the question of each recorded query.
    places: Vec<(u32, u32)>,
    layers: Vec<ProfileLayer>,
}

impl Recorder {
    fn new(geometry: KvGeometry, rule: ActivationRule, entries: usize, from: usize) -> Self {
        let layer = |shape: &crate::kv::LayerGeometry| ProfileLayer {
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            offsets: vec![0],
            ..ProfileLayer::default()
        };
        let count = geometry.layers.len();
        Self {
            layers: geometry.layers.iter().map(layer).collect(),
            inner: MemoryKv::new(geometry, MemoryPolicy::Full),
            rule,
            entries,
            from,
            held: vec![0; count],
            observed: vec![0; count],
            pending: Vec::new(),
            question: 0,
            places: Vec::new(),
        }
    }

    /// Continues with a question from a cache that holds `tokens` tokens.
    fn ask(&mut self, question: u32, cache: MemoryKv, tokens: usize) {
        self.question = question;
        self.inner = cache;
        self.held.fill(tokens);
    }

    /// Records queries of one layer, each with its position.
    fn record(&mut self, layer: usize, queries: &[(usize, Vec<f32>)]) -> Result<()> {
        if queries.is_empty() {
            return Ok(());
        }
        let keys = self.inner.keys(layer, 0..self.held[layer])?;
        let (geometry, entries, rule) = (self.inner.geometry(), self.entries, self.rule);
        let found = queries
            .par_iter()
            .map(|(position, query)| -> stratakv::Result<(Vec<u32>, Vec<f32>)> {
                let weights = weights(geometry, layer, &keys, *position, query, entries);
                let activated = rule.activated(&weights)?;
                let held = activated.iter().map(|at| weights[*at as usize]).collect();
                Ok((activated, held))
            })
            .collect::<stratakv::Result<Vec<_>>>()
            .map_err(engine_error)?;
        for ((position, query), (activated, weights)) in queries.iter().zip(found) {
            let into = &mut self.layers[layer];
            into.queries.extend_from_slice(query);
            into.activated.extend(activated);
            into.weights.extend(weights);
            into.offsets.push(u32::try_from(into.activated.len())?);
            if layer == 0 {
                self.places.push((u32::try_from(*position)?, self.question));
            }
        }
        Ok(())
    }
}

/// Returns the attention weight of each entry for the query of the token at `position`, as a sum over query heads.
/// Tokens that the query does not see have weight 0. `keys` belong to all tokens from the first on.
fn weights(
    geometry: &KvGeometry,
    layer: usize,
    keys: &[f32],
    position: usize,
    query: &[f32],
    entries: usize,
) -> Vec<f32> {
    let shape = geometry.layers[layer];
    let first = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let seen = &keys[first * shape.width()..(position + 1) * shape.width()];
    let (dim, ratio) = (shape.head_dim, geometry.query_heads / shape.kv_heads);
    let mut sums = vec![0.0_f64; entries];
    for (head, query) in query.chunks_exact(dim).enumerate() {
        let start = head / ratio * dim;
        let dot = |key: &[f32]| key[start..start + dim].iter().zip(query).map(|(k, q)| k * q).sum::<f32>();
        let scores: Vec<f32> = seen.chunks_exact(shape.width()).map(|key| dot(key) * geometry.scale).collect();
        let max = scores.iter().copied().fold(f32::MIN, f32::max);
        let exponentials: Vec<f64> = scores.iter().map(|score| f64::from(score - max).exp()).collect();
        let total: f64 = exponentials.iter().sum();
        sums.iter_mut().skip(first).zip(&exponentials).for_each(|(sum, x)| *sum += x / total);
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

impl KvCache for Recorder {
    fn geometry(&self) -> &KvGeometry {
        self.inner.geometry()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        self.inner.append(layer, keys, values, tokens)?;
        self.held[layer] += tokens;
        let pending = std::mem::take(&mut self.pending);
        self.record(layer, &pending)
    }

    fn observe(&mut self, layer: usize, queries: &[f32]) {
        let row = self.inner.geometry().query_heads * self.layers[layer].head_dim;
        for query in queries.chunks_exact(row) {
            if self.observed[layer] >= self.from {
                self.pending.push((self.observed[layer], query.to_vec()));
            }
            self.observed[layer] += 1;
        }
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        self.inner.attend(layer, queries, out)?;
        let position = self.held[layer] - 1;
        if position >= self.from { self.record(layer, &[(position, queries.to_vec())]) } else { Ok(()) }
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        self.inner.commit(new_ids, state)
    }

    fn committed(&self) -> Result<Option<Committed>> {
        self.inner.committed()
    }

    fn stats(&self) -> KvStats {
        self.inner.stats()
    }

    fn finish(self: Box<Self>, keep: bool) -> Result<()> {
        Box::new(self.inner).finish(keep)
    }
}
