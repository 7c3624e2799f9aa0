//! The error type of the crate. [`ErrorKind`] says what the caller can do. The context says where it happened.

use std::fmt;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, by what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The arguments of the call are wrong (shape, NaN, range). Nothing changed. Correct the call.
    InvalidArgument,
    /// The options do not fit the environment (a missing, foreign or repeated device, permissions). Correct the
    /// configuration.
    Configuration,
    /// A device directory is older than the last change of membership. Leave it out. It can be added as a new device.
    StaleDevice,
    /// There is no such sequence or store.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// Another process or handle has it open. Retry after that one closes.
    InUse,
    /// Another version of the format wrote it. Use a build that reads that version.
    Unsupported,
    /// The stored sequence has another layout or fingerprint. Use the model that wrote it, or delete the data.
    LayoutMismatch,
    /// Bytes on disk differ from what was written. [`Error::corruption`] has the place. Restore or delete the data.
    Corruption,
    /// The operating system refused an operation. The source is its error.
    Io,
    /// A device or the capacity is full. Nothing changed, unless [`Error::is_queued`]. Delete something and retry.
    NoSpace,
    /// The request can never fit in `memory_limit`. Raise the limit or ask for less.
    MemoryLimit,
    /// Resources are in use. Retry later.
    Busy,
    /// An earlier sync or write failed. The store is read-only until it is opened again.
    Poisoned,
    /// The store is open for reading only. Open it for writing.
    ReadOnly,
    /// A commit failed midway. After the store is opened again it is known whether the commit is durable.
    Indeterminate,
    /// The store or sequence was closed.
    Closed,
    /// The request was cancelled.
    Cancelled,
    /// The deadline passed.
    Deadline,
}

/// The place of damaged bytes on disk. `code` is the finding code that `kvfsck` prints for the same damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// The finding code, as in kvfsck: `frame-header`, `payload-checksum`, `manifest-batch`, ...
    pub code: &'static str,
    /// Device index in the store.
    pub device: u16,
    /// Path of the file inside its device directory.
    pub file: String,
    /// Byte offset in that file.
    pub offset: u64,
    /// Length in bytes of the damaged piece.
    pub len: u64,
    /// The expected value, in words (a checksum, a magic number).
    pub expected: String,
    /// The value that was found.
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

/// An error: its kind, its context in words, and its source if it has one.
pub struct Error(Box<ErrorDetails>);

/// The content of an error, boxed so that results stay small.
struct ErrorDetails {
    kind: ErrorKind,
    context: String,
    corruption: Option<Corruption>,
    source: Option<std::io::Error>,
    queued: bool,
}

impl Error {
    /// Returns an error of this kind with this context.
    #[must_use]
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self(Box::new(ErrorDetails { kind, context: context.into(), corruption: None, source: None, queued: false }))
    }

    /// Returns an error of the operating system during `context`. ENOSPC, EDQUOT and EFBIG become
    /// [`ErrorKind::NoSpace`].
    #[must_use]
    pub fn io(context: impl Into<String>, source: std::io::Error) -> Self {
        let no_space = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT, rustix::io::Errno::FBIG];
        let kind = match source.raw_os_error() {
            Some(code) if no_space.iter().any(|e| e.raw_os_error() == code) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Self(Box::new(ErrorDetails {
            kind,
            context: context.into(),
            corruption: None,
            source: Some(source),
            queued: false,
        }))
    }

    /// Returns an error for damaged bytes at a known place.
    #[must_use]
    pub fn corrupt(place: Corruption) -> Self {
        Self(Box::new(ErrorDetails {
            kind: ErrorKind::Corruption,
            context: place.to_string(),
            corruption: Some(place),
            source: None,
            queued: false,
        }))
    }

    /// Puts an operation in front of the context.
    #[must_use]
    pub fn during(mut self, doing: impl fmt::Display) -> Self {
        self.0.context = format!("{doing}: {}", self.0.context);
        self
    }

    /// Changes the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Returns the kind: what the caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Marks the error as one of a commit that stays queued.
    #[must_use]
    pub(crate) fn queued(mut self) -> Self {
        self.0.queued = true;
        self
    }

    /// Marks the error as one of another caller's commit, so that nothing of this caller stays queued.
    #[must_use]
    pub(crate) fn not_queued(mut self) -> Self {
        self.0.queued = false;
        self
    }

    /// Returns whether the commit or deletion with this error stays queued.
    ///
    /// It is not durable yet. The next commit of any sequence that finds space makes it durable, with the caller's
    /// state it carries, or the store does so itself. A crash before that loses it completely. If this returns false,
    /// an error of kind [`ErrorKind::NoSpace`] undid the commit.
    #[must_use]
    pub fn is_queued(&self) -> bool {
        self.0.queued
    }

    /// Returns the damaged place, for [`ErrorKind::Corruption`].
    #[must_use]
    pub fn corruption(&self) -> Option<&Corruption> {
        self.0.corruption.as_ref()
    }

    /// Returns the error number of the operating system, if it caused this error.
    #[must_use]
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.source.as_ref().and_then(std::io::Error::raw_os_error)
    }

    /// Returns whether the process or the system has no descriptor left for another file.
    pub(crate) fn is_short_of_descriptors(&self) -> bool {
        matches!(self.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
    }

    /// Copies the error, for another caller that waits for the same operation.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let source = self.0.source.as_ref().map(|e| match e.raw_os_error() {
            Some(code) => std::io::Error::from_raw_os_error(code),
            None => std::io::Error::new(e.kind(), e.to_string()),
        });
        Self(Box::new(ErrorDetails {
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
