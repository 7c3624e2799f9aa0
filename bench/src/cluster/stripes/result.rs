//! The figures of steps that were read from several devices, and their results.

use crate::devices::DeviceLimits;
use crate::support::report::{median, rounded};
use serde::Serialize;

/// Sums over the steps of one side.
#[derive(Debug)]
pub(super) struct StripeFigures {
    limits: DeviceLimits,
    devices: usize,
    steps: usize,
    entries: usize,
    requests: u64,
    /// Batches of all devices.
    batches: u64,
    bytes: u64,
    /// The bytes of the busiest device over the mean, summed over steps.
    skew: f64,
    /// What the busiest device needs at the limits, summed over steps.
    bound_us: f64,
    select_us: f64,
    /// The time of the reads of each round.
    io_us: Vec<f64>,
}

impl StripeFigures {
    pub(super) fn new(limits: DeviceLimits, devices: usize) -> Self {
        Self {
            limits,
            devices,
            steps: 0,
            entries: 0,
            requests: 0,
            batches: 0,
            bytes: 0,
            skew: 0.0,
            bound_us: 0.0,
            select_us: 0.0,
            io_us: Vec::new(),
        }
    }

    /// Adds a step of a round: its entries, the times of selecting and reading, and requests, bytes and batches by
    /// device.
    pub(super) fn add(&mut self, (round, entries): (usize, usize), (select_us, io_us): (f64, f64), each: &[[u64; 3]]) {
        let [requests, bytes, batches] = std::array::from_fn(|at| each.iter().map(|own| own[at]).sum::<u64>());
        let busiest = each.iter().map(|own| own[1]).max().unwrap_or(0);
        let needs = |[requests, bytes, _]: &[u64; 3]| {
            let by = |count: u64, limit: Option<u64>| limit.map_or(0.0, |limit| count as f64 / limit as f64);
            by(*requests, self.limits.read_iops).max(by(*bytes, self.limits.read_bps)) * 1e6
        };
        self.bound_us += each.iter().map(needs).fold(0.0, f64::max);
        self.skew += busiest as f64 * self.devices as f64 / bytes.max(1) as f64;
        self.steps += 1;
        self.entries += entries;
        self.requests += requests;
        self.batches += batches;
        self.bytes += bytes;
        self.select_us += select_us;
        if self.io_us.len() <= round {
            self.io_us.resize(round + 1, 0.0);
        }
        self.io_us[round] += io_us;
    }

    /// Returns the time of the reads of a step: the median over rounds of the mean over steps.
    pub(super) fn io_us(&self) -> f64 {
        median(&self.io_us) * self.io_us.len() as f64 / self.steps.max(1) as f64
    }

    /// Returns the bytes of a step.
    pub(super) fn bytes(&self) -> f64 {
        self.bytes as f64 / self.steps.max(1) as f64
    }

    /// Returns the result of the side `name`.
    pub(super) fn result(&self, name: &str) -> StripeResult {
        let each = |sum: f64| rounded(sum / self.steps.max(1) as f64);
        let limited = self.limits != DeviceLimits::NONE;
        StripeResult {
            side: name.to_owned(),
            devices: self.devices,
            steps: self.steps,
            entries: each(self.entries as f64),
            requests: each(self.requests as f64),
            batches: each(self.batches as f64),
            bytes: each(self.bytes as f64),
            busiest_over_mean: each(self.skew),
            select_us: each(self.select_us),
            io_us: rounded(self.io_us()),
            mb_per_s: rounded(self.bytes() / self.io_us().max(1e-9)),
            bound_us: limited.then(|| each(self.bound_us)),
            io_over_bound: limited.then(|| rounded(self.io_us() * self.steps as f64 / self.bound_us.max(1e-9))),
        }
    }
}

/// The figures of one side, each per step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct StripeResult {
    pub(super) side: String,
    pub(super) devices: usize,
    steps: usize,
    entries: f64,
    requests: f64,
    /// Submissions, at most one per device.
    batches: f64,
    bytes: f64,
    /// Bytes of the busiest device over the mean of the devices.
    busiest_over_mean: f64,
    select_us: f64,
    io_us: f64,
    mb_per_s: f64,
    /// The time that the busiest device needs at its limits; none without limits.
    bound_us: Option<f64>,
    io_over_bound: Option<f64>,
}

/// A side beside the one that it is compared with.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ComparedSide<'a> {
    #[serde(flatten)]
    pub(super) own: StripeResult,
    /// The side that it is compared with.
    pub(super) of: &'a str,
    /// Time of the reads of this side over that of the other.
    pub(super) io_ratio: f64,
    pub(super) bytes_ratio: f64,
}

impl<'a> ComparedSide<'a> {
    pub(super) fn new(name: &str, own: &StripeFigures, (of, other): (&'a str, &StripeFigures)) -> Self {
        let (io_ratio, bytes_ratio) = (own.io_us() / other.io_us(), own.bytes() / other.bytes());
        Self { own: own.result(name), of, io_ratio: rounded(io_ratio), bytes_ratio: rounded(bytes_ratio) }
    }
}
