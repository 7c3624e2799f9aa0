//! Results of `kvbench decode`: nested by concern, flat in JSON.

use crate::decode::args::Ahead;
use crate::decode::codec_share::SolvedShare;
use serde::Serialize;

/// Figures of one combination of settings. `step_ms` is a median; the others are sums or means over the measured steps.
#[derive(Debug, Serialize)]
pub(crate) struct DecodeResult {
    #[serde(flatten)]
    pub(crate) steps: StepFigures,
    #[serde(flatten)]
    pub(crate) selection: SelectionFigures,
    #[serde(flatten)]
    pub(crate) setup: DecodeSetup,
    #[serde(flatten)]
    pub(crate) codec: CodecSetup,
    #[serde(flatten)]
    pub(crate) prefetch: PrefetchFigures,
    /// The step time of the first combination of the same context and compute time over this one's.
    pub(crate) speedup: Option<f64>,
}

/// The time of a step and where it went.
#[derive(Debug, Serialize)]
pub(crate) struct StepFigures {
    pub(crate) tokens_per_s: f64,
    pub(crate) step_ms: f64,
    /// Device time of the reads of a step. Reads that overlap count each.
    pub(crate) io_ms: f64,
    /// The share of `io_ms` during which the step did not wait.
    pub(crate) io_hidden_share: f64,
    pub(crate) hit_rate: f64,
    pub(crate) bytes_read_per_step: u64,
    pub(crate) resident_bytes_peak: u64,
    /// Computation of a step, most of it emulated.
    pub(crate) compute_ms: f64,
    /// Appends of a step by this machine's cores, not part of `compute_ms`.
    pub(crate) append_ms: f64,
    /// Attention and checking of blocks, without waits. It is part of `compute_ms`.
    pub(crate) attend_ms: f64,
}

/// The method that scores the context in every step, and its cost.
#[derive(Debug, Serialize)]
pub(crate) struct SelectionFigures {
    pub(crate) select: String,
    /// Time of scoring and selection per step, summed over the threads.
    pub(crate) select_ms: f64,
    /// The part of it during which the step waited. The rest is hidden behind the computation.
    pub(crate) select_waited_ms: f64,
    /// Bytes of the method's summaries for all sequences and layers. They are not part of `resident_bytes_peak`.
    pub(crate) summary_bytes: u64,
}

/// The sequences, their size and the selections from them.
#[derive(Debug, Serialize)]
pub(crate) struct DecodeSetup {
    pub(crate) context: u32,
    pub(crate) stored_tokens: u32,
    pub(crate) batch: u32,
    pub(crate) layers: u16,
    pub(crate) group: u16,
    pub(crate) budget: u32,
    pub(crate) overlap: f64,
    pub(crate) policy: String,
}

/// The codec and the layers that are stored under it.
#[derive(Debug, Serialize)]
pub(crate) struct CodecSetup {
    pub(crate) codec: String,
    pub(crate) codec_share: f64,
    /// Layers that the share amounts to.
    pub(crate) codec_layers: usize,
    /// Present if the share was solved for.
    #[serde(flatten)]
    pub(crate) solved: Option<SolvedShare>,
}

/// The pipeline's settings and how good its predictions were.
#[derive(Debug, Serialize)]
pub(crate) struct PrefetchFigures {
    pub(crate) pipeline: bool,
    /// The setting of --pipeline.
    pub(crate) ahead: Ahead,
    pub(crate) layer_compute_us: u64,
    pub(crate) cache_mib: u64,
    /// Bytes per second that the device may read.
    pub(crate) read_bps: Option<u64>,
    /// Requests per second that the device may read by.
    pub(crate) read_iops: Option<u64>,
    /// The share of the selected groups that the predictions named; 0 without pipeline.
    pub(crate) recall: f64,
    /// The share of prefetched bytes that no selection needed.
    pub(crate) wasted_share: f64,
}
