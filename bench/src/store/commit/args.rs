//! Arguments of `kvbench commit`, and the geometry of its sequences.

use crate::support::args::{CommonArgs, between};
use crate::support::model::TOKEN_LAYER_BYTES;
use clap::Args;

/// Layers of a sequence.
pub(super) const LAYERS: u16 = 32;
/// Tokens of a group.
pub(super) const GROUP: u16 = 8;

/// Arguments of `kvbench commit`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench commit --device /nvme0 --commits 200 --json")]
pub(crate) struct CommitArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Commits to measure.
    #[arg(long, default_value_t = 200, value_parser = between(1, 100_000))]
    pub(crate) commits: u32,
    /// Tokens of a step.
    #[arg(long, default_value_t = 8, value_parser = between(1, 512))]
    pub(crate) step: u32,
    /// Also measure this many sequences that commit at the same time, each on its own thread; 1 leaves it out.
    #[arg(long, default_value_t = 1, value_parser = between(1, 256))]
    pub(crate) sequences: u32,
}

impl CommitArgs {
    /// Returns the bytes that all commits of one sequence write at most.
    ///
    /// Tokens are written alone first and then in their group, with summaries and headers.
    pub(super) fn written_bytes(&self) -> u64 {
        let step_bytes = u64::from(self.step) * TOKEN_LAYER_BYTES * u64::from(LAYERS);
        u64::from(self.commits) * (3 * step_bytes + (64 << 10))
    }
}
