//! What storing clusters has written.

use std::time::Duration;

/// The result of [`Sequence::store_clusters`](crate::Sequence::store_clusters).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredClusters {
    /// The first tokens of the sequence that the clusters cover, a multiple of the group size.
    pub tokens: u64,
    /// Layers with stored clusters.
    pub layers: usize,
    /// Clusters of directories, summed over layers and heads. Neighbours that share a page count as one.
    pub clusters: u64,
    /// Entries in pages. An entry counts once for each of its clusters.
    pub entries: u64,
    /// Pages.
    pub pages: u64,
    /// Pages of these that an earlier call has written. They stay where they are.
    pub kept_pages: u64,
    /// Bytes of the pages that were written.
    pub page_bytes: u64,
    /// Bytes of the pieces of directories.
    pub directory_bytes: u64,
    /// Bytes of frames with the state of the method. 0 if no state was written: tokens are not committed, the store is
    /// full, or too few tokens were appended since the former one.
    pub state_bytes: u64,
    /// Bytes written to devices: pages, directories and states, with the headers of their frames.
    pub device_bytes: u64,
    /// The time from the first read of a group to the end of the commit.
    pub time: Duration,
}
