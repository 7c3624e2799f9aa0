//! Retrieval methods on the command line.
//!
//! The engine's registry parses their names and makes their selectors. Two names are kvbench's own: `none` and
//! `records`. Adapters are fitted to random keys. Their choices mean nothing, but the cost of scoring does not depend
//! on the keys.

use crate::support::model::{HEAD_DIM, KV_HEADS, ROW};
use anyhow::{Result, ensure};
use std::sync::Arc;
use stratakv::retrieval::{
    Adapter, AdapterFit, Calibrator, CodeOptions, HeadAggregation, Method, MethodSpec, Selector, methods,
};

/// Tokens whose keys adapters are fitted to: more than there are dimensions, so that every dimension has a variance.
const SAMPLE_TOKENS: usize = 1536;

/// The name of the sequence's own min/max records.
const RECORDS: &str = "records";

/// A method on the command line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MethodArg {
    /// `none`: nothing is scored.
    None,
    /// `records`: the sequence's own min/max records, and the aggregation if the name has one.
    Records(Option<HeadAggregation>),
    /// A method of the registry, such as `tck:64:group`.
    Registered(MethodSpec),
}

impl MethodArg {
    /// Parses `none`, `records[:HEADS]` or a method of the registry.
    ///
    /// # Errors
    /// The registry refuses the name, or the number asks for keys that are reconstructed.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if text == "none" {
            return Ok(Self::None);
        }
        // `minmax` scores the same records, so the same aggregations may follow the name.
        let heads = text.strip_prefix(RECORDS).filter(|rest| rest.is_empty() || rest.starts_with(':'));
        if let Some(heads) = heads {
            let spec: MethodSpec = format!("minmax{heads}").parse()?;
            return Ok(Self::Records(spec.aggregation()));
        }
        registered(text).map(Self::Registered)
    }

    /// Returns how query heads are added up, if the name says so.
    pub(crate) fn aggregation(&self) -> Option<HeadAggregation> {
        match self {
            Self::None => None,
            Self::Records(aggregation) => *aggregation,
            Self::Registered(spec) => spec.aggregation(),
        }
    }
}

/// Parses a method of the registry.
///
/// # Errors
/// The registry refuses the name, or the number asks for keys that are reconstructed.
pub(crate) fn registered(text: &str) -> Result<MethodSpec> {
    let spec: MethodSpec = text.parse()?;
    ensure!(spec.reconstruct_rank().is_none(), "method {text:?}: kvbench reads all keys; leave the number out");
    Ok(spec)
}

/// Returns the selector of a method, for `layers` equal layers.
///
/// # Errors
/// The number behind the name does not suit the model.
pub(crate) fn selector(spec: &MethodSpec, layers: u16) -> Result<Arc<dyn Selector>> {
    Ok(spec.selector(fit(spec, layers)?.map(Arc::new))?)
}

/// Returns the list of the registry's methods for `--help`.
pub(crate) fn methods_help() -> String {
    let line = |method: &&Method| {
        let separator = if method.alias.is_empty() { "" } else { ", " };
        let names = format!("{}{separator}{}", method.name, method.alias);
        format!("  {names:<14} {}\n", method.about)
    };
    let list: String = methods().iter().map(line).collect();
    format!("Methods, written NAME, NAME:NUMBER or NAME:NUMBER:HEADS with HEADS raw, softmax or group:\n{list}")
}

/// Fits the adapter that a method needs, if any, once and for every layer.
fn fit(spec: &MethodSpec, layers: u16) -> Result<Option<Adapter>> {
    let (fit, number) = spec.adapter_fit();
    let (Some(name), Some(number)) = (spec.adapter_name(), number) else { return Ok(None) };
    let rank = || -> Result<usize> {
        ensure!(ROW.is_multiple_of(number), "method {spec}: {number} does not divide {ROW} joint dimensions");
        Ok(ROW / number)
    };
    let one = match fit {
        AdapterFit::None => return Ok(None),
        AdapterFit::LowRank => {
            let rank = rank()?;
            random_calibrator().low_rank(&name, 1, rank)?
        }
        AdapterFit::PerHead => {
            // The rank counts columns of all heads together, and each head has equally many.
            let rank = rank()?.next_multiple_of(KV_HEADS);
            random_calibrator().per_head(&name, 1, rank)?
        }
        AdapterFit::Codes => {
            let options = CodeOptions { bits: number, dimension_bits_max: 4, decode_only: false };
            random_calibrator().codes(&name, 1, options)?
        }
    };
    let all = one.layers().iter().cycle().take(usize::from(layers)).cloned().collect();
    Ok(Some(Adapter::new(one.name(), one.version(), all)?))
}

/// Returns the moments of random keys and queries of one layer.
fn random_calibrator() -> Calibrator {
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
    calibrator
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_the_registry_parse_with_number_and_aggregation() {
        for method in methods() {
            let MethodArg::Registered(spec) = MethodArg::parse(method.name).unwrap() else {
                panic!("{}", method.name);
            };
            assert_eq!(spec.method().name, method.name);
            assert!(methods_help().contains(&format!("\n  {}", method.name)));
        }
        let group = MethodArg::parse("tck:64:group").unwrap().aggregation();
        assert_eq!(group, Some(HeadAggregation::GroupSoftmax));
        assert!(
            matches!(MethodArg::parse("quest:raw"), Ok(MethodArg::Registered(spec)) if spec.method().name == "minmax")
        );
    }

    #[test]
    fn methods_of_kvbench_alone_parse_beside_the_registry() {
        assert!(matches!(MethodArg::parse("none"), Ok(MethodArg::None)));
        assert!(matches!(MethodArg::parse("records"), Ok(MethodArg::Records(None))));
        assert!(matches!(MethodArg::parse("records:raw"), Ok(MethodArg::Records(Some(HeadAggregation::Sum)))));
        for (text, why) in [
            ("best", "unknown name"),
            ("records:3", "number"),
            ("shadowkv:20", "leave the number out"),
            ("", "unknown"),
        ] {
            let error = MethodArg::parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
