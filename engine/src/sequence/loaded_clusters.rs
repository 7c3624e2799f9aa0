//! [`LoadedClusters`]: the stored clusters of an attached method, in memory.

use crate::metrics::Reservation;
use crate::pools::{StoredSet, WrittenStates};
use stratakv_format::FrameId;

/// The stored clusters of a method that is attached.
pub(super) struct LoadedClusters {
    /// The id of the kind of summary that made the clusters.
    pub(super) method: String,
    pub(super) set: StoredSet,
    /// The state of the method that belongs to the set.
    pub(super) state: Option<StoredState>,
    /// The end of the tokens of the last state that could not be written; 0 if there was none.
    pub(super) state_tried: u64,
    pub(super) _memory: Reservation,
}

/// The state of a method, as the sequence refers to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredState {
    /// The end of the tokens that it has seen.
    pub(super) tokens: u64,
    pub(super) number: u64,
    /// Its bytes on devices.
    pub(super) bytes: u64,
    /// Its frames, and those of states that are not used.
    pub(super) frames: Vec<FrameId>,
    /// True if it is not the state of the clusters that the method has now.
    pub(super) is_outdated: bool,
}

impl StoredState {
    /// Returns the state that was written.
    pub(super) fn of(written: &WrittenStates) -> Self {
        let frames = written.frames.iter().map(|frame| frame.id).collect();
        Self { tokens: written.tokens, number: written.number, bytes: written.bytes, frames, is_outdated: false }
    }
}
