//! Changes of the members of a store: devices that join, leave, and are lost.

use super::Store;
use super::create::{prepare, random_id, write_first_superblock};
use super::start::{MemberDevice, measure_device, start_device};
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::io::file::directory::{Access, Directory};
use crate::maintenance::{Repair, RepairReport};
use crate::metrics::lock;
use crate::recovery::{open_directories, read_superblock};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST, MEMBER_REMOVED, Member};
use stratakv_format::superblock::{self, DEVICES_MAX, STATE_OPEN, Slot};
use stratakv_format::{DeviceIndex, PAGE_BYTES};
use zerocopy::little_endian::{U16, U32, U64};

/// How long the removal of a device waits for selections and reads in flight that hold places on it.
const HOLDERS_WAIT: Duration = Duration::from_secs(1);
/// The pause between two checks during that wait.
const HOLDERS_LOOK: Duration = Duration::from_millis(10);
/// Devices that have a copy of the manifest, if the store has as many.
const MANIFESTS: usize = 3;

impl Store {
    /// Adds a device to the store: an empty directory, or one that left this store. Returns its index, which is always
    /// a new one.
    ///
    /// If the directory left this store, frames that have their only copy on it are saved first. Then all its content
    /// is removed. New frames are written to the device from now on. Frames with fewer copies than their sequences ask
    /// for get copies there in the background ([`Store::repair`] waits for them). Frames on other devices stay there.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: the directory belongs to another store, holds something else, or cannot be opened
    /// (see [`crate::StoreOptions::open`]). [`ErrorKind::InUse`]: a store has it open, perhaps this one, from before
    /// the device was lost. [`ErrorKind::InvalidArgument`]: it is a device of this store, or the store has had as many
    /// devices as it can. [`ErrorKind::NoSpace`]: the other devices have no space for frames that only it holds. Or a
    /// commit failed.
    pub fn add_device(&self, path: impl AsRef<Path>) -> Result<u16> {
        self.inner.committer.check()?;
        let path = path.as_ref();
        let directory = open_directories(&[path.to_owned()], Access::ReadWrite)?.remove(0);
        self.add_directory(directory).map_err(|e| e.during(format!("add device {}", path.display())))
    }

    pub(crate) fn add_directory(&self, directory: Arc<dyn Directory>) -> Result<u16> {
        let inner = &self.inner;
        // The repair is locked, so that one change of members runs at a time.
        let repair = Repair::new(inner);
        inner.committer.check()?;
        let devices = &inner.devices;
        let index = devices.list.slots();
        if index >= usize::from(DEVICES_MAX) {
            let text = format!("a store has at most {DEVICES_MAX} devices, including devices that left it");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if let (Some(slot), _) = read_superblock(&*directory)? {
            self.rescue(&directory, &slot, &repair)?;
            directory.remove_file(superblock::FILE)?;
            directory.sync_dir(".")?;
        }
        prepare(&*directory)?;
        let place = inner.committer.place();
        let mut slot = Slot {
            magic: superblock::MAGIC,
            features: devices.features(),
            sequence: U64::new(0),
            store_id: devices.identity.store_id,
            device_id: random_id(&devices.environment)?,
            epoch: U64::new(inner.committer.epoch()),
            manifest_generation: U64::new(place.generation),
            manifest_nonce: U64::new(place.nonce),
            synced_through: U64::new(place.synced_through),
            created_unix_s: U64::new(devices.environment.unix_ms() / 1000),
            segment_bytes: U64::new(u64::from(devices.identity.segment_pages) * PAGE_BYTES as u64),
            device_index: U16::new(index as u16),
            device_count: U16::new(index as u16 + 1),
            payload_checksum: devices.identity.checksum as u8,
            state: STATE_OPEN,
            manifest_copies: 0,
            reserved: 0,
        };
        write_first_superblock(&*directory, &mut slot)?;
        // The device is a lost member, which takes no frames, until the manifest names it.
        let member = Member {
            epoch: slot.epoch,
            device_id: slot.device_id,
            device: U16::new(index as u16),
            state: MEMBER_LOST,
            manifest_copies: 0,
            weight: U32::new(0),
            bytes_limit: U64::new(0),
        };
        let device = start_device(&devices.environment, &devices.threads, MemberDevice { directory, slot, member })?;
        let holders = devices.list.iter().filter(|own| !own.is_lost() && own.member().manifest_copies > 0).count();
        if !devices.list.add(device) {
            return Err(Error::new(ErrorKind::Busy, "another device is being added"));
        }
        let device = devices.get(DeviceIndex(index as u16))?;
        // A device without a profile works. One that stays in the list without a member would not.
        let _ = measure_device(devices, device);
        lock(&inner.space).join(device.index);
        inner.change_member(Member {
            state: MEMBER_ACTIVE,
            manifest_copies: u8::from(holders < MANIFESTS),
            ..member
        })?;
        Ok(index as u16)
    }

    /// Checks that a directory with a superblock may become another device, and saves frames whose only copy is on it.
    ///
    /// Only frames that the manifest names and whose checksums match are saved.
    fn rescue(&self, directory: &Arc<dyn Directory>, slot: &Slot, repair: &Repair<'_>) -> Result<()> {
        let inner = &self.inner;
        if slot.store_id != inner.devices.identity.store_id {
            return Err(Error::new(ErrorKind::Configuration, "it belongs to another store"));
        }
        let member = {
            let catalog = lock(&inner.catalog);
            catalog.members.values().find(|member| member.device_id == slot.device_id).copied()
        };
        let Some(member) = member.filter(|member| member.state != MEMBER_REMOVED) else { return Ok(()) };
        let device = member.device.get();
        if member.state != MEMBER_LOST {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("it is device {device} of this store")));
        }
        if inner.devices.list.get(usize::from(device)).is_none() {
            let known = MemberDevice { directory: Arc::clone(directory), slot: *slot, member };
            inner.devices.list.add(start_device(&inner.devices.environment, &inner.devices.threads, known)?);
        }
        let done = repair.all()?;
        if inner.devices.list.get(usize::from(device)).is_none() {
            return Ok(());
        }
        let text = format!(
            "it was device {device}, and {} frames have no copy elsewhere: the other devices have no space, or open \
             sequences and readers hold them",
            done.left
        );
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Removes a device from the store. Its directory may be deleted once this returns.
    ///
    /// 1. The device takes no new frames.
    /// 2. Its frames move to the other devices.
    /// 3. The manifest removes the member.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such device, or it is the only one. [`ErrorKind::NoSpace`]: the
    /// other devices have no space for its frames. [`ErrorKind::Busy`]: sequences, forks or readers hold frames on it
    /// that no commit names, or selections and reads in flight hold places on it. After `NoSpace` and `Busy` it stays a
    /// member that takes no new frames. It is removed when there is space and nothing holds it, or by another call.
    pub fn remove_device(&self, device: u16) -> Result<RepairReport> {
        // The repair is locked throughout, so that this report counts the moved frames, not the background.
        let repair = Repair::new(&self.inner);
        let member = self.member(device)?;
        if member.state == MEMBER_ACTIVE {
            if self.inner.devices.open_count() < 2 {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("device {device} is the only one")));
            }
            self.inner.change_member(Member { state: MEMBER_DRAINING, ..member })?;
        }
        let mut done = repair.all()?;
        // Selections and reads that hold a place on the device are not blocked, so they end soon.
        let deadline = Instant::now() + HOLDERS_WAIT;
        let devices = &self.inner.devices;
        let there = || devices.environment.has_threads() && devices.list.get(usize::from(device)).is_some();
        while done.left == 0 && there() && Instant::now() < deadline {
            std::thread::sleep(HOLDERS_LOOK);
            done.add(&repair.all()?);
        }
        match done.left {
            0 if self.inner.devices.list.get(usize::from(device)).is_none() => Ok(done),
            0 => {
                let text = format!(
                    "device {device} is still held by frames that no commit names, or by selections: commit or drop \
                     forks, readers, sequences and selections"
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
            left => {
                let text = format!(
                    "the other devices have no space for {left} frames of device {device}; add a device or delete \
                     sequences"
                );
                Err(Error::new(ErrorKind::NoSpace, text))
            }
        }
    }

    /// Declares a device lost. The store does not write to it any more, and reads from it only frames that have no
    /// other copy. [`Store::repair`] writes new copies of its frames to other devices.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such device, or it is the only one.
    pub fn declare_lost(&self, device: u16) -> Result<()> {
        let member = self.member(device)?;
        if member.state == MEMBER_LOST {
            return Ok(());
        }
        if self.inner.devices.list.iter().filter(|other| !other.is_lost()).count() < 2 {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("device {device} is the only one")));
        }
        event!(error, device = device, "a device is declared lost");
        self.inner.change_member(Member { state: MEMBER_LOST, ..member })
    }

    fn member(&self, device: u16) -> Result<Member> {
        let found = self.inner.devices.list.get(usize::from(device)).map(|device| device.member());
        found.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, format!("the store has no device {device}")))
    }
}
