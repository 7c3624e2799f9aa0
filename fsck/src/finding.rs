//! What a check found: a stable code, the very place, what was expected there.

use serde::{Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use stratakv_format::error::FormatErrorCode;
use stratakv_format::{FormatError, PAGE_BYTES};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Bytes are not what they must be, or could not be read or understood.
    Damage,
    /// Worth knowing, no harm done: a legal trace of a crash, a file nobody names.
    Note,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        /// What kind of finding. The text of a code never changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Code { $($(#[$doc])* $name),* }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The text, in kebab-case.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

codes! {
    /// A slot of a superblock is not valid, or contradicts the other slot.
    SuperblockSlot = "superblock-slot";
    /// The superblocks of the devices contradict each other.
    SuperblockMismatch = "superblock-mismatch";
    /// A directory of another store.
    ForeignDevice = "foreign-device";
    /// Two directories are the same device of the store.
    DoubledDevice = "doubled-device";
    /// A device of the store was not given.
    MissingDevice = "missing-device";
    /// A device did not take part in the newest membership epoch.
    StaleDevice = "stale-device";
    /// A file that must exist does not, or is not a regular file.
    MissingFile = "missing-file";
    /// The header page of a manifest copy.
    ManifestPage = "manifest-page";
    /// A batch of a manifest copy.
    ManifestBatch = "manifest-batch";
    /// A record that contradicts the records before it.
    ManifestRecord = "manifest-record";
    /// The torn end of a manifest, as a crash leaves it (a note).
    ManifestTail = "manifest-tail";
    /// The header page of a segment.
    SegmentHeader = "segment-header";
    /// The last page of a segment.
    SegmentTrailer = "segment-trailer";
    /// A segment file of the wrong length.
    SegmentLength = "segment-length";
    /// A frame overlaps another or lies outside its segment.
    FrameLocation = "frame-location";
    /// A frame header, by itself or against the manifest.
    FrameHeader = "frame-header";
    /// A payload plane does not match its checksum.
    PayloadChecksum = "payload-checksum";
    /// A plane under a codec, with the right checksum, that cannot be decoded.
    PayloadCodec = "payload-codec";
    /// A byte between or behind the extents of a frame is not zero.
    Padding = "padding";
    /// A committed token of a layer lies in no frame that counts.
    Coverage = "coverage";
    /// Groups that begin behind those of the frames before theirs.
    Overlay = "overlay";
    /// A committed token id lies in no frame.
    TokenIds = "token-ids";
    /// The caller's state is not where its commit says.
    CallerState = "caller-state";
    /// An adapter that is not whole, or in a sequence that holds none.
    Adapter = "adapter";
    /// A version, feature or kind that this program does not know.
    Unsupported = "unsupported";
    /// The operating system could not read this place.
    IoError = "io-error";
    /// Features that this build can read but not write: the engine opens the store for reading only (a note).
    ReadOnlyFeatures = "read-only-features";
    /// A file that nothing names (a note).
    Leftover = "leftover";
    /// Others may write into the store (a note).
    Permissions = "permissions";
    /// The page at the front of an exported sequence.
    ExportPage = "export-page";
    /// A piece of an exported sequence.
    ExportPiece = "export-piece";
    /// A piece of an exported sequence where another one is due.
    ExportOrder = "export-order";
    /// An exported sequence that is cut short or goes on behind its end.
    ExportLength = "export-length";
    /// A summary that is not that of its group, or minima and maxima that no frame has.
    Summary = "summary";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// One finding. Fields that do not apply are `None` (absent in JSON).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is.
    pub code: Code,
    /// How bad.
    pub severity: Severity,
    /// Index of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<u16>,
    /// Directory of the device, as it was given.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "lossy")]
    pub path: Option<PathBuf>,
    /// File inside that directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// First byte in that file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// Bytes from there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// Frame.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frame: Option<u64>,
    /// Sequence: of a frame the one that wrote it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// Key of that sequence, only when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u16>,
    /// Tokens, first and one past the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<[u64; 2]>,
    /// What plane: `k`, `v`, `summary`, `token-ids` or `caller-state`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plane: Option<&'static str>,
    /// What should be there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// The finding in words.
    pub message: String,
}

/// A path that is not UTF-8 is no reason to print nothing.
fn lossy<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// A file of a device, to say where findings are.
#[derive(Clone, Debug)]
pub(crate) struct FilePlace {
    pub(crate) device: Option<u16>,
    pub(crate) path: Arc<Path>,
    pub(crate) file: Arc<str>,
}

impl Finding {
    fn new(code: Code, severity: Severity, message: String) -> Self {
        Self {
            code,
            severity,
            device: None,
            path: None,
            file: None,
            offset: None,
            length: None,
            frame: None,
            sequence: None,
            key: None,
            layer: None,
            tokens: None,
            plane: None,
            expected: None,
            found: None,
            message,
        }
    }

    pub(crate) fn damage(code: Code, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Damage, message.into())
    }

    pub(crate) fn note(code: Code, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Note, message.into())
    }

    /// The structure in the page at `offset` has features that only readers may ignore.
    pub(crate) fn read_only_features(place: &FilePlace, offset: u64) -> Self {
        let text = "has features this build can read but not write: the store opens for reading only";
        Self::note(Code::ReadOnlyFeatures, text).at(place, offset, PAGE_BYTES as u64)
    }

    /// The finding for a structure that the format crate refused: `code`, unless it is merely not known here.
    pub(crate) fn format(code: Code, error: &FormatError) -> Self {
        let code = if error.code == FormatErrorCode::Unsupported { Code::Unsupported } else { code };
        Self::damage(code, error.to_string()).values(error.expected, error.found)
    }

    pub(crate) fn at(mut self, place: &FilePlace, offset: u64, length: u64) -> Self {
        self = self.in_file(place);
        self.offset = Some(offset);
        self.length = Some(length);
        self
    }

    pub(crate) fn in_file(mut self, place: &FilePlace) -> Self {
        self = self.in_directory(place.device, &place.path);
        self.file = Some(place.file.to_string());
        self
    }

    pub(crate) fn in_directory(mut self, device: Option<u16>, path: &Path) -> Self {
        self.device = device;
        self.path = Some(path.to_path_buf());
        self
    }

    pub(crate) fn values(mut self, expected: u64, found: u64) -> Self {
        self.expected = Some(format!("{expected:#x}"));
        self.found = Some(format!("{found:#x}"));
        self
    }

    pub(crate) fn frame(mut self, frame: u64) -> Self {
        self.frame = Some(frame);
        self
    }

    pub(crate) fn sequence(mut self, sequence: u64) -> Self {
        self.sequence = Some(sequence);
        self
    }

    pub(crate) fn layer(mut self, layer: u16) -> Self {
        self.layer = Some(layer);
        self
    }

    pub(crate) fn tokens(mut self, first: u64, end: u64) -> Self {
        self.tokens = Some([first, end]);
        self
    }

    pub(crate) fn plane(mut self, plane: &'static str) -> Self {
        self.plane = Some(plane);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity == Severity::Damage { "damage" } else { "note" };
        write!(f, "{severity} {}", self.code)?;
        if let Some(device) = self.device {
            write!(f, " device {device}")?;
        }
        if let Some(path) = &self.path {
            write!(f, " {}", path.display())?;
            if let Some(file) = &self.file {
                write!(f, "/{file}")?;
            }
        }
        if let (Some(offset), Some(length)) = (self.offset, self.length) {
            write!(f, " offset {offset} length {length}")?;
        }
        if let Some(frame) = self.frame {
            write!(f, " frame {frame}")?;
        }
        if let Some(sequence) = self.sequence {
            write!(f, " sequence {sequence}")?;
        }
        if let Some(key) = &self.key {
            write!(f, " key {key}")?;
        }
        if let Some(layer) = self.layer {
            write!(f, " layer {layer}")?;
        }
        if let Some([first, end]) = self.tokens {
            write!(f, " tokens {first}..{end}")?;
        }
        if let Some(plane) = self.plane {
            write!(f, " plane {plane}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Collects findings from all threads; keeps at most `limit` of them and counts the rest.
#[derive(Debug)]
pub(crate) struct Sink {
    limit: usize,
    inner: Mutex<Collected>,
}

/// What was collected.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) findings: Vec<Finding>,
    pub(crate) left_out: u64,
    pub(crate) damage: u64,
    pub(crate) unsupported: u64,
    pub(crate) io_errors: u64,
}

impl Sink {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, inner: Mutex::new(Collected::default()) }
    }

    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, finding: Finding) {
        let mut inner = self.lock();
        if finding.severity == Severity::Damage {
            inner.damage += 1;
        }
        match finding.code {
            Code::Unsupported => inner.unsupported += 1,
            Code::IoError => inner.io_errors += 1,
            _ => {}
        }
        if inner.findings.len() < self.limit {
            inner.findings.push(finding);
        } else {
            inner.left_out += 1;
        }
    }

    pub(crate) fn into_collected(self) -> Collected {
        self.inner.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}
