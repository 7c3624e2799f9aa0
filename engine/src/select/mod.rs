//! Selection: query, summaries and budget to a [`View`]. No I/O.

mod bounds;
mod choose;
mod infinigen;
mod kvswap;
mod leoam;
mod oracle;
mod quest;
mod selector;
mod shadowkv;
mod signs;
mod tck;
mod view;

pub(crate) use choose::choose;
pub use infinigen::InfiniGen;
pub use kvswap::KvSwap;
pub use leoam::LeoAm;
pub use oracle::Oracle;
pub use quest::Quest;
pub use selector::{Ask, ScoreForm, Selector, combine, summary_as};
pub use shadowkv::ShadowKv;
pub use signs::SignBits;
pub use tck::Tck;
pub use view::{Planes, View};
pub(crate) use view::{TailView, Unit, UnitKeys, UnitSource, ViewInner};

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
    /// How a [selector](crate::retrieval::Selector) adds up query heads; selection by the sequence's own min/max records is
    /// always raw.
    pub form: ScoreForm,
    /// Factor of `q . k` in a softmax form; `None`: `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// What of the selected groups is read.
    pub planes: Planes,
}

impl SelectOptions {
    /// This budget, nothing forced but the tail (or the newest group while there is none).
    #[must_use]
    pub const fn new(budget: Budget) -> Self {
        Self { budget, recent_tokens: 1, sink_tokens: 0, form: ScoreForm::Raw, scale: None, planes: Planes::All }
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

    /// With this score.
    #[must_use]
    pub const fn form(mut self, form: ScoreForm) -> Self {
        self.form = form;
        self
    }

    /// With this factor of `q . k` in a softmax.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// With these planes of the selected groups.
    #[must_use]
    pub const fn planes(mut self, planes: Planes) -> Self {
        self.planes = planes;
        self
    }
}

impl From<Budget> for SelectOptions {
    fn from(budget: Budget) -> Self {
        Self::new(budget)
    }
}
