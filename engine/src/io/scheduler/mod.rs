//! The scheduler: threads that serve devices, and the batches that callers hand to them.
//!
//! Each shard thread owns one driver and serves one device or several. How a batch runs:
//! 1. A caller submits a [`Batch`] through a [`ShardHandle`].
//! 2. The batch waits in the device's inbox until the shard's loop moves it to the device's queue.
//! 3. The loop submits the operations of the queue to the driver, by [`Priority`] and within limits.
//! 4. The [`Sink`] of the batch hears each outcome.
//!
//! Demand reads may skip these steps: [`ThreadRings`] drive them on the calling thread. Writes and syncs of a commit
//! may also run on the calling thread: [`ShardHandle::write_blocking`], [`ShardHandle::sync_blocking`].
//!
//! | Type | What it is | File |
//! |---|---|---|
//! | [`ShardThreads`] | all shard threads of a store | `shard_threads.rs` |
//! | [`ShardHandle`] | a served device, as callers see it | `shard_handle.rs` |
//! | `Shard` | the loop of a shard thread | `shard.rs` |
//! | `DeviceQueue` | a served device, as the loop sees it | `device_queue.rs` |
//! | `Inbox` | the queue between the two | `inbox.rs` |
//! | [`ThreadRings`] | rings of callers that drive their own reads | `thread_ring.rs` |
//! | `HelperThread` | a second thread for a caller's reads | `helper_thread.rs` |
//! | [`ThreadlessScheduler`] | the seam for a simulator | `threadless.rs` |
//!
//! Invariants:
//! - A sink hears each request exactly once.
//! - A file has one sync in flight, and a failed sync poisons the device.
//! - The device's lock is held at least until its last write has completed.
//!
//! Lock order: the sync lock of a device, then the threads of a store, then registration queues, which are leaves.
//! Callers are the rooms `store`, `maintenance`, `read` and `log`.

mod affinity;
mod batch;
mod device_guard;
mod device_handle;
mod device_queue;
mod helper_pace;
mod helper_thread;
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
pub(crate) use helper_thread::HelperJob;
#[cfg(feature = "sim")]
pub(crate) use shard::Shard;
pub(crate) use shard_handle::ShardHandle;
pub(crate) use shard_threads::ShardThreads;
pub(crate) use thread_ring::{ThreadRingBatch, ThreadRings, Waves};
#[cfg(feature = "sim")]
pub(crate) use threadless::ThreadlessDevice;
pub(crate) use threadless::ThreadlessScheduler;
