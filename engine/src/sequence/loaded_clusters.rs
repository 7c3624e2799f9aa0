//! [`LoadedClusters`]: the stored clusters of an attached method, in memory.

use crate::metrics::Reservation;
use crate::pools::StoredSet;

/// The stored clusters of a method that is attached.
pub(super) struct LoadedClusters {
    /// The id of the kind of summary that made the clusters.
    pub(super) method: String,
    pub(super) set: StoredSet,
    pub(super) _memory: Reservation,
}
