//! Reading selections: many selections in one call, submitted together, verified part by part, attended in a fixed
//! order.
//!
//! `ticket` drives a read. `progress` counts completions. `verify` checks blocks. `copy_fallback` and `hedge` try other
//! copies. `shared_blocks` and `prefetch` hand blocks from one read to another. `attend` consumes them. `block_reader`
//! reads ranges for callers that wait.

mod attend;
mod batch;
mod block_reader;
mod copy_fallback;
mod decode_check;
mod errors;
mod event;
mod hedge;
mod planes;
mod prefetch;
mod progress;
mod shared_blocks;
mod state;
mod summary_read;
mod ticket;
mod timing;
mod verify;

pub use attend::{AttendOptions, attend, attend_with};
pub use batch::{PlaneBytes, ReadBatch, SelectionBlocks};
pub(crate) use block_reader::{BlockReader, CopyFault, SegmentRange, first_good};
pub use event::EventWaker;
pub(crate) use prefetch::ReadTimes;
pub(crate) use summary_read::{ReadSection, RecordsTicket};
pub use ticket::ReadTicket;
