//! Counters of a pipeline, and the share of the reading time that it hid.

use serde::Serialize;
use std::time::Duration;

/// Counters since a [`Pipeline`](super::Pipeline) was made or since [`take_report`](super::Pipeline::take_report).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PipelineReport {
    /// Layers attended, each with all its sequences.
    pub layers: u64,
    /// Attended layers that had a prediction.
    pub predicted_layers: u64,
    /// Blocks on devices that were selected, in all layers.
    pub selected: u64,
    /// Selected blocks that a cache held.
    pub resident: u64,
    /// Blocks on devices that were selected in predicted layers.
    pub predictable: u64,
    /// Selected blocks in predicted layers that the prediction had selected too.
    pub predicted: u64,
    /// Blocks that were prefetched and used.
    pub prefetched: u64,
    /// Blocks that the prediction missed, read on demand in predicted layers.
    pub corrected: u64,
    /// Blocks that were prefetched and not used.
    pub wasted: u64,
    /// Bytes of keys and values that were prefetched and not used.
    pub wasted_bytes: u64,
    /// Bytes read from devices, prefetched and on demand.
    pub read_bytes: u64,
    /// Bytes of summary records that [`stream`](super::Pipeline::stream) prefetched.
    pub record_bytes: u64,
    /// Prefetches that were cancelled, because no buffers were free or the layer did not need them.
    pub dropped_reads: u64,
    /// The time that reads spent at the devices, from submission to their last block. Overlapping reads count once.
    #[serde(rename = "device_ns", serialize_with = "nanoseconds")]
    pub device_time: Duration,
    /// The time that the caller waited for reads and for their buffers.
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
    /// Adds the counters of another pipeline.
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
    /// Returns the share of selected blocks in predicted layers that the prediction selected too. 0 without
    /// predictions.
    #[must_use]
    pub fn recall(&self) -> f64 {
        share(self.predicted, self.predictable)
    }

    /// Returns the share of prefetched blocks that were not used. 0 without prefetches.
    #[must_use]
    pub fn wasted_share(&self) -> f64 {
        share(self.wasted, self.wasted + self.prefetched)
    }

    /// Returns the share of the device time that no caller waited for. 0 without reads.
    #[must_use]
    pub fn hidden_share(&self) -> f64 {
        if self.device_time.is_zero() {
            return 0.0;
        }
        (1.0 - self.waited.as_secs_f64() / self.device_time.as_secs_f64()).max(0.0)
    }
}
