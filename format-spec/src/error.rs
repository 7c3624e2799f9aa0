//! Errors: why bytes are not a structure of this format.

use core::fmt;

/// The reason why bytes are not the expected structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatError {
    /// The kind of the error.
    pub code: FormatErrorCode,
    /// The field or structure that failed the check.
    pub field: &'static str,
    /// Byte offset of the field in the structure.
    pub offset: usize,
    /// The expected value. For a range it is the bound, for a checksum the computed one.
    pub expected: u64,
    /// The value found.
    pub found: u64,
}

/// The kinds of [`FormatError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormatErrorCode {
    /// There are fewer bytes than the structure takes.
    Truncated,
    /// The bytes are another structure or none.
    Magic,
    /// This code does not know a version, feature bit, flag or kind.
    Unsupported,
    /// The checksum does not match.
    Checksum,
    /// A reserved byte is not zero.
    Reserved,
    /// A value is outside its range.
    Range,
    /// The structure is valid, but belongs to another place, store or generation.
    Identity,
}

impl FormatError {
    pub(crate) const fn new(
        code: FormatErrorCode,
        field: &'static str,
        offset: usize,
        expected: u64,
        found: u64,
    ) -> Self {
        Self { code, field, offset, expected, found }
    }

    pub(crate) const fn range(field: &'static str, offset: usize, bound: u64, found: u64) -> Self {
        Self::new(FormatErrorCode::Range, field, offset, bound, found)
    }

    pub(crate) const fn unsupported(field: &'static str, offset: usize, known: u64, found: u64) -> Self {
        Self::new(FormatErrorCode::Unsupported, field, offset, known, found)
    }

    pub(crate) const fn truncated(field: &'static str, expected: usize, found: usize) -> Self {
        Self::new(FormatErrorCode::Truncated, field, 0, expected as u64, found as u64)
    }

    /// Compares a number in a structure with the number at the place where the reader found it.
    pub(crate) fn check_identity(
        field: &'static str,
        offset: usize,
        expected: u64,
        found: u64,
    ) -> Result<(), FormatError> {
        if expected == found {
            return Ok(());
        }
        Err(Self::new(FormatErrorCode::Identity, field, offset, expected, found))
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, offset, expected, found, .. } = self;
        match self.code {
            FormatErrorCode::Truncated => write!(f, "{field}: {found} bytes found, {expected} bytes needed"),
            FormatErrorCode::Magic => write!(f, "{field}: magic {found:#x}, expected {expected:#x}"),
            FormatErrorCode::Unsupported => write!(f, "{field}: {found:#x} is not supported (known: {expected:#x})"),
            FormatErrorCode::Checksum => write!(f, "{field}: stored checksum {found:#x}, computed {expected:#x}"),
            FormatErrorCode::Reserved => write!(f, "{field}: reserved byte at {offset} is {found:#x}, expected zero"),
            FormatErrorCode::Range => write!(f, "{field} at {offset}: {found} is out of range (bound {expected})"),
            FormatErrorCode::Identity => write!(
                f,
                "{field} at {offset}: {found:#x}, expected {expected:#x}; it is of another place, store or generation"
            ),
        }
    }
}

impl core::error::Error for FormatError {}
