//! Selection: query, summaries and budget to a [`View`]. No I/O.

mod choose;
mod view;

pub(crate) use choose::{choose, score_order};
pub use view::View;
pub(crate) use view::{TailView, Unit, UnitSource, ViewInner};

use crate::options::Budget;

/// What a selection takes besides the best groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectOptions {
    /// Tokens of a layer that a step attends to, everything included.
    pub budget: Budget,
    /// The newest tokens, which are always attended: the tail, and whole groups before it until at least this many. The
    /// newest group is always among them when the tail is empty, so that a token attends to itself.
    pub recent_tokens: usize,
    /// The first tokens of the sequence (attention sinks), which are always attended, in whole groups.
    pub sink_tokens: usize,
}

impl SelectOptions {
    /// This budget, nothing forced but the tail (or the newest group while there is none).
    #[must_use]
    pub const fn new(budget: Budget) -> Self {
        Self { budget, recent_tokens: 1, sink_tokens: 0 }
    }

    /// At least the newest `tokens` tokens.
    #[must_use]
    pub const fn recent(mut self, tokens: usize) -> Self {
        self.recent_tokens = tokens;
        self
    }

    /// The first `tokens` tokens.
    #[must_use]
    pub const fn sinks(mut self, tokens: usize) -> Self {
        self.sink_tokens = tokens;
        self
    }
}

impl From<Budget> for SelectOptions {
    fn from(budget: Budget) -> Self {
        Self::new(budget)
    }
}
