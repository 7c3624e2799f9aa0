//! Appends of a whole sequence, committed at a given pace.

use crate::store::result::SequenceSetup;
use crate::support::args::between_u16;
use crate::support::interrupt::check_interrupt;
use crate::support::model::{KvSource, TOKEN_LAYER_BYTES, layout};
use anyhow::Result;
use clap::Args;
use std::time::Instant;
use stratakv::{CreateOptions, Durability, Sequence, Store, StoredSummary};

/// Most tokens of one append.
pub(crate) const CHUNK: usize = 512;

/// The shape of the sequence that is appended to.
#[derive(Args, Debug)]
pub(crate) struct SequenceShape {
    /// Layers, of 4 KiB per token each.
    #[arg(long, default_value_t = 32, value_parser = between_u16(1, 128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 128))]
    pub(crate) group: u16,
}

impl SequenceShape {
    /// Creates an empty sequence of this shape, with min/max summaries if `min_max` is true.
    ///
    /// # Errors
    /// The store refuses it.
    pub(crate) fn create(&self, store: &Store, key: &str, min_max: bool) -> Result<Sequence> {
        let options = CreateOptions::new().key(key);
        let options = if min_max { options.store_summary(StoredSummary::MinMax) } else { options };
        Ok(store.create_sequence(&layout(self.layers, self.group)?, options)?)
    }

    /// Returns the bytes of the keys and values of this many tokens.
    pub(crate) fn kv_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * TOKEN_LAYER_BYTES * u64::from(self.layers)
    }

    /// Returns the part of a result that says what was written.
    pub(crate) fn setup(&self, tokens: u32, per: u32) -> SequenceSetup {
        SequenceSetup { per, tokens, layers: self.layers, group: self.group }
    }
}

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
