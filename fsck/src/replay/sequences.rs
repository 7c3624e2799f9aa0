//! Sequences, their keys, and the adapters that some of them hold.
//!
//! Invariants:
//! - Two sequences in the state never have the same id or the same non-empty key.
//! - A deleted id is never used again.
//! - Two sequences never hold an adapter of the same layout, name and version.

use super::record::{RecordResult, require, reserved_byte};
use std::collections::{BTreeMap, HashMap, HashSet};
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, KEY_BYTES_MAX};

/// A sequence.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) layout: u32,
    pub(crate) key: Vec<u8>,
    /// The kinds of stored summaries: bit `1 << (kind - 1)` per kind.
    pub(crate) summaries: u32,
    /// The committed length, in tokens.
    pub(crate) committed: u64,
    pub(crate) token_ids: u64,
    /// The frame that holds the caller state, or 0.
    pub(crate) state_frame: u64,
    pub(crate) adapter: Option<AdapterRecord>,
    /// The token end of each reference, by frame id: only tokens below it belong to the sequence.
    pub(crate) refs: BTreeMap<u64, u64>,
}

impl Sequence {
    /// Returns the child that a fork creates. It refers to the same frames as its parent.
    pub(super) fn fork(&self, fork: &m::Fork, key: &[u8]) -> Result<Self, String> {
        let tokens = fork.tokens.get();
        let mut child = Self {
            key: checked_key(key, fork.key_bytes.get())?,
            committed: self.committed.min(tokens),
            token_ids: self.token_ids.min(tokens),
            state_frame: 0,
            ..self.clone()
        };
        child.refs.values_mut().for_each(|end| *end = (*end).min(tokens));
        Ok(child)
    }
}

/// The size and checksum of an adapter, from its record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterRecord {
    pub(crate) bytes: u64,
    pub(crate) checksum: u64,
}

/// All sequences of the store.
#[derive(Debug, Default)]
pub(super) struct SequenceTable {
    sequences: BTreeMap<u64, Sequence>,
    keys: HashMap<Vec<u8>, u64>,
    deleted: HashSet<u64>,
    /// The sequence that holds each adapter, by layout, name and version.
    adapters: HashMap<(u32, Vec<u8>, u32), u64>,
}

impl SequenceTable {
    pub(super) fn all(&self) -> &BTreeMap<u64, Sequence> {
        &self.sequences
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Result<&mut Sequence, String> {
        self.sequences.get_mut(&id).ok_or_else(|| unknown_sequence(id))
    }

    /// Returns an error if a new sequence cannot have this id.
    pub(super) fn require_new(&self, id: u64) -> RecordResult {
        require(id != 0, || "a sequence has the id 0".into())?;
        require(!self.deleted.contains(&id), || format!("sequence {id} was deleted before; ids are never used again"))?;
        require(!self.sequences.contains_key(&id), || format!("sequence {id} already exists"))
    }

    /// Adds a sequence. [`require_new`](Self::require_new) has accepted its id.
    pub(super) fn insert(&mut self, id: u64, sequence: Sequence) -> RecordResult {
        let other = if sequence.key.is_empty() { None } else { self.keys.insert(sequence.key.clone(), id) };
        self.sequences.insert(id, sequence);
        require(other.is_none(), || format!("sequences {} and {id} have the same key", other.unwrap_or_default()))
    }

    pub(super) fn truncate(&mut self, id: u64, tokens: u64) -> RecordResult {
        let sequence = self.get_mut(id)?;
        sequence.committed = sequence.committed.min(tokens);
        sequence.token_ids = sequence.token_ids.min(tokens);
        sequence.refs.values_mut().for_each(|end| *end = (*end).min(tokens));
        Ok(())
    }

    /// Removes a sequence with its key and adapter, and returns it.
    pub(super) fn delete(&mut self, id: u64) -> Result<Sequence, String> {
        let sequence = self.sequences.remove(&id).ok_or_else(|| unknown_sequence(id))?;
        self.keys.remove(&sequence.key);
        self.adapters.retain(|_, holder| *holder != id);
        self.deleted.insert(id);
        Ok(sequence)
    }

    pub(super) fn commit(&mut self, commit: &m::SequenceCommit) -> RecordResult {
        let sequence = self.get_mut(commit.sequence.get())?;
        sequence.committed = commit.tokens.get();
        sequence.token_ids = commit.token_ids.get();
        sequence.state_frame = commit.state_frame.get();
        Ok(())
    }

    /// Makes an empty sequence the holder of an adapter.
    pub(super) fn add_adapter(&mut self, adapter: &m::AdapterDefined, name: &[u8]) -> RecordResult {
        let id = adapter.sequence.get();
        let text = std::str::from_utf8(name).map_err(|_| "the name of an adapter is not UTF-8")?;
        let sequence = self.get_mut(id)?;
        let empty = sequence.key.is_empty() && sequence.committed == 0 && sequence.token_ids == 0;
        require(empty && sequence.adapter.is_none(), || {
            format!("sequence {id} gets the adapter {text:?} although it is not empty")
        })?;
        sequence.adapter = Some(AdapterRecord { bytes: adapter.bytes.get(), checksum: adapter.checksum.get() });
        let identity = (sequence.layout, name.to_vec(), adapter.version.get());
        match self.adapters.insert(identity, id) {
            None => Ok(()),
            Some(other) => Err(format!("sequences {other} and {id} hold the same adapter {text:?}")),
        }
    }
}

/// Returns the sequence that a create record describes.
pub(super) fn created(
    create: &m::SequenceCreate,
    key: &[u8],
    layouts: &BTreeMap<u32, Layout>,
    replicas_allowed: bool,
) -> Result<Sequence, String> {
    let (layout, summaries) = (create.layout.get(), create.summaries.get());
    require(create.reserved.get() == 0, reserved_byte)?;
    require(layouts.contains_key(&layout), || format!("layout {layout} does not exist"))?;
    require(create.replicas <= 1 || replicas_allowed, || {
        format!("a sequence has {} copies in a store without the feature of copies", create.replicas)
    })?;
    let key = checked_key(key, create.key_bytes.get())?;
    let refs = BTreeMap::new();
    Ok(Sequence { layout, key, summaries, committed: 0, token_ids: 0, state_frame: 0, adapter: None, refs })
}

fn unknown_sequence(id: u64) -> String {
    format!("sequence {id} does not exist")
}

/// Returns the key of a record, if its length is the one that the record names.
fn checked_key(key: &[u8], bytes: u16) -> Result<Vec<u8>, String> {
    require(key.len() == usize::from(bytes), || format!("a key has {} bytes, the record names {bytes}", key.len()))?;
    require(key.len() <= KEY_BYTES_MAX, || format!("a key has {bytes} bytes, the limit is {KEY_BYTES_MAX}"))?;
    Ok(key.to_vec())
}
