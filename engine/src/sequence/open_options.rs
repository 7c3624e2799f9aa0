//! What opening a sequence takes beside its name.

use crate::layout::KvLayout;
use crate::options::Summaries;

/// How a sequence is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    pub(crate) summaries: Summaries,
    pub(crate) layout: Option<KvLayout>,
}

impl OpenOptions {
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
    pub fn summaries(mut self, summaries: Summaries) -> Self {
        self.summaries = summaries;
        self
    }
}
