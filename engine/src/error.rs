//! The one error type. [`ErrorKind`] answers "what do I do now?"; the context names the place.

use std::fmt;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, in terms of what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call's arguments are wrong (shape, NaN, range). Nothing changed; correct the call.
    InvalidArgument,
    /// The options or the environment do not fit (missing, foreign or doubled device, permissions). Fix the configuration.
    Configuration,
    /// A device directory is as it was before the membership of its store changed without it. Leave it out; it can be added anew.
    StaleDevice,
    /// No such sequence or store.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// Another process or handle holds it. Retry when that one is done.
    InUse,
    /// Written by a newer or other version of the format. Use a build that knows it.
    Unsupported,
    /// The stored sequence has another layout or fingerprint. Drop the data or use the model that wrote it.
    LayoutMismatch,
    /// Bytes on disk are not what was written; [`Error::corruption`] has the place. Restore or drop the data.
    Corruption,
    /// The operating system refused an operation; the source is its error.
    Io,
    /// No space on a device or within the capacity. Nothing changed, unless [`Error::is_queued`]; delete something and retry.
    NoSpace,
    /// The request can never fit in `memory_limit`. Raise the limit or ask for less.
    MemoryLimit,
    /// Resources are in use at the moment. Retry later.
    Busy,
    /// An earlier sync or write failed; the store is read-only until it is opened again.
    Poisoned,
    /// The store is open for reading only. Open it for writing.
    ReadOnly,
    /// A commit failed midway: whether it is durable is known only after the store is opened again.
    Indeterminate,
    /// The store or sequence was closed.
    Closed,
    /// The request was cancelled.
    Cancelled,
    /// The deadline passed.
    Deadline,
}

/// Where bytes on disk are not what was written. `code` is the finding code that `kvfsck` uses for the same damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// Finding code, as in kvfsck: `frame-header`, `payload-checksum`, `manifest-batch`, ...
    pub code: &'static str,
    /// Device index in the store.
    pub device: u16,
    /// Path of the file inside its device directory.
    pub file: String,
    /// Byte offset in that file.
    pub offset: u64,
    /// Length in bytes of the damaged piece.
    pub len: u64,
    /// What was expected, in words (a checksum, a magic number).
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: device {}, {} at byte {} (+{}): expected {}, found {}",
            self.code, self.device, self.file, self.offset, self.len, self.expected, self.found
        )
    }
}

/// Error of this crate: a kind, a context in words, and where there is one its source.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    context: String,
    corruption: Option<Corruption>,
    source: Option<std::io::Error>,
    queued: bool,
}

impl Error {
    /// An error of this kind with this context.
    #[must_use]
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, context: context.into(), corruption: None, source: None, queued: false }))
    }

    /// The operating system's error in doing `context`. ENOSPC, EDQUOT and EFBIG become [`ErrorKind::NoSpace`].
    #[must_use]
    pub fn io(context: impl Into<String>, source: std::io::Error) -> Self {
        let no_space = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT, rustix::io::Errno::FBIG];
        let kind = match source.raw_os_error() {
            Some(code) if no_space.iter().any(|e| e.raw_os_error() == code) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Self(Box::new(Inner { kind, context: context.into(), corruption: None, source: Some(source), queued: false }))
    }

    /// Damaged bytes at a known place.
    #[must_use]
    pub fn corrupt(place: Corruption) -> Self {
        Self(Box::new(Inner {
            kind: ErrorKind::Corruption,
            context: place.to_string(),
            corruption: Some(place),
            source: None,
            queued: false,
        }))
    }

    /// The same error, with what was being done put in front of its context.
    #[must_use]
    pub fn during(mut self, doing: impl fmt::Display) -> Self {
        self.0.context = format!("{doing}: {}", self.0.context);
        self
    }

    /// The same error under another kind.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// What the caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The same error of a commit that is kept all the same.
    #[must_use]
    pub(crate) fn queued(mut self) -> Self {
        self.0.queued = true;
        self
    }

    /// The same error met on behalf of others: what stays queued is not what the caller asked for.
    #[must_use]
    pub(crate) fn not_queued(mut self) -> Self {
        self.0.queued = false;
        self
    }

    /// Whether the commit or deletion that brought this error was kept: it is not durable yet, and is made as it was, with
    /// the caller's state it carries, by the next commit of anybody that finds room, or by the store itself once there is
    /// some. A crash before loses it whole. Where this is false, an error of kind [`ErrorKind::NoSpace`] undid it.
    #[must_use]
    pub fn is_queued(&self) -> bool {
        self.0.queued
    }

    /// The damaged place, for [`ErrorKind::Corruption`].
    #[must_use]
    pub fn corruption(&self) -> Option<&Corruption> {
        self.0.corruption.as_ref()
    }

    /// The operating system's error number, where one stands behind this error.
    #[must_use]
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.source.as_ref().and_then(std::io::Error::raw_os_error)
    }

    /// The same error once more, for a second waiter on the same failed operation.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let source = self.0.source.as_ref().map(|e| match e.raw_os_error() {
            Some(code) => std::io::Error::from_raw_os_error(code),
            None => std::io::Error::new(e.kind(), e.to_string()),
        });
        Self(Box::new(Inner {
            kind: self.0.kind,
            context: self.0.context.clone(),
            corruption: self.0.corruption.clone(),
            source,
            queued: self.0.queued,
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.source {
            Some(source) => write!(f, "{}: {source}", self.0.context),
            None => f.write_str(&self.0.context),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|e| e as _)
    }
}
