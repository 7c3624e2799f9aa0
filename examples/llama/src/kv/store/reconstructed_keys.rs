//! Keys that are reconstructed from low-rank keys, so that selections read only values.

use anyhow::Result;
use stratakv::Sequence;
use stratakv::retrieval::ReconstructOptions;

use crate::kv::error::engine_error;

/// Tokens after which keys are reconstructed again: half of the tokens whose keys stay exact.
const RECONSTRUCT_TOKENS: u64 = 512;

/// Reconstructed keys of a sequence.
pub(super) struct ReconstructedKeys {
    rank: usize,
    /// The tokens of the sequence when its keys were last reconstructed, or `None` before the first time.
    tokens: Option<u64>,
}

impl ReconstructedKeys {
    /// Returns keys that will be reconstructed from low-rank keys of this rank.
    pub(super) fn new(rank: usize) -> Self {
        Self { rank, tokens: None }
    }

    /// Returns whether keys have been reconstructed.
    pub(super) fn are_there(&self) -> bool {
        self.tokens.is_some()
    }

    /// Reconstructs keys if enough tokens were added since the last time, or if the sequence was truncated.
    ///
    /// # Errors
    /// Fails as [`Sequence::reconstruct_keys`] does.
    pub(super) fn renew(&mut self, sequence: &mut Sequence) -> Result<()> {
        let tokens = sequence.len();
        if self.tokens.is_none_or(|last| tokens >= last + RECONSTRUCT_TOKENS || tokens < last) {
            let options = ReconstructOptions::default().rank(self.rank);
            sequence.reconstruct_keys(&options).map_err(engine_error)?;
            self.tokens = Some(tokens);
        }
        Ok(())
    }
}
