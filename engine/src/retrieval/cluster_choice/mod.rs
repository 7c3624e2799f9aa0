//! What methods that choose clusters share: scores of clusters, and the choice under a budget.
//!
//! | file | what it does |
//! |---|---|
//! | `representatives` | scores clusters by one vector each, a centroid or the key of a medoid |
//! | `member_codes` | scores clusters by the sum of their members' transform-coded keys |
//! | `take` | takes clusters by falling score until the budget is used |
//! | `options` | the parts of a method's name: mean size, chooser, heads |
//!
//! Invariant: a token is chosen once per list, however many clusters hold it, and the budget counts distinct tokens.

mod member_codes;
mod options;
mod representatives;
mod take;

pub(crate) use member_codes::{CodedMembers, coded_members};
pub(crate) use options::ClusterOptions;
pub use options::{ChosenBy, HeadSharing};
pub(crate) use representatives::Representatives;
pub(crate) use take::{Taken, take_clusters};
