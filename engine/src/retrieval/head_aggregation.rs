//! [`HeadAggregation`]: how scores of query heads become one.

/// The way in which scores of several query heads become one score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HeadAggregation {
    /// The sum of `q . k` over query heads, as in the papers.
    #[default]
    Sum,
    /// A softmax over the tokens per query head, then the sum over query heads. These are the weights of attention
    /// itself.
    Softmax,
    /// A softmax over the groups per query head, each group with its best token, then the sum over query heads.
    ///
    /// It takes one exponential per head and group instead of one per head and token. Methods that score groups, or
    /// rank tokens per head, use [`Self::Softmax`] instead.
    GroupSoftmax,
}
