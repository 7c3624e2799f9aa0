//! Reading selections: many selections in one call, submitted together, verified part by part, attended in a fixed
//! order.
//!
//! | file | what it does |
//! |---|---|
//! | `ticket`, `progress`, `state` | drive a read and count its completions |
//! | `block_reader` | reads ranges of segments for callers that wait |
//! | `verify`, `decode_check` | check blocks |
//! | `pages` | checks pages of stored clusters, and fills those that failed from groups |
//! | `copy_fallback`, `hedge` | try other copies of blocks that failed or are late |
//! | `shared_blocks`, `prefetch` | hand blocks from one read to another |
//! | `batch`, `planes`, `attend` | the blocks that were read, and attention over them |
//! | `attend_arrivals` | reads, verifies and attends in one call |
//! | `summary_read` | reads summary records through a ticket |
//! | `event`, `timing`, `errors` | wakers, times and errors of reads |

mod attend;
mod attend_arrivals;
mod batch;
mod block_reader;
mod copy_fallback;
mod decode_check;
mod errors;
mod event;
mod hedge;
mod pages;
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
pub(crate) use prefetch::{PrefetchedBlocks, ReadTimes};
pub(crate) use summary_read::{ReadSection, RecordsTicket};
pub use ticket::ReadTicket;

pub use crate::io::buffer::region::ReadRegion;
