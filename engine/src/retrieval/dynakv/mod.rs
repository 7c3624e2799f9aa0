//! DynaKV: clusters of similar keys that adapt while the context grows.
//!
//! Source: DynaKV, sections 4.1 and 4.2. How the method works here:
//! 1. When the selector is attached, the keys of all sealed groups are clustered by k-means, per KV head. A sequence
//!    that is shorter than 256 tokens is clustered when it has that many.
//! 2. Each later group adapts the clusters: nearest centroid, variance, flag, buffer, delayed split.
//! 3. A query chooses clusters by their centroids, or by the sum of their members' codes (`:members`).
//!
//! The paper does not say how the number of clusters, the thresholds and the largest cluster are chosen. Here there is
//! one cluster per 16 tokens, and a cluster has at most four times as many. The threshold of a head is the 0.9 quantile
//! of the variances of its first clusters. The newest 64 tokens are in no cluster, and are chosen one by one.

mod pending_split;
mod selector;
mod state;
mod summary;

use crate::retrieval::cluster_choice::HeadSharing;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter};
pub use selector::DynaKv;
use std::sync::Arc;

/// DynaKV.
pub(crate) const DYNAKV: Method = Method {
    name: "dynakv",
    alias: "",
    about: "clusters of similar keys that adapt while the context grows; the number is their mean size",
    parameter: MethodParameter::Default(16),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Clusters {
        paper: HeadSharing::PerHead,
        members: HeadSharing::Joint,
        has_window: false,
        has_replicas: false,
    },
    make: |choice, adapter| Ok(Arc::new(DynaKv::new(choice.clusters("dynakv")?, adapter)?)),
};
