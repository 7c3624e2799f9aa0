//! [`ChosenAgain`]: how soon the clusters that a step changed are retrieved again.
//!
//! A step changes a cluster if it appends an entry to it, or if a split makes it. A change counts for a number of steps
//! if the trace has as many steps behind it.
//!
//! Source: DynaKV, section 6.2 and table 2.

use std::collections::HashMap;

/// The numbers of later steps that are looked at.
pub(super) const LATER_STEPS: [usize; 5] = [1, 2, 4, 8, 16];

/// The steps of a trace: the clusters that each of them retrieved, and those that it then changed.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterSteps {
    steps: usize,
    /// The steps that retrieved a cluster, in rising order.
    retrieved: HashMap<u32, Vec<usize>>,
    /// A step and a cluster, each pair once.
    changed: Vec<(usize, u32)>,
}

/// Changes of clusters, and those of them whose cluster a later step retrieved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChosenAgain {
    /// Changes that have enough steps behind them, for each of [`LATER_STEPS`].
    changes: [usize; LATER_STEPS.len()],
    /// Changes of these whose cluster one of the steps retrieved.
    chosen: [usize; LATER_STEPS.len()],
}

impl ClusterSteps {
    /// Adds the next step.
    pub(super) fn add(&mut self, retrieved: &[u32], mut changed: Vec<u32>) {
        for cluster in retrieved {
            self.retrieved.entry(*cluster).or_default().push(self.steps);
        }
        changed.sort_unstable();
        changed.dedup();
        self.changed.extend(changed.into_iter().map(|cluster| (self.steps, cluster)));
        self.steps += 1;
    }

    /// Returns how soon changed clusters were retrieved again.
    pub(super) fn chosen_again(&self) -> ChosenAgain {
        let mut found = ChosenAgain::default();
        for (step, cluster) in &self.changed {
            let retrieved = self.retrieved.get(cluster).map_or(&[][..], Vec::as_slice);
            let next = retrieved.get(retrieved.partition_point(|at| at <= step));
            for (nth, later) in LATER_STEPS.into_iter().enumerate() {
                if step + later < self.steps {
                    found.changes[nth] += 1;
                    found.chosen[nth] += usize::from(next.is_some_and(|next| next - step <= later));
                }
            }
        }
        found
    }
}

impl ChosenAgain {
    /// Returns the changes that have at least one step behind them.
    pub(super) fn changes(&self) -> usize {
        self.changes[0]
    }

    /// Returns the share of the changes whose cluster was retrieved within `LATER_STEPS[nth]` steps, if there are any.
    pub(super) fn share(&self, nth: usize) -> Option<f64> {
        (self.changes[nth] > 0).then(|| self.chosen[nth] as f64 / self.changes[nth] as f64)
    }
}

impl std::iter::Sum for ChosenAgain {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, own| {
            sum.changes.iter_mut().zip(own.changes).for_each(|(sum, own)| *sum += own);
            sum.chosen.iter_mut().zip(own.chosen).for_each(|(sum, own)| *sum += own);
            sum
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_counts_if_enough_steps_follow_it() {
        let mut steps = ClusterSteps::default();
        // Step 0 changes clusters 1 and 2. Step 1 retrieves 1. Step 3 retrieves 2 and changes it. Step 4 changes 1.
        steps.add(&[1, 2], vec![2, 1, 2]);
        steps.add(&[1], vec![]);
        steps.add(&[], vec![]);
        steps.add(&[2], vec![2]);
        steps.add(&[2], vec![1]);
        let found = steps.chosen_again();
        // The last step has no step behind it.
        assert_eq!((found.changes, found.chosen), ([3, 2, 2, 0, 0], [2, 1, 2, 0, 0]));
        assert_eq!((found.changes(), found.share(2), found.share(3)), (3, Some(1.0), None));
        let sum: ChosenAgain = [found, found].into_iter().sum();
        assert_eq!((sum.changes[0], sum.chosen[0], sum.share(1)), (6, 4, Some(0.5)));
    }
}
