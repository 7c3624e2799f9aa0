//! The simulated scheduler: shards without threads, which run when callers submit, wait or close.
//!
//! All shards of a simulation live on the simulating thread. A thread that waits runs turns of busy shards until its
//! condition holds (`sync::drive_until`). The simulation's randomness chooses whose turn it is.
//!
//! Invariant: a shard is taken out of the list while it runs a turn. A sink that hears an outcome in the turn may
//! therefore submit a batch or close the device.

use super::driver::SimDriver;
use super::system::SimSystem;
use crate::error::{Error, ErrorKind, Result};
use crate::io::replacement::Replacement;
use crate::io::scheduler::{DeviceHandle, Shard, ThreadlessDevice, ThreadlessScheduler};
use crate::metrics::lock;
use crate::sync;
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex};

/// A shard of this thread.
struct ListedShard {
    id: u64,
    system: SimSystem,
    /// The shard, or none while it runs a turn.
    shard: Option<Shard>,
}

thread_local! {
    static SHARDS: RefCell<Vec<ListedShard>> = const { RefCell::new(Vec::new()) };
    static NEXT_ID: Cell<u64> = const { Cell::new(1) };
}

/// The scheduler of one store.
pub(super) struct SimScheduler {
    system: SimSystem,
    /// The shards of the store, by id.
    shards: Mutex<Vec<u64>>,
}

impl SimScheduler {
    pub(super) fn new(system: SimSystem) -> Self {
        Self { system, shards: Mutex::default() }
    }
}

impl ThreadlessScheduler for SimScheduler {
    fn serve(&self, handle: DeviceHandle, shards_max: Option<usize>) -> Result<Replacement<dyn ThreadlessDevice>> {
        let mut shards = lock(&self.shards);
        shards.retain(|shard| served(*shard).is_some());
        let least = shards.iter().copied().min_by_key(|shard| (served(*shard), *shard));
        let device = match least.filter(|_| shards_max.is_some_and(|most| shards.len() >= most)) {
            Some(shard) => SimDevice::join(&self.system, shard, handle)?,
            None => SimDevice::start(&self.system, handle)?,
        };
        if !shards.contains(&device.shard) {
            shards.push(device.shard);
        }
        let device: Arc<dyn ThreadlessDevice> = Arc::new(device);
        Ok(device.into())
    }
}

/// A device of a shard that lives on this thread.
struct SimDevice {
    system: SimSystem,
    shard: u64,
    /// The device's number in the shard.
    device: usize,
}

impl SimDevice {
    /// Starts a shard with its first device.
    fn start(system: &SimSystem, handle: DeviceHandle) -> Result<Self> {
        let mut shard = Shard::without_thread(Box::new(SimDriver::new(system.clone())));
        let device = shard.serve("simulated", handle)?;
        let id = NEXT_ID.get();
        NEXT_ID.set(id + 1);
        let listed = ListedShard { id, system: system.clone(), shard: Some(shard) };
        SHARDS.with_borrow_mut(|shards| shards.push(listed));
        sync::set_drive(Some(turn));
        Ok(Self { system: system.clone(), shard: id, device })
    }

    /// Adds a device to a shard that does not run a turn.
    fn join(system: &SimSystem, shard: u64, handle: DeviceHandle) -> Result<Self> {
        let mut device = Err(Error::new(ErrorKind::Closed, "serve a simulated device: its shard runs a turn"));
        with(shard, |shard| device = shard.serve("simulated", handle));
        Ok(Self { system: system.clone(), shard, device: device? })
    }
}

impl ThreadlessDevice for SimDevice {
    /// Takes the batch in now or later, and may let another operation complete first.
    fn submitted(&self) {
        match self.system.choose(4) {
            0 => {}
            1 => {
                turn();
            }
            _ => with(self.shard, Shard::take_in),
        }
    }

    /// Runs the shard until it is idle, releases the device, and drops the shard with its last device.
    fn close(&self) {
        if !SHARDS.with_borrow(|shards| shards.iter().any(|listed| listed.id == self.shard)) {
            return;
        }
        let (mut busy, mut others) = (true, 0);
        while busy {
            busy = false;
            with(self.shard, |shard| busy = shard.turn());
        }
        with(self.shard, |shard| others = shard.release(self.device));
        // The shard is dropped after the borrow of the list, because the drop completes the requests that are left.
        let ended = SHARDS.with_borrow_mut(|shards| {
            let at = shards.iter().position(|listed| listed.id == self.shard && others == 0);
            at.map(|at| shards.remove(at))
        });
        drop(ended);
        SHARDS.with_borrow(|shards| {
            if shards.is_empty() {
                sync::set_drive(None);
            }
        });
    }
}

/// Returns the number of devices of a shard, or none if it has ended, runs a turn or lives on another thread.
fn served(shard: u64) -> Option<usize> {
    SHARDS.with_borrow(|shards| {
        let listed = shards.iter().find(|listed| listed.id == shard)?;
        Some(listed.shard.as_ref()?.served())
    })
}

/// Calls `f` on a shard, and takes the shard out of the list for the time of the call.
fn with(id: u64, f: impl FnOnce(&mut Shard)) {
    let taken = SHARDS.with_borrow_mut(|shards| shards.iter_mut().find(|listed| listed.id == id)?.shard.take());
    let Some(mut shard) = taken else { return };
    f(&mut shard);
    let left = SHARDS.with_borrow_mut(|shards| match shards.iter_mut().find(|listed| listed.id == id) {
        Some(listed) => {
            listed.shard = Some(shard);
            None
        }
        None => Some(shard),
    });
    drop(left);
}

/// Lets one busy shard of this thread run a turn. Returns `false` if no shard is busy.
fn turn() -> bool {
    let next = SHARDS.with_borrow(|shards| {
        let busy = || shards.iter().filter(|listed| listed.shard.as_ref().is_some_and(Shard::is_busy));
        let count = busy().count();
        let at = if count > 1 { busy().next()?.system.choose(count) } else { 0 };
        busy().nth(at).map(|listed| listed.id)
    });
    let Some(id) = next else { return false };
    with(id, |shard| {
        shard.turn();
    });
    true
}
