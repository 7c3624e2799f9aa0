//! `kvfsck`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    kvfsck::cli::run()
}
