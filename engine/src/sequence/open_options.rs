//! Opening a stored sequence: how it is named, and with which options.

use crate::layout::KvLayout;
use crate::options::SummaryResidency;
use stratakv_format::SequenceId;

/// The name of a stored sequence: its key or its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceRef<'a> {
    /// The key that [`CreateOptions::key`](crate::CreateOptions::key) gave it.
    Key(&'a str),
    /// The id of [`Sequence::id`](crate::Sequence::id). Sequences without a key have only this.
    Id(SequenceId),
}

impl<'a> From<&'a str> for SequenceRef<'a> {
    fn from(key: &'a str) -> Self {
        Self::Key(key)
    }
}

impl<'a> From<&'a String> for SequenceRef<'a> {
    fn from(key: &'a String) -> Self {
        Self::Key(key)
    }
}

impl From<SequenceId> for SequenceRef<'_> {
    fn from(id: SequenceId) -> Self {
        Self::Id(id)
    }
}

/// The options of [`Store::open_sequence`](crate::Store::open_sequence).
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
