//! The options of a method that chooses clusters, as parsed from its name (`dynakv:16:members:joint`).

use crate::retrieval::key_shape::KeyShape;

/// The entries of the largest cluster over the mean size.
const MAX_OVER_MEAN: usize = 4;

/// The part of a cluster that is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ChosenBy {
    /// The paper's representative: a centroid or a medoid.
    #[default]
    Representative,
    /// The sum of the members' transform-coded keys.
    Members,
}

/// Whose keys a cluster holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSharing {
    /// Each KV head has clusters of its own.
    PerHead,
    /// An entry is a token with the keys of all KV heads.
    Joint,
}

/// The options of a method that chooses clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClusterOptions {
    /// The mean number of entries of a cluster, at least 1.
    pub(crate) mean_size: usize,
    pub(crate) chosen_by: ChosenBy,
    pub(crate) sharing: HeadSharing,
    /// True if every head attends to all tokens that are in no cluster yet. Otherwise each of them is chosen by itself.
    pub(crate) whole_window: bool,
    /// True if an entry is in one cluster only, in methods that would put it into several.
    pub(crate) single: bool,
}

impl ClusterOptions {
    /// Returns the entries of the largest cluster, for clusters that have a limit.
    pub(crate) fn max_size(&self) -> usize {
        self.mean_size.saturating_mul(MAX_OVER_MEAN).max(4)
    }

    /// Returns the KV head of each list of clusters; one list without a head if clusters are joint.
    pub(crate) fn heads(&self, shape: &KeyShape) -> Vec<Option<usize>> {
        match self.sharing {
            HeadSharing::PerHead => (0..shape.kv_heads).map(Some).collect(),
            HeadSharing::Joint => vec![None],
        }
    }

    /// Returns the elements of a key of a list.
    pub(crate) fn dim(&self, shape: &KeyShape) -> usize {
        match self.sharing {
            HeadSharing::PerHead => shape.key_dim,
            HeadSharing::Joint => shape.width(),
        }
    }
}
