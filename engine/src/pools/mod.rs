//! Clusters on disk: the entries of a sequence once more, in the order of clusters (SPEC.md chapter 11).
//!
//! | file | what it does |
//! |---|---|
//! | `layer_clusters` | the clusters of a layer as they are stored: each covered token is in at least one |
//! | `earlier` | the pages of the set that a sequence has stored |
//! | `growth_plan` | which of them stay, and which entries are written |
//! | `page_plan` | which entries are in which page, and which device gets it |
//! | `page_rows` | copies keys and values from groups to pages |
//! | `directory_pieces` | the directory of one head, or of all heads, as pieces |
//! | `writer` | writes pools and directories as derived frames, and commits them |
//! | `frame_write` | writes one derived frame |
//! | `state_pieces` | writes the state of a method, and finds it |
//! | `report` | the result for the caller |
//! | `stored_set`, `stored_list` | directories that were read: where each token is in pages |
//! | `cover` | the pages that give chosen entries |
//! | `page_sources` | the devices of pages, and when each ends |
//!
//! Invariants:
//! - Pages repeat decoded elements of groups that are committed. No token counts because of a page.
//! - A page is written once, and synced before a commit names its directory.
//! - On each device, the pages of neighbouring clusters are neighbours, so that they are read with one request.

mod cover;
#[cfg(test)]
mod cover_tests;
mod directory_pieces;
mod earlier;
mod frame_write;
mod growth_plan;
#[cfg(test)]
mod growth_tests;
mod layer_clusters;
mod page_plan;
mod page_rows;
mod page_sources;
mod report;
mod state_pieces;
mod stored_list;
mod stored_set;
#[cfg(test)]
mod tests;
mod writer;

pub(crate) use cover::{ChosenPage, Covered};
pub(crate) use earlier::{EarlierFrame, EarlierLayer};
pub(crate) use layer_clusters::LayerClusters;
pub(crate) use page_rows::{GroupPlanes, PlaneVisitor, put_entry, take_entry};
pub(crate) use page_sources::{PageDevice, PageSources};
pub use report::StoredClusters;
pub(crate) use state_pieces::{FrontPieces, JoinedState, StateFrames, StatePlace, StatesFront, WrittenStates, join};
pub(crate) use stored_set::{DirectoryFront, StoredLayer, StoredSet, find_pieces};
pub(crate) use writer::{PoolWriter, commit_derived};
