//! The exit codes of the program, and the reasons why a check cannot start.

use std::fmt;
use std::path::PathBuf;
use stratakv_format::error::FormatError;

/// Exit code: the store is clean. Notes do not change that.
pub const EXIT_CLEAN: u8 = 0;
/// Exit code: damage was found.
pub const EXIT_DAMAGE: u8 = 1;
/// Exit code: the arguments are wrong, or a directory is not a device of a store.
pub const EXIT_USAGE: u8 = 2;
/// Exit code: a version, feature or kind that this program does not know.
pub const EXIT_UNSUPPORTED: u8 = 4;
/// Exit code: the operating system could not read something.
pub const EXIT_IO: u8 = 5;
/// Exit code: a writer has the store open.
pub const EXIT_IN_USE: u8 = 6;

/// The reason why a store or an exported file could not be checked at all.
#[derive(Debug)]
pub enum CheckError {
    /// The path does not exist, is of another file type, or is not a device directory of a store.
    NotAStore {
        /// The path that was given.
        path: PathBuf,
        /// The reason, in words.
        reason: String,
    },
    /// A writer has the store open.
    InUse {
        /// The device directory that the writer has locked.
        path: PathBuf,
    },
    /// A superblock has a version or a feature that this program does not know.
    Unsupported {
        /// The device directory.
        path: PathBuf,
        /// The file in that directory.
        file: String,
        /// The byte offset of the superblock slot in that file.
        offset: u64,
        /// The version or feature.
        error: FormatError,
    },
    /// The operating system refused to open, lock or list the path.
    Io {
        /// The operation that failed: `open`, `lock` or `list`.
        operation: &'static str,
        /// The path that was given.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

impl CheckError {
    /// Returns the exit code of the program for this error.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotAStore { .. } => EXIT_USAGE,
            Self::InUse { .. } => EXIT_IN_USE,
            Self::Unsupported { .. } => EXIT_UNSUPPORTED,
            Self::Io { .. } => EXIT_IO,
        }
    }

    /// Returns a stable name: `not-a-store`, `in-use`, `unsupported` or `io-error`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotAStore { .. } => "not-a-store",
            Self::InUse { .. } => "in-use",
            Self::Unsupported { .. } => "unsupported",
            Self::Io { .. } => "io-error",
        }
    }
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAStore { path, reason } => write!(f, "open {}: {reason}", path.display()),
            Self::InUse { path } => {
                write!(f, "lock {}: a writer has the store open; close it and run the check again", path.display())
            }
            Self::Unsupported { path, file, offset, error } => {
                write!(f, "read {}/{file} at offset {offset}: {error}; use a newer kvfsck", path.display())
            }
            Self::Io { operation, path, source } => write!(f, "{operation} {}: {source}", path.display()),
        }
    }
}

impl std::error::Error for CheckError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Unsupported { error, .. } => Some(error),
            _ => None,
        }
    }
}
