//! The simulated driver: operations arrive at a simulated disk and complete later, in an order that the simulation
//! chooses.

use super::sim_file::Arrival;
use super::system::SimSystem;
use crate::error::Result;
use crate::io::coverage;
use crate::io::driver::interface::{Completion, DeviceTable, Driver, Op, ServedDevice, Wait, Wake};
use crate::io::driver::progress::{InFlight, Step};
use crate::metrics::DeviceCounters;
use std::sync::Arc;

/// Operations in flight, at most.
const DEPTH: usize = 32;

/// The waker of a driver that never blocks.
struct SimWake;

impl Wake for SimWake {
    fn wake(&self) {}
}

/// An operation that has arrived at its disk.
struct SimOp {
    device: usize,
    id: u64,
    flight: InFlight,
    arrival: Arrival,
}

/// The driver of simulated devices.
pub(super) struct SimDriver {
    system: SimSystem,
    ops: Vec<SimOp>,
    counters: DeviceTable<Arc<DeviceCounters>>,
}

impl SimDriver {
    pub(super) fn new(system: SimSystem) -> Self {
        Self { system, ops: Vec::new(), counters: DeviceTable::default() }
    }
}

impl Driver for SimDriver {
    fn add(&mut self, device: usize, served: &ServedDevice<'_>) -> Result<()> {
        self.counters.put(device, Arc::clone(served.counters));
        Ok(())
    }

    fn remove(&mut self, device: usize) {
        self.counters.take(device);
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn queue(&mut self, device: usize, id: u64, op: Op) {
        let is_write_to = |own: &SimOp, id| matches!(own.flight.op(), Op::Write { file, .. } if file.id() == id);
        if let Op::Sync { file } = &op {
            coverage!(SyncBesideWrites, self.ops.iter().any(|own| is_write_to(own, file.id())));
        }
        let flight = InFlight::new(op);
        let arrival = Arrival::of(&flight);
        self.ops.push(SimOp { device, id, flight, arrival });
    }

    /// Lets at most one operation complete, whatever `wait` says.
    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()> {
        if wait == Wait::No || self.ops.is_empty() {
            return Ok(());
        }
        let at = self.system.choose(self.ops.len());
        let op = &mut self.ops[at];
        if op.arrival.is_held_back(&self.system) {
            return Ok(());
        }
        let result = op.arrival.complete(&mut op.flight);
        coverage!(CutUnderWay, self.ops.len() > 1 && self.ops[at].arrival.was_cut());
        let op = &mut self.ops[at];
        let Some(counters) = self.counters.get_mut(op.device) else { return Ok(()) };
        match op.flight.on_result(result, counters) {
            Step::Done(outcome) => {
                done.push(Completion { id: op.id, outcome });
                self.ops.swap_remove(at);
            }
            // The pause before a retry means nothing here, because no time passes.
            Step::Continue | Step::Later(_) => op.arrival = Arrival::of(&op.flight),
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(SimWake)
    }

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn notes(&self) -> &[String] {
        &[]
    }
}
