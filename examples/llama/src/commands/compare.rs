//! `kvrun compare`: compares retrieval methods, or merges the results of earlier comparisons.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use stratakv_llama::cli::{CompareArgs, model_or_default};
use stratakv_llama::kv::backend;
use stratakv_llama::model::Model;
use stratakv_llama::recall::{self, PromptFilter};
use stratakv_llama::text::beside;
use stratakv_llama::weights::fingerprint;

use super::shared::{check_dense_layers, geometry, progress, write_file};

pub(crate) fn compare(args: &CompareArgs) -> Result<()> {
    let table = if args.merge.is_empty() { run(args)? } else { merged(&args.merge)? };
    if let Some(out) = &args.out {
        write_file(&out.join("compare.csv"), table.csv().as_bytes())?;
        write_file(&out.join("prompts.csv"), table.prompts_csv().as_bytes())?;
        write_file(&out.join("compare.svg"), recall::svg(&table).as_bytes())?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&table)?)?;
        return Ok(());
    }
    write!(out, "{table}")?;
    for pair in &args.pairs {
        let (a, b) = pair.split_once('-').with_context(|| format!("{pair:?} is not a pair of methods such as a-b"))?;
        for budget in table.budgets() {
            let found = table.paired(a, b, budget);
            let (mean, half, n) = found.with_context(|| format!("{pair:?}: a method of the pair has no row"))?;
            writeln!(out, "{a} minus {b} at {budget}: {:.1} +- {:.1} points, {n} prompts", 100.0 * mean, 100.0 * half)?;
        }
    }
    Ok(())
}

/// Runs all prompts with all methods.
fn run(args: &CompareArgs) -> Result<recall::Comparison> {
    args.profile.source.check(&args.modes)?;
    let dir = model_or_default(args.model.as_deref());
    let model = Model::load(&dir)?;
    check_dense_layers(&model, args.dense_layers)?;
    let file = args.prompts.clone().unwrap_or_else(|| beside(&dir, "prompts.jsonl.gz"));
    let filter = PromptFilter { file: &file, tasks: &args.tasks, contexts: &args.contexts, limit: args.limit };
    let loaded = args.modes.load(&filter)?;
    let prompts = &loaded.prompts;
    let reconstructs = args.methods.iter().any(|policy| policy.rank().is_some());
    let geometry = geometry(&model, args.dtype, reconstructs)?;
    let backend = backend::open(&args.backend_options(), geometry, fingerprint(&dir)?)?;
    let bar = progress(prompts.iter().map(|p| p.query_start as u64).sum(), "tokens", args.json);
    let plan = recall::Plan {
        policies: &args.methods,
        budgets: &args.budgets,
        prefill: args.modes.prefill_tokens(),
        questions: args.modes.question_count(),
        profile: args.profile.source,
        dense_layers: args.dense_layers as usize,
        adapters: args.adapters.as_deref(),
        probe: args.probe,
    };
    let mut table = recall::compare(&model, prompts, &backend, &plan, &|n| bar.inc(n as u64))?;
    table.passed_over = loaded.passed_over;
    bar.finish_and_clear();
    let drifts = table.drifts.iter().filter_map(|(method, drift)| drift.line(method));
    for line in drifts.chain(loaded.note()) {
        eprintln!("{line}");
    }
    backend.close()?;
    Ok(table)
}

/// Merges what earlier runs wrote to these directories.
fn merged(directories: &[PathBuf]) -> Result<recall::Comparison> {
    let mut table = recall::Comparison::default();
    for directory in directories {
        let read = |name: &str| {
            let file = directory.join(name);
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
        };
        let (csv, prompts) = (read("compare.csv")?, read("prompts.csv")?);
        table.merge(&csv, &prompts).with_context(|| format!("cannot merge {}", directory.display()))?;
    }
    Ok(table)
}
