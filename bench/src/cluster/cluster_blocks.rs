//! The blocks that hold the entries of each cluster.

use clap::ValueEnum;
use stratakv::retrieval::clusters::ClusterLists;

/// Where the entries of a cluster are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ClusterPlace {
    /// In one block of the cluster's own, which is read by one request.
    Clusters,
    /// In groups of consecutive entries, each of them a block that clusters share.
    Groups,
}

impl ClusterPlace {
    /// Returns the name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Clusters => "clusters",
            Self::Groups => "groups",
        }
    }
}

/// The blocks of each cluster.
pub(super) struct ClusterBlocks {
    /// The blocks of each cluster, in rising order, with their bytes.
    blocks: Vec<Vec<(u64, usize)>>,
    place: ClusterPlace,
    entry_bytes: usize,
}

impl ClusterBlocks {
    /// Lays out clusters. Groups have `group` entries.
    pub(super) fn new(lists: &ClusterLists, place: ClusterPlace, (group, entry_bytes): (usize, usize)) -> Self {
        let of = |(cluster, members): (usize, &[u32])| match place {
            // Numbers with gaps, because neighbouring numbers would be read by one request.
            ClusterPlace::Clusters => vec![(2 * cluster as u64, members.len() * entry_bytes)],
            ClusterPlace::Groups => {
                let mut groups: Vec<u64> = members.iter().map(|entry| *entry as u64 / group as u64).collect();
                groups.sort_unstable();
                groups.dedup();
                groups.into_iter().map(|at| (at, group * entry_bytes)).collect()
            }
        };
        Self { blocks: lists.iter().enumerate().map(of).collect(), place, entry_bytes }
    }

    /// Returns the blocks of a cluster that exists, with their bytes.
    pub(super) fn of(&self, cluster: u32) -> &[(u64, usize)] {
        &self.blocks[cluster as usize]
    }

    /// Returns the bytes of all blocks of `entries` entries.
    pub(super) fn total_bytes(&self, entries: usize) -> usize {
        match self.place {
            ClusterPlace::Clusters => self.blocks.iter().flatten().map(|(_, bytes)| bytes).sum(),
            ClusterPlace::Groups => entries * self.entry_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_have_a_block_of_their_own_or_share_groups() {
        let mut lists = ClusterLists::new();
        lists.push(&[9, 0, 1]);
        lists.push(&[4, 5, 8]);
        let own = ClusterBlocks::new(&lists, ClusterPlace::Clusters, (4, 100));
        assert_eq!((own.of(0), own.of(1), own.total_bytes(12)), (&[(0, 300)][..], &[(2, 300)][..], 600));
        let groups = ClusterBlocks::new(&lists, ClusterPlace::Groups, (4, 100));
        assert_eq!((groups.of(0), groups.of(1)), (&[(0, 400), (2, 400)][..], &[(1, 400), (2, 400)][..]));
        assert_eq!(groups.total_bytes(12), 1200);
    }
}
