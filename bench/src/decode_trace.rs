//! Selections of one layer of one sequence over the steps, with a given share kept from each step to the next.

use std::collections::BTreeSet;

pub(crate) struct Trace {
    random: fastrand::Rng,
    groups: u64,
    overlap: f64,
    selected: BTreeSet<u64>,
}

impl Trace {
    /// Selects `count` of `groups` groups at every step.
    pub(crate) fn new(random: &mut fastrand::Rng, groups: u64, count: usize, overlap: f64) -> Self {
        let mut own = Self { random: random.fork(), groups, overlap, selected: BTreeSet::new() };
        own.fill(count.min(groups as usize), &BTreeSet::new());
        own
    }

    /// Up to `count`, none of `except` as long as there are others.
    fn fill(&mut self, count: usize, except: &BTreeSet<u64>) {
        while self.selected.len() < count {
            let group = self.random.u64(..self.groups);
            let others_left = (except.len() + count) as u64 <= self.groups;
            if !(others_left && except.contains(&group)) {
                self.selected.insert(group);
            }
        }
    }

    fn some_of(&mut self, share: f64) -> BTreeSet<u64> {
        let mut all: Vec<u64> = self.selected.iter().copied().collect();
        self.random.shuffle(&mut all);
        // The share is met on average where it is no whole number of groups.
        let keep = all.len() as f64 * share + self.random.f64();
        all.truncate(keep as usize);
        all.into_iter().collect()
    }

    /// The next step.
    pub(crate) fn advance(&mut self) {
        let before = self.selected.clone();
        self.selected = self.some_of(self.overlap);
        self.fill(before.len(), &before);
    }

    /// The selection of this step, rising.
    pub(crate) fn selected(&self) -> Vec<u64> {
        self.selected.iter().copied().collect()
    }

    /// As many groups, of which `recall` are selected in this step.
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
    fn overlap_and_recall_are_what_was_asked_for() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut trace = Trace::new(&mut random, 1024, 50, 0.78);
        let (mut kept, mut right) = (0, 0);
        for _ in 0..400 {
            let before = trace.selected();
            trace.advance();
            let now = trace.selected();
            kept += now.iter().filter(|group| before.contains(group)).count();
            right += trace.predicted(0.9).iter().filter(|group| now.contains(group)).count();
            assert_eq!((now.len(), trace.selected()), (50, now));
        }
        let share = |count: usize| count as f64 / (400.0 * 50.0);
        assert!((share(kept) - 0.78).abs() < 0.01, "{}", share(kept));
        assert!((share(right) - 0.9).abs() < 0.01, "{}", share(right));
    }

    #[test]
    fn a_trace_of_everything_ends() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut trace = Trace::new(&mut random, 10, 50, 0.5);
        trace.advance();
        assert_eq!(trace.selected().len(), 10);
        assert_eq!(trace.predicted(0.5).len(), 10);
    }
}
