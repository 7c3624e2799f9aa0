//! A sequence: one token stream of a store. Callers append to it, commit it, and select from it.
//!
//! [`Sequence`] is a handle over parts that each own their fields:
//!
//! | part | file | what it keeps |
//! |---|---|---|
//! | `LayerSet`, `LayerState` | `layer_set`, `layer`, `group_builder`, `layer_summaries` | tokens, places, summaries |
//! | `TokenIds` | `token_ids` | token ids, and how many of them frames hold |
//! | `CallerState` | `caller_state` | the caller's bytes, and the frame with them |
//! | `FrameSet` | `frame_set` | frames being written, and frames that commits named |
//! | `CommitState` | `commit_state` | what is committed, owed and cut; the lock |
//! | `SelectorSet` | `selector_set` | attached selectors and the memory of their summaries |
//! | `SummaryStreams` | `streams` | records that were read ahead of selections |
//!
//! The other files implement one operation each on these parts. The write path is `append`, `group_drafts`, `commit`.
//! The read path is `select`, `selectors`, `summary_streams`, `suffix_summary`; `read` takes over from the selection.
//! Opening is `open`, `open_frame`, `frame_metadata`.
//! Clusters on disk are `clusters` and `stored_clusters`.
//!
//! Invariants:
//! - one handle per sequence is open: `SequenceLock` in `CommitState` is dropped last;
//! - tokens that were not committed are lost when the handle is dropped;
//! - no space is used again while a write into it is in flight.
//!
//! Lock order: every lock taken here (`catalog`, then `space`; `SummaryStreams`) is held for a few instructions and
//! never during I/O. Callers are `store`, `pipeline` and `export`.

mod adapter;
mod append;
mod attached_summary;
mod blocks;
mod caller_state;
mod cluster_splits;
mod cluster_states;
mod clusters;
mod commit;
mod commit_state;
mod errors;
mod fork;
mod frame_metadata;
mod frame_set;
mod group_builder;
mod group_drafts;
mod group_scan;
mod handle;
mod layer;
mod layer_set;
mod layer_summaries;
mod loaded_clusters;
mod open;
mod open_frame;
mod open_options;
mod plain_rows;
mod reader;
mod reconstruct;
mod referenced_frame;
mod restore;
mod select;
mod select_entries;
mod selector_set;
mod selectors;
mod span;
mod stored_clusters;
mod streams;
mod suffix_summary;
mod summary_build;
mod summary_streams;
mod summary_upkeep;
#[cfg(test)]
mod tests;
mod token_ids;
mod truncate;

pub use crate::plan::GroupEntries;
pub use crate::pools::StoredClusters;
pub(crate) use adapter::{adapter_meta, load_adapter, write_adapter};
pub use handle::Sequence;
pub(crate) use open::load;
pub use open_options::{OpenSequence, SequenceRef};
pub use reader::SequenceReader;
pub(crate) use streams::SummaryStreams;
