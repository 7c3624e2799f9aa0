//! Driver `simulated`: operations arrive at a simulated disk and complete later, in an order of the simulation's choice.

use super::directory::Arrival;
use super::thread::choose;
use crate::error::Result;
use crate::io::coverage;
use crate::io::driver::interface::{Completion, DeviceTable, Driver, Op, ServedDevice, Wait, Wake};
use crate::io::driver::progress::{InFlight, Step};
use crate::metrics::DeviceCounters;
use std::sync::Arc;

/// Operations under way at most.
const DEPTH: usize = 32;

struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

struct Slot {
    port: usize,
    id: u64,
    flight: InFlight,
    arrival: Arrival,
}

/// See the top of the file.
#[derive(Default)]
pub(crate) struct SimDriver {
    slots: Vec<Slot>,
    counters: DeviceTable<Arc<DeviceCounters>>,
}

impl Driver for SimDriver {
    fn add(&mut self, port: usize, device: &ServedDevice<'_>) -> Result<()> {
        self.counters.put(port, Arc::clone(device.counters));
        Ok(())
    }

    fn remove(&mut self, port: usize) {
        self.counters.take(port);
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn queue(&mut self, port: usize, id: u64, op: Op) {
        let is_write_to = |slot: &Slot, id| matches!(slot.flight.op(), Op::Write { file, .. } if file.id() == id);
        if let Op::Sync { file } = &op
            && self.slots.iter().any(|slot| is_write_to(slot, file.id()))
        {
            coverage!(SyncBesideWrites);
        }
        let flight = InFlight::new(op);
        let arrival = Arrival::of(&flight);
        self.slots.push(Slot { port, id, flight, arrival });
    }

    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        if wait == Wait::No || self.slots.is_empty() {
            return Ok(());
        }
        let at = choose(self.slots.len());
        let slot = &mut self.slots[at];
        if slot.arrival.is_held_back() {
            return Ok(());
        }
        let result = slot.arrival.complete(&slot.flight);
        if self.slots.len() > 1 && self.slots[at].arrival.was_cut() {
            coverage!(CutUnderWay);
        }
        let slot = &mut self.slots[at];
        let Some(counters) = self.counters.get_mut(slot.port) else { return Ok(()) };
        match slot.flight.on_result(result, counters) {
            Step::Done(outcome) => {
                done.push(Completion { id: slot.id, outcome });
                self.slots.swap_remove(at);
            }
            // Time does not count here.
            Step::CopyRetry | Step::Later(_) => slot.arrival = Arrival::of(&slot.flight),
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWake)
    }

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn notes(&self) -> &[String] {
        &[]
    }
}
