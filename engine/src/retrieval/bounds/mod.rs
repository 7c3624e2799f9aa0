//! Element-wise minima and maxima of each group (Quest; LeoAM section 4): an upper bound of every `q . k` in the group.

pub(crate) mod layer_records;
pub(crate) mod leoam;
pub(crate) mod min_max;
pub(crate) mod query;
pub(crate) mod records;
pub(crate) mod summary;
