//! How a group commit fails.

use crate::error::Error;

/// How a group commit failed.
pub(super) enum CommitFailure {
    /// There is no space for a checkpoint. Nothing was recorded, and the group waits for the next commit.
    Stalled(Error),
    /// A write or sync failed midway. Only the next opening of the store finds out what is durable.
    Broken(Error),
}

impl From<Error> for CommitFailure {
    fn from(e: Error) -> Self {
        Self::Broken(e)
    }
}
