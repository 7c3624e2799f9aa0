//! The answer to one question: decode steps over the query and the answer, with predictions of the answer's tokens.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::prompts::Prompt;
use crate::kv::KvCache;
use crate::model::{Model, argmax};

/// The result of one pass over a query and its answer.
#[derive(Clone, Debug)]
pub struct Answers {
    /// The predicted id of each answer token. `None` if the token was given.
    pub predicted: Vec<Option<u32>>,
    /// The logits `[vocab]` of each prediction, in order.
    pub logits: Vec<Vec<f32>>,
    /// Decode steps.
    pub steps: usize,
    /// The time that the decode steps took.
    pub elapsed: Duration,
}

/// Feeds the query and the answer (teacher forcing) as decode steps to a cache that holds the tokens before the query.
///
/// # Errors
/// Fails as [`Model::decode`] does.
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
