//! The selection methods that kvbench knows by name.
//!
//! This is the only file of kvbench that builds selectors. Adapters are fitted to random keys or are fixed matrices.
//! Their choices mean nothing, but the cost of scoring does not depend on the keys.

use crate::support::model::{HEAD_DIM, KV_HEADS, ROW};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use std::sync::Arc;
use stratakv::KvLayout;
use stratakv::retrieval::{
    Adapter, Calibrator, CodeOptions, HeadAggregation, InfiniGen, KvSwap, LayerAdapter, LeoAm, LowRankAdapter, Oracle,
    Quest, Selector, ShadowKv, SignBits, TransformCoded,
};

/// Tokens whose keys adapters are fitted to: more than there are dimensions, so that every dimension has a variance.
const SAMPLE_TOKENS: usize = 1536;
/// Joint key dimensions over the rank of [`StoredMethod::LowRank`].
const STORED_RANK_RATIO: usize = 32;

/// Returns the selector that `text` names, for `layers` equal layers.
///
/// # Errors
/// The name is unknown, or its number is missing, superfluous or out of range.
pub(crate) fn selector(text: &str, layers: u16) -> Result<Arc<dyn Selector>> {
    let (name, number) = match text.split_once(':') {
        Some((name, number)) => {
            let parsed = number.parse::<usize>();
            (name, Some(parsed.with_context(|| format!("--method {text}: {number:?} is not a number"))?))
        }
        None => (text, None),
    };
    let takes_number = matches!(name, "kvswap" | "infinigen" | "tck");
    ensure!(takes_number || number.is_none(), "--method {text}: {name} takes no number");
    let rank = || -> Result<usize> {
        let rank_ratio = number.unwrap_or(8);
        ensure!(
            rank_ratio > 0 && ROW.is_multiple_of(rank_ratio),
            "--method {text}: {rank_ratio} does not divide {ROW} joint dimensions"
        );
        Ok(ROW / rank_ratio)
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
            // The rank counts columns of all heads together, and each head has equally many.
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

/// Splits `tck:32:raw` into the method's name and the form of its scores. The default form is softmax.
pub(crate) fn split_form(method: &str) -> (&str, HeadAggregation) {
    match method.rsplit_once(':') {
        Some((name, "raw")) => (name, HeadAggregation::Sum),
        Some((name, "group")) => (name, HeadAggregation::GroupSoftmax),
        Some((name, "softmax")) => (name, HeadAggregation::Softmax),
        _ => (method, HeadAggregation::Softmax),
    }
}

/// Fits an adapter once and uses it in every layer.
fn fit(layers: u16, adapter: impl Fn(&Calibrator) -> stratakv::Result<Adapter>) -> Result<Arc<Adapter>> {
    let mut random = fastrand::Rng::with_seed(29);
    let mut calibrator = Calibrator::new(&[(KV_HEADS, HEAD_DIM)]);
    // Variances fall along the dimensions as in real keys, so that codes spend their bits unevenly.
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

/// A selector whose summaries are stored with the groups, named by the summary it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoredMethod {
    /// Sign bits.
    Signs,
    /// Mean keys of groups.
    Landmarks,
    /// Low-rank keys with a 32nd of the dimensions.
    LowRank,
}

impl StoredMethod {
    /// Returns the selector for a layout.
    ///
    /// # Errors
    /// The adapter does not fit the layout.
    pub(crate) fn selector(self, layout: &KvLayout) -> Result<Arc<dyn Selector>> {
        Ok(match self {
            Self::Signs => Arc::new(SignBits),
            Self::Landmarks => Arc::new(ShadowKv::default()),
            Self::LowRank => {
                let rank = ROW / STORED_RANK_RATIO;
                // Column c of the matrix sums every dimension d with d % rank == c.
                let layer = |_| -> Result<LayerAdapter> {
                    let matrix = (0..ROW * rank).map(|i| f32::from(u8::from(i / rank % rank == i % rank))).collect();
                    Ok(LowRankAdapter::new(ROW, rank, matrix)?.into())
                };
                let layers = (0..layout.layers()).map(layer).collect::<Result<_>>()?;
                Arc::new(KvSwap::new(Arc::new(Adapter::new("bench", 1, layers)?)))
            }
        })
    }
}
