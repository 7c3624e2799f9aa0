//! Clusters of entries: which entries of a layer are read together. Pure algorithms, without I/O.
//!
//! An entry is the key and the value of one token, of one KV head or of all KV heads of a layer. The algorithms know
//! entries by their index and keys as `[entries, dim]`.
//!
//! | file | what it computes | source |
//! |---|---|---|
//! | `activation` | which entries a query activates | SWARM, section 2.3 |
//! | `coactivation` | how often two entries are activated together | SWARM, section 5.1, step 1 |
//! | `closeness` | distances and radius, in integers | SWARM, equations 2 and 3 |
//! | `ranked` | the density of entries | SWARM, equation 4 |
//! | `swarm` | medoid clusters | SWARM, Algorithm 1 |
//! | `maintenance` | clusters of new entries | SWARM, section 6.2 |
//! | `recent_steps` | which of the last steps activated an item | |
//! | `nearest_key` | the cluster whose representative is nearest to a key | |
//! | `nearest_rows` | the nearest of many rows to each of a few points | |
//! | `kmeans` | clusters of similar keys | DynaKV, section 4.1 |
//! | `cluster_stats` | size, centroid and variance of a cluster | DynaKV, section 4.2 |
//! | `centroids` | the centroid that is nearest to a key | |
//! | `member_lists` | the members of clusters that change | |
//! | `adapt` | clusters that adapt while the context grows | DynaKV, Algorithm 1 |
//! | `bisection` | clusters of equal size | |
//! | `chain` | an order in which neighbours are retrieved together | DynaKV, equation 8 |
//! | `planted` | a generator of planted co-activation | |
//!
//! Invariants of the room:
//! - The same input gives the same clusters on one machine, however it is cut into pieces. Random choices depend on a
//!   seed alone.
//! - A structure says its bytes before it grows (`bytes_for`).
//! - Wrong input is refused with [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument), and nothing
//!   changed.

mod activation;
mod adapt;
mod bisection;
mod centroids;
mod chain;
mod closeness;
mod cluster_stats;
mod coactivation;
mod key_matrix;
mod kmeans;
mod lists;
mod maintenance;
mod member_lists;
mod nearest_key;
mod planted;
mod random;
mod ranked;
mod recent_steps;
mod swarm;

pub use activation::ActivationRule;
pub use adapt::{AdaptOptions, Adaptation, AdaptiveClusters, SplitRequest};
pub use bisection::{bisect, bisect_bytes_for};
pub use centroids::CentroidPrecision;
pub use chain::{chain, chain_bytes_for, runs_in_order};
pub use closeness::{ClusterRadius, Normalisation};
pub use cluster_stats::ClusterStats;
pub use coactivation::{CoActivation, MAX_PROFILE_ENTRIES, MAX_PROFILE_QUERIES};
pub use key_matrix::MAX_KEY_MAGNITUDE;
pub use kmeans::{KMeans, KMeansOptions};
pub use lists::ClusterLists;
pub use maintenance::{ClusterMaintenance, MAX_MAINTENANCE_STEPS, MaintenanceRadius};
pub(crate) use nearest_key::Representatives;
pub use planted::{PlantedOptions, PlantedTopics};
#[cfg(test)]
pub(in crate::retrieval) use random::SeededRandom;
pub use swarm::{MedoidClustering, MedoidClusters, MedoidOptions};
