//! Appends of a whole sequence, committed at a given pace.

use crate::support::interrupt::check_interrupt;
use crate::support::model::KvSource;
use anyhow::Result;
use std::time::Instant;
use stratakv::{Durability, Sequence};

/// Most tokens of one append.
pub(crate) const CHUNK: usize = 512;

/// The number of commits, and the seconds that they took together.
pub(crate) struct CommitTotals {
    pub(crate) commits: u64,
    pub(crate) seconds: f64,
}

/// Appends `tokens` tokens with their ids, and commits after every `per` of them. If `per` is 0, it commits once at the
/// end. `source` gives at least [`CHUNK`] tokens at once.
///
/// # Errors
/// The engine refuses an append or a commit, or the run was interrupted.
pub(crate) fn append_at_pace(
    sequence: &mut Sequence,
    source: &mut KvSource,
    tokens: u32,
    per: u32,
) -> Result<CommitTotals> {
    let layers = sequence.layout().layers();
    let step = if per == 0 { CHUNK } else { (per as usize).min(CHUNK) };
    let (mut left, mut since_commit) = (tokens as usize, 0);
    let mut totals = CommitTotals { commits: 0, seconds: 0.0 };
    while left > 0 {
        check_interrupt()?;
        let now = step.min(left).min(if per == 0 { usize::MAX } else { per as usize - since_commit });
        source.append_step(sequence, layers, now)?;
        let first = sequence.token_ids().len() as u32;
        sequence.append_token_ids(&(first..first + now as u32).collect::<Vec<_>>())?;
        left -= now;
        since_commit += now;
        if left == 0 || since_commit == per as usize {
            let start = Instant::now();
            sequence.commit(Durability::Sync)?;
            totals.seconds += start.elapsed().as_secs_f64();
            totals.commits += 1;
            since_commit = 0;
        }
        if totals.commits.is_multiple_of(4096) && totals.commits > 0 && since_commit == 0 {
            eprintln!("kvbench: {} of {tokens} tokens", tokens as usize - left);
        }
    }
    Ok(totals)
}
