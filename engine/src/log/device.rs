//! One device of an open store: its directory, its queue, its superblock and its member record.

use crate::error::Result;
use crate::io::file::directory::{Access, Directory};
use crate::io::scheduler::ShardHandle;
use crate::io::scheduler::profile::Profile;
use crate::metrics::{DeviceCounters, lock};
use std::sync::{Arc, Mutex};
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_LOST, MEMBER_REMOVED, Member};
use stratakv_format::superblock::{self, SLOTS, Slot};
use stratakv_format::{DeviceIndex, PAGE_BYTES};
use zerocopy::little_endian::U64;

/// Bytes that one unit of a member's weight stands for, next to devices that are weighed by size.
const WEIGHT_BYTES: f64 = (1_u64 << 30) as f64;

/// One device of an open store.
pub(crate) struct Device {
    pub(crate) index: DeviceIndex,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) shard: ShardHandle,
    pub(crate) counters: Arc<DeviceCounters>,
    /// The superblock slot that was written last.
    pub(crate) slot: Mutex<Slot>,
    pub(crate) profile: Arc<Profile>,
    /// Its member record in the manifest.
    pub(crate) member: Mutex<Member>,
    /// Bytes of its file system.
    pub(crate) total_bytes: u64,
}

impl Device {
    /// Writes the next superblock slot durably: the last one as `change` alters it.
    pub(crate) fn write_superblock(&self, change: impl Fn(&mut Slot)) -> Result<()> {
        let mut slot = lock(&self.slot);
        let mut next = *slot;
        change(&mut next);
        next.sequence = U64::new(slot.sequence.get() + 1);
        let file = self.directory.open_file(superblock::FILE, Access::ReadWrite)?;
        let at = next.sequence.get() % SLOTS as u64 * PAGE_BYTES as u64;
        self.directory.write_small(&file, at, &next.encode())?;
        self.directory.sync_small(&file)?;
        *slot = next;
        Ok(())
    }
}

impl Device {
    pub(crate) fn member(&self) -> Member {
        *lock(&self.member)
    }

    /// Returns whether it was declared lost. Nothing is written to a lost device.
    pub(crate) fn is_lost(&self) -> bool {
        self.member().state == MEMBER_LOST
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.member().state == MEMBER_REMOVED
    }

    /// Returns whether it neither leaves nor is gone.
    pub(crate) fn is_active(&self) -> bool {
        self.member().state == MEMBER_ACTIVE
    }

    /// Returns whether it takes new frames.
    pub(crate) fn takes_frames(&self) -> bool {
        self.is_active() && self.directory.poison().check().is_ok()
    }

    /// Returns its share of the data: the weight it joined with, or its size.
    pub(super) fn weight(&self) -> f64 {
        match self.member().weight.get() {
            0 => self.total_bytes as f64,
            weight => f64::from(weight) * WEIGHT_BYTES,
        }
    }
}
