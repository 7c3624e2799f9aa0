//! Measurements of a store as a whole: commits, bytes written, space that is reused, opening, and memory.

pub(crate) mod churn;
pub(crate) mod commit;
pub(crate) mod open;
mod paced_append;
pub(crate) mod resident;
mod result;
pub(crate) mod start;
pub(crate) mod written;
