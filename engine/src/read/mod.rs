//! Read batches: many views in one call, submitted together, verified part by part, attended in a fixed order.

mod attend;
mod batch;
mod copy_fallback;
mod decode_check;
mod event;
mod hedge;
mod prefetch;
mod progress;
mod shared_blocks;
mod summary_read;
mod ticket;
mod timing;
mod verify;

pub use attend::{AttendOptions, attend, attend_with};
pub use batch::{PlaneBytes, ReadBatch, SelectionBlocks};
pub use event::EventWaker;
pub(crate) use prefetch::ReadTimes;
pub(crate) use summary_read::{ReadSection, RecordsTicket};
pub use ticket::ReadTicket;
