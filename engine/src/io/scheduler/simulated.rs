//! Shards of simulated devices: they have no threads. Whoever waits on the simulating thread drives them, turn by turn, and
//! the simulation chooses whose turn it is.

use super::batch::closed;
use super::device_queue::DeviceHandle;
use super::registration_queue::RegistrationQueue;
use super::run::Shard;
use crate::error::Result;
use crate::io::sim::SimDriver;
use crate::io::sim::thread::choose;
use crate::sync;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

thread_local! {
    /// The shards of this thread; one that is having its turn is out.
    static SHARDS: RefCell<Vec<(u64, Option<Shard>)>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<u64> = const { Cell::new(1) };
}

/// A device of a shard that lives on this thread.
pub(super) struct SimulatedShard {
    pub(super) shard: u64,
    port: usize,
}

impl SimulatedShard {
    /// A shard with its first device.
    pub(super) fn new(handle: DeviceHandle) -> Result<Self> {
        let mut shard = Shard::new(Box::<SimDriver>::default(), Arc::new(RegistrationQueue::new()));
        let port = shard.serve("simulated", handle)?;
        let id = NEXT.get();
        NEXT.set(id + 1);
        SHARDS.with_borrow_mut(|shards| shards.push((id, Some(shard))));
        sync::set_drive(Some(turn));
        Ok(Self { shard: id, port })
    }

    /// Another device of a shard that is not having its turn.
    pub(super) fn join(shard: u64, handle: DeviceHandle) -> Result<Self> {
        let mut served = Err(closed());
        with(shard, |shard| served = shard.serve("simulated", handle));
        Ok(Self { shard, port: served? })
    }

    /// Devices of a shard; none: it has ended, or lives elsewhere.
    pub(super) fn count(shard: u64) -> Option<usize> {
        SHARDS.with_borrow(|shards| {
            let (_, own) = shards.iter().find(|(id, _)| *id == shard)?;
            Some(own.as_ref()?.served())
        })
    }

    /// Something was handed over: it is taken in now or later, and something else may end meanwhile.
    pub(super) fn submitted(&self) {
        match choose(4) {
            0 => {}
            1 => {
                turn();
            }
            _ => with(self.shard, Shard::take_in),
        }
    }

    /// Does all that is left, and ends it, with the shard if it is the last of its devices.
    pub(super) fn close(&self) {
        let is_here =
            |shards: &RefCell<Vec<(u64, Option<Shard>)>>| shards.borrow().iter().any(|(id, _)| *id == self.shard);
        if !SHARDS.with(is_here) {
            return;
        }
        let (mut left, mut others) = (true, 0);
        while left {
            left = false;
            with(self.shard, |shard| left = shard.turn());
        }
        with(self.shard, |shard| others = shard.let_go(self.port));
        // Dropped outside of the list: it completes what it still has.
        let gone = SHARDS.with_borrow_mut(|shards| {
            let at = shards.iter().position(|(id, _)| *id == self.shard && others == 0);
            at.map(|at| shards.remove(at))
        });
        drop(gone);
        SHARDS.with_borrow(|shards| {
            if shards.is_empty() {
                sync::set_drive(None);
            }
        });
    }
}

/// Calls `f` on a shard, which is out of the list meanwhile: what completes may submit more, or close it.
fn with(id: u64, f: impl FnOnce(&mut Shard)) {
    let taken = SHARDS.with_borrow_mut(|shards| shards.iter_mut().find(|(own, _)| *own == id)?.1.take());
    let Some(mut shard) = taken else { return };
    f(&mut shard);
    let left = SHARDS.with_borrow_mut(|shards| match shards.iter_mut().find(|(own, _)| *own == id) {
        Some((_, place)) => {
            *place = Some(shard);
            None
        }
        None => Some(shard),
    });
    drop(left);
}

/// One shard does something; `false` when none has anything to do.
fn turn() -> bool {
    let next = SHARDS.with_borrow(|shards| {
        let busy = || shards.iter().filter(|(_, shard)| shard.as_ref().is_some_and(Shard::is_busy));
        let count = busy().count();
        let at = if count > 1 { choose(count) } else { 0 };
        busy().nth(at).map(|(id, _)| *id)
    });
    let Some(id) = next else { return false };
    with(id, |shard| {
        shard.turn();
    });
    true
}
