//! The scheduling seam: shards that run on the threads of their callers instead of threads of their own.
//!
//! A store whose environment brings a [`ThreadlessScheduler`] starts no shard thread. Every device that it opens is
//! served by a [`ThreadlessDevice`], which runs turns of its shard when callers submit, wait or close.

use super::device_handle::DeviceHandle;
use crate::error::Result;
use crate::io::replacement::Replacement;

/// Serves the devices of one store without threads.
pub(crate) trait ThreadlessScheduler: Send + Sync {
    /// Serves a device. At most `shards_max` shards serve all devices. With none, each device has its own shard.
    ///
    /// # Errors
    /// The driver refuses the device.
    fn serve(&self, handle: DeviceHandle, shards_max: Option<usize>) -> Result<Replacement<dyn ThreadlessDevice>>;
}

/// A device whose shard runs on the threads of its callers.
pub(crate) trait ThreadlessDevice: Send + Sync {
    /// Tells the shard that a batch was pushed into the device's inbox.
    fn submitted(&self);

    /// Runs the shard until the device's batches are done, and then releases the device.
    fn close(&self);
}
