//! The start of devices: directory, shard, profile.

use crate::error::Result;
use crate::io::driver::DriverKind;
use crate::io::driver::interface::Op;
use crate::io::file::cached_file::FdCache;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::Directory;
use crate::io::file::instrumented::InstrumentedDirectory;
use crate::io::scheduler::profile::{Probe, Profile};
use crate::io::scheduler::{Affinity, Priority, Request, ShardThreads, ThreadRings};
use crate::io::seams::Environment;
use crate::log::{CONTROL_BYTES, Device, DeviceList, Devices, Latencies, StoreIdentity, SuspectCopies, exhausted};
use crate::metrics::{DeviceCounters, EventCount, MemoryBudget, lock};
use crate::options::{DriverChoice, StoreOptions};
use crate::recovery::SUPERBLOCK_NEW;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};
use stratakv_format::DeviceIndex;
use stratakv_format::manifest::Member;
use stratakv_format::superblock::Slot;

/// Bytes that are written and read to measure the speed of a device.
const PROBE_BYTES: usize = CONTROL_BYTES;
/// Number of times that each kind of read is measured. The median counts.
const PROBE_TURNS: usize = 3;
/// A device before it is started: its directory, its superblock slot, and its member record.
pub(super) struct MemberDevice {
    pub(super) directory: Arc<dyn Directory>,
    pub(super) slot: Slot,
    pub(super) member: Member,
}

fn driver_kind(options: &StoreOptions) -> DriverKind {
    match options.driver {
        DriverChoice::Auto => DriverKind::Auto,
        DriverChoice::Uring => DriverKind::Uring,
        DriverChoice::Posix => DriverKind::Posix,
        #[cfg(feature = "glommio")]
        DriverChoice::Glommio => DriverKind::Glommio,
        #[cfg(feature = "tokio-uring")]
        DriverChoice::TokioUring => DriverKind::TokioUring,
    }
}

/// Starts the shards of the devices that are present. `slots` is one more than the highest index that is or was in use.
pub(super) fn start_devices(
    options: &StoreOptions,
    environment: Environment,
    memory: usize,
    identity: StoreIdentity,
    known: Vec<MemberDevice>,
    slots: usize,
) -> Result<Devices> {
    let (budget, arena) = environment.buffers(memory);
    let affinity = Affinity::new(&options.shard_cpus, &options.shard_nodes)?;
    let threads = ShardThreads::new(
        driver_kind(options),
        arena.clone(),
        options.shard_threads,
        affinity,
        environment.threadless_scheduler(),
    );
    let list =
        known.into_iter().map(|known| start_device(&environment, &threads, known)).collect::<Result<Vec<_>>>()?;
    // Not zeroed, because writers write only the bytes that they copied into it.
    let control = arena.lease(CONTROL_BYTES).map_err(|e| exhausted(e, CONTROL_BYTES))?;
    let lanes = ThreadRings::new(arena.clone(), options.attend_helper.fixed());
    let maintenance_wake = Arc::<EventCount>::default();
    let list = DeviceList::new(list, slots);
    let incompat = list.iter().map(|device| lock(&device.slot).features.incompat.get()).fold(0, |all, own| all | own);
    let open_files = environment.sizes().open_files;
    let gathering = if memory < environment.sizes().gather_memory { 0 } else { memory / 4 };
    Ok(Devices {
        environment,
        list,
        arena,
        gathering: MemoryBudget::new(gathering),
        budget,
        control: Mutex::new(control),
        identity,
        files: FdCache::new(open_files),
        suspects: SuspectCopies::new(Arc::clone(&maintenance_wake)),
        latencies: Latencies::new(options.hedge_percentile),
        balance: options.balance,
        gap_limit: options.gap_limit.map_or(usize::MAX, |limit| limit.bytes() as usize),
        threads,
        incompat: AtomicU64::new(incompat),
        lanes,
        compute: RwLock::default(),
        maintenance_wake,
        process: AtomicU32::new(std::process::id()),
    })
}

pub(super) fn start_device(environment: &Environment, threads: &ShardThreads, known: MemberDevice) -> Result<Device> {
    let MemberDevice { directory, slot, member } = known;
    let index = DeviceIndex(member.device.get());
    let counters = Arc::<DeviceCounters>::default();
    let directory: Arc<dyn Directory> = InstrumentedDirectory::new(directory, &counters);
    let shard = threads.serve(&format!("stratakv-{index}"), Arc::clone(&directory), Arc::clone(&counters))?;
    let total_bytes = directory.space().map_or(0, |space| space.total);
    let profile = Arc::new(Profile::new(environment.measures_time()));
    let (slot, member) = (Mutex::new(slot), Mutex::new(member));
    Ok(Device { index, directory, shard, counters, slot, profile, member, total_bytes })
}

/// Measures the devices of a store that is being created, for their profiles.
///
/// # Errors
/// A device cannot be written to.
pub(super) fn measure(devices: &Devices) -> Result<()> {
    devices.list.iter().try_for_each(|device| measure_device(devices, device))
}

/// Measures one device: see [`measure`].
pub(super) fn measure_device(devices: &Devices, device: &Device) -> Result<()> {
    if !devices.environment.measures_time() {
        return Ok(());
    }
    let file = device.directory.create_file(SUPERBLOCK_NEW, PROBE_BYTES as u64)?;
    devices.write_all(&[(device.index, Arc::clone(&file))], 0, &vec![0x5b; PROBE_BYTES])?;
    let turns = |count: usize, bytes: usize| -> Result<Duration> {
        let mut took =
            (0..PROBE_TURNS).map(|_| probe(devices, device, &file, count, bytes)).collect::<Result<Vec<_>>>()?;
        took.sort_unstable();
        Ok(took[PROBE_TURNS / 2])
    };
    turns(4, 4096)?;
    let measured = Probe {
        single: turns(1, 4096)?,
        small: (64, turns(64, 4096)?),
        large: (PROBE_BYTES as u64, turns(PROBE_BYTES / (128 << 10), 128 << 10)?),
    };
    device.profile.measured(&measured);
    drop(file);
    device.directory.remove_file(SUPERBLOCK_NEW)
}

/// Reads `count` pieces of `bytes` in one batch.
fn probe(devices: &Devices, device: &Device, file: &Arc<DeviceFile>, count: usize, bytes: usize) -> Result<Duration> {
    let mut buffer = devices.buffer(count * bytes)?;
    let mut requests = Vec::with_capacity(count);
    for at in 0..count {
        let into = buffer.read_target(at * bytes..(at + 1) * bytes)?;
        // The order is shuffled, so that no read-ahead of the device helps.
        let offset = (at * 37 % count * bytes) as u64;
        requests.push(Request { op: Op::Read { file: Arc::clone(file), offset, into }, tag: 0 });
    }
    let start = Instant::now();
    device.shard.run(requests, Priority::Demand)?;
    Ok(start.elapsed())
}
