//! The request of a selection: everything, given groups or entries, or what a query chooses under a budget.

use super::entries::GroupEntries;
use crate::options::Budget;
use crate::retrieval::{HeadAggregation, SelectorId};

/// The way in which the groups of a selection are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice<'a> {
    /// By the scores of this query, `[q_heads, key_dim]`.
    Query(&'a [f32]),
    /// These groups, in rising order, and the tail.
    Groups(&'a [u64]),
    /// These entries, in rising order of their groups, and the tail.
    Entries(&'a [GroupEntries]),
    /// Everything that the layer attends to.
    All,
}

/// The request of [`Sequence::select`](crate::Sequence::select).
///
/// ```
/// use stratakv::{Budget, PlaneSet, SelectOptions, SelectRequest};
///
/// let query = [1.0_f32; 8];
/// let by_query = SelectRequest::query(&query).budget(Budget::tokens(64));
/// let with_sinks = SelectRequest::query(&query).options(SelectOptions::new(Budget::share(0.1)).sinks(4).recent(32));
/// let values = SelectRequest::groups(&[0, 7]).planes(PlaneSet::ValuesOnly);
/// let everything = SelectRequest::all();
/// # let _ = (by_query, with_sinks, values, everything);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectRequest<'a> {
    pub(crate) choice: Choice<'a>,
    pub(crate) selector: Option<SelectorId>,
    pub(crate) options: SelectOptions,
}

impl<'a> SelectRequest<'a> {
    const fn new(choice: Choice<'a>) -> Self {
        Self { choice, selector: None, options: SelectOptions::new(Budget::All) }
    }

    /// Returns a request for the groups that `query` `[q_heads, key_dim]` scores highest. Without
    /// [`Self::budget`] or [`Self::options`] it selects everything.
    #[must_use]
    pub const fn query(query: &'a [f32]) -> Self {
        Self::new(Choice::Query(query))
    }

    /// Returns a request for these groups, in rising order, and the tail.
    #[must_use]
    pub const fn groups(groups: &'a [u64]) -> Self {
        Self::new(Choice::Groups(groups))
    }

    /// Returns a request for these entries, in rising order of their groups, and the tail.
    ///
    /// Each KV head attends to tokens of its own, as methods with clusters per head need it. The block of a group is
    /// read once, however many heads name it.
    #[must_use]
    pub const fn entries(entries: &'a [GroupEntries]) -> Self {
        Self::new(Choice::Entries(entries))
    }

    /// Returns a request for everything that the layer attends to.
    #[must_use]
    pub const fn all() -> Self {
        Self::new(Choice::All)
    }

    /// Sets how many tokens a query may choose, with the tail and forced groups.
    #[must_use]
    pub const fn budget(mut self, budget: Budget) -> Self {
        self.options.budget = budget;
        self
    }

    /// Sets all options, the planes among them. Only the planes apply to a request without a query.
    #[must_use]
    pub fn options(mut self, options: impl Into<SelectOptions>) -> Self {
        self.options = options.into();
        self
    }

    /// Sets the planes that are read.
    ///
    /// With [`PlaneSet::ValuesOnly`] a read covers the V planes, rounded out to the units of the device. It never
    /// includes a K plane if the layout has [planes on separate
    /// pages](crate::layout::KvLayoutBuilder::separate_planes).
    #[must_use]
    pub const fn planes(mut self, planes: PlaneSet) -> Self {
        self.options.planes = planes;
        self
    }

    /// Makes an attached selector score the query instead of the sequence's min/max records.
    #[must_use]
    pub const fn selector(mut self, selector: SelectorId) -> Self {
        self.selector = Some(selector);
        self
    }
}

/// How a query chooses groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectOptions {
    /// The tokens of a layer that a step attends to, with the tail and forced groups.
    pub budget: Budget,
    /// The newest tokens that are always attended: the tail, and whole groups before it until at least this many. The
    /// newest group is always attended if the tail is empty, so that a token attends to itself.
    pub recent_tokens: usize,
    /// The first tokens of the sequence (attention sinks) that are always attended, in whole groups.
    pub sink_tokens: usize,
    /// How a [selector](crate::retrieval::Selector) aggregates query heads. Selection by the sequence's own min/max
    /// records always sums raw scores.
    pub aggregation: HeadAggregation,
    /// The factor of `q . k` in a softmax aggregation. `None`: `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// The planes of the selected groups that are read.
    pub planes: PlaneSet,
}

impl SelectOptions {
    /// Returns options with this budget. Only the tail is forced, or the newest group if the tail is empty.
    #[must_use]
    pub const fn new(budget: Budget) -> Self {
        Self {
            budget,
            recent_tokens: 1,
            sink_tokens: 0,
            aggregation: HeadAggregation::Sum,
            scale: None,
            planes: PlaneSet::KeysAndValues,
        }
    }

    /// Forces at least the newest `tokens` tokens.
    #[must_use]
    pub const fn recent(mut self, tokens: usize) -> Self {
        self.recent_tokens = tokens;
        self
    }

    /// Forces the first `tokens` tokens.
    #[must_use]
    pub const fn sinks(mut self, tokens: usize) -> Self {
        self.sink_tokens = tokens;
        self
    }

    /// Sets the aggregation of query heads.
    #[must_use]
    pub const fn aggregation(mut self, aggregation: HeadAggregation) -> Self {
        self.aggregation = aggregation;
        self
    }

    /// Sets the factor of `q . k` in a softmax aggregation.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the planes that are read.
    #[must_use]
    pub const fn planes(mut self, planes: PlaneSet) -> Self {
        self.planes = planes;
        self
    }
}

impl From<Budget> for SelectOptions {
    fn from(budget: Budget) -> Self {
        Self::new(budget)
    }
}

/// The planes of selected groups that are read from devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PlaneSet {
    /// Keys and values.
    #[default]
    KeysAndValues,
    /// Values only, for callers with keys of their own. [`attend`](crate::attend) refuses such a selection.
    ValuesOnly,
    /// Values only, for groups whose keys [`Sequence::reconstruct_keys`](crate::Sequence::reconstruct_keys) keeps.
    /// Attention reconstructs these keys while the values are in flight. Outliers need no read, and other groups are
    /// read whole.
    ReconstructedKeys,
}
