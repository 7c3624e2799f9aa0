//! Adapters of a store: they are stored once per layout, and found by name.

use super::Store;
use crate::catalog::{AdapterMeta, COPIES_MAX, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::KvLayout;
use crate::log::{SequenceIdentity, SequenceLock};
use crate::metrics::lock;
use crate::options::Durability;
use crate::retrieval::{Adapter, KeyShape, LayerAdapter};
use crate::sequence::{adapter_meta, load_adapter, write_adapter};
use serde::Serialize;
use stratakv_format::manifest::{ADAPTER_BYTES_MAX, Kind};
use stratakv_format::{LayoutId, SequenceId};

/// An adapter that a store holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AdapterInfo {
    /// Its id in this store: unique among adapters and sequences, never reused.
    pub id: u64,
    /// Name.
    pub name: String,
    /// Version.
    pub version: u32,
    /// Number of the layout that it is bound to, as in [`NamespaceUsage`](crate::store::NamespaceUsage).
    pub layout: u32,
    /// Fingerprint of that layout, in hexadecimal digits.
    pub fingerprint: String,
    /// Its bytes, all layers together.
    pub bytes: u64,
    /// CRC-64/NVME of its bytes.
    pub checksum: u64,
    /// Bytes of its frames on devices.
    pub disk_bytes: u64,
    /// The time at which it was stored, in milliseconds since 1970.
    pub created_unix_ms: u64,
}

impl Store {
    /// Stores an adapter for sequences of this layout, durably, and returns its id.
    ///
    /// The adapter stays until [`Self::delete_adapter`], also if all sequences are deleted. An adapter that is stored
    /// already, with the same numbers, is not stored again. `copies` is the number of copies on distinct devices, as
    /// in [`CreateOptions::copies`](crate::CreateOptions::copies).
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: another one has this name and version for this layout.
    /// [`ErrorKind::LayoutMismatch`]: it has another number of layers than the layout, or another width in one.
    /// [`ErrorKind::InvalidArgument`]: it has nothing for any layer, or is too large. [`ErrorKind::Corruption`]:
    /// the stored adapter of this name is damaged. The errors of [`Sequence::commit`](crate::Sequence::commit).
    pub fn put_adapter(&self, layout: &KvLayout, adapter: &Adapter, copies: u8) -> Result<u64> {
        self.put(layout, adapter, copies).map_err(|e| e.during(format!("put adapter {}", adapter.id())))
    }

    fn put(&self, layout: &KvLayout, adapter: &Adapter, copies: u8) -> Result<u64> {
        let inner = &self.inner;
        inner.committer.check_memory()?;
        check(layout, adapter)?;
        let copies = usize::from(copies.max(1));
        if copies > COPIES_MAX || copies > inner.devices.list.slots() {
            let text = format!("{copies} copies need as many devices; the store has {}", inner.devices.list.slots());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let layers = adapter.layer_bytes();
        let about = adapter_meta(adapter, &layers);
        if !(1..=ADAPTER_BYTES_MAX).contains(&about.bytes) {
            let text = format!("the adapter has {} bytes; from 1 to {ADAPTER_BYTES_MAX} are possible", about.bytes);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // An observer of evictions may use adapters.
        let _events = inner.activity.observers.defer();
        let _one = lock(&inner.locks.adapters);
        if let Some((id, meta, known)) = self.find(layout, &about.name, Some(about.version))? {
            // The checksum does not cover which layer the numbers belong to, so the adapters are compared.
            if known == about && self.loaded(layout, id, &meta, &known)? == *adapter {
                return Ok(id.0);
            }
            let text = "the store has another adapter of this name, version and layout";
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        let (id, claim) = inner.claim("")?;
        let layout_id = self.layout_id(layout);
        let identity = SequenceIdentity {
            sequence: id,
            parent: None,
            key: String::new(),
            summaries: 0,
            layout_id,
            layout: layout.clone(),
            ttl_ms: 0,
            evictable: 0,
            copies,
        };
        let mut records = identity.create_records(inner.devices.environment.unix_ms());
        records.push(Kind::Adapter, &about.record(id), about.name.as_bytes());
        lock(&inner.space).classify(id, 0);
        write_adapter(claim, identity, records, &layers)?;
        Ok(id.0)
    }

    /// Reads an adapter by its name and checks it. Without a version, returns the one with the highest.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is none for this layout. [`ErrorKind::Corruption`]: its frames are damaged.
    pub fn adapter(&self, layout: &KvLayout, name: &str, version: Option<u32>) -> Result<Adapter> {
        let inner = &self.inner;
        let _one = lock(&inner.locks.adapters);
        let found = self.find(layout, name, version)?;
        let (id, meta, about) = found.ok_or_else(|| not_found(name, version))?;
        self.loaded(layout, id, &meta, &about)
    }

    fn loaded(&self, layout: &KvLayout, id: SequenceId, meta: &SequenceMeta, about: &AdapterMeta) -> Result<Adapter> {
        let name = &about.name;
        let load = || {
            let claim = SequenceLock::new(&self.inner, id, "");
            let claim = claim.ok_or_else(|| Error::new(ErrorKind::InUse, format!("adapter {name:?} is being read")))?;
            load_adapter(claim, id, meta, about)
        };
        // The damage may be of the transfer, not of the medium, so it is read once more.
        let again = |e: Error| if e.kind() == ErrorKind::Corruption { load() } else { Err(e) };
        let adapter = load().or_else(again).map_err(|e| e.during(format!("read adapter {name:?}")))?;
        // Stored adapters end with their last layer that has numbers.
        let mut layers = adapter.layers().to_vec();
        layers.resize(layout.layers().max(layers.len()), LayerAdapter::None);
        Adapter::new(name.clone(), about.version, layers)
    }

    /// Returns the adapters that the store holds, by layout, name and version.
    #[must_use]
    pub fn adapters(&self) -> Vec<AdapterInfo> {
        let catalog = lock(&self.inner.catalog);
        let info = |((layout, ..), id): (&(LayoutId, String, u32), &SequenceId)| {
            let meta = catalog.sequences.get(id).filter(|_| catalog.is_listed(*id))?;
            let about = meta.adapter.as_ref()?;
            let fingerprint = catalog.layouts.get(layout).map(|layout| layout.raw().fingerprint);
            let frames = meta.refs.iter().filter_map(|(frame, _)| catalog.frames.get(frame));
            Some(AdapterInfo {
                id: id.0,
                name: about.name.clone(),
                version: about.version,
                layout: layout.0,
                fingerprint: fingerprint.unwrap_or_default().iter().map(|byte| format!("{byte:02x}")).collect(),
                bytes: about.bytes,
                checksum: about.checksum,
                disk_bytes: frames.flat_map(|frame| frame.locations()).map(|location| location.bytes()).sum(),
                created_unix_ms: meta.created_unix_ms,
            })
        };
        catalog.adapters.iter().filter_map(info).collect()
    }

    /// Deletes an adapter, durably. Summaries that were made with it stay with their sequences. They are not used any
    /// more, unless the caller attaches the same adapter from elsewhere.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such adapter. Or the commit of the deletion failed.
    pub fn delete_adapter(&self, layout: &KvLayout, name: &str, version: u32) -> Result<()> {
        let inner = &self.inner;
        let _one = lock(&inner.locks.adapters);
        let found = self.find(layout, name, Some(version))?;
        let (id, ..) = found.ok_or_else(|| not_found(name, Some(version)))?;
        inner.delete_sequence(id, Durability::Sync).map_err(|e| e.during(format!("delete adapter {name:?}")))
    }

    fn find(
        &self,
        layout: &KvLayout,
        name: &str,
        version: Option<u32>,
    ) -> Result<Option<(SequenceId, SequenceMeta, AdapterMeta)>> {
        self.inner.flush_others()?;
        let catalog = lock(&self.inner.catalog);
        Ok(catalog.find_adapter(layout, name, version).and_then(|id| {
            let meta = catalog.sequences.get(&id)?;
            Some((id, meta.clone(), meta.adapter.clone()?))
        }))
    }
}

fn not_found(name: &str, version: Option<u32>) -> Error {
    let version = version.map_or_else(String::new, |version| format!(" of version {version}"));
    Error::new(ErrorKind::NotFound, format!("no adapter {name:?}{version} for this layout"))
}

/// Checks that an adapter fits the layers of a layout.
fn check(layout: &KvLayout, adapter: &Adapter) -> Result<()> {
    if adapter.layers().len() != layout.layers() {
        let text = format!("the adapter has {} layers and the layout {}", adapter.layers().len(), layout.layers());
        return Err(Error::new(ErrorKind::LayoutMismatch, text));
    }
    for (index, _) in adapter.layers().iter().enumerate().filter(|(_, layer)| **layer != LayerAdapter::None) {
        let geometry = layout.kv_layer(index).map_err(|_| {
            Error::new(
                ErrorKind::LayoutMismatch,
                format!("layer {index} has no keys, and the adapter has numbers for it"),
            )
        })?;
        let shape = KeyShape {
            kv_heads: usize::from(geometry.kv_heads),
            key_dim: usize::from(geometry.key_dim),
            group_tokens: layout.group_tokens(),
            dtype: layout.dtype(),
        };
        adapter.layer(index, &shape)?;
    }
    Ok(())
}
