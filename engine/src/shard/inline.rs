//! A shard of a simulated device: it has no thread, a batch runs on the one that submits it.

use super::batch::{Accepted, Pending};
use crate::device::driver::Op;
use crate::device::environment::{Mutant, mutated};
use crate::device::file::Poison;
use crate::device::sim;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::DeviceCounters;
use std::sync::Arc;

pub(super) struct Inline {
    poison: Arc<Poison>,
    counters: Arc<DeviceCounters>,
}

impl Inline {
    pub(super) fn new(poison: Arc<Poison>, counters: Arc<DeviceCounters>) -> Self {
        Self { poison, counters }
    }

    /// Runs the requests of a batch in an order of the simulation's choice.
    pub(super) fn run(&self, mut batch: Accepted) {
        let mut requests: Vec<(Op, Pending)> = std::iter::from_fn(|| batch.next()).collect();
        while !requests.is_empty() {
            let (op, pending) = requests.swap_remove(sim::thread::choose(requests.len()));
            let outcome = self.execute(&op);
            drop(op);
            pending.complete(outcome);
        }
    }

    fn execute(&self, op: &Op) -> Result<()> {
        if !op.is_read() {
            self.poison.check()?;
        }
        let file = op.file().as_simulated();
        let file = file.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "a file of another device"))?;
        let outcome = file.execute(op);
        match (&outcome, op) {
            (Ok(()), Op::Read { .. }) => self.counters.reads.add(1),
            (Ok(()), Op::Write { .. }) => self.counters.writes.add(1),
            (Ok(()), Op::Sync { .. }) => self.counters.syncs.add(1),
            (Err(e), _) => {
                self.counters.errors.add(1);
                if matches!(op, Op::Sync { .. }) && !mutated(Mutant::SyncRetried) {
                    self.poison.set(e);
                }
            }
        }
        outcome
    }
}
