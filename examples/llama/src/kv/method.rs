//! Policies by name: the one place of this crate that parses them, through the engine's registry of methods.
//!
//! A policy is `full`, `window`, or a method of the registry as `NAME[:NUMBER][:HEADS]`, such as `tck:64:group`. It
//! is given in two ways, and both end in a [`Policy`]:
//!
//! - `kvrun recall` and `kvrun generate` take options ([`PolicyArgs`]): `--policy kvswap --sigma 8 --score softmax`.
//! - `kvrun compare` takes a list of policies: `kvswap:8,kvswap:8:raw,window`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use stratakv::retrieval::{AdapterFit, ChosenUnit, HeadAggregation, MethodSpec, Selector, methods};
use stratakv::{KvLayout, Store};

use super::adapters::{adapter_file, from_safetensors};
use super::error::engine_error;

/// The fewest and the most bits per token and layer of `--policy auto`.
const AUTO_BITS_MIN: usize = 64;
const AUTO_BITS_MAX: usize = 512;

/// The rule that chooses which tokens a decode step attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// All tokens.
    Full,
    /// The first tokens and the newest ones, within the budget (StreamingLLM).
    Window,
    /// The groups that a method of the engine scores highest, within the budget.
    Method(MethodSpec),
}

impl FromStr for Policy {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "full" => Ok(Self::Full),
            "window" => Ok(Self::Window),
            _ => match text.parse() {
                Ok(spec) => Ok(Self::Method(spec)),
                Err(error) => bail!("{error}; full and window are policies too"),
            },
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window => f.write_str("window"),
            Self::Method(spec) => spec.fmt(f),
        }
    }
}

impl Policy {
    /// Returns the name without number and heads.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::Method(spec) => spec.method().name,
        }
    }

    /// Returns how the scores of query heads become one. A policy that does not say it takes the softmax.
    #[must_use]
    pub fn aggregation(&self) -> HeadAggregation {
        match self {
            Self::Method(spec) => spec.aggregation().unwrap_or(HeadAggregation::Softmax),
            Self::Full | Self::Window => HeadAggregation::Softmax,
        }
    }

    /// Returns whether a sequence selects by this policy with its stored bounds, so that it needs no selector.
    #[must_use]
    pub fn uses_stored_bounds(&self) -> bool {
        self.name() == "minmax" && self.aggregation() == HeadAggregation::Sum
    }

    /// Returns the method if its adapter can be fitted to a prompt: it chooses groups by an adapter.
    #[must_use]
    pub fn fitted_to_groups(&self) -> Option<MethodSpec> {
        match self {
            Self::Method(spec) if spec.method().unit == ChosenUnit::Groups && spec.adapter_name().is_some() => {
                Some(*spec)
            }
            _ => None,
        }
    }

    /// Returns whether the method chooses by clusters, which a sequence can store.
    #[must_use]
    pub fn has_clusters(&self) -> bool {
        let Self::Method(spec) = self else { return false };
        matches!(spec.method().unit, ChosenUnit::Clusters { .. } | ChosenUnit::Blocks)
    }

    /// Returns the rank of reconstructed keys, or `None` if keys are read.
    #[must_use]
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Method(spec) => spec.reconstruct_rank(),
            Self::Full | Self::Window => None,
        }
    }

    /// Returns the selector. It is `None` for `full` and `window`, which score nothing.
    ///
    /// An adapter is read from the directory `adapters` if there is one, and otherwise from the store.
    ///
    /// # Errors
    /// Fails if the adapter is missing or unreadable.
    pub fn selector(
        &self,
        adapters: Option<&Path>,
        store: Option<(&Store, &KvLayout)>,
    ) -> Result<Option<Arc<dyn Selector>>> {
        let Self::Method(spec) = self else { return Ok(None) };
        let adapter = match spec.adapter_name() {
            None => None,
            Some(name) => Some(Arc::new(match (adapters, store) {
                (Some(dir), _) => {
                    let file = adapter_file(dir, &name);
                    let bytes = std::fs::read(&file).with_context(|| {
                        format!("cannot read {}; kvrun calibrate with --sigmas or --bits makes it", file.display())
                    })?;
                    from_safetensors(&bytes).with_context(|| format!("{}", file.display()))?
                }
                (None, Some((store, layout))) => {
                    store.adapter(layout, &name, None).map_err(engine_error).with_context(|| {
                        format!("{self} needs --adapters or a store with the adapter; kvrun calibrate makes both")
                    })?
                }
                (None, None) => bail!("{self} needs --adapters; kvrun calibrate makes adapters"),
            })),
        };
        spec.selector(adapter).map(Some).map_err(engine_error)
    }
}

/// How the scores of query heads become one score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeadScore {
    /// The sum of the scores
    Raw,
    /// The sum of softmax weights over tokens, per head
    Softmax,
    /// The sum of softmax weights over groups, per head; each group counts with its best token
    GroupSoftmax,
}

/// The value of `--policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NamedPolicy {
    /// Transform-coded keys with the bits that suit the model.
    Auto,
    /// This policy.
    This(Policy),
}

impl FromStr for NamedPolicy {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::This) }
    }
}

/// Returns the policy of `--policy auto`: transform-coded keys with a bit for every key dimension.
fn auto_policy(key_dimensions: usize) -> Result<Policy> {
    let bits = key_dimensions.next_multiple_of(8).clamp(AUTO_BITS_MIN, AUTO_BITS_MAX);
    format!("tck:{bits}").parse()
}

/// The options that choose a policy.
#[derive(Clone, Debug, Args)]
pub struct PolicyArgs {
    /// Which tokens a decode step attends to; the policies are listed below [default: auto for generate and chat,
    /// otherwise minmax]
    #[arg(long, value_name = "POLICY")]
    policy: Option<NamedPolicy>,
    /// Rank ratio of kvswap and infinigen: joint key dimensions over the rank, KVSwap's sigma [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    sigma: Option<u32>,
    /// Bits per token and layer, for tck [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(8..=2048))]
    bits: Option<u32>,
    /// Rank of reconstructed keys, for shadowkv: steps then read values only; by default they read keys and values
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rank: Option<u32>,
    /// How the scores of query heads become one [default: raw for minmax, otherwise softmax]
    #[arg(long, value_enum)]
    score: Option<HeadScore>,
}

impl PolicyArgs {
    /// Returns the policy with the number and the score of the options.
    ///
    /// `key_dimensions` is the joint key dimensions of the model's widest layer. Commands that fit adapters to their
    /// prompt give it. Without it, `minmax` is the default and `auto` is refused.
    ///
    /// # Errors
    /// Fails if the registry refuses the number, or if the command has no policy `auto`.
    pub fn policy(&self, key_dimensions: Option<usize>) -> Result<Policy> {
        let policy = match (self.policy, key_dimensions) {
            (Some(NamedPolicy::This(policy)), _) => policy,
            (_, Some(dimensions)) => auto_policy(dimensions)?,
            (None, None) => "minmax".parse()?,
            (Some(NamedPolicy::Auto), None) => {
                bail!("--policy auto fits an adapter to a prompt, which kvrun generate and kvrun chat can do")
            }
        };
        let Policy::Method(mut spec) = policy else { return Ok(policy) };
        let number = match spec.method().adapter {
            AdapterFit::LowRank | AdapterFit::PerHead => self.sigma,
            AdapterFit::Codes => self.bits,
            AdapterFit::None if spec.method().reconstructs_keys => self.rank,
            AdapterFit::None => None,
        };
        if let Some(number) = number {
            spec = spec.with_parameter(number as usize).map_err(engine_error)?;
        }
        let score = match (self.score, spec.aggregation()) {
            (Some(HeadScore::Raw), _) => Some(HeadAggregation::Sum),
            (Some(HeadScore::Softmax), _) => Some(HeadAggregation::Softmax),
            (Some(HeadScore::GroupSoftmax), _) => Some(HeadAggregation::GroupSoftmax),
            (None, Some(named)) => Some(named),
            (None, None) => (policy.name() == "minmax").then_some(HeadAggregation::Sum),
        };
        Ok(Policy::Method(score.map_or(spec, |score| spec.with_aggregation(score))))
    }
}

/// The policies of a plain `kvrun compare`.
pub const DEFAULT_POLICIES: &str = "window,minmax:raw,minmax,leoam:raw,leoam,shadowkv,kvswap:8:raw,kvswap:8,kvswap:16,\
kvswap:32,infinigen:8,tck:16,tck:32,tck:64,signs,oracle:raw,oracle";

/// Parses a policy for a comparison. Full attention is always compared and is not one of the policies.
///
/// # Errors
/// Fails if the name is unknown, or if it is `full`.
pub fn parse_compared(text: &str) -> Result<Policy> {
    let policy = text.parse()?;
    ensure!(policy != Policy::Full, "{text:?} is always compared; leave it out");
    Ok(policy)
}

/// Parses a policy that makes clusters or blocks of tokens.
///
/// # Errors
/// Fails if the name is unknown, or if the policy chooses groups or single tokens.
pub fn parse_clustered(text: &str) -> Result<Policy> {
    let makes_clusters = |unit: ChosenUnit| matches!(unit, ChosenUnit::Clusters { .. } | ChosenUnit::Blocks);
    let policy: Policy = text.parse()?;
    let unit = if let Policy::Method(spec) = policy { spec.method().unit } else { ChosenUnit::Groups };
    let known: Vec<&str> = methods().iter().filter(|m| makes_clusters(m.unit)).map(|m| m.name).collect();
    ensure!(makes_clusters(unit), "{text:?} makes no clusters; use one of {}", known.join(", "));
    Ok(policy)
}

/// Returns the list of policies for `--help`.
#[must_use]
pub fn policies_help() -> String {
    let mut help = "Policies, written NAME, NAME:NUMBER or NAME:NUMBER:HEADS with HEADS raw, softmax or group.\n\
                    Methods of clusters also take members (score clusters by codes), heads and joint, such as\n\
                    dynakv:16:members:joint. A number behind members is the bits of the codes, by default 64.\n\
                    \x20 auto       transform-coded keys, in generate and chat; the adapter comes from the\n\
                    \x20            store or is fitted to the prompt; short prompts take sign bits\n\
                    \x20 full       all tokens; it ignores the budget\n\
                    \x20 window     the first four tokens and the newest ones (StreamingLLM)\n"
        .to_owned();
    for method in methods() {
        let needs = if method.adapter == AdapterFit::None { "" } else { "; needs an adapter (kvrun calibrate)" };
        help += &format!("  {:<10} {}{needs}\n", method.name, method.about);
    }
    help
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn policies_parse_and_print() {
        for text in ["full", "window", "minmax:raw", "kvswap:8", "tck:64:group", "shadowkv", "shadowkv:20", "leoam"] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        assert!(DEFAULT_POLICIES.split(',').all(|text| parse_compared(text).unwrap().to_string() == text));
        assert!(parse_compared("full").unwrap_err().to_string().contains("always compared"));
        for bad in ["", "best", "tck:0", "minmax:3", "tck:x", "window:3", "full:raw"] {
            assert!(bad.parse::<Policy>().is_err(), "{bad}");
        }
        for text in ["dynakv:8:members", "swarm:8", "kmeans:32:raw", "clusterkv:16:joint", "infllm:128"] {
            assert_eq!(parse_clustered(text).unwrap().to_string(), text);
        }
        for bad in ["full", "window", "tck:64", "pqcache:64", "tokens"] {
            let error = parse_clustered(bad).unwrap_err().to_string();
            assert!(error.contains("makes no clusters; use one of balanced") && error.contains("infllm"), "{error}");
        }
        let error = "tck".parse::<Policy>().unwrap().selector(None, None).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("tck:64 needs --adapters") && error.contains("kvrun calibrate"), "{error}");
    }

    #[test]
    fn options_and_names_give_the_same_policies() {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            args: PolicyArgs,
        }
        for (line, text) in [
            ("", "minmax:raw"),
            ("--policy minmax --score softmax", "minmax:softmax"),
            ("--policy minmax:softmax", "minmax:softmax"),
            ("--policy full --score raw", "full"),
            ("--policy window", "window"),
            ("--policy kvswap", "kvswap:8"),
            ("--policy kvswap --sigma 16 --score raw", "kvswap:16:raw"),
            ("--policy kvswap:16:raw", "kvswap:16:raw"),
            ("--policy infinigen --sigma 4", "infinigen:4"),
            ("--policy tck --bits 32 --sigma 4", "tck:32"),
            ("--policy shadowkv", "shadowkv"),
            ("--policy shadowkv --rank 20 --score group-softmax", "shadowkv:20:group"),
            ("--policy signs --rank 20", "signs"),
        ] {
            let line = Line::try_parse_from(std::iter::once("kvrun").chain(line.split_whitespace())).unwrap();
            assert_eq!(line.args.policy(None).unwrap(), text.parse().unwrap(), "{text}");
        }
        let parse = |line: &str| Line::try_parse_from(std::iter::once("kvrun").chain(line.split_whitespace())).unwrap();
        for (line, dimensions, text) in [
            ("", 16, "tck:64"),
            ("", 128, "tck:128"),
            ("--policy auto", 510, "tck:512"),
            ("--policy auto", 2048, "tck:512"),
            ("--bits 32", 128, "tck:32"),
            ("--policy minmax", 128, "minmax:raw"),
        ] {
            assert_eq!(parse(line).args.policy(Some(dimensions)).unwrap(), text.parse().unwrap(), "{line}");
        }
        assert!(parse("--policy auto").args.policy(None).unwrap_err().to_string().contains("kvrun generate"));
        let raw: Policy = "minmax:raw".parse().unwrap();
        assert!(raw.uses_stored_bounds() && !"minmax".parse::<Policy>().unwrap().uses_stored_bounds());
    }

    #[test]
    fn help_lists_every_method() {
        let help = policies_help();
        for method in methods() {
            assert!(help.contains(&format!("\n  {} ", method.name)), "{help}");
        }
    }
}
