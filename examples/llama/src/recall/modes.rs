//! Options of `kvrun recall` and `kvrun compare` that change how prompts are run.

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;

use super::prompts::{self, Prompt};

/// The options.
#[derive(Clone, Debug, Default, Args)]
pub struct ModeArgs {
    /// Prefill only the first N tokens of each prompt; the others up to the question are decode steps with full
    /// attention [default: all tokens]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill: Option<u32>,
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
    pub fn load(&self, filter: &PromptFilter<'_>) -> Result<Vec<Prompt>> {
        let prompts = filter.load()?;
        if let Some(prefill) = self.prefill_tokens() {
            for Prompt { id, query_start, .. } in &prompts {
                ensure!(
                    prefill <= *query_start,
                    "--prefill {prefill} is more than the {query_start} tokens before the question of {id}; give at \
                     most {query_start}, or longer --contexts"
                );
            }
        }
        Ok(prompts)
    }

    /// Returns the tokens of a prompt that prefill computes, or `None` for all up to the question.
    #[must_use]
    pub fn prefill_tokens(&self) -> Option<usize> {
        self.prefill.map(|tokens| tokens as usize)
    }
}
