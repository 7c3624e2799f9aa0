//! The retrieval methods of this crate by name. Command lines, benchmarks and tests parse method names here.
//!
//! A method is one folder beside this file and one line in [`METHODS`]. A method name is `NAME[:NUMBER][:HEADS]`, for
//! example `tck:64:group`: the method, its parameter, and how scores of query heads are added up (`raw`, `softmax`,
//! `group`). A method of clusters also takes `members`, `heads` and `joint`, for example `dynakv:16:members:joint`. A
//! number behind `members` is the bits of the codes that score them. `swarm` takes `window` and `single`.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::{ChosenBy, HeadSharing};
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodChoice, MethodParameter};
use crate::retrieval::selector::{HeadAggregation, Selector};
use crate::retrieval::{
    balanced, block_mean, bounds, dynakv, exact, fixed_clusters, infllm, low_rank, pqcache, shadowkv, sign_bits, swarm,
    tokens, transform_coded,
};
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
    &balanced::BALANCED,
    &dynakv::DYNAKV,
    &fixed_clusters::CLUSTERKV,
    &fixed_clusters::KMEANS,
    &pqcache::PQCACHE,
    &swarm::SWARM,
    &infllm::INFLLM,
    &exact::ORACLE,
    &tokens::TOKENS,
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
    choice: MethodChoice,
    aggregation: Option<HeadAggregation>,
}

/// The bits of the codes that members of clusters are scored by, if the name does not say them.
const MEMBER_CODE_BITS: usize = 64;

impl PartialEq for MethodSpec {
    fn eq(&self, other: &Self) -> bool {
        let parts = |spec: &Self| (spec.method.name, spec.choice, spec.aggregation);
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
        self.choice.parameter
    }

    /// Returns what clusters are scored by, for a method that chooses clusters.
    #[must_use]
    pub fn chosen_by(&self) -> ChosenBy {
        self.choice.chosen_by
    }

    /// Returns whose keys a cluster holds, for a method that chooses clusters.
    #[must_use]
    pub fn sharing(&self) -> Option<HeadSharing> {
        self.choice.sharing
    }

    /// Returns the adapter that the method needs and the parameter that it is fitted with.
    #[must_use]
    pub fn adapter_fit(&self) -> (AdapterFit, Option<usize>) {
        match self.choice.chosen_by {
            ChosenBy::Members => (AdapterFit::Codes, Some(self.member_bits())),
            ChosenBy::Representative => (self.method.adapter, self.choice.parameter),
        }
    }

    /// Returns the bits of the codes that members are scored by.
    fn member_bits(&self) -> usize {
        self.choice.member_bits.unwrap_or(MEMBER_CODE_BITS)
    }

    /// Returns how scores of query heads are aggregated, if the name says so.
    #[must_use]
    pub fn aggregation(&self) -> Option<HeadAggregation> {
        self.aggregation
    }

    /// Returns the name of the adapter that the method needs, such as `kvswap-8`, if it needs one. Members of clusters
    /// are scored by the adapter of `tck`, by default that of `tck:64`.
    #[must_use]
    pub fn adapter_name(&self) -> Option<String> {
        let (fit, parameter) = self.adapter_fit();
        let name = match self.choice.chosen_by {
            ChosenBy::Members => transform_coded::TRANSFORM_CODED.name,
            ChosenBy::Representative => self.method.name,
        };
        (fit != AdapterFit::None).then(|| format!("{name}-{}", parameter.unwrap_or_default()))
    }

    /// Returns the rank of reconstructed keys, if the name gives one.
    #[must_use]
    pub fn reconstruct_rank(&self) -> Option<usize> {
        self.choice.parameter.filter(|_| self.method.reconstructs_keys)
    }

    /// Returns the method with another number behind its name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the method takes no number, or the number is 0.
    pub fn with_parameter(mut self, parameter: usize) -> Result<Self> {
        if self.method.parameter == MethodParameter::None || parameter == 0 {
            let text = format!("method {}: it cannot take the number {parameter}", self.method.name);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.choice.parameter = Some(parameter);
        Ok(self)
    }

    /// Returns the method with another aggregation of query heads.
    #[must_use]
    pub fn with_aggregation(mut self, aggregation: HeadAggregation) -> Self {
        self.aggregation = Some(aggregation);
        self
    }

    /// Makes the selector. `adapter` is the one that [`Self::adapter_name`] names, for methods that need one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the method needs an adapter and there is none.
    pub fn selector(&self, adapter: Option<Arc<Adapter>>) -> Result<Arc<dyn Selector>> {
        (self.method.make)(self.choice, adapter)
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
        let mut parsed = NameParts::default();
        parts.try_for_each(|part| parsed.add(method, part).map_err(&wrong))?;
        let chosen_by = parsed.chosen_by.unwrap_or_default();
        let sharing = match (method.unit, chosen_by) {
            (ChosenUnit::Clusters { paper, .. }, ChosenBy::Representative) => Some(parsed.sharing.unwrap_or(paper)),
            (ChosenUnit::Clusters { members, .. }, ChosenBy::Members) => Some(parsed.sharing.unwrap_or(members)),
            (ChosenUnit::Groups | ChosenUnit::Blocks | ChosenUnit::Tokens, _) => None,
        };
        let choice = MethodChoice {
            parameter: parsed.parameter.or(default),
            member_bits: parsed.member_bits,
            chosen_by,
            sharing,
            whole_window: parsed.whole_window,
            single: parsed.single,
        };
        Ok(Self { method, choice, aggregation: parsed.aggregation })
    }
}

/// The parts behind the name of a method.
#[derive(Default)]
struct NameParts {
    parameter: Option<usize>,
    member_bits: Option<usize>,
    chosen_by: Option<ChosenBy>,
    sharing: Option<HeadSharing>,
    whole_window: bool,
    single: bool,
    aggregation: Option<HeadAggregation>,
}

impl NameParts {
    /// Takes the next part, or says what is wrong with it.
    fn add(&mut self, method: &Method, part: &str) -> std::result::Result<(), String> {
        if self.aggregation.is_some() {
            return Err(format!("{part:?} after the aggregation; write NAME:NUMBER:HEADS"));
        }
        let has_clusters = matches!(method.unit, ChosenUnit::Clusters { .. });
        let has_window = matches!(method.unit, ChosenUnit::Clusters { has_window: true, .. });
        let has_replicas = matches!(method.unit, ChosenUnit::Clusters { has_replicas: true, .. });
        match part {
            "raw" => self.aggregation = Some(HeadAggregation::Sum),
            "softmax" => self.aggregation = Some(HeadAggregation::Softmax),
            "group" => self.aggregation = Some(HeadAggregation::GroupSoftmax),
            "members" if has_clusters => self.chosen_by = Some(ChosenBy::Members),
            "heads" if has_clusters => self.sharing = Some(HeadSharing::PerHead),
            "joint" if has_clusters => self.sharing = Some(HeadSharing::Joint),
            "window" if has_window => self.whole_window = true,
            "single" if has_replicas => self.single = true,
            number => {
                if method.parameter == MethodParameter::None {
                    return Err(format!("{} takes no number, and {number:?} is no aggregation", method.name));
                }
                let parsed = number.parse().ok().filter(|parsed| *parsed > 0);
                let bad = || format!("{number:?} is neither a positive number nor raw, softmax or group");
                let (slot, form) = match self.chosen_by {
                    Some(ChosenBy::Members) => (&mut self.member_bits, "NAME:SIZE:members:BITS"),
                    _ => (&mut self.parameter, "NAME:NUMBER:HEADS"),
                };
                if slot.replace(parsed.ok_or_else(bad)?).is_some() {
                    return Err(format!("it has two numbers; write {form}"));
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for MethodSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.method.name)?;
        if let Some(parameter) = self.choice.parameter {
            write!(f, ":{parameter}")?;
        }
        if let ChosenUnit::Clusters { paper, members, .. } = self.method.unit {
            let usual = match self.choice.chosen_by {
                ChosenBy::Representative => paper,
                ChosenBy::Members => {
                    f.write_str(":members")?;
                    self.choice.member_bits.map_or(Ok(()), |bits| write!(f, ":{bits}"))?;
                    members
                }
            };
            match self.choice.sharing.filter(|sharing| *sharing != usual) {
                None => {}
                Some(HeadSharing::PerHead) => f.write_str(":heads")?,
                Some(HeadSharing::Joint) => f.write_str(":joint")?,
            }
            if self.choice.whole_window {
                f.write_str(":window")?;
            }
            if self.choice.single {
                f.write_str(":single")?;
            }
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
        for text in
            ["clusterkv:8:members:heads", "kmeans:16:joint:softmax", "dynakv:4:members", "swarm:8:members:window:raw"]
        {
            assert_eq!(text.parse::<MethodSpec>().unwrap().to_string(), text);
        }
        for text in ["pqcache:64", "tokens:raw", "balanced:8:members", "swarm:8:single", "swarm:8:window:single:raw"] {
            assert_eq!(text.parse::<MethodSpec>().unwrap().to_string(), text);
        }
        for (text, adapter) in [
            ("balanced:10:members:192", "tck-192"),
            ("swarm:8:members:128:heads:window:raw", "tck-128"),
            ("dynakv:4:members", "tck-64"),
        ] {
            let spec: MethodSpec = text.parse().unwrap();
            assert_eq!((spec.to_string(), spec.adapter_name()), (text.to_owned(), Some(adapter.to_owned())));
        }
        assert_eq!("kmeans:members".parse::<MethodSpec>().unwrap().to_string(), "kmeans:16:members");
        assert_eq!("kmeans:members:32".parse::<MethodSpec>().unwrap().to_string(), "kmeans:16:members:32");
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
            ("tokens:3", "takes no number"),
            ("pqcache:members", "positive number"),
            ("dynakv:window", "positive number"),
            ("dynakv:single", "positive number"),
            ("tck:64:32", "two numbers"),
            ("dynakv:8:16", "two numbers; write NAME:NUMBER"),
            ("dynakv:8:members:64:64", "two numbers; write NAME:SIZE:members:BITS"),
            ("dynakv:8:members:0", "positive number"),
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
