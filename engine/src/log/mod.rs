//! The log: frames in segments, and the manifest that says which of them exist.

mod commit;
mod core;
mod devices;
mod frame;
mod manifest;
mod space;

pub(crate) use commit::{CommitRequest, Committer};
pub(crate) use core::{Claim, StoreInner};
pub(crate) use devices::{CONTROL_BYTES, Device, Devices, Identity, exhausted};
pub(crate) use frame::{Draft, SequenceIdentity, Tail, WrittenFrame, front_limit, write as write_frame};
pub(crate) use manifest::{ManifestLog, ManifestPlace, copies_for};
pub(crate) use space::Space;

/// Random bytes for ids and nonces.
///
/// # Errors
/// The system has none to give.
pub(crate) fn random_u64() -> crate::error::Result<u64> {
    getrandom::u64().map_err(|e| crate::error::Error::new(crate::error::ErrorKind::Io, format!("random numbers: {e}")))
}

/// Now, in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
