//! The structures of a piece of a directory, and their limits.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the pieces that this code reads and writes.
pub const DIRECTORY_VERSION: u16 = 1;
/// Part: the clusters, with their pages and representatives.
pub const PART_CLUSTERS: u16 = 1;
/// Part: the tokens of the entries of each cluster.
pub const PART_POSITIONS: u16 = 2;

/// The `head` field of entries that hold all KV heads of a layer.
pub const HEADS_ALL: u16 = u16::MAX;

/// Representative: none.
pub const REPRESENTATIVE_NONE: u16 = 0;
/// Representative: mean keys of a cluster, as f16.
pub const REPRESENTATIVE_CENTROIDS: u16 = 1;
/// Representative: tokens whose keys stand for a cluster.
pub const REPRESENTATIVE_MEDOIDS: u16 = 2;

/// Direction: the first page of the cluster is the first page of the run.
pub const DIRECTION_RISING: u8 = 0;
/// Direction: the first page of the cluster is the last page of the run.
pub const DIRECTION_FALLING: u8 = 1;

/// The most bytes of a piece of a directory, and of a delta.
pub const CLUSTER_PIECE_BYTES_MAX: u32 = 1 << 20;
/// The most bytes of the description of a method.
pub const METHOD_BYTES_MAX: usize = 255;
/// The most clusters of a directory.
pub const CLUSTERS_MAX: u32 = 1 << 28;
/// The most clusters that hold the same entry.
pub const MEMBERSHIPS_MAX: u16 = 1024;
/// The most representatives of a cluster.
pub const REPRESENTATIVES_MAX: u16 = 16;
/// The most tokens that a set of clusters covers.
pub const SET_TOKENS_MAX: u64 = 1 << 32;

/// The header of a piece of a directory. Its tables follow, each padded with zeros to a multiple of 8.
///
/// A piece repeats the fields of its directory, and the fields from `first_cluster` on are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirectoryHeader {
    /// [`DIRECTORY_VERSION`].
    pub version: U16,
    /// [`PART_CLUSTERS`] or [`PART_POSITIONS`].
    pub part: U16,
    /// The KV head of the entries, or [`HEADS_ALL`].
    pub head: U16,
    /// Bytes of the description of the method.
    pub method_bytes: U16,
    /// The number of the set. No two sets of one sequence have the same.
    pub set: U64,
    /// The number of the directory in its set. A greater one replaces a smaller one.
    pub generation: U64,
    /// The seed of the method's random choices.
    pub seed: U64,
    /// The set covers the tokens from 0 up to this one.
    pub tokens: U64,
    /// The entries of all clusters. An entry counts once per cluster.
    pub entries: U64,
    /// The clusters of the directory.
    pub clusters: U32,
    /// The version of the method.
    pub method_version: U32,
    /// The most clusters that hold the same entry.
    pub memberships: U16,
    /// The kind of the representatives.
    pub representative: U16,
    /// The representatives of each cluster.
    pub representatives: U16,
    /// Zero.
    pub reserved: U16,
    /// The first cluster of the piece.
    pub first_cluster: U32,
    /// The clusters of the piece.
    pub count: U32,
    /// The entries of these clusters.
    pub piece_entries: U32,
    /// The ids in the table of frames. 0 in [`PART_POSITIONS`].
    pub frames: U32,
    /// The runs of these clusters. 0 in [`PART_POSITIONS`].
    pub runs: U32,
    /// The pages of these runs. 0 in [`PART_POSITIONS`].
    pub pages: U32,
}

const _: () = assert!(size_of::<DirectoryHeader>() == 88);

/// A cluster: its size and its statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ClusterRecord {
    /// The entries.
    pub entries: U32,
    /// The runs of its pages.
    pub runs: U32,
    /// The mean squared distance of its keys to their mean, IEEE 754 binary32. 0 if the method does not have it.
    pub variance: U32,
    /// The distance within which the method adds entries, IEEE 754 binary32. 0 if the method does not have it.
    pub radius: U32,
}

const _: () = assert!(size_of::<ClusterRecord>() == 16);

/// Consecutive pages of a pool that hold entries of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PageRun {
    /// The index of the frame in the piece's table of frames.
    pub frame: U32,
    /// The first page of the run, in pages of 4096 bytes from the start of the frame.
    pub page: U32,
    /// The number of pages. A page for an entry of several pages counts once.
    pub pages: U16,
    /// [`DIRECTION_RISING`] or [`DIRECTION_FALLING`].
    pub direction: u8,
    /// The entries of the last page in the order of the cluster. All others are full.
    pub last_entries: u8,
    /// Zero.
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<PageRun>() == 16);
