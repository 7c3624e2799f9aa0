//! `kvrun`: recall measurements and text generation with a KV cache in a stratakv store.

mod commands;

use std::process::ExitCode;

use clap::Parser;
use stratakv_llama::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // This thread is one of the pool, so that it computes its part of a product instead of waiting for others. The call
    // fails only if a pool exists already, and none does before the first command. Without a number, it is that of the
    // processors.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(cli.threads.map_or(0, |threads| threads as usize));
    let _ = pool.use_current_thread().build_global();
    let result = match cli.command {
        Command::Recall(args) => commands::recall(&args),
        Command::Calibrate(args) => commands::calibrate(&args),
        Command::Compare(args) => commands::compare(&args),
        Command::Profile(args) => commands::profile(&args),
        Command::Cluster(args) => commands::cluster(&args),
        Command::Generate(args) => commands::generate(&args),
        Command::Chat(args) => commands::chat(&args),
        Command::Convert(args) => commands::convert(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvrun: {error:#}");
            ExitCode::FAILURE
        }
    }
}
