//! [`DecodeWorkload`]: keys and queries of the layers that decode steps read, planted or of a file.
//!
//! Planted layers: all heads have the same topics. Members of a topic come in runs of consecutive tokens. A query head
//! is the sum of two keys of its KV head, of entries that the step activates.

use crate::cluster::args::COVERED;
use crate::cluster::decode::args::ClusterDecodeArgs;
use crate::cluster::profile_file;
use crate::support::interrupt::check_interrupt;
use anyhow::{Result, ensure};
use std::collections::BTreeSet;
use stratakv::retrieval::clusters::PlantedTopics;
use stratakv::retrieval::{Adapter, Calibrator, CodeOptions};

/// Tokens whose keys the codes are fitted to.
const SAMPLE_TOKENS: usize = 2048;

/// The keys and queries of one layer.
pub(in crate::cluster) struct DecodeLayer {
    /// `[tokens, kv_heads, dim]`.
    pub(in crate::cluster) keys: Vec<f32>,
    /// Recorded queries `[query_heads, dim]`, for profiles and codes.
    pub(in crate::cluster) profile: Vec<Vec<f32>>,
    /// The query of each step, `[query_heads, dim]`.
    pub(in crate::cluster) steps: Vec<Vec<f32>>,
}

/// The layers of a run.
pub(in crate::cluster) struct DecodeWorkload {
    pub(in crate::cluster) name: String,
    /// Tokens of each layer: whole groups.
    pub(in crate::cluster) tokens: usize,
    pub(in crate::cluster) kv_heads: usize,
    pub(in crate::cluster) query_heads: usize,
    pub(in crate::cluster) dim: usize,
    pub(in crate::cluster) layers: Vec<DecodeLayer>,
}

impl DecodeWorkload {
    /// Returns the layers of `--file`, or planted ones.
    ///
    /// # Errors
    /// The file cannot be read, has no queries or layers of several shapes, or an argument is out of range.
    pub(in crate::cluster) fn new(args: &ClusterDecodeArgs) -> Result<Self> {
        Self::with_entries(args, args.entries)
    }

    /// Returns the layers of `--file`, or planted ones of `entries` tokens.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn with_entries(args: &ClusterDecodeArgs, entries: u32) -> Result<Self> {
        let workload = if args.file.is_some() { Self::of_file(args)? } else { Self::planted(args, entries)? };
        ensure!(workload.tokens > 0, "{}: fewer tokens than those of a group", workload.name);
        Ok(workload)
    }

    fn of_file(args: &ClusterDecodeArgs) -> Result<Self> {
        let path = args.file.as_deref().unwrap_or_else(|| std::path::Path::new(""));
        let (traces, queries) =
            (profile_file::load(path, &args.layer)?, profile_file::load_queries(path, &args.layer)?);
        let (heads, dim, entries) = (traces[0].heads.len(), traces[0].dim, traces[0].entries);
        let is_like = |shape: (usize, usize)| shape == (heads, dim);
        ensure!(traces.iter().all(|own| is_like((own.heads.len(), own.dim))), "layers of several shapes");
        let tokens = whole_groups(entries, &args.groups());
        let mut layers = Vec::new();
        for (trace, queries) in traces.iter().zip(queries) {
            let (all, steps) = (queries.len(), args.steps as usize);
            ensure!(all > steps, "{}: {all} queries; {steps} steps need more", trace.name);
            let profile = queries[(all - steps).saturating_sub(args.queries as usize)..all - steps].to_vec();
            let mut keys = trace.joined_keys();
            keys.truncate(tokens * heads * dim);
            layers.push(DecodeLayer { keys, profile, steps: queries[all - steps..].to_vec() });
        }
        let query_heads = layers[0].steps[0].len() / dim;
        let whole = query_heads > 0 && query_heads.is_multiple_of(heads);
        ensure!(whole, "{query_heads} query heads do not divide into {heads} KV heads");
        let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Ok(Self { name, tokens, kv_heads: heads, query_heads, dim, layers })
    }

    fn planted(args: &ClusterDecodeArgs, entries: u32) -> Result<Self> {
        let tokens = whole_groups(entries as usize, &args.groups());
        let (kv_heads, dim) = (usize::from(args.kv_heads), usize::from(args.head_dim));
        let mut layers = Vec::new();
        for layer in 0..args.layers {
            check_interrupt()?;
            let seed = args.planted.seed.wrapping_add(u64::from(layer));
            let topics = crate::cluster::args::PlantedArgs { seed, ..args.planted }.topics(tokens, COVERED)?;
            layers.push(planted_layer(args, topics, (tokens, kv_heads, dim), seed));
        }
        let query_heads = kv_heads * args.query_heads as usize;
        Ok(Self { name: "planted".into(), tokens, kv_heads, query_heads, dim, layers })
    }

    /// Fits the adapter of `bits` bits per token to the keys and the recorded queries of each layer.
    ///
    /// # Errors
    /// The bits are out of range.
    pub(in crate::cluster) fn codes(&self, name: &str, bits: usize) -> Result<Adapter> {
        let row = self.kv_heads * self.dim;
        let mut calibrator = Calibrator::new(&vec![(self.kv_heads, self.dim); self.layers.len()]);
        for (at, layer) in self.layers.iter().enumerate() {
            check_interrupt()?;
            let step = (self.tokens / SAMPLE_TOKENS).max(1);
            layer.keys.chunks_exact(row).step_by(step).for_each(|key| calibrator.keys(at, key));
            for decode in [false, true] {
                layer.profile.iter().for_each(|query| calibrator.queries(at, query, self.query_heads, decode));
            }
        }
        Ok(calibrator.codes(name, 1, CodeOptions { bits, dimension_bits_max: 4, decode_only: false })?)
    }

    /// Returns the attention weight of each of the first `tokens` tokens for each query head of a step,
    /// `[query_heads, tokens]`.
    pub(in crate::cluster) fn weights(&self, layer: &DecodeLayer, step: usize, tokens: usize) -> Vec<f32> {
        let (row, ratio) = (self.kv_heads * self.dim, self.query_heads / self.kv_heads);
        let scale = (self.dim as f32).sqrt().recip();
        let mut weights = Vec::with_capacity(self.query_heads * tokens);
        for (head, query) in layer.steps[step].chunks_exact(self.dim).enumerate() {
            let start = head / ratio * self.dim;
            let dot = |key: &[f32]| key[start..start + self.dim].iter().zip(query).map(|(k, q)| k * q).sum::<f32>();
            let scores: Vec<f32> = layer.keys.chunks_exact(row).take(tokens).map(|key| dot(key) * scale).collect();
            let most = scores.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = scores.iter().map(|score| f64::from(score - most).exp()).sum();
            weights.extend(scores.iter().map(|score| (f64::from(score - most).exp() / sum) as f32));
        }
        weights
    }
}

/// Returns the most tokens up to `tokens` that are whole groups of every size.
fn whole_groups(tokens: usize, groups: &BTreeSet<u16>) -> usize {
    let is_whole = |tokens: &usize| groups.iter().all(|group| tokens.is_multiple_of(usize::from(*group)));
    (0..=tokens).rev().find(is_whole).unwrap_or(0)
}

/// Returns a planted layer: its keys in an order of tokens in which topics come in runs, and its queries.
fn planted_layer(
    args: &ClusterDecodeArgs,
    mut topics: PlantedTopics,
    (tokens, kv_heads, dim): (usize, usize, usize),
    seed: u64,
) -> DecodeLayer {
    let row = kv_heads * dim;
    let planted = topics.keys(row, args.planted.spread);
    let mut random = fastrand::Rng::with_seed(seed);
    let order = order_in_runs(topics.topics(), tokens, args.topic_run as usize, &mut random);
    let keys = order.iter().flat_map(|entry| &planted[*entry as usize * row..][..row]).copied().collect();
    let mut query = || {
        let activated = topics.next_query();
        let mut query = Vec::with_capacity(row * args.query_heads as usize);
        for head in 0..kv_heads {
            for _ in 0..args.query_heads {
                let mut key = || {
                    let entry = if activated.is_empty() { 0 } else { activated[random.usize(..activated.len())] };
                    &planted[entry as usize * row + head * dim..][..dim]
                };
                query.extend(key().iter().zip(key()).map(|(one, other)| args.focus * (one + other)));
            }
        }
        query
    };
    let profile = (0..args.queries).map(|_| query()).collect();
    DecodeLayer { profile, steps: (0..args.steps).map(|_| query()).collect(), keys }
}

/// Returns the entry at each token: runs of up to `run` members of one topic, in random order. An entry of several
/// topics is in a run of the first one.
fn order_in_runs(topics: &[Vec<u32>], entries: usize, run: usize, random: &mut fastrand::Rng) -> Vec<u32> {
    let mut is_placed = vec![false; entries];
    let mut runs: Vec<Vec<u32>> = Vec::new();
    let rest: Vec<u32> = (0..entries as u32).collect();
    for members in topics.iter().map(Vec::as_slice).chain([&rest[..]]) {
        let own: Vec<u32> =
            members.iter().copied().filter(|entry| !std::mem::replace(&mut is_placed[*entry as usize], true)).collect();
        runs.extend(own.chunks(run).map(<[u32]>::to_vec));
    }
    random.shuffle(&mut runs);
    runs.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_whole_groups_of_every_size() {
        let whole = |tokens: usize, groups: &[u16]| whole_groups(tokens, &groups.iter().copied().collect());
        assert_eq!((whole(4091, &[8]), whole(4091, &[1, 8, 16]), whole(7, &[8])), (4088, 4080, 0));
        assert_eq!(whole(40, &[3, 4]), 36);
    }

    #[test]
    fn an_order_in_runs_has_each_entry_once_and_topics_together() {
        let topics = [vec![9, 1, 5, 3], vec![5, 0, 7]];
        let order = order_in_runs(&topics, 10, 2, &mut fastrand::Rng::with_seed(3));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).collect::<Vec<u32>>());
        let at = |entry: u32| order.iter().position(|own| *own == entry).unwrap();
        for pair in [[9, 1], [5, 3], [0, 7]] {
            assert_eq!(at(pair[0]) + 1, at(pair[1]), "{order:?}");
        }
    }
}
