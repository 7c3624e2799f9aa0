//! Clusters of similar keys that never change: the baselines of DynaKV.
//!
//! When the selector is attached, the keys of all sealed groups are clustered by k-means, as DynaKV does. The methods
//! differ in what they do with later tokens:
//!
//! | name | later tokens | source |
//! |---|---|---|
//! | `clusterkv` | 320 tokens at a time become new clusters of their own | ClusterKV, Liu et al. 2024 |
//! | `kmeans` | each token joins the cluster with the nearest centroid | DynaKV, section 2.3 ("static update") |
//!
//! The tokens that `clusterkv` has not clustered yet are the window: every head attends to them. A centroid is
//! computed when its cluster is built. It does not change when a token joins the cluster or the sequence is cut.

mod list;
mod selector;
mod summary;

use crate::retrieval::cluster_choice::HeadSharing;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter};
use selector::FixedClusterSelector;
use std::sync::Arc;
use summary::LaterTokens;

/// ClusterKV.
pub(crate) const CLUSTERKV: Method = Method {
    name: "clusterkv",
    alias: "",
    about: "clusters of similar keys, and new ones for every 320 new tokens; the number is their mean size",
    parameter: MethodParameter::Default(16),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Clusters {
        paper: HeadSharing::PerHead,
        members: HeadSharing::Joint,
        has_window: false,
        has_replicas: false,
    },
    make: |choice, adapter| {
        let options = choice.clusters("clusterkv")?;
        Ok(Arc::new(FixedClusterSelector::new("clusterkv", LaterTokens::NewClusters, options, adapter)?))
    },
};

/// Static clusters.
pub(crate) const KMEANS: Method = Method {
    name: "kmeans",
    alias: "",
    about: "static clusters of similar keys, which new tokens join; the number is their mean size",
    parameter: MethodParameter::Default(16),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Clusters {
        paper: HeadSharing::PerHead,
        members: HeadSharing::Joint,
        has_window: false,
        has_replicas: false,
    },
    make: |choice, adapter| {
        let options = choice.clusters("kmeans")?;
        Ok(Arc::new(FixedClusterSelector::new("kmeans", LaterTokens::Join, options, adapter)?))
    },
};
