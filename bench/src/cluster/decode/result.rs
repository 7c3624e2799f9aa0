//! Results of `kvbench cluster decode`.

use crate::cluster::decode::args::{DecodePlace, DeviceCondition};
use crate::cluster::decode::side::{DecodeSide, SideFigures};
use crate::cluster::decode::workload::DecodeWorkload;
use crate::devices::DeviceLimits;
use crate::support::report::{ratio, rounded};
use serde::Serialize;
use std::fmt;
use stratakv::sequence::StoredClusters;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DecodeTrace {
    trace: String,
    tokens: usize,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    devices: usize,
}

impl DecodeTrace {
    pub(super) fn new(workload: &DecodeWorkload, devices: usize) -> Self {
        Self {
            trace: workload.name.clone(),
            tokens: workload.tokens,
            layers: workload.layers.len(),
            kv_heads: workload.kv_heads,
            head_dim: workload.dim,
            devices,
        }
    }
}

/// The cost of storing the clusters of one method.
#[derive(Debug, Serialize)]
pub(super) struct StoreClustersResult<'a> {
    method: String,
    /// Attaching the method, profile included: keys are read and clustered.
    attach_s: f64,
    store_s: f64,
    /// Attaching again, with stored clusters.
    reattach_s: f64,
    clusters: u64,
    mean_size: f64,
    pages: u64,
    /// Entries in pages over entries that the pages have space for.
    page_fill: f64,
    page_bytes: u64,
    directory_bytes: u64,
    device_bytes: u64,
    /// `device_bytes` over the bytes of keys and values of the covered tokens.
    ratio_kv: Option<f64>,
    #[serde(flatten)]
    trace: &'a DecodeTrace,
}

impl<'a> StoreClustersResult<'a> {
    /// Returns the result of one method. `attach_s` are the times before and after storing.
    pub(super) fn new(
        method: String,
        stored: &StoredClusters,
        [attach_s, reattach_s]: [f64; 2],
        workload: &DecodeWorkload,
        trace: &'a DecodeTrace,
    ) -> Self {
        // Keys and values in f16.
        let token_bytes = (workload.kv_heads * workload.dim * 4 * stored.layers) as u64;
        let covered = (stored.tokens * stored.layers as u64).max(1);
        // A method with a list per head stores entries of one head.
        let is_per_head = stored.entries >= covered * workload.kv_heads as u64 && workload.kv_heads > 1;
        let heads = if is_per_head { 1 } else { workload.kv_heads };
        let entry_bytes = (heads * workload.dim * 4) as u64;
        let room = stored.page_bytes / entry_bytes;
        Self {
            method,
            attach_s: rounded(attach_s),
            store_s: rounded(stored.time.as_secs_f64()),
            reattach_s: rounded(reattach_s),
            clusters: stored.clusters,
            mean_size: rounded(stored.entries as f64 / stored.clusters.max(1) as f64),
            pages: stored.pages,
            page_fill: rounded(stored.entries as f64 / room.max(1) as f64),
            page_bytes: stored.page_bytes,
            directory_bytes: stored.directory_bytes,
            device_bytes: stored.device_bytes,
            ratio_kv: ratio(stored.device_bytes as f64, (token_bytes * stored.tokens) as f64),
            trace,
        }
    }
}

/// The reads of one method at one budget, from one place and on one device.
#[derive(Debug, Serialize)]
pub(super) struct ClusterDecodeResult<'a> {
    method: &'a str,
    group: u16,
    place: &'static str,
    budget: &'a str,
    /// Sequences that one read served.
    batch: usize,
    /// The profile of the device; `plain` without limits, `limited` by single limits, `given` by `--directories`.
    device: &'a str,
    #[serde(flatten)]
    limits: DeviceLimits,
    #[serde(flatten)]
    figures: SideFigures,
    ratio_requests: Option<f64>,
    ratio_bytes: Option<f64>,
    ratio_step: Option<f64>,
    #[serde(flatten)]
    trace: &'a DecodeTrace,
}

/// What results of several lengths have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct LengthKey {
    method: String,
    group: u16,
    place: &'static str,
    budget: String,
    batch: usize,
    device: String,
}

impl fmt::Display for LengthKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, group, place, budget, batch, device } = self;
        write!(f, "{method}@{group}, {place}, {budget}, batch {batch}, {device}")
    }
}

impl<'a> ClusterDecodeResult<'a> {
    /// Returns the result, with its ratios to the baseline.
    pub(super) fn new(
        (side, budget, batch): (&'a DecodeSide, &'a str, usize),
        (figures, baseline): (SideFigures, &SideFigures),
        condition: &'a DeviceCondition,
        trace: &'a DecodeTrace,
    ) -> Self {
        Self {
            method: &side.method,
            group: side.group,
            place: match side.place {
                DecodePlace::Groups => "groups",
                DecodePlace::Pages => "pages",
            },
            budget,
            batch,
            device: &condition.name,
            limits: condition.limits,
            figures,
            ratio_requests: ratio(figures.requests, baseline.requests),
            ratio_bytes: ratio(figures.bytes, baseline.bytes),
            ratio_step: ratio(figures.step_us, baseline.step_us),
            trace,
        }
    }

    /// Returns what results of other lengths are compared by.
    pub(super) fn length_key(&self) -> LengthKey {
        LengthKey {
            method: self.method.to_owned(),
            group: self.group,
            place: self.place,
            budget: self.budget.to_owned(),
            batch: self.batch,
            device: self.device.to_owned(),
        }
    }

    /// Returns the header of the table of results.
    pub(super) fn header() -> String {
        let [place, budget, batch, device, method] = ["place", "budget", "batch", "device", "method"];
        let mut line = format!("{method:<20} {place:<7} {budget:>7} {batch:>5} {device:<7}");
        let names = ["weight", "requests", "KiB", "useful", "select us", "read us", "step us", "cpu us", "token/s"];
        for name in names.into_iter().chain(["requests x", "bytes x", "step x"]) {
            line.push_str(&format!(" {name:>10}"));
        }
        line
    }

    /// Returns its line of the table.
    pub(super) fn line(&self) -> String {
        let own = &self.figures;
        let method = format!("{}@{}", self.method, self.group);
        let mut line =
            format!("{method:<20} {:<7} {:>7} {:>5} {:<7}", self.place, self.budget, self.batch, self.device);
        let ratios = [self.ratio_requests, self.ratio_bytes, self.ratio_step].map(Option::unwrap_or_default);
        let kib = rounded(own.bytes / 1024.0);
        let times = [own.select_us, own.read_us, own.step_us, own.cpu_us, own.tokens_per_s];
        for figure in [own.weight_kept, own.requests, kib, own.useful].into_iter().chain(times).chain(ratios) {
            line.push_str(&format!(" {figure:>10}"));
        }
        line
    }
}
