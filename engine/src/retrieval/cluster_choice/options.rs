//! The options of a method that chooses clusters, as parsed from its name (`dynakv:16:members:joint`).

/// What a cluster is scored by.
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
}
