//! The values of a GGUF file's metadata. They borrow the bytes of the file.

use std::borrow::Cow;

use anyhow::{Result, bail, ensure};

use super::cursor::Cursor;

/// The deepest list of lists that is read.
const DEPTH_MAX: usize = 4;

/// The type of a value, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Unsigned integer of this many bytes.
    Unsigned(u8),
    /// Signed integer of this many bytes.
    Signed(u8),
    /// Number in f32 or f64, of this many bytes.
    Float(u8),
    /// One byte, 0 or 1.
    Bool,
    /// A length of 64 bits, and the bytes.
    Text,
    /// A type, a count of 64 bits, and the elements.
    List,
}

impl ValueKind {
    fn from_number(number: u32) -> Result<Self> {
        Ok(match number {
            0 => Self::Unsigned(1),
            1 => Self::Signed(1),
            2 => Self::Unsigned(2),
            3 => Self::Signed(2),
            4 => Self::Unsigned(4),
            5 => Self::Signed(4),
            6 => Self::Float(4),
            7 => Self::Bool,
            8 => Self::Text,
            9 => Self::List,
            10 => Self::Unsigned(8),
            11 => Self::Signed(8),
            12 => Self::Float(8),
            _ => bail!("value type {number} is unknown"),
        })
    }

    /// Returns the bytes of a value, or `None` if they depend on the value.
    fn size(self) -> Option<u64> {
        match self {
            Self::Unsigned(size) | Self::Signed(size) | Self::Float(size) => Some(u64::from(size)),
            Self::Bool => Some(1),
            Self::Text | Self::List => None,
        }
    }
}

/// A value of the metadata.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetaValue<'a> {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text, which should be UTF-8.
    Text(&'a [u8]),
    /// A list of values of one type.
    List(MetaList<'a>),
}

/// A list of values of one type. All lengths in it were checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MetaList<'a> {
    kind: ValueKind,
    count: u64,
    bytes: &'a [u8],
}

impl<'a> MetaValue<'a> {
    /// Reads a type and a value of it.
    pub(super) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let kind = ValueKind::from_number(cursor.u32()?)?;
        Self::of(kind, cursor, 0)
    }

    fn of(kind: ValueKind, cursor: &mut Cursor<'a>, depth: usize) -> Result<Self> {
        let Some(size) = kind.size() else {
            return match kind {
                ValueKind::List => MetaList::read(cursor, depth).map(Self::List),
                _ => cursor.text().map(Self::Text),
            };
        };
        let bytes = cursor.take(size)?;
        let mut low = [0; 8];
        low[..bytes.len()].copy_from_slice(bytes);
        let number = u64::from_le_bytes(low);
        // The sign is the top bit of the shorter integer.
        let signed = |size: u8| (number << (64 - 8 * u32::from(size))).cast_signed() >> (64 - 8 * u32::from(size));
        Ok(match kind {
            ValueKind::Signed(size) => Self::Signed(signed(size)),
            ValueKind::Float(4) => Self::Float(f64::from(f32::from_bits(number as u32))),
            ValueKind::Float(_) => Self::Float(f64::from_bits(number)),
            ValueKind::Bool => {
                ensure!(number <= 1, "byte {}: {number} is neither true nor false", cursor.position() - 1);
                Self::Bool(number == 1)
            }
            _ => Self::Unsigned(number),
        })
    }

    /// Returns a count: an integer that is not negative.
    #[must_use]
    pub fn count(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(n) => Some(n),
            Self::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }

    /// Returns a number of any type.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        match *self {
            Self::Unsigned(n) => Some(n as f64),
            Self::Signed(n) => Some(n as f64),
            Self::Float(x) => Some(x),
            _ => None,
        }
    }

    /// Returns a text. Bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn text(&self) -> Option<Cow<'a, str>> {
        match *self {
            Self::Text(bytes) => Some(String::from_utf8_lossy(bytes)),
            _ => None,
        }
    }
}

impl<'a> MetaList<'a> {
    fn read(cursor: &mut Cursor<'a>, depth: usize) -> Result<Self> {
        ensure!(depth < DEPTH_MAX, "byte {}: lists are nested deeper than {DEPTH_MAX}", cursor.position());
        let kind = ValueKind::from_number(cursor.u32()?)?;
        let count = cursor.u64()?;
        let mut ahead = cursor.clone_at();
        match kind.size() {
            Some(size) => {
                let start = ahead.position();
                let elements = ahead.take(count.saturating_mul(size))?;
                if let Some(nth) = elements.iter().position(|byte| kind == ValueKind::Bool && *byte > 1) {
                    bail!("byte {}: {} is neither true nor false", start + nth, elements[nth]);
                }
            }
            // Every element takes at least eight bytes, so a wrong count soon reaches the end of the file.
            None => {
                for _ in 0..count {
                    MetaValue::of(kind, &mut ahead, depth + 1)?;
                }
            }
        }
        let bytes = cursor.take((ahead.position() - cursor.position()) as u64)?;
        Ok(Self { kind, count, bytes })
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Returns whether the list has no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the elements in order.
    pub fn values(&self) -> impl Iterator<Item = MetaValue<'a>> {
        let (kind, mut cursor) = (self.kind, Cursor::new(self.bytes));
        // `read` checked all elements, so none fails here.
        (0..self.count).map_while(move |_| MetaValue::of(kind, &mut cursor, 1).ok())
    }
}
