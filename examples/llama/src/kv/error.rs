//! Errors of the engine, with the advice that a user of `kvrun` needs.

use stratakv::{Error, ErrorKind};

/// An engine error. Its text ends with the error's kind and with advice for that kind.
#[derive(Debug)]
pub struct EngineError(Error);

/// Converts an engine error, for `map_err`.
#[must_use]
pub fn engine_error(error: Error) -> anyhow::Error {
    EngineError(error).into()
}

impl EngineError {
    /// Returns what a user can do about an error of this kind.
    fn advice(&self) -> &'static str {
        match self.0.kind() {
            ErrorKind::InvalidArgument => "nothing changed",
            ErrorKind::Configuration => {
                "give --device directories that only you can write to; all must be empty, or all of one store"
            }
            ErrorKind::NotFound => "check the name",
            ErrorKind::AlreadyExists => "choose another name",
            ErrorKind::InUse => "try again when the other process has ended",
            ErrorKind::Unsupported => "use the version that wrote it, or an empty directory",
            ErrorKind::LayoutMismatch => {
                "use the model, --dtype and --group-tokens that the session was begun with, or another name"
            }
            ErrorKind::Corruption => "run kvfsck check to see the damage",
            ErrorKind::Io => "check the device",
            ErrorKind::NoSpace => "free space on the device",
            ErrorKind::MemoryLimit => "raise --memory-limit",
            ErrorKind::Busy => "raise --memory-limit, or try again",
            ErrorKind::Poisoned | ErrorKind::Indeterminate => "run it again; it continues from the last durable commit",
            _ => "run it again",
        }
    }
}

impl std::fmt::Display for EngineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({:?}: {})", self.0, self.0.kind(), self.advice())
    }
}

// `source` stays empty because the text of the inner error already contains its own source.
impl std::error::Error for EngineError {}
