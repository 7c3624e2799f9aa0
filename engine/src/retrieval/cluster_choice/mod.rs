//! What methods that choose clusters share: scores of clusters, and the choice under a budget.
//!
//! | file | what it does |
//! |---|---|
//! | `clustered_keys` | clusters waiting keys by k-means |
//! | `cluster_list` | chooses among the clusters of one list |
//! | `waiting_keys` | keeps the keys of groups that wait for clusters |
//! | `recent_changes` | remembers which clusters took in tokens or were split |
//! | `recent_tokens` | keeps the newest tokens out of clusters, each as a cluster of one |
//! | `representatives` | scores clusters by one vector each, a centroid or the key of a medoid |
//! | `member_codes` | scores clusters by the sum of their members' transform-coded keys |
//! | `take` | takes clusters by falling score until the budget is used |
//! | `take_tokens` | takes the best single tokens, for methods without clusters |
//! | `choice_bytes` | the most bytes that a choice allocates |
//! | `options` | the parts of a method's name: mean size, chooser, heads |
//!
//! Invariant: a token is chosen once per list, however many clusters hold it, and the budget counts distinct tokens.

mod choice_bytes;
mod cluster_list;
mod clustered_keys;
mod key_space;
mod member_codes;
mod options;
mod recent_changes;
mod recent_tokens;
mod representatives;
mod take;
mod take_tokens;
mod waiting_keys;

pub(crate) use choice_bytes::{
    coded_bytes, list_choice_bytes, product_bytes, recent_bytes, take_bytes, token_choice_bytes,
};
pub(crate) use cluster_list::{ClusterList, ListChoice, choose_clusters, choose_from_lists};
pub(crate) use clustered_keys::{ClusteredKeys, FIRST_ENTRIES, cluster_keys, cluster_keys_bytes};
pub(crate) use key_space::KeySpace;
pub(crate) use member_codes::{coded_members, codes_in, member_codes};
pub(crate) use options::ClusterOptions;
pub use options::{ChosenBy, HeadSharing};
pub(crate) use recent_changes::RecentChanges;
pub(crate) use recent_tokens::RecentTokens;
pub(crate) use representatives::{HeadProducts, RepresentativeRows};
pub(crate) use take::{Overlap, Taken, take_clusters};
pub(crate) use take_tokens::take_tokens;
pub(crate) use waiting_keys::WaitingKeys;
