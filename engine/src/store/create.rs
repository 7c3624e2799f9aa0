//! Making a store, and directories those of a device.

use super::start::{MemberDevice, measure, start_devices};
use super::{Store, start};
use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::directory::Directory;
use crate::log::{GenerationStart, ManifestLog, StoreIdentity, copies_for, random_u64, unix_ms};
use crate::metrics::lock;
use crate::options::StoreOptions;
use crate::recovery::{ProbedDirectory, SUPERBLOCK_NEW};
use stratakv_format::features::Features;
use stratakv_format::manifest as m;
use stratakv_format::superblock::{self, SLOTS, STATE_OPEN, Slot, segment_pages};
use stratakv_format::{DeviceIndex, PAGE_BYTES, segment};
use zerocopy::little_endian::{U16, U32, U64};

pub(super) fn create(options: &StoreOptions, memory: usize, found: Vec<ProbedDirectory>) -> Result<Store> {
    let segment_bytes = options.segment_size().bytes();
    let Some(pages) = segment_pages(segment_bytes) else {
        let text = format!("segment_bytes {segment_bytes} must be whole pages, at least 8 and at most 2^24 of them");
        return Err(Error::new(ErrorKind::Configuration, text));
    };
    let identity = StoreIdentity {
        store_id: random_id()?,
        checksum: options.checksum.kind(),
        segment_pages: pages.get(),
        instance: random_u64()?,
    };
    let count = found.len();
    let mut slots = Vec::new();
    let mut catalog = Catalog::default();
    for index in 0..count {
        let device = DeviceIndex(index as u16);
        let slot = Slot {
            magic: superblock::MAGIC,
            features: Features::current(),
            sequence: U64::new(0),
            store_id: identity.store_id,
            device_id: random_id()?,
            epoch: U64::new(1),
            manifest_generation: U64::new(0),
            manifest_nonce: U64::new(0),
            synced_through: U64::new(0),
            created_unix_s: U64::new(unix_ms() / 1000),
            segment_bytes: U64::new(segment_bytes),
            device_index: U16::new(device.0),
            device_count: U16::new(count as u16),
            payload_checksum: identity.checksum as u8,
            state: STATE_OPEN,
            manifest_copies: copies_for(device, count),
            reserved: 0,
        };
        let member = m::Member {
            epoch: U64::new(1),
            device_id: slot.device_id,
            device: U16::new(device.0),
            state: m::MEMBER_ACTIVE,
            manifest_copies: slot.manifest_copies,
            weight: U32::new(0),
            bytes_limit: U64::new(0),
        };
        catalog.members.insert(device, member);
        slots.push(slot);
    }
    for found in &found {
        prepare(&*found.directory)?;
    }
    let members: Vec<_> = catalog.members.values().copied().collect();
    let parts = found.into_iter().zip(slots).zip(&members);
    let known = parts.map(|((found, slot), member)| MemberDevice { directory: found.directory, slot, member: *member });
    let devices = start_devices(options, memory, identity, known.collect(), count)?;
    // For the profiles alone: a busy moment must not decide where data lies for good.
    measure(&devices)?;
    let manifest = {
        let limit = options.capacity.map_or(u64::MAX, |capacity| capacity.bytes());
        let start = GenerationStart {
            generation: 1,
            previous: 0,
            first_batch: 1,
            epoch: 1,
            room: 0,
            limit,
            beyond: true,
            released: 0,
            gone: std::collections::BTreeSet::new(),
        };
        ManifestLog::create(&devices, &start, &catalog.checkpoint())?
    };
    for device in devices.list.iter() {
        let mut slot = lock(&device.slot);
        slot.manifest_generation = U64::new(manifest.place().generation);
        slot.manifest_nonce = U64::new(manifest.place().nonce);
        slot.synced_through = U64::new(manifest.place().synced_through);
        write_first_superblock(&*device.directory, &mut slot)?;
    }
    start(options, devices, catalog, manifest)
}

/// Makes a directory that of a device.
pub(super) fn write_first_superblock(directory: &dyn Directory, slot: &mut Slot) -> Result<()> {
    // Under another name until it is durable: a superblock is whole from the moment it is there.
    let file = directory.create_file(SUPERBLOCK_NEW, (SLOTS * PAGE_BYTES) as u64)?;
    // Both slots, so that one that does not verify is damage ever after.
    let first = slot.encode();
    slot.sequence = U64::new(1);
    directory.write_small(&file, 0, &[first, slot.encode()].concat())?;
    directory.sync_small(&file)?;
    directory.rename(SUPERBLOCK_NEW, superblock::FILE)?;
    directory.sync_dir(".")
}

/// Directories of a device, with nothing in them.
pub(super) fn prepare(directory: &dyn Directory) -> Result<()> {
    for name in [m::DIRECTORY, segment::DIRECTORY] {
        directory.mkdir(name)?;
    }
    clear(directory)?;
    directory.sync_dir(".")
}

/// Files that a creation cut short left.
fn clear(directory: &dyn Directory) -> Result<()> {
    for parent in [m::DIRECTORY, segment::DIRECTORY] {
        for entry in directory.list(parent)? {
            directory.remove_file(&format!("{parent}/{}", entry.name))?;
        }
    }
    match directory.remove_file(SUPERBLOCK_NEW) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

pub(super) fn random_id() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random_u64()?.to_le_bytes());
    id[8..].copy_from_slice(&random_u64()?.to_le_bytes());
    Ok(id)
}
