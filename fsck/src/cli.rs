//! The command line.

use crate::{Options, Progress, check};
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
    let Command::Check(args) = Cli::parse().command;
    let target =
        if args.json || !stderr().is_terminal() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}") {
        bar.set_style(style);
    }
    let options = Options { show_keys: args.show_keys, findings_max: args.max_findings, ..Options::default() };
    let bar = Bar(bar);
    let result = check(&args.directories, &options, &bar);
    bar.0.finish_and_clear();
    let (text, code) = match &result {
        Ok(report) if args.json => (json(report), report.exit_code),
        Ok(report) => (report.to_text(), report.exit_code),
        Err(error) => {
            let _ = writeln!(stderr(), "kvfsck: {error}");
            let object = serde_json::json!({
                "clean": false,
                "findings": [],
                "checked": {},
                "exit_code": error.exit_code(),
                "error": { "code": error.code(), "message": error.to_string() },
            });
            (if args.json { json(&object) } else { String::new() }, error.exit_code())
        }
    };
    // A closed pipe is no reason to fail: the exit code says it all.
    let _ = stdout().write_all(text.as_bytes());
    ExitCode::from(code)
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).map_or_else(|e| format!("{{\"error\":\"{e}\"}}\n"), |text| text + "\n")
}
