//! The right to be the only handle of a sequence.

use super::store_state::StoreInner;
use crate::catalog::SequenceMeta;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::lock;
use std::sync::Arc;
use stratakv_format::SequenceId;
use stratakv_format::manifest::KEY_BYTES_MAX;

impl StoreInner {
    /// Locks a new sequence with this key, empty for none.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the key is too long. [`ErrorKind::AlreadyExists`]: it is taken.
    pub(crate) fn claim(self: &Arc<Self>, key: &str) -> Result<(SequenceId, SequenceLock)> {
        self.committer.check()?;
        if key.len() > KEY_BYTES_MAX {
            let text =
                format!("create sequence: the key has {} bytes; at most {} are allowed", key.len(), KEY_BYTES_MAX);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let id = self.ids.next_sequence();
        let taken =
            || Error::new(ErrorKind::AlreadyExists, format!("create sequence: a sequence with the key {key:?} exists"));
        let claim = SequenceLock::new(self, id, key).ok_or_else(taken)?;
        if !key.is_empty() {
            // The last handle with this key has queued its commit. After a flush the catalog has it.
            self.flush_others()?;
            if lock(&self.catalog).keys.contains_key(key) {
                return Err(taken());
            }
        }
        Ok((id, claim))
    }
}

/// The right to be the only handle of a sequence, and to a key that no commit names yet.
///
/// Invariant: when it is dropped, its handle has queued everything that it commits.
pub(crate) struct SequenceLock {
    pub(crate) store: Arc<StoreInner>,
    id: SequenceId,
    /// The reserved key, or empty.
    key: String,
    /// True if the sequence may have expired when the lock is dropped. The maintenance thread is woken then.
    pub(crate) expires: bool,
    /// True if dropping the lock counts as a use of the sequence.
    pub(crate) uses: bool,
}

impl SequenceLock {
    /// Returns the lock, or none if another handle has the sequence or the key.
    pub(crate) fn new(store: &Arc<StoreInner>, id: SequenceId, key: &str) -> Option<Self> {
        if !store.handles.register(id, key) {
            return None;
        }
        Some(Self { store: Arc::clone(store), id, key: key.to_owned(), expires: false, uses: false })
    }
}

impl Drop for SequenceLock {
    fn drop(&mut self) {
        self.store.handles.release_key(&self.key);
        lock(&self.store.space).settle(self.id);
        // Set before the sequence may be evicted. A sequence that only a queued commit names gets its time with the
        // commit.
        if self.uses {
            let mut catalog = lock(&self.store.catalog);
            if catalog.sequences.contains_key(&self.id) {
                let used = catalog.use_at(self.store.devices.environment.unix_ms());
                catalog.sequences.entry(self.id).and_modify(|meta| meta.used_unix_ms = used);
            }
        }
        self.store.handles.release_sequence(self.id);
        if !self.expires {
            return;
        }
        // A sequence that only a queued commit names is known after the next flush.
        let soon = |meta: Option<&SequenceMeta>| {
            let end = meta.map_or(Some(0), SequenceMeta::ends_ms);
            end.is_some_and(|end| {
                end <= self.store.devices.environment.unix_ms() || self.store.background.misses_expiry(end)
            })
        };
        if soon(lock(&self.store.catalog).sequences.get(&self.id)) {
            self.store.devices.maintenance_wake.notify();
        }
    }
}
