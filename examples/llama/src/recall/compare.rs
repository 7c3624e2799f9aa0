//! Many methods on the same stored bytes: a prompt is prefilled and stored once, then every method answers from it.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::drift::Drift;
use super::prompts::Prompt;
use super::run::{STATE, answer};
use crate::budget::Budget;
use crate::kv::backend::Backend;
use crate::kv::method::Method;
use crate::kv::store::{StorePolicy, engine_error};
use crate::kv::{KvCache, backend};
use crate::model::{Model, Wanted};

/// One method under one budget at one context.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Method; `full` is full attention in memory.
    pub method: String,
    /// Attended tokens.
    pub budget: String,
    /// Nominal context.
    pub context: usize,
    /// Prompts.
    pub n: usize,
    /// Mean item accuracy over tasks, 0 to 1.
    pub accuracy: f64,
    /// Mean difference to full attention on the same prompts.
    pub minus_full: f64,
    /// Half of its 95 % interval, from the differences per prompt.
    pub minus_full_interval: f64,
    /// Share of full attention's weight that falls on the selected tokens, mean over steps, layers and query heads.
    /// `None` without a probe.
    pub mass_recall: Option<f64>,
    /// Length of the difference of the attention outputs over that of full attention's, mean over steps and layers.
    /// `None` without a probe.
    pub output_error: Option<f64>,
    /// Bytes of summaries in memory per token and layer.
    pub resident_bytes_per_token: f64,
    /// Bytes read per decode step.
    pub read_bytes_per_step: f64,
    /// Device reads per decode step.
    pub reads_per_step: f64,
    /// Milliseconds per decode step, the model included.
    pub step_ms: f64,
    #[serde(skip)]
    prompts: Vec<(String, String, f64, f64)>,
    #[serde(skip)]
    sums: [f64; 9],
}

/// What to compare.
pub struct Plan<'a> {
    /// Methods.
    pub methods: &'a [Method],
    /// Budgets.
    pub budgets: &'a [Budget],
    /// First layers that attend to everything.
    pub dense_layers: usize,
    /// Directory of adapters.
    pub adapters: Option<&'a Path>,
    /// Whether attention mass and output error are measured (by full attention in memory on the same queries, not timed).
    pub probe: bool,
}

/// All rows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// One per method, budget and context.
    pub rows: Vec<Row>,
    /// Of methods with codes, how far the prompts' keys are from those of calibration; not of runs that were merged.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub drifts: BTreeMap<String, Drift>,
}

/// Runs all prompts.
///
/// # Errors
/// Adapters that are missing, and what model and engine report; the prompt is named.
pub fn compare(
    model: &Model,
    prompts: &[Prompt],
    backend: &Backend,
    plan: &Plan<'_>,
    progress: &dyn Fn(usize),
) -> Result<Comparison> {
    let mut selectors = Vec::new();
    for method in plan.methods {
        selectors.push(backend.selector(method, plan.adapters)?);
    }
    let mut table = Comparison::default();
    for prompt in prompts {
        let mut one = || -> Result<()> {
            let mut full = backend.in_memory()?;
            let mut cache = backend.create(&format!("compare/{}", prompt.id))?;
            let mut ids = Vec::new();
            for selector in &selectors {
                ids.push(match selector {
                    Some(selector) => Some(cache.attach(selector.clone()).map_err(engine_error)?),
                    None => None,
                });
            }
            let haystack = &prompt.prompt[..prompt.query_start];
            model.prefill(haystack, &mut [&mut full, &mut cache], Wanted::Nothing, &|_| {})?;
            cache.commit(haystack, STATE).context("commit of the prompt")?;
            for (method, id) in plan.methods.iter().zip(&ids) {
                if let Some(id) = id {
                    let drift = cache.drift(*id).map_err(engine_error)?;
                    if drift.iter().any(Option::is_some) {
                        table.drifts.entry(method.to_string()).or_default().add(&drift);
                    }
                }
            }
            let mirror = plan.probe.then(|| full.clone());
            let expected = answer(model, prompt, &mut full)?;
            let full_accuracy = prompt.item_accuracy(&expected.predicted);
            table.row("full", "1", prompt.context).add(
                prompt,
                (full_accuracy, full_accuracy),
                [0.0, 0.0, 0.0, expected.steps as f64, expected.elapsed.as_secs_f64(), 1.0, 0.0, 1.0, 0.0],
            );
            cache.set_dense_layers(plan.dense_layers);
            let layers = model.config().layers() as f64;
            for (method, id) in plan.methods.iter().zip(&ids) {
                for &budget in plan.budgets {
                    cache.set_policy(match id {
                        Some(selector) => StorePolicy::Selected { selector: *selector, form: method.form, budget },
                        None => StorePolicy::Window { sinks: backend::SINKS, budget },
                    });
                    cache.reconstruct_keys(method.rank())?;
                    cache.probe(mirror.clone());
                    let (before, reads) = (cache.stats(), cache.reads());
                    let got = answer(model, prompt, &mut cache)?;
                    let after = cache.stats();
                    let (mass, error, probes, probing) = cache.probed();
                    let resident = match id {
                        Some(id) => cache.selector_bytes(*id).map_err(engine_error)? as f64,
                        None => 0.0,
                    };
                    let tokens = cache.len() as f64;
                    let elapsed = got.elapsed.saturating_sub(probing);
                    table.row(&method.to_string(), &budget.to_string(), prompt.context).add(
                        prompt,
                        (prompt.item_accuracy(&got.predicted), full_accuracy),
                        [
                            resident / tokens / layers,
                            (after.bytes_read - before.bytes_read) as f64,
                            (cache.reads() - reads) as f64,
                            got.steps as f64,
                            elapsed.as_secs_f64(),
                            mass,
                            error,
                            probes as f64,
                            0.0,
                        ],
                    );
                    cache.truncate(prompt.query_start).context("cut back to the prompt")?;
                }
            }
            progress(prompt.query_start);
            Box::new(cache).finish(false)
        };
        one().with_context(|| format!("prompt {}", prompt.id))?;
    }
    Ok(table)
}

impl Comparison {
    fn row(&mut self, method: &str, budget: &str, context: usize) -> &mut Row {
        let found = self.rows.iter().position(|r| r.method == method && r.budget == budget && r.context == context);
        let at = found.unwrap_or_else(|| {
            self.rows.push(Row {
                method: method.to_owned(),
                budget: budget.to_owned(),
                context,
                n: 0,
                accuracy: 0.0,
                minus_full: 0.0,
                minus_full_interval: 0.0,
                mass_recall: None,
                output_error: None,
                resident_bytes_per_token: 0.0,
                read_bytes_per_step: 0.0,
                reads_per_step: 0.0,
                step_ms: 0.0,
                prompts: Vec::new(),
                sums: [0.0; 9],
            });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// The difference of two methods under one budget on the prompts of all contexts: mean, half of its 95 % interval, prompts.
    #[must_use]
    pub fn paired(&self, a: &str, b: &str, budget: &str) -> Option<(f64, f64, usize)> {
        let mut differences = Vec::new();
        for row in self.rows.iter().filter(|r| r.method == a && r.budget == budget) {
            let other = self.rows.iter().find(|r| r.method == b && r.budget == budget && r.context == row.context)?;
            let pairs = row.prompts.iter().zip(&other.prompts).filter(|(x, y)| x.0 == y.0);
            differences.extend(pairs.map(|(x, y)| x.2 - y.2));
        }
        (!differences.is_empty()).then(|| {
            let (mean, half) = interval(&differences);
            (mean, half, differences.len())
        })
    }

    /// Adds the rows of an earlier run from what it wrote: [`csv`](Self::csv) and [`prompts_csv`](Self::prompts_csv).
    ///
    /// # Errors
    /// Lines of another form, and a row that is there already: it would count prompts twice.
    pub fn merge(&mut self, csv: &str, prompts_csv: &str) -> Result<()> {
        let first = self.rows.len();
        for line in csv.lines().skip(1) {
            let cells: Vec<&str> = line.split(',').collect();
            let [method, budget, context, _, _, _, _, mass, error, resident, bytes, reads, ms] = cells[..] else {
                bail!("{line:?} is no row of compare.csv")
            };
            let context = context.parse()?;
            let known = |r: &Row| r.method == method && r.budget == budget && r.context == context;
            ensure!(!self.rows.iter().any(known), "{method} at {budget} and {context} tokens is there twice");
            let optional = |text: &str| (!text.is_empty()).then(|| text.parse()).transpose();
            let (mass, error) = (optional(mass)?, optional(error)?);
            let row = self.row(method, budget, context);
            (row.mass_recall, row.output_error) = (mass, error);
            (row.resident_bytes_per_token, row.read_bytes_per_step) = (resident.parse()?, bytes.parse()?);
            (row.reads_per_step, row.step_ms) = (reads.parse()?, ms.parse()?);
        }
        for line in prompts_csv.lines().skip(1) {
            let cells: Vec<&str> = line.split(',').collect();
            let [method, budget, context, task, id, accuracy, full] = cells[..] else {
                bail!("{line:?} is no row of prompts.csv")
            };
            let context: usize = context.parse()?;
            let known = |r: &&mut Row| r.method == method && r.budget == budget && r.context == context;
            let row = self.rows[first..].iter_mut().find(known);
            let row = row.with_context(|| format!("{line:?} belongs to no row of compare.csv"))?;
            row.prompts.push((id.to_owned(), task.to_owned(), accuracy.parse()?, full.parse()?));
        }
        self.rows[first..].iter_mut().for_each(Row::summarise);
        Ok(())
    }

    /// All rows as CSV.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut out = String::from(
            "method,budget,context,n,accuracy,minus_full,minus_full_interval95,mass_recall,output_error,\
             resident_bytes_per_token,read_bytes_per_step,reads_per_step,step_ms\n",
        );
        for r in &self.rows {
            let _ = writeln!(
                out,
                "{},{},{},{},{:.4},{:.4},{:.4},{},{},{:.2},{:.0},{:.1},{:.3}",
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
                r.step_ms
            );
        }
        out
    }

    /// Accuracy of each prompt as CSV.
    #[must_use]
    pub fn prompts_csv(&self) -> String {
        let mut out = String::from("method,budget,context,task,prompt,accuracy,full\n");
        for r in &self.rows {
            for (id, task, accuracy, full) in &r.prompts {
                let _ = writeln!(out, "{},{},{},{task},{id},{accuracy:.4},{full:.4}", r.method, r.budget, r.context);
            }
        }
        out
    }
}

fn interval(differences: &[f64]) -> (f64, f64) {
    let n = differences.len() as f64;
    let mean = differences.iter().sum::<f64>() / n;
    let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, 1.96 * (variance / n).sqrt())
}

impl Row {
    fn add(&mut self, prompt: &Prompt, (accuracy, full): (f64, f64), figures: [f64; 9]) {
        self.prompts.push((prompt.id.clone(), prompt.task.clone(), accuracy, full));
        self.sums.iter_mut().zip(figures).for_each(|(sum, x)| *sum += x);
        self.summarise();
        let n = self.n as f64;
        let [resident, bytes, reads, steps, seconds, mass, error, probes, _] = self.sums;
        self.resident_bytes_per_token = resident / n;
        self.read_bytes_per_step = bytes / steps;
        self.reads_per_step = reads / steps;
        self.step_ms = seconds * 1e3 / steps;
        self.mass_recall = (probes > 0.0).then(|| mass / probes);
        self.output_error = (probes > 0.0).then(|| error / probes);
    }

    /// Accuracy and its difference, from the prompts.
    fn summarise(&mut self) {
        self.n = self.prompts.len();
        // Tasks count alike, however many prompts each has.
        let mut tasks: Vec<&str> = self.prompts.iter().map(|(_, task, ..)| task.as_str()).collect();
        tasks.sort_unstable();
        tasks.dedup();
        let task_mean = |task: &str| {
            let of: Vec<f64> = self.prompts.iter().filter(|p| p.1 == task).map(|p| p.2).collect();
            of.iter().sum::<f64>() / of.len() as f64
        };
        self.accuracy = tasks.iter().map(|task| task_mean(task)).sum::<f64>() / tasks.len() as f64;
        let differences: Vec<f64> = self.prompts.iter().map(|p| p.2 - p.3).collect();
        (self.minus_full, self.minus_full_interval) = interval(&differences);
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<18} {:>6} {:>7} {:>4} {:>7} {:>15} {:>6} {:>7} {:>8} {:>11} {:>7} {:>8}",
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
            "ms/step"
        )?;
        for r in &self.rows {
            writeln!(
                f,
                "{:<18} {:>6} {:>7} {:>4} {:>7.1} {:>6.1} +- {:>5.1} {:>6} {:>7} {:>8.1} {:>11.0} {:>7.1} {:>8.2}",
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
                r.step_ms
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
    fn rows_hold_means_over_tasks_and_paired_differences() {
        let mut table = Comparison::default();
        let figures = [8.0, 100.0, 2.0, 2.0, 0.5, 1.5, 0.2, 2.0, 0.0];
        for (id, task, a, b) in [("1", "S", 1.0, 0.0), ("2", "S", 1.0, 1.0), ("3", "MK", 0.0, 0.0)] {
            table.row("a", "1/13", 8).add(&prompt(id, task), (a, 1.0), figures);
            table.row("b", "1/13", 8).add(&prompt(id, task), (b, 1.0), figures);
        }
        let row = &table.rows[0];
        assert_eq!((row.n, row.accuracy), (3, 0.5), "tasks count alike");
        assert!((row.minus_full + 1.0 / 3.0).abs() < 1e-9);
        assert_eq!((row.resident_bytes_per_token, row.read_bytes_per_step, row.step_ms), (8.0, 50.0, 250.0));
        assert!((row.mass_recall.unwrap() - 0.75).abs() < 1e-9 && (row.output_error.unwrap() - 0.1).abs() < 1e-9);
        let (mean, half, n) = table.paired("a", "b", "1/13").unwrap();
        assert!((mean - 1.0 / 3.0).abs() < 1e-9 && (half - 1.96 / 3.0).abs() < 1e-9 && n == 3);
        assert!(table.paired("a", "c", "1/13").is_none());
        assert_eq!(table.csv().lines().count(), 3);
        assert_eq!(table.prompts_csv().lines().count(), 7);
        let mut merged = Comparison::default();
        merged.merge(&table.csv(), &table.prompts_csv()).unwrap();
        assert_eq!((merged.csv(), merged.prompts_csv()), (table.csv(), table.prompts_csv()));
        assert_eq!(merged.paired("a", "b", "1/13"), table.paired("a", "b", "1/13"));
        assert!(merged.merge(&table.csv(), "").unwrap_err().to_string().contains("twice"));
        assert!(Comparison::default().merge("x\ny", "").is_err());
    }
}
