//! The command line of kvfsck: arguments, progress bar, output and exit code.

use crate::check::check;
use crate::error::CheckError;
use crate::export::check_export;
use crate::options::Options;
use crate::report::Progress;
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  kvfsck check /nvme0/kv                  Check a store on one device
  kvfsck check /nvme0/kv /nvme1/kv        Check a store on two devices; name all of them
  kvfsck check --json /nvme0/kv | jq .    Print the report for programs
  kvfsck map /nvme0/kv                    List pools and the clusters that they store
  kvfsck stats /nvme0/kv                  Sum up sequences, bytes and clusters
  kvfsck check-export session.skv         Check an exported sequence before you import or keep it

Exit codes:
  0  clean: no damage (notes are possible)
  1  damage
  2  wrong arguments, or the directory is not a device of a store
  4  a version or feature that this kvfsck does not know (takes precedence over 1 and 5)
  5  an I/O error (takes precedence over 1)
  6  a writer has the store open";

const MAP_EXAMPLES: &str = "\
Examples:
  kvfsck map /nvme0/kv /nvme1/kv
  kvfsck map --json /nvme0/kv | jq '.pools.frames[] | select(.dead_pages > .named_pages)'

Pages of a frame:
  named  a directory in force names the page
  dead   it was written with the frame, and no directory in force names it
  free   it was not written with the frame, and no directory in force names it";

const STATS_EXAMPLES: &str = "\
Examples:
  kvfsck stats /nvme0/kv /nvme1/kv
  kvfsck stats --json /nvme0/kv | jq .stats.clusters
  kvfsck stats --json /nvme0/kv | jq '.stats.devices[] | {device, dead_bytes, free_bytes}'

Exit codes:
  0  no damage in what was read; only `kvfsck check` reads keys and values
  1  damage
  2  wrong arguments, or the directory is not a device of a store
  4  a version or feature that this kvfsck does not know (takes precedence over 1 and 5)
  5  an I/O error (takes precedence over 1)
  6  a writer has the store open";

const EXPORT_EXAMPLES: &str = "\
Examples:
  kvfsck check-export session.skv
  kvfsck check-export --json session.skv | jq .export.tokens

Exit codes:
  0  clean: the file is complete and correct
  1  damage, or the file is cut short
  2  wrong arguments, or no such file
  4  a version or feature that this kvfsck does not know
  5  an I/O error";

/// Checks stratakv stores and exported sequences. It never writes.
#[derive(Debug, Parser)]
#[command(name = "kvfsck", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Checks a store: reads every live byte and compares it with its checksum and with the manifest
    ///
    /// The check covers superblocks, all copies of the manifest, segment and frame headers, payload, padding, and that
    /// every committed token is stored. It never writes. The store must be closed, or open for reading only.
    #[command(after_help = EXAMPLES)]
    Check(CheckArgs),
    /// Lists segments and frames for pools, and the clusters that they store
    ///
    /// The list has bytes and live shares of segments, and named, dead and free pages and the runs of each frame. Of
    /// each directory of clusters it has method, covered tokens and pages. `map` checks the store first, and has the
    /// exit codes of `check`.
    #[command(after_help = MAP_EXAMPLES)]
    Map(MapArgs),
    /// Sums up a store: sequences, bytes on each device by what they hold, and clusters
    ///
    /// `stats` reads the manifest, headers and directories of clusters, but no keys and values. It is quick, and finds
    /// damage of what it reads. Its exit codes are those of `check`.
    #[command(after_help = STATS_EXAMPLES)]
    Stats(StatsArgs),
    /// Checks the file of an exported sequence; needs no store
    ///
    /// The check reads the file from front to back. It compares every piece with its checksum and its place, and every
    /// summary with the keys.
    #[command(after_help = EXPORT_EXAMPLES)]
    CheckExport(ExportArgs),
}

#[derive(Debug, Args)]
struct ExportArgs {
    /// The exported file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object: {"clean", "findings", "export", "exit_code"}
    #[arg(long)]
    json: bool,
    /// Print the key of the sequence; keys are private data
    #[arg(long)]
    show_keys: bool,
}

#[derive(Debug, Args)]
struct MapArgs {
    /// The device directories of the store, all of them, in any order
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Print one JSON object, as `check` does; the field `pools` has the list
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct StatsArgs {
    /// The device directories of the store, all of them, in any order
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Print one JSON object, as `check` does; the field `stats` has the sums
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// The device directories of the store, all of them, in any order
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Print one JSON object: {"clean", "findings", "checked", ...}
    #[arg(long)]
    json: bool,
    /// Print the keys of sequences in findings; keys are private data
    #[arg(long)]
    show_keys: bool,
    /// Compare summaries and entries of clusters with the keys of their groups; takes longer
    #[arg(long)]
    full: bool,
    /// Print at most this many findings, and count the others
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    max_findings: usize,
}

/// A progress bar on the terminal.
struct TerminalBar(ProgressBar);

impl Progress for TerminalBar {
    fn start(&self, bytes: u64) {
        self.0.set_length(bytes);
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

/// Runs the program with the arguments of the process.
#[must_use]
pub fn run() -> ExitCode {
    let (text, code) = match Cli::parse().command {
        Command::Check(args) => {
            let (show_keys, full, findings_max) = (args.show_keys, args.full, args.max_findings);
            let options = Options { show_keys, findings_max, full, ..Options::default() };
            let result = with_bar(args.json, |bar| check(&args.directories, &options, bar));
            output(args.json, result, |report| (report.to_text(), report.exit_code))
        }
        Command::Map(args) => {
            let result = with_bar(args.json, |bar| check(&args.directories, &Options::default(), bar));
            output(args.json, result, |report| (report.pools.to_text() + &report.to_text(), report.exit_code))
        }
        Command::Stats(args) => {
            let options = Options { headers_only: true, ..Options::default() };
            let result = with_bar(args.json, |bar| check(&args.directories, &options, bar));
            output(args.json, result, |report| (report.stats.to_text() + &report.to_text(), report.exit_code))
        }
        Command::CheckExport(args) => {
            let options = Options { show_keys: args.show_keys, ..Options::default() };
            let result = with_bar(args.json, |bar| check_export(&args.file, &options, bar));
            output(args.json, result, |report| (report.to_text(), report.exit_code))
        }
    };
    // A closed pipe is ignored, because the exit code carries the result.
    let _ = stdout().write_all(text.as_bytes());
    ExitCode::from(code)
}

fn with_bar<T>(hidden: bool, run: impl FnOnce(&TerminalBar) -> T) -> T {
    let target =
        if hidden || !stderr().is_terminal() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}") {
        bar.set_style(style);
    }
    let bar = TerminalBar(bar);
    let result = run(&bar);
    bar.0.finish_and_clear();
    result
}

/// Returns the text for standard output and the exit code. An error in words goes to standard error.
fn output<T: serde::Serialize>(
    as_json: bool,
    result: Result<T, CheckError>,
    text: impl Fn(&T) -> (String, u8),
) -> (String, u8) {
    match result {
        Ok(report) => {
            let (text, code) = text(&report);
            (if as_json { json(&report) } else { text }, code)
        }
        Err(error) => {
            let _ = writeln!(stderr(), "kvfsck: {error}");
            let object = serde_json::json!({
                "clean": false,
                "findings": [],
                "checked": {},
                "exit_code": error.exit_code(),
                "error": { "code": error.code(), "message": error.to_string() },
            });
            (if as_json { json(&object) } else { String::new() }, error.exit_code())
        }
    }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).map_or_else(|e| format!("{{\"error\":\"{e}\"}}\n"), |text| text + "\n")
}
