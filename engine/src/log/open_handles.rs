//! Which sequences have an open handle, and which keys are reserved for sequences that no commit has named yet.

use crate::metrics::lock;
use crate::sync::Guard;
use std::collections::HashSet;
use std::sync::Mutex;
use stratakv_format::SequenceId;

/// The open handles of a store.
///
/// Invariants:
/// - A sequence has one handle at most.
/// - A key is reserved by one handle at most. The empty key is never reserved.
///
/// The two locks are never held together. The caller may hold the catalog.
#[derive(Debug, Default)]
pub(crate) struct OpenHandles {
    sequences: Mutex<HashSet<SequenceId>>,
    keys: Mutex<HashSet<String>>,
}

impl OpenHandles {
    /// Registers a handle of `id` and reserves `key`, empty for none. Returns false if another handle has either.
    pub(crate) fn register(&self, id: SequenceId, key: &str) -> bool {
        if !key.is_empty() && !lock(&self.keys).insert(key.to_owned()) {
            return false;
        }
        if !lock(&self.sequences).insert(id) {
            lock(&self.keys).remove(key);
            return false;
        }
        true
    }

    /// Gives a reserved key back. An empty key is none.
    pub(crate) fn release_key(&self, key: &str) {
        if !key.is_empty() {
            lock(&self.keys).remove(key);
        }
    }

    /// Gives the handle of a sequence back.
    pub(crate) fn release_sequence(&self, id: SequenceId) {
        lock(&self.sequences).remove(&id);
    }

    /// Returns the sequences that have a handle. No handle opens or closes while the guard lives.
    pub(crate) fn sequences(&self) -> Guard<'_, HashSet<SequenceId>> {
        lock(&self.sequences)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_exclusive_by_id_and_by_key() {
        let handles = OpenHandles::default();
        assert!(handles.register(SequenceId(1), "a"));
        assert!(!handles.register(SequenceId(2), "a"), "the key is taken");
        assert!(!handles.register(SequenceId(1), "b"), "the sequence is open");
        assert!(handles.register(SequenceId(2), "b"), "the refused registration kept nothing");
        assert!(handles.register(SequenceId(3), "") && handles.register(SequenceId(4), ""), "no key is no conflict");
        handles.release_key("a");
        handles.release_sequence(SequenceId(1));
        assert!(handles.register(SequenceId(1), "a"));
        assert_eq!(handles.sequences().len(), 4);
    }
}
