//! Results of `kvbench read`: nested by side, flat in JSON.

use serde::Serialize;

/// Medians of one block size.
///
/// CPU is user and system time of all threads. `fio_*` submits a batch when the previous one has completed. The engine
/// does the same with one batch in flight. `fio_full_*` keeps its queue full.
#[derive(Debug, Serialize)]
pub(crate) struct ReadResult {
    #[serde(flatten)]
    pub(crate) setup: ReadSetup,
    #[serde(flatten)]
    pub(crate) engine: EngineRates,
    #[serde(flatten)]
    pub(crate) checksum: ChecksumCost,
    #[serde(flatten)]
    pub(crate) bare: BareComparison,
    #[serde(flatten)]
    pub(crate) bare_touched: TouchedBareComparison,
    #[serde(flatten)]
    pub(crate) bare_checked: CheckedBareComparison,
    #[serde(flatten)]
    pub(crate) fio: FioReadComparison,
    #[serde(flatten)]
    pub(crate) store: StoreFacts,
    pub(crate) requests_per_batch: f64,
    pub(crate) system_calls_per_batch: f64,
}

/// The setup of a read measurement.
#[derive(Debug, Serialize)]
pub(crate) struct ReadSetup {
    pub(crate) block: u64,
    pub(crate) batch: u32,
    pub(crate) in_flight: u32,
    /// `blocking` (the calling thread drives the device) or `tickets` (the shard's thread does).
    pub(crate) path: &'static str,
}

/// Throughput and latency of batches.
#[derive(Debug, Serialize)]
pub(crate) struct ReadThroughput {
    pub(crate) gb_per_s: f64,
    pub(crate) iops: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// The engine's side.
#[derive(Debug, Serialize)]
pub(crate) struct EngineRates {
    #[serde(flatten)]
    pub(crate) throughput: ReadThroughput,
    /// p99 over p50.
    pub(crate) tail: f64,
    pub(crate) cpu_s_per_gb: f64,
}

/// The cost of checksums without reads, and the engine's cost without checksums.
#[derive(Debug, Serialize)]
pub(crate) struct ChecksumCost {
    /// Checksums over one batch of buffers repeatedly, from the processor's caches.
    pub(crate) checksum_cpu_s_per_gb: f64,
    /// Checksums over more memory than the caches hold, because blocks fresh from a device are not cached either.
    pub(crate) checksum_cold_cpu_s_per_gb: f64,
    /// The engine's CPU less the checksums over cached buffers.
    pub(crate) io_cpu_s_per_gb: f64,
    /// The engine's CPU less the checksums over buffers that are not cached.
    pub(crate) io_cold_cpu_s_per_gb: f64,
}

/// The bare loop, and the engine over it.
#[derive(Debug, Serialize)]
pub(crate) struct BareComparison {
    pub(crate) bare_gb_per_s: Option<f64>,
    pub(crate) bare_cpu_s_per_gb: Option<f64>,
    /// p99 over p50 of the bare loop's batches.
    pub(crate) bare_tail: Option<f64>,
    pub(crate) bare_p99_us: Option<f64>,
    /// The engine's p99 over the bare loop's.
    pub(crate) ratio_bare_p99: Option<f64>,
    pub(crate) ratio_bare: Option<f64>,
    pub(crate) ratio_bare_cpu: Option<f64>,
    pub(crate) ratio_bare_cpu_cold: Option<f64>,
}

/// The bare loop that reads every byte in memory once, and the engine over it.
#[derive(Debug, Serialize)]
pub(crate) struct TouchedBareComparison {
    pub(crate) bare_touched_gb_per_s: Option<f64>,
    pub(crate) bare_touched_cpu_s_per_gb: Option<f64>,
    pub(crate) ratio_bare_touched: Option<f64>,
}

/// The bare loop with the same checksums over the blocks it has read, and the engine over it.
#[derive(Debug, Serialize)]
pub(crate) struct CheckedBareComparison {
    pub(crate) bare_checked_gb_per_s: Option<f64>,
    pub(crate) bare_checked_cpu_s_per_gb: Option<f64>,
    pub(crate) ratio_bare_checked: Option<f64>,
    pub(crate) ratio_bare_checked_cpu: Option<f64>,
    /// The engine's CPU over 1.25 x the bare loop's and 1.1 x the checksums' share of it. The target is at most 1.
    pub(crate) ratio_cpu_allowed: Option<f64>,
}

/// fio, and the engine over it. fio touches nothing of what it reads.
#[derive(Debug, Serialize)]
pub(crate) struct FioReadComparison {
    pub(crate) fio_gb_per_s: Option<f64>,
    pub(crate) fio_cpu_s_per_gb: Option<f64>,
    pub(crate) ratio_fio: Option<f64>,
    pub(crate) fio_full_gb_per_s: Option<f64>,
    pub(crate) ratio_fio_full: Option<f64>,
    pub(crate) fio_pages: Option<&'static str>,
    pub(crate) fio_skipped: Option<&'static str>,
}

/// Facts about the store that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct StoreFacts {
    pub(crate) huge_pages: String,
    pub(crate) driver: String,
    pub(crate) direct: bool,
}
