//! The limits of a store that records are checked against, and the result of such a check.

/// The limits of one store, from its superblock and the header of its manifest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreLimits {
    pub(crate) devices: u16,
    pub(crate) segment_pages: u64,
    pub(crate) generation: u64,
    /// True if the manifest has the feature of frame copies.
    pub(crate) replicas: bool,
    /// True if the manifest has the feature of codecs.
    pub(crate) codecs: bool,
    /// True if the manifest has the feature of pools.
    pub(crate) pools: bool,
}

/// The result of applying a record. The error is the message of a finding.
pub(super) type RecordResult = Result<(), String>;

/// Returns the error `text` unless the condition holds.
pub(super) fn require(condition: bool, text: impl FnOnce() -> String) -> RecordResult {
    if condition { Ok(()) } else { Err(text()) }
}

/// Returns the message for a reserved byte that is not zero.
pub(super) fn reserved_byte() -> String {
    "a reserved byte is not zero".into()
}
