//! Adapters in a store. A sequence without tokens holds one adapter, in frames like any other.

use super::errors::no_memory;
use super::handle::Sequence;
use super::open::load_adapter_parts;
use crate::catalog::{AdapterMeta, RecordBuffer, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::log::{AdapterPart, FrameBuilder, SequenceIdentity, SequenceLock, StoreInner};
use crate::metrics::{self, Category, Reservation};
use crate::options::{Durability, SummaryResidency};
use crate::retrieval::{Adapter, LayerAdapter};
use std::sync::{Arc, Weak};
use stratakv_format::SequenceId;
use stratakv_format::checksum::crc64;

/// The most bytes of a piece of an adapter.
const PIECE_BYTES: usize = 1 << 20;

impl StoreInner {
    /// Accounts for the memory of an adapter, once for all selectors that choose by it.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub(super) fn hold_adapter(&self, adapter: &Arc<Adapter>) -> Result<Arc<Reservation>> {
        let mut held = metrics::lock(&self.held_adapters);
        held.retain(|_, memory| memory.strong_count() > 0);
        // The holder of the account also holds the adapter, so no other adapter has this address.
        let address = Arc::as_ptr(adapter).addr();
        if let Some(memory) = held.get(&address).and_then(Weak::upgrade) {
            return Ok(memory);
        }
        let bytes = usize::try_from(adapter.bytes()).unwrap_or(usize::MAX);
        let memory = self.devices.reserve(bytes, Category::Summaries);
        let memory = Arc::new(memory.ok_or_else(|| no_memory(&format!("adapter {}", adapter.id())))?);
        held.insert(address, Arc::downgrade(&memory));
        Ok(memory)
    }
}

/// Returns what the manifest records of an adapter whose layers have these bytes.
pub(crate) fn adapter_meta(adapter: &Adapter, layers: &[Vec<u8>]) -> AdapterMeta {
    AdapterMeta {
        name: adapter.name().to_owned(),
        version: adapter.version(),
        bytes: layers.iter().map(|layer| layer.len() as u64).sum(),
        checksum: adapter.checksum(),
    }
}

/// Writes the bytes of an adapter, by layer, and commits them. `records` create its sequence.
///
/// # Errors
/// As [`Sequence::commit`]; [`ErrorKind::MemoryLimit`].
pub(crate) fn write_adapter(
    lock: SequenceLock,
    identity: SequenceIdentity,
    records: RecordBuffer,
    layers: &[Vec<u8>],
) -> Result<()> {
    let mut sequence = Sequence::new(lock, identity, records, SummaryResidency::default())?;
    let bytes: usize = layers.iter().map(Vec::len).sum();
    let memory = sequence.store.devices.reserve(2 * bytes, Category::Summaries);
    let _memory = memory.ok_or_else(|| no_memory(&format!("an adapter of {bytes} bytes")))?;
    let limit = sequence.frames.target().min(sequence.frames.limit() / 2);
    let mut drafts = vec![FrameBuilder::default()];
    for (layer, bytes) in layers.iter().enumerate() {
        let size = PIECE_BYTES.min(limit);
        for (at, piece) in bytes.chunks(size).enumerate() {
            if drafts.last().is_some_and(|last| !last.is_empty() && last.bytes() + piece.len() + 128 > limit) {
                drafts.push(FrameBuilder::default());
            }
            if let Some(last) = drafts.last_mut() {
                last.adapter(AdapterPart { layer, first: (at * size) as u64, bytes: piece.to_vec() });
            }
        }
    }
    sequence.write_drafts(drafts, true)?;
    sequence.commit(Durability::Sync)
}

/// Returns the adapter that a sequence holds.
///
/// # Errors
/// [`ErrorKind::Corruption`]: its frames are damaged, or differ from what the manifest records.
pub(crate) fn load_adapter(
    lock: SequenceLock,
    id: SequenceId,
    meta: &SequenceMeta,
    about: &AdapterMeta,
) -> Result<Adapter> {
    let damaged = |what: &str| {
        let text = format!("adapter {:?} of version {}: {what}", about.name, about.version);
        Error::new(ErrorKind::Corruption, text)
    };
    // The pieces, the layers, and the decoded adapter are in memory together.
    let memory = usize::try_from(about.bytes).unwrap_or(usize::MAX).saturating_mul(4);
    let memory = lock.store.devices.reserve(memory, Category::Summaries);
    let _memory = memory.ok_or_else(|| no_memory(&format!("adapter {:?}", about.name)))?;
    let mut parts = load_adapter_parts(lock, id, meta)?;
    parts.sort_by_key(|part| (part.layer, part.first));
    let count = parts.last().map_or(0, |last| last.layer + 1);
    let mut layers = vec![Vec::new(); count];
    for part in parts {
        let layer: &mut Vec<u8> = &mut layers[part.layer];
        if layer.len() as u64 != part.first {
            return Err(damaged(&format!("byte {} of layer {} is in no frame", layer.len(), part.layer)));
        }
        layer.extend_from_slice(&part.bytes);
    }
    let bytes: usize = layers.iter().map(Vec::len).sum();
    if bytes as u64 != about.bytes || crc64(&layers.concat()) != about.checksum {
        return Err(damaged(&format!("{bytes} bytes in its frames differ from the {} stored", about.bytes)));
    }
    let layer = |bytes: &Vec<u8>| match bytes.is_empty() {
        true => Ok(LayerAdapter::None),
        false => LayerAdapter::from_bytes(bytes),
    };
    Adapter::new(about.name.clone(), about.version, layers.iter().map(layer).collect::<Result<_>>()?)
}
