//! Compares many policies on the same stored bytes. For each prompt:
//!
//! 1. [`prefill_tokens`] and [`grow`] fill a cache in memory and a sequence of the store, which has every policy's
//!    selector attached. Clusters are made once the prompt is there, from the queries of [`Plan::profile`].
//! 2. The cache in memory answers with full attention.
//! 3. Every policy answers from the sequence under every budget. After each answer the sequence is truncated to the
//!    prompt.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use stratakv::retrieval::{Selector, SelectorId};

use super::answer::answer;
use super::fill::{grow, prefill_tokens, prefilled};
use super::needles::questions;
use super::profile_source::ProfileSource;
use super::prompts::Prompt;
use super::run::STATE;
use super::table::{Comparison, FULL, Figures};
use crate::budget::Budget;
use crate::kv::backend::{Backend, SINKS};
use crate::kv::method::Policy;
use crate::kv::store::{StoreKv, StorePolicy};
use crate::kv::{KvCache, MemoryKv, engine_error};
use crate::model::{LogitPositions, Model};

/// The policies and budgets to compare.
pub struct Plan<'a> {
    /// The policies, without full attention.
    pub policies: &'a [Policy],
    /// The budgets.
    pub budgets: &'a [Budget],
    /// The tokens of each prompt that prefill computes. The others up to the question are decode steps with full
    /// attention. `None` means that all are prefilled.
    pub prefill: Option<usize>,
    /// The number of questions about each haystack. `None` asks the prompt's own question.
    pub questions: Option<usize>,
    /// The queries that methods with a profile make their clusters of.
    pub profile: ProfileSource,
    /// How many of the first layers attend to everything.
    pub dense_layers: usize,
    /// The directory of adapters.
    pub adapters: Option<&'a Path>,
    /// True if attention mass and output error are measured. Full attention in memory then runs on the same queries.
    /// Its time is not counted.
    pub probe: bool,
}

/// Runs all prompts. `progress` receives numbers of tokens that the caches were filled with.
///
/// # Errors
/// Fails if an adapter is missing, or if the model or the store fails. The error names the prompt.
pub fn compare(
    model: &Model,
    prompts: &[Prompt],
    backend: &Backend,
    plan: &Plan<'_>,
    progress: &dyn Fn(usize),
) -> Result<Comparison> {
    let mut selectors = Vec::new();
    for policy in plan.policies {
        selectors.push(backend.selector(policy, plan.adapters)?);
    }
    let profile = selectors.iter().flatten().any(chooses_entries).then(|| plan.profile.to_string());
    let (prefill, dense_layers) = (plan.prefill, plan.dense_layers);
    let mut table = Comparison { prefill, dense_layers, profile, ..Comparison::default() };
    for prompt in prompts {
        let mut one = || -> Result<()> {
            let (full, cache, ids) = filled(model, prompt, backend, plan, &selectors, progress)?;
            compare_prompt(model, prompt, plan, (full, cache, &ids), &mut table)
        };
        one().with_context(|| format!("prompt {}", prompt.id))?;
    }
    Ok(table)
}

fn chooses_entries(selector: &Arc<dyn Selector>) -> bool {
    selector.entries().is_some()
}

/// The caches of one prompt, with full attention and of the policies, and the selector of each policy.
type Caches<T> = (MemoryKv, StoreKv, T);

/// Makes the caches of one prompt and fills them with the tokens before the question.
fn filled(
    model: &Model,
    prompt: &Prompt,
    backend: &Backend,
    plan: &Plan<'_>,
    selectors: &[Option<Arc<dyn Selector>>],
    progress: &dyn Fn(usize),
) -> Result<Caches<Vec<Option<SelectorId>>>> {
    let mut full = backend.in_memory()?;
    let mut cache = backend.create(&format!("compare/{}", prompt.id))?;
    // Groups are summarised while the prompt streams in. Clusters are built once it is there.
    let mut ids = vec![None; selectors.len()];
    let mut attach = |cache: &mut StoreKv, entries: bool| -> Result<()> {
        for (selector, id) in selectors.iter().zip(&mut ids) {
            *id = match selector {
                Some(own) if chooses_entries(own) != entries => *id,
                Some(own) if entries => Some(cache.attach_entries(own.clone()).map_err(engine_error)?),
                Some(own) => Some(cache.attach(own.clone()).map_err(engine_error)?),
                None => None,
            };
        }
        Ok(())
    };
    attach(&mut cache, false)?;
    let profile = selectors.iter().flatten().any(chooses_entries).then_some(plan.profile);
    cache.record_queries(profile.map_or(0, ProfileSource::newest));
    let wanted = profile.map_or(LogitPositions::Nothing, ProfileSource::wanted);
    let haystack = &prompt.prompt[..prompt.query_start];
    let (prompt_tokens, grown) = haystack.split_at(prefilled(plan.prefill, haystack.len())?);
    let logits = prefill_tokens(model, prompt_tokens, &mut [&mut full, &mut cache], wanted, progress)?;
    if let Some(profile) = profile {
        let queries = profile.record(model, prompt, plan.questions, (&full, &logits))?;
        queries.into_iter().for_each(|queries| cache.set_profile(queries));
    }
    cache.commit(prompt_tokens, STATE).context("commit of the prompt")?;
    attach(&mut cache, true)?;
    grow(model, grown, &mut [&mut full, &mut cache], progress)?;
    if !grown.is_empty() {
        cache.commit(grown, STATE).context("commit of the decode steps")?;
    }
    Ok((full, cache, ids))
}

/// Answers one prompt with full attention and under every policy and every budget.
fn compare_prompt(
    model: &Model,
    prompt: &Prompt,
    plan: &Plan<'_>,
    (full, mut cache, ids): Caches<&[Option<SelectorId>]>,
    table: &mut Comparison,
) -> Result<()> {
    for (policy, id) in plan.policies.iter().zip(ids) {
        if let Some(id) = id {
            let drift = cache.drift(*id).map_err(engine_error)?;
            if drift.iter().any(Option::is_some) {
                table.drifts.entry(policy.to_string()).or_default().add(&drift);
            }
        }
    }
    cache.set_dense_layers(plan.dense_layers);
    let asked = match plan.questions {
        Some(count) => questions(prompt, count)?,
        None => vec![prompt.clone()],
    };
    for question in &asked {
        compare_question(model, question, plan, (&full, &mut cache, ids), table)?;
    }
    Box::new(cache).finish(false)
}

/// Answers one question with full attention and under every policy and every budget. The caches hold the tokens before
/// it, also afterwards.
fn compare_question(
    model: &Model,
    prompt: &Prompt,
    plan: &Plan<'_>,
    (full, cache, ids): (&MemoryKv, &mut StoreKv, &[Option<SelectorId>]),
    table: &mut Comparison,
) -> Result<()> {
    let mirror = plan.probe.then(|| full.clone());
    let expected = answer(model, prompt, &mut full.clone())?;
    let full_accuracy = prompt.item_accuracy(&expected.predicted);
    let (steps, seconds) = (expected.steps as f64, expected.elapsed.as_secs_f64());
    // Full attention misses nothing. One probe with all of the mass and no error says so.
    let figures = Figures { steps, seconds, mass: 1.0, probes: 1.0, ..Figures::default() };
    table.row(FULL, "1", prompt).add(prompt, (full_accuracy, full_accuracy), figures);
    for (policy, id) in plan.policies.iter().zip(ids) {
        for &budget in plan.budgets {
            let (accuracy, figures) = run_policy(model, prompt, cache, (policy, *id, budget), mirror.as_ref())?;
            let row = table.row(&policy.to_string(), &budget.to_string(), prompt);
            row.add(prompt, (accuracy, full_accuracy), figures);
            cache.truncate(prompt.query_start).context("truncation to the prompt")?;
        }
    }
    Ok(())
}

/// Answers one prompt under one policy. `mirror` is a cache in memory that holds the prompt, for a probe.
fn run_policy(
    model: &Model,
    prompt: &Prompt,
    cache: &mut StoreKv,
    (policy, id, budget): (&Policy, Option<SelectorId>, Budget),
    mirror: Option<&MemoryKv>,
) -> Result<(f64, Figures)> {
    cache.set_policy(match id {
        Some(selector) => StorePolicy::Selected { selector, aggregation: policy.aggregation(), budget },
        None => StorePolicy::Window { sinks: SINKS, budget },
    });
    cache.reconstruct_keys(policy.rank())?;
    cache.probe(mirror.cloned());
    let (before, reads, selected) = (cache.stats(), cache.reads(), cache.selected());
    let got = answer(model, prompt, cache)?;
    let after = cache.stats();
    let probe = cache.probed();
    let resident = match id {
        Some(id) => cache.selector_bytes(id).map_err(engine_error)? as f64,
        None => 0.0,
    };
    let selected = cache.selected().since(&selected);
    let (tokens, layers) = (cache.len() as f64, model.config().layers() as f64);
    let figures = Figures {
        resident: resident / tokens / layers,
        read_bytes: (after.bytes_read - before.bytes_read) as f64,
        reads: (cache.reads() - reads) as f64,
        steps: got.steps as f64,
        seconds: got.elapsed.saturating_sub(probe.time).as_secs_f64(),
        mass: probe.mass,
        error: probe.error,
        probes: probe.attends as f64,
        selections: selected.selections as f64,
        entries: selected.entries,
        runs: selected.runs as f64,
        cluster_runs: selected.cluster_runs as f64,
    };
    Ok((prompt.item_accuracy(&got.predicted), figures))
}
