//! Copies and devices: repairing, and changing who is a member.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::reclaim::{self, Repaired};
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST, Member};

impl Store {
    /// Makes good what is known to be wrong with copies: those that failed a read are looked at and made anew, frames with fewer copies
    /// than their sequences ask for get the others, and frames leave devices that are to go. The background does this by itself; call
    /// it to wait until it is done, or in a simulation.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`], [`ErrorKind::Poisoned`]: a commit failed.
    pub fn repair(&self) -> Result<Repaired> {
        let mut all = reclaim::repair(&self.inner)?;
        // What it moved may have been the last that a device held.
        while all.left == 0 {
            let next = reclaim::repair(&self.inner)?;
            all.checked += next.checked;
            all.healed += next.healed;
            all.copied += next.copied;
            all.removed += next.removed;
            all.left = next.left;
            if next.healed + next.copied + next.removed == 0 {
                break;
            }
        }
        Ok(all)
    }

    /// Takes a device out of the store: nothing new goes to it, what it holds moves to the others, then it is no member any more.
    /// Its directory may be given up once this returns.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such device, or the only one. [`ErrorKind::NoSpace`]: the others have no room for what it
    /// holds; it stays a member, and takes nothing new until the call is repeated with room, or the store is opened again.
    pub fn remove_device(&self, device: u16) -> Result<Repaired> {
        let member = self.member(device)?;
        if member.state == MEMBER_ACTIVE {
            if self.inner.devices.open_count() < 2 {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("device {device} is the only one")));
            }
            self.inner.change_member(Member { state: MEMBER_DRAINING, ..member })?;
        }
        let done = self.repair()?;
        match done.left {
            0 => Ok(done),
            left => {
                let text = format!("{left} frames of device {device} found no room on the other devices");
                Err(Error::new(ErrorKind::NoSpace, text))
            }
        }
    }

    /// Declares a device lost: it is not written to or read from any more where there is another copy, and what had a copy on it gets
    /// another one elsewhere by [`Store::repair`].
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
