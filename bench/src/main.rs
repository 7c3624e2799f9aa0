//! `kvbench` measures the engine through its public API, and in the same run what the machine can do without it.
//!
//! Figures are medians over rounds. In each round the engine and what it is compared with are measured one after the
//! other, so that noise of the machine affects both. The ratios are therefore more reliable than the absolute figures.
//!
//! Each folder is an area of measurement and owns its arguments and results. `support` holds what they share.
#![deny(unsafe_code)]

mod cli;
mod cluster;
mod codec;
mod decode;
mod devices;
mod ingest;
mod peers;
mod read;
mod select;
mod store;
mod support;

use clap::Parser;
use cli::Cli;
use std::process::ExitCode;
use support::interrupt::{install_interrupt, interrupted};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match install_interrupt().and_then(|()| cli.command.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("kvbench: {e:#}");
            if interrupted() { ExitCode::from(130) } else { ExitCode::FAILURE }
        }
    }
}
