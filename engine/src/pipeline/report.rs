//! What a pipeline did and what it was worth.

use serde::Serialize;
use std::time::Duration;

/// Sums over the life of a [`Pipeline`](super::Pipeline), or since [`take_report`](super::Pipeline::take_report).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PipelineReport {
    /// Layers attended to, each with all its sequences.
    pub layers: u64,
    /// Of these, layers of which something had been predicted.
    pub predicted_layers: u64,
    /// Blocks on devices that were selected, in all layers.
    pub selected: u64,
    /// Of these, blocks that a cache held.
    pub resident: u64,
    /// Blocks on devices that were selected in predicted layers.
    pub predictable: u64,
    /// Of these, blocks that the prediction had selected too.
    pub predicted: u64,
    /// Blocks that a read ahead brought in time for the layer that needed them.
    pub prefetched: u64,
    /// Blocks that were read on demand, in predicted layers: what the prediction missed.
    pub corrected: u64,
    /// Blocks that were read ahead for nothing.
    pub wasted: u64,
    /// Bytes of keys and values that were read ahead for nothing.
    pub wasted_bytes: u64,
    /// Bytes that devices brought, ahead and on demand.
    pub read_bytes: u64,
    /// Bytes of records of summaries that devices brought ahead of the selections that score them ([`stream`](super::Pipeline::stream)).
    pub record_bytes: u64,
    /// Reads ahead that were given up: no buffers were free, or the layer came without them.
    pub dropped_reads: u64,
    /// Time in which reads that a layer needed were at the devices, from submission to their last block; where reads overlap,
    /// once.
    #[serde(rename = "device_ns", serialize_with = "nanoseconds")]
    pub device_time: Duration,
    /// Time that the caller spent waiting for them, and for buffers for them.
    #[serde(rename = "waited_ns", serialize_with = "nanoseconds")]
    pub waited: Duration,
}

fn nanoseconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl std::ops::AddAssign for PipelineReport {
    /// The sums of both: what several pipelines did together.
    fn add_assign(&mut self, other: Self) {
        self.layers += other.layers;
        self.predicted_layers += other.predicted_layers;
        self.selected += other.selected;
        self.resident += other.resident;
        self.predictable += other.predictable;
        self.predicted += other.predicted;
        self.prefetched += other.prefetched;
        self.corrected += other.corrected;
        self.wasted += other.wasted;
        self.wasted_bytes += other.wasted_bytes;
        self.read_bytes += other.read_bytes;
        self.record_bytes += other.record_bytes;
        self.dropped_reads += other.dropped_reads;
        self.device_time += other.device_time;
        self.waited += other.waited;
    }
}

impl PipelineReport {
    /// Share of what was selected in predicted layers that the prediction had selected; 0 without predictions.
    #[must_use]
    pub fn recall(&self) -> f64 {
        share(self.predicted, self.predictable)
    }

    /// Share of the blocks read ahead that nobody needed; 0 when none was.
    #[must_use]
    pub fn wasted_share(&self) -> f64 {
        share(self.wasted, self.wasted + self.prefetched)
    }

    /// Share of the time at the devices that nobody waited for; 0 when nothing was read.
    #[must_use]
    pub fn hidden_share(&self) -> f64 {
        if self.device_time.is_zero() {
            return 0.0;
        }
        (1.0 - self.waited.as_secs_f64() / self.device_time.as_secs_f64()).max(0.0)
    }
}
