//! Synthetic selections: each step keeps a given share of the step before, as KVSwap measured it (75 to 81 %).

use std::collections::BTreeSet;

/// The selections of one layer of one sequence over the steps.
pub(crate) struct SelectionTrace {
    random: fastrand::Rng,
    groups: u64,
    overlap: f64,
    selected: BTreeSet<u64>,
    last: BTreeSet<u64>,
}

impl SelectionTrace {
    /// Returns a trace that selects `count` of `groups` groups at every step and keeps the share `overlap` of them.
    pub(crate) fn new(random: &mut fastrand::Rng, groups: u64, count: usize, overlap: f64) -> Self {
        let mut own = Self { random: random.fork(), groups, overlap, selected: BTreeSet::new(), last: BTreeSet::new() };
        own.fill(count.min(groups as usize), &BTreeSet::new());
        own
    }

    /// Selects random groups up to `count`, and none of `except` if there are enough others.
    fn fill(&mut self, count: usize, except: &BTreeSet<u64>) {
        while self.selected.len() < count {
            let group = self.random.u64(..self.groups);
            let others_left = (except.len() + count) as u64 <= self.groups;
            if !(others_left && except.contains(&group)) {
                self.selected.insert(group);
            }
        }
    }

    /// Returns a random share of the selection.
    fn some_of(&mut self, share: f64) -> BTreeSet<u64> {
        let mut all: Vec<u64> = self.selected.iter().copied().collect();
        self.random.shuffle(&mut all);
        // Random rounding meets the share on average if it is not a whole number of groups.
        let keep = all.len() as f64 * share + self.random.f64();
        all.truncate(keep as usize);
        all.into_iter().collect()
    }

    /// Advances to the next step.
    pub(crate) fn advance(&mut self) {
        let before = self.selected.clone();
        self.selected = self.some_of(self.overlap);
        self.fill(before.len(), &before);
        self.last = before;
    }

    /// Returns the selection of the step before in rising order.
    pub(crate) fn last_selected(&self) -> Vec<u64> {
        self.last.iter().copied().collect()
    }

    /// Returns the selection of this step in rising order.
    pub(crate) fn selected(&self) -> Vec<u64> {
        self.selected.iter().copied().collect()
    }

    /// Returns a prediction: as many groups as are selected, of which the share `recall` is selected in this step.
    pub(crate) fn predicted(&mut self, recall: f64) -> Vec<u64> {
        let (truth, count) = (self.selected.clone(), self.selected.len());
        self.selected = self.some_of(recall);
        self.fill(count, &truth);
        std::mem::replace(&mut self.selected, truth).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_meets_its_overlap_and_recall() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut trace = SelectionTrace::new(&mut random, 1024, 50, 0.78);
        let (mut kept, mut right) = (0, 0);
        for _ in 0..400 {
            let before = trace.selected();
            trace.advance();
            let now = trace.selected();
            kept += now.iter().filter(|group| before.contains(group)).count();
            right += trace.predicted(0.9).iter().filter(|group| now.contains(group)).count();
            assert_eq!(trace.last_selected(), before);
            assert_eq!((now.len(), trace.selected()), (50, now));
        }
        let share = |count: usize| count as f64 / (400.0 * 50.0);
        assert!((share(kept) - 0.78).abs() < 0.01, "{}", share(kept));
        assert!((share(right) - 0.9).abs() < 0.01, "{}", share(right));
    }

    #[test]
    fn trace_of_all_groups_ends() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut trace = SelectionTrace::new(&mut random, 10, 50, 0.5);
        trace.advance();
        assert_eq!(trace.selected().len(), 10);
        assert_eq!(trace.predicted(0.5).len(), 10);
    }
}
