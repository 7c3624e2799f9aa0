//! Figures per task and context, as JSON and as a table.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use stratakv::pipeline::PipelineReport;

use super::drift::Drift;
use crate::kv::KvStats;

/// Means over the prompts of one task and context.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Task name.
    pub task: String,
    /// Nominal context length.
    pub context: usize,
    /// Policy name.
    pub policy: String,
    /// Attended tokens per step, as given on the command line.
    pub budget: String,
    /// Prompts.
    pub n: usize,
    /// Item accuracy under the policy, 0 to 1.
    pub accuracy: f64,
    /// Item accuracy of full attention in memory on the same prompts at the same KV dtype.
    pub full_accuracy: f64,
    /// Keys and values of a prompt at rest, mean.
    pub kv_bytes_total: u64,
    /// Bytes read per decode step, mean over all steps.
    pub kv_bytes_read_per_step: u64,
    /// Largest over the prompts.
    pub resident_bytes_peak: u64,
    /// Decode steps per second under the policy.
    pub tokens_per_s: f64,
    /// Prompts whose predicted tokens all equal those of full attention.
    pub same_answers: usize,
    /// Largest difference of a logit from full attention.
    pub logit_difference_max: f32,
    /// What reading ahead did in all steps; `None` where it was off.
    pub pipeline: Option<PipelineReport>,
    /// Share of the time of reads at the devices that nobody waited for; `None` where reading ahead was off.
    pub io_hidden_share: Option<f64>,
    /// Share of what was selected in layers with a prediction that the prediction had selected.
    pub prediction_recall: Option<f64>,
    /// Bytes that were read ahead for nothing, per decode step.
    pub wasted_bytes_per_step: Option<u64>,
    #[serde(skip)]
    sums: Sums,
}

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

impl Cell {
    pub(super) fn new(task: &str, context: usize, (policy, budget): (&str, &str)) -> Self {
        Self {
            task: task.to_owned(),
            context,
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

    pub(super) fn add(
        &mut self,
        accuracy: f64,
        full: f64,
        same: bool,
        drift: f32,
        stats: KvStats,
        (steps, seconds): (usize, f64),
    ) {
        let s = &mut self.sums;
        s.accuracy += accuracy;
        s.full += full;
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
        self.same_answers += usize::from(same);
        self.logit_difference_max = self.logit_difference_max.max(drift);
        if let Some(report) = stats.pipeline {
            *self.pipeline.get_or_insert_default() += report;
        }
        self.io_hidden_share = self.pipeline.map(|report| report.hidden_share());
        self.prediction_recall = self.pipeline.map(|report| report.recall());
        self.wasted_bytes_per_step = self.pipeline.and_then(|report| report.wasted_bytes.checked_div(s.read_steps));
    }
}

/// All cells, in the order in which their first prompt came.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// One per task and context.
    pub cells: Vec<Cell>,
    /// How far the prompts' keys are from those of calibration, where the policy's method has codes.
    #[serde(skip_serializing_if = "Drift::is_empty")]
    pub drift: Drift,
}

impl Report {
    /// Decode steps that the policy made, over all cells.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.cells.iter().map(|c| c.sums.read_steps).sum()
    }

    /// What reading ahead did, over all cells; `None` where it was off.
    #[must_use]
    pub fn pipeline(&self) -> Option<PipelineReport> {
        let mut reports = self.cells.iter().filter_map(|c| c.pipeline);
        let mut all = reports.next()?;
        reports.for_each(|report| all += report);
        Some(all)
    }

    /// Contexts, ascending, each with the means over its tasks of policy and full accuracy.
    #[must_use]
    pub fn means(&self) -> Vec<(usize, f64, f64)> {
        let contexts: BTreeSet<usize> = self.cells.iter().map(|c| c.context).collect();
        let mean = |context| {
            let cells: Vec<&Cell> = self.cells.iter().filter(|c| c.context == context).collect();
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
        writeln!(
            f,
            "{:<6} {:>8} {:>4} {:>7} {:>7} {:>10} {:>12} {:>6} {:>11} {:>9}",
            "task", "context", "n", "full", "policy", "KV bytes", "read/step", "share", "resident", "tokens/s"
        )?;
        for c in &self.cells {
            let share = 100.0 * c.kv_bytes_read_per_step as f64 / c.kv_bytes_total.max(1) as f64;
            writeln!(
                f,
                "{:<6} {:>8} {:>4} {:>7.1} {:>7.1} {:>10} {:>12} {:>5.1}% {:>11} {:>9.0}",
                c.task,
                c.context,
                c.n,
                100.0 * c.full_accuracy,
                100.0 * c.accuracy,
                bytes(c.kv_bytes_total),
                bytes(c.kv_bytes_read_per_step),
                share,
                bytes(c.resident_bytes_peak),
                c.tokens_per_s
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

/// A line about reading ahead.
#[must_use]
pub fn pipeline_line(report: &PipelineReport) -> String {
    format!(
        "read ahead: {:.0} % of the time of reads hidden ({:.1} of {:.1} ms waited for), predictions had {:.1} % of what was selected, \
         {} of {} read for nothing",
        100.0 * report.hidden_share(),
        report.waited.as_secs_f64() * 1e3,
        report.device_time.as_secs_f64() * 1e3,
        100.0 * report.recall(),
        bytes(report.wasted_bytes),
        bytes(report.read_bytes)
    )
}

/// Bytes in the largest binary unit that keeps three digits.
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
    fn cells_hold_means_and_the_json_has_the_agreed_keys() {
        let mut cell = Cell::new("S", 1024, ("window", "1/13"));
        let stats = |read, steps| KvStats {
            kv_bytes_total: 100,
            bytes_read: read,
            steps,
            resident_bytes_peak: read,
            pipeline: None,
        };
        cell.add(1.0, 1.0, true, 0.0, stats(10, 1), (4, 2.0));
        cell.add(0.0, 1.0, false, 0.5, stats(50, 2), (4, 2.0));
        assert_eq!((cell.n, cell.accuracy, cell.full_accuracy), (2, 0.5, 1.0));
        assert_eq!((cell.kv_bytes_read_per_step, cell.resident_bytes_peak, cell.same_answers), (20, 50, 1));
        assert_eq!(cell.tokens_per_s, 2.0);
        let other = Cell { task: "MK".into(), accuracy: 1.0, ..cell.clone() };
        let report = Report { cells: vec![cell, other], ..Report::default() };
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
