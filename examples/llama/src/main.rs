//! `kvrun`: recall measurements and text generation with a KV cache in a stratakv store.

mod commands;

use std::process::ExitCode;

use clap::Parser;
use stratakv_llama::cli::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Recall(args) => commands::recall(&args),
        Command::Calibrate(args) => commands::calibrate(&args),
        Command::Compare(args) => commands::compare(&args),
        Command::Profile(args) => commands::profile(&args),
        Command::Cluster(args) => commands::cluster(&args),
        Command::Generate(args) => commands::generate(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvrun: {error:#}");
            ExitCode::FAILURE
        }
    }
}
