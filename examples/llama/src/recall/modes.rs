//! Options of `kvrun recall` and `kvrun compare` that change how prompts are run.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;

use super::needles::{questions, shift};
use super::prompts::{self, Prompt};

/// The options.
#[derive(Clone, Debug, Default, Args)]
pub struct ModeArgs {
    /// Prefill only the first N tokens of each prompt; the others up to the question are decode steps with full
    /// attention [default: all tokens]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill: Option<u32>,
    /// Put the haystack of a prompt of task S before that of each prompt; tasks are then MK and MKD by default. CONTEXT
    /// is that of S [default: the same]
    #[arg(long, value_name = "CONTEXT", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub shift: Option<usize>,
    /// Ask N questions about the needles of each haystack instead of the prompt's own, each from a fork; tasks are then
    /// MK and MKD by default. Half of them are for profiles, and means count the other half
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub questions: Option<u32>,
}

/// The task whose haystacks `--shift` puts first.
const FIRST_TASK: &str = "S";

/// The tasks of prompts with many needles.
const MANY_NEEDLES: [&str; 2] = ["MK", "MKD"];

/// The prompts of a run.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// The pairs that `--shift` passed over because their needles contradict each other. `None` without `--shift`.
    pub passed_over: Option<usize>,
}

impl Loaded {
    /// Returns a line about pairs that were passed over.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        let count = self.passed_over?;
        Some(format!("{count} pairs passed over because their needles contradict each other"))
    }
}

/// The prompts to choose from a file.
#[derive(Clone, Copy, Debug)]
pub struct PromptFilter<'a> {
    /// The prompt file.
    pub file: &'a Path,
    /// The tasks. An empty list means all.
    pub tasks: &'a [String],
    /// The context lengths. An empty list means all.
    pub contexts: &'a [usize],
    /// The most prompts per task and context.
    pub limit: u32,
}

impl PromptFilter<'_> {
    /// Loads the prompts.
    ///
    /// # Errors
    /// Fails as [`prompts::load`] does.
    fn load(&self) -> Result<Vec<Prompt>> {
        prompts::load(self.file, self.tasks, self.contexts, self.limit as usize)
    }
}

impl ModeArgs {
    /// Loads the prompts of a run.
    ///
    /// # Errors
    /// Fails as [`prompts::load`] does, or if an option does not suit a prompt. The error names the prompt.
    pub fn load(&self, filter: &PromptFilter<'_>) -> Result<Loaded> {
        let many = MANY_NEEDLES.map(str::to_owned);
        let tasks = if (self.shift.is_some() || self.questions.is_some()) && filter.tasks.is_empty() {
            &many[..]
        } else {
            filter.tasks
        };
        let (mut prompts, mut passed_over) = (PromptFilter { tasks, ..*filter }.load()?, None);
        if let Some(context) = self.shift {
            let (shifted, count) = shifted(prompts, context, filter.file)?;
            (prompts, passed_over) = (shifted, Some(count));
        }
        if let Some(prefill) = self.prefill_tokens() {
            for Prompt { id, query_start, .. } in &prompts {
                ensure!(
                    prefill <= *query_start,
                    "--prefill {prefill} is more than the {query_start} tokens before the question of {id}; give at \
                     most {query_start}, or longer --contexts"
                );
            }
        }
        if let Some(count) = self.question_count() {
            prompts.iter().try_for_each(|prompt| questions(prompt, count).map(|_| ()))?;
        }
        Ok(Loaded { prompts, passed_over })
    }

    /// Returns the number of questions per haystack, or `None` for the prompt's own question.
    #[must_use]
    pub fn question_count(&self) -> Option<usize> {
        self.questions.map(|count| count as usize)
    }

    /// Returns the tokens of a prompt that prefill computes, or `None` for all up to the question.
    #[must_use]
    pub fn prefill_tokens(&self) -> Option<usize> {
        self.prefill.map(|tokens| tokens as usize)
    }
}

/// Returns each prompt behind the haystack of a prompt of [`FIRST_TASK`], and how many pairs were passed over.
///
/// The first prompt of a task and context takes the first haystack, the second one the second. If their needles
/// contradict each other, the next haystack is tried. A prompt that every haystack contradicts is left out.
fn shifted(prompts: Vec<Prompt>, context: usize, file: &Path) -> Result<(Vec<Prompt>, usize)> {
    let mut counts: HashMap<(String, usize), usize> = HashMap::new();
    let mut haystacks: HashMap<usize, Vec<Prompt>> = HashMap::new();
    let (mut shifted, mut passed_over) = (Vec::new(), 0);
    for prompt in prompts {
        ensure!(
            prompt.task != FIRST_TASK,
            "--shift puts a haystack of task {FIRST_TASK} first; choose other --tasks, such as MK,MKD"
        );
        let first_context = if context == 0 { prompt.context } else { context };
        let firsts = match haystacks.entry(first_context) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert(prompts::load(file, &[FIRST_TASK.to_owned()], &[first_context], usize::MAX)?)
            }
        };
        let count = counts.entry((prompt.task.clone(), prompt.context)).or_default();
        let start = *count;
        *count += 1;
        let order = (0..firsts.len()).map(|at| &firsts[(start + at) % firsts.len()]);
        for first in order {
            if let Some(pair) = shift(first, &prompt) {
                shifted.push(pair);
                break;
            }
            passed_over += 1;
        }
    }
    ensure!(!shifted.is_empty(), "--shift: the needles of all {passed_over} pairs contradict each other");
    Ok((shifted, passed_over))
}
