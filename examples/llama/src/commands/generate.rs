//! `kvrun generate`: continues a text, or a session in the store.

use std::io::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use stratakv_llama::cli::GenerateArgs;
use stratakv_llama::generate::{self, Outcome, Request};
use stratakv_llama::kv::{KvCache, KvStats, backend, engine_error};
use stratakv_llama::model::Model;
use stratakv_llama::process::ProcessMemory;
use stratakv_llama::recall::{self, Drift};
use stratakv_llama::text::{Stream, Vocabulary, read_ids};
use stratakv_llama::weights::fingerprint;

use super::shared::{check_dense_layers, decode_all, geometry, key_dimensions, progress};

pub(crate) fn generate(args: &GenerateArgs) -> Result<()> {
    let launched = Instant::now();
    let model = Model::load(&args.model)?;
    check_dense_layers(&model, args.cache.dense_layers)?;
    let vocabulary = Vocabulary::load(&args.model);
    let options = args.backend_options(key_dimensions(&model))?;
    let geometry = geometry(&model, args.cache.storage.dtype, options.policy.rank().is_some())?;
    let backend = backend::open(&options, geometry, fingerprint(&args.model)?)?;
    let mut cache = match &args.session {
        Some(name) => backend.session(name, &|ids, cache| decode_all(&model, ids, cache))?,
        None => backend.create("")?,
    };
    let prompt = prompt(args, &vocabulary, cache.is_empty())?;
    let request =
        Request { prompt, max_tokens: args.max_tokens as usize, sampler: args.sampler.sampler()?, new_turn: false };

    let bar = progress(0, "tokens x layers", args.json);
    if let Some(prompt) = &request.prompt {
        bar.set_length((prompt.len() * model.config().layers()) as u64);
    }
    let mut stream = Stream::new(&vocabulary);
    let mut out = std::io::stdout().lock();
    let (begin, opened) = (Instant::now(), launched.elapsed().as_secs_f64());
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
    let outcome = generate::generate(&model, &mut cache, &request, &mut emit, &|n| bar.inc(n as u64))?;
    // Closing the store takes time and frees memory. Neither belongs to a decode step.
    let (seconds, memory) = (begin.elapsed().as_secs_f64(), ProcessMemory::now());
    bar.finish_and_clear();
    let (stats, tokens) = (cache.stats(), cache.len());
    let mut drift = Drift::default();
    drift.add(&cache.own_drift().map_err(engine_error)?);
    let method = cache.method_note().map(str::to_owned);
    Box::new(cache).finish(args.session.is_some())?;
    let notes = backend.notes(stats.steps);
    backend.close()?;
    let first = first.unwrap_or_default().as_secs_f64();
    let per_s = outcome.steps as f64 / (seconds - first).max(1e-9);
    let summary = Summary { outcome, tokens, stats, opened, first, per_s, memory, drift, method };
    if args.json {
        writeln!(out, "{}", summary.json(&stream.text()?))?;
        return Ok(());
    }
    writeln!(out, "{}", stream.finish()?)?;
    summary.print(options.policy.name());
    for note in notes {
        eprintln!("{note}");
    }
    Ok(())
}

/// The figures of a run.
struct Summary {
    outcome: Outcome,
    /// Tokens in the cache.
    tokens: usize,
    stats: KvStats,
    /// Seconds to open the model, the store and the session.
    opened: f64,
    /// Seconds from then to the first token.
    first: f64,
    /// Decode steps per second after the first token.
    per_s: f64,
    memory: ProcessMemory,
    drift: Drift,
    /// A fitted adapter, or the reason why there is none.
    method: Option<String>,
}

impl Summary {
    fn json(&self, text: &str) -> serde_json::Value {
        let Self { outcome, stats, drift, .. } = self;
        let pipeline = stats.pipeline;
        json!({
            "text": text,
            "ids": outcome.ids,
            "resumed": outcome.resumed,
            "stop": outcome.stop.name(),
            "prompt_tokens": outcome.prompt_tokens,
            "tokens": self.tokens,
            "kv_bytes_total": stats.kv_bytes_total,
            "kv_bytes_read_per_step": stats.bytes_read_per_step(),
            "resident_bytes_peak": stats.resident_bytes_peak,
            "seconds_to_open": self.opened,
            "seconds_to_first_token": self.first,
            "tokens_per_s": self.per_s,
            "process_resident_bytes": self.memory.resident,
            "process_anonymous_bytes": self.memory.anonymous,
            "method": self.method,
            "drift": if drift.is_empty() { None } else { Some(drift) },
            "pipeline": pipeline,
            "io_hidden_share": pipeline.map(|report| report.hidden_share()),
            "prediction_recall": pipeline.map(|report| report.recall()),
            "wasted_bytes_per_step": pipeline.and_then(|report| report.wasted_bytes.checked_div(stats.steps)),
        })
    }

    /// Prints the figures on stderr, because stdout has the text.
    fn print(&self, policy: &str) {
        eprintln!(
            "{} tokens ({} resumed), {:.1} tokens/s, first after {:.2} s; {} tokens and {} bytes of keys and values, \
             {} bytes read per step",
            self.outcome.ids.len(),
            self.outcome.resumed,
            self.per_s,
            self.first,
            self.tokens,
            self.stats.kv_bytes_total,
            self.stats.bytes_read_per_step()
        );
        for line in self.memory.line().iter().chain(&self.method) {
            eprintln!("{line}");
        }
        if let Some(report) = &self.stats.pipeline {
            eprintln!("{}", recall::pipeline_line(report));
        }
        if let Some(line) = self.drift.line(policy) {
            eprintln!("{line}");
        }
    }
}

/// Returns the ids of the prompt from a text, a file or ids. `first` says that the prompt begins the sequence.
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
