//! Selectors by name, with adapters fitted to random keys: what they choose means nothing, what it costs does.

use crate::work::{HEAD_DIM, KV_HEADS, ROW};
use anyhow::{Context, Result, bail, ensure};
use std::sync::Arc;
use stratakv::retrieval::{
    Adapter, Calibrator, CodeOptions, InfiniGen, KvSwap, LeoAm, Oracle, Quest, Selector, ShadowKv, SignBits,
    TransformCoded,
};

/// Keys that adapters are fitted to: more than there are dimensions, so that all of them carry something.
const SAMPLE_TOKENS: usize = 1536;

/// The selector of this name for `layers` layers alike.
pub(crate) fn selector(text: &str, layers: u16) -> Result<Arc<dyn Selector>> {
    let (name, number) = match text.split_once(':') {
        Some((name, number)) => {
            (name, Some(number.parse::<usize>().with_context(|| format!("--method {text}: {number:?} is no number"))?))
        }
        None => (text, None),
    };
    let takes_number = matches!(name, "kvswap" | "infinigen" | "tck");
    ensure!(takes_number || number.is_none(), "--method {text}: {name} takes no number");
    let rank = || -> Result<usize> {
        let sigma = number.unwrap_or(8);
        ensure!(
            sigma > 0 && ROW.is_multiple_of(sigma),
            "--method {text}: {sigma} does not divide {ROW} joint dimensions"
        );
        Ok(ROW / sigma)
    };
    Ok(match name {
        "quest" => Arc::new(Quest),
        "leoam" => Arc::new(LeoAm::default()),
        "shadowkv" => Arc::new(ShadowKv::default()),
        "signs" => Arc::new(SignBits),
        "oracle" => Arc::new(Oracle),
        "kvswap" => {
            let rank = rank()?;
            Arc::new(KvSwap::new(fit(layers, |calibrator| calibrator.low_rank(text, 1, rank))?))
        }
        "infinigen" => {
            // Columns of all heads together, equally many for each.
            let rank = rank()?.next_multiple_of(KV_HEADS);
            Arc::new(InfiniGen::new(fit(layers, |calibrator| calibrator.per_head(text, 1, rank))?))
        }
        "tck" => {
            let options = CodeOptions { bits: number.unwrap_or(64), dimension_bits_max: 4, decode_only: false };
            Arc::new(TransformCoded::new(fit(layers, |calibrator| calibrator.codes(text, 1, options))?))
        }
        _ => bail!(
            "--method {text}: no such method; there are records, quest, leoam, shadowkv, signs, oracle, kvswap:SIGMA, \
             infinigen:SIGMA, tck:BITS"
        ),
    })
}

/// Fitted once, used in every layer.
fn fit(layers: u16, adapter: impl Fn(&Calibrator) -> stratakv::Result<Adapter>) -> Result<Arc<Adapter>> {
    let mut random = fastrand::Rng::with_seed(29);
    let mut calibrator = Calibrator::new(&[(KV_HEADS, HEAD_DIM)]);
    // Falling variances, as keys have: codes spend their bits unevenly.
    let scale = |at: usize| 1.0 / (1.0 + at as f32 / 64.0);
    let mut rows =
        |count: usize| -> Vec<f32> { (0..count * ROW).map(|at| (random.f32() - 0.5) * scale(at % ROW)).collect() };
    calibrator.keys(0, &rows(SAMPLE_TOKENS));
    for decode in [false, true] {
        calibrator.queries(0, &rows(64), KV_HEADS, decode);
    }
    let one = adapter(&calibrator)?;
    let all = one.layers().iter().cycle().take(usize::from(layers)).cloned().collect();
    Ok(Arc::new(Adapter::new(one.name(), one.version(), all)?))
}
