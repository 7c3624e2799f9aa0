//! The queries that `swarm` and `infllm` make their clusters of, in `kvrun recall` and `kvrun compare`.
//!
//! Clusters are made once per haystack, before its question is asked. [`ProfileSource`] names three kinds of queries:
//!
//! 1. The newest tokens of the prompt, which prefill shows to the cache.
//! 2. Decode steps: tokens that the model generates behind the haystack.
//! 3. Calibration questions about the haystack, whose answers count in no mean.
//!
//! The second and the third kind run with full attention, on copies of a cache in memory.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};

use super::answer::answer;
use super::modes::ModeArgs;
use super::needles::{Half, questions};
use super::prompts::Prompt;
use crate::kv::MemoryKv;
use crate::kv::recorded::RecordedQueries;
use crate::kv::recording::RecordingKv;
use crate::model::{LogitPositions, Model, argmax};

/// Which queries a profile is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfileSource {
    /// The queries of at most this many newest tokens before the question.
    Last(usize),
    /// The queries of this many tokens that the model generates behind the tokens before the question.
    Decode(usize),
    /// The queries of this many questions of [`Half::Profile`].
    Questions(usize),
}

impl FromStr for ProfileSource {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, number) = text.split_once(':').unwrap_or((text, ""));
        match (name, number.parse()) {
            ("last", Ok(tokens)) if tokens > 0 => Ok(Self::Last(tokens)),
            ("decode", Ok(tokens)) if tokens > 0 => Ok(Self::Decode(tokens)),
            ("questions", Ok(count)) if count > 0 => Ok(Self::Questions(count)),
            _ => bail!("{text:?} names no profile; give last:N, decode:N or questions:N with N from 1 on"),
        }
    }
}

impl fmt::Display for ProfileSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Last(tokens) => write!(f, "last:{tokens}"),
            Self::Decode(tokens) => write!(f, "decode:{tokens}"),
            Self::Questions(count) => write!(f, "questions:{count}"),
        }
    }
}

impl ProfileSource {
    /// Checks that the options of a run suit the source.
    ///
    /// # Errors
    /// Fails if questions are recorded, but the run asks too few of them, or a part of the haystack comes later.
    pub fn check(self, modes: &ModeArgs) -> Result<()> {
        let Self::Questions(count) = self else { return Ok(()) };
        let needed = count.saturating_mul(2);
        ensure!(
            modes.question_count().is_some_and(|asked| asked >= needed),
            "--profile {self} needs --questions {needed} or more, because half of the questions are for profiles"
        );
        ensure!(
            modes.prefill_tokens().is_none(),
            "--profile {self} asks about the whole haystack before decode steps; leave out --prefill"
        );
        Ok(())
    }

    /// Returns how many of the newest queries a cache records by itself.
    #[must_use]
    pub fn newest(self) -> usize {
        match self {
            Self::Last(tokens) => tokens,
            Self::Decode(_) | Self::Questions(_) => 0,
        }
    }

    /// Returns what prefill computes for the source, beside keys and values.
    #[must_use]
    pub fn wanted(self) -> LogitPositions {
        match self {
            Self::Last(_) => LogitPositions::Queries,
            Self::Decode(_) => LogitPositions::Last,
            Self::Questions(_) => LogitPositions::Nothing,
        }
    }

    /// Records the queries with full attention. Returns none for [`Self::Last`], which the cache records by itself.
    ///
    /// `held` has the tokens before the question, of which `logits` predict the next one. `asked` is the number of
    /// questions about the haystack.
    ///
    /// # Errors
    /// Fails as [`Model::decode`] and [`questions`] do.
    pub(super) fn record(
        self,
        model: &Model,
        prompt: &Prompt,
        asked: Option<usize>,
        (held, logits): (&MemoryKv, &[f32]),
    ) -> Result<Option<RecordedQueries>> {
        let mut cache = RecordingKv::new(held.clone(), usize::MAX);
        match self {
            Self::Last(_) => return Ok(None),
            Self::Decode(tokens) => {
                let mut logits = logits.to_vec();
                for _ in 0..tokens {
                    let next = argmax(&logits).context("profile: the model predicts no token behind the prompt")?;
                    logits = model.decode(next, &mut cache).with_context(|| format!("--profile {self}"))?;
                }
            }
            Self::Questions(count) => {
                let asked = questions(prompt, asked.unwrap_or_default())?;
                let profiled = asked.iter().filter(|question| question.half == Some(Half::Profile));
                for question in profiled.take(count) {
                    cache.continue_from(held.clone());
                    answer(model, question, &mut cache)?;
                }
            }
        }
        Ok(Some(cache.into_parts().1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_parse_and_print_and_others_are_refused() {
        for text in ["last:128", "decode:1", "questions:8"] {
            assert_eq!(text.parse::<ProfileSource>().unwrap().to_string(), text);
        }
        for bad in ["", "last", "last:", "last:0", "decode:-1", "questions:x", "question:4", "last:4:5"] {
            let error = bad.parse::<ProfileSource>().unwrap_err().to_string();
            assert!(error.contains("give last:N, decode:N or questions:N"), "{bad}: {error}");
        }
    }

    #[test]
    fn questions_need_a_run_that_asks_twice_as_many() {
        let modes = |questions, prefill| ModeArgs { questions, prefill, shift: None };
        let eight = ProfileSource::Questions(8);
        assert!(eight.check(&modes(Some(16), None)).is_ok());
        for questions in [None, Some(14)] {
            let error = eight.check(&modes(questions, None)).unwrap_err().to_string();
            assert!(error.contains("--questions 16"), "{error}");
        }
        let error = eight.check(&modes(Some(16), Some(512))).unwrap_err().to_string();
        assert!(error.contains("leave out --prefill"), "{error}");
        for source in [ProfileSource::Last(9), ProfileSource::Decode(9)] {
            assert!(source.check(&modes(None, Some(9))).is_ok());
        }
    }
}
