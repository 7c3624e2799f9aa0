//! Helpers of several subcommands.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use stratakv_llama::kv::{KvCache, KvDType, KvGeometry, LayerGeometry};
use stratakv_llama::model::Model;

/// Returns the geometry of a model's cache. It holds the rotation if keys are reconstructed.
pub(super) fn geometry(model: &Model, dtype: KvDType, reconstructs: bool) -> Result<KvGeometry> {
    let rope = if reconstructs { Some(model.config().rope()?) } else { None };
    Ok(KvGeometry { rope, ..model.kv_geometry(dtype) })
}

/// Returns the joint key dimensions of the model's widest layer.
pub(super) fn key_dimensions(model: &Model) -> usize {
    let geometry = model.kv_geometry(KvDType::F16);
    geometry.layers.iter().map(LayerGeometry::width).max().unwrap_or(0)
}

/// Decodes token ids through a cache.
pub(super) fn decode_all(model: &Model, ids: &[u32], cache: &mut dyn KvCache) -> Result<()> {
    ids.iter().try_for_each(|&id| model.decode(id, cache).map(drop))
}

/// Checks the number of first layers that attend to everything.
pub(super) fn check_dense_layers(model: &Model, dense: u32) -> Result<()> {
    let layers = model.config().layers();
    ensure!(dense as usize <= layers, "--dense-layers {dense} is more than the {layers} layers of the model");
    Ok(())
}

/// Makes a progress bar on stderr. It is hidden if stderr is not a terminal.
pub(super) fn progress(length: u64, unit: &str, quiet: bool) -> ProgressBar {
    let hidden = quiet || !std::io::stderr().is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    let template = format!("[{{elapsed_precise}}] {{wide_bar}} {{pos}}/{{len}} {unit} ({{eta}})");
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Writes a file, and makes its directory first.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
