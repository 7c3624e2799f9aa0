//! The table of `kvrun compare`: one row per method, budget and context.
//!
//! A row adds up [`Figures`] of prompts and holds their means. Accuracies are means over tasks, so that every task
//! counts alike. Differences to full attention are paired by prompt and have a 95 % interval.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::drift::Drift;
use super::needles::Half;
use super::prompts::Prompt;

/// The name of full attention in memory, which every comparison runs.
pub(super) const FULL: &str = "full";

/// One method under one budget at one context.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// The method. `full` is full attention in memory.
    pub method: String,
    /// The budget of attended tokens.
    pub budget: String,
    /// The nominal context.
    pub context: usize,
    /// The half of the questions. `None` if each prompt asked its own question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub half: Option<Half>,
    /// The number of prompts.
    pub n: usize,
    /// The mean item accuracy over tasks, 0 to 1.
    pub accuracy: f64,
    /// The mean difference to full attention on the same prompts.
    pub minus_full: f64,
    /// Half of the difference's 95 % interval.
    pub minus_full_interval: f64,
    /// The share of full attention's weight on the selected tokens, as a mean over steps, layers and query heads.
    /// `None` without a probe.
    pub mass_recall: Option<f64>,
    /// The relative error of the attention output, as a mean over steps and layers. `None` without a probe.
    pub output_error: Option<f64>,
    /// Bytes of summaries in memory per token and layer.
    pub resident_bytes_per_token: f64,
    /// Bytes read per decode step.
    pub read_bytes_per_step: f64,
    /// Device reads per decode step.
    pub reads_per_step: f64,
    /// Milliseconds per decode step, including the model.
    pub step_ms: f64,
    /// Entries attended per KV head, step and layer that does not attend to everything.
    pub entries_per_layer: f64,
    /// Runs of neighbouring groups per step and such a layer: the requests of a store in token order.
    pub runs_per_layer: f64,
    /// Runs of neighbouring clusters per step and such a layer: the requests of a store that keeps clusters in the
    /// method's order. For a method of groups, its runs.
    pub cluster_runs_per_layer: f64,
    #[serde(skip)]
    prompts: Vec<PromptAccuracy>,
    #[serde(skip)]
    sums: Figures,
}

/// The accuracy of one prompt.
#[derive(Clone, Debug)]
struct PromptAccuracy {
    id: String,
    task: String,
    accuracy: f64,
    /// The accuracy of full attention on the same prompt.
    full: f64,
}

/// The costs of one prompt, or the sums over prompts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    /// Bytes of summaries in memory per token and layer.
    pub(super) resident: f64,
    /// Bytes read by decode steps.
    pub(super) read_bytes: f64,
    /// Device reads by decode steps.
    pub(super) reads: f64,
    /// Decode steps.
    pub(super) steps: f64,
    /// Seconds that the decode steps took.
    pub(super) seconds: f64,
    /// The sum of [`Row::mass_recall`] over probed attends.
    pub(super) mass: f64,
    /// The sum of [`Row::output_error`] over probed attends.
    pub(super) error: f64,
    /// Probed attends.
    pub(super) probes: f64,
    /// Selections of layers that do not attend to everything.
    pub(super) selections: f64,
    /// The sum of [`Row::entries_per_layer`] over selections.
    pub(super) entries: f64,
    /// The sum of [`Row::runs_per_layer`] over selections.
    pub(super) runs: f64,
    /// The sum of [`Row::cluster_runs_per_layer`] over selections.
    pub(super) cluster_runs: f64,
}

impl Figures {
    fn add(&mut self, other: Self) {
        self.resident += other.resident;
        self.read_bytes += other.read_bytes;
        self.reads += other.reads;
        self.steps += other.steps;
        self.seconds += other.seconds;
        self.mass += other.mass;
        self.error += other.error;
        self.probes += other.probes;
        self.selections += other.selections;
        self.entries += other.entries;
        self.runs += other.runs;
        self.cluster_runs += other.cluster_runs;
    }
}

/// All rows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// One row per method, budget and context.
    pub rows: Vec<Row>,
    /// The tokens of each prompt that prefill computed. The others up to the question were decode steps with full
    /// attention. `None` if all were prefilled. Merged runs have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<usize>,
    /// How many of the first layers attend to everything. Merged runs have 0.
    pub dense_layers: usize,
    /// The queries that methods with a profile made their clusters of. `None` if no method chooses entries. Merged runs
    /// have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The pairs of haystacks that were passed over because their needles contradict each other. `None` if prompts were
    /// not shifted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passed_over: Option<usize>,
    /// For methods with codes, how far the prompts' keys are from the calibration's keys. Merged runs have none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub drifts: BTreeMap<String, Drift>,
}

impl Comparison {
    /// Returns the row of a method, a budget and the prompts of one context and one half. It is added if there is none.
    pub(super) fn row(&mut self, method: &str, budget: &str, prompt: &Prompt) -> &mut Row {
        self.row_of(method, budget, (prompt.context, prompt.half))
    }

    fn row_of(&mut self, method: &str, budget: &str, prompts: (usize, Option<Half>)) -> &mut Row {
        let found = self.rows.iter().position(|r| r.is_of(method, budget, prompts));
        let at = found.unwrap_or_else(|| {
            let (method, budget) = (method.to_owned(), budget.to_owned());
            let (context, half) = prompts;
            self.rows.push(Row { method, budget, context, half, ..Row::default() });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// Returns the budgets of the rows in their order, without full attention.
    #[must_use]
    pub fn budgets(&self) -> Vec<&str> {
        let mut budgets: Vec<&str> = Vec::new();
        for row in self.rows.iter().filter(|row| row.method != FULL) {
            if !budgets.contains(&row.budget.as_str()) {
                budgets.push(&row.budget);
            }
        }
        budgets
    }

    /// Compares two methods under one budget on the prompts of all contexts, without questions for profiles. Returns
    /// the mean difference, half of its 95 % interval, and the number of prompts.
    #[must_use]
    pub fn paired(&self, a: &str, b: &str, budget: &str) -> Option<(f64, f64, usize)> {
        let mut differences = Vec::new();
        for row in self.rows.iter().filter(|r| r.method == a && r.budget == budget && r.counts()) {
            let other = self.rows.iter().find(|r| r.is_of(b, budget, (row.context, row.half)))?;
            let pairs = row.prompts.iter().zip(&other.prompts).filter(|(x, y)| x.id == y.id);
            differences.extend(pairs.map(|(x, y)| x.accuracy - y.accuracy));
        }
        (!differences.is_empty()).then(|| {
            let (mean, half) = interval(&differences);
            (mean, half, differences.len())
        })
    }

    /// Adds the rows of an earlier run from its files, [`csv`](Self::csv) and [`prompts_csv`](Self::prompts_csv).
    /// A row of full attention that exists already stays.
    ///
    /// # Errors
    /// Fails if a line has another form, or if a row exists already, because its prompts would count twice.
    pub fn merge(&mut self, csv: &str, prompts_csv: &str) -> Result<()> {
        let first = self.rows.len();
        for line in csv.lines().skip(1) {
            let cells: Vec<&str> = line.split(',').collect();
            let [method, budget, context, _, _, _, _, mass, error, resident, bytes, reads, ms, ref rest @ ..] =
                cells[..]
            else {
                bail!("{line:?} is not a row of compare.csv")
            };
            let (half, selected) = rest.split_at(rest.len().min(1));
            let prompts = (context.parse()?, half_of(half)?);
            let known = self.rows.iter().any(|row| row.is_of(method, budget, prompts));
            // Every run has full attention. The row of the first run stays.
            if known && method == FULL {
                continue;
            }
            ensure!(!known, "{method} at {budget} and {context} tokens is in two of the merged runs");
            let optional = |text: &str| (!text.is_empty()).then(|| text.parse()).transpose();
            let (mass, error) = (optional(mass)?, optional(error)?);
            let row = self.row_of(method, budget, prompts);
            (row.mass_recall, row.output_error) = (mass, error);
            (row.resident_bytes_per_token, row.read_bytes_per_step) = (resident.parse()?, bytes.parse()?);
            (row.reads_per_step, row.step_ms) = (reads.parse()?, ms.parse()?);
            // Files of earlier versions lack these cells.
            if let [entries, runs, clusters] = selected {
                (row.entries_per_layer, row.runs_per_layer) = (entries.parse()?, runs.parse()?);
                row.cluster_runs_per_layer = clusters.parse()?;
            }
        }
        for line in prompts_csv.lines().skip(1) {
            let cells: Vec<&str> = line.split(',').collect();
            let [method, budget, context, task, id, accuracy, full, ref half @ ..] = cells[..] else {
                bail!("{line:?} is not a row of prompts.csv")
            };
            let prompts = (context.parse()?, half_of(half)?);
            let row = self.rows[first..].iter_mut().find(|row| row.is_of(method, budget, prompts));
            if row.is_none() && method == FULL {
                continue;
            }
            let row = row.with_context(|| format!("{line:?} of prompts.csv belongs to no row of compare.csv"))?;
            let (accuracy, full) = (accuracy.parse()?, full.parse()?);
            row.prompts.push(PromptAccuracy { id: id.to_owned(), task: task.to_owned(), accuracy, full });
        }
        self.rows[first..].iter_mut().for_each(Row::summarise);
        Ok(())
    }

    /// Returns all rows as CSV.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut out = String::from(
            "method,budget,context,n,accuracy,minus_full,minus_full_interval95,mass_recall,output_error,\
             resident_bytes_per_token,read_bytes_per_step,reads_per_step,step_ms,half,entries_per_layer,\
             runs_per_layer,cluster_runs_per_layer\n",
        );
        for r in &self.rows {
            let _ = writeln!(
                out,
                "{},{},{},{},{:.4},{:.4},{:.4},{},{},{:.2},{:.0},{:.1},{:.3},{},{:.2},{:.2},{:.2}",
                r.method,
                r.budget,
                r.context,
                r.n,
                r.accuracy,
                r.minus_full,
                r.minus_full_interval,
                r.mass_recall.map_or_else(String::new, |x| format!("{x:.4}")),
                r.output_error.map_or_else(String::new, |x| format!("{x:.4}")),
                r.resident_bytes_per_token,
                r.read_bytes_per_step,
                r.reads_per_step,
                r.step_ms,
                r.half.map_or("", Half::name),
                r.entries_per_layer,
                r.runs_per_layer,
                r.cluster_runs_per_layer
            );
        }
        out
    }

    /// Returns the accuracy of each prompt as CSV.
    #[must_use]
    pub fn prompts_csv(&self) -> String {
        let mut out = String::from("method,budget,context,task,prompt,accuracy,full,half\n");
        for r in &self.rows {
            let half = r.half.map_or("", Half::name);
            for PromptAccuracy { id, task, accuracy, full } in &r.prompts {
                let _ =
                    writeln!(out, "{},{},{},{task},{id},{accuracy:.4},{full:.4},{half}", r.method, r.budget, r.context);
            }
        }
        out
    }
}

/// Returns the half in the last cells of a line. Files of runs without questions may lack the cell.
fn half_of(cells: &[&str]) -> Result<Option<Half>> {
    match cells {
        [] | [""] => Ok(None),
        ["profile"] => Ok(Some(Half::Profile)),
        ["answer"] => Ok(Some(Half::Answer)),
        other => bail!("{:?} is not a half of questions: profile or answer", other.join(",")),
    }
}

/// Returns the mean, and half of its 95 % interval.
fn interval(differences: &[f64]) -> (f64, f64) {
    let n = differences.len() as f64;
    let mean = differences.iter().sum::<f64>() / n;
    let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, 1.96 * (variance / n).sqrt())
}

impl Row {
    fn is_of(&self, method: &str, budget: &str, prompts: (usize, Option<Half>)) -> bool {
        self.method == method && self.budget == budget && (self.context, self.half) == prompts
    }

    /// Returns whether the row counts in means over contexts and in pairs. Questions for profiles do not.
    pub(super) fn counts(&self) -> bool {
        self.half != Some(Half::Profile)
    }

    /// Adds one prompt: its accuracy, the accuracy of full attention, and what it cost.
    pub(super) fn add(&mut self, prompt: &Prompt, (accuracy, full): (f64, f64), figures: Figures) {
        self.prompts.push(PromptAccuracy { id: prompt.id.clone(), task: prompt.task.clone(), accuracy, full });
        self.sums.add(figures);
        self.summarise();
        let (n, sums) = (self.n as f64, self.sums);
        self.resident_bytes_per_token = sums.resident / n;
        self.read_bytes_per_step = sums.read_bytes / sums.steps;
        self.reads_per_step = sums.reads / sums.steps;
        self.step_ms = sums.seconds * 1e3 / sums.steps;
        let selections = sums.selections.max(1.0);
        self.entries_per_layer = sums.entries / selections;
        self.runs_per_layer = sums.runs / selections;
        self.cluster_runs_per_layer = sums.cluster_runs / selections;
        self.mass_recall = (sums.probes > 0.0).then(|| sums.mass / sums.probes);
        self.output_error = (sums.probes > 0.0).then(|| sums.error / sums.probes);
    }

    /// Computes the accuracy and its difference to full attention from the prompts.
    fn summarise(&mut self) {
        self.n = self.prompts.len();
        let mut tasks: Vec<&str> = self.prompts.iter().map(|p| p.task.as_str()).collect();
        tasks.sort_unstable();
        tasks.dedup();
        let task_mean = |task: &str| {
            let of: Vec<f64> = self.prompts.iter().filter(|p| p.task == task).map(|p| p.accuracy).collect();
            of.iter().sum::<f64>() / of.len() as f64
        };
        self.accuracy = tasks.iter().map(|task| task_mean(task)).sum::<f64>() / tasks.len() as f64;
        let differences: Vec<f64> = self.prompts.iter().map(|p| p.accuracy - p.full).collect();
        (self.minus_full, self.minus_full_interval) = interval(&differences);
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<24} {:>6} {:>7} {:>4} {:>7} {:>15} {:>6} {:>7} {:>8} {:>11} {:>7} {:>8} {:>7} {:>6} {:>8}",
            "method",
            "budget",
            "context",
            "n",
            "items %",
            "minus full",
            "mass",
            "error",
            "B/token",
            "read/step",
            "reads",
            "ms/step",
            "entries",
            "runs",
            "cl. runs"
        )?;
        for r in &self.rows {
            writeln!(
                f,
                "{:<24} {:>6} {:>7} {:>4} {:>7.1} {:>6.1} +- {:>5.1} {:>6} {:>7} {:>8.1} {:>11.0} {:>7.1} {:>8.2} \
                 {:>7.1} {:>6.1} {:>8.1}{}",
                r.method,
                r.budget,
                r.context,
                r.n,
                100.0 * r.accuracy,
                100.0 * r.minus_full,
                100.0 * r.minus_full_interval,
                r.mass_recall.map_or_else(|| "-".into(), |x| format!("{x:.3}")),
                r.output_error.map_or_else(|| "-".into(), |x| format!("{x:.4}")),
                r.resident_bytes_per_token,
                r.read_bytes_per_step,
                r.reads_per_step,
                r.step_ms,
                r.entries_per_layer,
                r.runs_per_layer,
                r.cluster_runs_per_layer,
                r.half.map_or_else(String::new, |half| format!(" {}", half.name()))
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(id: &str, task: &str) -> Prompt {
        serde_json::from_value(serde_json::json!({
            "id": id, "task": task, "context": 8, "prompt": [1, 2], "query_start": 1, "answer": [1], "score": [1]
        }))
        .unwrap()
    }

    #[test]
    fn rows_hold_means_over_tasks_and_merge_from_their_files() {
        let mut table = Comparison::default();
        let figures = Figures {
            resident: 8.0,
            read_bytes: 100.0,
            reads: 2.0,
            steps: 2.0,
            seconds: 0.5,
            mass: 1.5,
            error: 0.2,
            probes: 2.0,
            selections: 4.0,
            entries: 40.0,
            runs: 12.0,
            cluster_runs: 8.0,
        };
        for (id, task, a, b) in [("1", "S", 1.0, 0.0), ("2", "S", 1.0, 1.0), ("3", "MK", 0.0, 0.0)] {
            table.row_of("a", "1/13", (8, None)).add(&prompt(id, task), (a, 1.0), figures);
            table.row_of("b", "1/13", (8, None)).add(&prompt(id, task), (b, 1.0), figures);
        }
        let row = &table.rows[0];
        assert_eq!((row.n, row.accuracy), (3, 0.5), "tasks count alike");
        assert!((row.minus_full + 1.0 / 3.0).abs() < 1e-9);
        assert_eq!((row.resident_bytes_per_token, row.read_bytes_per_step, row.step_ms), (8.0, 50.0, 250.0));
        assert!((row.mass_recall.unwrap() - 0.75).abs() < 1e-9 && (row.output_error.unwrap() - 0.1).abs() < 1e-9);
        assert_eq!((row.entries_per_layer, row.runs_per_layer, row.cluster_runs_per_layer), (10.0, 3.0, 2.0));
        let (mean, half, n) = table.paired("a", "b", "1/13").unwrap();
        assert!((mean - 1.0 / 3.0).abs() < 1e-9 && (half - 1.96 / 3.0).abs() < 1e-9 && n == 3);
        assert!(table.paired("a", "c", "1/13").is_none());
        assert_eq!(table.csv().lines().count(), 3);
        assert_eq!(table.prompts_csv().lines().count(), 7);
        let mut merged = Comparison::default();
        merged.merge(&table.csv(), &table.prompts_csv()).unwrap();
        assert_eq!((merged.csv(), merged.prompts_csv()), (table.csv(), table.prompts_csv()));
        assert_eq!(merged.paired("a", "b", "1/13"), table.paired("a", "b", "1/13"));
        // Another run has other methods and full attention again.
        let mut other = Comparison::default();
        other.row_of(FULL, "1", (8, None)).add(&prompt("1", "S"), (1.0, 1.0), figures);
        let mut both = other.clone();
        other.row_of("c", "1/13", (8, None)).add(&prompt("1", "S"), (0.0, 1.0), figures);
        both.merge(&other.csv(), &other.prompts_csv()).unwrap();
        assert_eq!((both.rows.len(), both.rows[0].n, both.rows[1].method.as_str()), (2, 1, "c"));
        assert!(merged.merge(&table.csv(), "").unwrap_err().to_string().contains("in two of the merged runs"));
        assert!(Comparison::default().merge("x\ny", "").is_err());
    }

    #[test]
    fn halves_of_questions_have_rows_of_their_own() {
        let mut table = Comparison::default();
        for (half, accuracy) in [(Half::Profile, 0.0), (Half::Answer, 1.0)] {
            for method in ["a", "b"] {
                let question = Prompt { half: Some(half), ..prompt("1", "MK") };
                table.row(method, "1/13", &question).add(&question, (accuracy, 1.0), Figures::default());
            }
        }
        assert_eq!((table.rows.len(), table.rows[0].accuracy, table.rows[2].accuracy), (4, 0.0, 1.0));
        assert_eq!(table.paired("a", "b", "1/13"), Some((0.0, 0.0, 1)), "questions for profiles are in no pair");
        let mut merged = Comparison::default();
        merged.merge(&table.csv(), &table.prompts_csv()).unwrap();
        let halves: Vec<_> = merged.rows.iter().map(|row| row.half).collect();
        assert_eq!(halves, [Half::Profile, Half::Profile, Half::Answer, Half::Answer].map(Some));
        assert!(merged.merge("x\na,1/13,8,1,1,0,0,,,0,0,0,0,third", "").is_err());
    }
}
