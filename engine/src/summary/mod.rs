//! Summaries: the small records about groups that selection scores. Pure.

mod min_max;

pub(crate) use min_max::MinMax;
