//! [`RayonThreads`]: rayon's pool as the threads on which the engine computes parts of a selection.

use stratakv::ComputeThreads;

/// The pool that also computes the products of the model.
pub(super) struct RayonThreads;

impl ComputeThreads for RayonThreads {
    fn threads(&self) -> usize {
        rayon::current_num_threads()
    }

    fn run(&self, parts: usize, part: &(dyn Fn() + Sync)) {
        rayon::scope(|scope| {
            (1..parts).for_each(|_| scope.spawn(|_| part()));
            part();
        });
    }
}
