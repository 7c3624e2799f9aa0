//! The creation of a store: directories, the first manifest generation, superblocks.
//!
//! Invariant: a superblock is renamed into place after it is durable. A creation that is interrupted therefore leaves
//! directories without a store.

use super::capacity::check_capacity;
use super::components::start;
use super::start::{MemberDevice, measure, start_devices};
use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::directory::Directory;
use crate::io::seams::Environment;
use crate::log::{GenerationStart, ManifestLog, StoreIdentity, StoreInner, copies_for};
use crate::metrics::lock;
use crate::options::StoreOptions;
use crate::recovery::{ProbedDirectory, SUPERBLOCK_NEW};
use std::collections::BTreeSet;
use std::sync::Arc;
use stratakv_format::features::Features;
use stratakv_format::manifest as m;
use stratakv_format::superblock::{self, SLOTS, STATE_OPEN, Slot, segment_pages};
use stratakv_format::{DeviceIndex, PAGE_BYTES, segment};
use zerocopy::little_endian::{U16, U32, U64};

/// Creates a store in these directories.
///
/// # Errors
/// [`ErrorKind::Configuration`]: the options ask for segments of an impossible size. [`ErrorKind::InvalidArgument`]:
/// the capacity is too small. Or a write fails.
pub(super) fn create(
    options: &StoreOptions,
    environment: Environment,
    memory: usize,
    found: Vec<ProbedDirectory>,
) -> Result<Arc<StoreInner>> {
    let segment_bytes = options.segment_size().bytes();
    let Some(pages) = segment_pages(segment_bytes) else {
        let text = format!("create: segment_bytes {segment_bytes} is not a whole number of pages from 8 to 2^24");
        return Err(Error::new(ErrorKind::Configuration, text));
    };
    let identity = StoreIdentity {
        store_id: random_id(&environment)?,
        checksum: options.checksum.kind(),
        segment_pages: pages.get(),
        instance: environment.random_u64()?,
    };
    let count = found.len();
    let (slots, catalog) = first_members(&environment, identity, segment_bytes, count)?;
    check_capacity(options, &catalog, segment_bytes, &environment.sizes(), "create")?;
    for found in &found {
        prepare(&*found.directory)?;
    }
    let members: Vec<_> = catalog.members.values().copied().collect();
    let parts = found.into_iter().zip(slots).zip(&members);
    let known = parts.map(|((found, slot), member)| MemberDevice { directory: found.directory, slot, member: *member });
    let devices = start_devices(options, environment, memory, identity, known.collect(), count)?;
    // The measurement is for the profiles only. It does not decide where data is placed, because the device may be
    // busy now.
    measure(&devices)?;
    let limit = options.capacity.map_or(u64::MAX, |capacity| capacity.bytes());
    let first = GenerationStart {
        generation: 1,
        previous: 0,
        first_batch: 1,
        epoch: 1,
        room: 0,
        limit,
        beyond: true,
        released: 0,
        gone: BTreeSet::new(),
    };
    let manifest = ManifestLog::create(&devices, &first, &catalog.checkpoint())?;
    for device in devices.list.iter() {
        let mut slot = lock(&device.slot);
        slot.manifest_generation = U64::new(manifest.place().generation);
        slot.manifest_nonce = U64::new(manifest.place().nonce);
        slot.synced_through = U64::new(manifest.place().synced_through);
        write_first_superblock(&*device.directory, &mut slot)?;
    }
    start(options, devices, catalog, manifest)
}

/// Returns the superblock slots of `count` new devices, and a catalog with these members.
fn first_members(
    environment: &Environment,
    identity: StoreIdentity,
    segment_bytes: u64,
    count: usize,
) -> Result<(Vec<Slot>, Catalog)> {
    let mut slots = Vec::new();
    let mut catalog = Catalog::default();
    for index in 0..count {
        let device = DeviceIndex(index as u16);
        let slot = Slot {
            magic: superblock::MAGIC,
            features: Features::current(),
            sequence: U64::new(0),
            store_id: identity.store_id,
            device_id: random_id(environment)?,
            epoch: U64::new(1),
            manifest_generation: U64::new(0),
            manifest_nonce: U64::new(0),
            synced_through: U64::new(0),
            created_unix_s: U64::new(environment.unix_ms() / 1000),
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
    Ok((slots, catalog))
}

/// Writes the first superblock of a device.
pub(super) fn write_first_superblock(directory: &dyn Directory, slot: &mut Slot) -> Result<()> {
    // The file has another name until it is durable, so that a superblock is complete as soon as it exists.
    let file = directory.create_file(SUPERBLOCK_NEW, (SLOTS * PAGE_BYTES) as u64)?;
    // Both slots are written, so that a slot that does not verify is always damage.
    let first = slot.encode();
    slot.sequence = U64::new(1);
    directory.write_small(&file, 0, &[first, slot.encode()].concat())?;
    directory.sync_small(&file)?;
    directory.rename(SUPERBLOCK_NEW, superblock::FILE)?;
    directory.sync_dir(".")
}

/// Makes the empty directories of a device.
pub(super) fn prepare(directory: &dyn Directory) -> Result<()> {
    for name in [m::DIRECTORY, segment::DIRECTORY] {
        directory.mkdir(name)?;
    }
    clear(directory)?;
    directory.sync_dir(".")
}

/// Removes the files of a creation that was interrupted.
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

/// Returns 16 random bytes.
pub(super) fn random_id(environment: &Environment) -> Result<[u8; 16]> {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&environment.random_u64()?.to_le_bytes());
    id[8..].copy_from_slice(&environment.random_u64()?.to_le_bytes());
    Ok(id)
}
