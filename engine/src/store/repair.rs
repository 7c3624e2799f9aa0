//! Copies and devices: repairing, and changing who is a member.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::reclaim::{Repair, Repaired};
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST, Member};

impl Store {
    /// Makes good what is known to be wrong with copies: those that failed a read are looked at and made anew, frames with fewer copies
    /// than their sequences ask for get the others, and frames leave devices that are to go. The background does this by itself; call
    /// it to wait until it is done, or in a simulation.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`], [`ErrorKind::Poisoned`]: a commit failed.
    pub fn repair(&self) -> Result<Repaired> {
        Repair::new(&self.inner).all()
    }

    /// Takes a device out of the store: nothing new goes to it, what it holds moves to the others, then it is no member any more.
    /// Its directory may be given up once this returns.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such device, or the only one. [`ErrorKind::NoSpace`]: the others have no room for what it
    /// holds. [`ErrorKind::Busy`]: sequences, forks or readers hold frames on it that no commit names. In both cases it stays a
    /// member, takes nothing new, and goes when there is room and nobody holds it any more, or the call is repeated.
    pub fn remove_device(&self, device: u16) -> Result<Repaired> {
        // Held throughout, so that what moves is told here and not to the background.
        let repair = Repair::new(&self.inner);
        let member = self.member(device)?;
        if member.state == MEMBER_ACTIVE {
            if self.inner.devices.open_count() < 2 {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("device {device} is the only one")));
            }
            self.inner.change_member(Member { state: MEMBER_DRAINING, ..member })?;
        }
        let done = repair.all()?;
        match done.left {
            0 if self.inner.devices.list.get(usize::from(device)).is_none() => Ok(done),
            0 => {
                let text = format!(
                    "device {device} holds frames that no commit names: commit or drop forks, readers and sequences"
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
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
