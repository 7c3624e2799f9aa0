//! Seams: the parts of the system that a store uses, as traits that a simulator can implement.
//!
//! | Seam | Trait | The system's part |
//! |---|---|---|
//! | clock | [`Clock`] | the system clock |
//! | random numbers | [`RandomSource`] | `getrandom` |
//! | files | [`Directory`](crate::io::file::directory::Directory), [`ReplacedFile`] | `os_directory` |
//! | scheduling | [`ThreadlessScheduler`] | shard threads and background threads |
//!
//! A store is given an [`Environment`] when it is opened and uses the system only through it. The default environment
//! is the operating system's.
//!
//! Invariant: without the feature `sim` an [`Environment`] has no size and costs nothing. See [`Replacement`].
//!
//! [`ReplacedFile`]: crate::io::file::device_file::ReplacedFile

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use crate::io::replacement::Replacement;
use crate::io::scheduler::ThreadlessScheduler;
use crate::metrics::MemoryBudget;

/// Sizes that a simulation makes small, so that its cases reach their limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Bytes of a new manifest file. A manifest that is full ends in a checkpoint.
    pub(crate) manifest_bytes: u64,
    /// Bytes of zeros that are written at once over a new manifest file, so that a later sync has no extents to
    /// convert.
    pub(crate) zero_bytes: usize,
    /// Bytes of records of one batch, at most.
    pub(crate) batch_bytes: usize,
    /// Tokens that commits write one by one before a commit writes their groups.
    pub(crate) gather_tokens: u64,
    /// The least memory limit of a store whose commits gather groups. With less, a read may need all the memory.
    pub(crate) gather_memory: usize,
    /// Files of segments that stay open, at most. `None`: as many as the limit of descriptors suggests.
    pub(crate) open_files: Option<usize>,
}

const SIZES: Sizes = Sizes {
    manifest_bytes: 4 << 20,
    zero_bytes: 1 << 20,
    batch_bytes: stratakv_format::manifest::RECORDS_BYTES_MAX,
    gather_tokens: 64,
    gather_memory: 16 << 20,
    open_files: None,
};

/// A clock.
pub(crate) trait Clock {
    /// Returns the time in milliseconds since 1970.
    fn unix_ms(&self) -> u64;
}

/// A source of random numbers.
pub(crate) trait RandomSource {
    fn random_u64(&self) -> u64;
}

/// A system in place of the real one.
pub(crate) trait ReplacedSystem: Clock + RandomSource + Send + Sync {
    fn sizes(&self) -> Sizes;

    /// Returns a scheduler for the devices of one store.
    fn scheduler(&self) -> Replacement<dyn ThreadlessScheduler>;

    /// Returns the memory budget of a store and its arena.
    fn buffers(&self, limit: usize) -> (Arc<MemoryBudget>, Arena);
}

/// The system as a store sees it, apart from its devices.
#[derive(Clone, Default)]
pub(crate) struct Environment {
    replaced: Option<Replacement<dyn ReplacedSystem>>,
}

impl Environment {
    /// Returns an environment in which `system` takes the place of the operating system.
    #[cfg(feature = "sim")]
    pub(crate) fn replaced(system: Replacement<dyn ReplacedSystem>) -> Self {
        Self { replaced: Some(system) }
    }

    /// Returns the sizes of manifests and batches.
    pub(crate) fn sizes(&self) -> Sizes {
        self.replaced.as_ref().map_or(SIZES, |system| system.sizes())
    }

    /// Returns a random number for ids and nonces.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn random_u64(&self) -> Result<u64> {
        match &self.replaced {
            Some(system) => Ok(system.random_u64()),
            None => getrandom::u64()
                .map_err(|e| Error::new(ErrorKind::Io, format!("read random numbers from the system: {e}"))),
        }
    }

    /// Returns the time in milliseconds since 1970.
    pub(crate) fn unix_ms(&self) -> u64 {
        if let Some(system) = &self.replaced {
            return system.unix_ms();
        }
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns whether the store may start threads. Otherwise its work runs on the threads of its callers.
    pub(crate) fn has_threads(&self) -> bool {
        self.replaced.is_none()
    }

    /// Returns whether the duration of an operation says something about its device.
    pub(crate) fn measures_time(&self) -> bool {
        self.replaced.is_none()
    }

    /// Returns the scheduler that serves a store's devices in place of threads, or none.
    pub(crate) fn threadless_scheduler(&self) -> Option<Replacement<dyn ThreadlessScheduler>> {
        self.replaced.as_ref().map(|system| system.scheduler())
    }

    /// Returns the memory budget of a store and its arena, for `limit` bytes.
    pub(crate) fn buffers(&self, limit: usize) -> (Arc<MemoryBudget>, Arena) {
        if let Some(system) = &self.replaced {
            return system.buffers(limit);
        }
        let budget = MemoryBudget::new(limit);
        let arena = Arena::new(Arc::clone(&budget), limit);
        (budget, arena)
    }
}

#[cfg(all(test, not(feature = "sim")))]
mod tests {
    use super::*;

    #[test]
    fn an_environment_without_the_simulator_has_no_size() {
        assert_eq!(size_of::<Environment>(), 0);
    }
}
