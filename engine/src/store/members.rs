//! Changing who is a member: devices that join, leave, and are lost.

use super::Store;
use super::create::{prepare, random_id, write_first_superblock};
use super::start::{MemberDevice, measure_device, start_device};
use crate::error::{Error, ErrorKind, Result};
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

/// How long the removal of a device waits for views and reads under way that hold places on it, and how often it looks.
const HOLDERS_WAIT: Duration = Duration::from_secs(1);
const HOLDERS_LOOK: Duration = Duration::from_millis(10);
/// Devices that have a copy of the manifest, if there are as many.
const MANIFESTS: usize = 3;

impl Store {
    /// Adds a device to the store: an empty directory, or one that left this store. What the latter has the only copy
    /// of is saved first; then all that it holds is removed. Gives the index of the device, which is always a new one.
    /// New frames go to it from now on; frames with fewer copies than their sequences ask for get the others there by
    /// and by ([`Store::repair`] waits for it). What lies on other devices stays where it is.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: the directory belongs to another store, holds something else, or does not fit as
    /// in [`crate::StoreOptions::open`]. [`ErrorKind::InUse`]: somebody has it open, this store included, which may
    /// have been opened with it before it was lost. [`ErrorKind::InvalidArgument`]: it is a device of this store, or
    /// there have been as many as a store can have. [`ErrorKind::NoSpace`]: the other devices have no room for what
    /// only it has. Or a commit failed.
    pub fn add_device(&self, path: impl AsRef<Path>) -> Result<u16> {
        self.inner.committer.check()?;
        let path = path.as_ref();
        let directory = open_directories(&[path.to_owned()], Access::ReadWrite)?.remove(0);
        self.add_directory(directory).map_err(|e| e.during(format!("add device {}", path.display())))
    }

    pub(crate) fn add_directory(&self, directory: Arc<dyn Directory>) -> Result<u16> {
        let inner = &self.inner;
        // One change at a time.
        let repair = Repair::new(inner);
        inner.committer.check()?;
        let devices = &inner.devices;
        let index = devices.list.slots();
        if index >= usize::from(DEVICES_MAX) {
            let text = format!("a store has at most {DEVICES_MAX} devices, those that left it included");
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
        // As one that takes nothing, until the manifest knows it.
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
        measure_device(devices, device)?;
        lock(&inner.space).join(device.index);
        inner.change_member(Member {
            state: MEMBER_ACTIVE,
            manifest_copies: u8::from(holders < MANIFESTS),
            ..member
        })?;
        Ok(index as u16)
    }

    /// Sees that a directory with a superblock may become another device, and saves what it has the only copy of.
    /// Nothing else on it is believed: what the manifest names and what its checksums prove.
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
            "it was device {device}, and {} frames have no copy elsewhere: no room, or nobody lets go of them",
            done.left
        );
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Takes a device out of the store: nothing new goes to it, what it holds moves to the others, then it is no member
    /// any more. Its directory may be given up once this returns.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such device, or the only one. [`ErrorKind::NoSpace`]: the others have no room
    /// for what it holds. [`ErrorKind::Busy`]: sequences, forks or readers hold frames on it that no commit names, or
    /// views and reads under way were taken when frames still lay on it. In both cases it stays a member, takes nothing
    /// new, and goes when there is room and nobody holds it any more, or the call is repeated.
    pub fn remove_device(&self, device: u16) -> Result<RepairReport> {
        // Held throughout, so that what moves is told here and not to the background.
        let repair = Repair::new(&self.inner);
        let member = self.member(device)?;
        if member.state == MEMBER_ACTIVE {
            if self.inner.devices.open_count() < 2 {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("device {device} is the only one")));
            }
            self.inner.change_member(Member { state: MEMBER_DRAINING, ..member })?;
        }
        let mut done = repair.all()?;
        // Those who took a place on it, as views do, are not held up and soon done.
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
                    "device {device} is still held by frames that no commit names, or by views: commit or drop forks, readers, sequences and views"
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
            left => {
                let text = format!("{left} frames of device {device} found no room on the other devices");
                Err(Error::new(ErrorKind::NoSpace, text))
            }
        }
    }

    /// Declares a device lost: it is not written to or read from any more where there is another copy, and what had a
    /// copy on it gets another one elsewhere by [`Store::repair`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such device, or the only one.
    pub fn declare_lost(&self, device: u16) -> Result<()> {
        let member = self.member(device)?;
        if member.state == MEMBER_LOST {
            return Ok(());
        }
        if self.inner.devices.list.iter().filter(|other| !other.is_lost()).count() < 2 {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("device {device} is the only one")));
        }
        self.inner.change_member(Member { state: MEMBER_LOST, ..member })
    }

    fn member(&self, device: u16) -> Result<Member> {
        let found = self.inner.devices.list.get(usize::from(device)).map(|device| device.member());
        found.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, format!("the store has no device {device}")))
    }
}
