//! One prompt after the other: dense prefill once, then the same tokens through full attention in memory and through the policy.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::ProgressBar;

use super::prompts::Prompt;
use super::report::{Cell, Report};
use crate::kv::{KvCache, KvStats, MemoryKv};
use crate::model::{Model, Wanted, argmax};

/// Caller state of a recall sequence: there is nothing to resume.
pub const STATE: &[u8] = b"recall";

/// What one pass over query and answer gave.
#[derive(Clone, Debug)]
pub struct Answers {
    /// Predicted id per answer token; `None` where the token was given.
    pub predicted: Vec<Option<u32>>,
    /// Logits `[vocab]` each prediction was taken from, in order.
    pub logits: Vec<Vec<f32>>,
    /// Decode steps.
    pub steps: usize,
    /// Time they took.
    pub elapsed: Duration,
}

/// Feeds the query and the answer (teacher forcing) as decode steps to a cache that holds the tokens before the query.
///
/// # Errors
/// As [`Model::decode`].
pub fn answer(model: &Model, prompt: &Prompt, cache: &mut dyn KvCache) -> Result<Answers> {
    let begin = Instant::now();
    let query = prompt.prompt.len() - prompt.query_start;
    let mut answers =
        Answers { predicted: vec![None; prompt.answer.len()], logits: Vec::new(), steps: 0, elapsed: Duration::ZERO };
    for (i, id) in prompt.fed().enumerate() {
        let logits = model.decode(id, cache)?;
        answers.steps += 1;
        let Some(next) = (i + 1).checked_sub(query) else { continue };
        if prompt.score[next] == 1 {
            answers.predicted[next] = argmax(&logits);
            answers.logits.push(logits);
        }
    }
    answers.elapsed = begin.elapsed();
    Ok(answers)
}

/// Runs all prompts. `full` makes an empty cache in memory for the full attention that a prompt is compared with, `open` one
/// under the policy, and `close` takes the latter back when the prompt is done.
///
/// # Errors
/// As [`Model::prefill`] and [`Model::decode`], and what `full`, `open` and `close` report; the prompt is named.
pub fn run<C: KvCache>(
    model: &Model,
    prompts: &[Prompt],
    policy: (&str, &str),
    bar: &ProgressBar,
    full: impl Fn() -> Result<MemoryKv>,
    mut open: impl FnMut(&Prompt) -> Result<C>,
    mut close: impl FnMut(&Prompt, C) -> Result<()>,
) -> Result<Report> {
    let mut report = Report::default();
    for prompt in prompts {
        let mut one = || -> Result<()> {
            let mut full = full()?;
            let mut cache = open(prompt)?;
            let ids = &prompt.prompt[..prompt.query_start];
            let layers = model.config().layers();
            let (begun, passed) = (bar.position(), std::cell::Cell::new(0usize));
            model.prefill(ids, &mut [&mut full, &mut cache], Wanted::Nothing, &|tokens| {
                passed.set(passed.get() + tokens);
                bar.set_position(begun + (passed.get() / layers) as u64);
            })?;
            // Everything of the prompt lies on the devices before a step reads of it.
            cache.commit(ids, STATE).context("commit of the prompt")?;
            let before = cache.stats();
            let expected = answer(model, prompt, &mut full)?;
            let got = answer(model, prompt, &mut cache)?;
            report.add(prompt, policy, &expected, &got, difference(cache.stats(), before));
            bar.set_position(begun + ids.len() as u64);
            passed.set(0);
            close(prompt, cache)
        };
        one().with_context(|| format!("prompt {}", prompt.id))?;
    }
    Ok(report)
}

/// Reads of the decode steps alone; sizes as they are.
fn difference(after: KvStats, before: KvStats) -> KvStats {
    KvStats { bytes_read: after.bytes_read - before.bytes_read, steps: after.steps - before.steps, ..after }
}

impl Report {
    fn add(&mut self, prompt: &Prompt, policy: (&str, &str), full: &Answers, got: &Answers, stats: KvStats) {
        let found = self.cells.iter().position(|c| c.task == prompt.task && c.context == prompt.context);
        let index = found.unwrap_or_else(|| {
            self.cells.push(Cell::new(&prompt.task, prompt.context, policy));
            self.cells.len() - 1
        });
        let drift = full
            .logits
            .iter()
            .flatten()
            .zip(got.logits.iter().flatten())
            .map(|(a, b)| (a - b).abs())
            .fold(0.0f32, f32::max);
        self.cells[index].add(
            prompt.item_accuracy(&got.predicted),
            prompt.item_accuracy(&full.predicted),
            got.predicted == full.predicted,
            drift,
            stats,
            (got.steps, got.elapsed.as_secs_f64()),
        );
    }
}
