//! The decision whether predictions of the next layer's selection are worth their reads.

use stratakv::pipeline::PipelineReport;

/// Pauses predictions if too many of the bytes that they read are not used, and tries them again later.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PredictionTrial {
    steps: u64,
    /// The step until which no prediction is made.
    paused_until: u64,
    /// The bytes that were read, and those that were not used, at the beginning of the trial.
    before: (u64, u64),
}

impl PredictionTrial {
    /// Steps of a trial.
    const STEPS: u64 = 8;
    /// Steps of a pause.
    const PAUSE: u64 = 120;
    /// A trial fails if more than a fourth of the bytes is not used, because these delay the needed ones.
    const WASTED: u64 = 4;

    pub(super) fn is_paused(&self) -> bool {
        self.steps < self.paused_until
    }

    /// Counts a step whose last layer was prepared, when no prefetch is in flight. At the end of a trial it decides
    /// whether to pause.
    pub(super) fn count_step(&mut self, report: &PipelineReport) {
        self.steps += 1;
        if self.is_paused() || !self.steps.is_multiple_of(Self::STEPS) {
            return;
        }
        let (read, wasted) = (report.read_bytes - self.before.0, report.wasted_bytes - self.before.1);
        self.before = (report.read_bytes, report.wasted_bytes);
        // Records of streamed summaries are prefetched whether predictions are right or not.
        if wasted * Self::WASTED > read && report.record_bytes == 0 {
            self.paused_until = self.steps + Self::PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts steps of which each reads 100 bytes. Returns the steps that predict.
    fn predicting(steps: u64, wasted_bytes: u64, record_bytes: u64) -> u64 {
        let (mut trial, mut report) = (PredictionTrial::default(), PipelineReport::default());
        report.record_bytes = record_bytes;
        let step = |_: &u64| {
            let predicts = !trial.is_paused();
            if predicts {
                report.read_bytes += 100;
                report.wasted_bytes += wasted_bytes;
            }
            trial.count_step(&report);
            predicts
        };
        (0..steps).filter(step).count() as u64
    }

    #[test]
    fn predictions_pause_while_a_quarter_of_their_bytes_is_wasted() {
        let all = 3 * (PredictionTrial::STEPS + PredictionTrial::PAUSE);
        assert_eq!(predicting(all, 25, 0), all);
        assert_eq!(predicting(all, 26, 0), 3 * PredictionTrial::STEPS);
        assert_eq!(predicting(all, 100, 1), all, "with streamed records");
    }
}
