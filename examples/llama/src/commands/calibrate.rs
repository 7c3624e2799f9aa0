//! `kvrun calibrate`: fits adapters and codebooks to a model.

use anyhow::Result;
use stratakv_llama::cli::{CalibrateArgs, model_or_default};
use stratakv_llama::kv::adapters::{adapter_file, to_safetensors};
use stratakv_llama::kv::backend;
use stratakv_llama::model::Model;
use stratakv_llama::recall;
use stratakv_llama::text::beside;
use stratakv_llama::weights::fingerprint;

use super::shared::{progress, write_file};

pub(crate) fn calibrate(args: &CalibrateArgs) -> Result<()> {
    let dir = model_or_default(args.model.as_deref());
    let model = Model::load(&dir)?;
    let file = args.prompts.clone().unwrap_or_else(|| beside(&dir, "calibration.jsonl.gz"));
    let prompts = recall::load(&file, &args.tasks, &args.contexts, args.limit as usize)?;
    let bar = progress(prompts.iter().map(|p| p.query_start as u64).sum(), "tokens", false);
    let calibrator = recall::collect(&model, &prompts, args.dtype, &|n| bar.inc(n as u64))?;
    bar.finish_and_clear();
    let geometry = model.kv_geometry(args.dtype);
    let adapters = recall::fit(&calibrator, &geometry, &args.sigmas, &args.bits)?;
    if let Some(out) = &args.out {
        for adapter in &adapters {
            let (file, bytes) = (adapter_file(out, adapter.name()), to_safetensors(adapter)?);
            write_file(&file, &bytes)?;
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
