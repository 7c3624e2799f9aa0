//! `kvrun`: recall measurements and text generation on a stratakv store.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use stratakv_llama::cli::{CalibrateArgs, Cli, Command, CompareArgs, GenerateArgs, RecallArgs, model_or_default};
use stratakv_llama::generate::{Request, generate};
use stratakv_llama::kv::adapters::{adapter_file, to_safetensors};
use stratakv_llama::kv::store::engine_error;
use stratakv_llama::kv::{KvCache, KvDType, KvGeometry, backend};
use stratakv_llama::model::Model;
use stratakv_llama::process;
use stratakv_llama::recall;
use stratakv_llama::sampler::SamplerState;
use stratakv_llama::text::{Stream, Vocabulary, read_ids};
use stratakv_llama::weights::fingerprint;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Recall(args) => recall_command(&args),
        Command::Calibrate(args) => calibrate_command(&args),
        Command::Compare(args) => compare_command(&args),
        Command::Generate(args) => generate_command(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvrun: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The geometry of a model's cache, with its rotation where keys are rebuilt.
fn geometry(model: &Model, dtype: KvDType, rebuilds: bool) -> Result<KvGeometry> {
    let rope = if rebuilds { Some(model.config().rope()?) } else { None };
    Ok(KvGeometry { rope, ..model.kv_geometry(dtype) })
}

fn recall_command(args: &RecallArgs) -> Result<()> {
    let begin = Instant::now();
    let model = Model::load(&args.model_dir())?;
    let prompts = recall::load(&args.prompt_file(), &args.tasks, &args.contexts, args.limit as usize)?;
    let dtype = args.cache.dtype;
    let rebuilds = args.cache.method().is_some_and(|method| method.rank().is_some());
    let geometry = geometry(&model, dtype, rebuilds)?;
    let backend = backend::open(&args.backend_options(), geometry, fingerprint(&args.model_dir())?)?;
    let tokens: usize = prompts.iter().map(|p| p.query_start).sum();
    let bar = progress(tokens as u64, "tokens", args.json);
    let budget = args.cache.budget_name();
    let mut drift = recall::Drift::default();
    let mut report = recall::run(
        &model,
        &prompts,
        (args.cache.policy.name(), &budget),
        &bar,
        || backend.in_memory(),
        |prompt| backend.create(&format!("recall/{}", prompt.id)),
        |prompt, mut cache| {
            if args.keep {
                cache.commit(&prompt.fed().collect::<Vec<_>>(), recall::STATE)?;
            }
            drift.add(&cache.own_drift().map_err(engine_error)?);
            Box::new(cache).finish(args.keep)
        },
    )?;
    report.drift = drift;
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
    writeln!(out, "{} prompts, {tokens} tokens prefilled, {seconds:.0} s in all", prompts.len())?;
    for note in notes {
        writeln!(out, "{note}")?;
    }
    if let Some(peak) = process::resident_peak_bytes() {
        writeln!(out, "peak resident memory of the process: {:.1} MiB", peak as f64 / f64::from(1 << 20))?;
    }
    Ok(())
}

fn calibrate_command(args: &CalibrateArgs) -> Result<()> {
    let dir = model_or_default(args.model.as_deref());
    let model = Model::load(&dir)?;
    let file = args.prompts.clone().unwrap_or_else(|| dir.join("calibration.jsonl.gz"));
    let prompts = recall::load(&file, &args.tasks, &args.contexts, args.limit as usize)?;
    let bar = progress(prompts.iter().map(|p| p.query_start as u64).sum(), "tokens", false);
    let calibrator = recall::collect(&model, &prompts, args.dtype, &|n| bar.inc(n as u64))?;
    bar.finish_and_clear();
    let geometry = model.kv_geometry(args.dtype);
    let adapters = recall::fit(&calibrator, &geometry, &args.sigmas, &args.bits)?;
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
        for adapter in &adapters {
            let (file, bytes) = (adapter_file(out, adapter.name()), to_safetensors(adapter)?);
            std::fs::write(&file, &bytes).with_context(|| format!("cannot write {}", file.display()))?;
            println!("{}: {} bytes", file.display(), bytes.len());
        }
    }
    if !args.devices.is_empty() {
        let backend = backend::open(&args.backend_options(), geometry, fingerprint(&dir)?)?;
        for adapter in &adapters {
            let id = backend.put_adapter(adapter)?;
            println!("{id} stored for groups of {}", args.group_tokens);
        }
        backend.close()?;
    }
    println!("{} prompts", prompts.len());
    Ok(())
}

fn compare_command(args: &CompareArgs) -> Result<()> {
    let table = if args.merge.is_empty() { compared(args)? } else { merged(&args.merge)? };
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
        for (name, text) in
            [("compare.csv", table.csv()), ("prompts.csv", table.prompts_csv()), ("compare.svg", recall::svg(&table))]
        {
            std::fs::write(out.join(name), text).with_context(|| format!("cannot write {name}"))?;
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&table)?)?;
        return Ok(());
    }
    write!(out, "{table}")?;
    let mut budgets: Vec<&str> = Vec::new();
    for row in table.rows.iter().filter(|row| row.method != "full") {
        if !budgets.contains(&row.budget.as_str()) {
            budgets.push(&row.budget);
        }
    }
    for pair in &args.pairs {
        let (a, b) = pair.split_once('-').with_context(|| format!("{pair:?} is no pair of methods: a-b"))?;
        for budget in &budgets {
            let found = table.paired(a, b, budget);
            let (mean, half, n) = found.with_context(|| format!("{pair:?}: not both were compared"))?;
            writeln!(out, "{a} minus {b} at {budget}: {:.1} +- {:.1} points, {n} prompts", 100.0 * mean, 100.0 * half)?;
        }
    }
    Ok(())
}

/// Runs all prompts.
fn compared(args: &CompareArgs) -> Result<recall::Comparison> {
    let dir = model_or_default(args.model.as_deref());
    let model = Model::load(&dir)?;
    let file = args.prompts.clone().unwrap_or_else(|| dir.join("prompts.jsonl.gz"));
    let prompts = recall::load(&file, &args.tasks, &args.contexts, args.limit as usize)?;
    let rebuilds = args.methods.iter().any(|method| method.rank().is_some());
    let geometry = geometry(&model, args.dtype, rebuilds)?;
    let backend = backend::open(&args.backend_options(), geometry, fingerprint(&dir)?)?;
    let bar = progress(prompts.iter().map(|p| p.query_start as u64).sum(), "tokens", args.json);
    let plan = recall::Plan {
        methods: &args.methods,
        budgets: &args.budgets,
        dense_layers: args.dense_layers as usize,
        adapters: args.adapters.as_deref(),
        probe: args.probe,
    };
    let table = recall::compare(&model, &prompts, &backend, &plan, &|n| bar.inc(n as u64))?;
    bar.finish_and_clear();
    for line in table.drifts.iter().filter_map(|(method, drift)| drift.line(method)) {
        eprintln!("{line}");
    }
    backend.close()?;
    Ok(table)
}

/// What earlier runs wrote.
fn merged(directories: &[PathBuf]) -> Result<recall::Comparison> {
    let mut table = recall::Comparison::default();
    for directory in directories {
        let read = |name: &str| {
            let file = directory.join(name);
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
        };
        let (csv, prompts) = (read("compare.csv")?, read("prompts.csv")?);
        table.merge(&csv, &prompts).with_context(|| format!("{}", directory.display()))?;
    }
    Ok(table)
}

fn generate_command(args: &GenerateArgs) -> Result<()> {
    let model = Model::load(&args.model)?;
    let vocabulary = Vocabulary::load(&args.model);
    let rebuilds = args.cache.method().is_some_and(|method| method.rank().is_some());
    let geometry = geometry(&model, args.cache.dtype, rebuilds)?;
    let backend = backend::open(&args.backend_options(), geometry, fingerprint(&args.model)?)?;
    let mut cache = match &args.session {
        Some(name) => backend.session(name)?,
        None => backend.create("")?,
    };
    let prompt = prompt(args, &vocabulary, cache.is_empty())?;
    let request = Request { prompt, max_tokens: args.max_tokens as usize, sampler: sampler(args)? };

    let bar = progress(0, "tokens x layers", args.json);
    if let Some(prompt) = &request.prompt {
        bar.set_length((prompt.len() * model.config().layers()) as u64);
    }
    let mut stream = Stream::new(&vocabulary);
    let mut out = std::io::stdout().lock();
    let begin = Instant::now();
    let mut first = None;
    let mut emit = |id: u32| -> Result<()> {
        if first.is_none() {
            bar.finish_and_clear();
            first = Some(begin.elapsed());
        }
        let piece = stream.push(id)?;
        if !args.json {
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    };
    let outcome = generate(&model, &mut cache, &request, &mut emit, &|n| bar.inc(n as u64))?;
    bar.finish_and_clear();
    let stats = cache.stats();
    let tokens = cache.len();
    let mut drift = recall::Drift::default();
    drift.add(&cache.own_drift().map_err(engine_error)?);
    Box::new(cache).finish(args.session.is_some())?;
    let notes = backend.notes(stats.steps);
    backend.close()?;
    let first = first.unwrap_or_default().as_secs_f64();
    let per_s = outcome.steps as f64 / (begin.elapsed().as_secs_f64() - first).max(1e-9);
    if args.json {
        let value = json!({
            "text": stream.text()?,
            "ids": outcome.ids,
            "resumed": outcome.resumed,
            "stop": outcome.stop.name(),
            "prompt_tokens": outcome.prompt_tokens,
            "tokens": tokens,
            "kv_bytes_total": stats.kv_bytes_total,
            "kv_bytes_read_per_step": stats.bytes_read_per_step(),
            "resident_bytes_peak": stats.resident_bytes_peak,
            "seconds_to_first_token": first,
            "tokens_per_s": per_s,
            "drift": if drift.is_empty() { None } else { Some(&drift) },
            "pipeline": stats.pipeline,
            "io_hidden_share": stats.pipeline.map(|report| report.hidden_share()),
            "prediction_recall": stats.pipeline.map(|report| report.recall()),
            "wasted_bytes_per_step": stats.pipeline.and_then(|report| report.wasted_bytes.checked_div(stats.steps)),
        });
        writeln!(out, "{value}")?;
        return Ok(());
    }
    writeln!(out, "{}", stream.finish()?)?;
    eprintln!(
        "{} tokens ({} resumed), {per_s:.1} tokens/s, first after {first:.2} s; {tokens} tokens and {} bytes of keys and values, {} bytes read per step",
        outcome.ids.len(),
        outcome.resumed,
        stats.kv_bytes_total,
        stats.bytes_read_per_step()
    );
    if let Some(report) = &stats.pipeline {
        eprintln!("{}", recall::pipeline_line(report));
    }
    if let Some(line) = drift.line(args.cache.policy.name()) {
        eprintln!("{line}");
    }
    for note in notes {
        eprintln!("{note}");
    }
    Ok(())
}

/// Ids of the prompt, whichever way it was given; `first`: it begins the sequence.
fn prompt(args: &GenerateArgs, vocabulary: &Vocabulary, first: bool) -> Result<Option<Vec<u32>>> {
    if let Some(text) = &args.prompt {
        return vocabulary.encode(text, first).map(Some);
    }
    if let Some(path) = &args.prompt_file {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        return vocabulary.encode(&text, first).map(Some);
    }
    args.prompt_ids.as_deref().map(read_ids).transpose()
}

/// The sampler of the command line, `None` where it says nothing about it.
fn sampler(args: &GenerateArgs) -> Result<Option<SamplerState>> {
    if args.temperature.is_none() && args.top_p.is_none() && args.seed.is_none() {
        return Ok(None);
    }
    // Asking for a nucleus or a seed asks for drawing.
    let temperature = args.temperature.unwrap_or(1.0);
    SamplerState::new(temperature, args.top_p.unwrap_or(1.0), args.seed.unwrap_or(0)).map(Some)
}

/// A bar on stderr, hidden where nobody watches.
fn progress(length: u64, unit: &str, quiet: bool) -> ProgressBar {
    let hidden = quiet || !std::io::stderr().is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    let template = format!("[{{elapsed_precise}}] {{wide_bar}} {{pos}}/{{len}} {unit} ({{eta}})");
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
