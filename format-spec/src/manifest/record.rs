//! The records of a batch: their kinds, and how they are read and written.
//!
//! A record is a header, a fixed part, for some kinds a variable part, and zeros up to a multiple of 8.

use super::body::{
    AdapterDefined, CheckpointEnd, Counters, Fork, Frame, FrameMoved, FrameRef, FrameRelease, LayoutDefined, Member,
    PoolAllocation, Replica, SegmentFree, SegmentOpen, SegmentSeal, SequenceCommit, SequenceCreate, SequenceDelete,
    SequenceTruncate, Superseded,
};
use crate::error::FormatError;
use alloc::vec::Vec;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Record flag: a reader that does not know the kind skips the record.
pub const FLAG_IGNORABLE: u16 = 1;

/// The header of a record. Records start at multiples of 8 from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RecordHeader {
    /// [`Kind`].
    pub kind: U16,
    /// [`FLAG_IGNORABLE`].
    pub flags: U16,
    /// Bytes of the body, without the zeros that pad it to a multiple of 8.
    pub bytes: U32,
}

/// Defines the kinds of records. `bytes` after the fixed part marks a kind with a variable part.
macro_rules! records {
    ($($kind:ident = $code:literal, $name:ident $(, $variable:ident)?;)*) => {
        /// The kinds of records.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Kind { $(#[doc = concat!("[`", stringify!($name), "`]")] $kind = $code),* }

        impl Kind {
            /// Returns the kind with this code, or `None` for an unknown code.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some(Self::$kind),)* _ => None }
            }
        }

        /// A record: its fixed part and, for kinds that have one, its variable part.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Record<'a> {
            $(#[doc = concat!("[`", stringify!($name), "`]")]
            $kind(&'a $name $(, records!(@variable $variable 'a))?),)*
            /// An ignorable record of a kind that this code does not know.
            Unknown(u16),
        }

        /// Views a body as a record of a kind. `base` is the offset of the record.
        fn parse<'a>(kind: Kind, body: &'a [u8], base: usize) -> Result<Record<'a>, FormatError> {
            match kind {
                $(Kind::$kind => {
                    let Ok((fixed, variable)) = $name::ref_from_prefix(body) else {
                        return Err(FormatError::truncated(stringify!($name), size_of::<$name>(), body.len()));
                    };
                    records!(@make $kind fixed variable base $($variable)?)
                })*
            }
        }
    };
    (@variable $variable:ident $life:lifetime) => { &$life [u8] };
    (@make $kind:ident $fixed:ident $rest:ident $base:ident $variable:ident) => { Ok(Record::$kind($fixed, $rest)) };
    (@make $kind:ident $fixed:ident $rest:ident $base:ident) => {
        if $rest.is_empty() {
            Ok(Record::$kind($fixed))
        } else {
            Err(FormatError::range(stringify!($kind), $base, 0, $rest.len() as u64))
        }
    };
}

records! {
    Member = 1, Member;
    Layout = 2, LayoutDefined, bytes;
    SequenceCreate = 3, SequenceCreate, bytes;
    Fork = 4, Fork, bytes;
    SequenceTruncate = 5, SequenceTruncate;
    SequenceDelete = 6, SequenceDelete;
    Frame = 7, Frame;
    FrameMoved = 8, FrameMoved;
    Replica = 9, Replica;
    SegmentOpen = 10, SegmentOpen;
    SegmentSeal = 11, SegmentSeal;
    SegmentFree = 12, SegmentFree;
    PoolAllocation = 13, PoolAllocation;
    SequenceCommit = 14, SequenceCommit;
    Counters = 15, Counters;
    CheckpointEnd = 16, CheckpointEnd;
    Superseded = 17, Superseded;
    FrameRef = 18, FrameRef;
    FrameRelease = 19, FrameRelease;
    Adapter = 20, AdapterDefined, bytes;
}

/// The records of a batch, in order.
///
/// The iterator ends after the first error. Bytes after the last record are an error too.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
    left: u32,
}

impl<'a> Records<'a> {
    /// Returns an iterator over `count` records in `bytes`, as [`encode_record`] wrote them.
    #[must_use]
    pub fn new(bytes: &'a [u8], count: u32) -> Self {
        Self { bytes, at: 0, left: count }
    }

    fn take(&mut self) -> Result<Record<'a>, FormatError> {
        let rest = &self.bytes[self.at..];
        let Ok((header, rest)) = RecordHeader::ref_from_prefix(rest) else {
            return Err(FormatError::truncated("record header", size_of::<RecordHeader>(), rest.len()));
        };
        let bytes = header.bytes.get() as usize;
        let padded = bytes.next_multiple_of(8);
        let Some((body, padding)) = rest.get(..padded).map(|b| b.split_at(bytes)) else {
            return Err(FormatError::truncated("record body", padded, rest.len()));
        };
        crate::verify::check_zeros(padding, "record padding", self.at + size_of::<RecordHeader>() + bytes)?;
        let base = self.at;
        self.at += size_of::<RecordHeader>() + padded;
        let flags = header.flags.get();
        if flags & !FLAG_IGNORABLE != 0 {
            return Err(FormatError::unsupported("record flags", base + 2, 1, u64::from(flags)));
        }
        let code = header.kind.get();
        match Kind::from_code(code) {
            Some(kind) => {
                let record = parse(kind, body, base)?;
                super::check::check(&record, base)?;
                Ok(record)
            }
            None if flags & FLAG_IGNORABLE != 0 => Ok(Record::Unknown(code)),
            None => Err(FormatError::unsupported("record kind", base, 20, u64::from(code))),
        }
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            if self.at == self.bytes.len() {
                return None;
            }
            let extra = self.bytes.len() - self.at;
            self.at = self.bytes.len();
            return Some(Err(FormatError::range("records bytes", self.bytes.len() - extra, 0, extra as u64)));
        }
        self.left -= 1;
        let record = self.take();
        if record.is_err() {
            self.left = 0;
            self.at = self.bytes.len();
        }
        Some(record)
    }
}

/// Appends one record to `out`: header, fixed part, variable part and zeros. `variable` is empty for kinds without one.
pub fn encode_record(out: &mut Vec<u8>, kind: Kind, fixed: &(impl IntoBytes + Immutable), variable: &[u8]) {
    let fixed = fixed.as_bytes();
    let bytes = fixed.len() + variable.len();
    let header = RecordHeader { kind: U16::new(kind as u16), flags: U16::new(0), bytes: U32::new(bytes as u32) };
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(fixed);
    out.extend_from_slice(variable);
    out.resize(out.len().next_multiple_of(8), 0);
}
