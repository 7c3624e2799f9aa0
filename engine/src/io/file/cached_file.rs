//! Cached files: files that are opened when they are used, and closed when too many are open.
//!
//! A store may have more segments than a process may have descriptors. [`FdCache`] limits the open files. It closes the
//! file that was opened first, unless that file was used since the last look (the clock algorithm).
//!
//! Invariants:
//! - A file in use is not closed.
//! - A file with unsynced writes stays open ([`CachedFile::hold`]), so that the sync that follows reports every error.
//!
//! Lock order: the queue of the cache, then a file's `open`. [`CachedFile::get`] takes `open` alone.

use crate::error::{Error, ErrorKind, Result};
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory};
use crate::metrics::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Files that a cache keeps open, at most.
const OPEN_MAX: usize = 512;
/// Files that a cache keeps open even if the limit of descriptors is low.
const OPEN_MIN: usize = 16;

/// The files that are open, the one opened first at the front.
pub(crate) struct FdCache {
    limit: usize,
    queue: Mutex<VecDeque<Weak<CachedFile>>>,
}

impl FdCache {
    /// Returns a cache for a quarter of the descriptors that this process may have, within bounds, or for `limit`.
    pub(crate) fn new(limit: Option<usize>) -> Arc<Self> {
        if let Some(limit) = limit {
            return Self::with_limit(limit);
        }
        let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(4096);
        Self::with_limit(usize::try_from(allowed / 4).unwrap_or(OPEN_MAX).clamp(OPEN_MIN, OPEN_MAX))
    }

    fn with_limit(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, queue: Mutex::default() })
    }

    /// Adds a file that was opened. If too many are open, closes one that was not used since the last look.
    fn opened(&self, file: &Arc<CachedFile>) {
        let mut queue = lock(&self.queue);
        queue.push_back(Arc::downgrade(file));
        let mut looks = 2 * queue.len();
        while queue.len() > self.limit && looks > 0 {
            looks -= 1;
            let Some(oldest) = queue.pop_front() else { break };
            let Some(candidate) = oldest.upgrade() else { continue };
            if !candidate.close_if_idle() {
                queue.push_back(oldest);
            }
        }
    }

    /// Returns the number of files that may be open.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns whether more files are open than the limit, because they are held or in use.
    pub(crate) fn is_crowded(&self) -> bool {
        lock(&self.queue).len() > self.limit
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.queue).iter().filter(|file| file.upgrade().is_some_and(|file| lock(&file.open).is_some())).count()
    }
}

/// A file by its path, opened when it is needed.
pub(crate) struct CachedFile {
    /// Weak, because the directory holds the store's lock and a selection may outlive the store.
    directory: Weak<dyn Directory>,
    path: String,
    files: Arc<FdCache>,
    open: Mutex<Option<Arc<DeviceFile>>>,
    /// True if the file was used since the cache last looked at it.
    recent: AtomicBool,
    /// True if the file has unsynced writes and must stay open.
    held: AtomicBool,
}

impl CachedFile {
    pub(crate) fn new(directory: &Arc<dyn Directory>, path: String, files: &Arc<FdCache>) -> Arc<Self> {
        let files = Arc::clone(files);
        let (recent, held) = (AtomicBool::new(true), AtomicBool::new(false));
        Arc::new(Self { directory: Arc::downgrade(directory), path, files, open: Mutex::default(), recent, held })
    }

    /// Returns a file that is open already, for writing.
    pub(crate) fn opened(
        directory: &Arc<dyn Directory>,
        path: String,
        files: &Arc<FdCache>,
        file: Arc<DeviceFile>,
    ) -> Arc<Self> {
        let lazy = Self::new(directory, path, files);
        *lock(&lazy.open) = Some(file);
        lazy.held.store(true, Ordering::Relaxed);
        files.opened(&lazy);
        lazy
    }

    /// Returns the open file. Opens it if it is closed.
    ///
    /// # Errors
    /// The file cannot be opened. [`ErrorKind::Corruption`]: there is no such file.
    pub(crate) fn get(self: &Arc<Self>) -> Result<Arc<DeviceFile>> {
        self.recent.store(true, Ordering::Relaxed);
        if let Some(file) = &*lock(&self.open) {
            return Ok(Arc::clone(file));
        }
        let closed = || Error::new(ErrorKind::Closed, format!("open {}: the store is closed", self.path));
        let directory = self.directory.upgrade().ok_or_else(closed)?;
        let fresh = match directory.open_file(&self.path, directory.access()) {
            // A file system that became read-only after an error can still be read. It is not cached, because it may
            // recover.
            Err(e) if e.raw_os_error() == Some(libc::EROFS) => {
                return directory.open_file(&self.path, Access::ReadOnly);
            }
            // The manifest names the file, so its absence is damage.
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let text = format!("open {}: the file is missing: {e}; run kvfsck check", self.path);
                return Err(Error::new(ErrorKind::Corruption, text));
            }
            other => other?,
        };
        let file = Arc::clone(lock(&self.open).get_or_insert(fresh));
        self.files.opened(self);
        Ok(file)
    }

    /// Sets whether the file must stay open.
    pub(crate) fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }

    fn close_if_idle(&self) -> bool {
        if self.held.load(Ordering::Relaxed) || self.recent.swap(false, Ordering::Relaxed) {
            return false;
        }
        let mut open = lock(&self.open);
        let idle = open.as_ref().is_none_or(|file| Arc::strong_count(file) == 1);
        if idle {
            *open = None;
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::file::os_directory::{OsDirectory, OsDirectoryOptions};

    #[test]
    fn cached_files_stay_readable_beyond_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let options = OsDirectoryOptions {
            access: Access::ReadWrite,
            create: false,
            lock_wait: std::time::Duration::from_secs(1),
        };
        let directory: Arc<dyn Directory> = OsDirectory::open(dir.path(), options).unwrap();
        let files = FdCache::with_limit(4);
        let lazy: Vec<_> = (0..20)
            .map(|index| {
                let name = format!("f{index}");
                let file = directory.create_file(&name, 4096).unwrap();
                directory.write_small(&file, 0, &[index; 4096]).unwrap();
                CachedFile::new(&directory, name, &files)
            })
            .collect();
        let held = lazy[0].get().unwrap();
        lazy[1].hold(true);
        lazy[1].get().unwrap();
        for round in 0..3 {
            for (index, file) in lazy.iter().enumerate() {
                let file = file.get().unwrap();
                assert_eq!(directory.read_small(&file, 0, 4096).unwrap(), vec![index as u8; 4096], "round {round}");
                drop(file);
                assert!(files.len() <= 6);
            }
        }
        assert!(Arc::ptr_eq(&held, &lazy[0].get().unwrap()), "a file in use is not closed");
    }
}
