//! Read batches: many views in one call, submitted together, verified part by part, attended in a fixed order.

mod ahead;
mod attend;
mod batch;
mod copies;
mod decodable;
mod event;
mod hedge;
mod progress;
mod records;
mod shared;
mod ticket;
mod times;
mod verify;

pub(crate) use ahead::ReadTimes;
pub use attend::{AttendOptions, attend, attend_with};
pub use batch::{PlaneBytes, ReadBatch, ViewBlocks};
pub use event::EventWaker;
pub(crate) use records::{ReadSection, RecordsTicket};
pub use ticket::ReadTicket;
