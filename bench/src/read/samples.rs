//! Turns of all sides of `kvbench read`, and the result that they give.

use crate::read::args::ReadArgs;
use crate::read::baseline::{BareTurn, tail};
use crate::read::batches::{BatchPattern, EngineTurn, throughput};
use crate::read::result::{
    BareComparison, CheckedBareComparison, ChecksumCost, EngineRates, FioReadComparison, ReadResult, ReadSetup,
    StoreFacts, TouchedBareComparison,
};
use crate::support::fio::{self, FioRun};
use crate::support::report::{median, median_of, median_of_any, percentile, ratio, rounded};

/// The turns of every side, one of each per round. Sides that were not requested stay empty.
#[derive(Default)]
pub(crate) struct ReadSamples {
    pub(crate) engine: Vec<EngineTurn>,
    pub(crate) bare: Vec<BareTurn>,
    /// The bare loop that reads every byte in memory.
    pub(crate) bare_touched: Vec<BareTurn>,
    /// The bare loop with checksums.
    pub(crate) bare_checked: Vec<BareTurn>,
    pub(crate) fio: Vec<FioRun>,
    /// fio with its queue kept full.
    pub(crate) fio_full: Vec<FioRun>,
    /// CPU seconds per GB of checksums over cached buffers.
    pub(crate) checksum: Vec<f64>,
    /// CPU seconds per GB of checksums over buffers that are not cached.
    pub(crate) checksum_cold: Vec<f64>,
}

/// Medians of the engine that the other sides are compared with.
struct EngineMedians {
    gb_per_s: f64,
    p99_us: f64,
    cpu: f64,
    /// CPU less the checksums over cached buffers.
    io_cpu: f64,
    /// CPU less the checksums over buffers that are not cached.
    io_cpu_cold: f64,
}

impl ReadSamples {
    /// Returns the medians of all turns, and their ratios.
    pub(crate) fn result(&self, args: &ReadArgs, block: u64, pattern: BatchPattern, store: StoreFacts) -> ReadResult {
        let (checksum, checksum_cold) = (median(&self.checksum), median(&self.checksum_cold));
        let cpu = median_of(&self.engine, |turn| turn.cpu_s_per_gb);
        let engine = EngineMedians {
            gb_per_s: median_of(&self.engine, |turn| turn.gb_per_s),
            p99_us: median_of(&self.engine, |turn| percentile(&turn.latencies_us, 0.99)),
            cpu,
            io_cpu: (cpu - checksum).max(0.0),
            io_cpu_cold: (cpu - checksum_cold).max(0.0),
        };
        ReadResult {
            setup: ReadSetup { block, batch: pattern.batch, in_flight: pattern.in_flight, path: pattern.path() },
            engine: EngineRates {
                throughput: throughput(&self.engine, block),
                tail: rounded(median_of(&self.engine, |turn| tail(&turn.latencies_us))),
                cpu_s_per_gb: rounded(cpu),
            },
            checksum: ChecksumCost {
                checksum_cpu_s_per_gb: rounded(checksum),
                checksum_cold_cpu_s_per_gb: rounded(checksum_cold),
                io_cpu_s_per_gb: rounded(engine.io_cpu),
                io_cold_cpu_s_per_gb: rounded(engine.io_cpu_cold),
            },
            bare: self.bare(&engine),
            bare_touched: self.bare_touched(&engine),
            bare_checked: self.bare_checked(&engine),
            fio: self.fio(&engine, args.fio),
            store,
            requests_per_batch: rounded(median_of(&self.engine, |turn| turn.requests_per_batch)),
            system_calls_per_batch: rounded(median_of(&self.engine, |turn| turn.system_calls_per_batch)),
        }
    }

    fn bare(&self, engine: &EngineMedians) -> BareComparison {
        let gb_per_s = median_of_any(&self.bare, |turn| turn.gb_per_s);
        let cpu = median_of_any(&self.bare, |turn| turn.cpu_s_per_gb);
        BareComparison {
            bare_gb_per_s: gb_per_s.map(rounded),
            bare_cpu_s_per_gb: cpu.map(rounded),
            bare_tail: median_of_any(&self.bare, |turn| tail(&turn.latencies_us)).map(rounded),
            bare_p99_us: p99(&self.bare).map(rounded),
            ratio_bare_p99: p99(&self.bare).and_then(|bare| ratio(engine.p99_us, bare)),
            ratio_bare: gb_per_s.and_then(|bare| ratio(engine.gb_per_s, bare)),
            ratio_bare_cpu: cpu.and_then(|bare| ratio(engine.io_cpu, bare)),
            ratio_bare_cpu_cold: cpu.and_then(|bare| ratio(engine.io_cpu_cold, bare)),
        }
    }

    fn bare_touched(&self, engine: &EngineMedians) -> TouchedBareComparison {
        let gb_per_s = median_of_any(&self.bare_touched, |turn| turn.gb_per_s);
        TouchedBareComparison {
            bare_touched_gb_per_s: gb_per_s.map(rounded),
            bare_touched_cpu_s_per_gb: median_of_any(&self.bare_touched, |turn| turn.cpu_s_per_gb).map(rounded),
            ratio_bare_touched: gb_per_s.and_then(|touched| ratio(engine.gb_per_s, touched)),
        }
    }

    fn bare_checked(&self, engine: &EngineMedians) -> CheckedBareComparison {
        let gb_per_s = median_of_any(&self.bare_checked, |turn| turn.gb_per_s);
        let cpu = median_of_any(&self.bare_checked, |turn| turn.cpu_s_per_gb);
        let both = median_of_any(&self.bare, |turn| turn.cpu_s_per_gb).zip(cpu);
        let allowed = both.map(|(bare, checked)| 1.25 * bare + 1.1 * (checked - bare).max(0.0));
        CheckedBareComparison {
            bare_checked_gb_per_s: gb_per_s.map(rounded),
            bare_checked_cpu_s_per_gb: cpu.map(rounded),
            ratio_bare_checked: gb_per_s.and_then(|checked| ratio(engine.gb_per_s, checked)),
            ratio_bare_checked_cpu: cpu.and_then(|checked| ratio(engine.cpu, checked)),
            ratio_cpu_allowed: allowed.and_then(|allowed| ratio(engine.cpu, allowed)),
        }
    }

    fn fio(&self, engine: &EngineMedians, requested: bool) -> FioReadComparison {
        let gb_per_s = median_of_any(&self.fio, |run| run.gb_per_s);
        let full_gb_per_s = median_of_any(&self.fio_full, |run| run.gb_per_s);
        FioReadComparison {
            fio_gb_per_s: gb_per_s.map(rounded),
            fio_cpu_s_per_gb: median_of_any(&self.fio, |run| run.cpu_s_per_gb).map(rounded),
            ratio_fio: gb_per_s.and_then(|fio| ratio(engine.gb_per_s, fio)),
            fio_full_gb_per_s: full_gb_per_s.map(rounded),
            ratio_fio_full: full_gb_per_s.and_then(|fio| ratio(engine.gb_per_s, fio)),
            fio_pages: self.fio.first().map(|run| run.memory),
            fio_skipped: (requested && self.fio.is_empty()).then_some(fio::MISSING),
        }
    }
}

/// Returns the median of the turns' p99, and none if there are none.
fn p99(turns: &[BareTurn]) -> Option<f64> {
    median_of_any(turns, |turn| percentile(&turn.latencies_us, 0.99))
}
