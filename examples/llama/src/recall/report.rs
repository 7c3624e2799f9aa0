//! The report of `kvrun recall`: figures per task and context, as JSON and as a table.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use stratakv::pipeline::PipelineReport;

use super::drift::Drift;
use super::needles::Half;
use super::prompts::Prompt;
use crate::kv::KvStats;

/// The means over the prompts of one task and context.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The task.
    pub task: String,
    /// The nominal context length.
    pub context: usize,
    /// The half of the questions. `None` if each prompt asked its own question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub half: Option<Half>,
    /// The policy.
    pub policy: String,
    /// The budget of attended tokens, as on the command line.
    pub budget: String,
    /// The number of prompts.
    pub n: usize,
    /// The item accuracy under the policy, 0 to 1.
    pub accuracy: f64,
    /// The item accuracy of full attention in memory, on the same prompts and with the same KV dtype.
    pub full_accuracy: f64,
    /// The mean bytes of a prompt's stored keys and values.
    pub kv_bytes_total: u64,
    /// The mean bytes read per decode step.
    pub kv_bytes_read_per_step: u64,
    /// The peak of accounted memory over all prompts.
    pub resident_bytes_peak: u64,
    /// Decode steps per second under the policy.
    pub tokens_per_s: f64,
    /// Prompts for which the policy predicted the same tokens as full attention.
    pub same_answers: usize,
    /// The largest difference of a logit from full attention.
    pub logit_difference_max: f32,
    /// The result of prefetching in all steps. `None` if it was off.
    pub pipeline: Option<PipelineReport>,
    /// The share of the devices' read time that overlapped with computing. `None` if prefetching was off.
    pub io_hidden_share: Option<f64>,
    /// The share of the selected groups that the prediction had selected too, in layers with a prediction.
    pub prediction_recall: Option<f64>,
    /// Prefetched bytes per decode step that were not used.
    pub wasted_bytes_per_step: Option<u64>,
    #[serde(skip)]
    sums: Sums,
}

/// The sums behind the means of a [`Cell`].
#[derive(Clone, Debug, Default)]
struct Sums {
    accuracy: f64,
    full: f64,
    kv_bytes: u64,
    read: u64,
    read_steps: u64,
    steps: usize,
    seconds: f64,
}

/// The answer to one prompt under the policy, compared with full attention.
pub(super) struct PromptScore {
    /// The item accuracy under the policy.
    pub(super) accuracy: f64,
    /// The item accuracy of full attention.
    pub(super) full: f64,
    /// True if both predicted the same tokens.
    pub(super) same: bool,
    /// The largest difference of a logit.
    pub(super) logit_difference: f32,
}

impl Cell {
    pub(super) fn new(prompt: &Prompt, (policy, budget): (&str, &str)) -> Self {
        Self {
            task: prompt.task.clone(),
            context: prompt.context,
            half: prompt.half,
            policy: policy.to_owned(),
            budget: budget.to_owned(),
            n: 0,
            accuracy: 0.0,
            full_accuracy: 0.0,
            kv_bytes_total: 0,
            kv_bytes_read_per_step: 0,
            resident_bytes_peak: 0,
            tokens_per_s: 0.0,
            same_answers: 0,
            logit_difference_max: 0.0,
            pipeline: None,
            io_hidden_share: None,
            prediction_recall: None,
            wasted_bytes_per_step: None,
            sums: Sums::default(),
        }
    }

    /// Adds one prompt: its score and the costs of its decode steps.
    pub(super) fn add(&mut self, score: PromptScore, stats: KvStats, (steps, seconds): (usize, f64)) {
        let s = &mut self.sums;
        s.accuracy += score.accuracy;
        s.full += score.full;
        s.kv_bytes += stats.kv_bytes_total;
        s.read += stats.bytes_read;
        s.read_steps += stats.steps;
        s.steps += steps;
        s.seconds += seconds;
        self.n += 1;
        self.accuracy = s.accuracy / self.n as f64;
        self.full_accuracy = s.full / self.n as f64;
        self.kv_bytes_total = s.kv_bytes / self.n as u64;
        self.kv_bytes_read_per_step = s.read.checked_div(s.read_steps).unwrap_or(0);
        self.resident_bytes_peak = self.resident_bytes_peak.max(stats.resident_bytes_peak);
        self.tokens_per_s = if s.seconds > 0.0 { s.steps as f64 / s.seconds } else { 0.0 };
        self.same_answers += usize::from(score.same);
        self.logit_difference_max = self.logit_difference_max.max(score.logit_difference);
        if let Some(report) = stats.pipeline {
            *self.pipeline.get_or_insert_default() += report;
        }
        self.io_hidden_share = self.pipeline.map(|report| report.hidden_share());
        self.prediction_recall = self.pipeline.map(|report| report.recall());
        self.wasted_bytes_per_step = self.pipeline.and_then(|report| report.wasted_bytes.checked_div(s.read_steps));
    }
}

/// The answer to one question of several about a haystack.
#[derive(Clone, Debug, Serialize)]
pub struct Asked {
    /// The name of the question: its prompt and its number from 0 on.
    pub id: String,
    /// The task of the haystack.
    pub task: String,
    /// The nominal context length.
    pub context: usize,
    /// The half that the question belongs to.
    pub half: Half,
    /// The item accuracy under the policy, 0 or 1.
    pub accuracy: f64,
    /// The item accuracy of full attention, 0 or 1.
    pub full_accuracy: f64,
    /// True if both predicted the same tokens.
    pub same: bool,
}

/// All cells, in the order of their first prompts.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// One cell per task and context.
    pub cells: Vec<Cell>,
    /// The answers to all questions, if several were asked about each haystack.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub answers: Vec<Asked>,
    /// The tokens of each prompt that prefill computed. The others up to the question were decode steps with full
    /// attention. `None` if all were prefilled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<usize>,
    /// How many of the first layers attend to everything.
    pub dense_layers: usize,
    /// The queries that a policy with a profile made its clusters of. `None` if the policy chooses no entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The pairs of haystacks that were passed over because their needles contradict each other. `None` if prompts were
    /// not shifted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passed_over: Option<usize>,
    /// How far the prompts' keys are from the calibration's keys, if the policy's method has codes.
    #[serde(skip_serializing_if = "Drift::is_empty")]
    pub drift: Drift,
}

impl Report {
    /// Returns the decode steps under the policy over all cells.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.cells.iter().map(|c| c.sums.read_steps).sum()
    }

    /// Returns the result of prefetching over all cells, or `None` if it was off.
    #[must_use]
    pub fn pipeline(&self) -> Option<PipelineReport> {
        let mut reports = self.cells.iter().filter_map(|c| c.pipeline);
        let mut all = reports.next()?;
        reports.for_each(|report| all += report);
        Some(all)
    }

    /// Returns the contexts in ascending order, each with the mean accuracies over tasks of the policy and of full
    /// attention. Questions for profiles do not count.
    #[must_use]
    pub fn means(&self) -> Vec<(usize, f64, f64)> {
        let counted = || self.cells.iter().filter(|c| c.half != Some(Half::Profile));
        let contexts: BTreeSet<usize> = counted().map(|c| c.context).collect();
        let mean = |context| {
            let cells: Vec<&Cell> = counted().filter(|c| c.context == context).collect();
            let n = cells.len() as f64;
            let sum = |f: fn(&Cell) -> f64| cells.iter().map(|c| f(c)).sum::<f64>() / n;
            (context, sum(|c| c.accuracy), sum(|c| c.full_accuracy))
        };
        contexts.into_iter().map(mean).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.cells.first() else { return Ok(()) };
        writeln!(f, "policy {}, budget {}; accuracies in % of items", first.policy, first.budget)?;
        if let Some(prefill) = self.prefill {
            writeln!(f, "the first {prefill} tokens by prefill, the others as decode steps with full attention")?;
        }
        if self.dense_layers > 0 {
            writeln!(f, "first layers that attend to everything: {}", self.dense_layers)?;
        }
        if let Some(profile) = &self.profile {
            writeln!(f, "queries of a profile: {profile}")?;
        }
        writeln!(
            f,
            "{:<6} {:>8} {:>4} {:>7} {:>7} {:>10} {:>12} {:>6} {:>11} {:>9}",
            "task", "context", "n", "full", "policy", "KV bytes", "read/step", "share", "resident", "tokens/s"
        )?;
        for c in &self.cells {
            let share = 100.0 * c.kv_bytes_read_per_step as f64 / c.kv_bytes_total.max(1) as f64;
            writeln!(
                f,
                "{:<6} {:>8} {:>4} {:>7.1} {:>7.1} {:>10} {:>12} {:>5.1}% {:>11} {:>9.0}{}",
                c.task,
                c.context,
                c.n,
                100.0 * c.full_accuracy,
                100.0 * c.accuracy,
                bytes(c.kv_bytes_total),
                bytes(c.kv_bytes_read_per_step),
                share,
                bytes(c.resident_bytes_peak),
                c.tokens_per_s,
                c.half.map_or_else(String::new, |half| format!(" {}", half.name()))
            )?;
        }
        for (context, accuracy, full) in self.means() {
            writeln!(f, "mean   {context:>8}      {:>7.1} {:>7.1}", 100.0 * full, 100.0 * accuracy)?;
        }
        if let Some(report) = self.pipeline() {
            writeln!(f, "{}", pipeline_line(&report))?;
        }
        match self.drift.line(&first.policy) {
            Some(line) => writeln!(f, "{line}"),
            None => Ok(()),
        }
    }
}

/// Returns a line about prefetching.
#[must_use]
pub fn pipeline_line(report: &PipelineReport) -> String {
    format!(
        "read ahead: {:.0} % of the read time hidden (waited {:.1} of {:.1} ms), predictions had {:.1} % of the \
         selected groups, {} of {} read were not used",
        100.0 * report.hidden_share(),
        report.waited.as_secs_f64() * 1e3,
        report.device_time.as_secs_f64() * 1e3,
        100.0 * report.recall(),
        bytes(report.wasted_bytes),
        bytes(report.read_bytes)
    )
}

/// Formats bytes in the largest binary unit that keeps at least one digit before the point.
pub(crate) fn bytes(n: u64) -> String {
    let mut value = n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_hold_means_and_their_json_has_the_documented_keys() {
        let prompt = serde_json::json!({
            "id": "S", "task": "S", "context": 1024, "prompt": [1, 2], "query_start": 1, "answer": [1], "score": [1]
        });
        let prompt: Prompt = serde_json::from_value(prompt).unwrap();
        let mut cell = Cell::new(&prompt, ("window", "1/13"));
        let stats = |read, steps| KvStats {
            kv_bytes_total: 100,
            bytes_read: read,
            steps,
            resident_bytes_peak: read,
            pipeline: None,
        };
        let right = PromptScore { accuracy: 1.0, full: 1.0, same: true, logit_difference: 0.0 };
        cell.add(right, stats(10, 1), (4, 2.0));
        let wrong = PromptScore { accuracy: 0.0, full: 1.0, same: false, logit_difference: 0.5 };
        cell.add(wrong, stats(50, 2), (4, 2.0));
        assert_eq!((cell.n, cell.accuracy, cell.full_accuracy), (2, 0.5, 1.0));
        assert_eq!((cell.kv_bytes_read_per_step, cell.resident_bytes_peak, cell.same_answers), (20, 50, 1));
        assert_eq!(cell.tokens_per_s, 2.0);
        let other = Cell { task: "MK".into(), accuracy: 1.0, ..cell.clone() };
        // Questions for profiles do not count in means.
        let profile = Cell { half: Some(Half::Profile), accuracy: 0.0, ..other.clone() };
        let report = Report { cells: vec![cell, other, profile], ..Report::default() };
        assert_eq!(report.means(), [(1024, 0.75, 1.0)]);
        let json = serde_json::to_value(&report).unwrap();
        for key in [
            "task",
            "context",
            "policy",
            "budget",
            "n",
            "accuracy",
            "full_accuracy",
            "kv_bytes_total",
            "kv_bytes_read_per_step",
            "resident_bytes_peak",
            "tokens_per_s",
        ] {
            assert!(json["cells"][0].get(key).is_some(), "{key}");
        }
        assert!(report.to_string().contains("mean       1024"), "{report}");
    }
}
