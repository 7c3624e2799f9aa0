//! Arguments that the subcommands of `kvbench cluster` share.

use crate::support::args::{between, share};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use stratakv::retrieval::clusters::{Normalisation, PlantedOptions, PlantedTopics};

/// Arguments that say where layers come from.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// A file of `kvrun profile`. Without it, topics are planted.
    #[arg(long, value_name = "FILE")]
    pub(super) file: Option<PathBuf>,
    /// Layers of the file, separated by commas. Without it, all layers are measured.
    #[arg(long, value_delimiter = ',', requires = "file")]
    pub(super) layer: Vec<usize>,
    #[command(flatten)]
    pub(super) planted: PlantedArgs,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of the generator of planted topics.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Planted topics")]
pub(crate) struct PlantedArgs {
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Topics. Without it, there is one per 16 entries.
    #[arg(long)]
    pub(super) topics: Option<usize>,
    /// Share of the entries that have a topic. Without it, the subcommand chooses.
    #[arg(long, value_parser = share)]
    pub(super) covered: Option<f64>,
    /// Exponent of the sizes and the popularity of topics, from 0 (all equal) to 4.
    #[arg(long, default_value_t = 0.5)]
    pub(super) power: f64,
    /// Mean number of topics of an entry that has a topic, from 1 to 16.
    #[arg(long, default_value_t = 1.24)]
    pub(super) overlap: f64,
    /// Topics of a query. Without it, there is one per 512 entries.
    #[arg(long)]
    pub(super) topics_per_query: Option<usize>,
    /// Probability that a query activates a member of its topics.
    #[arg(long, default_value_t = 0.8, value_parser = share)]
    pub(super) recall: f64,
    /// Random entries that each query activates as well. Without it, there is one per 512 entries.
    #[arg(long)]
    pub(super) noise: Option<usize>,
    /// Probability, per query, that a member of a topic is exchanged for a random entry.
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub(super) drift: f64,
    /// Length of the noise of a key over that of its topic's offset.
    #[arg(long, default_value_t = 0.5)]
    pub(super) spread: f32,
}

impl PlantedArgs {
    /// Returns the generator of `entries` entries. `covered` is the share with a topic unless an argument says it.
    ///
    /// # Errors
    /// An argument is out of range.
    pub(super) fn topics(&self, entries: usize, covered: f64) -> Result<PlantedTopics> {
        self.topics_for(entries, entries, covered)
    }

    /// Returns the generator of `entries` entries, with as many topics as suit `scale` entries.
    ///
    /// # Errors
    /// An argument is out of range.
    pub(super) fn topics_for(&self, entries: usize, scale: usize, covered: f64) -> Result<PlantedTopics> {
        let per = |entries_each: usize| (scale / entries_each).max(1);
        Ok(PlantedTopics::new(PlantedOptions {
            entries,
            topics: self.topics.unwrap_or_else(|| per(16)),
            covered: self.covered.unwrap_or(covered),
            power: self.power,
            overlap: self.overlap,
            topics_per_query: self.topics_per_query.unwrap_or_else(|| per(512)),
            recall: self.recall,
            noise: self.noise.unwrap_or_else(|| per(512)),
            drift: self.drift,
            seed: self.seed,
        })?)
    }
}

/// The share of planted entries that have a topic, where a subcommand has no reason for another one.
pub(super) const COVERED: f64 = 0.7;

/// A normalisation of co-activation on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NormalisationArg {
    /// Equation 2 of SWARM.
    Frequency,
    /// The probability that a query activates the other entry, if it activates this one.
    Conditional,
    /// The share of the queries of either entry that both have.
    Jaccard,
}

impl NormalisationArg {
    /// Returns the name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Frequency => "frequency",
            Self::Conditional => "conditional",
            Self::Jaccard => "jaccard",
        }
    }
}

impl From<NormalisationArg> for Normalisation {
    fn from(argument: NormalisationArg) -> Self {
        match argument {
            NormalisationArg::Frequency => Self::Frequency,
            NormalisationArg::Conditional => Self::Conditional,
            NormalisationArg::Jaccard => Self::Jaccard,
        }
    }
}

/// A limit on the command line: a number, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClusterLimit(pub(super) Option<usize>);

/// Parses a limit.
///
/// # Errors
/// The text is neither `none` nor a number from 1 on.
pub(super) fn limit(text: &str) -> Result<ClusterLimit, String> {
    match text.parse() {
        _ if text == "none" => Ok(ClusterLimit(None)),
        Ok(limit) if limit > 0 => Ok(ClusterLimit(Some(limit))),
        _ => Err(format!("{text:?} is not a limit; give a number from 1 on, or none")),
    }
}

/// Returns a parser of numbers of entries, queries or dimensions.
pub(super) fn count() -> clap::builder::RangedI64ValueParser<u32> {
    between(1, 1 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_numbers_or_none() {
        assert_eq!((limit("none"), limit("16")), (Ok(ClusterLimit(None)), Ok(ClusterLimit(Some(16)))));
        for text in ["", "0", "-1", "1.5", "all"] {
            assert!(limit(text).unwrap_err().contains("none"), "{text}");
        }
    }
}
