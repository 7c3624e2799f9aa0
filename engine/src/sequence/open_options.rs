//! How a stored sequence is opened.

use crate::layout::KvLayout;
use crate::options::SummaryResidency;

/// The options of an open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenSequence {
    pub(crate) summaries: SummaryResidency,
    pub(crate) layout: Option<KvLayout>,
}

impl OpenSequence {
    /// Returns the options for any layout and resident summaries.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires exactly this layout, including its fingerprint.
    #[must_use]
    pub fn layout(mut self, layout: &KvLayout) -> Self {
        self.layout = Some(layout.clone());
        self
    }

    /// Sets where the handle keeps its summaries. It is not stored: the next handle may keep them elsewhere.
    #[must_use]
    pub fn summary_residency(mut self, summaries: SummaryResidency) -> Self {
        self.summaries = summaries;
        self
    }
}
