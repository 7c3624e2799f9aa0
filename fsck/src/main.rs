//! The program `kvfsck`. The library holds everything, [`kvfsck::cli`] its command line.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    kvfsck::cli::run()
}
