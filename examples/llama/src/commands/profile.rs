//! `kvrun profile`: records which tokens the queries of one prompt attend to.

use std::io::Write;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stratakv::retrieval::clusters::ActivationRule;
use stratakv_llama::cli::{ProfileArgs, model_or_default};
use stratakv_llama::model::Model;
use stratakv_llama::profile::{self, Profile, ProfileOptions, QuerySource};
use stratakv_llama::recall::PromptFilter;
use stratakv_llama::text::beside;
use stratakv_llama::weights::fingerprint;

use super::shared::{progress, write_file};

/// The questions about a haystack, of which half are recorded, if `--questions` gives no number.
const QUESTIONS: usize = 16;

pub(crate) fn profile(args: &ProfileArgs) -> Result<()> {
    let asks = args.queries == QuerySource::Questions;
    ensure!(asks || args.modes.questions.is_none(), "--questions records nothing without --queries questions");
    let dir = model_or_default(args.model.as_deref());
    let model = Model::load(&dir)?;
    let file = args.prompts.clone().unwrap_or_else(|| beside(&dir, "prompts.jsonl.gz"));
    let (tasks, contexts) = (std::slice::from_ref(&args.task), &[args.context][..]);
    let filter = PromptFilter { file: &file, tasks, contexts, limit: args.number };
    let loaded = args.modes.load(&filter)?;
    let found = loaded.prompts.len();
    let prompt = (found == args.number as usize).then(|| loaded.prompts.last()).flatten();
    let prompt = prompt.with_context(|| format!("--number {} is more than the {found} prompts", args.number))?;
    let options = ProfileOptions {
        source: args.queries,
        rule: ActivationRule { weight: args.weight, share: args.share, sinks: args.sinks, window: args.newest },
        prefill: args.modes.prefill_tokens(),
        questions: args.modes.question_count().unwrap_or(QUESTIONS),
        dtype: args.dtype,
        model: fingerprint(&dir)?.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    let bar = progress(prompt.query_start as u64, "tokens", args.json);
    let profile = profile::record(&model, prompt, &options, &|tokens| bar.inc(tokens as u64))?;
    bar.finish_and_clear();
    let bytes = profile.to_safetensors()?;
    write_file(&args.out, &bytes)?;
    report(args, &profile, bytes.len())
}

/// Prints the figures of each layer.
fn report(args: &ProfileArgs, profile: &Profile, bytes: usize) -> Result<()> {
    let layers: Vec<_> = profile.layers.iter().map(|layer| profile.summary(layer)).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let queries = profile.positions.len();
        let json = json!({
            "file": args.out, "bytes": bytes, "profile": profile.about, "queries": queries, "layers": layers
        });
        writeln!(out, "{json}")?;
        return Ok(());
    }
    let about = &profile.about;
    let (prompt, entries, source) = (&about.prompt, about.entries, &about.source);
    writeln!(out, "{prompt}: {entries} tokens, {} queries ({source})", profile.positions.len())?;
    writeln!(out, "{:<5} {:>13} {:>13} {:>13}", "layer", "activated", "marked %", "weight %")?;
    for (index, layer) in layers.iter().enumerate() {
        let (marked, weight) = (100.0 * layer.entries_marked, 100.0 * layer.weight_held);
        writeln!(out, "{index:<5} {:>13.1} {marked:>13.1} {weight:>13.1}", layer.activated_per_query)?;
    }
    writeln!(out, "{}: {bytes} bytes", args.out.display())?;
    Ok(())
}
