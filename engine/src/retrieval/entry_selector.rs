//! Selectors of entries: methods that choose tokens of their own for each KV head, instead of groups.
//!
//! An entry is the key and the value of one token for one KV head. A selector of entries is a [`Selector`] that returns
//! itself from [`Selector::entries`]. How a selection uses it:
//! 1. [`EntrySelector::covered_groups`] says which groups the method knows. Later groups and the tail are the window,
//!    which every head attends to.
//! 2. The engine takes the window, sinks and the tail off the budget.
//! 3. [`EntrySelector::choose`] spends the rest, which is a number of entries per KV head. Its memory is reserved
//!    first.
//! 4. The engine turns the entries into masks of groups. A block is read once, however many heads need it.
//!
//! [`Selector`]: super::Selector
//! [`Selector::entries`]: super::Selector::entries

use crate::error::Result;
use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::summary::LayerSummary;
use std::ops::Range;

/// The request to choose entries for one query.
#[derive(Clone, Debug)]
pub struct EntryRequest<'a> {
    /// The query `[q_heads, key_dim]`, finite. `q_heads` is a multiple of the KV heads.
    pub query: &'a [f32],
    /// The shape of the keys.
    pub shape: KeyShape,
    /// The factor of `q . k` in the softmax.
    pub scale: f32,
    /// The aggregation of query heads.
    pub aggregation: HeadAggregation,
    /// The tokens that may be chosen. Tokens outside of them are attended anyway, or not visible.
    pub tokens: Range<usize>,
    /// The most entries that may be chosen for each KV head.
    pub budget: usize,
}

/// The entries that a method chose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChosenEntries {
    /// The tokens of each KV head, in any order; or one list, which counts for all heads. Each token once.
    pub heads: Vec<Vec<u32>>,
    /// The number of runs of neighbours among the chosen clusters, in the method's own order of clusters, summed over
    /// the lists. A store that keeps clusters in this order would send one request per run. For single tokens, the
    /// number of runs of neighbouring tokens.
    pub runs: usize,
    /// The chosen clusters of each list, for caches that rank clusters; empty for methods without clusters.
    pub clusters: Vec<Vec<u32>>,
}

/// The members and the profiled use of one cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterFacts<'a> {
    /// The tokens of the cluster.
    pub members: &'a [u32],
    /// The share of the queries of a profile that activated it, from 0 to 1; 0 without a profile.
    pub profiled: f32,
}

/// A change of a cluster: it took in a token, or it was split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterChange {
    /// The list of the cluster, as in [`ChosenEntries::heads`].
    pub list: usize,
    /// The cluster.
    pub cluster: u32,
    /// The number of the change. Later changes of the list have higher numbers, from 1 on.
    pub number: u64,
}

/// A method that chooses entries.
pub trait EntrySelector: Send + Sync {
    /// Returns the number of groups whose entries the method knows, from the first group on.
    ///
    /// # Errors
    /// The errors of the method, for example that it needs a profile first.
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize>;

    /// Returns the most bytes that [`Self::choose`] allocates for this request, its result included. The engine
    /// reserves them first. A method that returns 0 allocates outside of the memory limit.
    ///
    /// # Errors
    /// The errors of the method.
    fn choose_bytes(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let _ = (summaries, ask);
        Ok(0)
    }

    /// Chooses entries among `ask.tokens`, which lie in covered groups.
    ///
    /// # Errors
    /// The errors of the method.
    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries>;

    /// Returns what it knows of a cluster of [`ChosenEntries::clusters`]. A cache that ranks clusters asks for it.
    ///
    /// # Errors
    /// The errors of the method.
    fn cluster<'a>(
        &self,
        summaries: &[&'a dyn LayerSummary],
        list: usize,
        cluster: u32,
    ) -> Result<Option<ClusterFacts<'a>>> {
        let _ = (summaries, list, cluster);
        Ok(None)
    }

    /// Returns the newest changes of its clusters. A change may be returned by several calls.
    ///
    /// # Errors
    /// The errors of the method.
    fn changes(&self, summaries: &[&dyn LayerSummary]) -> Result<Vec<ClusterChange>> {
        let _ = summaries;
        Ok(Vec::new())
    }
}
