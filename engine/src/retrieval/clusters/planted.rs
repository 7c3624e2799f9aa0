//! Planted co-activation: queries over topics that are known, so that every figure can be repeated without a model.
//!
//! 1. The sizes of topics follow a power law: topic `t` has a share in proportion to `(t + 1)^-power`.
//! 2. The covered entries are dealt to topics in random order. Entries of a topic are spread over the sequence.
//! 3. An overlap of 1.24 makes 24 % more memberships: random covered entries join random topics as well.
//! 4. A query picks topics, the first ones more often by the same power, and activates each of their members with
//!    probability `recall`. It activates random entries beside them: the noise.
//! 5. Behind each query, each member of a topic is exchanged for a random entry with probability `drift`.
//!
//! Invariant: the same options give the same topics, queries and keys.

use super::random::SeededRandom;
use crate::error::{Error, ErrorKind, Result};

/// The topics and queries that are planted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlantedOptions {
    /// The entries of the layer.
    pub entries: usize,
    /// The number of topics, from 1 to the number of entries.
    pub topics: usize,
    /// The share of the entries that some topic has, from 0 to 1.
    pub covered: f64,
    /// The exponent of the sizes and the popularity of topics, from 0 (all equal) to 4.
    pub power: f64,
    /// The mean number of topics of a covered entry, from 1 to 16.
    pub overlap: f64,
    /// The topics of a query.
    pub topics_per_query: usize,
    /// The probability that a query activates a member of its topics, from 0 to 1.
    pub recall: f64,
    /// Random entries that each query activates as well.
    pub noise: usize,
    /// The probability, per query, that a member of a topic is exchanged, from 0 to 1.
    pub drift: f64,
    /// The seed of all random choices.
    pub seed: u64,
}

impl Default for PlantedOptions {
    fn default() -> Self {
        Self {
            entries: 32768,
            topics: 2048,
            covered: 0.7,
            power: 0.5,
            overlap: 1.24,
            topics_per_query: 64,
            recall: 0.8,
            noise: 64,
            drift: 0.0,
            seed: 1,
        }
    }
}

/// A generator of queries over planted topics.
#[derive(Clone, Debug)]
pub struct PlantedTopics {
    options: PlantedOptions,
    topics: Vec<Vec<u32>>,
    random: SeededRandom,
}

impl PlantedTopics {
    /// Plants the topics.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: an option is out of its range or not finite.
    pub fn new(options: PlantedOptions) -> Result<Self> {
        check(&options)?;
        let mut random = SeededRandom::new(options.seed);
        let mut order: Vec<u32> = (0..options.entries as u32).collect();
        random.shuffle(&mut order);
        order.truncate((options.covered * options.entries as f64) as usize);
        let shares: Vec<f64> = (1..=options.topics).map(|topic| (topic as f64).powf(-options.power)).collect();
        let sum: f64 = shares.iter().sum();
        let (mut share, mut start) = (0.0, 0);
        let mut topics = Vec::with_capacity(options.topics);
        for each in &shares {
            share += each / sum;
            let end = ((share * order.len() as f64).round() as usize).clamp(start, order.len());
            topics.push(order[start..end].to_vec());
            start = end;
        }
        let extra = ((options.overlap - 1.0) * order.len() as f64).round() as usize;
        for _ in 0..extra {
            let topic = random.below(options.topics);
            let entry = order[random.below(order.len())];
            if !topics[topic].contains(&entry) {
                topics[topic].push(entry);
            }
        }
        Ok(Self { options, topics, random })
    }

    /// Returns the entries of each topic at this moment, in no order.
    #[must_use]
    pub fn topics(&self) -> &[Vec<u32>] {
        &self.topics
    }

    /// Returns the entries that the next query activates, in rising order.
    pub fn next_query(&mut self) -> Vec<u32> {
        let options = self.options;
        let mut activated = Vec::new();
        for _ in 0..options.topics_per_query {
            let place = self.random.unit().powf(1.0 + options.power);
            let topic = (place * options.topics as f64) as usize;
            for entry in &self.topics[topic] {
                if self.random.unit() < options.recall {
                    activated.push(*entry);
                }
            }
        }
        activated.extend((0..options.noise).map(|_| self.random.below(options.entries) as u32));
        activated.sort_unstable();
        activated.dedup();
        self.drift();
        activated
    }

    /// Returns keys `[entries, dim]`: the centre of the entry's first topic, plus noise of `spread` times the length of
    /// a random key.
    ///
    /// Sixteen topics make a family. The centre of a topic is that of its family, plus an offset of the same length, as
    /// keys of a model have coarse and fine structure. An entry without a topic is a topic of its own.
    #[must_use]
    pub fn keys(&self, dim: usize, spread: f32) -> Vec<f32> {
        let (entries, seed) = (self.options.entries, self.options.seed);
        let mut keys = vec![0.0; entries * dim];
        let mut topic_of = vec![None; entries];
        for (topic, members) in self.topics.iter().enumerate().rev() {
            members.iter().for_each(|entry| topic_of[*entry as usize] = Some(topic));
        }
        for (entry, (key, topic)) in keys.chunks_exact_mut(dim.max(1)).zip(topic_of).enumerate() {
            let topic = topic.unwrap_or(self.options.topics + entry) as u64;
            let mut of_topic = SeededRandom::of_part(seed, 2 * topic);
            let mut of_family = SeededRandom::of_part(seed, 2 * (topic / 16) + 1);
            let mut of_entry = SeededRandom::of_part(!seed, entry as u64);
            for x in key {
                *x = (of_family.normal() + of_topic.normal()) as f32 + spread * of_entry.normal() as f32;
            }
        }
        keys
    }

    fn drift(&mut self) {
        if self.options.drift == 0.0 {
            return;
        }
        for topic in &mut self.topics {
            for at in 0..topic.len() {
                if self.random.unit() < self.options.drift {
                    let entry = self.random.below(self.options.entries) as u32;
                    if !topic.contains(&entry) {
                        topic[at] = entry;
                    }
                }
            }
        }
    }
}

fn check(options: &PlantedOptions) -> Result<()> {
    let ranges = [
        ("covered", options.covered, 0.0, 1.0),
        ("power", options.power, 0.0, 4.0),
        ("overlap", options.overlap, 1.0, 16.0),
        ("recall", options.recall, 0.0, 1.0),
        ("drift", options.drift, 0.0, 1.0),
    ];
    let refused = |what: String| Err(Error::new(ErrorKind::InvalidArgument, format!("planted topics: {what}")));
    for (name, value, least, most) in ranges {
        if !(value >= least && value <= most) {
            return refused(format!("{name} is {value}, not from {least} to {most}"));
        }
    }
    if options.topics == 0 || options.topics > options.entries || options.entries > 1 << 30 {
        return refused(format!("{} topics of {} entries", options.topics, options.entries));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: PlantedOptions = PlantedOptions {
        entries: 2000,
        topics: 60,
        covered: 0.6,
        power: 0.8,
        overlap: 1.3,
        topics_per_query: 4,
        recall: 1.0,
        noise: 0,
        drift: 0.0,
        seed: 3,
    };

    #[test]
    fn topics_have_the_sizes_and_the_overlap_asked_for() {
        let planted = PlantedTopics::new(SMALL).unwrap();
        let stored: usize = planted.topics().iter().map(Vec::len).sum();
        let distinct: std::collections::BTreeSet<u32> = planted.topics().iter().flatten().copied().collect();
        assert_eq!(distinct.len(), 1200);
        assert!((stored as f64 / 1200.0 - 1.3).abs() < 0.03, "{stored}");
        assert!(planted.topics()[0].len() > 3 * planted.topics()[59].len());
    }

    #[test]
    fn queries_activate_whole_topics_and_repeat_for_a_seed() {
        let (mut planted, mut again) = (PlantedTopics::new(SMALL).unwrap(), PlantedTopics::new(SMALL).unwrap());
        for _ in 0..20 {
            let query = planted.next_query();
            assert!(query.is_sorted_by(|a, b| a < b));
            let whole = planted.topics().iter().filter(|topic| topic.iter().all(|e| query.binary_search(e).is_ok()));
            assert!((1..=8).contains(&whole.count()));
            assert_eq!(query, again.next_query());
        }
        assert_eq!(planted.keys(8, 0.1), again.keys(8, 0.1));
        assert!(planted.keys(0, 0.1).is_empty());
    }

    #[test]
    fn drift_exchanges_members() {
        let mut planted = PlantedTopics::new(PlantedOptions { drift: 0.05, ..SMALL }).unwrap();
        let before = planted.topics().to_vec();
        (0..10).for_each(|_| drop(planted.next_query()));
        let kept = before.iter().zip(planted.topics()).map(|(a, b)| a.iter().filter(|e| b.contains(e)).count());
        let (kept, all) = (kept.sum::<usize>(), before.iter().map(Vec::len).sum::<usize>());
        let share = kept as f64 / all as f64;
        assert!((0.5..0.7).contains(&share), "{share} of the members are left, 0.95^10 is 0.6");
    }

    #[test]
    fn options_out_of_range_are_refused() {
        let wrong = [
            PlantedOptions { covered: 1.1, ..SMALL },
            PlantedOptions { power: f64::NAN, ..SMALL },
            PlantedOptions { overlap: 0.5, ..SMALL },
            PlantedOptions { recall: -0.1, ..SMALL },
            PlantedOptions { drift: f64::INFINITY, ..SMALL },
            PlantedOptions { topics: 0, ..SMALL },
            PlantedOptions { topics: 2001, ..SMALL },
        ];
        for options in wrong {
            assert_eq!(PlantedTopics::new(options).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        let nothing = PlantedTopics::new(PlantedOptions { covered: 0.0, topics_per_query: 2, ..SMALL });
        assert!(nothing.unwrap().next_query().is_empty());
    }
}
