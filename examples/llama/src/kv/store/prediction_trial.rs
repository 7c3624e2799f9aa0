//! The decision whether predictions of the next layer's selection are worth their time.

use std::time::{Duration, Instant};

/// Measures steps with predictions and steps without, goes on with the faster kind, and measures again later.
///
/// A prediction costs a selection, and hides the reads of a layer. It pays if the device is slow beside the processor,
/// if predictions are right, and if the cache lacks what they name. Only the time of steps tells all of this.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PredictionTrial {
    /// Steps since the last measurement began.
    step: usize,
    /// When the last step was counted.
    counted: Option<Instant>,
    /// The time of each step with predictions, then of each step without.
    times: [[Duration; Self::STEPS]; 2],
    /// True if steps without predictions were faster.
    is_slower: bool,
}

impl PredictionTrial {
    /// Steps of each kind that are measured.
    const STEPS: usize = 8;
    /// Steps from the beginning of a measurement to the next.
    const CYCLE: usize = 128;

    /// Returns whether the next step makes no predictions.
    pub(super) fn is_paused(&self) -> bool {
        if self.step < 2 * Self::STEPS { self.step >= Self::STEPS } else { self.is_slower }
    }

    /// Counts a step. No prefetch for the next step may be in flight.
    pub(super) fn count_step(&mut self, now: Instant) {
        // The first step has no beginning. A time of zero is one of eight, and does not move the median much.
        self.add(self.counted.map_or(Duration::ZERO, |before| now.duration_since(before)));
        self.counted = Some(now);
    }

    fn add(&mut self, took: Duration) {
        if let Some(time) = self.times.get_mut(self.step / Self::STEPS) {
            time[self.step % Self::STEPS] = took;
        }
        self.step += 1;
        if self.step == 2 * Self::STEPS {
            // A step that waited for its caller, or for other programs, counts no more than another one.
            let [with, without] = self.times.map(|mut times| {
                times.sort_unstable();
                times[Self::STEPS / 2]
            });
            self.is_slower = without < with;
        }
        self.step %= Self::CYCLE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts steps whose time is `with` milliseconds if they predict, and `without` otherwise. Every fifth step waits.
    /// Returns the steps that predict.
    fn predicting(steps: u64, with: u64, without: u64) -> usize {
        let mut trial = PredictionTrial::default();
        let step = |at: &u64| {
            let predicts = !trial.is_paused();
            let waited = if at.is_multiple_of(5) { 1000 } else { 0 };
            trial.add(Duration::from_millis(waited + if predicts { with } else { without }));
            predicts
        };
        (0..steps).filter(step).count()
    }

    #[test]
    fn the_faster_kind_of_step_goes_on() {
        let (cycle, measured) = (PredictionTrial::CYCLE, PredictionTrial::STEPS);
        for (with, without, predicting_steps) in
            [(10, 11, cycle - measured), (11, 11, cycle - measured), (11, 10, measured)]
        {
            assert_eq!(predicting(3 * cycle as u64, with, without), 3 * predicting_steps, "{with} {without}");
        }
    }

    #[test]
    fn a_step_is_timed_from_the_one_before() {
        let (mut trial, start) = (PredictionTrial::default(), Instant::now());
        let mut now = start;
        for at in 0..2 * PredictionTrial::STEPS {
            now += Duration::from_millis(if trial.is_paused() { 5 } else { 7 });
            trial.count_step(now);
            assert_eq!(trial.step, at + 1);
        }
        assert!(trial.is_paused());
    }
}
