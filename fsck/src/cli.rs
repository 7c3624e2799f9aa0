//! The command line.

use crate::{CheckError, Options, Progress, check, check_export};
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  kvfsck check /nvme0/kv                  a store on one device
  kvfsck check /nvme0/kv /nvme1/kv        a store on two devices: name all of them
  kvfsck check --json /nvme0/kv | jq .    for programs
  kvfsck check-export session.skv         an exported sequence, before it is imported or kept

Exit codes: 0 clean, 1 damage, 2 usage or not a store, 4 unsupported version or feature,
            5 I/O error, 6 in use by a writer. 4 and 5 win over 1.";

/// Checks stratakv stores. It reads only.
#[derive(Debug, Parser)]
#[command(name = "kvfsck", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Reads every live byte of a store: superblocks, manifest, frame headers, payload checksums, padding, and whether
    /// they fit together
    #[command(after_help = EXAMPLES)]
    Check(CheckArgs),
    /// Reads an exported sequence from front to back: every piece against its checksum and its place, and summaries
    /// against keys. Reads only; needs no store
    #[command(after_help = EXPORT_EXAMPLES)]
    CheckExport(ExportArgs),
}

const EXPORT_EXAMPLES: &str = "\
Examples:
  kvfsck check-export session.skv
  kvfsck check-export --json session.skv | jq .export.tokens

Exit codes: 0 whole and right, 1 damage or cut short, 2 no such file, 4 unsupported version, 5 I/O error.";

#[derive(Debug, Args)]
struct ExportArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object: {"clean", "findings", "export", "exit_code"}
    #[arg(long)]
    json: bool,
    /// Print the key of the sequence (keys are private data)
    #[arg(long)]
    show_keys: bool,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// All device directories of the store
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Print one JSON object: {"clean", "findings", "checked", ...}
    #[arg(long)]
    json: bool,
    /// Name the keys of sequences in findings (keys are private data)
    #[arg(long)]
    show_keys: bool,
    /// Findings printed at most
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    max_findings: usize,
}

struct Bar(ProgressBar);

impl Progress for Bar {
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
            let options = Options { show_keys: args.show_keys, findings_max: args.max_findings, ..Options::default() };
            let result = with_bar(args.json, |bar| check(&args.directories, &options, bar));
            print(args.json, result, |report| (report.to_text(), report.exit_code))
        }
        Command::CheckExport(args) => {
            let options = Options { show_keys: args.show_keys, ..Options::default() };
            let result = with_bar(args.json, |bar| check_export(&args.file, &options, bar));
            print(args.json, result, |report| (report.to_text(), report.exit_code))
        }
    };
    // A closed pipe is no reason to fail: the exit code says it all.
    let _ = stdout().write_all(text.as_bytes());
    ExitCode::from(code)
}

fn with_bar<T>(hidden: bool, run: impl FnOnce(&Bar) -> T) -> T {
    let target =
        if hidden || !stderr().is_terminal() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}") {
        bar.set_style(style);
    }
    let bar = Bar(bar);
    let result = run(&bar);
    bar.0.finish_and_clear();
    result
}

/// What goes to standard output, and the exit code.
fn print<T: serde::Serialize>(
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
