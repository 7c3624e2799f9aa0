//! `kvbench`: measures the engine through its public API, beside what the machine itself can do in the same run.
//!
//! Figures are medians over rounds in which the engine and what it is compared with take turns, so that a noisy machine
//! disturbs both alike: trust the ratios.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "unsafe lives here: a ring and its buffers without the engine around them")]
mod bare;
mod churn;
mod cli;
mod codec;
mod commit;
mod decode;
mod decode_select;
mod decode_theta;
mod decode_trace;
mod devices;
mod drivers;
mod fio;
mod ingest;
mod open;
mod read;
mod report;
mod resident;
mod scale;
mod select;
mod selectors;
mod start;
mod threads;
mod work;
mod written;

use clap::Parser;
use cli::{Cli, Command};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = work::install_interrupt().and_then(|()| match &cli.command {
        Command::Read(args) => read::run(args),
        Command::Drivers(args) => drivers::run(args),
        Command::Ingest(args) => ingest::run(args),
        Command::Commit(args) => commit::run(args),
        Command::Churn(args) => churn::run(args),
        Command::Written(args) => written::run(args),
        Command::Open(args) => open::run(args),
        Command::Start(args) => start::run(args),
        Command::Select(args) => select::run(args),
        Command::Scale(args) => scale::run(args),
        Command::Decode(args) => decode::run(args),
        Command::Resident(args) => resident::run(args),
        Command::Codec(args) => codec::run(args),
        Command::Devices(command) => devices::run(command),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("kvbench: {e:#}");
            if work::interrupted() { ExitCode::from(130) } else { ExitCode::FAILURE }
        }
    }
}
