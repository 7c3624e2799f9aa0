//! Options of [`Sequence::store_clusters_with`](crate::Sequence::store_clusters_with).

use std::num::NonZeroU32;

/// How the pages of stored clusters are placed on the devices of a store.
///
/// On each device, a cluster is one run of neighbouring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterStripe {
    /// The pages of a cluster are dealt to the devices in units of this many pages, from a running pointer on (SWARM
    /// section 5.2). A page holds at least one entry.
    Pages(NonZeroU32),
    /// A cluster is on one device, and the next cluster on the next device.
    Cluster,
    /// All clusters that are written at once are on one device. This is for comparison.
    Stretch,
}

impl Default for ClusterStripe {
    /// Units of one page.
    fn default() -> Self {
        Self::Pages(NonZeroU32::MIN)
    }
}

/// Options of stored clusters.
///
/// ```
/// use stratakv::options::{ClusterStripe, StoreClusterOptions};
///
/// let options = StoreClusterOptions::new().stripe(ClusterStripe::Cluster);
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreClusterOptions {
    pub(crate) stripe: ClusterStripe,
}

impl StoreClusterOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how pages are placed on devices. Default: units of one page. A store with one device has no use for it.
    #[must_use]
    pub fn stripe(mut self, stripe: ClusterStripe) -> Self {
        self.stripe = stripe;
        self
    }
}
