//! The environment of a store on a simulated system: it implements the seams of [`crate::io::seams`].

use super::scheduler::SimScheduler;
use super::system::SimSystem;
use crate::io::buffer::arena::Arena;
use crate::io::replacement::Replacement;
use crate::io::scheduler::ThreadlessScheduler;
use crate::io::seams::{Environment, ReplacedSystem, Sizes};
use crate::metrics::MemoryBudget;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// Buffers by memory limit. They stay mapped from one store of this thread to the next, because mapping them takes
    /// longer than a case. Stores that are open at the same time share them if they have the same limit.
    static BUFFERS: RefCell<Vec<(Arc<MemoryBudget>, Arena)>> = const { RefCell::new(Vec::new()) };
}

/// Returns the environment of stores on this system.
pub(super) fn environment(system: &SimSystem) -> Environment {
    let system: Arc<dyn ReplacedSystem> = Arc::new(system.clone());
    Environment::replaced(system.into())
}

impl ReplacedSystem for SimSystem {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn scheduler(&self) -> Replacement<dyn ThreadlessScheduler> {
        let scheduler: Arc<dyn ThreadlessScheduler> = Arc::new(SimScheduler::new(self.clone()));
        scheduler.into()
    }

    fn buffers(&self, limit: usize) -> (Arc<MemoryBudget>, Arena) {
        BUFFERS.with_borrow_mut(|buffers| {
            if let Some((budget, arena)) = buffers.iter().find(|(budget, _)| budget.limit() == limit) {
                return (Arc::clone(budget), arena.clone());
            }
            let budget = MemoryBudget::new(limit);
            let arena = Arena::new(Arc::clone(&budget), limit);
            buffers.truncate(1);
            buffers.push((Arc::clone(&budget), arena.clone()));
            (budget, arena)
        })
    }
}
