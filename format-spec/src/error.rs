//! Why bytes are not a structure of this format.

use core::fmt;

/// Why bytes are not the structure they should be. `code` names the check, `offset` the byte inside the structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatError {
    /// What is wrong.
    pub code: FormatErrorCode,
    /// The field or structure.
    pub field: &'static str,
    /// Byte offset of the field inside the structure.
    pub offset: usize,
    /// The value expected (for a range: the bound).
    pub expected: u64,
    /// The value found.
    pub found: u64,
}

/// The kinds of [`FormatError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormatErrorCode {
    /// Fewer bytes than the structure takes.
    Truncated,
    /// Not this structure at all.
    Magic,
    /// A version or a feature bit this code does not know.
    Unsupported,
    /// The checksum does not match.
    Checksum,
    /// A reserved byte is not zero.
    Reserved,
    /// A value outside its range.
    Range,
    /// A valid structure of another place, store or generation.
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

    pub(crate) const fn truncated(field: &'static str, expected: usize, found: usize) -> Self {
        Self::new(FormatErrorCode::Truncated, field, 0, expected as u64, found as u64)
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, offset, expected, found, .. } = self;
        match self.code {
            FormatErrorCode::Truncated => write!(f, "{field}: {found} bytes where {expected} are needed"),
            FormatErrorCode::Magic => write!(f, "{field}: magic {found:#x}, expected {expected:#x}"),
            FormatErrorCode::Unsupported => write!(f, "{field}: {found:#x} is not supported (known: {expected:#x})"),
            FormatErrorCode::Checksum => write!(f, "{field}: checksum {found:#x}, expected {expected:#x}"),
            FormatErrorCode::Reserved => write!(f, "{field}: reserved byte at {offset} is {found:#x}, not zero"),
            FormatErrorCode::Range => write!(f, "{field} at {offset}: {found} is out of range (bound {expected})"),
            FormatErrorCode::Identity => {
                write!(f, "{field} at {offset}: belongs elsewhere: {found:#x}, expected {expected:#x}")
            }
        }
    }
}

impl core::error::Error for FormatError {}
