//! SWARM: clusters of entries that queries activate together.
//!
//! Source: SWARM, sections 5.1, 5.2 and 6.2. How the method works here:
//! 1. [`Sequence::profile`](crate::Sequence::profile) takes recorded queries. Each query activates the entries that
//!    hold most of its attention weight.
//! 2. Entries that are activated together form clusters around medoids (Algorithm 1). Entries that no query activated
//!    join the medoid with the nearest key. An entry is a token with the keys of all KV heads.
//! 3. A query chooses clusters by the keys of their medoids, or by the sum of their members' codes (`:members`).
//! 4. Tokens that are appended later wait in a window of 256 tokens. Each of them is chosen by itself, as a cluster of
//!    one, by its own key or code. Behind the window, each one joins the clusters whose medoids were activated in the
//!    same steps (section 6.2).
//!
//! The paper attends to the whole window. `swarm:window` does so too, but small budgets have no room for it.
//! The paper limits neither the size of a cluster nor the clusters of an entry. Here a cluster has at most 16 entries,
//! or twice its mean size. An entry is in at most two clusters, and in one if members are scored. `swarm:single` puts
//! it into one as well: the paper's No Replica.

mod members;
mod selector;
mod state;
mod summary;
#[cfg(test)]
mod tests;
mod window;

use crate::retrieval::cluster_choice::HeadSharing;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter};
pub use selector::Swarm;
use std::sync::Arc;

/// SWARM.
pub(crate) const SWARM: Method = Method {
    name: "swarm",
    alias: "",
    about: "clusters of tokens that recorded queries activate together; the number is their mean size",
    parameter: MethodParameter::Default(8),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Clusters {
        paper: HeadSharing::Joint,
        members: HeadSharing::Joint,
        has_window: true,
        has_replicas: true,
    },
    make: |choice, adapter| Ok(Arc::new(Swarm::new(choice.clusters("swarm")?, adapter)?)),
};
