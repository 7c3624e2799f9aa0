//! The right to be the only handle of a sequence.

use super::store_state::StoreInner;
use super::unix_ms;
use crate::catalog::SequenceMeta;
use crate::metrics::lock;
use std::sync::Arc;
use stratakv_format::SequenceId;

/// The right to be the only handle of a sequence, and to a key that no commit has made its own yet. Whoever lets go of it has
/// queued all that it commits.
pub(crate) struct SequenceLock {
    pub(crate) store: Arc<StoreInner>,
    id: SequenceId,
    /// Empty when no key is reserved.
    key: String,
    /// It may be over when it is let go: whoever tends the store looks then.
    pub(crate) expires: bool,
    /// A handle has it: when that goes is when it was used last.
    pub(crate) uses: bool,
}

impl SequenceLock {
    /// None when another handle has the sequence or the key.
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
        // Before it may be evicted. One that only a queued commit names counts from that.
        if self.uses
            && let Some(meta) = lock(&self.store.catalog).sequences.get_mut(&self.id)
        {
            meta.used_unix_ms = meta.used_unix_ms.max(unix_ms());
        }
        self.store.handles.release_sequence(self.id);
        if !self.expires {
            return;
        }
        // One that only a queued commit names is known once the background has flushed.
        let soon = |meta: Option<&SequenceMeta>| {
            let end = meta.map_or(Some(0), SequenceMeta::ends_ms);
            end.is_some_and(|end| end <= unix_ms() || self.store.background.misses_expiry(end))
        };
        if soon(lock(&self.store.catalog).sequences.get(&self.id)) {
            self.store.devices.tend.notify();
        }
    }
}
