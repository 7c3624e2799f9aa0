//! [`PlantedSteps`]: topics as clusters, and the topics that each step chooses.
//!
//! - Neighbouring topics form a family. A step picks families, popular ones more often, and chooses them whole.
//! - Entries of several topics have topics of one family, so that clusters which are chosen together overlap.

use crate::cluster::stripes::args::StripeArgs;
use anyhow::Result;
use std::collections::BTreeSet;

/// The share of the entries that a step chooses unless an argument says how many topics.
const CHOSEN: f64 = 1.0 / 13.0;

/// Clusters, and the clusters that each step chooses.
#[derive(Clone, Debug)]
pub(super) struct PlantedSteps {
    /// The tokens of each cluster.
    pub(super) clusters: Vec<Vec<u32>>,
    /// The clusters of each step, each once.
    pub(super) steps: Vec<Vec<usize>>,
}

impl PlantedSteps {
    /// Plants topics and steps.
    ///
    /// # Errors
    /// An argument is out of range.
    pub(super) fn new(args: &StripeArgs) -> Result<Self> {
        let entries = args.entries as usize;
        let alone = crate::cluster::args::PlantedArgs { overlap: 1.0, ..args.planted };
        let mut clusters = alone.topics(entries, 1.0)?.topics().to_vec();
        clusters.retain(|members| !members.is_empty());
        let family = args.family as usize;
        let mut random = fastrand::Rng::with_seed(args.planted.seed);
        let extra = ((args.planted.overlap - 1.0) * entries as f64).round() as usize;
        let home: Vec<(usize, u32)> =
            clusters.iter().enumerate().flat_map(|(topic, own)| own.iter().map(move |token| (topic, *token))).collect();
        let (mut made, mut tries) = (0, 0);
        while made < extra && tries < extra * 64 {
            tries += 1;
            let (topic, token) = home[random.usize(..home.len())];
            let first = if family == 1 { 0 } else { topic / family * family };
            let end = if family == 1 { clusters.len() } else { clusters.len().min(first + family) };
            let other = random.usize(first..end);
            if !clusters[other].contains(&token) {
                clusters[other].push(token);
                made += 1;
            }
        }
        let families = clusters.len().div_ceil(family);
        let wanted = (entries as f64 * CHOSEN) as usize;
        let mut steps = Vec::new();
        for _ in 0..args.steps {
            let (mut chosen, mut held) = (BTreeSet::new(), 0);
            for _ in 0..families * 4 {
                let is_full = match args.step_topics {
                    Some(most) => chosen.len() >= most as usize,
                    None => held >= wanted,
                };
                if is_full {
                    break;
                }
                let pick = (random.f64().powf(1.0 + args.planted.power) * families as f64) as usize;
                for (topic, members) in clusters.iter().enumerate().skip(pick * family).take(family) {
                    held += if chosen.insert(topic) { members.len() } else { 0 };
                }
            }
            steps.push(chosen.into_iter().collect());
        }
        Ok(Self { clusters, steps })
    }

    /// Returns the number of tokens if every member of every cluster is a token of its own.
    pub(super) fn memberships(&self) -> usize {
        self.clusters.iter().map(Vec::len).sum()
    }

    /// Returns the same steps over clusters in which each member is a token of its own, so that nothing is shared.
    pub(super) fn apart(&self) -> Self {
        let mut next = 0..;
        let clusters = self.clusters.iter().map(|own| next.by_ref().take(own.len()).collect()).collect();
        Self { clusters, steps: self.steps.clone() }
    }

    /// Returns the entries of each step, each once, in the order of its clusters.
    pub(super) fn entries(&self) -> Vec<Vec<u32>> {
        let of_step = |step: &Vec<usize>| {
            let mut seen = BTreeSet::new();
            step.iter().flat_map(|at| &self.clusters[*at]).copied().filter(|token| seen.insert(*token)).collect()
        };
        self.steps.iter().map(of_step).collect()
    }

    /// Returns the members of [`Self::apart`] that give the entries of each step: each entry from the first chosen
    /// cluster that holds it.
    pub(super) fn first_members(&self) -> Vec<Vec<u32>> {
        let apart = self.apart();
        let of_step = |step: &Vec<usize>| {
            let mut seen = BTreeSet::new();
            let members = step.iter().flat_map(|at| self.clusters[*at].iter().zip(&apart.clusters[*at]));
            members.filter(|(token, _)| seen.insert(**token)).map(|(_, member)| *member).collect()
        };
        self.steps.iter().map(of_step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        own: StripeArgs,
    }

    #[test]
    fn steps_choose_whole_families_that_overlap_as_asked() {
        let line = Line::parse_from(["kvbench", "--entries", "2000", "--overlap", "1.5", "--steps", "20"]);
        let planted = PlantedSteps::new(&line.own).unwrap();
        assert_eq!(planted.memberships(), 3000);
        let all: BTreeSet<u32> = planted.clusters.iter().flatten().copied().collect();
        assert_eq!(all.len(), 2000);
        let (chosen, distinct) = (planted.steps.iter(), planted.entries());
        let chosen: usize = chosen.flatten().map(|at| planted.clusters[*at].len()).sum();
        let distinct: usize = distinct.iter().map(Vec::len).sum();
        assert!((chosen as f64 / distinct as f64 - 1.5).abs() < 0.1, "{chosen} {distinct}");
        let apart = planted.apart();
        assert_eq!(apart.clusters.concat(), (0..3000).collect::<Vec<u32>>());
        assert_eq!(planted.first_members().iter().map(Vec::len).sum::<usize>(), distinct);
    }
}
