//! Reads prompt files: one JSON object per line, gzip or plain.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::needles::Half;

/// One prompt with its answer. `tests/fixtures/recall-tiny/TASKS.md` describes the tasks.
#[derive(Clone, Debug, Deserialize)]
pub struct Prompt {
    /// The name within the file.
    pub id: String,
    /// The task: `S`, `MK`, `MKD`, `MQ`, `VTC`.
    pub task: String,
    /// The nominal context length.
    pub context: usize,
    /// The token ids of the context and the query.
    pub prompt: Vec<u32>,
    /// The index of the query in `prompt`.
    pub query_start: usize,
    /// The token ids of the answer.
    pub answer: Vec<u32>,
    /// For each answer token 1 if it must be predicted, or 0 if it is given.
    pub score: Vec<u8>,
    /// The half of its haystack's questions, for prompts of [`questions`](super::questions).
    #[serde(skip)]
    pub half: Option<Half>,
}

impl Prompt {
    fn check(&self) -> Result<()> {
        ensure!(
            self.query_start > 0 && self.query_start < self.prompt.len(),
            "query_start {} is not inside a prompt of {} tokens",
            self.query_start,
            self.prompt.len()
        );
        ensure!(
            self.answer.len() == self.score.len(),
            "answer has {} tokens but score has {}",
            self.answer.len(),
            self.score.len()
        );
        ensure!(self.score.contains(&1), "no answer token is scored");
        Ok(())
    }

    /// Returns the ids that decode steps are fed: the query, and the answer without its last token.
    pub fn fed(&self) -> impl Iterator<Item = u32> + '_ {
        let answer = &self.answer[..self.answer.len().saturating_sub(1)];
        self.prompt[self.query_start..].iter().chain(answer).copied()
    }

    /// Returns the share of correct items. An item is a run of consecutive scored tokens, and it is correct if all of
    /// them are predicted. `predicted[i]` is the prediction of answer token `i`.
    #[must_use]
    pub fn item_accuracy(&self, predicted: &[Option<u32>]) -> f64 {
        let (mut items, mut right, mut open) = (0u32, 0u32, None);
        for i in 0..=self.answer.len() {
            let scored = self.score.get(i).is_some_and(|&s| s == 1);
            if scored {
                let good = predicted.get(i).copied().flatten() == Some(self.answer[i]);
                open = Some(open.unwrap_or(true) && good);
            } else if let Some(good) = open.take() {
                items += 1;
                right += u32::from(good);
            }
        }
        f64::from(right) / f64::from(items.max(1))
    }
}

/// Loads prompts of some tasks and contexts, at most `limit` per task and context, in the order of the file. An empty
/// list of tasks or contexts takes all of them.
///
/// # Errors
/// Fails if the file is unreadable, if a line is not a prompt, or if no prompt matches.
pub fn load(path: &Path, tasks: &[String], contexts: &[usize], limit: usize) -> Result<Vec<Prompt>> {
    let mut kept: Vec<Prompt> = Vec::new();
    let mut counts: HashMap<(String, usize), usize> = HashMap::new();
    for (number, line) in open(path)?.lines().enumerate() {
        let place = || format!("{} line {}", path.display(), number + 1);
        let line = line.with_context(place)?;
        if line.trim().is_empty() {
            continue;
        }
        let prompt: Prompt = serde_json::from_str(&line).with_context(place)?;
        prompt.check().with_context(place)?;
        let wanted = (tasks.is_empty() || tasks.contains(&prompt.task))
            && (contexts.is_empty() || contexts.contains(&prompt.context));
        let count = counts.entry((prompt.task.clone(), prompt.context)).or_default();
        if wanted && *count < limit {
            *count += 1;
            kept.push(prompt);
        }
    }
    ensure!(
        !kept.is_empty(),
        "{} holds no prompt of tasks {} and contexts {contexts:?}",
        path.display(),
        if tasks.is_empty() { "(all)".to_owned() } else { tasks.join(",") }
    );
    Ok(kept)
}

/// Opens a file and unpacks it if it is gzip.
fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?);
    let gzip = file.fill_buf().with_context(|| format!("cannot read {}", path.display()))?.starts_with(&[0x1f, 0x8b]);
    let reader: Box<dyn Read> =
        if gzip { Box::new(flate2::bufread::MultiGzDecoder::new(file)) } else { Box::new(file) };
    Ok(Box::new(BufReader::new(reader)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn prompt(score: &[u8]) -> Prompt {
        Prompt {
            id: "x".into(),
            task: "MQ".into(),
            context: 8,
            prompt: vec![1, 2],
            query_start: 1,
            answer: (0..score.len() as u32).collect(),
            score: score.to_vec(),
            half: None,
        }
    }

    #[test]
    fn items_are_runs_of_scored_tokens() {
        let p = prompt(&[1, 1, 0, 1, 1, 0, 0, 1]);
        let right: Vec<Option<u32>> = (0..8).map(Some).collect();
        assert_eq!(p.item_accuracy(&right), 1.0);
        let mut one = right.clone();
        one[4] = Some(99);
        assert_eq!(p.item_accuracy(&one), 2.0 / 3.0);
        one[2] = None;
        assert_eq!(p.item_accuracy(&one), 2.0 / 3.0, "given tokens do not count");
        assert_eq!(p.item_accuracy(&[]), 0.0);
    }

    #[test]
    fn prompt_files_are_filtered_and_checked() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for (task, context) in [("S", 8), ("S", 8), ("S", 16), ("MK", 8)] {
            let about = format!(r#""id":"a","task":"{task}","context":{context}"#);
            writeln!(file, r#"{{{about},"prompt":[1,2,3],"query_start":2,"answer":[4],"score":[1]}}"#).unwrap();
        }
        assert_eq!(load(file.path(), &[], &[], 9).unwrap().len(), 4);
        assert_eq!(load(file.path(), &[], &[8], 1).unwrap().len(), 2);
        assert_eq!(load(file.path(), &["MK".into()], &[8], 9).unwrap().len(), 1);
        assert!(load(file.path(), &["VTC".into()], &[], 9).unwrap_err().to_string().contains("no prompt of tasks"));
        writeln!(file, r#"{{"id":"a","task":"S","context":8,"prompt":[1],"query_start":1,"answer":[4],"score":[1]}}"#)
            .unwrap();
        let error = format!("{:#}", load(file.path(), &[], &[], 9).unwrap_err());
        assert!(error.contains("line 5") && error.contains("query_start 1"), "{error}");
    }
}
