//! Adapters in a store: a sequence that has no tokens holds one, in frames like any other.

use super::Sequence;
use super::open::load_adapter_parts;
use crate::catalog::{AdapterMeta, RecordBuffer, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::log::{AdapterPart, FrameBuilder, SequenceIdentity, SequenceLock, StoreInner};
use crate::metrics::{Category, Reservation, lock};
use crate::options::{Durability, SummaryResidency};
use crate::retrieval::{Adapter, LayerAdapter};
use std::sync::{Arc, Weak};
use stratakv_format::SequenceId;
use stratakv_format::checksum::crc64;

/// The most bytes of one piece.
const PIECE_BYTES: usize = 1 << 20;

impl StoreInner {
    /// Accounts for the numbers of an adapter while selectors choose by it, once for all of them.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub(super) fn hold_adapter(&self, adapter: &Arc<Adapter>) -> Result<Arc<Reservation>> {
        let mut held = lock(&self.held_adapters);
        held.retain(|_, memory| memory.strong_count() > 0);
        // Whoever holds the memory holds the adapter too: its address is nobody else's.
        let address = Arc::as_ptr(adapter).addr();
        if let Some(memory) = held.get(&address).and_then(Weak::upgrade) {
            return Ok(memory);
        }
        let bytes = usize::try_from(adapter.bytes()).unwrap_or(usize::MAX);
        let memory = self.devices.reserve(bytes, Category::Summaries);
        let memory = Arc::new(memory.ok_or_else(|| super::no_memory(&format!("adapter {}", adapter.id())))?);
        held.insert(address, Arc::downgrade(&memory));
        Ok(memory)
    }
}

/// What the manifest says of an adapter with these layers.
pub(crate) fn adapter_meta(adapter: &Adapter, layers: &[Vec<u8>]) -> AdapterMeta {
    AdapterMeta {
        name: adapter.name().to_owned(),
        version: adapter.version(),
        bytes: layers.iter().map(|layer| layer.len() as u64).sum(),
        checksum: adapter.checksum(),
    }
}

/// Writes the bytes of an adapter, by layer, and commits them. `records` create the sequence and say what it holds.
///
/// # Errors
/// As those of [`Sequence::commit`], and of memory.
pub(crate) fn write_adapter(
    claim: SequenceLock,
    who: SequenceIdentity,
    records: RecordBuffer,
    layers: &[Vec<u8>],
) -> Result<()> {
    let mut sequence = Sequence::new(claim, who, records, SummaryResidency::default())?;
    let bytes: usize = layers.iter().map(Vec::len).sum();
    let memory = sequence.store.devices.reserve(2 * bytes, Category::Summaries);
    let _memory = memory.ok_or_else(|| super::no_memory(&format!("an adapter of {bytes} bytes")))?;
    let limit = sequence.frame_target.min(sequence.frame_limit / 2);
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

/// The adapter that a sequence holds.
///
/// # Errors
/// [`ErrorKind::Corruption`]: its frames are damaged, or do not hold what the manifest says.
pub(crate) fn load_adapter(
    claim: SequenceLock,
    id: SequenceId,
    meta: &SequenceMeta,
    about: &AdapterMeta,
) -> Result<Adapter> {
    let damaged = |what: &str| {
        let text = format!("adapter {:?} of version {}: {what}", about.name, about.version);
        Error::new(ErrorKind::Corruption, text)
    };
    // The pieces, the layers, and the numbers that come out of them.
    let memory = usize::try_from(about.bytes).unwrap_or(usize::MAX).saturating_mul(4);
    let memory = claim.store.devices.reserve(memory, Category::Summaries);
    let _memory = memory.ok_or_else(|| super::no_memory(&format!("adapter {:?}", about.name)))?;
    let mut parts = load_adapter_parts(claim, id, meta)?;
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
        return Err(damaged(&format!("{bytes} bytes that are not the {} that were stored", about.bytes)));
    }
    let layer = |bytes: &Vec<u8>| match bytes.is_empty() {
        true => Ok(LayerAdapter::None),
        false => LayerAdapter::from_bytes(bytes),
    };
    Adapter::new(about.name.clone(), about.version, layers.iter().map(layer).collect::<Result<_>>()?)
}
