//! Fills caches with the tokens before a question.
//!
//! 1. [`prefill_tokens`]: dense prefill computes the first tokens and gives their keys and values to every cache.
//! 2. [`grow`]: the other tokens are decode steps. The first cache attends, and every cache gets the keys and values.
//!
//! The caches then hold the same keys and values. The first cache should have full attention, because step 2 attends
//! under its policy. Between the steps, a policy may make clusters of the prefilled tokens.

use std::cell::Cell;

use anyhow::{Result, bail, ensure};

use crate::kv::{Committed, KvCache, KvGeometry, KvStats, Predict};
use crate::model::{LogitPositions, Model};

/// Fills empty caches with the tokens `ids`: the first `prefill` tokens by prefill, the others as decode steps. `None`
/// takes all tokens by prefill. `wanted` and `progress` are as for [`prefill_tokens`].
///
/// # Errors
/// Fails if `prefill` is 0 or more than the tokens, and as [`prefill_tokens`] and [`grow`] do.
pub fn fill(
    model: &Model,
    ids: &[u32],
    prefill: Option<usize>,
    caches: &mut [&mut dyn KvCache],
    wanted: LogitPositions,
    progress: &dyn Fn(usize),
) -> Result<()> {
    let (first, rest) = ids.split_at(prefilled(prefill, ids.len())?);
    prefill_tokens(model, first, caches, wanted, progress)?;
    grow(model, rest, caches, progress)
}

/// Fills empty caches with the tokens `ids` by prefill, and returns the logits that `wanted` asks for. `progress`
/// receives numbers of finished tokens, which add up to all of them.
///
/// # Errors
/// Fails if there are no tokens, and as [`Model::prefill`] does.
pub fn prefill_tokens(
    model: &Model,
    ids: &[u32],
    caches: &mut [&mut dyn KvCache],
    wanted: LogitPositions,
    progress: &dyn Fn(usize),
) -> Result<Vec<f32>> {
    ensure!(!ids.is_empty(), "prefill of no tokens");
    let (layers, passed) = (model.config().layers(), Cell::new(0));
    let logits = model.prefill(ids, caches, wanted, &|tokens| {
        let before = passed.replace(passed.get() + tokens);
        progress(passed.get() / layers - before / layers);
    })?;
    // Prefill leaves out a layer of the tokens whose output it does not need.
    progress(ids.len() - passed.get() / layers);
    Ok(logits)
}

/// Appends the tokens `ids` as decode steps to caches that hold the same tokens. The first cache attends, and every
/// cache gets the keys and values.
///
/// # Errors
/// Fails as [`Model::decode`] does.
pub fn grow(model: &Model, ids: &[u32], caches: &mut [&mut dyn KvCache], progress: &dyn Fn(usize)) -> Result<()> {
    let mut together = Together { caches };
    for id in ids {
        model.decode(*id, &mut together)?;
        progress(1);
    }
    Ok(())
}

/// Returns the tokens that prefill computes of `tokens`: all, or the given number.
///
/// # Errors
/// Fails if the number is 0 or more than the tokens.
pub(super) fn prefilled(prefill: Option<usize>, tokens: usize) -> Result<usize> {
    let first = prefill.unwrap_or(tokens);
    ensure!((1..=tokens).contains(&first), "prefill of {first} tokens, but the cache gets {tokens} tokens");
    Ok(first)
}

/// Caches that get the same keys and values. The first one attends.
struct Together<'a, 'b> {
    caches: &'a mut [&'b mut dyn KvCache],
}

impl KvCache for Together<'_, '_> {
    fn geometry(&self) -> &KvGeometry {
        self.caches[0].geometry()
    }

    fn len(&self) -> usize {
        self.caches[0].len()
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        self.caches.iter_mut().try_for_each(|cache| cache.append(layer, keys, values, tokens))
    }

    fn prepare(&mut self, layer: usize, queries: &[f32], predict: Option<&Predict<'_>>) -> Result<()> {
        self.caches[0].prepare(layer, queries, predict)
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        // The other caches get the queries as in prefill, so that they can record them.
        self.caches.iter_mut().skip(1).for_each(|cache| cache.observe(layer, queries));
        self.caches[0].attend(layer, queries, out)
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        self.caches.iter_mut().try_for_each(|cache| cache.commit(new_ids, state))
    }

    fn committed(&self) -> Result<Option<Committed>> {
        self.caches[0].committed()
    }

    fn stats(&self) -> KvStats {
        self.caches[0].stats()
    }

    fn finish(self: Box<Self>, _keep: bool) -> Result<()> {
        bail!("finish: each cache is finished by its owner")
    }
}
