//! `kvrun recall`: answers recall prompts under one policy.

use std::io::Write;
use std::time::Instant;

use anyhow::Result;
use stratakv_llama::cli::RecallArgs;
use stratakv_llama::kv::{KvCache, backend, engine_error};
use stratakv_llama::model::Model;
use stratakv_llama::process;
use stratakv_llama::recall::{self, PromptFilter, RecallRun};
use stratakv_llama::weights::fingerprint;

use super::shared::{check_dense_layers, geometry, progress};

pub(crate) fn recall(args: &RecallArgs) -> Result<()> {
    let begin = Instant::now();
    args.profile.source.check(&args.modes)?;
    let model = Model::load(&args.model_dir())?;
    check_dense_layers(&model, args.cache.dense_layers)?;
    let file = args.prompt_file();
    let filter = PromptFilter { file: &file, tasks: &args.tasks, contexts: &args.contexts, limit: args.limit };
    let loaded = args.modes.load(&filter)?;
    let prompts = &loaded.prompts;
    let options = args.backend_options()?;
    let geometry = geometry(&model, args.cache.storage.dtype, options.policy.rank().is_some())?;
    let backend = backend::open(&options, geometry, fingerprint(&args.model_dir())?)?;
    let tokens: usize = prompts.iter().map(|p| p.query_start).sum();
    let bar = progress(tokens as u64, "tokens", args.json);
    let budget = options.budget_name();
    let mut drift = recall::Drift::default();
    let policy = (options.policy.name(), budget.as_str());
    let prefill = args.modes.prefill_tokens();
    let questions = args.modes.question_count();
    let profile = backend.needs_queries().then_some(args.profile.source);
    let run = RecallRun { model: &model, prompts, policy, prefill, questions, profile, bar: &bar };
    let mut report = run.run(
        || backend.in_memory(),
        |prompt| backend.create(&format!("recall/{}", prompt.id)),
        |cache| backend.fork(cache),
        |prompt, mut cache| {
            if args.keep {
                let fed: Vec<u32> = if questions.is_none() { prompt.fed().collect() } else { Vec::new() };
                cache.commit(&fed, recall::STATE)?;
            }
            drift.add(&cache.own_drift().map_err(engine_error)?);
            Box::new(cache).finish(args.keep)
        },
    )?;
    (report.drift, report.passed_over, report.dense_layers) = (drift, loaded.passed_over, options.dense_layers);
    bar.finish_and_clear();
    let notes = backend.notes(report.steps());
    backend.close()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
        return Ok(());
    }
    write!(out, "{report}")?;
    let seconds = begin.elapsed().as_secs_f64();
    writeln!(out, "{} prompts, {tokens} tokens before the questions, {seconds:.0} s", prompts.len())?;
    for note in loaded.note().into_iter().chain(notes) {
        writeln!(out, "{note}")?;
    }
    if let Some(peak) = process::resident_peak_bytes() {
        writeln!(out, "peak resident memory of the process: {:.1} MiB", peak as f64 / f64::from(1 << 20))?;
    }
    Ok(())
}
