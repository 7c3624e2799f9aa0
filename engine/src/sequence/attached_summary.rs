//! The summary that one layer keeps for the selectors of a sequence.

use crate::error::Result;
use crate::retrieval::{LayerSummary, SuffixSummary};

/// A summary of one kind and layer.
pub(super) enum AttachedSummary {
    /// The summary of all sealed groups, or of none if selections compute it from streamed min/max records.
    Whole(Box<dyn LayerSummary>),
    /// The summary of the groups whose records are on no device. The records of earlier groups are read per selection.
    Suffix(SuffixSummary),
}

impl AttachedSummary {
    /// Returns the summary, which has the same groups as the layer.
    pub(super) fn get(&self) -> &dyn LayerSummary {
        match self {
            Self::Whole(summary) => summary.as_ref(),
            Self::Suffix(suffix) => suffix,
        }
    }

    pub(super) fn get_mut(&mut self) -> &mut dyn LayerSummary {
        match self {
            Self::Whole(summary) => summary.as_mut(),
            Self::Suffix(suffix) => suffix,
        }
    }

    /// Returns what is in memory: a suffix begins at its own first group.
    pub(super) fn in_memory(&self) -> &dyn LayerSummary {
        match self {
            Self::Whole(summary) => summary.as_ref(),
            Self::Suffix(suffix) => suffix.resident(),
        }
    }

    pub(super) fn suffix(&self) -> Option<&SuffixSummary> {
        match self {
            Self::Whole(_) => None,
            Self::Suffix(suffix) => Some(suffix),
        }
    }

    /// Drops what a suffix keeps of groups before `group`, because their records are on devices. A whole summary stays.
    ///
    /// # Errors
    /// As [`SummarySpec::layer`](crate::retrieval::SummarySpec::layer).
    pub(super) fn drop_stored(&mut self, group: usize) -> Result<()> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Suffix(suffix) => suffix.drop_before(group),
        }
    }
}
