//! Retrieval methods by name: what `--policy` and the lists of `kvrun compare` say, as selectors of the engine.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use stratakv::retrieval::{
    HeadAggregation, InfiniGen, KvSwap, LeoAm, Oracle, Quest, Selector, ShadowKv, SignBits, TransformCoded,
};
use stratakv::{KvLayout, Store};

use super::adapters::{adapter_file, from_safetensors};
use super::store::engine_error;

/// A method, its parameter and its score: `kvswap:8`, `tck:64:raw`, `minmax`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Method {
    /// Name.
    pub name: MethodName,
    /// Sigma of `kvswap` and `infinigen`, bits of `tck`, rank of rebuilt keys of `shadowkv` (0: keys are read); 0 for the others.
    pub parameter: usize,
    /// How heads are added up.
    pub form: HeadAggregation,
}

/// What choose by a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MethodName {
    /// The first tokens and the newest ones.
    Window,
    /// Upper bounds of groups (Quest).
    Minmax,
    /// Low-rank keys.
    Kvswap,
    /// A tree of bounds.
    Leoam,
    /// Landmarks and outliers.
    Shadowkv,
    /// Transform-coded keys.
    TransformCoded,
    /// Sign bits.
    Signs,
    /// Per-head ranks by low-rank keys.
    Infinigen,
    /// Exact scores.
    Oracle,
}

impl MethodName {
    const ALL: [(Self, &'static str, usize); 9] = [
        (Self::Window, "window", 0),
        (Self::Minmax, "minmax", 0),
        (Self::Kvswap, "kvswap", 8),
        (Self::Leoam, "leoam", 0),
        (Self::Shadowkv, "shadowkv", 0),
        (Self::TransformCoded, "tck", 64),
        (Self::Signs, "signs", 0),
        (Self::Infinigen, "infinigen", 8),
        (Self::Oracle, "oracle", 0),
    ];
}

impl FromStr for Method {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let found = MethodName::ALL.iter().find(|(_, known, _)| *known == name);
        let Some(&(name, _, mut parameter)) = found else {
            let names: Vec<&str> = MethodName::ALL.iter().map(|(_, name, _)| *name).collect();
            bail!("{name:?} is no method; there are {}", names.join(", "))
        };
        let mut form = HeadAggregation::Softmax;
        for part in parts {
            match part {
                "raw" => form = HeadAggregation::Sum,
                "softmax" => form = HeadAggregation::Softmax,
                "group" => form = HeadAggregation::GroupSoftmax,
                number => {
                    let parsed = number.parse().with_context(|| format!("{text:?}: {number:?} is no number"))?;
                    ensure!(parameter > 0 || name == MethodName::Shadowkv, "{text:?}: this method takes no number");
                    ensure!(parsed > 0, "{text:?}: 0 is out of range");
                    parameter = parsed;
                }
            }
        }
        Ok(Self { name, parameter, form })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = MethodName::ALL.iter().find(|(name, ..)| *name == self.name).map_or("", |(_, name, _)| name);
        f.write_str(name)?;
        if self.parameter > 0 {
            write!(f, ":{}", self.parameter)?;
        }
        match self.form {
            _ if self.name == MethodName::Window => Ok(()),
            HeadAggregation::Sum => f.write_str(":raw"),
            HeadAggregation::Softmax => Ok(()),
            HeadAggregation::GroupSoftmax => f.write_str(":group"),
        }
    }
}

impl Method {
    /// The rank of keys that are rebuilt while values alone are read.
    #[must_use]
    pub fn rank(&self) -> Option<usize> {
        (self.name == MethodName::Shadowkv && self.parameter > 0).then_some(self.parameter)
    }

    /// The name of the adapter it needs, if it needs one.
    #[must_use]
    pub fn adapter(&self) -> Option<String> {
        match self.name {
            MethodName::Kvswap => Some(format!("kvswap-{}", self.parameter)),
            MethodName::Infinigen => Some(format!("infinigen-{}", self.parameter)),
            MethodName::TransformCoded => Some(format!("tck-{}", self.parameter)),
            _ => None,
        }
    }

    /// The selector; none for the window, which scores nothing. Adapters come from the files in `adapters`, or from the store.
    ///
    /// # Errors
    /// An adapter that is not there or not readable.
    pub fn selector(
        &self,
        adapters: Option<&Path>,
        store: Option<(&Store, &KvLayout)>,
    ) -> Result<Option<Arc<dyn Selector>>> {
        let adapter = match self.adapter() {
            None => None,
            Some(name) => Some(Arc::new(match (adapters, store) {
                (Some(dir), _) => {
                    let file = adapter_file(dir, &name);
                    let bytes = std::fs::read(&file).with_context(|| {
                        format!("cannot read {}: kvrun calibrate --sigmas, --bits makes adapters", file.display())
                    })?;
                    from_safetensors(&bytes).with_context(|| format!("{}", file.display()))?
                }
                (None, Some((store, layout))) => {
                    store.adapter(layout, &name, None).map_err(engine_error).with_context(|| {
                        format!("{self} needs --adapters, or a store with them: make them with kvrun calibrate")
                    })?
                }
                (None, None) => bail!("{self} needs --adapters: make them with kvrun calibrate"),
            })),
        };
        Ok(Some(match (self.name, adapter) {
            (MethodName::Window, _) => return Ok(None),
            (MethodName::Kvswap, Some(adapter)) => Arc::new(KvSwap::new(adapter)),
            (MethodName::Infinigen, Some(adapter)) => Arc::new(InfiniGen::new(adapter)),
            (MethodName::TransformCoded, Some(adapter)) => Arc::new(TransformCoded::new(adapter)),
            (MethodName::Leoam, _) => Arc::new(LeoAm::default()),
            (MethodName::Shadowkv, _) => Arc::new(ShadowKv::default()),
            (MethodName::Signs, _) => Arc::new(SignBits),
            (MethodName::Oracle, _) => Arc::new(Oracle),
            _ => Arc::new(Quest),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_print() {
        for text in [
            "window",
            "minmax:raw",
            "kvswap:8",
            "kvswap:32:raw",
            "tck:32",
            "tck:64:group",
            "shadowkv",
            "shadowkv:20",
            "leoam",
            "oracle:raw",
        ] {
            assert_eq!(text.parse::<Method>().unwrap().to_string(), text);
        }
        assert_eq!("tck".parse::<Method>().unwrap().adapter().unwrap(), "tck-64");
        for bad in ["", "best", "tck:0", "minmax:3", "tck:x"] {
            assert!(bad.parse::<Method>().is_err(), "{bad}");
        }
        let error = "tck".parse::<Method>().unwrap().selector(None, None).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("kvrun calibrate"), "{error}");
    }
}
