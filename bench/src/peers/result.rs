//! Medians of the turns of a peer, and the table of all peers.

use super::peer::PeerName;
use crate::support::report::{median, median_of, ratio, rounded};
use serde::{Deserialize, Serialize};

/// Figures of a peer: of one turn, or medians of its turns.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PeerFigures {
    pub(super) gb_per_s: f64,
    /// User and system time of all threads of the process.
    pub(super) cpu_s_per_gb: f64,
    /// Latencies of batches; none of a turn that writes.
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// The most resident memory of the process, in MiB.
    pub(super) resident_mib: f64,
    /// Bytes that the process wrote to devices over bytes of blocks; none of a turn that reads.
    pub(super) write_amplification: Option<f64>,
    /// Bytes on disk over bytes of blocks; none of a turn that reads.
    pub(super) space: Option<f64>,
}

impl PeerFigures {
    /// Returns the median of each figure.
    fn medians(turns: &[Self]) -> Self {
        let any = |value: &dyn Fn(&Self) -> Option<f64>| {
            let values: Vec<f64> = turns.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| rounded(median(&values)))
        };
        Self {
            gb_per_s: rounded(median_of(turns, |turn| turn.gb_per_s)),
            cpu_s_per_gb: rounded(median_of(turns, |turn| turn.cpu_s_per_gb)),
            p50_us: any(&|turn| turn.p50_us),
            p99_us: any(&|turn| turn.p99_us),
            resident_mib: rounded(median_of(turns, |turn| turn.resident_mib)),
            write_amplification: any(&|turn| turn.write_amplification),
            space: any(&|turn| turn.space),
        }
    }
}

/// Medians of a peer's turns.
#[derive(Debug, Serialize)]
pub(super) struct PeerResult {
    pub(super) peer: String,
    /// `ingest` or `read`.
    pub(super) what: &'static str,
    pub(super) cores: usize,
    pub(super) block: u64,
    pub(super) batch: u32,
    #[serde(flatten)]
    pub(super) figures: PeerFigures,
    /// The engine's throughput over the peer's: the median of the ratios of each round.
    pub(super) ratio_engine: Option<f64>,
    /// The engine's CPU time over the peer's: the median of the ratios of each round.
    pub(super) ratio_engine_cpu: Option<f64>,
    /// The reason why it was not measured.
    pub(super) skipped: Option<String>,
}

/// The turns of a peer.
pub(super) struct PeerTurns {
    pub(super) peer: PeerName,
    pub(super) turns: Vec<PeerFigures>,
    pub(super) skipped: Option<String>,
}

/// What a table of results is about.
#[derive(Clone, Copy)]
pub(super) struct Measured {
    pub(super) what: &'static str,
    pub(super) cores: usize,
    pub(super) block: u64,
    pub(super) batch: u32,
}

/// Returns the medians of each peer, with the engine over it.
pub(super) fn results(peers: &[PeerTurns], measured: Measured) -> Vec<PeerResult> {
    let engine = peers.iter().find(|own| own.peer == PeerName::Stratakv);
    let result = |own: &PeerTurns| {
        let over = |value: &dyn Fn(&PeerFigures) -> f64| {
            let rounds = engine?.turns.iter().zip(&own.turns);
            let ratios: Vec<f64> = rounds.filter_map(|(engine, own)| ratio(value(engine), value(own))).collect();
            (!ratios.is_empty()).then(|| rounded(median(&ratios)))
        };
        PeerResult {
            peer: own.peer.text(),
            what: measured.what,
            cores: measured.cores,
            block: measured.block,
            batch: measured.batch,
            figures: PeerFigures::medians(&own.turns),
            ratio_engine: over(&|turn| turn.gb_per_s),
            ratio_engine_cpu: over(&|turn| turn.cpu_s_per_gb),
            skipped: own.skipped.clone(),
        }
    };
    peers.iter().map(result).collect()
}

/// Returns the table of some results.
pub(super) fn table(results: &[PeerResult]) -> String {
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    let columns = ["peer", "GB/s", "CPU s/GB", "p50 us", "p99 us", "RSS MiB", "written", "on disk", "engine over it"];
    let mut rows = vec![columns.map(str::to_owned)];
    for result in results {
        let mut row = [
            result.peer.clone(),
            result.figures.gb_per_s.to_string(),
            result.figures.cpu_s_per_gb.to_string(),
            number(result.figures.p50_us),
            number(result.figures.p99_us),
            result.figures.resident_mib.to_string(),
            number(result.figures.write_amplification),
            number(result.figures.space),
            number(result.ratio_engine),
        ];
        if let Some(why) = &result.skipped {
            row[1..].fill(String::new());
            row[1] = format!("skipped: {why}");
        }
        rows.push(row);
    }
    // A reason for skipping may be longer than its column.
    let measured = || rows.iter().filter(|row| !row[2].is_empty());
    let width = |column: usize| measured().map(|row| row[column].len()).max().unwrap_or_default();
    let widths: [usize; 9] = std::array::from_fn(|column| if column == 0 { longest(&rows) } else { width(column) });
    let line = |row: &[String; 9]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("  {}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Returns the length of the longest name.
fn longest(rows: &[[String; 9]]) -> usize {
    rows.iter().map(|row| row[0].len()).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(peer: PeerName, rates: &[f64]) -> PeerTurns {
        let turn = |rate: &f64| PeerFigures {
            gb_per_s: *rate,
            cpu_s_per_gb: 1.0 / rate,
            p50_us: Some(100.0),
            p99_us: None,
            resident_mib: 10.0,
            write_amplification: None,
            space: None,
        };
        PeerTurns { peer, turns: rates.iter().map(turn).collect(), skipped: None }
    }

    #[test]
    fn ratios_are_medians_of_rounds() {
        let peers = [turns(PeerName::Stratakv, &[2.0, 1.0, 3.0]), turns(PeerName::FilesDirect, &[1.0, 1.0, 1.0])];
        let found = results(&peers, Measured { what: "read", cores: 1, block: 65536, batch: 32 });
        assert_eq!((found[0].figures.gb_per_s, found[0].ratio_engine), (2.0, Some(1.0)));
        assert_eq!((found[1].ratio_engine, found[1].ratio_engine_cpu), (Some(2.0), Some(0.5)));
        assert!(table(&found).contains("files-direct  1     1         100"), "{}", table(&found));
    }
}
