//! Findings: what a check reports, and the sink that collects them.
//!
//! A finding has a stable code and a severity. It names its place in the store as far as it applies: device, file, byte
//! range, frame, sequence, layer, tokens and plane. Every step of a check pushes its findings into one [`Sink`].

use crate::error::{EXIT_CLEAN, EXIT_DAMAGE, EXIT_IO, EXIT_UNSUPPORTED};
use serde::{Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use stratakv_format::error::FormatErrorCode;
use stratakv_format::{FormatError, PAGE_BYTES};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Bytes deviate from the format, could not be read, or have an unknown version.
    Damage,
    /// Nothing is lost: for example the legal trace of a crash, or a file that the store does not use.
    Note,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        /// The kind of a finding. The text of a code never changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Code { $($(#[$doc])* $name),* }

        impl Code {
            /// All codes, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns the text of the code, in kebab-case.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

codes! {
    /// A superblock slot is invalid, or the two slots of a device contradict each other.
    SuperblockSlot = "superblock-slot";
    /// The superblocks of two devices contradict each other.
    SuperblockMismatch = "superblock-mismatch";
    /// A directory belongs to another store, or the manifest records another device under its index.
    ForeignDevice = "foreign-device";
    /// Two directories are the same device of the store, or have the same device index.
    DoubledDevice = "doubled-device";
    /// A device of the store was not given, or a sequence needs frames that only devices held which left the store.
    MissingDevice = "missing-device";
    /// A device has an older membership epoch than the others, or the store has lost or removed it.
    StaleDevice = "stale-device";
    /// A required file does not exist or is not a regular file.
    MissingFile = "missing-file";
    /// The header page of a manifest copy is invalid or belongs elsewhere, or the file is too long.
    ManifestPage = "manifest-page";
    /// A batch of a manifest copy is damaged, missing or different from the other copies.
    ManifestBatch = "manifest-batch";
    /// A manifest record is invalid or contradicts the records before it (a note: a counter is below an id in use).
    ManifestRecord = "manifest-record";
    /// The end of a manifest copy was torn by a crash (a note: such an end is legal).
    ManifestTail = "manifest-tail";
    /// The header page of a segment is invalid or contradicts the manifest.
    SegmentHeader = "segment-header";
    /// The trailer page of a segment is invalid or contradicts the manifest.
    SegmentTrailer = "segment-trailer";
    /// A segment file is shorter than its segment.
    SegmentLength = "segment-length";
    /// A frame overlaps another frame or lies outside the used pages of its segment.
    FrameLocation = "frame-location";
    /// A frame header is invalid or contradicts the manifest.
    FrameHeader = "frame-header";
    /// The bytes of a plane do not match their checksum.
    PayloadChecksum = "payload-checksum";
    /// A plane under a codec has the right checksum and cannot be decoded.
    PayloadCodec = "payload-codec";
    /// A byte outside the extents of a frame, or behind the bytes of an export piece, is not zero.
    Padding = "padding";
    /// A committed token of a layer is stored in no frame.
    Coverage = "coverage";
    /// A groups extent begins past the end of the groups in frames with lower LSNs.
    Overlay = "overlay";
    /// A committed token id is stored in no frame.
    TokenIds = "token-ids";
    /// The frame that a commit names for the caller state does not hold it.
    CallerState = "caller-state";
    /// An adapter is incomplete or malformed, or is stored in a sequence without an adapter record.
    Adapter = "adapter";
    /// A directory of clusters is damaged or incomplete, or names pages that are in no pool or in two clusters (a note:
    /// this program does not know its version).
    ClusterDirectory = "cluster-directory";
    /// A page of a pool does not match the checksum in its directory, or holds bytes outside its entries.
    ClusterPage = "cluster-page";
    /// A token that a set covers is in no cluster, in too many, or twice in one.
    ClusterCoverage = "cluster-coverage";
    /// A piece of the state of a method is damaged, or the state belongs to tokens that are not committed (a note: this
    /// program does not know its version).
    ClusterState = "cluster-state";
    /// A structure has a version, feature or kind that this program does not know.
    Unsupported = "unsupported";
    /// The operating system could not read the bytes at this place.
    IoError = "io-error";
    /// A structure has features that this build can read but not write (a note).
    ReadOnlyFeatures = "read-only-features";
    /// A file, or the end of a file, is not part of the store (a note).
    Leftover = "leftover";
    /// Users other than the owner may write to a device directory. The engine refuses it.
    Permissions = "permissions";
    /// The first page of an exported file is invalid.
    ExportPage = "export-page";
    /// A piece of an exported file is malformed.
    ExportPiece = "export-piece";
    /// A piece of an exported file is out of order.
    ExportOrder = "export-order";
    /// An exported file is cut short, or continues past its end piece.
    ExportLength = "export-length";
    /// A summary does not belong to its group, or a group has no min/max summary.
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

/// One finding. Fields that do not apply are `None`, and absent in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The kind of the finding.
    pub code: Code,
    /// The severity.
    pub severity: Severity,
    /// The index of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<u16>,
    /// The directory of the device, in the form the caller gave.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "lossy")]
    pub path: Option<PathBuf>,
    /// The file inside that directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The offset of the first byte in that file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The number of bytes from `offset` on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// The id of the frame.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frame: Option<u64>,
    /// The id of the sequence. For a frame, it is the sequence that wrote the frame.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The key of that sequence, if [`Options::show_keys`](crate::Options::show_keys) is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The index of the layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u16>,
    /// The first token, and one past the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<[u64; 2]>,
    /// The plane: `k`, `v`, `summary`, `token-ids`, `caller-state`, `adapter`, `directory`, `delta` or `page`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plane: Option<&'static str>,
    /// The expected value, in hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// The value found, in hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// The description, in words.
    pub message: String,
}

/// Serialises a path, replacing bytes that are not UTF-8.
fn lossy<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// The place of a file: the device, its directory, and the name of the file inside it.
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

    /// Returns the note that the page at `offset` has features which a reader may ignore and a writer may not.
    pub(crate) fn read_only_features(place: &FilePlace, offset: u64) -> Self {
        let text = "this build does not know all ro_compat features of the page: the store opens for reading only";
        Self::note(Code::ReadOnlyFeatures, text).at(place, offset, PAGE_BYTES as u64)
    }

    /// Returns the finding for a structure that the format crate refused.
    ///
    /// Its code is `code`, or [`Code::Unsupported`] if this build does not know the version, feature or kind.
    pub(crate) fn format(code: Code, error: &FormatError) -> Self {
        let code = if error.code == FormatErrorCode::Unsupported { Code::Unsupported } else { code };
        Self::damage(code, error.to_string()).values(error.expected, error.found)
    }

    /// Sets the file and the byte range.
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

    /// Sets the expected value and the value found.
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

    /// Sets the token range `first..end`.
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

/// The collector of findings, shared by all threads. It keeps at most `limit` findings and counts the others.
#[derive(Debug)]
pub(crate) struct Sink {
    limit: usize,
    findings: Mutex<Findings>,
}

/// The findings of a check and their counts.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) list: Vec<Finding>,
    /// Findings past the limit, which `list` does not hold.
    pub(crate) left_out: u64,
    /// Findings of damage, left-out findings included.
    pub(crate) damage: u64,
    /// Findings with [`Code::Unsupported`], left-out findings included.
    pub(crate) unsupported: u64,
    /// Findings with [`Code::IoError`], left-out findings included.
    pub(crate) io_errors: u64,
}

impl Findings {
    /// Returns the exit code of the program: the first that applies of unsupported, I/O error, damage and clean.
    pub(crate) fn exit_code(&self) -> u8 {
        match (self.unsupported, self.io_errors, self.damage) {
            (1.., _, _) => EXIT_UNSUPPORTED,
            (0, 1.., _) => EXIT_IO,
            (0, 0, 1..) => EXIT_DAMAGE,
            _ => EXIT_CLEAN,
        }
    }
}

impl Sink {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, findings: Mutex::new(Findings::default()) }
    }

    fn lock(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, finding: Finding) {
        let mut findings = self.lock();
        if finding.severity == Severity::Damage {
            findings.damage += 1;
        }
        match finding.code {
            Code::Unsupported => findings.unsupported += 1,
            Code::IoError => findings.io_errors += 1,
            _ => {}
        }
        if findings.list.len() < self.limit {
            findings.list.push(finding);
        } else {
            findings.left_out += 1;
        }
    }

    pub(crate) fn into_findings(self) -> Findings {
        self.findings.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}
