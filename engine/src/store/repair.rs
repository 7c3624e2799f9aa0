//! Copies: repairing them.

use super::Store;
use crate::error::Result;
use crate::maintenance::{Repair, RepairReport};

impl Store {
    /// Makes good what is known to be wrong with copies: those that failed a read are looked at and made anew, frames
    /// with fewer copies than their sequences ask for get the others, and frames leave devices that are to go. The
    /// background does this by itself; call it to wait until it is done, or in a simulation.
    ///
    /// # Errors
    /// [`Indeterminate`](crate::ErrorKind::Indeterminate), [`Poisoned`](crate::ErrorKind::Poisoned): a commit failed.
    pub fn repair(&self) -> Result<RepairReport> {
        Repair::new(&self.inner).all()
    }
}
