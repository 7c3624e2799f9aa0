//! The state of adaptive clusters between two steps, as bytes.
//!
//! What a next step sets by itself is not part of it: the clusters in memory, and those of the retrieval.
//!
//! Encoding, in the order of [`StateReader`]: threshold, splits, byte centroids, squares, sizes, members of all
//! clusters, clusters that are left out, flagged clusters, the sizes of their buffers, the entries of all buffers.

use super::{AdaptOptions, AdaptiveClusters, check};
use crate::retrieval::byte_rows::ByteRows;
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::clusters::centroids::Centroids;
use crate::retrieval::clusters::cluster_stats::ClusterStats;
use crate::retrieval::clusters::lists::ClusterLists;
use crate::retrieval::clusters::member_lists::MemberLists;
use std::collections::BTreeMap;

impl AdaptiveClusters {
    /// Returns the most bytes that [`Self::put_state`] appends.
    pub(crate) fn state_bytes(&self) -> usize {
        // A flagged cluster has a number, a size and at least one entry.
        let entries = self.stats.iter().map(|own| own.size() as usize).sum::<usize>() + 3 * self.buffered();
        self.len() * (ByteRows::row_bytes(self.dim) + size_of::<u64>() + 2 * size_of::<u32>())
            + entries * size_of::<u32>()
            + 12 * size_of::<u64>()
    }

    /// Appends the state. Returns false, and appends nothing, if a split is due or centroids are not bytes.
    pub(crate) fn put_state(&self, out: &mut StateWriter) -> bool {
        let Some(rows) = self.centroids.byte_rows().filter(|_| self.due.is_none() && self.retrieved.is_empty()) else {
            return false;
        };
        out.put_f64(self.options.threshold);
        out.put_u64(self.splits);
        rows.put_state(out);
        out.put_each(self.stats.iter().map(|own| own.squares().to_bits().to_le_bytes()));
        out.put_each(self.stats.iter().map(|own| own.size().to_le_bytes()));
        let members: Vec<u32> = (0..self.len()).flat_map(|cluster| self.members.list(cluster)).copied().collect();
        out.put_u32s(&members);
        let left_out: Vec<u32> =
            (0..self.len()).filter(|at| self.centroids.is_left_out(*at)).map(|at| at as u32).collect();
        out.put_u32s(&left_out);
        out.put_u32s(&self.buffers.keys().copied().collect::<Vec<u32>>());
        out.put_u32s(&self.buffers.values().map(|own| own.len() as u32).collect::<Vec<u32>>());
        out.put_u32s(&self.buffered_entries().collect::<Vec<u32>>());
        true
    }

    /// Returns the clusters of a state. The entries are those below `entries`, each once.
    ///
    /// # Errors
    /// The state breaks a rule.
    pub(crate) fn from_state(
        state: &mut StateReader<'_>,
        (dim, entries): (usize, usize),
        options: AdaptOptions,
    ) -> Result<Self, StateError> {
        let threshold = state.positive_f64("a threshold")?;
        let options = AdaptOptions { threshold, ..options };
        check(&options).map_err(|e| StateError::new(e.to_string()))?;
        let splits = state.u64()?;
        // Splits are counted one by one, so this many never happen.
        require(splits < 1 << 62, || format!("{splits} splits"))?;
        // A cut leaves clusters without entries, so there may be more clusters than entries.
        let rows = ByteRows::from_state(state, dim, u32::MAX as usize)?;
        let clusters = rows.len();
        require(clusters > 0, || "there is no cluster".into())?;
        let squares = state.u64s("squares", clusters)?;
        let sizes = state.u32s("sizes", clusters)?;
        let members = state.u32s("members", entries)?;
        let left_out = state.u32s("clusters that are left out", clusters)?;
        let flagged = state.u32s("flagged clusters", clusters)?;
        let buffer_sizes = state.u32s("buffers", clusters)?;
        let buffered = state.u32s("buffered entries", options.buffer_limit)?;
        require(squares.len() == clusters && sizes.len() == clusters && buffer_sizes.len() == flagged.len(), || {
            format!("{clusters} clusters have {} squares and {} sizes", squares.len(), sizes.len())
        })?;
        // The memory of a split is that of the largest cluster with all buffers.
        let (most, largest) = (options.max_size.max(options.min_split), sizes.iter().copied().max().unwrap_or(0));
        require(largest as usize <= most, || format!("a cluster has {largest} members; at most {most} fit"))?;
        let lists = cut(&members, &sizes, "members")?;
        let buffers: BTreeMap<u32, Vec<u32>> = {
            let own = cut(&buffered, &buffer_sizes, "buffered entries")?;
            flagged.iter().copied().zip(own.into_iter().map(<[u32]>::to_vec)).collect()
        };
        let is_buffer = |(at, own): (&u32, &Vec<u32>)| (*at as usize) < clusters && !own.is_empty();
        require(buffers.len() == flagged.len() && buffers.iter().all(is_buffer), || {
            "a buffer is empty, or of no cluster".into()
        })?;
        check_entries(members.iter().chain(&buffered), (members.len() + buffered.len(), entries))?;
        let mut stats = Vec::with_capacity(clusters);
        for (size, squares) in sizes.iter().zip(squares) {
            let squares = f64::from_bits(squares);
            require(squares.is_finite() && squares >= 0.0, || format!("squares of {squares}"))?;
            stats.push(ClusterStats::of(*size, squares));
        }
        let mut centroids = Centroids::from_byte_rows(rows);
        for cluster in &left_out {
            let is_empty = sizes.get(*cluster as usize) == Some(&0);
            require(is_empty, || format!("cluster {cluster} is left out, but has members"))?;
            centroids.leave_out(*cluster as usize);
        }
        let may_be_empty = sizes.contains(&0);
        Ok(Self {
            dim,
            options,
            centroids,
            stats,
            members: MemberLists::new(&ClusterLists::of_clusters(lists.into_iter())),
            may_be_empty,
            buffers,
            in_memory: vec![false; clusters],
            retrieved: Vec::new(),
            due: None,
            splits,
        })
    }
}

/// Cuts a table into lists of these sizes, which add up to its length.
fn cut<'a>(table: &'a [u32], sizes: &[u32], what: &str) -> Result<Vec<&'a [u32]>, StateError> {
    let sum: u64 = sizes.iter().map(|size| u64::from(*size)).sum();
    require(sum == table.len() as u64, || format!("the sizes add up to {sum} of {} {what}", table.len()))?;
    let mut left = table;
    let each = sizes.iter().map(|size| {
        let (own, rest) = left.split_at(*size as usize);
        left = rest;
        own
    });
    Ok(each.collect())
}

/// Checks that the entries below `count` are there, each once.
fn check_entries<'a>(entries: impl Iterator<Item = &'a u32>, (found, count): (usize, usize)) -> Result<(), StateError> {
    require(found == count, || format!("{found} of {count} entries are there"))?;
    let mut seen = vec![false; count];
    for entry in entries {
        let is_new = seen.get_mut(*entry as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        require(is_new, || format!("entry {entry} of {count} is there twice, or beyond"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Adaptation, CentroidPrecision};
    use super::*;

    const DIM: usize = 3;

    fn key(entry: u32) -> [f32; DIM] {
        [(entry % 5) as f32 * 9.0, (entry * 7 % 11) as f32, (entry / 40) as f32]
    }

    fn options() -> AdaptOptions {
        let precision = CentroidPrecision::Byte;
        AdaptOptions { threshold: 6.0, max_size: 12, buffer_limit: 3, precision, ..AdaptOptions::default() }
    }

    /// Appends entries, and returns where each went.
    fn append(clusters: &mut AdaptiveClusters, entries: std::ops::Range<u32>) -> Vec<Adaptation> {
        let mut found = Vec::new();
        for entry in entries {
            let known = clusters.len() as u32;
            clusters.begin_step(&[entry % known]).unwrap();
            for at in 0..2 {
                while let Some(request) = clusters.next_split() {
                    let due = clusters.entries_to_split(request.cluster).unwrap();
                    let rows: Vec<f32> = due.iter().flat_map(|entry| key(*entry)).collect();
                    clusters.split(request.cluster, &rows).unwrap();
                }
                if at == 0 {
                    found.push(clusters.append(entry, &key(entry)).unwrap());
                }
            }
        }
        found
    }

    fn grown(entries: u32) -> AdaptiveClusters {
        let keys: Vec<f32> = (0..20).flat_map(key).collect();
        let first = ClusterLists::from_assignment(&(0..20).map(|at| at % 4).collect::<Vec<u32>>(), 4).unwrap();
        let mut clusters = AdaptiveClusters::new(&keys, DIM, &first, options()).unwrap();
        append(&mut clusters, 20..entries);
        clusters
    }

    fn state(clusters: &AdaptiveClusters) -> Vec<u8> {
        let mut out = StateWriter::new();
        assert!(clusters.put_state(&mut out));
        let bytes = out.into_bytes();
        assert!(bytes.len() <= clusters.state_bytes(), "{} of {}", bytes.len(), clusters.state_bytes());
        bytes
    }

    fn read(bytes: &[u8], entries: usize) -> Result<AdaptiveClusters, StateError> {
        let mut state = StateReader::new(bytes);
        let clusters = AdaptiveClusters::from_state(&mut state, (DIM, entries), options())?;
        state.end().map(|()| clusters)
    }

    #[test]
    fn clusters_that_were_restored_grow_as_those_that_were_not() {
        for (entries, cut) in [(61, None), (150, None), (150, Some(90)), (150, Some(3))] {
            let mut clusters = grown(entries);
            cut.into_iter().for_each(|cut| clusters.truncate(cut));
            let entries = cut.unwrap_or(entries);
            let mut restored = read(&state(&clusters), entries as usize).unwrap();
            assert_eq!(state(&restored), state(&clusters));
            assert_eq!(restored.stats(), clusters.stats());
            assert_eq!(append(&mut restored, entries..240), append(&mut clusters, entries..240));
            assert_eq!(state(&restored), state(&clusters), "after {entries} entries, cut {cut:?}");
        }
    }

    #[test]
    fn numbers_that_would_overflow_and_clusters_above_their_limit_are_errors() {
        let good = state(&grown(150));
        let mut bytes = good.clone();
        bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(read(&bytes, 150).unwrap_err().to_string().contains("splits"));
        // Factors are behind the threshold, the splits, the number of rows, the elements, and their own number.
        let at = 24 + good[16] as usize * DIM + 8;
        bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&1e14_f32.to_le_bytes());
        assert!(read(&bytes, 150).unwrap_err().to_string().contains("factor"));
        // A split of larger clusters and buffers would take more memory than is reserved for it.
        let within = |max_size, buffer_limit| {
            let options = AdaptOptions { max_size, buffer_limit, ..options() };
            AdaptiveClusters::from_state(&mut StateReader::new(&good), (DIM, 150), options).map(|_| ())
        };
        let clusters = grown(150);
        let largest = clusters.stats.iter().map(|own| own.size() as usize).max().unwrap();
        assert!(largest > 4 && within(largest, 3).is_ok() && within(largest - 1, 3).is_err());
        assert!(clusters.buffered() > 0 && within(12, clusters.buffered() - 1).is_err());
    }

    #[test]
    fn a_state_with_wrong_bytes_is_an_error_or_whole() {
        let good = state(&grown(150));
        assert!(read(&good, 149).is_err() && read(&good, 151).is_err());
        (0..good.len()).for_each(|end| assert!(read(&good[..end], 150).is_err(), "cut at {end}"));
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Ok(mut clusters) = read(&bytes, 150) {
                    append(&mut clusters, 150..160);
                }
            }
        }
    }
}
