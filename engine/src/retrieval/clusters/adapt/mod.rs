//! Clusters that adapt while the context grows: DynaKV's Algorithm 1, with the delayed split.
//!
//! Source: DynaKV, section 4.2, Algorithm 1. The state machine does no I/O and keeps no keys of members. The caller
//! says which clusters are in memory, and gets told what to load and split.
//! 1. A step begins with the clusters that were retrieved, which are in memory ([`AdaptiveClusters::begin_step`]).
//! 2. A new entry belongs to the nearest centroid. It joins if the variance stays at most the threshold.
//! 3. Otherwise the cluster is split at once if it is in memory. If not, the cluster is flagged and the entry waits in
//!    its buffer. A flagged cluster buffers every further entry.
//! 4. A flagged cluster that is retrieved is split together with its buffer.
//! 5. If the buffers hold `buffer_limit` entries, the cluster with the most of them is loaded and split. The caller may
//!    request this split earlier ([`AdaptiveClusters::request_split`]).
//! 6. A split is 2-means. Halves are split further while they are over a limit and have at least `min_split` entries.
//!    The larger half keeps the number of the cluster.
//!
//! Beyond the paper, a cluster has at most `max_size` entries, because a dense cluster never passes the threshold.
//!
//! Invariants:
//! - Each entry is a member of one cluster or waits in one buffer.
//! - Centroid and variance describe the members, without the buffer.
//! - A split that is due comes before the next entry. The result depends on the order of entries and steps alone.

mod split_requests;
mod state;

use super::centroids::{CentroidPrecision, Centroids};
use super::cluster_stats::ClusterStats;
use super::key_matrix::check_keys;
use super::kmeans::two_means;
use super::lists::ClusterLists;
use super::member_lists::MemberLists;
use super::random::SeededRandom;
use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::byte_rows::ByteRows;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Limits of adaptive clusters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptOptions {
    /// The variance above which a cluster is split. See [`AdaptiveClusters::quantile_of_variances`].
    pub threshold: f64,
    /// The most entries of a cluster. Four times the mean size is a good value.
    pub max_size: usize,
    /// The entries in buffers at which a cluster is loaded (`B_max`). 0 buffers nothing longer than a step.
    pub buffer_limit: usize,
    /// The fewest entries of a cluster that is split.
    pub min_split: usize,
    /// The seed of 2-means.
    pub seed: u64,
    /// The elements in which centroids are kept. Bytes round each time that a centroid moves.
    pub precision: CentroidPrecision,
}

impl Default for AdaptOptions {
    fn default() -> Self {
        Self {
            threshold: f64::MAX,
            max_size: 64,
            buffer_limit: 16,
            min_split: 4,
            seed: 0,
            precision: CentroidPrecision::Single,
        }
    }
}

/// The outcome of a new entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adaptation {
    /// The entry is a member of this cluster. It is to be written there.
    Joined(u32),
    /// The entry waits in the buffer of this cluster.
    Buffered(u32),
    /// This cluster is in memory and is to be split, before the next entry.
    SplitDue(u32),
}

/// A cluster to split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRequest {
    /// The cluster.
    pub cluster: u32,
    /// True if the cluster is not in memory and has to be loaded first.
    pub must_load: bool,
}

/// The clusters of one layer and KV head, which adapt to new entries.
#[derive(Clone, Debug)]
pub struct AdaptiveClusters {
    dim: usize,
    options: AdaptOptions,
    centroids: Centroids,
    stats: Vec<ClusterStats>,
    members: MemberLists,
    /// True if a cluster may be without a member, which happens after a cut.
    may_be_empty: bool,
    /// The entries that wait for the split of each flagged cluster, at least one for each.
    buffers: BTreeMap<u32, Vec<u32>>,
    in_memory: Vec<bool>,
    /// The clusters of this step's retrieval that are not yet looked at.
    retrieved: Vec<u32>,
    due: Option<u32>,
    splits: u64,
}

/// A part of the entries that a split divides.
struct Part {
    /// The entries, as rows of the keys of the split.
    rows: Vec<u32>,
    stats: ClusterStats,
    centroid: Vec<f32>,
}

/// Lists of clusters that are full grow by this part of themselves.
const GROWTH: usize = 16;
/// Bytes of an entry in a buffer, with its share of the tree.
const BUFFERED_BYTES: usize = 128;

impl AdaptiveClusters {
    /// Returns the clusters of an initial partition of keys `[entries, dim]`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: an option is out of range, there is no cluster, a cluster is empty, or a member
    /// has no key. The keys are not whole, finite and at most 1e15.
    pub fn new(keys: &[f32], dim: usize, initial: &ClusterLists, options: AdaptOptions) -> Result<Self> {
        let entries = check_keys("adaptive clusters", keys, dim)?;
        check(&options)?;
        if initial.is_empty() || initial.iter().any(<[u32]>::is_empty) {
            return refused(format!("{} clusters, of which none may be empty", initial.len()));
        }
        if let Some(entry) = initial.iter().flatten().find(|entry| **entry as usize >= entries) {
            return refused(format!("entry {entry} is a member, but there are keys of {entries} entries"));
        }
        let mut stats = vec![ClusterStats::default(); initial.len()];
        let (mut centroids, mut centroid) =
            (Centroids::with_capacity(dim, initial.len(), options.precision), vec![0.0; dim]);
        for (members, stats) in initial.iter().zip(&mut stats) {
            centroid.fill(0.0);
            members.iter().for_each(|entry| stats.add(&mut centroid, &keys[*entry as usize * dim..][..dim]));
            centroids.push(&centroid);
        }
        Ok(Self {
            dim,
            options,
            centroids,
            stats,
            members: MemberLists::new(initial),
            may_be_empty: false,
            buffers: BTreeMap::new(),
            in_memory: vec![false; initial.len()],
            retrieved: Vec::new(),
            due: None,
            splits: 0,
        })
    }

    /// Returns the most bytes of the state of this many clusters and entries, right after it was made.
    #[must_use]
    pub fn bytes_for(clusters: usize, dim: usize, entries: usize, precision: CentroidPrecision) -> usize {
        Centroids::bytes_for(clusters, dim, precision)
            .saturating_add(clusters.saturating_mul(Self::cluster_bytes()))
            .saturating_add(MemberLists::bytes_for(clusters, entries))
    }

    /// Returns the bytes of a cluster without its centroid and its members.
    fn cluster_bytes() -> usize {
        // A retrieved cluster is listed as well.
        size_of::<ClusterStats>() + size_of::<bool>() + size_of::<u32>()
    }

    /// Returns the bytes that it takes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.centroids.bytes()
            + self.stats.capacity() * size_of::<ClusterStats>()
            + self.members.bytes()
            + self.in_memory.capacity()
            + self.retrieved.capacity() * size_of::<u32>()
            + self.buffered() * BUFFERED_BYTES
    }

    /// Returns the most bytes that it takes once it has `clusters` clusters, `more` entries more than now, and no
    /// expected keys.
    #[must_use]
    pub fn bytes_once(&self, clusters: usize, more: usize) -> usize {
        // Lists of clusters grow by a sixteenth.
        let room = if clusters > self.len() { clusters + clusters / GROWTH + 1 } else { clusters };
        let held = self.stats.capacity().max(self.in_memory.capacity());
        let retrieved = clusters.max(self.retrieved.capacity()) * size_of::<u32>();
        // A split makes entries that wait in a buffer members.
        let members = self.members.bytes_once(clusters, more + self.buffered(), self.options.max_size);
        let buffers = (self.buffered() + more.min(self.options.buffer_limit.max(1))) * BUFFERED_BYTES;
        self.centroids.bytes_once(clusters) + room.max(held) * Self::cluster_bytes() + members + retrieved + buffers
    }

    /// Returns the most bytes that expected keys take ([`Self::expect`]).
    #[must_use]
    pub fn expected_bytes(clusters: usize, dim: usize) -> usize {
        Centroids::expected_bytes(clusters, dim)
    }

    /// Returns a quantile of the variances of the clusters: the threshold of a KV head.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the quantile is not from 0 to 1, NaN included.
    pub fn quantile_of_variances(&self, quantile: f64) -> Result<f64> {
        if !(0.0..=1.0).contains(&quantile) {
            return refused(format!("{quantile} is not a quantile from 0 to 1"));
        }
        let mut variances: Vec<f64> = self.stats.iter().map(ClusterStats::variance).collect();
        variances.sort_unstable_by(f64::total_cmp);
        Ok(variances[(quantile * (variances.len() - 1) as f64).round() as usize])
    }

    /// Sets the variance above which clusters are split from now on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the threshold is negative or not finite. Nothing changed.
    pub fn set_threshold(&mut self, threshold: f64) -> Result<()> {
        let options = AdaptOptions { threshold, ..self.options };
        check(&options)?;
        self.options = options;
        Ok(())
    }

    /// Begins a step: `retrieved` are the clusters that are in memory, and no others.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster, or a split is due. Nothing changed.
    pub fn begin_step(&mut self, retrieved: &[u32]) -> Result<()> {
        if let Some(cluster) = retrieved.iter().find(|cluster| **cluster as usize >= self.len()) {
            return refused(format!("cluster {cluster} was retrieved, but there are {}", self.len()));
        }
        self.check_nothing_due()?;
        self.in_memory.fill(false);
        retrieved.iter().for_each(|cluster| self.in_memory[*cluster as usize] = true);
        self.retrieved.clear();
        self.retrieved.reserve_exact(retrieved.len());
        self.retrieved.extend(retrieved.iter().rev());
        Ok(())
    }

    /// Compares the next keys `[count, dim]` with all clusters at once, which reads each centroid once for all of them.
    /// Appending them in this order then costs less. Nothing else changes. Only the first sixteen keys count.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the keys are not whole, finite and at most 1e15. Nothing changed.
    pub fn expect(&mut self, keys: &[f32]) -> Result<()> {
        check_keys("adaptive clusters", keys, self.dim)?;
        self.centroids.expect(keys);
        Ok(())
    }

    /// Forgets the expected keys, and gives their memory back.
    pub fn forget_expected(&mut self) {
        self.centroids.forget_expected();
    }

    /// Takes in a new entry and its key.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the key is not `[dim]`, finite and at most 1e15, or a split is due. Nothing
    /// changed.
    pub fn append(&mut self, entry: u32, key: &[f32]) -> Result<Adaptation> {
        if key.len() != self.dim {
            return refused(format!("a key of {} elements, not {}", key.len(), self.dim));
        }
        check_keys("adaptive clusters", key, self.dim)?;
        self.check_nothing_due()?;
        let cluster = self.centroids.nearest(key);
        let mut centroid = vec![0.0; self.dim];
        self.centroids.read(cluster, &mut centroid);
        let stats = &mut self.stats[cluster];
        let has_room = (stats.size() as usize) < self.options.max_size;
        let is_flagged = self.buffers.contains_key(&(cluster as u32));
        if !is_flagged && has_room && stats.add_within(self.options.threshold, &mut centroid, key) {
            self.centroids.shift(cluster, &centroid);
            self.members.push(cluster, entry);
            return Ok(Adaptation::Joined(cluster as u32));
        }
        self.buffers.entry(cluster as u32).or_default().push(entry);
        if self.in_memory[cluster] {
            self.due = Some(cluster as u32);
            return Ok(Adaptation::SplitDue(cluster as u32));
        }
        Ok(Adaptation::Buffered(cluster as u32))
    }

    /// Returns the entries of a cluster that a split divides: the members, then its buffer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster.
    pub fn entries_to_split(&self, cluster: u32) -> Result<Vec<u32>> {
        Ok([self.members(cluster)?, self.buffer(cluster)?].concat())
    }

    /// Splits a requested cluster, which is then in memory. `keys` belong to its [`Self::entries_to_split`], in order.
    ///
    /// Returns the clusters that hold its entries now, all of which are to be written. The first is the cluster itself.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no split of this cluster is due, or the keys are of other entries. Nothing
    /// changed.
    pub fn split(&mut self, cluster: u32, keys: &[f32]) -> Result<Vec<u32>> {
        if self.due != Some(cluster) {
            return refused(format!("a split of cluster {cluster} was not requested"));
        }
        let entries = self.entries_to_split(cluster)?;
        if check_keys("adaptive clusters", keys, self.dim)? != entries.len() {
            return refused(format!("{} elements of the keys of {} entries", keys.len(), entries.len()));
        }
        let mut parts = self.divide(keys, entries.len());
        // The larger part keeps the number. Of equal parts, the one with the oldest entry does.
        let order = |part: &Part| (part.rows.len(), std::cmp::Reverse(part.rows[0]));
        let largest = parts.iter().enumerate().max_by_key(|(_, part)| order(part));
        let largest = largest.map_or(0, |(at, _)| at);
        parts.swap(0, largest);
        let mut written = Vec::with_capacity(parts.len());
        for (at, part) in parts.iter().enumerate() {
            let number = if at == 0 { cluster as usize } else { self.open() };
            self.fill(number, part, &entries);
            written.push(number as u32);
        }
        self.due = None;
        Ok(written)
    }

    /// Forgets the entries from `entries` on, and any split that is due.
    ///
    /// The keys of what is forgotten are not known here. So a cluster keeps its centroid and its variance until an
    /// entry joins it or it is split. A cluster that lost all members takes no entry while another one has any.
    pub fn truncate(&mut self, entries: u32) {
        self.due = None;
        self.may_be_empty = false;
        let (stats, centroids, may_be_empty) = (&mut self.stats, &mut self.centroids, &mut self.may_be_empty);
        self.members.truncate(entries, |cluster, left| {
            stats[cluster].shrink(left);
            if left == 0 {
                centroids.leave_out(cluster);
                *may_be_empty = true;
            }
        });
        self.buffers.values_mut().for_each(|buffer| buffer.retain(|entry| *entry < entries));
        self.buffers.retain(|_, buffer| !buffer.is_empty());
    }

    /// Returns the number of clusters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stats.len()
    }

    /// Returns whether there is no cluster, which is never the case.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stats.is_empty()
    }

    /// Returns the members of a cluster, without its buffer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster.
    pub fn members(&self, cluster: u32) -> Result<&[u32]> {
        match self.members.get(cluster as usize) {
            Some(members) => Ok(members),
            None => refused(format!("cluster {cluster} of {}", self.len())),
        }
    }

    /// Returns the members of a cluster that exists, without its buffer.
    pub(crate) fn members_of(&self, cluster: usize) -> &[u32] {
        self.members.list(cluster)
    }

    /// Returns whether a cluster that exists has a member. Without a cut, the lists of members are not read.
    pub(crate) fn has_members(&self, cluster: usize) -> bool {
        !self.may_be_empty || !self.members.list(cluster).is_empty()
    }

    /// Returns the entries that wait in the buffer of a cluster.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster.
    pub fn buffer(&self, cluster: u32) -> Result<&[u32]> {
        self.members(cluster)?;
        Ok(self.buffers.get(&cluster).map_or(&[], Vec::as_slice))
    }

    /// Returns the entries of all buffers, by rising cluster.
    pub fn buffered_entries(&self) -> impl Iterator<Item = u32> {
        self.buffers.values().flatten().copied()
    }

    /// Returns the number of entries in all buffers.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.buffer_sizes().sum()
    }

    /// Returns size and variance of each cluster.
    #[must_use]
    pub fn stats(&self) -> &[ClusterStats] {
        &self.stats
    }

    /// Returns the centroids `[clusters, dim]`.
    #[must_use]
    pub fn centroids(&self) -> Cow<'_, [f32]> {
        if let Some(rows) = self.centroids.single() {
            return Cow::Borrowed(rows);
        }
        let mut rows = vec![0.0; self.len() * self.dim];
        rows.chunks_exact_mut(self.dim).enumerate().for_each(|(at, row)| self.centroids.read(at, row));
        Cow::Owned(rows)
    }

    /// Returns the centroids as they are kept, if these are bytes.
    pub(crate) fn byte_centroids(&self) -> Option<&ByteRows> {
        self.centroids.byte_rows()
    }

    fn check_nothing_due(&self) -> Result<()> {
        match self.due {
            None => Ok(()),
            Some(cluster) => refused(format!("a split of cluster {cluster} is due before this call")),
        }
    }

    /// Divides keys `[count, dim]` by 2-means, until each part is within the limits.
    fn divide(&mut self, keys: &[f32], count: usize) -> Vec<Part> {
        let (mut open, mut parts): (Vec<Vec<u32>>, _) = (vec![(0..count as u32).collect()], Vec::new());
        let mut rows = Vec::with_capacity(keys.len());
        let mut is_whole = true;
        while let Some(part) = open.pop() {
            rows.clear();
            part.iter().for_each(|at| rows.extend_from_slice(&keys[*at as usize * self.dim..][..self.dim]));
            let must_split = (is_whole || part.len() > self.options.max_size) && part.len() >= self.options.min_split;
            is_whole = false;
            if !must_split {
                let (mut stats, mut centroid) = (ClusterStats::default(), vec![0.0; self.dim]);
                rows.chunks_exact(self.dim).for_each(|key| stats.add(&mut centroid, key));
                if part.len() < self.options.min_split || stats.variance() <= self.options.threshold {
                    parts.push(Part { rows: part, stats, centroid });
                    continue;
                }
            }
            self.splits += 1;
            let halves = two_means(&rows, self.dim, &mut SeededRandom::of_part(self.options.seed, self.splits));
            for half in [1, 0] {
                open.push(part.iter().zip(&halves).filter(|(_, of)| **of == half).map(|(at, _)| *at).collect());
            }
        }
        parts
    }

    /// Adds an empty cluster in memory, which is filled next.
    fn open(&mut self) -> usize {
        let clusters = self.len();
        if self.stats.capacity() == clusters {
            self.stats.reserve_exact(1 + clusters / GROWTH);
            self.in_memory.reserve_exact(1 + clusters / GROWTH);
        }
        self.stats.push(ClusterStats::default());
        self.members.open();
        self.in_memory.push(true);
        clusters
    }

    /// Makes a part of the split entries the members of a cluster.
    fn fill(&mut self, cluster: usize, part: &Part, entries: &[u32]) {
        self.stats[cluster] = part.stats;
        match cluster == self.centroids.len() {
            true => self.centroids.push(&part.centroid),
            false => self.centroids.set(cluster, &part.centroid),
        }
        self.members.replace(cluster, part.rows.iter().map(|at| entries[*at as usize]));
        self.buffers.remove(&(cluster as u32));
        self.in_memory[cluster] = true;
    }
}

fn check(options: &AdaptOptions) -> Result<()> {
    if !(options.threshold.is_finite() && options.threshold >= 0.0) {
        return refused(format!("a threshold of {} is not a finite variance", options.threshold));
    }
    if options.min_split < 2 || options.max_size < options.min_split {
        return refused(format!(
            "clusters of at most {} entries that are split from {} on; at least 2 entries are split",
            options.max_size, options.min_split
        ));
    }
    Ok(())
}

fn refused<T>(what: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidArgument, format!("adaptive clusters: {what}")))
}

#[cfg(test)]
mod tests;
