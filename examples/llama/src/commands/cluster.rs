//! `kvrun cluster`: builds clusters of a stored session and shows them.

use std::io::Write;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stratakv_llama::cli::ClusterArgs;
use stratakv_llama::clusters::{AskedQueries, LayerClusters, MethodClusters, describe, session_queries};
use stratakv_llama::kv::backend;
use stratakv_llama::kv::recorded::PROFILE_QUERIES;
use stratakv_llama::model::Model;
use stratakv_llama::weights::fingerprint;

use super::shared::{geometry, key_dimensions, progress};

pub(crate) fn cluster(args: &ClusterArgs) -> Result<()> {
    let model = Model::load(&args.model)?;
    let geometry = geometry(&model, args.storage.dtype, false)?;
    let backend = backend::open(&args.backend_options(key_dimensions(&model)), geometry, fingerprint(&args.model)?)?;
    let mut sequence = backend.stored_session(&args.session)?;
    let ids = sequence.token_ids().to_vec();
    let (session, tokens) = (&args.session, ids.len());
    let queries = args.queries.unwrap_or(PROFILE_QUERIES.min(tokens));
    ensure!(queries <= tokens, "--queries {queries} is more than the {tokens} tokens of session {session:?}");
    let bar = progress((tokens * model.config().layers()) as u64, "tokens x layers", args.json);
    let recorded = match queries {
        0 => None,
        _ => Some(session_queries(&model, &ids, args.storage.dtype, queries, &|n| bar.inc(n as u64))?),
    };
    bar.finish_and_clear();
    let asked = recorded.as_ref().map(|(full, queries)| AskedQueries { full, queries, budget: args.budget });
    let mut methods = Vec::new();
    for policy in &args.methods {
        let selector = backend.selector(policy, args.storage.adapters.as_deref())?;
        let selector = selector.with_context(|| format!("{policy} makes no clusters"))?;
        methods.push(describe(&mut sequence, policy, selector, asked)?);
    }
    drop(sequence);
    backend.close()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let budget = args.budget.to_string();
        let json =
            json!({ "session": session, "tokens": tokens, "queries": queries, "budget": budget, "methods": methods });
        writeln!(out, "{json}")?;
        return Ok(());
    }
    writeln!(
        out,
        "session {session}: {tokens} tokens; kept weight of its newest {queries} queries at {}",
        args.budget
    )?;
    print(&mut out, &methods)
}

/// Prints one line per method and layer.
fn print(out: &mut impl Write, methods: &[MethodClusters]) -> Result<()> {
    writeln!(
        out,
        "{:<20} {:>5} {:>8} {:>6} {:>7} {:>7} {:>6} {:>8} {:>8}  clusters by size, each up to a power of 2",
        "method", "layer", "clusters", "mean", "largest", "covered", "copies", "KiB", "weight %"
    )?;
    for described in methods {
        for layer in &described.layers {
            let LayerClusters { clusters, mean_size, largest, covered_tokens: covered, .. } = layer;
            writeln!(
                out,
                "{:<20} {:>5} {clusters:>8} {mean_size:>6.1} {largest:>7} {covered:>7.0} {:>6.2} {:>8.1} {:>8} {}",
                described.method,
                layer.layer,
                layer.clusters_per_token,
                layer.bytes as f64 / 1024.0,
                layer.weight_kept.map_or_else(|| "-".to_owned(), |kept| format!("{:.1}", 100.0 * kept)),
                layer.sizes.iter().map(|size| format!(" {}:{}", size.at_most, size.clusters)).collect::<String>()
            )?;
        }
    }
    for MethodClusters { method, build_seconds, layers } in methods {
        writeln!(out, "{method}: {} layers built in {:.1} ms", layers.len(), 1e3 * build_seconds)?;
    }
    Ok(())
}
