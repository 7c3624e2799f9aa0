//! The writer of pieces of a directory.

use super::directory::{
    CLUSTER_PIECE_BYTES_MAX, ClusterRecord, DIRECTORY_VERSION, DirectoryHeader, METHOD_BYTES_MAX, PART_CLUSTERS,
    PART_POSITIONS, PageRun,
};
use super::page::EntryHeads;
use crate::error::FormatError;
use alloc::vec::Vec;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The fields of a directory that each of its pieces repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryFields<'a> {
    /// As in [`DirectoryHeader::set`].
    pub set: u64,
    /// As in [`DirectoryHeader::generation`].
    pub generation: u64,
    /// The heads of an entry.
    pub heads: EntryHeads,
    /// The method with its parameters, in the text by which it is chosen.
    pub method: &'a str,
    /// The version of the method.
    pub method_version: u32,
    /// The seed of its random choices.
    pub seed: u64,
    /// The tokens that the set covers.
    pub tokens: u64,
    /// The entries of all clusters.
    pub entries: u64,
    /// The number of clusters.
    pub clusters: u32,
    /// The most clusters that hold the same entry.
    pub memberships: u16,
    /// The kind and the number of a cluster's representatives.
    pub representative: (u16, u16),
}

/// A cluster to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterParts {
    /// The number of entries.
    pub entries: u32,
    /// As in [`ClusterRecord::variance`].
    pub variance: f32,
    /// As in [`ClusterRecord::radius`].
    pub radius: f32,
    /// The runs of its pages, in the order of its entries.
    pub runs: Vec<PageRun>,
    /// The checksums of these pages, in the same order.
    pub checksums: Vec<u64>,
    /// The representatives as they are stored: f16 elements, or 8 bytes per medoid.
    pub representatives: Vec<u8>,
}

impl DirectoryFields<'_> {
    /// Returns the piece with `clusters`, the first of which is cluster `first`. Runs name frames by their index in
    /// `frames`.
    ///
    /// # Errors
    /// The piece is over its limit, or the description of the method is.
    pub fn encode_clusters(
        &self,
        first: u32,
        frames: &[u64],
        clusters: &[ClusterParts],
    ) -> Result<Vec<u8>, FormatError> {
        let entries: u64 = clusters.iter().map(|cluster| u64::from(cluster.entries)).sum();
        let tables = [
            frames.len(),
            clusters.iter().map(|cluster| cluster.runs.len()).sum(),
            clusters.iter().map(|cluster| cluster.checksums.len()).sum(),
        ];
        let mut out = self.start(PART_CLUSTERS, (first, clusters.len()), entries, tables)?;
        frames.iter().for_each(|frame| out.extend_from_slice(&frame.to_le_bytes()));
        for cluster in clusters {
            let record = ClusterRecord {
                entries: U32::new(cluster.entries),
                runs: U32::new(cluster.runs.len() as u32),
                variance: U32::new(cluster.variance.to_bits()),
                radius: U32::new(cluster.radius.to_bits()),
            };
            out.extend_from_slice(record.as_bytes());
        }
        clusters.iter().for_each(|cluster| out.extend_from_slice(cluster.runs.as_bytes()));
        let sums = clusters.iter().flat_map(|cluster| &cluster.checksums);
        sums.for_each(|sum| out.extend_from_slice(&sum.to_le_bytes()));
        clusters.iter().for_each(|cluster| out.extend_from_slice(&cluster.representatives));
        finish(out)
    }

    /// Returns the piece with the tokens of the entries of clusters, the first of which is cluster `first`.
    ///
    /// # Errors
    /// The piece is over its limit, or the description of the method is.
    pub fn encode_positions(&self, first: u32, clusters: &[&[u32]]) -> Result<Vec<u8>, FormatError> {
        let entries: u64 = clusters.iter().map(|tokens| tokens.len() as u64).sum();
        let mut out = self.start(PART_POSITIONS, (first, clusters.len()), entries, [0; 3])?;
        clusters.iter().for_each(|tokens| out.extend_from_slice(&(tokens.len() as u32).to_le_bytes()));
        out.resize(out.len().next_multiple_of(8), 0);
        clusters.iter().copied().flatten().for_each(|token| out.extend_from_slice(&token.to_le_bytes()));
        finish(out)
    }

    /// Returns the header of a piece and the description of the method.
    fn start(
        &self,
        part: u16,
        (first, count): (u32, usize),
        entries: u64,
        [frames, runs, pages]: [usize; 3],
    ) -> Result<Vec<u8>, FormatError> {
        let method = self.method.as_bytes();
        if method.len() > METHOD_BYTES_MAX {
            return Err(FormatError::range("method bytes", 6, METHOD_BYTES_MAX as u64, method.len() as u64));
        }
        let most = u64::from(CLUSTER_PIECE_BYTES_MAX);
        let longest = [count, frames, runs, pages].into_iter().max().unwrap_or(0) as u64;
        let Ok(piece_entries) = u32::try_from(entries) else {
            return Err(FormatError::range("entries of the piece", 68, u64::from(u32::MAX), entries));
        };
        if longest > most {
            return Err(FormatError::range("directory bytes", 0, most, longest));
        }
        let header = DirectoryHeader {
            version: U16::new(DIRECTORY_VERSION),
            part: U16::new(part),
            head: U16::new(self.heads.code()),
            method_bytes: U16::new(method.len() as u16),
            set: U64::new(self.set),
            generation: U64::new(self.generation),
            seed: U64::new(self.seed),
            tokens: U64::new(self.tokens),
            entries: U64::new(self.entries),
            clusters: U32::new(self.clusters),
            method_version: U32::new(self.method_version),
            memberships: U16::new(self.memberships),
            representative: U16::new(self.representative.0),
            representatives: U16::new(self.representative.1),
            reserved: U16::new(0),
            first_cluster: U32::new(first),
            count: U32::new(count as u32),
            piece_entries: U32::new(piece_entries),
            frames: U32::new(frames as u32),
            runs: U32::new(runs as u32),
            pages: U32::new(pages as u32),
        };
        let mut out = header.as_bytes().to_vec();
        out.extend_from_slice(method);
        out.resize(out.len().next_multiple_of(8), 0);
        Ok(out)
    }
}

/// Pads the last table, and checks the length of the piece.
fn finish(mut out: Vec<u8>) -> Result<Vec<u8>, FormatError> {
    out.resize(out.len().next_multiple_of(8), 0);
    if out.len() > CLUSTER_PIECE_BYTES_MAX as usize {
        return Err(FormatError::range("directory bytes", 0, u64::from(CLUSTER_PIECE_BYTES_MAX), out.len() as u64));
    }
    Ok(out)
}
