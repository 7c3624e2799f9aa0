//! Runs prompts one after the other. For each prompt:
//!
//! 1. [`prefill_tokens`] and [`grow`] fill two caches: one with full attention in memory, and one under the policy. The
//!    second one gets the queries of [`RecallRun::profile`] and commits.
//! 2. With [`RecallRun::questions`], step 3 is repeated for each question, from a fork of both caches.
//! 3. [`answer`] feeds the query and the answer to both caches as decode steps and takes their predictions.
//! 4. The predictions, the logits and the costs of the decode steps go to the report.

use anyhow::{Context, Result};
use indicatif::ProgressBar;

use super::answer::{Answers, answer};
use super::fill::{grow, prefill_tokens, prefilled};
use super::needles::questions;
use super::profile_source::ProfileSource;
use super::prompts::Prompt;
use super::report::{Asked, Cell, PromptScore, Report};
use crate::kv::{KvCache, KvStats, MemoryKv};
use crate::model::{LogitPositions, Model};

/// The caller's state of a recall sequence. It holds nothing to resume.
pub const STATE: &[u8] = b"recall";

/// The model, the prompts and the names of a run.
pub struct RecallRun<'a> {
    /// The model.
    pub model: &'a Model,
    /// The prompts.
    pub prompts: &'a [Prompt],
    /// The names of the policy and of its budget, for the report.
    pub policy: (&'a str, &'a str),
    /// The tokens of each prompt that prefill computes. The others up to the question are decode steps with full
    /// attention. `None` means that all are prefilled.
    pub prefill: Option<usize>,
    /// The number of questions about each haystack. `None` asks the prompt's own question.
    pub questions: Option<usize>,
    /// The queries that a policy with a profile makes its clusters of. `None` if the policy chooses no entries.
    pub profile: Option<ProfileSource>,
    /// The progress bar. It counts tokens before the question.
    pub bar: &'a ProgressBar,
}

impl RecallRun<'_> {
    /// Runs all prompts.
    ///
    /// - `full` makes an empty cache in memory with full attention.
    /// - `open` makes an empty cache under the policy.
    /// - `fork` makes a cache with the same tokens, for one question of several.
    /// - `close` receives the cache of `open` when its prompt is done.
    ///
    /// # Errors
    /// Fails as [`prefill_tokens`] and [`Model::decode`] do, and if `full`, `open`, `fork` or `close` fails. The error
    /// names the prompt.
    pub fn run<C: KvCache>(
        &self,
        full: impl Fn() -> Result<MemoryKv>,
        mut open: impl FnMut(&Prompt) -> Result<C>,
        mut fork: impl FnMut(&mut C) -> Result<C>,
        mut close: impl FnMut(&Prompt, C) -> Result<()>,
    ) -> Result<Report> {
        let profile = self.profile.map(|source| source.to_string());
        let mut report = Report { prefill: self.prefill, profile, ..Report::default() };
        for prompt in self.prompts {
            let mut one = || -> Result<()> {
                let (mut full, mut cache) = (full()?, open(prompt)?);
                let ids = &prompt.prompt[..prompt.query_start];
                let tick = |tokens| self.bar.inc(tokens as u64);
                let (prompt_tokens, grown) = ids.split_at(prefilled(self.prefill, ids.len())?);
                let wanted = self.profile.map_or(LogitPositions::Nothing, ProfileSource::wanted);
                let logits = prefill_tokens(self.model, prompt_tokens, &mut [&mut full, &mut cache], wanted, &tick)?;
                if let Some(profile) = self.profile {
                    let queries = profile.record(self.model, prompt, self.questions, (&full, &logits))?;
                    queries.into_iter().for_each(|queries| cache.set_profile(queries));
                }
                cache.commit(prompt_tokens, STATE).context("commit of the prompt")?;
                grow(self.model, grown, &mut [&mut full, &mut cache], &tick)?;
                // After the commit all tokens are on the devices, so steps read all that they attend to.
                if !grown.is_empty() {
                    cache.commit(grown, STATE).context("commit of the decode steps")?;
                }
                let Some(count) = self.questions else {
                    self.ask(prompt, &mut full, &mut cache, &mut report)?;
                    return close(prompt, cache);
                };
                for question in questions(prompt, count)? {
                    let mut forked = fork(&mut cache).context("fork for a question")?;
                    self.ask(&question, &mut full.clone(), &mut forked, &mut report)?;
                }
                close(prompt, cache)
            };
            one().with_context(|| format!("prompt {}", prompt.id))?;
        }
        Ok(report)
    }

    /// Answers one question from both caches.
    fn ask<C: KvCache>(&self, prompt: &Prompt, full: &mut MemoryKv, cache: &mut C, report: &mut Report) -> Result<()> {
        let before = cache.stats();
        let expected = answer(self.model, prompt, full)?;
        let got = answer(self.model, prompt, cache)?;
        report.add(prompt, self.policy, &expected, &got, difference(cache.stats(), before));
        Ok(())
    }
}

/// Returns the costs of the decode steps alone. Sizes are taken from `after`.
fn difference(after: KvStats, before: KvStats) -> KvStats {
    KvStats { bytes_read: after.bytes_read - before.bytes_read, steps: after.steps - before.steps, ..after }
}

impl Report {
    fn add(&mut self, prompt: &Prompt, policy: (&str, &str), full: &Answers, got: &Answers, stats: KvStats) {
        let found = self
            .cells
            .iter()
            .position(|c| c.task == prompt.task && c.context == prompt.context && c.half == prompt.half);
        let index = found.unwrap_or_else(|| {
            self.cells.push(Cell::new(prompt, policy));
            self.cells.len() - 1
        });
        let pairs = full.logits.iter().flatten().zip(got.logits.iter().flatten());
        let score = PromptScore {
            accuracy: prompt.item_accuracy(&got.predicted),
            full: prompt.item_accuracy(&full.predicted),
            same: got.predicted == full.predicted,
            logit_difference: pairs.map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max),
        };
        if let Some(half) = prompt.half {
            let (id, task) = (prompt.id.clone(), prompt.task.clone());
            let (accuracy, full_accuracy, same) = (score.accuracy, score.full, score.same);
            self.answers.push(Asked { id, task, context: prompt.context, half, accuracy, full_accuracy, same });
        }
        self.cells[index].add(score, stats, (got.steps, got.elapsed.as_secs_f64()));
    }
}
