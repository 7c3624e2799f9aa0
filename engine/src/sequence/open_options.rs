//! What opening a sequence takes beside its name.

use crate::layout::KvLayout;
use crate::options::SummaryResidency;

/// How a sequence is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenSequence {
    pub(crate) summaries: SummaryResidency,
    pub(crate) layout: Option<KvLayout>,
}

impl OpenSequence {
    /// Any layout, summaries resident.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// It must have exactly this layout, fingerprint included.
    #[must_use]
    pub fn layout(mut self, layout: &KvLayout) -> Self {
        self.layout = Some(layout.clone());
        self
    }

    /// Where it has its summaries. Nothing of it is stored: another handle may have them elsewhere.
    #[must_use]
    pub fn summary_residency(mut self, summaries: SummaryResidency) -> Self {
        self.summaries = summaries;
        self
    }
}
