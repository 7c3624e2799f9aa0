//! Clusters of equal size, which fill pages.
//!
//! How the method works:
//! 1. When the selector is attached, the keys of all sealed groups are [bisected](crate::retrieval::clusters::bisect)
//!    into clusters of 8. A sequence that is shorter than 256 tokens is clustered when it has that many.
//! 2. Every 320 later tokens become clusters of their own, as ClusterKV does (Liu et al. 2024). Clusters never change.
//! 3. The tokens that are in no cluster yet are chosen in runs that fill a page, or one by one for centroids.
//! 4. A query chooses clusters by the sum of their members' codes (`:members`), or by centroids.
//!
//! Clusters of DynaKV and SWARM vary in size. A page that is read for one of them holds entries of others, and a full
//! page of 8 entries holds nothing else here. Stored clusters never move, so each page is written once.

mod list;
mod selector;
mod state;
mod summary;

use crate::retrieval::cluster_choice::HeadSharing;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter};
use selector::BalancedSelector;
use std::sync::Arc;

/// Clusters of equal size.
pub(crate) const BALANCED: Method = Method {
    name: "balanced",
    alias: "",
    about: "clusters of similar keys that all have the same size, which is the number",
    parameter: MethodParameter::Default(8),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Clusters {
        paper: HeadSharing::PerHead,
        members: HeadSharing::Joint,
        has_window: false,
        has_replicas: false,
    },
    make: |choice, adapter| Ok(Arc::new(BalancedSelector::new(choice.clusters("balanced")?, adapter)?)),
};
