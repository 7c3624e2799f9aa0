//! The scheduler: threads that serve devices, and the batches that callers hand to them.
//!
//! Each shard thread owns one driver and serves one device or several. A caller submits a [`Batch`] through a
//! [`ShardHandle`]; the batch waits in the device's inbox, the shard's loop submits its operations by [`Priority`], and
//! its [`Sink`] hears each outcome.
//!
//! | Type | What it is | File |
//! |---|---|---|
//! | [`ShardThreads`] | all shard threads of a store | `shard_threads.rs` |
//! | [`ShardHandle`] | a served device, as callers see it | `shard_handle.rs` |
//! | `Shard` | the loop of a shard thread | `shard.rs` |
//! | `DeviceQueue` | a served device, as the loop sees it | `device_queue.rs` |
//! | `Inbox` | the queue between the two | `inbox.rs` |
//! | [`ThreadRings`] | rings of callers that drive their own reads | `thread_ring.rs` |
//! | [`ThreadlessScheduler`] | the seam for a simulator | `threadless.rs` |
//!
//! Callers are the rooms `log`, `read`, `sequence` and `maintenance`. The scheduler knows nothing of frames or
//! segments.

mod affinity;
mod batch;
mod device_guard;
mod device_handle;
mod device_queue;
mod inbox;
pub(crate) mod profile;
mod registration_queue;
mod shard;
mod shard_handle;
mod shard_thread;
mod shard_threads;
mod thread_ring;
mod threadless;

#[cfg(test)]
mod tests;

pub(crate) use affinity::Affinity;
pub(crate) use batch::{Batch, Priority, Request, Sink, Waiter};
#[cfg(feature = "sim")]
pub(crate) use device_handle::DeviceHandle;
#[cfg(feature = "sim")]
pub(crate) use shard::Shard;
pub(crate) use shard_handle::ShardHandle;
pub(crate) use shard_threads::ShardThreads;
pub(crate) use thread_ring::{ThreadRingBatch, ThreadRings};
#[cfg(feature = "sim")]
pub(crate) use threadless::ThreadlessDevice;
pub(crate) use threadless::ThreadlessScheduler;
