//! Pools: pages of entries in the order of clusters, and the directories that describe the clusters.
//!
//! An *entry* is the key and the value of one token, for one KV head or for all heads of a layer. Pools and directories
//! are derived: they repeat tokens that groups and tails hold, and any of them may be missing.
//!
//! - `page`: the geometry of a page of entries, and the identity of its checksum
//! - `directory`: the structures of a piece of a directory, and their limits
//! - `piece`: a piece that was checked
//! - `encode`: how a piece is written
//! - `state`: pieces of the state of a method
//!
//! # Invariants
//! - A [`DirectoryPiece`] that was checked has tables that fill its bytes exactly. Nothing is allocated to check it.
//! - Every run of a checked piece is inside the largest frame, and names a frame of the piece's own table.

mod directory;
mod encode;
mod page;
mod piece;
mod state;

pub use directory::{
    CLUSTER_PIECE_BYTES_MAX, CLUSTERS_MAX, ClusterRecord, DIRECTION_FALLING, DIRECTION_RISING, DIRECTORY_VERSION,
    DirectoryHeader, HEADS_ALL, MEMBERSHIPS_MAX, METHOD_BYTES_MAX, PART_CLUSTERS, PART_POSITIONS, PageRun,
    REPRESENTATIVE_CENTROIDS, REPRESENTATIVE_MEDOIDS, REPRESENTATIVE_NONE, REPRESENTATIVES_MAX, SET_TOKENS_MAX,
};
pub use encode::{ClusterParts, DirectoryFields};
pub use page::{EntryHeads, PAGE_ENTRIES_MAX, PageGeometry};
pub use piece::{Cluster, ClusterPage, ClusterTable, DirectoryPiece, PieceTables, PositionTable};
pub use state::{PART_STATE, STATE_BYTES_MAX, STATE_VERSION, StateFields, StateHeader, StatePiece};
