//! The retrieval methods of this crate by name. Command lines, benchmarks and tests parse method names here.
//!
//! A method is one folder beside this file and one line in [`METHODS`]. A method name is `NAME[:NUMBER][:HEADS]`, for
//! example `tck:64:group`: the method, its parameter, and how scores of query heads are added up (`raw`, `softmax`,
//! `group`).

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
use crate::retrieval::method::{AdapterFit, Method, MethodParameter};
use crate::retrieval::selector::{HeadAggregation, Selector};
use crate::retrieval::{block_mean, bounds, exact, low_rank, shadowkv, sign_bits, transform_coded};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Every method, in the order in which tools list them.
const METHODS: &[&Method] = &[
    &bounds::MIN_MAX,
    &bounds::LEOAM,
    &low_rank::KVSWAP,
    &low_rank::INFINIGEN,
    &shadowkv::SHADOWKV,
    &block_mean::BLOCK_MEAN,
    &transform_coded::TRANSFORM_CODED,
    &sign_bits::SIGN_BITS,
    &exact::ORACLE,
];

/// Returns every method of this crate.
#[must_use]
pub fn methods() -> &'static [&'static Method] {
    METHODS
}

/// A method with its parameter and its aggregation, as parsed from `tck:64:group`.
///
/// ```
/// use stratakv::retrieval::{HeadAggregation, MethodSpec};
///
/// let spec: MethodSpec = "tck:64:group".parse()?;
/// assert_eq!((spec.method().name, spec.parameter()), ("tck", Some(64)));
/// assert_eq!(spec.aggregation(), Some(HeadAggregation::GroupSoftmax));
/// assert_eq!(spec.adapter_name().as_deref(), Some("tck-64"));
/// let selector = "minmax".parse::<MethodSpec>()?.selector(None)?; // `Sequence::attach` takes it
/// assert_eq!(selector.name(), "minmax");
/// # Ok::<(), stratakv::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MethodSpec {
    method: &'static Method,
    parameter: Option<usize>,
    aggregation: Option<HeadAggregation>,
}

impl PartialEq for MethodSpec {
    fn eq(&self, other: &Self) -> bool {
        let parts = |spec: &Self| (spec.method.name, spec.parameter, spec.aggregation);
        parts(self) == parts(other)
    }
}

impl Eq for MethodSpec {}

impl MethodSpec {
    /// Returns the method.
    #[must_use]
    pub fn method(&self) -> &'static Method {
        self.method
    }

    /// Returns the number behind the name, or the method's default.
    #[must_use]
    pub fn parameter(&self) -> Option<usize> {
        self.parameter
    }

    /// Returns how scores of query heads are aggregated, if the name says so.
    #[must_use]
    pub fn aggregation(&self) -> Option<HeadAggregation> {
        self.aggregation
    }

    /// Returns the name of the adapter that the method needs, such as `kvswap-8`, if it needs one.
    #[must_use]
    pub fn adapter_name(&self) -> Option<String> {
        let parameter = self.parameter.unwrap_or_default();
        (self.method.adapter != AdapterFit::None).then(|| format!("{}-{parameter}", self.method.name))
    }

    /// Returns the rank of reconstructed keys, if the name gives one.
    #[must_use]
    pub fn reconstruct_rank(&self) -> Option<usize> {
        self.parameter.filter(|_| self.method.reconstructs_keys)
    }

    /// Makes the selector. `adapter` is the one that [`Self::adapter_name`] names, for methods that need one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the method needs an adapter and there is none.
    pub fn selector(&self, adapter: Option<Arc<Adapter>>) -> Result<Arc<dyn Selector>> {
        (self.method.make)(adapter)
    }
}

impl FromStr for MethodSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |what: String| Error::new(ErrorKind::InvalidArgument, format!("method {text:?}: {what}"));
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let is_named = |method: &&&Method| !name.is_empty() && (method.name == name || method.alias == name);
        let Some(method) = METHODS.iter().find(is_named) else {
            let names: Vec<&str> = METHODS.iter().map(|method| method.name).collect();
            return Err(wrong(format!("unknown name {name:?}; use one of {}", names.join(", "))));
        };
        let default = match method.parameter {
            MethodParameter::Default(number) => Some(number),
            MethodParameter::None | MethodParameter::Optional => None,
        };
        let (mut parameter, mut aggregation) = (None, None);
        for part in parts {
            match part {
                heads if aggregation.is_some() => {
                    return Err(wrong(format!("{heads:?} after the aggregation; write NAME:NUMBER:HEADS")));
                }
                "raw" => aggregation = Some(HeadAggregation::Sum),
                "softmax" => aggregation = Some(HeadAggregation::Softmax),
                "group" => aggregation = Some(HeadAggregation::GroupSoftmax),
                number => {
                    if method.parameter == MethodParameter::None {
                        return Err(wrong(format!(
                            "{} takes no number, and {number:?} is no aggregation",
                            method.name
                        )));
                    }
                    let parsed = number.parse().ok().filter(|parsed| *parsed > 0);
                    let bad = || wrong(format!("{number:?} is neither a positive number nor raw, softmax or group"));
                    if parameter.replace(parsed.ok_or_else(bad)?).is_some() {
                        return Err(wrong("it has two numbers; write NAME:NUMBER:HEADS".to_owned()));
                    }
                }
            }
        }
        Ok(Self { method, parameter: parameter.or(default), aggregation })
    }
}

impl fmt::Display for MethodSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.method.name)?;
        if let Some(parameter) = self.parameter {
            write!(f, ":{parameter}")?;
        }
        f.write_str(match self.aggregation {
            None => "",
            Some(HeadAggregation::Sum) => ":raw",
            Some(HeadAggregation::Softmax) => ":softmax",
            Some(HeadAggregation::GroupSoftmax) => ":group",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn method_names_parse_and_print() {
        for text in
            ["minmax:raw", "kvswap:8", "kvswap:32:raw", "tck:64:group", "shadowkv", "shadowkv:20", "oracle:softmax"]
        {
            assert_eq!(text.parse::<MethodSpec>().unwrap().to_string(), text);
        }
        assert_eq!("quest".parse::<MethodSpec>().unwrap().to_string(), "minmax");
        assert_eq!("tck".parse::<MethodSpec>().unwrap().adapter_name().unwrap(), "tck-64");
        assert_eq!("shadowkv:20".parse::<MethodSpec>().unwrap().reconstruct_rank(), Some(20));
        assert_eq!("kvswap:20".parse::<MethodSpec>().unwrap().reconstruct_rank(), None);
    }

    #[test]
    fn method_names_that_are_wrong_say_why() {
        for (bad, why) in [
            ("", "unknown name"),
            ("best", "use one of minmax, leoam"),
            ("tck:0", "positive number"),
            ("tck:x", "positive number"),
            ("minmax:3", "takes no number"),
            ("tck:64:32", "two numbers"),
            ("tck:raw:64", "after the aggregation"),
            ("tck:raw:group", "after the aggregation"),
        ] {
            let error = bad.parse::<MethodSpec>().unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn method_names_are_unique_and_selectors_carry_them() {
        let mut names = BTreeSet::new();
        for method in methods() {
            assert!(names.insert(method.name), "{}", method.name);
            assert!(method.alias.is_empty() || names.insert(method.alias), "{}", method.alias);
            let spec: MethodSpec = method.name.parse().unwrap();
            match spec.selector(None) {
                Ok(selector) => assert_eq!(selector.name(), method.name),
                Err(error) => {
                    assert!(method.adapter != AdapterFit::None && error.to_string().contains("adapter"), "{error}");
                }
            }
        }
    }
}
