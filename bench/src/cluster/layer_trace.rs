//! [`LayerTrace`]: the keys of one layer, and the entries that recorded queries activated.

use anyhow::{Result, bail};
use stratakv::retrieval::clusters::CoActivation;

/// One layer: its keys, and which entries each recorded query activated.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LayerTrace {
    /// Where the layer comes from, for results.
    pub(super) name: String,
    pub(super) entries: usize,
    pub(super) dim: usize,
    /// The keys `[entries, dim]` of each KV head.
    pub(super) heads: Vec<Vec<f32>>,
    /// The activated entries of each query, in rising order.
    pub(super) activated: Vec<Vec<u32>>,
}

impl LayerTrace {
    /// Returns the co-activation of the recorded queries.
    ///
    /// # Errors
    /// There are no queries, or more than a profile has.
    pub(super) fn co_activation(&self) -> Result<CoActivation> {
        if self.activated.is_empty() {
            bail!("{}: no query was recorded", self.name);
        }
        let mut profile = CoActivation::new(self.entries, self.activated.len())?;
        self.activated.iter().try_for_each(|activated| profile.record(activated))?;
        Ok(profile)
    }

    /// Returns the mean number of entries that a query activates.
    pub(super) fn activated_per_query(&self) -> f64 {
        let activated: usize = self.activated.iter().map(Vec::len).sum();
        activated as f64 / self.activated.len().max(1) as f64
    }

    /// Returns the keys of all heads joined, `[entries, heads * dim]`.
    pub(super) fn joined_keys(&self) -> Vec<f32> {
        let mut joined = Vec::with_capacity(self.entries * self.heads.len() * self.dim);
        for entry in 0..self.entries {
            self.heads.iter().for_each(|keys| joined.extend_from_slice(&keys[entry * self.dim..][..self.dim]));
        }
        joined
    }
}
