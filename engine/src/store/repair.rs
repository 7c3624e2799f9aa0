//! The repair of copies.

use super::Store;
use crate::error::Result;
use crate::maintenance::{Repair, RepairReport};

impl Store {
    /// Repairs copies of frames:
    /// 1. Checks copies that failed a read, and writes the damaged ones again.
    /// 2. Writes copies of frames that have fewer than their sequences ask for.
    /// 3. Moves frames from devices that are being removed.
    ///
    /// The background does this by itself. Call it to wait until it is done, or in a simulation.
    ///
    /// # Errors
    /// [`Indeterminate`](crate::ErrorKind::Indeterminate), [`Poisoned`](crate::ErrorKind::Poisoned): a commit failed.
    pub fn repair(&self) -> Result<RepairReport> {
        Repair::new(&self.inner).all()
    }
}
