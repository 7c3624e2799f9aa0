//! The device directories that stores of this process have open.
//!
//! A lock of another process may be that of a killed one, which ends soon, so an open waits for it. The lock of an open
//! store of this process does not end by waiting.

use super::directory::DirectoryIdentity;
use crate::metrics::lock;
use std::sync::Mutex;

/// The directories of all open stores. A directory that several stores read is there once for each of them.
static OPEN: Mutex<Vec<DirectoryIdentity>> = Mutex::new(Vec::new());

/// Marks directories as open in this process. Dropping it removes the marks.
pub(crate) struct OpenRoots {
    roots: Vec<DirectoryIdentity>,
}

impl OpenRoots {
    pub(crate) fn new(roots: Vec<DirectoryIdentity>) -> Self {
        lock(&OPEN).extend_from_slice(&roots);
        Self { roots }
    }

    /// Returns whether a store of this process has a directory open.
    pub(super) fn contain(root: DirectoryIdentity) -> bool {
        lock(&OPEN).contains(&root)
    }
}

impl Drop for OpenRoots {
    fn drop(&mut self) {
        let mut open = lock(&OPEN);
        for root in &self.roots {
            if let Some(at) = open.iter().position(|own| own == root) {
                open.swap_remove(at);
            }
        }
    }
}
